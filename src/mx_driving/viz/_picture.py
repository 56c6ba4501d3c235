"""A figure and axes that notebooks show as a picture, without pyplot. Imported at the first drawing: matplotlib is optional."""

from __future__ import annotations

import io

from matplotlib.axes import Axes
from matplotlib.figure import Figure


class Picture(Figure):
    """A figure that a notebook shows if a cell ends with it."""

    def _repr_png_(self) -> bytes:
        """Return the picture that IPython shows for this figure."""
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


class PictureAxes(Axes):
    """Axes. A notebook shows their whole figure if a cell ends with them."""

    def _repr_png_(self) -> bytes | None:
        figure = self.get_figure()
        return figure._repr_png_() if isinstance(figure, Picture) else None
