"""`torch_npu.optim`: the fused optimizers are torch's, with the method that clips all gradients at once."""

from __future__ import annotations

from typing import Any

import torch


class _Clips:
    param_groups: list[dict[str, Any]]

    def clip_grad_norm_fused_(self, max_norm: float = 1.0, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm is max_norm at most. Returns the norm before."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


class NpuFusedSGD(_Clips, torch.optim.SGD):
    pass


class NpuFusedAdam(_Clips, torch.optim.Adam):
    pass


class NpuFusedAdamW(_Clips, torch.optim.AdamW):
    pass
