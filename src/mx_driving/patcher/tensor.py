"""The vendor's import path of patches of torch."""

from ._patcher import batch_matmul, index

__all__ = ["batch_matmul", "index"]
