"""What PTX instructions compute, on numpy arrays: the types of their operands, and a function of the operands' values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Fault(AssertionError):
    """A kernel did what hardware does not allow, or what this interpreter does not know."""


# PTX types. f32x2 and bf16x2 are two numbers in a register.


@functools.cache
def dtype_of(kind: str) -> np.dtype:
    """The dtype of a type's numbers, or of its bits where numpy has no such numbers."""
    bits = int(kind.replace("x2", "").lstrip("bfsu")) * (2 if kind.endswith("x2") else 1) if kind != "pred" else 1
    if kind == "pred":
        return np.dtype(np.bool_)
    letter = "f" if kind in ("f16", "f32", "f64") else "i" if kind[0] == "s" else "u"
    return np.dtype(f"{letter}{bits // 8}")


def _is_float(kind: str) -> bool:
    return kind.startswith(("f", "bf"))


def decode(bits: Array, kind: str) -> Array:
    """Numbers of a type from its bits."""
    if kind.endswith("x2"):
        pairs = np.ascontiguousarray(np.atleast_1d(bits)).view(UNSIGNED[bits.itemsize // 2]).reshape(-1, 2)
        return decode(pairs, kind.removesuffix("x2"))
    if kind == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.view(dtype_of(kind))


def encode(numbers: Array, kind: str) -> Array:
    """Round numbers to a type, to the nearest and to even; return its bits."""
    if kind.endswith("x2"):
        halves = np.ascontiguousarray(encode(numbers, kind.removesuffix("x2")))
        return halves.view(UNSIGNED[2 * halves.itemsize]).reshape(-1)
    if kind == "bf16":
        bits = numbers.astype(np.float32).view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        return np.where(np.isnan(numbers), 0x7FFF, rounded).astype(np.uint16)
    return numbers.astype(dtype_of(kind)) if _is_float(kind) else numbers


# Arithmetic


def _divide(a: Array, b: Array) -> Array:
    """Integers, rounded towards zero."""
    wide = [np.asarray(x).astype(np.int64) for x in (a, b)]
    return (np.abs(wide[0]) // np.abs(wide[1]) * np.sign(wide[0]) * np.sign(wide[1])).astype(a.dtype)


def _shift(a: Array, count: Array, left: bool) -> Array:
    """A count above the width shifts everything out."""
    width = 8 * a.itemsize
    if not left and a.dtype.kind == "i":
        return a >> np.minimum(count, width - 1).astype(a.dtype)
    rest = (count % width).astype(a.dtype)
    return np.where(count >= width, a.dtype.type(0), a << rest if left else a >> rest)


def _high_half(a: Array, b: Array) -> Array:
    product = np.asarray(a).astype(object) * np.asarray(b).astype(object)
    return (product >> 8 * a.itemsize).astype(a.dtype)


def _fma(a: Array, b: Array, c: Array) -> Array:
    return a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)


def _extract(a: Array, first: Array, length: Array) -> Array:
    return (a >> first) & ((a.dtype.type(1) << length) - a.dtype.type(1))


def _to_integer(numbers: Array, dtype: np.dtype) -> Array:
    """Saturated; a NaN becomes 0."""
    limits, numbers = np.iinfo(dtype), np.where(np.isnan(numbers), 0, numbers).astype(np.float64)
    inside = (numbers > limits.min) & (numbers < float(limits.max))
    return np.where(
        inside, np.where(inside, numbers, 0).astype(dtype), np.where(numbers > 0, limits.max, limits.min).astype(dtype)
    )


def _flush(numbers: Array) -> Array:
    """Subnormal float32 becomes zero."""
    return np.where(np.abs(numbers) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), numbers), numbers)


_BOTH: dict[str, tuple[int, Callable[..., Array]]] = {"add": (2, np.add), "sub": (2, np.subtract), "neg": (1, np.negative)}
_FLOAT = _BOTH | {"mul": (2, np.multiply), "div": (2, np.divide), "min": (2, np.fmin), "max": (2, np.fmax), "fma": (3, _fma)}
_INTEGER = _BOTH | {"min": (2, np.minimum), "max": (2, np.maximum), "div": (2, _divide), "not": (1, np.invert)}
_INTEGER |= {"and": (2, np.bitwise_and), "or": (2, np.bitwise_or), "xor": (2, np.bitwise_xor)}
_INTEGER |= {"rem": (2, lambda a, b: a - b * _divide(a, b))}
_COMPARE = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
_ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _compare(name: str, a: Array, b: Array) -> Array:
    """With a NaN, names that end in u are true and the others false."""
    unordered = (a != a) | (b != b)
    if name in ("nan", "num"):
        return unordered == (name == "nan")
    return _COMPARE[name[:2]](a, b) | unordered if name.endswith("u") else _COMPARE[name](a, b) & ~unordered


def _conversion(modifiers: list[str]) -> Callable[..., Array]:
    target, source = modifiers[-2:]
    if target.endswith("x2"):
        return lambda upper, lower: np.stack(np.broadcast_arrays(lower, upper), -1)
    steps: list[Callable[[Array], Array]] = [_flush] if "ftz" in modifiers else []
    steps += [_ROUND[m] for m in modifiers if m in _ROUND]
    if not _is_float(target):
        steps.append(lambda a: _to_integer(a, dtype_of(target)) if _is_float(source) else a.astype(dtype_of(target)))
    return lambda a: functools.reduce(lambda value, step: step(value), steps, a)


@functools.cache
def operation(opcode: str) -> tuple[str, tuple[str, ...], Callable[..., Array]]:
    """The type of an instruction's result, the types of its sources, and what it computes."""
    name, *modifiers = opcode.split(".")
    kind = modifiers[-1]
    if name == "mov":
        return kind, (kind,), lambda a: a
    if name == "selp":
        return kind, (kind, kind, "pred"), lambda a, b, condition: np.where(condition, a, b)
    if name == "setp":
        return "pred", (kind, kind), functools.partial(_compare, modifiers[0])
    if name == "cvt":
        return modifiers[-2], (kind,) * (2 if modifiers[-2].endswith("x2") else 1), _conversion(modifiers)
    if name in ("shl", "shr"):
        return kind, (kind, "u32"), functools.partial(_shift, left=name == "shl")
    if name == "bfe":
        return kind, (kind, "u32", "u32"), _extract
    if name in ("mul", "mad") and not _is_float(kind):
        wide = f"{kind[0]}{2 * int(kind[1:])}" if "wide" in modifiers else kind
        product = _high_half if "hi" in modifiers else lambda a, b: a.astype(dtype_of(wide)) * b.astype(dtype_of(wide))
        return wide, (kind, kind, wide)[: 2 + (name == "mad")], product if name == "mul" else lambda a, b, c: product(a, b) + c
    table = _FLOAT if _is_float(kind) else _INTEGER
    if name not in table:
        raise Fault(f"{opcode} is not known")
    count, compute = table[name]
    return kind, (kind,) * count, compute
