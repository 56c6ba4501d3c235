"""Where the native library lies. A file of its own, because `python -m mx_driving.config` must not find config imported."""

from __future__ import annotations

import pathlib
import sys


def library_path() -> pathlib.Path:
    """The shared library: beside this file, or, in an editable installation, in the package's other folder."""
    suffix = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
    name = ("" if sys.platform == "win32" else "lib") + "mx_driving" + suffix
    places = [pathlib.Path(folder, name) for folder in sys.modules["mx_driving"].__path__]
    return next((place for place in places if place.exists()), places[0])
