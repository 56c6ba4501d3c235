"""Find files of our package `mx_driving` that the vendor's distribution replaced or removed.

The vendor's distribution `mx-driving` has the same import name, and eight of its files, such as `__init__.py`, have the paths
of our files. The later installation overwrites these files, and uninstalling either distribution removes them. Then `import
mx_driving` runs the vendor's `__init__.py` or none, so no code inside `mx_driving` can report the loss. This package has its
own name, and compares the files with pip's record. command.py imports `mx_driving` only after this comparison.

pip's record of an editable installation has no Python files, so there is nothing to compare.
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


@functools.cache
def lost_files() -> tuple[str, ...]:
    """Return our files that are missing, and our files that have changed and whose path the vendor's distribution has, too.

    A changed file at another path is somebody's own change, such as a line for debugging.
    """
    listed, lost = [], []
    for name in (_OURS, _VENDORS):  # the Python files that pip recorded, by name; none if pip did not install the distribution
        distribution = next(iter(importlib.metadata.distributions(name=name)), None)
        files = (distribution.files if distribution else None) or ()
        listed.append({str(file): file for file in files if file.suffix == ".py" and file.parts[0] == "mx_driving"})
    ours, theirs = listed
    for name, file in ours.items():
        path, is_lost = pathlib.Path(file.locate()), False
        if not path.exists():
            is_lost = True
        elif name in theirs and file.hash is not None:
            digest = hashlib.new(file.hash.mode, path.read_bytes()).digest()
            is_lost = base64.urlsafe_b64encode(digest).decode().rstrip("=") != file.hash.value
        lost += [name] * is_lost
    return tuple(lost)


@functools.cache
def beside() -> str | None:
    """Return a sentence that says how the vendor's distribution harms ours, with a remedy; None if all is well."""
    vendor, lost = next(iter(importlib.metadata.distributions(name=_VENDORS)), None), lost_files()
    distribution = f"the vendor's {_VENDORS} {vendor.version}" if vendor else f"the vendor's {_VENDORS}"
    if lost:
        return f"{distribution} replaced or removed files of {_OURS} ({len(lost)}, {next(iter(lost))} first): {_REMEDY}"
    if vendor:
        return f"{distribution} is installed under the same import name, and uninstalling one breaks the other: {_REMEDY}"
    return None
