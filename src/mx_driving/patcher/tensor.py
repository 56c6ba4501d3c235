"""The vendor's import path for patches of torch."""

from ._patcher import batch_matmul, index

__all__ = ["batch_matmul", "index"]
