"""`torch.npu.utils`: what mmengine calls."""

from __future__ import annotations


def get_soc_version() -> int:
    """The vendor's number of an Ascend910B."""
    return 220


def is_support_inf_nan() -> bool:
    return True
