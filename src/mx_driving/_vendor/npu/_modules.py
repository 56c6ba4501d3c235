"""The small modules of torch_npu: `npu.amp`, `npu.utils`, `optim`. Each is a table of its names."""

from __future__ import annotations

import functools
from typing import Any

import torch


class autocast(torch.autocast):
    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True) -> None:
        super().__init__("cpu", enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)


class GradScaler(torch.amp.GradScaler):
    def __init__(self, *args: Any, **named: Any) -> None:
        named.pop("dynamic", None)  # the vendor's, for scales that do not change
        super().__init__("cpu", *args, **named)


class _ClipsGradients:
    param_groups: list[dict[str, Any]]

    def clip_grad_norm_fused_(self, max_norm: float = 1.0, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm is max_norm at most. Return the norm before."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


_FUSED = {f"NpuFused{name}": getattr(torch.optim, name) for name in ("SGD", "Adam", "AdamW")}
OPTIM = {name: type(name, (_ClipsGradients, optimizer), {}) for name, optimizer in _FUSED.items()}
AMP = {
    "autocast": autocast,
    "GradScaler": GradScaler,
    "custom_fwd": functools.partial(torch.amp.custom_fwd, device_type="cpu"),
    "custom_bwd": functools.partial(torch.amp.custom_bwd, device_type="cpu"),
}
UTILS = {
    "get_soc_version": lambda: 220,  # the vendor's number of an Ascend910B
    "is_support_inf_nan": lambda: True,
}
