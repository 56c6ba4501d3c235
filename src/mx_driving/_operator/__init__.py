"""The definition of the operators: descriptions, checks, limits, geometry and composition. There are no kernels here.

Nearly every module imports this package first, so the check is here: raise ImportError if `mx_driving/__init__.py` is the
vendor's or is missing (see the package mx_driving_portable).
"""

import sys as _sys

if getattr(_sys.modules["mx_driving"], "__distribution__", None) != "mx-driving-portable":
    import mx_driving_portable

    raise ImportError(mx_driving_portable.beside() or "mx_driving/__init__.py is not mx-driving-portable's: install that again")
