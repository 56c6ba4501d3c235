"""The C interface (native/include/mx_driving.h) as Python sees it. Loaded at the first call, not at import."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import pathlib
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _checks
from .._operators import LOCATIONS, OPERATORS, STARTS, gradients

_DTYPE = {
    torch.float32: 0,
    torch.float16: 1,
    torch.int32: 3,
    torch.int64: 9,
    torch.float64: 11,
    torch.bfloat16: 27,
}
_ISAS = ("baseline", "avx2", "avx512")
_BAD_LEVEL = 3
_STATUS = {
    1: "shapes that do not agree, or 2**48 elements or more",
    2: "a dtype it has no kernel for",
    4: "not enough memory for its scratch buffers",
    6: "a tensor without memory for its elements, or results that share memory",
}

# struct mxd_tensor: data, dtype, shape[6], strides[6]; one packer for each number of axes, the unused axes zero
_PACK = {n: struct.Struct(f"qq{n}q{8 * (6 - n)}x{n}q{8 * (6 - n)}x").pack for n in range(1, 7)}


_IMPORTED_IN = os.getpid()


def _library_path() -> pathlib.Path:
    from ..config import library_path  # not before, or runpy warns of a config that it finds imported

    return library_path()


@functools.cache
def _load() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    path = _library_path()
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
    *("mxd_isa", "mxd_use_isa", "mxd_threads", "mxd_use_own_threads", "mxd_describe_plan"),
    *(f"mxd_{o.name}{direction}" for o in OPERATORS.values() if not o.bare for direction in ("", "_backward")),
)


def _not_ours(name: str, library: ctypes.CDLL) -> str | None:
    """Why a library that could be loaded is not that of this package, or None when it is."""
    missing = next((function for function in _FUNCTIONS if not hasattr(library, function)), None)
    if missing:
        return f"{name} is not this package's, or older: it has no function {missing}"
    library.mxd_version.restype = library.mxd_isa.restype = library.mxd_threads.restype = ctypes.c_char_p
    built, version = library.mxd_version().decode(), sys.modules["mx_driving"].__version__
    return None if built == version else f"{name} was built for version {built} of the package, which is {version}"


def why_not() -> str | None:
    """Why the native kernels cannot be used, or None when they can."""
    library = _load()
    return library if isinstance(library, str) else None


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
    return value.shape[1] <= _MOST_ROWS


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


def _pack(t: Tensor) -> bytes:
    shape = t.shape
    return _PACK[len(shape)](t.data_ptr(), _DTYPE[t.dtype], *shape, *t.stride())


def _pack_or_none(t: Tensor | None) -> bytes | None:
    return None if t is None else _pack(t)


def _pack_output(t: Tensor, value_shape: Sequence[int]) -> bytes:
    """An output, or its gradient. That of attention, [bs, num_queries, num_heads * embed_dims], is seen with the axes of value,
    [bs, num_queries, num_heads, embed_dims]; no view of the tensor is made.
    """
    shape = t.shape
    if len(shape) == len(value_shape):
        return _pack(t)
    batch, query, channel = t.stride()
    heads, channels = value_shape[2], value_shape[3]
    return _PACK[4](
        t.data_ptr(), _DTYPE[t.dtype], shape[0], shape[1], heads, channels, batch, query, channels * channel, channel
    )


# Waking a thread takes some microseconds, in which about this many elements of rows are read: with fewer for each thread it
# does not pay.
WORK_OF_A_THREAD = 2**16


def _threads(elements: int) -> int:
    """How many of the threads that torch may use pay for `elements` of rows read or written."""
    return max(1, min(torch.get_num_threads(), elements // WORK_OF_A_THREAD))


def _elements_read(operator: str, value_shape: Sequence[int], weights: Tensor) -> int:
    """Elements of rows that a forward reads. In deformable_aggregation each point is taken to be seen by one camera."""
    rows = OPERATORS[operator].rows
    if len(value_shape) == 4:
        return weights.numel() * rows * value_shape[3]
    if OPERATORS[operator].bare:
        bs, anchors, _, scales, points, _ = weights.shape
    else:
        bs, anchors, points, _, scales, _ = weights.shape
    return bs * anchors * points * scales * rows * value_shape[2]


def _finish(status: int, operator: str, shapes: Tensor, starts: Tensor, num_keys: int) -> None:
    if status == _BAD_LEVEL:
        _checks.inputs.levels(*OPERATORS[operator].tables, shapes, starts, num_keys)
    if status:
        raise RuntimeError(f"the native kernel of {operator} was given {_STATUS.get(status, f'status {status}')}")


def _known(locations: Tensor) -> Tensor:
    """Integer locations of a dtype that the C interface does not know become int64."""
    return locations if locations.dtype in _DTYPE else locations.to(torch.int64)


def _output(value: Tensor, locations: Tensor) -> Tensor:
    shape = value.shape
    last = shape[2] * shape[3] if len(shape) == 4 else shape[2]
    return torch.empty((shape[0], locations.shape[1], last), dtype=value.dtype)


# `function_of` gives the C function of a name, or something else that takes its arguments and returns a status.
FunctionOf = Callable[[str], Callable[..., int]]


def _library_function(name: str) -> Callable[..., int]:
    return getattr(_library(), "mxd_" + name)


def _forward(
    function_of: FunctionOf, operator: str, value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor
) -> Tensor:
    output = _output(value, locations)
    locations = _known(locations)  # a copy has to live as long as the call
    status = function_of(operator)(
        _pack(value),
        _pack(shapes),
        _pack(starts),
        _pack(locations),
        _pack(weights),
        _pack_output(output, value.shape),
        _threads(_elements_read(operator, value.shape, weights)),
    )
    if status:
        _finish(status, operator, shapes, starts, value.shape[1])
    return output


def _backward(function_of: FunctionOf, operator: str, grad: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    value, shapes, starts, locations, weights, mask = inputs
    tensors = (value, shapes, starts, _known(locations), weights)
    found = gradients([tensors[i] for i in OPERATORS[operator].differentiable], mask)
    status = function_of(operator + "_backward")(
        _pack_output(grad, value.shape),
        *map(_pack, tensors),
        *[_pack(t) if wanted else None for t, wanted in zip(found, mask, strict=True)],
        _threads(_elements_read(operator, value.shape, weights) + found[0].numel()),
    )
    if status:
        _finish(status, operator, shapes, starts, value.shape[1])
    return tuple(found)


_REFERENCE_AXIS = {"level": 0, "point": 1}


def _taken(operator: str, args: Sequence[Any]) -> tuple[list[Tensor], list[int]]:
    """The inputs of an operator with logits as its C function takes them, logits over levels and points on two axes, and the
    numbers that follow them there."""
    row = OPERATORS[operator]
    tensors = list(args[: len(row.inputs)])
    logits, levels = tensors[row.weights], tensors[STARTS].shape[0]
    if logits.dim() == 4:
        points = tensors[4].shape[0] if tensors[4].dim() == 2 else tensors[4].shape[4]  # of a window, or of offsets
        tensors[row.weights] = logits.view(*logits.shape[:3], levels, points)
    return tensors, [_REFERENCE_AXIS[option] for option in args[len(row.inputs) :]]


def _forward_with_logits(function_of: FunctionOf, operator: str, *args: Any) -> Tensor:
    tensors, numbers = _taken(operator, args)
    value, logits = tensors[0], tensors[OPERATORS[operator].weights]
    output = _output(value, tensors[LOCATIONS])
    status = function_of(operator)(
        *map(_pack_or_none, tensors),
        _pack_output(output, value.shape),
        *numbers,
        _threads(_elements_read(operator, value.shape, logits)),
    )
    if status:
        _finish(status, operator, tensors[1], tensors[2], value.shape[1])
    return output


def _backward_with_logits(function_of: FunctionOf, operator: str, grad: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *inputs, mask = rest
    row = OPERATORS[operator]
    tensors, numbers = _taken(operator, inputs)
    value = tensors[0]
    found = gradients([inputs[i] for i in row.differentiable], mask)
    outputs = [
        g.view(tensors[i].shape) if needed else None for i, g, needed in zip(row.differentiable, found, mask, strict=True)
    ]
    status = function_of(operator + "_backward")(
        _pack_output(grad, value.shape),
        *map(_pack_or_none, tensors),
        *map(_pack_or_none, outputs),
        *numbers,
        _threads(_elements_read(operator, value.shape, tensors[row.weights]) + found[0].numel()),
    )
    if status:
        _finish(status, operator, tensors[1], tensors[2], value.shape[1])
    return tuple(found)


def _kernels(operator: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(forward, backward)"""
    return (_forward_with_logits, _backward_with_logits) if OPERATORS[operator].bare else (_forward, _backward)


def kernel(operator: str, backward: bool) -> Callable[..., Any]:
    """The kernel of an operator: of its inputs; or of a gradient, the inputs, and which gradients are wanted."""
    return functools.partial(_kernels(operator)[backward], _library_function, operator)


def describe_plan(operator: str, inputs: Sequence[Any], mask: list[bool] | None = None) -> dict[str, str]:
    """How a call would be done: each decision by its name, as mxd_describe_plan writes it.

    Args:
        inputs: the operator's inputs, and its options.
        mask: which gradients are wanted; None for the forward direction.
    """
    text = ctypes.create_string_buffer(1024)

    def describing(name: str) -> Callable[..., int]:
        def describe(*arguments: Any) -> int:
            *given, threads = arguments
            packed = [a for a in given if not isinstance(a, int)]  # options are integers, and no part of a plan
            pointers = (ctypes.c_char_p * len(packed))(*packed)
            return _library().mxd_describe_plan(name.encode(), pointers, threads, text, len(text))

        return describe

    forward, backward = _kernels(operator)
    if mask is None:
        forward(describing, operator, *inputs)
    else:
        backward(describing, operator, _output(inputs[0], inputs[3]), *inputs, mask)
    return dict(line.split(": ", 1) for line in text.value.decode().splitlines())
