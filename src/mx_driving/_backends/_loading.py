"""Load the native library once per process, or return why it cannot be loaded."""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
import struct
import sys
import warnings

import torch

from .. import _needs
from .._operator.rules import flag
from .._package_files import library_path, why_absent

_IMPORTED_IN = os.getpid()
_BY_CTYPES = flag("MX_DRIVING_CTYPES")  # tests and measurements turn it on, so that torch calls the kernels through Python
_OLDEST_STABLE = "2.10"  # the first torch with a stable C interface for kernels
_KERNELS, _NOTHING = 1, 2  # values of enum mxd_torch: what C++ shall register with torch
_FUNCTIONS = (
    "mxd_version",
    *("mxd_run", "mxd_last_error", "mxd_describe_plan"),
    "mxd_register_with_torch",
    *("mxd_isa", "mxd_use_isa", "mxd_threads", "mxd_use_own_threads", "mxd_set_work_of_a_thread"),
)


@functools.cache
def _load() -> ctypes.CDLL | str:
    """Return the library, or why it cannot be loaded. Warn once in the latter case, because the reference is slow."""
    library = _try_to_load(library_path())
    if isinstance(library, str):
        warnings.warn(
            f"mx_driving computes with plain PyTorch on a CPU, which is slow: {library}", RuntimeWarning, stacklevel=2
        )
    return library


def _try_to_load(path: pathlib.Path) -> ctypes.CDLL | str:
    if not path.exists():
        return why_absent(path)
    try:
        # Linux would load a library that ends too early, and kill the process when it touches a missing part. Linkers write the
        # table of sections last. Loaders of other systems check the size themselves. Do not compare size or hash with the
        # build's: strip, patchelf and signatures change both.
        with path.open("rb") as file:
            header = file.read(64)
        if len(header) == 64 and header[:5] == b"\x7fELF\2":
            table, entry_bytes, entries = struct.unpack("=40xQ10xHH2x", header)
            if path.stat().st_size < table + entry_bytes * entries:
                return f"{path.name} is damaged: it ends before what its header promises"
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return f"{path.name} cannot be loaded: {error}"
    missing = next((function for function in _FUNCTIONS if not hasattr(library, function)), None)
    if missing:
        return f"{path.name} is not this package's, or older: it has no function {missing}"
    texts = ("mxd_version", "mxd_isa", "mxd_threads", "mxd_last_error", "mxd_register_with_torch")
    for function in (getattr(library, text) for text in texts):
        function.restype = ctypes.c_char_p
    built, version = library.mxd_version().decode(), sys.modules["mx_driving"].__version__
    if built != version:
        return f"{path.name} was built for version {built} of the package, which is {version}"
    if _BY_CTYPES:
        library.mxd_register_with_torch(_NOTHING)
    if os.getpid() != _IMPORTED_IN:  # this process was forked before the library could install its fork handler
        library.mxd_use_own_threads(1)
    return library


def why_not() -> str | None:
    """Return why the native kernels cannot be used, or None if they can."""
    library = _load()
    return library if isinstance(library, str) else None


@functools.cache
def why_by_ctypes() -> str | None:
    """Register the kernels with torch in C++. Return None, or why this is impossible and torch calls them through Python."""
    if _BY_CTYPES:
        return "MX_DRIVING_CTYPES is on"
    if _needs.is_older_than(_OLDEST_STABLE):
        return f"torch {torch.__version__} is older than {_OLDEST_STABLE}"
    library = _load()
    problem = library if isinstance(library, str) else library.mxd_register_with_torch(_KERNELS)
    return problem.decode() if isinstance(problem, bytes) else problem


@functools.cache
def loaded() -> ctypes.CDLL:
    library = _load()
    if isinstance(library, str):
        raise RuntimeError(library)
    return library
