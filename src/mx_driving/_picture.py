"""A figure and axes that a notebook shows as a picture without pyplot. Imports matplotlib, so only viz imports this."""

from __future__ import annotations

import io

from matplotlib.axes import Axes
from matplotlib.figure import Figure


class Picture(Figure):
    """A figure that a notebook shows when it ends a cell."""

    def _repr_png_(self) -> bytes:
        """What IPython asks an object for."""
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


class PictureAxes(Axes):
    """Axes that a notebook shows when they end a cell: with the whole of their figure."""

    def _repr_png_(self) -> bytes | None:
        figure = self.get_figure()
        return figure._repr_png_() if isinstance(figure, Picture) else None
