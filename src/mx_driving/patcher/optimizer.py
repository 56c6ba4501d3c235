"""The vendor's import path for patches of optimizers' hooks."""

from ._patcher import optimizer_hooks, optimizer_wrapper

__all__ = ["optimizer_hooks", "optimizer_wrapper"]
