"""Raise ImportError if the package's `__init__.py` is the vendor's or is missing: see the package mx_driving_portable."""

from __future__ import annotations

import sys

if getattr(sys.modules["mx_driving"], "__distribution__", None) != "mx-driving-portable":
    import mx_driving_portable

    raise ImportError(mx_driving_portable.beside() or "mx_driving/__init__.py is not mx-driving-portable's: install that again")
