"""The path of the native library. The path is not in config.py, because `python -m mx_driving.config` warns if config.py is
imported already."""

from __future__ import annotations

import pathlib
import sys


def library_path() -> pathlib.Path:
    """Return the path of the shared library: beside this file, or in the other folder of an editable installation."""
    suffix = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
    name = ("" if sys.platform == "win32" else "lib") + "mx_driving" + suffix
    paths = [pathlib.Path(folder, name) for folder in sys.modules["mx_driving"].__path__]
    return next((path for path in paths if path.exists()), paths[0])
