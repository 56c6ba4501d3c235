"""Try a core or an attention module before it is replaced. Code with other numbers than ours is left alone, whatever its name.

There is no table of versions. A version that nobody has seen either gives the same numbers or is left alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from ._attention import Attention, get_levels
from ._examples import CORE, LARGE, OTHER_CORE, SMALL, Sizes, make_core_examples, make_module_examples, make_random
from ._forms import AUTOGRAD, ROLES, ROWS, Arguments, Form, find_role, map_to_roles
from ._parameters import Parameters, collect_constants, unwrap
from ._pools import Pool, calls_compiled
from ._state import DIFFERS, FOLLOWED, RAISES, SAME, Tried, describe_tried, list_tensors, randomize

_Run = Callable[[Arguments], Any]  # of arguments by role, value in our layout
_CLOSE = 1e-4  # float32 sums of 12 terms of size 1
_MOST_QUERIES = 2_000
_LISTED = {"value_spatial_shapes", "value_shapes"}  # modules' names for shapes that are a list


def _try_sizes(attempt: Callable[[Sizes], Any], sizes: Sizes) -> Any:
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
        reason = f"its result on a small example differs from the operator's by {min(differences):.1e}"
        return None, reason + _name_unread(thing, built)
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
        randomize(module, make_random(torch.float32), 1)
    agreed: list[Any] = []
    for sizes in (CORE,) if isinstance(form, Pool) else (CORE, OTHER_CORE):
        _try_sizes(functools.partial(_try_core_examples, form, module, function, agreed), sizes)
    return form if module is None else dataclasses.replace(form, tried=_describe(module, thing(), function, agreed))


def _try_core_examples(form: Any, module: Any, function: Any, agreed: list[Any], sizes: Sizes) -> None:
    theirs, ours = _make_runs(form, function, module, sizes.maps)
    for ways in make_core_examples(form, sizes):
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


def _try_module(form: Attention, kind: type, built: dict[Any, Any]) -> Attention:
    """Try each shape of reference points at two sizes, of which one is in training: its dropout draws the same numbers twice.

    A shape that the module itself refuses is no objection. In use it goes to the module's own code. `built` holds the modules
    of earlier forms, by their sizes and the arguments of their constructors.
    """
    function = unwrap(vars(kind)["forward"])
    attempt = functools.partial(_try_examples, form, kind, function, built)
    small, examples, agreed = _try_sizes(attempt, SMALL)
    # code may compare the number of queries with its constants
    limits = (constant + 1 for constant in collect_constants(kind, function) if constant < _MOST_QUERIES)
    large, others, _ = _try_sizes(attempt, dataclasses.replace(LARGE, queries=max((LARGE.queries, *limits))))
    if not any(has_memory for _, has_memory in examples & others):
        raise _TheirsRaises("it does not run on the same examples at two sizes")
    tried = _describe(small, large, function, agreed)
    return dataclasses.replace(form, tried=tried, examples=frozenset(examples & others))


def _try_examples(form: Attention, kind: type, function: Any, built: dict[Any, Any], sizes: Sizes) -> tuple[Any, set[Any], Any]:
    """Return a module of these sizes, the kinds of examples that it runs and that agree, and the examples."""
    if (key := (sizes, form.uneven)) not in built:
        built[key] = _build(kind, sizes, form.uneven)
    module = built[key]
    if not form.reads_points_of(module):
        raise ValueError("it has its own number of points for each level, or one for all")
    maps, kinds, agreed, refusals = list(sizes.maps[: get_levels(module)]), set(), [], []
    theirs, ours = _make_runs(form, function, module, maps)
    for example, inputs in make_module_examples(form, module, maps, sizes):
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


def _build(kind: type, sizes: Sizes, uneven: Set[str]) -> Any:
    """Return an instance in float64 with random numbers in its tensors: of these sizes, or of the class's own fixed ones."""
    small = sizes.arguments(uneven)
    try:
        module = kind(**{name: small[name] for name in inspect.signature(kind).parameters if name in small})
        if module.sampling_offsets.in_features not in (sizes.width, 2 * sizes.width):
            module = kind()
        module = module.to(torch.float64).train(sizes.training)
    except Exception as error:
        raise _TheirsRaises(_describe_error(error)) from error
    randomize(module, make_random(torch.float64), sizes.spread)
    return module


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
