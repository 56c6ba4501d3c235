"""The native library: the C interface (native/include/mx_driving.h) as Python sees it.

torch 2.10 and later call its kernels from C++, without Python. Older ones call them through this file, by ctypes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import pathlib
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from .. import _checks
from .._checks.flags import flag
from .._library_path import library_path
from .._operators import OPERATORS, Operator, gradients

_DTYPE = {
    torch.float32: 0,
    torch.float16: 1,
    torch.int32: 3,
    torch.int64: 9,
    torch.float64: 11,
    torch.bfloat16: 27,
}
_ISAS = ("baseline", "avx2", "avx512")
_BAD_LEVEL, _BAD_RANK = 3, 7

# struct mxd_tensor: data, dtype, shape[6], strides[6]; one packer for each number of axes, the unused axes zero
_PACK = {n: struct.Struct(f"qq{n}q{8 * (6 - n)}x{n}q{8 * (6 - n)}x").pack for n in range(1, 7)}


_NOT_GIVEN = struct.pack("qq96x", 0, -1)
_IMPORTED_IN = os.getpid()
_BY_CTYPES = flag("MX_DRIVING_CTYPES")  # for tests and measurements
_OLDEST_STABLE = (2, 10)
_KERNELS, _NOTHING = 1, 2  # enum mxd_torch: what is registered in C++


@functools.cache
def _load() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    path = library_path()
    if not path.exists():
        return f"{path.name} is not in the package: it was not built or not installed"
    try:
        if _is_cut_off(path):
            return f"{path.name} is damaged: it ends before what its header promises"
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return f"{path.name} cannot be loaded: {error}"
    problem = _not_ours(path.name, library)
    if problem:
        return problem
    if _BY_CTYPES:
        library.mxd_register_with_torch(_NOTHING)
    if os.getpid() != _IMPORTED_IN:  # a fork came first, and the library had no fork handler then
        library.mxd_use_own_threads(1)
    return library


_ELF_SEGMENT = "I4xQ16xQ16x"  # a program header: type, offset in the file, size in the file
_ELF_LOADED = 1


def _is_cut_off(path: pathlib.Path) -> bool:
    """Whether a Linux library is shorter than what is mapped of it, which kills the process that touches the rest. The loaders
    of other systems look themselves, and so does this one for everything else.

    Neither size nor hash would do: strip, patchelf and signatures change them after the build.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(64)
        if len(head) < 64 or head[:5] != b"\x7fELF\2":
            return False
        order = "<" if head[5] == 1 else ">"
        (first,), (length, count) = struct.unpack_from(order + "Q", head, 32), struct.unpack_from(order + "HH", head, 54)
        if length != struct.calcsize(order + _ELF_SEGMENT):
            return False
        if first + length * count > size:
            return True
        file.seek(first)
        segments = struct.iter_unpack(order + _ELF_SEGMENT, file.read(length * count))
    return any(kind == _ELF_LOADED and offset + held > size for kind, offset, held in segments)


_FUNCTIONS = (
    "mxd_version",
    *("mxd_run", "mxd_last_error", "mxd_describe_plan"),
    "mxd_register_with_torch",
    *("mxd_isa", "mxd_use_isa", "mxd_threads", "mxd_use_own_threads", "mxd_set_work_of_a_thread"),
)


def _not_ours(name: str, library: ctypes.CDLL) -> str | None:
    """Why a library that could be loaded is not that of this package, or None when it is."""
    missing = next((function for function in _FUNCTIONS if not hasattr(library, function)), None)
    if missing:
        return f"{name} is not this package's, or older: it has no function {missing}"
    texts = ("mxd_version", "mxd_isa", "mxd_threads", "mxd_last_error", "mxd_register_with_torch")
    for function in (getattr(library, text) for text in texts):
        function.restype = ctypes.c_char_p
    built, version = library.mxd_version().decode(), sys.modules["mx_driving"].__version__
    return None if built == version else f"{name} was built for version {built} of the package, which is {version}"


def why_not() -> str | None:
    """Why the native kernels cannot be used, or None when they can."""
    library = _load()
    return library if isinstance(library, str) else None


@functools.cache
def why_by_ctypes() -> str | None:
    """Why torch calls the kernels through Python, or None when they are registered with it in C++, which this does."""
    if _BY_CTYPES:
        return "MX_DRIVING_CTYPES is on"
    if tuple(map(int, torch.__version__.split(".")[:2])) < _OLDEST_STABLE:
        return f"torch {torch.__version__} is older than 2.10"
    library = _load()
    problem = library if isinstance(library, str) else library.mxd_register_with_torch(_KERNELS)
    return problem.decode() if isinstance(problem, bytes) else problem


@functools.cache
def _library() -> ctypes.CDLL:
    library = _load()
    if isinstance(library, str):
        raise RuntimeError(library)
    return library


# Rows are numbered in 32 bits, and a bound is one number more.
_MOST_ROWS = 2**31 - 2


def serves(value: Tensor) -> bool:
    """A value of more rows goes to the reference."""
    return value.shape[min(1, value.dim() - 2)] <= _MOST_ROWS


def isa() -> str:
    """The instruction set in use: "baseline", "avx2" or "avx512"."""
    return _library().mxd_isa().decode()


def available_isas() -> tuple[str, ...]:
    """The instruction sets that this build and this machine both have, best last."""
    before = isa()
    found = tuple(name for name in _ISAS if _library().mxd_use_isa(name.encode()) == 0)
    _library().mxd_use_isa(before.encode())
    return found


@contextlib.contextmanager
def use_isa(name: str) -> Iterator[None]:
    """Run with another instruction set (for tests and measurements). Process-wide."""
    before = isa()
    if _library().mxd_use_isa(name.encode()):
        raise ValueError(f"isa must be one of {available_isas()}; got {name!r}")
    try:
        yield
    finally:
        _library().mxd_use_isa(before.encode())


def threads() -> str:
    """Whose threads a call with several runs on: "threads of libgomp.so.1", torch's OpenMP runtime, or "threads of its own".
    Starts no thread.
    """
    return _library().mxd_threads().decode()


def _pack(t: Tensor | None) -> bytes:
    if t is None:
        return _NOT_GIVEN
    shape = t.shape
    return _PACK[len(shape)](t.data_ptr(), _DTYPE[t.dtype], *shape, *t.stride())


def _pack_apart(t: Tensor, sizes: tuple[int, ...]) -> bytes:
    """A tensor whose last axis is the product of two, with an axis for each; no view of the tensor is made."""
    *shape, _ = t.shape
    *strides, last = t.stride()
    return _PACK[len(shape) + 2](t.data_ptr(), _DTYPE[t.dtype], *shape, *sizes, *strides, sizes[1] * last, last)


# Runs a C function: its name, its tensors, and its other numbers -> a status
Run = Callable[[bytes, list[bytes], Sequence[int]], int]


def _run(name: bytes, tensors: list[bytes], numbers: Sequence[int]) -> int:
    options = (ctypes.c_int64 * len(numbers))(*numbers) if numbers else None
    return _library().mxd_run(name, b"".join(tensors), len(tensors), options, torch.get_num_threads())


class _Function:
    """A C function of an operator, of the tensors and options that the dispatcher has."""

    def __init__(self, operator: Operator, backward: bool, run: Run):
        self.operator, self.run = operator, run
        self.name = (operator.name + "_backward" * backward).encode()
        self.output_shape = _checks.inputs.OUTPUT_SHAPE[operator.name]
        inputs = [t.axes for t in operator.tensors]
        axes = [*inputs, operator.output]
        if backward:
            axes = [operator.output, *inputs, *(inputs[i] for i in operator.differentiable)]
        # place of a tensor whose last axis is a product -> the number of its axes, and the sizes of the factors
        self.products = {
            place: (len(a), _checks.inputs.sizes_of(operator, a[-1].split(" * ")))
            for place, a in enumerate(axes)
            if " * " in a[-1]
        }
        self.count, self.choices = len(inputs), tuple(operator.choices.values())
        self.first_choice = self.count + len(operator.sizes)
        self.has_options = bool(operator.options)
        self.numbers = [i for i, t in enumerate(operator.tensors) if t.elements == "number"]

    def call(self, inputs: Sequence[Any], options: Sequence[str], tensors: list[Tensor | None]) -> None:
        apart = {}
        for place, (axes, factors) in self.products.items():
            t = tensors[place]
            if t is not None and t.dim() == axes:
                apart[place], tensors[place] = _pack_apart(t, factors(*inputs)), None
        packed = [*map(_pack, tensors)]
        for place, t in apart.items():
            packed[place] = t
        numbers = [known.index(o) for known, o in zip(self.choices, options, strict=True)] if options else ()
        status = self.run(self.name, packed, numbers)
        if status:
            _refuse(status, self.operator, inputs)

    def split(self, args: tuple[Any, ...]) -> tuple[Sequence[Any], Sequence[str]]:
        """The inputs, integer locations in a dtype that the C interface has, and the options."""
        inputs = args[: self.count]
        for i in self.numbers:
            if inputs[i].dtype not in _DTYPE:
                inputs = (*inputs[:i], inputs[i].to(torch.int64), *inputs[i + 1 :])
        return inputs, args[self.first_choice :]


class _Forward(_Function):
    def __call__(self, *args: Any) -> Tensor:
        inputs, options = self.split(args) if self.numbers or self.has_options else (args, ())
        output = torch.empty(self.output_shape(*args), dtype=inputs[0].dtype)
        self.call(inputs, options, [*inputs, output])
        return output


class _Backward(_Function):
    def __call__(self, grad: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        (inputs, options), mask = self.split(rest[:-1]), rest[-1]
        found = gradients([inputs[i] for i in self.operator.differentiable], mask)
        wanted = [g if needed else None for g, needed in zip(found, mask, strict=True)]
        self.call(inputs, options, [grad, *inputs, *wanted])
        return tuple(found)


def _refuse(status: int, operator: Operator, inputs: Sequence[Any]) -> NoReturn:
    sentence = _library().mxd_last_error().decode()
    if status == _BAD_LEVEL:
        _checks.inputs.contents(operator, inputs)
    if status == _BAD_RANK:
        raise ValueError(sentence)
    raise RuntimeError(f"the native kernel of {operator.name}: {sentence}")


def kernel(operator: str, backward: bool, run: Run = _run) -> Callable[..., Any]:
    """The kernel of an operator: of its inputs; or of a gradient, the inputs, and which gradients are wanted."""
    return (_Backward if backward else _Forward)(OPERATORS[operator], backward, run)


def describe_plan(operator: str, inputs: Sequence[Any], mask: list[bool] | None = None) -> dict[str, str]:
    """How a call would be done: each decision by its name, as mxd_describe_plan writes it.

    Args:
        inputs: the operator's inputs, and its options.
        mask: which gradients are wanted; None for the forward direction.
    """
    text = ctypes.create_string_buffer(1024)

    def describe(name: bytes, tensors: list[bytes], numbers: Sequence[int]) -> int:
        pointers = (ctypes.c_char_p * len(tensors))(*(None if t is _NOT_GIVEN else t for t in tensors))
        return _library().mxd_describe_plan(name, pointers, -torch.get_num_threads(), text, len(text))

    if mask is None:
        kernel(operator, False, describe)(*inputs)
    else:
        grad = torch.empty(_checks.inputs.OUTPUT_SHAPE[operator](*inputs), dtype=inputs[0].dtype)
        kernel(operator, True, describe)(grad, *inputs, mask)
    return dict(line.split(": ", 1) for line in text.value.decode().splitlines())
