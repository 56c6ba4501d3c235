"""Try a core or an attention module before it is replaced. Code with other numbers than ours is left alone, whatever its name.

There is no table of versions. A version that nobody has seen either gives the same numbers or is left alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ._attention import LEVELS, Attention, get_heads, get_levels
from ._forms import AUTOGRAD, FUNCTION, ROLES, ROWS, SPLIT, Arguments, Form, find_role, make_tables, map_to_roles
from ._parameters import Parameters, collect_constants, unwrap
from ._pools import Pool, calls_compiled
from ._state import DIFFERS, FOLLOWED, RAISES, SAME, Tried, describe_tried, list_tensors, randomize

_Run = Callable[[Arguments], Any]  # of arguments by role, value in our layout
_CLOSE = 1e-4  # float32 sums of 12 terms of size 1
_MOST_QUERIES = 2_000
_LISTED = {"value_spatial_shapes", "value_shapes"}  # modules' names for shapes that are a list


@dataclass(frozen=True)
class _Sizes:
    """Sizes of an example. Two examples have no size in common, so that a number in a library's code stands for one size."""

    batches: int
    queries: int
    heads: int
    channels: int
    levels: int
    counts: tuple[int, ...]  # points of each level, where a level has its own number of them
    points: int
    maps: tuple[tuple[int, int], ...]  # more than there are levels, for classes of fixed sizes
    spread: float  # of parameters, and with them of offsets and logits, for limits that a library puts to them
    training: bool

    @property
    def width(self) -> int:
        return self.heads * self.channels

    def arguments(self, uneven: Set[str]) -> dict[str, Any]:
        """Return the arguments of a module's constructor, by name. Constructors of transformers take a configuration."""
        configuration = {
            **{"d_model": self.width, "num_feature_levels": self.levels, "decoder_attention_heads": self.heads},
            **{"decoder_n_levels": self.levels, "decoder_n_points": self.points, "decoder_offset_scale": 0.5},
            **{"decoder_method": "default", "disable_custom_kernels": True},
        }
        small = {
            **dict.fromkeys(("d_model", "embed_dim", "embed_dims"), self.width),
            **dict.fromkeys(("n_heads", "num_heads"), self.heads),
            **dict.fromkeys(("n_levels", "num_levels"), self.levels),
            **dict.fromkeys(("n_points", "num_points"), self.points),
            "num_steps": self.levels + 1,
        }
        lists = {name: list(self.counts) for name in uneven}
        return {**small, **lists, "config": SimpleNamespace(**{**configuration, **lists})}


_SMALL = _Sizes(2, 14, 3, 4, 2, (2, 4), 4, ((3, 2), (2, 4), (1, 3), (2, 1), (1, 1)), 1, True)
_LARGE = _Sizes(1, 5, 2, 8, 3, (2, 6, 4), 6, ((12, 10), (5, 7), (2, 3), (2, 2), (4, 1)), 4, False)
_CORE = _Sizes(2, 5, 3, 4, 2, (2, 4), 2, ((5, 4), (3, 6)), 1, True)
_OTHER_CORE = _Sizes(1, 7, 2, 5, 3, (1, 2, 3), 3, ((4, 3), (2, 5), (6, 1)), 1, True)


def _try_sizes(attempt: Callable[[_Sizes], Any], sizes: _Sizes) -> Any:
    """Return what the attempt returns for these sizes, or with two levels, which some code expects."""
    try:
        return attempt(sizes)
    except _TheirsRaises as refusal:
        if sizes.levels == 2:
            raise
        with contextlib.suppress(_TheirsRaises):
            return attempt(dataclasses.replace(sizes, levels=2, counts=sizes.counts[:2], maps=sizes.maps[:2]))
        raise refusal


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
        return (
            None,
            f"its result on a small example differs from the operator's by {min(differences):.1e}{_name_unread(thing, built)}",
        )
    return None, (theirs or ours)[0]


def _name_unread(thing: Any, built: dict[Any, Any]) -> str:
    """Return which usual arguments an attention module does not read, and which tensors it keeps, for a reason."""
    if not isinstance(thing, type):
        return ""
    parameters = Parameters(vars(thing)["forward"], bound=1)
    usual = {name for role in ("mask", "position", "identity") for name in ROLES[role]}
    unread = [name for name in parameters.all if name in usual and name not in parameters.read]
    kept = sorted({name for module in built.values() for name, _ in list_tensors(module)})
    reason = f"; its code does not read {', '.join(unread)}" if unread else ""
    return f"{reason}; it keeps other tensors: {', '.join(kept)}" if kept else reason


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
    if module is not None:
        randomize(module, _make_random(torch.float32), 1)
    agreed: list[Any] = []
    for sizes in (_CORE,) if isinstance(form, Pool) else (_CORE, _OTHER_CORE):
        _try_sizes(functools.partial(_try_core_examples, form, module, function, agreed), sizes)
    return form if module is None else dataclasses.replace(form, tried=_describe(module, thing(), function, agreed))


def _try_core_examples(form: Any, module: Any, function: Any, agreed: list[Any], sizes: _Sizes) -> None:
    theirs, ours = _make_runs(form, function, module, sizes.maps)
    for ways in _make_core_examples(form, sizes):
        refusals = []
        for inputs in ways:  # until the thing takes one of them
            try:
                _compare(theirs, ours, inputs)
                agreed.append((theirs, ours, inputs))
                break
            except _TheirsRaises as error:
                refusals.append(error)
        else:
            raise refusals[0]


def _make_core_examples(form: Any, sizes: _Sizes) -> Iterator[list[Arguments]]:
    """Return an example of every kind that the form serves, each in the ways to write it."""
    if isinstance(form, Pool):
        yield [dict(zip(form.parameters, form.example(), strict=True))]
        return
    shapes, starts = make_tables(sizes.maps, torch.device("cpu"))
    common = {"sizes": list(sizes.maps), "starts": starts, "counts": list(sizes.counts), "step": 64, "value_shape": "default"}
    split = (sizes.levels, sizes.points)
    for axes, method in itertools.product(form.axes, form.methods):
        points = (sum(sizes.counts),) if form.uneven else split if axes == SPLIT else (math.prod(split),)
        inputs = {**common, **_make_core_tensors(sizes, points), "method": method}
        if form.pixels:
            inputs["locations"] = (inputs["locations"] * 8).round().long() - 1
        tables = [[[*s] for s in sizes.maps], shapes] if form.kind == FUNCTION else [shapes]
        yield [{**inputs, "shapes": table} for table in tables]


def _make_core_tensors(sizes: _Sizes, points: Sequence[int]) -> dict[str, Any]:
    """Return value, locations and weights; some locations lie outside the map, some weights are negative."""
    rand, samples = _make_random(torch.float32), (sizes.batches, sizes.queries, sizes.heads, *points)
    value = rand(sizes.batches, sum(h * w for h, w in sizes.maps), sizes.heads, sizes.channels) - 0.5
    return {"value": value, "locations": rand(*samples, 2) * 1.4 - 0.2, "weights": rand(*samples) * 1.5 - 0.5}


def _make_random(dtype: torch.dtype) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.rand(*shape, generator=generator, dtype=dtype)


def _try_module(form: Attention, kind: type, built: dict[Any, Any]) -> Attention:
    """Try each shape of reference points at two sizes, of which one is in training: its dropout draws the same numbers twice.

    A shape that the module itself refuses is no objection. In use it goes to the module's own code. `built` holds the modules
    of earlier forms, by their sizes and the arguments of their constructors.
    """
    function = unwrap(vars(kind)["forward"])
    attempt = functools.partial(_try_examples, form, kind, function, built)
    small, examples, agreed = _try_sizes(attempt, _SMALL)
    limits = [
        c for c in collect_constants(kind, function) if c < _MOST_QUERIES
    ]  # code may compare numbers of queries with them
    large, others, _ = _try_sizes(attempt, dataclasses.replace(_LARGE, queries=max((_LARGE.queries - 1, *limits)) + 1))
    if not any(has_memory for _, has_memory in examples & others):
        raise _TheirsRaises("it does not run on the same examples at two sizes")
    tried = _describe(small, large, function, agreed)
    return dataclasses.replace(form, tried=tried, examples=frozenset(examples & others))


def _try_examples(
    form: Attention, kind: type, function: Any, built: dict[Any, Any], sizes: _Sizes
) -> tuple[Any, set[Any], Any]:
    """Return a module of these sizes, the kinds of examples that it runs and that agree, and the examples."""
    if (key := (sizes, form.uneven)) not in built:
        built[key] = _build(kind, sizes, form.uneven)
    module = built[key]
    if not form.reads_points_of(module):
        raise ValueError("it has its own number of points for each level, or one for all")
    maps, kinds, agreed, refusals = list(sizes.maps[: get_levels(module)]), set(), [], []
    theirs, ours = _make_runs(form, function, module, maps)
    for example, inputs in _make_module_examples(form, module, maps, sizes):
        if example in kinds:  # with another number of queries
            continue
        if _LISTED & set(Parameters(function).all):
            inputs = {**inputs, "shapes": maps}
        try:
            _compare(theirs, ours, inputs, list(module.parameters()))
            kinds.add(example)
            agreed.append((theirs, ours, inputs))
        except _TheirsRaises as error:
            refusals.append(error)
    if not any(has_memory for _, has_memory in kinds):
        raise refusals[0]
    return module, kinds, agreed


def _build(kind: type, sizes: _Sizes, uneven: Set[str]) -> Any:
    """Return an instance in float64 with random numbers in its tensors: of these sizes, or of the class's own fixed ones."""
    small = sizes.arguments(uneven)
    try:
        module = kind(**{name: small[name] for name in inspect.signature(kind).parameters if name in small})
        if module.sampling_offsets.in_features not in (sizes.width, 2 * sizes.width):
            module = kind()
        module = module.to(torch.float64).train(sizes.training)
    except Exception as error:
        raise _TheirsRaises(_describe_error(error)) from error
    randomize(module, _make_random(torch.float64), sizes.spread)
    return module


def _make_module_examples(
    form: Attention, module: Any, maps: Sequence[Any], sizes: _Sizes
) -> Iterator[tuple[tuple[int, bool], Arguments]]:
    """Return arguments by role: for each shape of the reference all of them, and only what is needed. Some references lie
    outside. A module that looks at itself has as many queries as keys, and so have some others."""
    rand, keys, width = _make_random(torch.float64), sum(h * w for h, w in maps), module.sampling_offsets.in_features
    width = width // form.queue if getattr(module, "num_bev_queue", 1) == form.queue else width
    shapes, starts = make_tables(maps, torch.device("cpu"))
    tables, batches = {"shapes": shapes, "sizes": maps, "starts": starts}, sizes.batches
    heads = (width,) if form.layout is ROWS else (get_heads(module), width // get_heads(module))

    def rows(batches: int, count: int, *sides: int) -> Tensor:
        tensor = rand(batches, count, *sides) - 0.5
        return tensor if getattr(module, "batch_first", True) else tensor.transpose(0, 1)

    if "trajectories" in form.needs:
        yield from (((2, True), {**tables, **i}) for i in _make_trajectory_inputs(rand, sizes.batches, keys, width, len(maps)))
        return
    for count, numbers in form.references:
        for queries, has_memory in ((sizes.queries, True), (keys, True), (keys, False)):
            reference = 1.4 * rand(batches * form.queue, queries, len(maps) if count == LEVELS else count, numbers) - 0.2
            reference[..., 2:] = reference[..., 2:].abs()
            inputs = {**tables, "query": rows(batches, queries, width), "reference": reference}
            optional = {"value": rows(batches * form.queue, keys, *heads)}
            optional |= {name: rows(batches, queries, width) for name in ("identity", "position")}
            mask = rand(batches * form.queue, keys) < 0.3 if form.masked else None
            optional = {**optional, "mask": mask} if has_memory else dict.fromkeys((*optional, "mask"))
            yield (numbers, has_memory), {**inputs, **optional}


def _make_trajectory_inputs(
    rand: Callable[..., Tensor], batches: int, keys: int, width: int, levels: int
) -> Iterator[Arguments]:
    boxes = [(SimpleNamespace(gravity_center=20 * rand(2, 3) - 10),) + 4 * (None,) for _ in range(batches)]
    query, identity, position = (rand(batches, 2, 3, width) - 0.5 for _ in range(3))
    trajectories = 20 * rand(batches, 2, 3, 2, levels, 2) - 10
    needed = {"query": query, "value": rand(keys, batches, width) - 0.5, "trajectories": trajectories, "boxes": boxes}
    yield {**needed, "identity": identity, "position": position, "mask": rand(batches, keys) < 0.3}
    yield needed


def _describe_error(error: Exception) -> str:
    return f"it does not run on a small example: {type(error).__name__}: {error}"


def _describe(module: Any, other: Any, function: Any, agreed: Sequence[tuple[_Run, _Run, Arguments]]) -> Tried:
    """Return what of a module's state the trial holds for, by changes of it on the examples that agreed."""
    called: list[Any] = []
    with torch.nn.modules.module.register_module_forward_pre_hook(lambda layer, _: called.append(layer)):
        for _, ours, inputs in agreed:
            ours(inputs)

    def examples() -> Iterator[tuple[_Run, _Run, Arguments]]:
        for training in (True, False):
            module.train(training)
            yield from agreed

    before = [theirs(inputs) for theirs, _, inputs in examples()]

    def compare() -> str:
        outcomes = {_compare_outputs(*example, out) for example, out in zip(examples(), before, strict=True)}
        return next((outcome for outcome in (DIFFERS, FOLLOWED, SAME) if outcome in outcomes), RAISES)

    return describe_tried(module, other, function, called, compare)


def _compare_outputs(theirs: _Run, ours: _Run, inputs: Arguments, before: Any) -> str:
    """Return what a change of a module did to its output, and whether ours is the same."""
    try:
        expected = theirs(inputs)
    except Exception:  # the change is not possible alone, as that of most sizes
        return RAISES
    try:
        agrees = _measure(ours(inputs), expected) < _CLOSE
    except Exception:  # a form may raise anything over an unknown thing
        return DIFFERS
    return DIFFERS if not agrees else SAME if _measure(before, expected) == 0 else FOLLOWED


def _measure(results: Any, expected: Any) -> float:
    """Return the largest difference of two outputs, or infinity where they are not the same tensors."""
    ours, theirs = ([*r] if isinstance(r, tuple) else [r] for r in (results, expected))
    if [t.shape for t in ours] != [t.shape for t in theirs]:
        return math.inf
    return max(float((a - b).detach().abs().max()) for a, b in zip(ours, theirs, strict=True))


def _compare(theirs: _Run, ours: _Run, inputs: Arguments, parameters: Sequence[Tensor] = ()) -> None:
    """Raise unless outputs and the gradients of all floating inputs and parameters agree."""
    try:
        expected = _compute_results(theirs, inputs, parameters)
    except Exception as error:  # an unknown core may raise anything
        raise _TheirsRaises(_describe_error(error)) from error
    results = _compute_results(ours, inputs, parameters)
    difference = _measure(tuple(results), tuple(expected))
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
