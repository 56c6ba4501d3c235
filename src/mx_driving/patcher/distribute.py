"""The vendor's import path for patches of distributed training."""

from ._patcher import ddp, ddp_forward

__all__ = ["ddp", "ddp_forward"]
