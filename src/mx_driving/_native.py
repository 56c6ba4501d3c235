"""The C interface (native/include/mx_driving.h) as Python sees it. Loaded at the first call, not at import."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import pathlib
import struct
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from . import _check
from ._operators import OPERATORS, gradients

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
}

# struct mxd_tensor: data, dtype, shape[6], strides[6]; one packer for each number of axes, the unused axes zero
_PACK = {n: struct.Struct(f"qq{n}q{8 * (6 - n)}x{n}q{8 * (6 - n)}x").pack for n in range(1, 7)}


def _library_path() -> pathlib.Path:
    from .config import library_path  # not before, or runpy warns of a config that it finds imported

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
    return _not_ours(path.name, library) or library


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
    *("mxd_isa", "mxd_use_isa", "mxd_has_openmp"),
    *(f"mxd_{operator}{direction}" for operator in OPERATORS for direction in ("", "_backward")),
)


def _not_ours(name: str, library: ctypes.CDLL) -> str | None:
    """Why a library that could be loaded is not that of this package, or None when it is."""
    missing = next((function for function in _FUNCTIONS if not hasattr(library, function)), None)
    if missing:
        return f"{name} is not this package's, or older: it has no function {missing}"
    library.mxd_version.restype = library.mxd_isa.restype = ctypes.c_char_p
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


def threads_in_parallel() -> bool:
    """Whether the library was built with OpenMP."""
    return bool(_library().mxd_has_openmp())


def _pack(t: Tensor) -> bytes:
    shape = t.shape
    return _PACK[len(shape)](t.data_ptr(), _DTYPE[t.dtype], *shape, *t.stride())


def _pack_heads(t: Tensor, heads: int, channels: int) -> bytes:
    """[bs, num_queries, num_heads * embed_dims] as [bs, num_queries, num_heads, embed_dims], without a view."""
    shape, (batch, query, channel) = t.shape, t.stride()
    return _PACK[4](
        t.data_ptr(), _DTYPE[t.dtype], shape[0], shape[1], heads, channels, batch, query, channels * channel, channel
    )


# Waking a thread takes some microseconds, in which about this many elements of rows are read: with fewer for each thread it
# does not pay.
WORK_OF_A_THREAD = 2**16


def _threads(elements: int) -> int:
    """How many of the threads that torch may use pay for `elements` of rows read or written."""
    return max(1, min(torch.get_num_threads(), elements // WORK_OF_A_THREAD))


def _finish(status: int, operator: str, shapes: Tensor, starts: Tensor, num_keys: int) -> None:
    if status == _BAD_LEVEL:
        _check.levels(*OPERATORS[operator].tables, shapes, starts, num_keys)
    if status:
        raise RuntimeError(f"the native kernel of {operator} was given {_STATUS.get(status, f'status {status}')}")


def _pointers(found: list[Tensor], mask: list[bool]) -> list[bytes | None]:
    return [_pack(t) if wanted else None for t, wanted in zip(found, mask, strict=True)]


def _attention(operator: str, tensors: tuple[Tensor, ...]) -> Tensor:
    value, shapes, starts, locations, weights = tensors
    bs, num_keys, heads, channels = value.shape
    output = torch.empty((bs, locations.shape[1], heads * channels), dtype=value.dtype)
    status = getattr(_library(), "mxd_" + operator)(
        _pack(value),
        _pack(shapes),
        _pack(starts),
        _pack(locations),
        _pack(weights),
        _pack_heads(output, heads, channels),
        _threads(weights.numel() * OPERATORS[operator].rows * channels),
    )
    if status:
        _finish(status, operator, shapes, starts, num_keys)
    return output


def _attention_backward(operator: str, grad: Tensor, tensors: tuple[Tensor, ...], mask: list[bool]) -> tuple[Tensor, ...]:
    value, shapes, starts, _, weights = tensors
    row = OPERATORS[operator]
    found = gradients([tensors[i] for i in row.differentiable], mask)
    status = getattr(_library(), f"mxd_{operator}_backward")(
        _pack_heads(grad, value.shape[2], value.shape[3]),
        *map(_pack, tensors),
        *_pointers(found, mask),
        _threads(weights.numel() * row.rows * value.shape[3] + found[0].numel()),
    )
    if status:
        _finish(status, operator, shapes, starts, value.shape[1])
    return tuple(found)


def multi_scale_deformable_attn(value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    return _attention("multi_scale_deformable_attn", (value, shapes, starts, locations, weights))


def multi_scale_deformable_attn_backward(
    grad: Tensor, value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor, mask: list[bool]
) -> tuple[Tensor, ...]:
    return _attention_backward("multi_scale_deformable_attn", grad, (value, shapes, starts, locations, weights), mask)


def _native_locations(locations: Tensor) -> Tensor:
    """Integer pixels of a dtype the C interface does not know become int64."""
    return locations if locations.dtype in _DTYPE else locations.to(torch.int64)


def geometric_kernel_attention(value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    return _attention("geometric_kernel_attention", (value, shapes, starts, _native_locations(locations), weights))


def geometric_kernel_attention_backward(
    grad: Tensor, value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor, mask: list[bool]
) -> tuple[Tensor, ...]:
    tensors = (value, shapes, starts, _native_locations(locations), weights)
    return _attention_backward("geometric_kernel_attention", grad, tensors, mask)


def _sampled(feature_maps: Tensor, weight: Tensor) -> int:
    """Elements of rows read where each point is seen by one camera, on all scales."""
    bs, anchors, points, _, scales, _ = weight.shape
    return bs * anchors * points * scales * OPERATORS["deformable_aggregation"].rows * feature_maps.shape[2]


def deformable_aggregation(feature_maps: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weight: Tensor) -> Tensor:
    output = torch.empty((feature_maps.shape[0], locations.shape[1], feature_maps.shape[2]), dtype=feature_maps.dtype)
    status = _library().mxd_deformable_aggregation(
        *map(_pack, (feature_maps, shapes, starts, locations, weight, output)), _threads(_sampled(feature_maps, weight))
    )
    if status:
        _finish(status, "deformable_aggregation", shapes, starts, feature_maps.shape[1])
    return output


def deformable_aggregation_backward(
    grad: Tensor,
    feature_maps: Tensor,
    shapes: Tensor,
    starts: Tensor,
    locations: Tensor,
    weight: Tensor,
    mask: list[bool],
) -> tuple[Tensor, ...]:
    found = gradients((feature_maps, locations, weight), mask)
    status = _library().mxd_deformable_aggregation_backward(
        *map(_pack, (grad, feature_maps, shapes, starts, locations, weight)),
        *_pointers(found, mask),
        _threads(_sampled(feature_maps, weight) + found[0].numel()),
    )
    if status:
        _finish(status, "deformable_aggregation", shapes, starts, feature_maps.shape[1])
    return tuple(found)
