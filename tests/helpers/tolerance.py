"""The allowed distance of a result from float64 truth in numpy: `mx_driving._agreement.rounding_limit`."""

import numpy as np
import torch

from mx_driving import _agreement


def allowed(result_dtype, compute_dtype, true: np.ndarray, scale: np.ndarray, terms: int, extent: int):
    magnitude = torch.from_numpy(np.abs(np.where(np.isfinite(true), true, 0)))
    return np.asarray(_agreement.rounding_limit(result_dtype, compute_dtype, magnitude, scale.max(initial=0.0), terms, extent))
