"""The backends: the native library on a CPU, Triton on a GPU.

If torch calls the native library from C++, importing this package loads the library. Otherwise the first call loads it.
The first call on a GPU imports Triton.
"""

from . import native, triton

__all__ = ["native", "triton"]
