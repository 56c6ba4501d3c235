"""Try a core or an attention module before it is replaced, to find its form. Code with other numbers than ours is left alone,
whatever its name.

There is no table of versions. A version that nobody has seen either gives the same numbers or is left alone. The trial is one
small example. Whether a layer computes the same on the caller's inputs is proven on these (_proof.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from ._attention import Attention, get_levels
from ._comparison import Results, isolate
from ._examples import CORE, SMALL, Sizes, make_core_examples, make_module_examples, make_random
from ._forms import AUTOGRAD, FUNCTION, MODULE, ROWS, Arguments, Form, find_role
from ._parameters import Parameters, unwrap
from ._pools import Pool, calls_compiled
from ._proof import trials
from ._snapshot import explain_lost, list_plain_state, watch

_Run = Callable[[Arguments], Any]  # of arguments by role, value in our layout
_CLOSE = 1e-4  # float32 sums of 12 terms of size 1
_LISTED = {"value_spatial_shapes", "value_shapes"}  # modules' names for shapes that are a list


class _Differs(Exception):
    """The numbers of a thing differ from the operator's: `args[0]` by how much, or why it cannot be replaced."""


class _TheirsRaises(Exception):
    """The thing does not run on a small example: `args[0]`."""


def choose(forms: Sequence[Form], thing: Any) -> tuple[Form | None, str]:
    """Return the first form that the thing agrees with, else None and the reason.

    Of several reasons, the numbers come first, then that the thing does not run, then that a form of ours does not. An
    autograd function that does not run here needs a compiled extension, and is taken by its name.
    """
    by_name = forms[0].kind == AUTOGRAD
    if calls_compiled(thing.forward if by_name else thing) and (by_name or isinstance(forms[0], Pool)):
        return (forms[0], "") if by_name else (None, "it calls a compiled file, which has no CPU path to compare with")
    differences, theirs, ours, built = [], [], [], {}
    with (
        _run_trials(),
        isolate(None, torch.device("cpu")),
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
        words = [reason for reason in differences if isinstance(reason, str)]
        nearest = min((number for number in differences if not isinstance(number, str)), default=0.0)
        return None, words[0] if words else f"its result on a small example differs from the operator's by {nearest:.1e}"
    return (forms[0], "") if by_name else (None, next(filter(None, (*theirs, *ours)), "it does not run on a small example"))


@contextlib.contextmanager
def _run_trials() -> Iterator[None]:
    """Prove nothing, and run on one thread. To wake other threads takes longer than these examples."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    trials.running = True
    try:
        yield
    finally:
        trials.running = False
        torch.set_num_threads(num_threads)


def _make_runs(form: Form, function: Any, module: Any, sizes: Sequence[tuple[int, int]]) -> tuple[_Run, _Run]:
    """Return what the original and the form compute of arguments by role, with the same random numbers each time."""
    bound = [] if module is None else [module]
    own = function.forward if form.kind == AUTOGRAD else function
    parameters, layout = Parameters(own, int(form.kind != FUNCTION)), getattr(form, "layout", ROWS)

    def name_arguments(inputs: Arguments) -> dict[str, Any]:
        torch.default_generator.manual_seed(0)  # not those of GPUs, which `isolate` does not give back here
        value = inputs.get("value")
        if value is not None and layout is not ROWS:
            inputs = {**inputs, "value": layout.theirs(value, sizes)}
        return {name: inputs.get(find_role(name), parameters.defaults.get(name)) for name in parameters.all}

    def theirs(inputs: Arguments) -> Any:
        if form.kind == AUTOGRAD:
            return function.apply(*name_arguments(inputs).values())
        return function(*bound, **name_arguments(inputs))

    def ours(inputs: Arguments) -> Any:
        arguments, names = name_arguments(inputs), parameters.all if form.reads_all else parameters.read
        return form.answer(module, {find_role(name): arguments[name] for name in names})

    return theirs, ours


def _try_core(form: Any, thing: Any) -> Form:
    """Return the form if a core or a pool gives our outputs and gradients; raise where it does not."""
    is_layer = form.kind == MODULE
    function, module = (unwrap(vars(thing)["forward"]), thing()) if is_layer else (thing, None)
    _try_core_examples(form, module, function, CORE)
    return dataclasses.replace(form, tried=(thing, list_plain_state(module) if is_layer else None))


def _try_core_examples(form: Any, module: Any, function: Any, sizes: Sizes) -> None:
    theirs, ours = _make_runs(form, function, module, sizes.maps)
    for ways in make_core_examples(form, sizes):
        refusals = []
        for inputs in ways:  # until the thing takes one of them
            try:
                _compare(theirs, ours, inputs)
                break
            except _TheirsRaises as error:
                refusals.append(error)
        else:
            raise refusals[0]


def _try_module(form: Attention, kind: type, built: dict[Any, Any]) -> Attention:
    """Try each shape of reference points, in training: dropout draws the same numbers twice.

    A shape that the module itself refuses is no objection. `built` holds the modules of earlier forms, by their sizes and the
    arguments of their constructors.
    """
    function = unwrap(vars(kind)["forward"])
    try:
        module = _try_examples(form, kind, function, built, SMALL)
    except _TheirsRaises:  # RT-DETR's own code does not run with a mask
        form = dataclasses.replace(form, masked=False)
        module = _try_examples(form, kind, function, built, SMALL)
    return dataclasses.replace(form, tried=(kind, list_plain_state(module)))


def _try_examples(form: Attention, kind: type, function: Any, built: dict[Any, Any], sizes: Sizes) -> Any:
    """Return a module of these sizes that agrees on all examples that it runs."""
    if (key := (sizes, form.uneven)) not in built:
        built[key] = _build(kind, sizes, form.uneven)
    module = built[key]
    if not form.reads_points_of(module):
        raise ValueError("it has its own number of points for each level, or one for all")
    maps, kinds, refusals = list(sizes.maps[: get_levels(module)]), set(), []
    theirs, ours = _make_runs(form, function, module, maps)
    for example, inputs in make_module_examples(form, module, maps, sizes):
        if example in kinds:  # with another number of queries
            continue
        if _LISTED & set(Parameters(function).all):
            inputs = {**inputs, "shapes": maps}
        try:
            _compare(theirs, ours, inputs, module)
            kinds.add(example)
        except _TheirsRaises as error:
            refusals.append(error)
    if not any(has_memory for _, has_memory in kinds):
        raise refusals[0]
    return module


def _build(kind: type, sizes: Sizes, uneven: Set[str]) -> Any:
    """Return an instance in float64 with random parameters: of these sizes, or of the class's own fixed ones."""
    small = sizes.arguments(uneven)
    try:
        module = kind(**{name: small[name] for name in inspect.signature(kind).parameters if name in small})
        if module.sampling_offsets.in_features not in (sizes.width, 2 * sizes.width):
            module = kind()
        module = module.to(torch.float64).train()
    except Exception as error:
        raise _TheirsRaises("" if uneven else _describe_error(error)) from error
    rand = make_random(torch.float64)
    for p in module.parameters():
        p.data = sizes.spread * (2 * rand(*p.shape) - 1)
    return module


def _describe_error(error: Exception) -> str:
    return f"it does not run on a small example: {type(error).__name__}: {error}"


def _compare(theirs: _Run, ours: _Run, inputs: Arguments, module: Any = None) -> None:
    """Raise unless outputs and the gradients of all floating inputs and parameters agree."""
    parameters = [] if module is None else [p for p in module.parameters() if p.requires_grad]
    try:
        expected, written = _compute_results(theirs, inputs, module, parameters)
    except Exception as error:  # an unknown core may raise anything
        raise _TheirsRaises(_describe_error(error)) from error
    for out in expected.others:
        raise TypeError(f"it returns {type(out).__name__} instead of a tensor")
    results, done = _compute_results(ours, inputs, module, parameters)
    worst = max(results.measure_outputs(expected), results.measure_gradients(expected))
    if not worst < _CLOSE or results.dtypes != expected.dtypes:
        raise _Differs(worst)
    if written - done:
        raise _Differs(explain_lost(written - done))


def _compute_results(run: _Run, inputs: Arguments, module: Any, parameters: Sequence[Tensor]) -> tuple[Results, set[str]]:
    """Return outputs and gradients, and what the run writes to the layer. Trajectories have no gradient."""
    floating = {n: i for n, i in inputs.items() if isinstance(i, Tensor) and i.is_floating_point() and n != "trajectories"}
    tensors = {n: i.clone().requires_grad_() for n, i in floating.items()}
    with watch(module, (), None) as written:
        returned = run({**inputs, **tensors})
    return Results(returned, [*tensors.values(), *parameters]), written
