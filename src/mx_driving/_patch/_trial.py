"""Tries a core or an attention module before it is replaced. One with other numbers than ours is left alone, whatever its
name.

There is no table of versions. A version that nobody has seen either gives the same numbers or is left alone.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ._attention import LISTED, ROLES, Attention, by_role
from ._forms import AUTOGRAD, FUNCTION, ROWS, SPLIT, Core, Form, by_known_names, levels, parameters_of, presets_of
from ._pools import Pool, calls_compiled

_SIZES = [(5, 4), (3, 6)]
_COUNTS = [2, 4]
_DIFFERS = "its result on a small example differs"
_CLOSE = 1e-4  # float32 sums of 12 terms of size 1

# A small module: what its constructor is given, by the names of its parameters. transformers' take a configuration.
_WIDTH, _HEADS, _POINTS = 12, 3, 4
_LEVELS = [(3, 2), (2, 4)]
_KEYS = sum(h * w for h, w in _LEVELS)
_CONFIG = {
    "d_model": _WIDTH,
    "num_feature_levels": len(_LEVELS),
    "decoder_attention_heads": _HEADS,
    "decoder_n_levels": len(_LEVELS),
    "decoder_n_points": _POINTS,
    "decoder_offset_scale": 0.7,
    "decoder_method": "default",
    "disable_custom_kernels": True,
}
_ARGUMENTS = {
    **dict.fromkeys(("d_model", "embed_dim", "embed_dims"), _WIDTH),
    **dict.fromkeys(("n_heads", "num_heads"), _HEADS),
    **dict.fromkeys(("n_levels", "num_levels"), len(_LEVELS)),
    **dict.fromkeys(("n_points", "num_points"), _POINTS),
}


def choose(forms: Sequence[Any], thing: Any) -> tuple[Any, str]:
    """The first form that the thing agrees with; else None, and why not: what its numbers are beats that it does not run."""
    reasons = []
    with _one_thread():
        for form in forms:
            reason = _objection(form, thing)
            if reason is None:
                return form, ""
            reasons.append(reason)
    return None, next((reason for reason in reasons if _DIFFERS in reason), reasons[0])


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """To wake threads takes longer than these examples: on a busy machine ten times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _objection(form: Core | Form | Attention, thing: Any) -> str | None:
    """Why the thing must stay, or None when it gives our outputs and gradients on small random inputs.

    An autograd function is not tried: its compiled extension may be missing, which is a reason to replace it.
    """
    if form.kind == AUTOGRAD:
        return None
    if form.kind == FUNCTION and thing.__closure__:
        return "it is a closure, whose code cannot be exchanged"
    if isinstance(form, Pool) and calls_compiled(thing):
        return "it calls a compiled file, which has no CPU path to compare with"
    try:
        for difference in _module_differences(form, thing) if isinstance(form, Attention) else _core_differences(form, thing):
            if not difference < _CLOSE:  # a NaN is an objection too
                return f"{_DIFFERS} from the operator's by {difference:.1e}"
    except Exception as error:  # an unknown core may raise anything
        return f"it does not run on a small example: {type(error).__name__}: {error}"
    return None


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _core_differences(form: Core | Form, core: Any) -> Iterator[float]:
    if isinstance(form, Pool):
        both, inputs = [core, form.replacement], [dict(enumerate(form.example()))]
    elif isinstance(form, Core):
        both, inputs = [_of_our_value(f, form, core) for f in (core, form.replacement(core))], _function_inputs(form)
    else:
        both, inputs = [core(), functools.partial(form.replacement, None)], [_layer_inputs()]
    for given in inputs:
        yield _difference(both, tuple(given.values()))


def _of_our_value(run: Callable[..., Tensor], form: Core, core: Any) -> Callable[..., Tensor]:
    """A function of `_function_inputs` that calls a core in its own layout and order."""
    names, preset = parameters_of(core), presets_of(core)

    def core_of(value: Tensor, locations: Tensor, weights: Tensor, method: str) -> Tensor:
        given = {
            **preset,
            "value": form.layout.theirs(value, _SIZES),
            "sampling_locations": locations,
            "attention_weights": weights,
            **dict.fromkeys(("value_spatial_shapes", "value_spatial_shapes_hw"), _SIZES),
            "num_points_list": _COUNTS,
            "method": method,
        }
        return run(*(given[known] for known in by_known_names(dict.fromkeys(names))))

    return core_of


def _core_tensors(points: Sequence[int]) -> dict[str, Any]:
    """Value, locations and weights of 2 batches, 5 queries, 3 heads; some locations lie outside the map."""
    generator = _generator()

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device="cpu", dtype=torch.float32)

    value = rand(2, sum(h * w for h, w in _SIZES), 3, 4) - 0.5
    return {"value": value, "locations": rand(2, 5, 3, *points, 2) * 1.4 - 0.2, "weights": rand(2, 5, 3, *points)}


def _function_inputs(form: Core) -> Iterator[Mapping[str, Any]]:
    """An example of every kind that the form serves."""
    for axes, method in itertools.product(form.axes, form.methods):
        points = (sum(_COUNTS),) if form.uneven else (2, 2) if axes == SPLIT else (4,)
        yield {**_core_tensors(points), "method": method}


def _layer_inputs() -> Mapping[str, Any]:
    given = _core_tensors((2, 2))
    shapes, starts = levels(_SIZES, given["value"].device)
    tables = {"shapes": shapes, "sizes": _SIZES, "starts": starts}
    return {"value": given.pop("value"), **tables, **given, "im2col_step": 64}


def _module_differences(form: Attention, kind: type) -> Iterator[float]:
    """One for each shape of reference points, in training. Its dropout draws the same numbers twice."""
    original = vars(kind)["forward"]
    names = list(inspect.signature(original).parameters)[1:]
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        module = _small(kind, form)
        for given in _module_inputs(form, module):
            chosen = {name: given.get(name) for name in names if name in given or name in ROLES["mask"]}
            ours = functools.partial(_attended, form, module)  # even where it would leave this call to the original
            both = [_seeded(_of_rows(f, form), list(chosen)) for f in (functools.partial(original, module), ours)]
            yield _difference(both, tuple(chosen.values()), list(module.parameters()))


def _attended(form: Attention, module: Any, **given: Any) -> Any:
    return form.attend(module, by_role(given))


def _of_rows(forward: Callable[..., Any], form: Attention) -> Callable[..., Any]:
    """A forward of memory in rows that calls one of the form's layout."""
    if form.layout is ROWS:
        return forward

    def run(**given: Any) -> Any:
        split = {
            name: form.layout.theirs(given[name].unflatten(-1, (_HEADS, -1)), _LEVELS)
            for name in ROLES["memory"]
            if name in given
        }
        return forward(**{**given, **split})

    return run


def _seeded(forward: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    """A forward of arguments in the order of `names`, with the same random numbers each time."""

    def run(*inputs: Any) -> Any:
        torch.default_generator.manual_seed(0)  # not those of GPUs, which fork_rng does not give back here
        return forward(**dict(zip(names, inputs, strict=True)))

    return run


def _small(kind: type, form: Attention) -> Any:
    """An instance with random parameters of float64."""
    known = {**_ARGUMENTS, **form.arguments, "config": SimpleNamespace(**{**_CONFIG, **form.arguments})}
    module = kind(**{name: known[name] for name in inspect.signature(kind).parameters if name in known}).to(torch.float64)
    generator = _generator()
    for p in module.parameters():
        p.data = 2 * torch.rand(p.shape, generator=generator, dtype=torch.float64) - 1
    return module


def _module_inputs(form: Attention, module: Any) -> Iterator[Mapping[str, Any]]:
    """Arguments by all names that libraries have for them. As many queries as keys: some modules look at themselves. The
    first example has everything, the others what is needed."""
    generator = _generator()

    def rows(batches: int) -> Tensor:
        made = torch.rand(batches, _KEYS, _WIDTH, generator=generator, dtype=torch.float64) - 0.5
        return made if getattr(module, "batch_first", True) else made.transpose(0, 1)

    shapes, starts = levels(_LEVELS, torch.device("cpu"))
    for first, sides in enumerate(form.references):
        batches = 2 * form.queue
        query, memory = rows(2), rows(batches)
        reference = torch.rand(batches, _KEYS, *sides, generator=generator, dtype=torch.float64)
        given = {"query": query, "memory": memory, "reference": reference, "shapes": shapes, "sizes": _LEVELS, "starts": starts}
        if first == 0:
            mask = torch.rand(batches, _KEYS, generator=generator) < 0.3
            given |= {"identity": rows(2), "position": rows(2), **({"mask": mask} if form.masked else {})}
        elif form.alone:
            del given["memory"]
        named = {name: given[role] for role, names in ROLES.items() if role in given for name in names}
        yield {**named, **dict.fromkeys(LISTED & set(named), _LEVELS)}


def _difference(both: Sequence[Callable[..., Any]], inputs: tuple[Any, ...], parameters: Sequence[Tensor] = ()) -> float:
    """The largest difference of outputs and of the gradients of all floating inputs and parameters."""
    with torch.inference_mode(False), torch.enable_grad():
        theirs, ours = (_results(run, inputs, parameters) for run in both)
    if [t.shape for t in theirs] != [t.shape for t in ours]:
        return float("inf")
    return max(float((a - b).abs().max()) for a, b in zip(theirs, ours, strict=True))


def _results(run: Callable[..., Any], inputs: tuple[Any, ...], parameters: Sequence[Tensor]) -> list[Tensor]:
    inputs = tuple(i.clone().requires_grad_() if isinstance(i, Tensor) and i.is_floating_point() else i for i in inputs)
    leaves = [*(i for i in inputs if isinstance(i, Tensor) and i.requires_grad), *parameters]
    found = run(*inputs)
    outputs = list(found) if isinstance(found, tuple) else [found]
    directions = [torch.linspace(-1, 1, out.numel(), device="cpu", dtype=out.dtype).view(out.shape) for out in outputs]
    gradients = torch.autograd.grad(outputs, leaves, directions, allow_unused=True)
    moved = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, gradients, strict=True)]
    return [*(out.detach() for out in outputs), *moved]
