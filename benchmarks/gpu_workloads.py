"""The workloads on which GPU kernels are measured."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mx_driving._measure import workloads
from mx_driving._measure.workloads import AGGREGATION, GEOMETRIC, MULTI_SCALE, Args, Workload
from mx_driving._operator.description import OPERATORS

LARGE_DETR = [(100, 167), (50, 84), (25, 42), (13, 21)]  # a 800 x 1333 image at strides 8 to 64


def _join(operator: str, make: Callable[[torch.Generator], Args], g: torch.Generator, bs: int) -> Args:
    """Return the inputs of `bs` different calls of batch 1, joined to one call."""
    shared, inputs = OPERATORS[operator].shared, zip(*(make(g) for _ in range(bs)), strict=True)
    return tuple(t[0] if i in shared or not isinstance(t[0], torch.Tensor) else torch.cat(t) for i, t in enumerate(inputs))


GPU_WORKLOADS = (
    Workload("Encoder, batch 2, 22,223 queries", MULTI_SCALE, lambda g: workloads.draw_encoder(g, LARGE_DETR, 2)),
    Workload("BEVFormer spatial cross-attention, 6 x 9680", MULTI_SCALE, lambda g: workloads.draw_bevformer_spatial(g, 9680)),
    Workload(
        "Decoder, batch 2, 900 queries",
        MULTI_SCALE,
        lambda g: _join(MULTI_SCALE, lambda g: workloads.draw_decoder(g, LARGE_DETR, 900), g, 2),
    ),
    Workload(
        "Sparse4D, batch 6, 900 x 13",
        AGGREGATION,
        lambda g: _join(AGGREGATION, lambda g: workloads.draw_sparse4d(g, 900, 13), g, 6),
    ),
    Workload("MapTR tiny", GEOMETRIC, lambda g: workloads.draw_maptr(g, [(15, 25)], (200, 100), 8)),
)


def _sparse4d_with_logits(g: torch.Generator, bs: int) -> Args:
    make = next(w.make for w in workloads.WITH_LOGITS if w.name.startswith("Sparse4D"))
    return _join(f"{AGGREGATION}_with_logits", make, g, bs)


# The same sizes as the workloads above whose names they begin with.
WITH_LOGITS = (
    Workload(
        "Encoder, batch 2, 22,223 queries, with logits",
        f"{MULTI_SCALE}_with_logits",
        lambda g: workloads.draw_encoder(g, LARGE_DETR, 2, with_logits=True),
    ),
    Workload("Sparse4D, batch 6, 900 x 13, with logits", f"{AGGREGATION}_with_logits", lambda g: _sparse4d_with_logits(g, 6)),
    next(w for w in workloads.WITH_LOGITS if w.name.startswith("MapTR tiny")),
)
