"""Check the inputs of operators and of modules against descriptions. rules.py raises the errors.

Every call runs a quick check. If the call breaks a rule, a second pass writes the sentence of the error: it takes the majority
size of every axis, and names the first input with another size.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import _torch_private
from .description import Input, Operator
from .rules import (
    FLOATING,
    FLOATING_RULE,
    INDEX,
    INDEX_RULE,
    fail,
    fail_shape,
    need_dtype,
    need_one_device,
    need_tensors,
    shape_text,
)

_NUMBER = FLOATING | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
_ELEMENTS = {
    "floating": (FLOATING, FLOATING_RULE),
    "index": (INDEX, INDEX_RULE),
    "number": (_NUMBER, "have a floating or an integer dtype"),
}
_NO_DISPATCH = vars(Tensor)["__torch_dispatch__"]  # classes that override it, such as FakeTensor, may have no numbers
_MOST_ELEMENTS = 2**48  # no memory holds an output of so many elements
_HASHED = (int, str, type(None))  # types of sizes, options and omitted tensors: the cache of `_fit` can hash them

Sizes = dict[str, Any]
Options = dict[str, str]
Shapes = Sequence[tuple[Input, tuple[int, ...]]]


def check_inputs(operator: Operator, *args: Any) -> None:
    """Check inputs, sizes and options; raise an error about the first rule that the call breaks. Kernels repeat the check,
    because callers of torch.ops bypass the public function."""
    if _keeps_rules(_fit, operator, args):
        return
    options = _options(operator, args)
    for option, choices in operator.choices.items():
        if options[option] not in choices:
            fail(ValueError, option, f"be {' or '.join(map(repr, choices))}", repr(options[option]))
    present = [(t, a) for t, a in zip(operator.tensors, args, strict=False) if not (t.optional and a is None)]
    need_tensors(*((t.name, a) for t, a in present))
    shapes = [(t, tuple(a.shape)) for t, a in present]
    sizes = _majority(shapes)
    for t, shape in shapes:
        _need_shape(t.name, shape, _axes(t, shape), shapes, sizes, options)
    if not _divides(operator, sizes):
        axis, whole = operator.divides
        name = next(t.name for t in operator.tensors if axis in t.axes)
        fail(ValueError, name, f"have a {axis} count that divides {whole}={sizes[whole]}", sizes[axis])
    sizes |= _numbers(operator, args)
    for name in operator.sizes:
        if sizes[name] < 0:
            fail(ValueError, name, "not be negative", sizes[name])
    if not _memory_holds(operator, sizes):
        shape = tuple(sizes[axis] for axis in operator.output)
        fail(ValueError, "output", "have fewer than 2**48 elements" + ", an axis of 0 counted as 1" * (0 in shape), shape)
    for t, a in present:
        need_dtype(t.name, a, *_ELEMENTS[t.elements])
    need_one_device(*((t.name, a) for t, a in present))
    raise AssertionError(f"the check of {operator.name} refuses what no rule does")


def _keeps_rules(fit: Any, operator: Operator, args: Sequence[Any]) -> bool:
    """Return whether a call keeps all rules.

    Results for plain tensors are cached by shapes, dtypes and devices, because models repeat calls. A cached check takes 3 us
    instead of 23 (Intel Xeon, family 6, model 207, 2026-11-26).
    """
    call, plain = [], not _torch_private.is_tracing()
    for a in args:
        kind = type(a)
        if kind is Tensor or kind is Parameter:
            call.append(not a.is_nested and (a.shape, a.dtype, a.device))
        elif kind in _HASHED:
            call.append(a)
        else:
            # Symbols cannot be hashed. So bypass the cache for a SymInt, and for a tensor subclass, whose sizes may be symbols.
            # No operator reads a masked or nested tensor: append the tensor itself, for which `fit` returns False.
            plain, has_shape = False, isinstance(a, Tensor) and kind.__name__ != "MaskedTensor" and not a.is_nested
            call.append((a.shape, a.dtype, a.device) if has_shape else a)
    return fit(operator, *call) if plain else fit.__wrapped__(operator, *call)


@functools.lru_cache(maxsize=4096)
def _fit(operator: Operator, *call: Any) -> bool:
    """Return whether a call keeps all rules. In `call`, a (shape, dtype, device) stands for each tensor.

    The first input with an axis sets the size of the axis.
    """
    present = [(t, a) for t, a in zip(operator.tensors, call, strict=False) if not (t.optional and a is None)]
    if not all(isinstance(a, tuple) for _, a in present):
        return False
    sizes, options, device = _numbers(operator, call), _options(operator, call), call[0][2]
    for t, (shape, _, _) in present:
        for axis, size in zip(_axes(t, shape), shape, strict=False):
            sizes.setdefault(axis, size)
    return (
        all(options[option] in choices for option, choices in operator.choices.items())
        and all(
            dtype in _ELEMENTS[t.elements][0] and where == device and _fits(_axes(t, shape), shape, sizes, options)
            for t, (shape, dtype, where) in present
        )
        and _divides(operator, sizes)
        and all(sizes[name] >= 0 for name in operator.sizes)
        and _memory_holds(operator, sizes)
    )


def _numbers(operator: Operator, args: Sequence[Any]) -> Sizes:
    """Return the sizes that a call passes as numbers."""
    return dict(zip(operator.sizes, args[len(operator.tensors) :], strict=False))


def _options(operator: Operator, args: Sequence[Any]) -> Options:
    """Return the value of every option; the first choice if the caller omits the option."""
    defaults = {option: choices[0] for option, choices in operator.choices.items()}
    words = args[len(operator.tensors) + len(operator.sizes) :]
    return defaults | dict(zip(operator.choices, words, strict=False))


def _axes(t: Input, shape: Sequence[int]) -> Sequence[str]:
    """Return the axes of an input. For `a * b` in the description, callers may pass one axis or two."""
    return t.factors if len(shape) == len(t.factors) else t.axes


def _fits(axes: Sequence[str], shape: Sequence[int], sizes: Sizes, options: Options) -> bool:
    """Return whether the axes may have the sizes of `shape`. `2 or 4` allows both, `8 or more` at least 8, `a * b` the product.
    An axis that is not in `sizes` may have any size."""
    if len(axes) != len(shape):
        return False
    for axis, size in zip(axes, shape, strict=True):
        if axis == "R":  # number of a query's reference points, in multi_scale_deformable_attn_with_logits
            if "num_levels" in sizes and "num_points" in sizes:
                by_level = options["reference_axis"] == "level"
                if not (size in (sizes["num_levels"], 1) if by_level else size > 0 and sizes["num_points"] % size == 0):
                    return False
        elif axis.endswith(" or more"):
            if size < int(axis.removesuffix(" or more")):
                return False
        elif axis[0].isdigit():
            if not any(size == int(number) for number in axis.split(" or ")):
                return False
        elif (expected := _product(axis, sizes)) is not None and size != expected:
            return False
    return True


def _product(axis: str, sizes: Sizes) -> int | None:
    if axis in sizes and " " not in axis:
        return sizes[axis]
    names = axis.split(" * ")
    return math.prod(sizes[name] for name in names) if all(name in sizes for name in names) else None


def _divides(operator: Operator, sizes: Sizes) -> bool:
    if not operator.divides:
        return True
    groups, whole = (sizes[axis] for axis in operator.divides)
    return groups != 0 and whole % groups == 0


def _memory_holds(operator: Operator, sizes: Sizes) -> bool:
    """Return whether the output has fewer than 2**48 elements. Only operators that take sizes as numbers need this check.

    Do not compare sizes of a graph: torch.export refuses limits of dynamic sizes. torch.compile shows dynamic sizes as ints, so
    their type does not tell whether there is a graph.
    """
    shape = [sizes[axis] for axis in operator.output] if operator.sizes else []
    in_graph = torch.compiler.is_compiling() or not all(isinstance(size, int) for size in shape)
    return in_graph or math.prod(max(size, 1) for size in shape) < _MOST_ELEMENTS


def _majority(shapes: Shapes) -> Sizes:
    """Return the majority size of each axis; on a tie, the first seen."""
    votes: dict[str, Counter[int]] = {}
    for t, shape in shapes:
        axes = _axes(t, shape)
        if len(axes) == len(shape):
            for axis, size in zip(axes, shape, strict=True):
                if axis.isidentifier():
                    votes.setdefault(axis, Counter())[int(size)] += 1
    return {axis: counted.most_common(1)[0][0] for axis, counted in votes.items()}


def check_shapes(fixed: Sizes, **inputs: tuple[Any, str]) -> Sizes:
    """Check that inputs of a module are tensors with these axes: `check_shapes({"embed_dims": 256}, x=(x, "bs, embed_dims"))`.

    `fixed` has sizes that the module's settings fix. An input whose axes end with " or None" may be None. Read no data, so that
    graphs stay whole. Return the size of every axis.
    """
    tensors: dict[str, Any] = {name: t for name, (t, text) in inputs.items() if t is not None or not text.endswith(" or None")}
    texts = {name: inputs[name][1].removesuffix(" or None") for name in tensors}
    need_tensors(*tensors.items())
    need_one_device(*tensors.items())
    sizes = dict(fixed)
    for name, t in tensors.items():
        axes = texts[name].split(", ")
        for axis, size in zip(axes, t.shape, strict=False):
            if axis.isidentifier():
                sizes.setdefault(axis, size)
        if not _fits(axes, t.shape, sizes, {}):
            if torch.compiler.is_compiling():  # torch.compile cannot trace cached properties: raise without a remark
                fail_shape(name, t, texts[name], tuple(sizes.get(axis) for axis in axes))
            shapes = [(Input(name, "floating", texts[name]), tuple(t.shape)) for name, t in tensors.items()]
            sizes = _majority(shapes) | fixed
            for described, shape in shapes:
                _need_shape(described.name, shape, described.axes, shapes, sizes, {}, fixed)
    return sizes


def _need_shape(
    name: str,
    shape: tuple[int, ...],
    axes: Sequence[str],
    shapes: Shapes,
    sizes: Sizes,
    options: Options,
    fixed: Sizes | None = None,
) -> None:
    """Check a shape. The error shows the sizes that other inputs have, and a remark if axes or arguments look swapped."""
    if _fits(axes, shape, sizes, options):
        return
    numbers = {axis: size for axis, size in sizes.items() if not any(axis in t.factors for t, _ in shapes)}
    others = numbers | _majority([(t, other) for t, other in shapes if t.name != name]) | (fixed or {})
    swaps = ((*shape[:i], shape[i + 1], shape[i], *shape[i + 2 :]) for i in range(len(shape) - 1))
    at = next((i for i, swapped in enumerate(swaps) if _fits(axes, swapped, others, options)), None)
    likes = (t.name for t, _ in shapes if t.name != name and _fits(_axes(t, shape), shape, others, options))
    remark = ""
    if at is not None:
        remark = f", whose axes {at} and {at + 1} look swapped"
    elif len(shape) > 1 and any(t.name == name for t, _ in shapes) and (like := next(likes, None)):
        remark = f", which looks like {like}"
    rule = shape_text([_with_size(axis, others, options) for axis in axes])
    fail(ValueError, name, f"have shape {rule}", f"{shape}{remark}")


def _with_size(axis: str, sizes: Sizes, options: Options) -> str:
    if axis == "R":
        by_level = options["reference_axis"] == "level"
        return (
            f"{_with_size('num_levels', sizes, {})} or 1" if by_level else f"a divisor of {_with_size('num_points', sizes, {})}"
        )
    size = None if axis[0].isdigit() else _product(axis, sizes)
    return axis if size is None else f"{axis}={size}"


def sizes_of(operator: Operator, args: Sequence[Any]) -> Sizes:
    """Return the size of every axis. The inputs are valid, and come as tensors or as their shapes."""
    sizes = _numbers(operator, args)
    for t, a in zip(operator.tensors, args, strict=False):
        if a is not None:
            shape = a if isinstance(a, tuple) else a.shape
            sizes |= zip(_axes(t, shape), shape, strict=True)
    return sizes


def output_shape(operator: Operator, args: Sequence[Any]) -> tuple[int, ...]:
    sizes = sizes_of(operator, args)
    return tuple(math.prod(sizes[factor] for factor in axis.split(" * ")) for axis in operator.output)


def check_backward(operator: Operator, grad: Tensor, *rest: Any) -> None:
    """Check the arguments of an operator's backward: grad_output, the inputs, output_mask."""
    *inputs, mask = rest
    if _keeps_rules(_fit_backward, operator, (len(mask), grad, *inputs)):
        return
    check_inputs(operator, *inputs)
    if len(mask) != len(operator.differentiable):
        fail(ValueError, "output_mask", f"have {len(operator.differentiable)} entries, one for each gradient", len(mask))
    need_tensors(("grad_output", grad))
    shapes = [(t, tuple(a.shape)) for t, a in zip(operator.tensors, inputs, strict=False) if a is not None]
    _need_shape("grad_output", tuple(grad.shape), operator.output, shapes, _majority(shapes) | _numbers(operator, inputs), {})
    need_dtype("grad_output", grad, FLOATING, FLOATING_RULE)
    need_one_device((operator.inputs[0], inputs[0]), ("grad_output", grad))


@functools.lru_cache(maxsize=4096)
def _fit_backward(operator: Operator, gradients: int, grad: Any, *inputs: Any) -> bool:
    if gradients != len(operator.differentiable) or not isinstance(grad, tuple) or not _fit.__wrapped__(operator, *inputs):
        return False
    shape, dtype, device = grad
    expected = output_shape(operator, [a[0] if isinstance(a, tuple) else a for a in inputs])
    return shape == expected and dtype in FLOATING and device == inputs[0][2]


def is_readable(t: Tensor) -> bool:
    """Return whether t's numbers can be read now without waiting for a device."""
    return not torch.compiler.is_compiling() and t.is_cpu and has_numbers(t)


def has_numbers(t: Tensor) -> bool:
    """Return whether t is a strided tensor that has numbers to read. Return False under compilation, tracing, transforms or
    modes."""
    kind: Any = type(t)
    if torch.compiler.is_compiling() or kind.__torch_dispatch__ is not _NO_DISPATCH:
        return False
    if t.is_meta or t.layout != torch.strided or _torch_private.has_no_memory(t):
        return False
    modes = _torch_private.count_dispatch_modes()  # FakeTensorMode would make a fake tensor of t
    return not (modes or _torch_private.is_tracing() or _torch_private.is_transformed(t))


def check_call(operator: Operator, *inputs: Any) -> None:
    """Run a kernel's checks from outside: check the inputs, and the numbers in index tensors if they are readable."""
    check_inputs(operator, *inputs)
    check_readable_numbers(operator, inputs)


def check_readable_numbers(operator: Operator, inputs: Sequence[Any]) -> None:
    """Check the numbers in index tensors if they are readable."""
    first, last = (2, 5) if operator.kind == "pooling" else (1, 3)
    tables = [_torch_private.without_gradients(t) for t in inputs[first:last]]
    if all(map(is_readable, tables)):
        with _torch_private.outside_transforms():
            check_numbers(operator, [*inputs[:first], *tables, *inputs[last:]])


def check_numbers(operator: Operator, inputs: Sequence[Any]) -> None:
    """Check the numbers in index tensors: maps must lie inside value, ranks must exist.

    Reading tensors is free only on a CPU.
    """
    if operator.kind == "pooling":
        feat, depth, ranks_feat, ranks_depth, ranks_bev, *sizes = inputs
        for name, t, rows, noun in (
            ("ranks_feat", ranks_feat, feat.shape[0], "rows of feat"),
            ("ranks_depth", ranks_depth, depth.shape[0], "elements of depth"),
            ("ranks_bev", ranks_bev, math.prod(sizes), "cells"),
        ):
            wrong = (t < 0) | (t.long() >= rows)  # int64, because `rows` may exceed int32
            if wrong.any():
                first = int(wrong.int().argmax())
                fail(ValueError, f"{name}[{first}]", f"be one of the {rows} {noun}", int(t[first]))
        return
    shape = inputs[0].shape
    check_levels(*operator.tables, inputs[1], inputs[2], shape[1], shape[2] if len(shape) == 3 else 0)


def check_levels(shapes_name: str, starts_name: str, shapes: Tensor, starts: Tensor, num_keys: int, channels: int = 0) -> None:
    """Check that every map lies inside num_keys rows. Reading the index tables is free only on a CPU.

    If a map that lies outside would fit into `channels` rows, the sentence adds that the axes of feature_maps look swapped.
    """
    sizes, begins = shapes.tolist(), starts.tolist()
    if starts.dim() > 1:
        sizes, begins = itertools.chain(*sizes), itertools.chain(*begins)
    for index, ((height, width), start) in enumerate(zip(sizes, begins, strict=False)):
        end = start + height * width
        if height > 0 and width > 0 and start >= 0 and end <= num_keys:
            continue
        where = f"[{index}]" if starts.dim() == 1 else f"[{index // starts.shape[1]}, {index % starts.shape[1]}]"
        if height <= 0 or width <= 0:
            fail(ValueError, shapes_name + where, "be positive (H, W)", (height, width))
        if start < 0:
            fail(ValueError, starts_name + where, "not be negative", start)
        swapped = "; axes 1 and 2 of feature_maps look swapped" if end <= channels else ""
        rule = f"leave room for {height} x {width} rows among {num_keys}"
        fail(ValueError, starts_name + where, rule, f"{start} (needs {end} rows){swapped}")


def check_rows_of_levels(rows: int, keys: int) -> None:
    """Check that the levels of an attention module have as many rows as value has keys."""
    if rows != keys:
        fail(ValueError, "spatial_shapes", f"hold the num_keys={keys} rows of value", f"{rows} in all levels")
