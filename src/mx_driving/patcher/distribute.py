"""The vendor's patches of distributed training."""

from ._needless import leaves

__all__ = ["ddp", "ddp_forward"]

ddp = leaves("ddp", "is for several Ascend devices", __name__)
ddp_forward = leaves("ddp_forward", "is for several Ascend devices", __name__)
