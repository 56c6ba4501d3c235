"""Try a form on something of unknown code: the form's outputs and gradients must be the thing's own, in float64.

An unknown core is tried if it is pure (_pure.py), a module or a function that a user names if it can be built. The same trial
admits the rows of known.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from .._torch_private import tree_flatten
from ._attention import Attention, get_levels
from ._code import Code
from ._examples import SIZES_OF_CORES, SMALL, Sizes, make_core_examples, make_module_examples, make_random
from ._fit import Fit, select_names
from ._forms import AUTOGRAD, FUNCTION, MODULE, ROWS, Arguments, Form, find_role
from ._layers import list_cores
from ._parameters import Parameters, unwrap
from ._pools import Pool

CLOSE = 1e-10
_SINGLE = 1e-4  # of a core that computes in float32, whatever its inputs
_LISTED = {"value_spatial_shapes", "value_shapes"}  # modules' names for shapes that are a list
_Run = Callable[[Arguments], Any]  # of arguments by role, value in our layout
# attributes that every attention form reads as modules do, or that change no number
READ = frozenset(
    (
        *("n_heads", "num_heads", "n_levels", "num_levels", "n_points", "num_points", "batch_first", "im2col_step"),
        *("d_model", "embed_dims", "embed_dim", "hidden_size", "head_dim", "ratio"),
        *("value_proj", "output_proj", "sampling_offsets", "attention_weights"),
    )
)


class Differs(Exception):
    """A form does not compute what the thing computes: `args[0]` by how much, or in what."""


class Fails(Exception):
    """The thing does not run on a small example: `args[0]`."""


def try_forms(forms: Sequence[Form], thing: Any, code: Code) -> tuple[Fit | None, str, float]:
    """Return the first fit and its difference, else None and the reason.

    Of several reasons, the numbers come first, then that the thing does not run, then that a form of ours does not.
    """
    reasons: dict[type, list[Any]] = {Differs: [], Fails: [], Exception: []}
    with _isolate():
        for form in forms:
            try:
                fit, difference = (
                    _try_module(form, thing, code) if isinstance(form, Attention) else _try_core(form, thing, code)
                )
                return fit, "", difference
            except (Differs, Fails) as error:
                reasons[type(error)].append(error.args[0])
            except Exception as error:  # a form may raise anything over an unknown thing
                reasons[Exception].append(f"no known form fits it: {type(error).__name__}: {error}")
    words = [reason for reason in reasons[Differs] if isinstance(reason, str)]
    numbers = [reason for reason in reasons[Differs] if not isinstance(reason, str)]
    if numbers and not words:
        words = [f"its result on a small example differs from the operator's by {min(numbers):.1e}"]
    reason = next(filter(None, (*words, *reasons[Fails], *reasons[Exception])), "it does not run on a small example")
    return None, reason, min(numbers, default=math.inf)


@contextlib.contextmanager
def _isolate() -> Iterator[None]:
    """Give torch's random numbers and settings back. One thread: to wake others takes longer than these examples."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with (
            torch.random.fork_rng([]),
            torch.device("cpu"),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
        ):
            yield
    finally:
        torch.set_num_threads(num_threads)


def _make_runs(fit: Fit, function: Any, module: Any, sizes: Sequence[tuple[int, int]]) -> tuple[_Run, _Run]:
    """Return what the original and the form compute of arguments by role, with the same random numbers each time."""
    form, bound = fit.form, [] if module is None else [module]
    own = function.forward if form.kind == AUTOGRAD else function
    parameters, layout = Parameters(own, int(form.kind != FUNCTION)), getattr(form, "layout", ROWS)
    names = select_names(fit, parameters)

    def name_arguments(inputs: Arguments) -> dict[str, Any]:
        torch.default_generator.manual_seed(0)  # not those of GPUs, which a trial does not give back
        if inputs.get("value") is not None and layout is not ROWS:
            inputs = {**inputs, "value": layout.theirs(inputs["value"], sizes)}
        return {name: inputs.get(find_role(name), parameters.defaults.get(name)) for name in parameters.all}

    def theirs(inputs: Arguments) -> Any:
        arguments = name_arguments(inputs)
        return function.apply(*arguments.values()) if form.kind == AUTOGRAD else function(*bound, **arguments)

    def ours(inputs: Arguments) -> Any:
        arguments = name_arguments(inputs)
        return form.answer(module, {find_role(name): arguments[name] for name in names})

    return theirs, ours


def _try_core(form: Any, thing: Any, code: Code) -> tuple[Fit, float]:
    """Return the fit and the difference of a core or a pool. A core that is a layer has no attributes."""
    if form.kind == MODULE and (code.attributes or code.writes or code.passes_self):
        raise Differs(f"its code uses its attributes {', '.join(sorted(code.attributes | code.writes)) or 'in an unknown way'}")
    function, module = (unwrap(vars(thing)["forward"]), thing()) if form.kind == MODULE else (thing, None)
    parameters = Parameters(function.forward if form.kind == AUTOGRAD else function, int(form.kind != FUNCTION))
    starts = form.kind == AUTOGRAD or any(find_role(name) == "starts" for name in parameters.read)
    fit = Fit(form, thing if form.kind == MODULE else None, starts=starts, options=_find_options(form, parameters))
    worst = 0.0
    for sizes in SIZES_OF_CORES:
        theirs, ours = _make_runs(fit, function, module, sizes.maps)
        for ways in make_core_examples(form, sizes):
            worst = max(worst, _compare_one(theirs, ours, ways))
            # The class in a pool's function is over a compiled file, which has no autocast; it may be replaced already.
            _check_dtypes(theirs, ours, ways, (False,) if isinstance(form, Pool) else (False, True))
    for name, values in fit.options.items():
        if isinstance(values[0], bool) and _agrees_with(fit, function, module, name, not values[0]):
            values += (not values[0],)
            fit = dataclasses.replace(fit, options={**fit.options, name: values})
    return fit, worst


def _find_options(form: Any, parameters: Parameters) -> dict[str, tuple[Any, ...]]:
    """Return the parameters that the code reads and the form has no role for, with their defaults."""
    if form.reads_all:
        return {}
    unknown = [name for name in parameters.read if find_role(name) not in form.roles]
    return {name: (parameters.defaults[name],) for name in unknown}


def _agrees_with(fit: Fit, function: Any, module: Any, name: str, value: Any) -> bool:
    """Return whether another value of an option changes no number."""
    changed = dataclasses.replace(fit)
    theirs, ours = _make_runs(changed, function, module, SIZES_OF_CORES[0].maps)
    try:
        for ways in make_core_examples(fit.form, SIZES_OF_CORES[0]):
            _compare_one(theirs, ours, [{**inputs, name: value} for inputs in ways])
    except Exception:
        return False
    return True


def _compare_one(theirs: _Run, ours: _Run, ways: Sequence[Arguments]) -> float:
    """Return the difference on the first of the ways to write an example that the thing takes."""
    refusals = []
    for inputs in ways:
        try:
            return compare(theirs, ours, inputs)
        except Fails as error:
            refusals.append(error)
    raise refusals[0]


def _try_module(form: Attention, kind: type, code: Code) -> tuple[Fit, float]:
    """Return the fit of an attention module: the flags and references with which it agrees, in training and evaluation.

    A shape of the reference, or a mask, that the module itself refuses is not served.
    """
    if code.writes or code.passes_self:
        word = f"sets its attributes {', '.join(sorted(code.writes))}" if code.writes else "hands itself to other code"
        raise Differs(f"its code {word}")
    function, module = unwrap(vars(kind)["forward"]), _build(kind, SMALL, form.uneven)
    if not form.reads_points_of(module):
        raise ValueError("it has its own number of points for each level, or one for all")
    parameters = Parameters(function, 1)
    cores = [*code.cores, *list_cores(kind)]
    holders = tuple(sorted(n for n in code.attributes if _holds_core(getattr(module, n, None), cores)))
    flags = _find_flags(module, code.attributes - READ - form.reads - set(holders))
    fit = Fit(form, kind, flags, _find_options(form, parameters), holders, tuple(cores), tuple(sorted(code.methods)))
    fit, worst = _try_references(fit, function, module)
    for name, values in flags.items():
        if isinstance(values[0], bool):
            setattr(module, name, not values[0])
            with contextlib.suppress(Differs, Fails):
                worst = max(worst, _try_references(fit, function, module)[1])
                fit = dataclasses.replace(fit, flags={**fit.flags, name: (*values, not values[0])})
            setattr(module, name, values[0])
    worst = max(worst, _try_references(fit, function, module.eval())[1])
    runs = _make_runs(fit, function, module.bfloat16(), SMALL.maps)
    _check_dtypes(*runs, (inputs for _, inputs in make_module_examples(form, module, _get_maps(module), SMALL, False)))
    return fit, worst


def _get_maps(module: Any) -> list[tuple[int, int]]:
    return list(SMALL.maps[: get_levels(module)])


def _check_dtypes(theirs: _Run, ours: _Run, examples: Iterable[Arguments], autocasts: Sequence[bool] = (False, True)) -> None:
    """Check that the results have the dtypes of the own code in bfloat16 and under autocast, where that runs."""
    for inputs, under_autocast in itertools.product(examples, autocasts):
        low = {n: i.bfloat16() if isinstance(i, Tensor) and i.is_floating_point() else i for n, i in inputs.items()}
        with torch.autocast("cpu", torch.bfloat16, enabled=under_autocast), torch.no_grad():
            try:
                expected = [out.dtype for out in tree_flatten(theirs(low))[0]]
            except Exception:  # a core may not run in 16 bits
                continue
            dtypes = [out.dtype for out in tree_flatten(ours(low))[0]]
        if dtypes != expected:
            raise Differs(
                f"its results are {expected[0]}, ours {dtypes[0]}, for bfloat16 {'under autocast' * under_autocast}".strip()
            )


def _holds_core(value: Any, cores: Sequence[Any]) -> bool:
    core = getattr(value, "func", value)
    return any(core is other or type(core) is other for other in cores)


def _find_flags(module: Any, names: Set[str]) -> dict[str, tuple[Any, ...]]:
    flags = {}
    for name in sorted(names):
        value = getattr(module, name, None)
        if not isinstance(value, (bool, int, float, str, type(None))):
            raise Differs(f"its code reads the attribute {name}, which no form has")
        flags[name] = (value,)
    return flags


def _try_references(fit: Fit, function: Any, module: Any) -> tuple[Fit, float]:
    """Try each shape of reference points. RT-DETR's own code does not run with a mask."""
    try:
        return _try_masked(fit, function, module, True)
    except Fails:
        return _try_masked(dataclasses.replace(fit, masked=False), function, module, False)


def _try_masked(fit: Fit, function: Any, module: Any, masked: bool) -> tuple[Fit, float]:
    form: Any = fit.form
    maps, kinds, refusals, worst = _get_maps(module), set(), [], 0.0
    theirs, ours = _make_runs(fit, function, module, maps)
    for example, inputs in make_module_examples(form, module, maps, SMALL, masked):
        if example in kinds:  # with another number of queries
            continue
        inputs = {**inputs, "shapes": maps} if set(Parameters(function).all) & _LISTED else inputs
        try:
            worst = max(worst, compare(theirs, ours, inputs, module))
            kinds.add(example)
        except Fails as error:
            refusals.append(error)
    if not any(has_memory for _, has_memory in kinds):
        raise refusals[0]
    return dataclasses.replace(fit, widths=tuple(sorted({width for width, _ in kinds}))), worst


def _build(kind: type, sizes: Sizes, uneven: Set[str]) -> Any:
    """Return an instance in float64 with random parameters: of these sizes, or of the class's own fixed ones."""
    small = sizes.arguments(uneven)
    try:
        module = kind(**{name: small[name] for name in inspect.signature(kind).parameters if name in small})
        if module.sampling_offsets.in_features not in (sizes.width, 2 * sizes.width):
            module = kind()
        module = module.to(torch.float64).train()
    except Exception as error:
        raise Fails("" if uneven else _describe_error(error)) from error
    rand = make_random(torch.float64)
    for p in module.parameters():
        p.data = sizes.spread * (2 * rand(*p.shape) - 1)
    return module


def _describe_error(error: Exception) -> str:
    return f"it does not run on a small example: {type(error).__name__}: {error}"


def compare(theirs: _Run, ours: _Run, inputs: Arguments, module: Any = None) -> float:
    """Return the largest difference of the outputs and of the gradients of all floating inputs and parameters; raise for a
    large one."""
    parameters = [] if module is None else [p for p in module.parameters() if p.requires_grad]
    try:
        expected = _compute(theirs, inputs, parameters)
    except Exception as error:  # an unknown core may raise anything
        raise Fails(_describe_error(error)) from error
    if not all(isinstance(out, Tensor) for out in expected[0]):
        raise Differs("it returns something else beside tensors")
    results = _compute(ours, inputs, parameters)
    if len(results[0]) != len(expected[0]) or any(a.shape != b.shape for a, b in zip(results[0], expected[0], strict=True)):
        raise Differs("its results have other shapes")
    worst = max(_difference(a, b) for part in (0, 1) for a, b in zip(results[part], expected[part], strict=True))
    single = any(out.dtype != torch.float64 for out in expected[0])
    if not worst < (_SINGLE if single else CLOSE):
        raise Differs(worst)
    if [out.dtype for out in results[0]] != [out.dtype for out in expected[0]]:
        raise Differs("its results have another dtype")
    return worst


def _compute(run: _Run, inputs: Arguments, parameters: Sequence[Tensor]) -> tuple[list[Any], list[Any]]:
    """Return outputs and gradients. Trajectories have no gradient."""
    floating = {n: i for n, i in inputs.items() if isinstance(i, Tensor) and i.is_floating_point() and n != "trajectories"}
    tensors = {n: i.clone().requires_grad_() for n, i in floating.items()}
    outputs = tree_flatten(run({**inputs, **tensors}))[0]
    ends = [out for out in outputs if isinstance(out, Tensor) and out.requires_grad]
    leaves = [*tensors.values(), *parameters]
    if not ends:
        return outputs, [torch.zeros(())] * len(leaves)
    rand = make_random(torch.float64)
    directions = [(rand(*out.shape) - 0.5).to(out.dtype) for out in ends]
    gradients = torch.autograd.grad(ends, leaves, directions, allow_unused=True)
    return outputs, [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(gradients, leaves, strict=True)]


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference of an entry beside the largest entry."""
    ours, theirs = ours.detach().double(), theirs.detach().double()
    if not theirs.numel():
        return 0.0
    largest = float((ours - theirs).abs().max())
    return largest / max(float(theirs.abs().max()), 1.0) if math.isfinite(largest) else math.inf
