"""Checks of the operators' inputs: a loop over their descriptions. nn/_check.py has the modules', rules.py the form of errors.

Every call runs the loop. Only where it finds a fault are the inputs gone through again for the sentence. An axis then has the
size that most of the inputs give it, and the first input that has another size is named.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from . import limits
from .description import OPERATORS, Input, Operator
from .rules import FLOATING, FLOATING_RULE, INDEX, INDEX_RULE, fail, need_dtype, need_one_device, shape_text, tensors

_NUMBER = FLOATING | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
_ELEMENTS = {
    "floating": (FLOATING, FLOATING_RULE),
    "index": (INDEX, INDEX_RULE),
    "number": (_NUMBER, "have a floating or an integer dtype"),
}
_MOST_ELEMENTS = 2**48  # more than any memory has
_NUMBERS = {"2": 2, "3": 3, "4": 4}  # axes whose name is their size
# Operator -> the axes that are `a * b` or `2 or 4`
_COMPOSITE = {
    operator.name: [axis for t in operator.tensors for axis in t.axes if " " in axis] for operator in OPERATORS.values()
}
# Operator -> whether sizes have rules beside those of single axes
_HAS_RULES = {
    operator.name: bool(_COMPOSITE[operator.name] or operator.divides or operator.sizes or operator.choices)
    for operator in OPERATORS.values()
}
# Operator -> what each call reads of its tensors' descriptions
_TENSORS = {
    operator.name: [(t.optional, _ELEMENTS[t.elements][0], t.axes, t.factors) for t in operator.tensors]
    for operator in OPERATORS.values()
}
_HASHED = (int, str, type(None))  # what else a description may hold: sizes, options and no tensor
Sizes = dict[str, Any]
Given = Sequence[tuple[Input, Any]]


def reference_count_fits(R: int, num_levels: int, num_points: int, reference_axis: str) -> bool:
    """Whether a query of multi_scale_deformable_attn_with_logits can have R reference points."""
    if reference_axis == "level":
        return R in (num_levels, 1)
    return R > 0 and num_points % R == 0


def _reference_counts(sizes: Sizes, reference_axis: str) -> str:
    if reference_axis == "level":
        return f"{_with_size('num_levels', sizes, {})} or 1"
    return f"a divisor of {_with_size('num_points', sizes, {})}"


def _has_elements(a: Any) -> bool:
    """Whether an argument of another type than torch.Tensor is a tensor that can be read: a MaskedTensor serves no operator."""
    return isinstance(a, Tensor) and type(a).__name__ != "MaskedTensor"


def check_inputs(operator: Operator, *args: Any) -> None:
    """Check an operator's inputs, sizes and options. Kernels call it, too: torch.ops has no public function before it.

    A call is described by shapes, dtypes and devices. Answers about plain tensors are cached, because models repeat shapes: a
    check takes 3 us, not 7 (Intel Xeon, family 6, model 207, 2026-11-26).
    """
    description, fit = [], _fit.__wrapped__ if torch.jit.is_tracing() else _fit  # pyright: ignore[reportPrivateImportUsage]
    for a in args:
        kind = type(a)
        is_tensor = kind is Tensor or kind is Parameter
        if not is_tensor and kind not in _HASHED:
            is_tensor, fit = _has_elements(a), _fit.__wrapped__
        description.append(a if not is_tensor else not a.is_nested and (a.shape, a.dtype, a.device))
    if not fit(operator.name, *description):
        _refuse(operator, *args)


@functools.lru_cache(maxsize=4096)
def _fit(name: str, *description: Any) -> bool:
    """Return whether (shape, dtype, device) of all tensors agree, and what follows them keeps its rules."""
    sizes = _agreed_sizes(name, description)
    return sizes is not None and (not _HAS_RULES[name] or _sizes_fit(OPERATORS[name], sizes, description))


def _agreed_sizes(name: str, description: Sequence[Any]) -> Sizes | None:
    """Return the size of each axis of the inputs; None if inputs disagree, or one of them has another dtype or device."""
    device = description[0][2] if isinstance(description[0], tuple) else None
    sizes = dict(_NUMBERS)
    agreed = sizes.setdefault
    for (optional, dtypes, axes, factors), tensor in zip(_TENSORS[name], description, strict=False):
        if tensor is None and optional:
            continue
        if not isinstance(tensor, tuple):
            return None
        shape, dtype, of_tensor = tensor
        names = axes if len(shape) == len(axes) else factors
        if len(shape) != len(names) or dtype not in dtypes or of_tensor != device:
            return None
        for axis, size in zip(names, shape, strict=False):
            if agreed(axis, size) != size:
                return None
    return sizes


def _sizes_fit(operator: Operator, sizes: Sizes, args: Sequence[Any]) -> bool:
    """Return whether the sizes keep the rules that hold between axes."""
    for axis in _COMPOSITE[operator.name]:
        if axis in sizes and not _composite_fits(axis, sizes):
            return False
    if operator.divides:
        groups, whole = (sizes[axis] for axis in operator.divides)
        return groups != 0 and whole % groups == 0
    rest = args[len(operator.tensors) :]
    if operator.sizes:
        sizes.update(zip(operator.sizes, rest, strict=True))
        return all(size >= 0 for size in rest) and _memory_holds(*(sizes[axis] for axis in operator.output))
    options = _options(operator, args)
    if any(options[option] not in choices for option, choices in operator.choices.items()):
        return False
    return not options or reference_count_fits(sizes["R"], sizes["num_levels"], sizes["num_points"], **options)


def _options(operator: Operator, args: Sequence[Any]) -> dict[str, str]:
    """Return each option's word; the first choice where a caller leaves it out."""
    defaults = {option: choices[0] for option, choices in operator.choices.items()}
    rest = args[len(operator.tensors) + len(operator.sizes) :]
    return defaults | dict(zip(operator.choices, rest, strict=False))


def _composite_fits(axis: str, sizes: Sizes) -> bool:
    """`2 or 4` is either number, and `a * b` the product of two sizes."""
    if " or " in axis:
        return str(int(sizes[axis])) in axis.split(" or ")
    return sizes[axis] == math.prod(sizes[factor] for factor in axis.split(" * "))


def _refuse(operator: Operator, *args: Any) -> NoReturn:
    """The sentence about the first input that is wrong."""
    count = len(operator.tensors)
    numbers = dict(zip(operator.sizes, args[count:], strict=False))
    options = _options(operator, args)
    for option, choices in operator.choices.items():
        if options[option] not in choices:
            fail(ValueError, option, f"be {' or '.join(map(repr, choices))}", repr(options[option]))
    given = [(t, a) for t, a in zip(operator.tensors, args, strict=False) if not (t.optional and a is None)]
    tensors(*((t.name, a) for t, a in given))
    sizes = _sizes(given)
    for t, a in given:
        _need_shape(t.name, a, _form(t, a), given, sizes, options)
    if operator.divides:
        _need_divisor(operator, *(sizes[axis] for axis in operator.divides))
    _need_output(operator, {**sizes, **numbers})
    for t, a in given:
        need_dtype(t.name, a, *_ELEMENTS[t.elements])
    need_one_device(*((t.name, a) for t, a in given))
    raise AssertionError(f"the check of {operator.name} refuses what no rule does")


def _form(t: Input, a: Tensor) -> Sequence[str]:
    """The axes that an input has, which may be those of `a * b` apart."""
    return t.factors if a.dim() == len(t.factors) else t.axes


def _sizes(given: Given) -> Sizes:
    """The size of each axis: the one that most inputs have, or the first of as many."""
    votes: dict[str, Counter[int]] = {}
    for t, a in given:
        axes = _form(t, a)
        if len(axes) == a.dim():
            for axis, size in zip(axes, a.shape, strict=True):
                if axis.isidentifier():
                    votes.setdefault(axis, Counter())[int(size)] += 1
    return {axis: counted.most_common(1)[0][0] for axis, counted in votes.items()}


def _need_shape(name: str, a: Tensor, axes: Sequence[str], given: Given, sizes: Sizes, options: dict[str, str]) -> None:
    shape = tuple(a.shape)
    if _fits(axes, shape, sizes, options):
        return
    numbers = {axis: size for axis, size in sizes.items() if not any(axis in t.factors for t, _ in given)}
    others = numbers | _sizes([(t, each) for t, each in given if t.name != name])
    swaps = ((*shape[:i], shape[i + 1], shape[i], *shape[i + 2 :]) for i in range(len(shape) - 1))
    at = next((i for i, swapped in enumerate(swaps) if _fits(axes, swapped, others, options)), None)
    remark = _look_alike(name, a, given, others, options) if at is None else f", whose axes {at} and {at + 1} look swapped"
    rule = shape_text([_with_size(axis, others, options) for axis in axes])
    fail(ValueError, name, f"have shape {rule}", f"{shape}{remark}")


def _look_alike(name: str, a: Tensor, given: Given, sizes: Sizes, options: dict[str, str]) -> str:
    """Return a remark where an input of two axes or more has the shape of another one, as in another order of arguments."""
    names = [t.name for t, _ in given]
    likes = (t.name for t, _ in given if t.name != name and _fits(_form(t, a), tuple(a.shape), sizes, options))
    like = next(likes, None) if name in names and a.dim() > 1 else None
    return "" if like is None else f", which looks like {like}"


def _fits(axes: Sequence[str], shape: tuple[int, ...], sizes: Sizes, options: dict[str, str]) -> bool:
    return len(axes) == len(shape) and all(
        _size_fits(axis, size, sizes, options) for axis, size in zip(axes, shape, strict=True)
    )


def _size_fits(axis: str, size: int, sizes: Sizes, options: dict[str, str]) -> bool:
    if axis == "R":
        known = "num_levels" in sizes and "num_points" in sizes
        return not known or reference_count_fits(size, sizes["num_levels"], sizes["num_points"], **options)
    if axis[0].isdigit():
        return str(size) in axis.split(" or ")
    expected = _product(axis, sizes)
    return expected is None or size == expected


def _product(axis: str, sizes: Sizes) -> int | None:
    names = axis.split(" * ")
    return math.prod(sizes[name] for name in names) if all(name in sizes for name in names) else None


def _with_size(axis: str, sizes: Sizes, options: dict[str, str]) -> str:
    if axis == "R":
        return _reference_counts(sizes, **options)
    size = None if axis[0].isdigit() else _product(axis, sizes)
    return axis if size is None else f"{axis}={size}"


def _need_divisor(operator: Operator, groups: int, channels: int) -> None:
    axis, whole = operator.divides
    if groups == 0 or channels % groups != 0:
        name = next(t.name for t in operator.tensors if axis in t.axes)
        fail(ValueError, name, f"have a {axis} count that divides {whole}={channels}", groups)


def _need_output(operator: Operator, sizes: Sizes) -> None:
    """Sizes that are given as numbers make an output that memory can hold."""
    for name in operator.sizes:
        if sizes[name] < 0:
            fail(ValueError, name, "not be negative", sizes[name])
    shape = tuple(sizes[axis] for axis in operator.output if axis in sizes)
    if operator.sizes and not _memory_holds(*shape):
        rule = "have fewer than 2**48 elements" + ", an axis of 0 counted as 1" * (0 in shape)
        fail(ValueError, "output", rule, shape)


def _memory_holds(*sizes: int | torch.SymInt) -> bool:
    """Sizes of a graph are not compared: torch.export takes no limits of free ones, and torch.compile shows these as ints."""
    in_graph = torch.compiler.is_compiling() or not all(isinstance(size, int) for size in sizes)
    return in_graph or math.prod(max(size, 1) for size in sizes) < _MOST_ELEMENTS


def sizes_of(operator: Operator, args: Sequence[Any]) -> Sizes:
    """Return the size of each axis of legal inputs."""
    sizes = dict(zip(operator.sizes, args[len(operator.tensors) :], strict=False))
    for t, a in zip(operator.tensors, args, strict=False):
        if a is not None:
            sizes |= zip(_form(t, a), a.shape, strict=True)
    return sizes


def output_shape(operator: Operator, args: Sequence[Any]) -> tuple[int, ...]:
    sizes = sizes_of(operator, args)
    return tuple(math.prod(sizes[factor] for factor in axis.split(" * ")) for axis in operator.output)


def backward(operator: str, grad: Tensor, *rest: Any) -> None:
    """Check the arguments of an operator's backward: grad_output, the inputs, output_mask."""
    *inputs, mask = rest
    row, value = OPERATORS[operator], inputs[0]
    check_inputs(row, *inputs)
    if len(mask) != len(row.differentiable):
        fail(ValueError, "output_mask", f"have {len(row.differentiable)} entries, one for each gradient", len(mask))
    if grad.shape == output_shape(row, inputs) and grad.dtype in FLOATING and grad.device == value.device:
        return
    given = [(t, a) for t, a in zip(row.tensors, inputs, strict=False) if a is not None]
    sizes = _sizes(given) | dict(zip(row.sizes, inputs[len(row.tensors) :], strict=False))
    _need_shape("grad_output", grad, row.output, given, sizes, {})
    need_dtype("grad_output", grad, FLOATING, FLOATING_RULE)
    need_one_device((row.inputs[0], value), ("grad_output", grad))


def check(operator: str, *inputs: Any) -> None:
    """Check the inputs of a public function. In a graph the fake kernel checks them; limits are checked everywhere.

    Level tables of plain CPU tensors are read here, so that a fault is a ValueError. Ranks are millions: the kernel reads them.
    """
    if not torch.compiler.is_compiling():
        row, table = OPERATORS[operator], inputs[2]
        check_inputs(row, *inputs)
        if table.is_cpu and row.kind != "pooling" and _is_readable(table):
            contents(row, inputs)
    if limits.enforced():
        limits.hold(operator, *inputs)


def _is_readable(table: Tensor) -> bool:
    return type(table) is Tensor and not torch._C._are_functorch_transforms_active() and not torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]


def contents(operator: Operator, inputs: Sequence[Any]) -> None:
    """Check what index tensors hold: maps inside value, or ranks of rows. This reads them, which is free only on a CPU."""
    if operator.kind != "pooling":
        value, shapes, starts, *_ = inputs
        levels(*operator.tables, shapes, starts, value.shape[1], value.shape[2] if value.dim() == 3 else 0)
    else:
        ranks(*inputs)


def ranks(feat: Tensor, depth: Tensor, ranks_feat: Tensor, ranks_depth: Tensor, ranks_bev: Tensor, *sizes: int) -> None:
    """Every rank of bev_pool_v3 has its row, element or cell."""
    for name, t, rows, of in (
        ("ranks_feat", ranks_feat, feat.shape[0], "rows of feat"),
        ("ranks_depth", ranks_depth, depth.shape[0], "elements of depth"),
        ("ranks_bev", ranks_bev, math.prod(sizes), "cells"),
    ):
        wrong = (t < 0) | (t.long() >= rows)  # there may be more rows than int32 counts
        if wrong.any():
            first = int(wrong.int().argmax())
            fail(ValueError, f"{name}[{first}]", f"be one of the {rows} {of}", int(t[first]))


def levels(shapes_name: str, starts_name: str, shapes: Tensor, starts: Tensor, num_keys: int, channels: int = 0) -> None:
    """Check that every map lies inside num_keys rows. This reads the index tables, which is free only on a CPU.

    Feature maps that have rows enough among their channels have their axes swapped.
    """
    sizes, begins = shapes.tolist(), starts.tolist()
    if starts.dim() > 1:
        sizes, begins = (list(itertools.chain(*of_cameras)) for of_cameras in (sizes, begins))
    for flat, ((height, width), start) in enumerate(zip(sizes, begins, strict=False)):
        end = start + height * width
        if height > 0 and width > 0 and start >= 0 and end <= num_keys:
            continue
        where = f"[{flat}]" if starts.dim() == 1 else f"[{flat // starts.shape[1]}, {flat % starts.shape[1]}]"
        if height <= 0 or width <= 0:
            fail(ValueError, shapes_name + where, "be positive (H, W)", (height, width))
        if start < 0:
            fail(ValueError, starts_name + where, "not be negative", start)
        swapped = "; axes 1 and 2 of feature_maps look swapped" if end <= channels else ""
        rule = f"leave room for {height} x {width} rows among {num_keys}"
        fail(ValueError, starts_name + where, rule, f"{start} (needs {end} rows){swapped}")


def host_memory(name: str, t: Any) -> None:
    """t is in memory that a C function can read and write."""
    tensors((name, t))
    if t.device.type != "cpu" or t.layout != torch.strided or t.is_neg() or t.is_conj():
        fail(ValueError, name, "be a plain strided tensor on the CPU", f"{t.layout} on {t.device}")


def workspace(t: Tensor, size: int) -> None:
    """t has at least `size` contiguous bytes, for phase two."""
    host_memory("workspace", t)
    if not t.is_contiguous() or t.nbytes < size:
        fail(ValueError, "workspace", f"have workspace_size={size} bytes in a row", f"{t.nbytes} of strides {t.stride()}")


def rows_of_levels(rows: int, keys: int) -> None:
    """The levels of an attention module take all of its keys."""
    if rows != keys:
        fail(ValueError, "spatial_shapes", f"hold the num_keys={keys} rows of value", f"{rows} in all levels")


def same_samples(locations: Tensor, weights: Tensor) -> None:
    """Every location to draw has a weight."""
    if locations.dim() < 3 or locations.shape[-1] != 2:
        fail(ValueError, "locations", "have shape (..., num_levels, num_points, 2)", tuple(locations.shape))
    if weights.shape != locations.shape[:-1]:
        fail(ValueError, "weights", f"have shape {tuple(locations.shape[:-1])}", tuple(weights.shape))
