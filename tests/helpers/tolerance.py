"""How far from float64 truth a result may be, and why.

Errors are measured against the sum of the absolute values of the terms (truth.py's scales), because rounding in a sum is
proportional to that, whatever cancels. The inputs are rounded to the dtype before truth is computed from them, so only
arithmetic is judged:
- arithmetic in float32 or float64: a sum of n terms in any order loses at most about n ulps and typically sqrt(n); terms
  are products of at most five factors; 16 ulps + 2 sqrt(n) covers it;
- a position is a product and a difference: its error of about an ulp of the map's size moves shares of one corner to the
  next, so the error grows with the largest extent in pixels;
- the result is rounded once to its own dtype: half an ulp of the result.
"""

from __future__ import annotations

import numpy as np
import torch


def allowed(
    result_dtype: torch.dtype, compute_dtype: torch.dtype, true: np.ndarray, scale: np.ndarray, terms: int, extent: int
):
    ulp = torch.finfo(compute_dtype).eps
    rounding = torch.finfo(result_dtype).eps / 2 if result_dtype != compute_dtype else 0.0
    tiny = torch.finfo(result_dtype).tiny * 2.0**-9 if result_dtype == torch.float16 else 0.0
    arithmetic = ulp * (16 + 2 * np.sqrt(terms) + 2 * extent)
    return arithmetic * scale.max(initial=0.0) + rounding * np.abs(np.where(np.isfinite(true), true, 0)) + tiny
