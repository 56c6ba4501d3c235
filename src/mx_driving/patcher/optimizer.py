"""The vendor's patches of optimizers' hooks."""

from ._needless import FASTER, leaves

__all__ = ["optimizer_hooks", "optimizer_wrapper"]

optimizer_hooks = leaves("optimizer_hooks", FASTER, __name__)
optimizer_wrapper = leaves("optimizer_wrapper", FASTER, __name__)
