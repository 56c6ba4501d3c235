"""`torch.npu.amp`: autocast and GradScaler of the CPU."""

from __future__ import annotations

from typing import Any

import torch


class autocast(torch.autocast):
    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True) -> None:
        super().__init__("cpu", enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)


class GradScaler(torch.amp.GradScaler):
    def __init__(self, *args: Any, **named: Any) -> None:
        named.pop("dynamic", None)  # the vendor's, for scales that do not change
        super().__init__("cpu", *args, **named)
