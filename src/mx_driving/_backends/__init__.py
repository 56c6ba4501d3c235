"""The backends: the native library on a CPU, Triton on a GPU.

If torch calls the native library from C++, importing this package loads it. Everything else waits for the first call.
"""

from . import native, triton

__all__ = ["native", "triton"]
