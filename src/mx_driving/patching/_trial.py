"""Tries a core or an attention module before it is replaced. One with other numbers than ours is left alone, whatever its
name.

There is no table of versions. A version that nobody has seen either gives the same numbers or is left alone.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ._attention import Attention
from ._forms import AUTOGRAD, FUNCTION, Form, levels

_SIZES = [(5, 4), (3, 6)]
_COUNTS = [2, 4]
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
    """The first form that the thing agrees with; else None, and why the first form does not fit."""
    reasons = []
    with _one_thread():
        for form in forms:
            reason = _objection(form, thing)
            if reason is None:
                return form, ""
            reasons.append(reason)
    return None, reasons[0]


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """To wake threads takes longer than these examples: on a busy machine ten times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _objection(form: Form | Attention, thing: Any) -> str | None:
    """Why the thing must stay, or None when it gives our outputs and gradients on small random inputs.

    An autograd function is not tried: its compiled extension may be missing, which is a reason to replace it.
    """
    if form.kind == AUTOGRAD:
        return None
    if form.kind == FUNCTION and thing.__closure__:
        return "it is a closure, whose code cannot be exchanged"
    try:
        for difference in _module_differences(form, thing) if isinstance(form, Attention) else _core_differences(form, thing):
            if not difference < _CLOSE:  # a NaN is an objection too
                return f"its result on a small example differs from the operator's by {difference:.1e}"
    except Exception as error:  # an unknown core may raise anything
        return f"it does not run on a small example: {type(error).__name__}: {error}"
    return None


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _core_differences(form: Form, core: Any) -> Iterator[float]:
    original = core if form.kind == FUNCTION else core()
    replacement = form.replacement if form.kind == FUNCTION else lambda *args: form.replacement(None, *args)
    for inputs in _core_inputs(form):
        yield _difference((original, replacement), inputs)


def _core_inputs(form: Form) -> list[tuple[Any, ...]]:
    """Arguments for the form; some locations lie outside the map."""
    generator = _generator()

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device="cpu", dtype=torch.float32)

    value = rand(2, sum(h * w for h, w in _SIZES), 3, 4) - 0.5
    if "num_points_list" in form.parameters:
        locations, weights = rand(2, 5, 3, sum(_COUNTS), 2) * 1.4 - 0.2, rand(2, 5, 3, sum(_COUNTS))
        return [(value, _SIZES, locations, weights, _COUNTS, method) for method in ("default", "discrete")]
    locations, weights = rand(2, 5, 3, 2, 2, 2) * 1.4 - 0.2, rand(2, 5, 3, 2, 2)
    if form.kind == FUNCTION:
        return [(value, _SIZES, locations, weights)]
    shapes, starts = levels(_SIZES, value.device)
    return [(value, shapes, _SIZES, starts, locations, weights, 64)]


def _module_differences(form: Attention, kind: type) -> Iterator[float]:
    """One for each shape of reference points, in training. Its dropout draws the same numbers twice."""
    original = vars(kind)["forward"]
    names = list(inspect.signature(original).parameters)[1:]
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        module = _small(kind, form)
        for given in _module_inputs(form, module):
            chosen = {name: given[name] for name in names if name in given}
            ours = functools.partial(_attended, form, module)  # even where it would leave this call to the original
            both = [_seeded(f, list(chosen)) for f in (functools.partial(original, module), ours)]
            yield _difference(both, tuple(chosen.values()), list(module.parameters()))


def _attended(form: Attention, module: Any, **given: Any) -> Any:
    return form.attend(module, given)


def _seeded(forward: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    """A forward of arguments in the order of `names`, with the same random numbers each time."""

    def run(*inputs: Any) -> Any:
        torch.default_generator.manual_seed(0)  # not those of GPUs, which fork_rng does not give back here
        return forward(**dict(zip(names, inputs, strict=True)))

    return run


def _small(kind: type, form: Attention) -> Any:
    """An instance with random parameters of float64."""
    known = {**_ARGUMENTS, "config": SimpleNamespace(**{**_CONFIG, **form.config})}
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
        given = {
            **dict.fromkeys(("hidden_states", "query"), query),
            **dict.fromkeys(("encoder_hidden_states", "input_flatten"), memory),
            "reference_points": reference,
            "spatial_shapes_list": _LEVELS,
            **dict.fromkeys(("spatial_shapes", "input_spatial_shapes"), shapes),
            **dict.fromkeys(("level_start_index", "input_level_start_index"), starts),
        }
        if first == 0:
            mask = torch.rand(batches, _KEYS, generator=generator) < 0.3
            given |= {"value": memory, "identity": rows(2)}
            given |= dict.fromkeys(("position_embeddings", "query_pos"), rows(2))
            given |= dict.fromkeys(("attention_mask", "key_padding_mask", "input_padding_mask") if form.masked else (), mask)
        yield given


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
