"""Where models look: `recording()` keeps the inputs of operator calls; `page` writes a page that shows them, and
`sampling_points` and `bev` draw.

Pages and drawings need `pip install '.[demo]'`, in the clone.
"""

from __future__ import annotations

from ._draw import COLOURS, bev, sampling_points
from ._looks import Look, recording
from ._page import Plane, page

__all__ = ["COLOURS", "Look", "Plane", "bev", "page", "recording", "sampling_points"]
