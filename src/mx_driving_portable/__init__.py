"""Is the package `mx_driving` here ours?

The vendor's distribution `mx-driving` has the same import name, and eight of its files, `__init__.py` among them, have the
paths of ours. The later installation overwrites them, and uninstalling either removes them. After that `import mx_driving`
runs the vendor's `__init__.py` or none at all, so nothing inside `mx_driving` could say what is the matter. This package has
a name of its own and looks at the files; command.py imports `mx_driving` only after that.

An editable installation records no Python file: nothing of it can be overwritten, and none is looked at.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.metadata
import pathlib

__all__ = ["beside", "lost_files"]

_OURS, _VENDORS = "mx-driving-portable", "mx-driving"
_REMEDY = f"run `pip uninstall {_VENDORS} {_OURS}`, then install the one that you want"


def _distribution(name: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _paths(distribution: importlib.metadata.Distribution | None) -> list[importlib.metadata.PackagePath]:
    """Its Python files as pip recorded them: none if it is not installed, or not by pip."""
    files = distribution.files if distribution else None
    return [file for file in files or () if file.suffix == ".py" and file.parts[0] == "mx_driving"]


def _as_recorded(file: importlib.metadata.PackagePath) -> bool:
    if file.hash is None:
        return True
    digest = hashlib.new(file.hash.mode, pathlib.Path(file.locate()).read_bytes()).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=") == file.hash.value


@functools.cache
def lost_files() -> tuple[str, ...]:
    """Our files that are missing, and those with other content at a path that the vendor's distribution has, too.

    Other changes are somebody's own, such as a line for debugging.
    """
    theirs = {str(file) for file in _paths(_distribution(_VENDORS))}
    ours = {str(file): file for file in _paths(_distribution(_OURS))}
    return tuple(
        name
        for name, file in ours.items()
        if not pathlib.Path(file.locate()).exists() or (name in theirs and not _as_recorded(file))
    )


@functools.cache
def beside() -> str | None:
    """What the vendor's distribution does to ours here, and what to do about it, in one sentence; None if all is well."""
    vendor, lost = _distribution(_VENDORS), lost_files()
    distribution = f"the vendor's {_VENDORS} {vendor.version}" if vendor else f"the vendor's {_VENDORS}"
    if lost:
        return f"{distribution} replaced or removed files of {_OURS} ({len(lost)}, {next(iter(lost))} first): {_REMEDY}"
    if vendor:
        return f"{distribution} is installed under the same import name, and uninstalling one breaks the other: {_REMEDY}"
    return None
