"""What computes: the native library on a CPU, Triton on a GPU. Nothing is loaded or compiled before the first call."""

from . import native, triton

__all__ = ["native", "triton"]
