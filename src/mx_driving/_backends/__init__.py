"""What computes: the native library on a CPU, Triton on a GPU.

Import loads the native library where torch calls it from C++. Nothing else is loaded or compiled before the first call.
"""

from . import native, triton

__all__ = ["native", "triton"]
