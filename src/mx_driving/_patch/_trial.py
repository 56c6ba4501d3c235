"""Try a core or an attention module before it is replaced. Code with other numbers than ours is left alone, whatever its name.

There is no table of versions. A version that nobody has seen either gives the same numbers or is left alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ._attention import LEVELS, READ_BY_FORMS, Attention, get_heads, get_levels
from ._forms import AUTOGRAD, FUNCTION, ROLES, ROWS, SPLIT, Arguments, Form, find_role, make_tables, map_to_roles
from ._parameters import Parameters, describe_tried, unwrap
from ._pools import Pool, calls_compiled

_Run = Callable[[Arguments], Any]  # of arguments by role, value in our layout
_SIZES = [(5, 4), (3, 6)]
_COUNTS = [2, 4]
_CLOSE = 1e-4  # float32 sums of 12 terms of size 1
_LISTED = {"value_spatial_shapes", "value_shapes"}  # modules' names for shapes that are a list

# The arguments of a small module's constructor, by name. Constructors of transformers take a configuration.
_WIDTH, _HEADS, _POINTS = 12, 3, 4
_MAPS = [(3, 2), (2, 4), (1, 3), (2, 1), (1, 1)]  # as many of them as a module has levels
_CONFIG = {
    "d_model": _WIDTH,
    "num_feature_levels": 2,
    "decoder_attention_heads": _HEADS,
    "decoder_n_levels": 2,
    "decoder_n_points": _POINTS,
    "decoder_offset_scale": 0.7,
    "decoder_method": "default",
    "disable_custom_kernels": True,
}
_ARGUMENTS = {
    **dict.fromkeys(("d_model", "embed_dim", "embed_dims"), _WIDTH),
    **dict.fromkeys(("n_heads", "num_heads"), _HEADS),
    **dict.fromkeys(("n_levels", "num_levels"), 2),
    **dict.fromkeys(("n_points", "num_points"), _POINTS),
    "num_steps": 3,
}


class _Differs(Exception):
    """The numbers of a thing differ from the operator's by `args[0]`."""


class _TheirsRaises(Exception):
    """The thing does not run on a small example: `args[0]`."""


def choose(forms: Sequence[Form], thing: Any) -> tuple[Form | None, str]:
    """Return the first form that the thing agrees with, else None and the reason.

    Of several reasons, the numbers come first, then that the thing does not run, then that a form of ours does not.
    """
    if forms[0].kind == AUTOGRAD:  # its compiled extension may be missing, which is a reason to replace it
        return forms[0], ""
    if isinstance(forms[0], Pool) and calls_compiled(thing):
        return None, "it calls a compiled file, which has no CPU path to compare with"
    differences, theirs, ours, built = [], [], [], {}
    with (
        _one_thread(),
        torch.random.fork_rng(devices=[]),
        torch.device("cpu"),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        for form in forms:
            try:
                return _try_module(form, thing, built) if isinstance(form, Attention) else _try_core(form, thing), ""
            except _Differs as error:
                differences.append(error.args[0])
            except _TheirsRaises as error:
                theirs.append(error.args[0])
            except Exception as error:  # a form may raise anything over an unknown thing
                ours.append(f"no known form fits it: {type(error).__name__}: {error}")
    if differences:
        return None, f"its result on a small example differs from the operator's by {min(differences):.1e}{_name_unread(thing)}"
    return None, (theirs or ours)[0]


def _name_unread(thing: Any) -> str:
    """Return which usual arguments an attention module does not read, for a reason."""
    if not isinstance(thing, type):
        return ""
    parameters = Parameters(vars(thing)["forward"], bound=1)
    usual = {name for role in ("mask", "position", "identity") for name in ROLES[role]}
    unread = [name for name in parameters.all if name in usual and name not in parameters.read]
    return f"; its code does not read {', '.join(unread)}" if unread else ""


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Run on one thread. To wake other threads takes longer than these examples, on a busy machine ten times as long."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _make_runs(form: Form, function: Any, module: Any, sizes: Sequence[tuple[int, int]]) -> tuple[_Run, _Run]:
    """Return what the original and the form compute of arguments by role, with the same random numbers each time."""
    bound = [] if module is None else [module]
    parameters, layout = Parameters(function, len(bound)), getattr(form, "layout", ROWS)

    def name_arguments(inputs: Arguments) -> dict[str, Any]:
        torch.default_generator.manual_seed(0)  # not those of GPUs, which fork_rng does not give back here
        value = inputs.get("value")
        if value is not None and layout is not ROWS:
            inputs = {**inputs, "value": layout.theirs(value, sizes)}
        return {name: inputs.get(find_role(name), parameters.defaults.get(name)) for name in parameters.all}

    def theirs(inputs: Arguments) -> Any:
        return function(*bound, **name_arguments(inputs))

    def ours(inputs: Arguments) -> Any:
        arguments, names = name_arguments(inputs), parameters.all if form.reads_all else parameters.read
        return form.answer(module, map_to_roles({name: arguments[name] for name in names}))

    return theirs, ours


def _try_core(form: Any, thing: Any) -> Form:
    """Return the form if a core or a pool gives our outputs and gradients; raise where it does not."""
    function, module = (unwrap(vars(thing)["forward"]), thing()) if isinstance(thing, type) else (thing, None)
    theirs, ours = _make_runs(form, function, module, _SIZES)
    for ways in _make_core_examples(form):
        refusals = []
        for inputs in ways:  # until the thing takes one of them
            try:
                _compare(theirs, ours, inputs)
                break
            except _TheirsRaises as error:
                refusals.append(error)
        else:
            raise refusals[0]
    return form if module is None else dataclasses.replace(form, tried=describe_tried(module, function))


def _make_core_examples(form: Any) -> Iterator[list[Arguments]]:
    """Return an example of every kind that the form serves, each in the ways to write it."""
    if isinstance(form, Pool):
        yield [dict(zip(form.parameters, form.example(), strict=True))]
        return
    shapes, starts = make_tables(_SIZES, torch.device("cpu"))
    common = {"sizes": _SIZES, "starts": starts, "counts": _COUNTS, "step": 64, "value_shape": "default"}
    for axes, method in itertools.product(form.axes, form.methods):
        points = (sum(_COUNTS),) if form.uneven else (2, 2) if axes == SPLIT else (4,)
        inputs = {**common, **_make_core_tensors(points), "method": method}
        if form.pixels:
            inputs["locations"] = (inputs["locations"] * 8).round().long() - 1
        tables = [[[*s] for s in _SIZES], shapes] if form.kind == FUNCTION else [shapes]
        yield [{**inputs, "shapes": table} for table in tables]


def _make_core_tensors(points: Sequence[int]) -> dict[str, Any]:
    """Return value, locations and weights of 2 batches, 5 queries, 3 heads; some locations lie outside the map."""
    rand = _make_random(torch.float32)
    value = rand(2, sum(h * w for h, w in _SIZES), 3, 4) - 0.5
    return {"value": value, "locations": rand(2, 5, 3, *points, 2) * 1.4 - 0.2, "weights": rand(2, 5, 3, *points)}


def _make_random(dtype: torch.dtype) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.rand(*shape, generator=generator, dtype=dtype)


def _try_module(form: Attention, kind: type, built: dict[str, Any]) -> Attention:
    """Try each shape of reference points, in training: a module's dropout draws the same numbers twice.

    A shape that the module itself refuses is no objection. In use it goes to the module's own code. `built` holds the modules
    of earlier forms, by the arguments of their constructors.
    """
    if (key := str(form.constructor)) not in built:
        built[key] = _build(kind, form.constructor)
    module, function = built[key], unwrap(vars(kind)["forward"])
    if not form.reads_points_of(module):
        raise ValueError("it has its own number of points for each level, or one for all")
    sizes, examples, refusals = _MAPS[: get_levels(module)], set(), []
    theirs, ours = _make_runs(form, function, module, sizes)
    for example, inputs in _make_module_examples(form, module, sizes):
        if _LISTED & set(Parameters(function).all):
            inputs = {**inputs, "shapes": sizes}
        try:
            _compare(theirs, ours, inputs, list(module.parameters()))
            examples.add(example)
        except _TheirsRaises as error:
            refusals.append(error)
    if not any(has_memory for _, has_memory in examples):
        raise refusals[0]
    return dataclasses.replace(
        form, tried=describe_tried(module, function, READ_BY_FORMS | _ARGUMENTS.keys()), examples=frozenset(examples)
    )


def _build(kind: type, constructor: Mapping[str, Any]) -> Any:
    """Return an instance with random parameters of float64: a small instance, or one of the class's own fixed sizes."""
    small = {**_ARGUMENTS, **constructor, "config": SimpleNamespace(**{**_CONFIG, **constructor})}
    parameters = inspect.signature(kind).parameters
    try:
        module = kind(**{name: small[name] for name in parameters if name in small})
        if module.sampling_offsets.in_features not in (_WIDTH, 2 * _WIDTH):
            module = kind()
        module = module.to(torch.float64)
    except Exception as error:
        raise _TheirsRaises(_describe_error(error)) from error
    rand = _make_random(torch.float64)
    for p in module.parameters():
        p.data = 2 * rand(*p.shape) - 1
    return module


def _make_module_examples(form: Attention, module: Any, sizes: Sequence[Any]) -> Iterator[tuple[tuple[int, bool], Arguments]]:
    """Return arguments by role: for each shape of the reference all of them, and only what is needed. There are as many
    queries as keys, because some modules look at themselves."""
    rand, keys, width = _make_random(torch.float64), sum(h * w for h, w in sizes), module.sampling_offsets.in_features
    width = width // form.queue if getattr(module, "num_bev_queue", 1) == form.queue else width
    shapes, starts = make_tables(sizes, torch.device("cpu"))
    tables, batches = {"shapes": shapes, "sizes": sizes, "starts": starts}, 2 * form.queue
    heads = (width,) if form.layout is ROWS else (get_heads(module), width // get_heads(module))

    def rows(batches: int, *sides: int) -> Tensor:
        tensor = rand(batches, keys, *sides) - 0.5
        return tensor if getattr(module, "batch_first", True) else tensor.transpose(0, 1)

    if "trajectories" in form.needs:
        yield from (((2, True), {**tables, **inputs}) for inputs in _make_trajectory_inputs(rand, keys, width, len(sizes)))
        return
    for count, numbers in form.references:
        reference = rand(batches, keys, len(sizes) if count == LEVELS else count, numbers)
        needed = {**tables, "query": rows(2, width), "reference": reference}
        optional = {"value": rows(batches, *heads), "identity": rows(2, width), "position": rows(2, width)}
        mask = rand(batches, keys) < 0.3 if form.masked else None
        yield (numbers, True), {**needed, **optional, "mask": mask}
        yield (numbers, False), {**needed, **dict.fromkeys(optional), "mask": None}


def _make_trajectory_inputs(rand: Callable[..., Tensor], keys: int, width: int, levels: int) -> Iterator[Arguments]:
    boxes = [(SimpleNamespace(gravity_center=20 * rand(2, 3) - 10),) + 4 * (None,) for _ in range(2)]
    query, identity, position = (rand(2, 2, 3, width) - 0.5 for _ in range(3))
    trajectories = 20 * rand(2, 2, 3, 2, levels, 2) - 10
    needed = {"query": query, "value": rand(keys, 2, width) - 0.5, "trajectories": trajectories, "boxes": boxes}
    yield {**needed, "identity": identity, "position": position, "mask": rand(2, keys) < 0.3}
    yield needed


def _describe_error(error: Exception) -> str:
    return f"it does not run on a small example: {type(error).__name__}: {error}"


def _compare(theirs: _Run, ours: _Run, inputs: Arguments, parameters: Sequence[Tensor] = ()) -> None:
    """Raise unless outputs and the gradients of all floating inputs and parameters agree."""
    try:
        expected = _compute_results(theirs, inputs, parameters)
    except Exception as error:  # an unknown core may raise anything
        raise _TheirsRaises(_describe_error(error)) from error
    results = _compute_results(ours, inputs, parameters)
    same = [t.shape for t in results] == [t.shape for t in expected]
    difference = max(float((a - b).abs().max()) for a, b in zip(results, expected, strict=True)) if same else math.inf
    if not difference < _CLOSE:  # a NaN, too
        raise _Differs(difference)


def _compute_results(run: _Run, inputs: Arguments, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return outputs and gradients; zeros where nothing that is returned has one. Trajectories have none."""
    floating = {n: i for n, i in inputs.items() if isinstance(i, Tensor) and i.is_floating_point() and n != "trajectories"}
    tensors = {n: i.clone().requires_grad_() for n, i in floating.items()}
    leaves = [*tensors.values(), *parameters]
    returned = run({**inputs, **tensors})
    outputs = list(returned) if isinstance(returned, tuple) else [returned]
    for out in outputs:
        if not isinstance(out, Tensor):
            raise TypeError(f"it returns {type(out).__name__} instead of a tensor")
    directions = [torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape) for out in outputs]
    ends = [(out, way) for out, way in zip(outputs, directions, strict=True) if out.requires_grad]
    gradients: Sequence[Tensor | None] = [None] * len(leaves)
    if ends:
        gradients = torch.autograd.grad([out for out, _ in ends], leaves, [way for _, way in ends], allow_unused=True)
    zeroed = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, gradients, strict=True)]
    return [*(out.detach() for out in outputs), *zeroed]
