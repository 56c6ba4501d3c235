"""The native library, loaded once per process, and Python bindings of its C interface (native/include/mx_driving.h).

torch 2.10 and later call the kernels from C++, without Python. Older versions call the kernels through this file, by ctypes.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
import struct
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _needs
from .._operator import checks
from .._operator.composition import autocast_dtype, empty_gradients
from .._operator.description import OPERATORS
from .._operator.rules import flag
from .._package_files import library_path, why_absent

_IMPORTED_IN = os.getpid()
_BY_CTYPES = flag("MX_DRIVING_CTYPES")  # tests and measurements turn it on, so that torch calls the kernels through Python
_OLDEST_STABLE = "2.10"  # the first torch with a stable C interface for kernels
_REGISTER_KERNELS, _REGISTER_NOTHING = 1, 2  # values of enum mxd_torch: what C++ shall register with torch
_FUNCTIONS = (
    "mxd_version",
    *("mxd_run", "mxd_last_error", "mxd_describe_plan"),
    "mxd_register_with_torch",
    *("mxd_isa", "mxd_use_isa", "mxd_threads", "mxd_use_own_threads", "mxd_set_work_of_a_thread"),
)
DTYPES = {torch.float32: 0, torch.float16: 1, torch.int32: 3, torch.int64: 9, torch.float64: 11, torch.bfloat16: 27}
_BAD_LEVEL, _BAD_RANK = 3, 7

# Packers of struct mxd_tensor (data, dtype, shape[6], strides[6]), by number of axes. Unused axes are zero.
_PACK = {n: struct.Struct(f"qq{n}q{8 * (6 - n)}x{n}q{8 * (6 - n)}x").pack for n in range(1, 7)}
_NOT_GIVEN = struct.pack("qq96x", 0, -1)  # for an optional input that is None, or a gradient that is not needed

# The most rows that value may have: a row's index, and the exclusive bound of a range of rows, are 32-bit integers.
MOST_ROWS = 2**31 - 2


@functools.cache
def _load() -> ctypes.CDLL | str:
    """Return the library, or why it cannot be loaded. In the second case, warn once, because the reference is slow."""
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
        # Linux would load a truncated library, and kill the process when it touches a missing part. Linkers write the table of
        # sections last, so the file must reach the table's end. Other systems' loaders check the size. Do not compare size or
        # hash with the build's: strip, patchelf and signatures change both.
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
        library.mxd_register_with_torch(_REGISTER_NOTHING)
    if os.getpid() != _IMPORTED_IN:  # this process was forked before the library could install its fork handler
        library.mxd_use_own_threads(1)
    return library


def why_not() -> str | None:
    """Return why the native kernels cannot be used, or None if they can."""
    library = _load()
    return library if isinstance(library, str) else None


@functools.cache
def why_by_ctypes() -> str | None:
    """Register the kernels with torch in C++. Return None; or, if torch must call the kernels through Python, the reason."""
    if _BY_CTYPES:
        return "MX_DRIVING_CTYPES is on"
    if _needs.is_older_than(_OLDEST_STABLE):
        return f"torch {torch.__version__} is older than {_OLDEST_STABLE}"
    library = _load()
    problem = library if isinstance(library, str) else library.mxd_register_with_torch(_REGISTER_KERNELS)
    return problem.decode() if isinstance(problem, bytes) else problem


@functools.cache
def loaded() -> ctypes.CDLL:
    library = _load()
    if isinstance(library, str):
        raise RuntimeError(library)
    return library


def serves(value: Tensor) -> bool:
    """Return whether indices of value's rows fit in 32 bits. Return True if value has too few axes: the kernel refuses such a
    value."""
    return value.dim() < 2 or value.shape[min(1, value.dim() - 2)] <= MOST_ROWS


def isa() -> str:
    """Return the instruction set in use: "baseline", "avx2" or "avx512"."""
    return loaded().mxd_isa().decode()


def threads() -> str:
    """Return the threads in use: "threads of libgomp.so.1" (torch's OpenMP runtime), or "threads of its own"."""
    return loaded().mxd_threads().decode()


def _pack(t: Tensor | None) -> bytes:
    return _NOT_GIVEN if t is None else _PACK[len(t.shape)](t.data_ptr(), DTYPES[t.dtype], *t.shape, *t.stride())


# run(name of a C function, packed tensors, options) calls the C function and returns the function's status.
Run = Callable[[bytes, list[bytes], Sequence[int]], int]


def _run(name: bytes, tensors: list[bytes], numbers: Sequence[int]) -> int:
    options = (ctypes.c_int64 * len(numbers))(*numbers) if numbers else None
    return loaded().mxd_run(name, b"".join(tensors), len(tensors), options, torch.get_num_threads())


class Kernel:
    """A C function of an operator or of its backward, called with the arguments of the dispatcher.

    Args:
        run: calls the C function.
        autocast: whether the output is that of `<operator>_autocast`, which is not rounded to 16 bits.
    """

    def __init__(self, operator: str, backward: bool, run: Run = _run, autocast: bool = False):
        self.operator, self.backward, self.run, self.autocast = OPERATORS[operator], backward, run, autocast
        self.name = (operator + "_backward" * backward).encode()
        inputs = [t.axes for t in self.operator.tensors]
        axes = [*inputs, self.operator.output]
        if backward:
            axes = [self.operator.output, *inputs, *(inputs[i] for i in self.operator.differentiable)]
        # The tensors whose last axis is a product of two sizes, such as num_heads * channels:
        # index of the tensor -> (its number of axes, the two factors)
        self.products = {i: (len(a), a[-1].split(" * ")) for i, a in enumerate(axes) if " * " in a[-1]}
        self.count, self.choices = len(inputs), tuple(self.operator.choices.values())
        self.first_choice = self.count + len(self.operator.sizes)
        self.numbers = [i for i, t in enumerate(self.operator.tensors) if t.elements == "number"]

    def __call__(self, *args: Any) -> Any:
        grad, mask = (args[0], args[-1]) if self.backward else (None, ())
        args = args[1:-1] if self.backward else args
        inputs, options = args[: self.count], args[self.first_choice :]
        for i in self.numbers:  # convert integer locations of a dtype that the C interface lacks
            if inputs[i].dtype not in DTYPES:
                inputs = (*inputs[:i], inputs[i].to(torch.int64), *inputs[i + 1 :])
        if self.backward:
            results = empty_gradients([inputs[i] for i in self.operator.differentiable], mask)
            tensors = [grad, *inputs, *(g if needed else None for g, needed in zip(results, mask, strict=True))]
        else:
            dtype = autocast_dtype(inputs[0]) if self.autocast else inputs[0].dtype
            results = [torch.empty(checks.output_shape(self.operator, args), dtype=dtype)]
            tensors = [*inputs, *results]

        apart = {}
        for i, (axes, factors) in self.products.items():
            t = tensors[i]
            if t is not None and t.dim() == axes:
                # Pack the tensor as if its last axis were two axes. Making a view of the tensor would take longer.
                sizes = checks.sizes_of(self.operator, inputs)
                (*shape, _), (*strides, last) = t.shape, t.stride()
                outer, inner = (sizes[factor] for factor in factors)
                address = t.data_ptr(), DTYPES[t.dtype]
                apart[i] = _PACK[axes + 1](*address, *shape, outer, inner, *strides, inner * last, last)
                tensors[i] = None
        packed = [*map(_pack, tensors)]
        for i, t in apart.items():
            packed[i] = t
        numbers = [words.index(word) for words, word in zip(self.choices, options, strict=True)] if options else ()
        status = self.run(self.name, packed, numbers)
        if status in (_BAD_LEVEL, _BAD_RANK):
            checks.check_numbers(self.operator, (*inputs, *args[self.count : self.first_choice]))
        if status:
            raise RuntimeError(f"the native kernel of {self.operator.name}: {loaded().mxd_last_error().decode()}")
        return tuple(results) if self.backward else results[0]
