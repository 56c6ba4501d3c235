"""Show where models look: `recording()` keeps the inputs of operator calls, `page` writes an HTML page with the samples of
these calls, and `sampling_points` and `bev` draw with matplotlib.

Pages and drawings need `pip install '.[demo]'`, in a clone of the repository.
"""

from __future__ import annotations

from ._draw import COLOURS, bev, sampling_points
from ._looks import Look, Looks, recording
from ._page import Plane, page

__all__ = ["COLOURS", "Look", "Looks", "Plane", "bev", "page", "recording", "sampling_points"]
