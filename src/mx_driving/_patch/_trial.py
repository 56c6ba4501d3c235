"""Tries a core or an attention module before it is replaced. One with other numbers than ours is left alone, whatever its
name.

There is no table of versions. A version that nobody has seen either gives the same numbers or is left alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ._attention import LEVELS, LISTED, ROLES, Attention, by_role, heads_in, levels_in, options_of
from ._forms import AUTOGRAD, FUNCTION, ROWS, SPLIT, Core, Form, by_known_names, levels
from ._motion import Motion
from ._parameters import Parameters, attributes_used
from ._pools import Pool, calls_compiled

_Inputs = Mapping[Any, Any]
_Run = Callable[[_Inputs], Any]
_SIZES = [(5, 4), (3, 6)]
_COUNTS = [2, 4]
_CLOSE = 1e-4  # float32 sums of 12 terms of size 1

# A small module: what its constructor is given, by the names of its parameters. transformers' take a configuration.
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


def choose(forms: Sequence[Any], thing: Any) -> tuple[Any, str]:
    """Return the first form that the thing agrees with, else None and the reason.

    What the numbers are is a better reason than that the thing does not run, and that a better one than that a form of ours
    does not.
    """
    differences, theirs, ours, built = [], [], [], {}
    with _one_thread():
        for form in forms:
            if form.kind == AUTOGRAD:  # its compiled extension may be missing, which is a reason to replace it
                return form, ""
            if reason := _untriable(form, thing):
                return None, reason
            try:
                return _agreeing(form, thing, built), ""
            except _Differs as error:
                differences.append(error.args[0])
            except _TheirsRaises as error:
                theirs.append(error.args[0])
            except Exception as error:  # a form may raise anything over an unknown thing
                ours.append(f"no known form fits it: {type(error).__name__}: {error}")
    if differences:
        return None, f"its result on a small example differs from the operator's by {min(differences):.1e}{_unread(thing)}"
    return None, (theirs or ours)[0]


def _unread(thing: Any) -> str:
    """Return which usual arguments an attention module does not read, for a reason."""
    if not isinstance(thing, type) or "forward" not in vars(thing):
        return ""
    parameters = Parameters(vars(thing)["forward"], bound=1)
    usual = {name for role in ("mask", "position", "identity") for name in ROLES[role]}
    unread = [name for name in parameters.all if name in usual and name not in parameters.read]
    return f"; its code does not read {', '.join(unread)}" if unread else ""


def _untriable(form: Any, thing: Any) -> str:
    if form.kind == FUNCTION and thing.__closure__:
        return "it is a closure, whose code cannot be exchanged"
    if isinstance(form, Pool) and calls_compiled(thing):
        return "it calls a compiled file, which has no CPU path to compare with"
    return ""


def _agreeing(form: Any, thing: Any, built: dict[str, Any]) -> Any:
    """Return the form, for the examples on which the thing gives our outputs and gradients; raise where it does not."""
    if isinstance(form, Attention):
        return _agreeing_attention(form, thing, built)
    for ways in _core_examples(form, thing):
        refusals = []
        for theirs, ours, inputs in ways:  # until the thing takes one of them
            try:
                _compare(theirs, ours, inputs)
                break
            except _TheirsRaises as error:
                refusals.append(error)
        else:
            raise refusals[0]
    return form


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Run on one thread: to wake others takes longer than these examples, on a busy machine ten times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _core_examples(form: Core | Form, core: Any) -> Iterator[list[tuple[_Run, _Run, _Inputs]]]:
    """Return examples for a core, each in the ways to write it: the core's call, ours, and what both are given."""
    if isinstance(form, Pool):
        yield [(_by_place(core), _by_place(form.replacement), dict(enumerate(form.example())))]
    elif isinstance(form, Core):
        theirs, ours = (_of_our_value(run, form, core) for run in (core, form.in_place_of(core)))
        for inputs in _function_inputs(form):
            yield [(theirs, ours, {**inputs, "sizes": sizes}) for sizes in ([[*s] for s in _SIZES], torch.tensor(_SIZES))]
    else:
        yield [(_by_place(core()), _by_place(functools.partial(form.replacement, None)), _layer_inputs())]


def _by_place(run: Callable[..., Any]) -> _Run:
    return lambda inputs: run(*inputs.values())


def _of_our_value(run: Callable[..., Tensor], form: Core, core: Any) -> _Run:
    """Return a function of `_function_inputs` that calls a core in its own layout and by its own names."""
    parameters = Parameters(core)
    names = by_known_names(dict.fromkeys(parameters.all))

    def core_of(inputs: _Inputs) -> Tensor:
        arguments = {
            **by_known_names(parameters.defaults),
            "value": form.layout.theirs(inputs["value"], _SIZES),
            "sampling_locations": inputs["locations"],
            "attention_weights": inputs["weights"],
            "value_spatial_shapes": inputs["sizes"],
            "value_spatial_shapes_hw": _SIZES,
            "level_start_index": levels(_SIZES, torch.device("cpu"))[1],
            "im2col_step": 64,
            "num_points_list": _COUNTS,
            "method": inputs["method"],
        }
        return run(**{own: arguments.get(known) for own, known in zip(parameters.all, names, strict=True)})

    return core_of


def _core_tensors(points: Sequence[int]) -> dict[str, Any]:
    """Return value, locations and weights of 2 batches, 5 queries, 3 heads; some locations lie outside the map."""
    generator = _generator()

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device="cpu", dtype=torch.float32)

    value = rand(2, sum(h * w for h, w in _SIZES), 3, 4) - 0.5
    return {"value": value, "locations": rand(2, 5, 3, *points, 2) * 1.4 - 0.2, "weights": rand(2, 5, 3, *points)}


def _function_inputs(form: Core) -> Iterator[_Inputs]:
    """Return an example of every kind that the form serves."""
    for axes, method in itertools.product(form.axes, form.methods):
        points = (sum(_COUNTS),) if form.uneven else (2, 2) if axes == SPLIT else (4,)
        tensors = _core_tensors(points)
        if form.pixels:
            tensors["locations"] = (tensors["locations"] * 8).round().long() - 1
        yield {**tensors, "method": method}


def _layer_inputs() -> _Inputs:
    tensors = _core_tensors((2, 2))
    shapes, starts = levels(_SIZES, tensors["value"].device)
    tables = {"shapes": shapes, "sizes": _SIZES, "starts": starts}
    return {"value": tensors.pop("value"), **tables, **tensors, "im2col_step": 64}


def _agreeing_attention(form: Attention, kind: type, built: dict[str, Any]) -> Attention:
    """Try each shape of reference points, in training: a module's dropout draws the same numbers twice.

    A shape that the module itself refuses is no objection. In use it goes to the module's own code. `built` has the modules
    of earlier forms, by what their constructors were given.
    """
    original, tried, refusals = vars(kind)["forward"], set(), []
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        if (key := str(form.constructor)) not in built:
            built[key] = _build(kind, form.constructor)
        module = built[key]
        if not form.fits(module):
            raise ValueError("it has its own number of points for each level, or one for all")
        parameters = Parameters(original, bound=1)
        needed = dict.fromkeys(name for name in parameters.all if name not in parameters.defaults)
        for example, inputs in _module_inputs(form, module, parameters.read):
            inputs = {**needed, **inputs}
            theirs, ours = (_of_rows(run, form, module) for run in (original, functools.partial(_attended, form)))
            try:
                _compare(theirs, ours, inputs, list(module.parameters()))
                tried.add(example)
            except _TheirsRaises as error:
                refusals.append(error)
    if not any(has_memory for _, has_memory in tried):
        raise refusals[0]
    options = options_of(module, attributes_used(kind, original))
    return dataclasses.replace(form, tried=frozenset(tried), options=options)


def _attended(form: Attention, module: Any, **inputs: Any) -> Any:
    return form.attend(module, by_role(inputs))


def _of_rows(forward: Callable[..., Any], form: Attention, module: Any) -> _Run:
    """Return a function of memory in rows that calls a forward of the form's layout, with the same random numbers each time."""

    def run(inputs: _Inputs) -> Any:
        torch.default_generator.manual_seed(0)  # not those of GPUs, which fork_rng does not give back here
        if form.layout is not ROWS:
            heads, sizes = heads_in(module), _sizes_for(module)
            split = {
                n: form.layout.theirs(t.unflatten(-1, (heads, -1)), sizes) for n, t in inputs.items() if n in ROLES["memory"]
            }
            inputs = {**inputs, **split}
        return forward(module, **inputs)

    return run


def _build(kind: type, constructor: Mapping[str, Any]) -> Any:
    """Return an instance with random parameters of float64: a small one, or where its sizes are fixed one of these."""
    small = {**_ARGUMENTS, **constructor, "config": SimpleNamespace(**{**_CONFIG, **constructor})}
    parameters = inspect.signature(kind).parameters
    try:
        module = kind(**{name: small[name] for name in parameters if name in small})
        if module.sampling_offsets.in_features not in (_WIDTH, 2 * _WIDTH):
            module = kind()
        module = module.to(torch.float64)
    except Exception as error:
        raise _TheirsRaises(_raised(error)) from error
    generator = _generator()
    for p in module.parameters():
        p.data = 2 * torch.rand(p.shape, generator=generator, dtype=torch.float64) - 1
    return module


def _sizes_for(module: Any) -> list[tuple[int, int]]:
    return _MAPS[: levels_in(module)]


def _module_inputs(form: Attention, module: Any, names: Sequence[str]) -> Iterator[tuple[tuple[int, bool], _Inputs]]:
    """Return arguments by the names that forward reads: for each shape of the reference all of them, and only what is needed.
    There are as many queries as keys, because some modules look at themselves."""
    generator, sizes = _generator(), _sizes_for(module)
    if isinstance(form, Motion):
        yield from (((2, True), _named(arguments, names, sizes)) for arguments in form.examples(module, sizes))
        return
    keys, width = sum(h * w for h, w in sizes), module.sampling_offsets.in_features
    width = width // form.queue if getattr(module, "num_bev_queue", 1) == form.queue else width
    shapes, starts = levels(sizes, torch.device("cpu"))

    def rows(batches: int) -> Tensor:
        made = torch.rand(batches, keys, width, generator=generator, dtype=torch.float64) - 0.5
        return made if getattr(module, "batch_first", True) else made.transpose(0, 1)

    for count, numbers in form.references:
        batches = 2 * form.queue
        sides = (len(sizes) if count == LEVELS else count, numbers)
        reference = torch.rand(batches, keys, *sides, generator=generator, dtype=torch.float64)
        needed = {"query": rows(2), "reference": reference, "shapes": shapes, "sizes": sizes, "starts": starts}
        optional = {"memory": rows(batches), "identity": rows(2), "position": rows(2)}
        if form.masked:
            optional["mask"] = torch.rand(batches, keys, generator=generator) < 0.3
        least = {**dict.fromkeys(optional), **needed}
        for with_memory, arguments in ((True, {**needed, **optional}), (False, least)):
            yield (numbers, with_memory), _named(arguments, names, sizes)


def _named(arguments: Mapping[str, Any], names: Sequence[str], sizes: Sequence[tuple[int, int]]) -> _Inputs:
    """Return arguments that stand under their roles under the names that a forward reads."""
    named = {name: arguments[role] for role, own in ROLES.items() if role in arguments for name in own if name in names}
    return {**named, **dict.fromkeys(LISTED & set(named), sizes)}


def _raised(error: Exception) -> str:
    return f"it does not run on a small example: {type(error).__name__}: {error}"


def _compare(theirs: _Run, ours: _Run, inputs: _Inputs, parameters: Sequence[Tensor] = ()) -> None:
    """Raise unless outputs and the gradients of all floating inputs and parameters agree."""
    with torch.inference_mode(False), torch.enable_grad():
        try:
            expected = _results(theirs, inputs, parameters)
        except Exception as error:  # an unknown core may raise anything
            raise _TheirsRaises(_raised(error)) from error
        results = _results(ours, inputs, parameters)
    same = [t.shape for t in results] == [t.shape for t in expected]
    difference = max(float((a - b).abs().max()) for a, b in zip(results, expected, strict=True)) if same else math.inf
    if not difference < _CLOSE:  # a NaN, too
        raise _Differs(difference)


def _results(run: _Run, inputs: _Inputs, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return outputs and gradients; zeros where nothing that is returned has one."""
    floating = {n: i for n, i in inputs.items() if isinstance(i, Tensor) and i.is_floating_point()}
    tensors = {
        n: i.clone().requires_grad_() for n, i in floating.items() if n not in ROLES["trajectories"]
    }  # they are detached
    leaves = [*tensors.values(), *parameters]
    returned = run({**inputs, **tensors})
    outputs = list(returned) if isinstance(returned, tuple) else [returned]
    for out in outputs:
        if not isinstance(out, Tensor):
            raise TypeError(f"it returns {type(out).__name__} instead of a tensor")
    directions = [torch.linspace(-1, 1, out.numel(), device="cpu", dtype=out.dtype).view(out.shape) for out in outputs]
    ends = [(out, way) for out, way in zip(outputs, directions, strict=True) if out.requires_grad]
    gradients: Sequence[Tensor | None] = [None] * len(leaves)
    if ends:
        gradients = torch.autograd.grad([out for out, _ in ends], leaves, [way for _, way in ends], allow_unused=True)
    zeroed = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, gradients, strict=True)]
    return [*(out.detach() for out in outputs), *zeroed]
