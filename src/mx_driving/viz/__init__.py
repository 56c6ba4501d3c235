"""Where models look: `recording()` keeps the inputs of operator calls, `page` writes a page that shows their samples, and
`sampling_points` and `bev` draw with matplotlib.

Pages and drawings need `pip install '.[demo]'`, in the clone.
"""

from __future__ import annotations

from ._draw import COLOURS, bev, sampling_points
from ._looks import Look, Looks, recording
from ._page import Plane, page

__all__ = ["COLOURS", "Look", "Looks", "Plane", "bev", "page", "recording", "sampling_points"]
