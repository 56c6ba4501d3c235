"""How far from float64 truth a result may be, and why.

Errors are measured against the sum of the absolute values of the terms, because rounding in a sum is proportional to that,
whatever cancels. The inputs are rounded to the dtype before truth is computed from them, so only arithmetic is judged:
- arithmetic in float32 or float64: a sum of n terms in any order loses at most about n ulps and typically sqrt(n); terms
  are products of at most five factors; 16 ulps + 2 sqrt(n) covers it;
- a position is a product and a difference: its error of about an ulp of the map's size moves coefficients of one corner to the
  next, so the error grows with the largest extent in pixels;
- the result is rounded once to its own dtype: half an ulp of the result.

The tests use it with truth in numpy. `mx-driving replay` uses it with truth in torch, and with the largest entry as the scale,
which is at most that sum.
"""

from __future__ import annotations

from typing import Any

import torch


def allowed(
    result_dtype: torch.dtype, compute_dtype: torch.dtype, magnitude: Any, scale: float, terms: int, extent: int
) -> Any:
    """Return the allowed error of each entry.

    Args:
        result_dtype: of the result.
        compute_dtype: of the arithmetic.
        magnitude: absolute values of the true result, an array or a tensor; 0 where it is not finite.
        scale: the largest sum of absolute values of terms.
        terms: how many terms a sum has.
        extent: the largest side of a map in pixels; 0 if no position is computed.
    """
    rounding = torch.finfo(result_dtype).eps / 2 if result_dtype != compute_dtype else 0.0
    tiny = torch.finfo(result_dtype).tiny * 2.0**-9 if result_dtype == torch.float16 else 0.0
    arithmetic = torch.finfo(compute_dtype).eps * (16 + 2 * terms**0.5 + 2 * extent)
    return arithmetic * scale + rounding * magnitude + tiny
