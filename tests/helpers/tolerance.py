"""`mx_driving._measure.tolerance`, which says how far from float64 truth a result may be and why, for truth in numpy."""

from __future__ import annotations

import numpy as np
import torch

from mx_driving._measure import tolerance


def allowed(
    result_dtype: torch.dtype, compute_dtype: torch.dtype, true: np.ndarray, scale: np.ndarray, terms: int, extent: int
):
    magnitude = np.abs(np.where(np.isfinite(true), true, 0))
    return tolerance.allowed(result_dtype, compute_dtype, magnitude, scale.max(initial=0.0), terms, extent)
