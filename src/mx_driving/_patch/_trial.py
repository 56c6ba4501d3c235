"""Try a form on unknown code: its outputs and gradients on small examples must be those of the original, in float64.

An unknown core is tried if it is pure (_pure.py). A module or a function whose form a user names is tried if it can be built.
The same trial admits the entries of known.jsonl.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._torch_private import tree_flatten
from ._attention import READ, Attention
from ._code import Code
from ._examples import SMALL, Example, make_examples, make_random
from ._fit import Fit, make_fit, make_stand_in
from ._forms import AUTOGRAD, FUNCTION, MODULE, ROWS, Arguments, Form, find_role
from ._layers import list_cores
from ._pools import Pool
from ._search import Candidate

CLOSE = 1e-10  # A smaller difference of the results counts as agreement.
_SINGLE = 1e-4  # the limit in place of CLOSE for a core that computes in float32, whatever the dtypes of its inputs
_Run = Callable[[Arguments], Any]  # runs a function on arguments by role, with value in our layout


class Refused(Exception):
    """The form is refused: `args[0]` is the reason. If all forms are refused, the refusal with the lowest rank is reported."""

    rank, difference = 3, math.inf


class Differs(Refused):
    """The results of the form have another shape or dtype, or the layer has a state that the form does not know."""

    rank = 0


class DiffersBy(Refused):
    """The results of the form have the shapes of the original's results, but other numbers."""

    rank = 1

    def __init__(self, difference: float) -> None:
        super().__init__(f"its result on a small example differs from the operator's by {difference:.1e}")
        self.difference = difference


class Fails(Refused):
    """The original does not run on a small example."""

    rank = 2


@dataclass(frozen=True)
class Finding:
    """Which form a candidate has.

    Attributes:
        name: the name of the function or class, with its Python module.
        key: the key of its code, or nothing.
        state: "known", "by name", "tried" or "unknown".
        form: the name of the form, or of the nearest one.
        difference: the largest difference of the results, in float64; inf if they cannot be compared, nan without a trial.
        reason: why no form serves it.
        fit: the calls that the form serves.
    """

    name: str
    key: str
    state: str = "unknown"
    form: str = ""
    difference: float = math.nan
    reason: str = ""
    fit: Fit | None = None

    def __str__(self) -> str:
        difference = "" if math.isnan(self.difference) else f", difference {self.difference:.1e}"
        return f"{self.state:8}{self.name}: {self.form or 'no form'}{difference}{': ' if self.reason else ''}{self.reason}"


def try_forms(forms: Mapping[str, Form], candidate: Candidate, code: Code) -> Finding:
    """Return the first form whose results agree with the original's. If no form agrees, return the most telling refusal."""
    refusals: dict[str, Refused] = {}
    with _isolate():
        for name, form in forms.items():
            try:
                fit, difference = _try_form(form, candidate, code)
                return Finding(candidate.name, code.key, "tried", name, difference, fit=fit)
            except Refused as error:
                refusals[name] = error
            except Exception as error:  # A form may raise anything on unknown code.
                refusals[name] = Refused(f"no known form fits it: {type(error).__name__}: {error}")
    name = min(refusals, key=lambda name: (not refusals[name].args[0], refusals[name].rank, refusals[name].difference))
    reason = refusals[name].args[0] or "it does not run on a small example"
    return Finding(candidate.name, code.key, form=name, difference=refusals[name].difference, reason=reason)


@contextlib.contextmanager
def _isolate() -> Iterator[None]:
    """Run a trial on the CPU in one thread, then restore torch's settings and random state.

    To wake other threads would take longer than the examples.
    """
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


def _try_form(form: Any, candidate: Candidate, code: Code) -> tuple[Fit, float]:
    """Return the fit of the form, and the largest difference of results. Try modules in training and in evaluation."""
    _check_state(form, code)
    module, flags, cores = None, {}, []
    if isinstance(form, Attention):
        cores = list_cores(candidate.original)
        module = _build(candidate.original, form)
        flags = _find_flags(module, code.attributes - READ - form.reads, [*code.cores, *cores])
    elif form.kind == MODULE:
        module = candidate.original()
    fit = make_fit(form, candidate, code, flags, tuple(cores))
    fit, difference = _try_examples(fit, candidate, module)
    for name, (value, *_) in {**fit.flags, **fit.options}.items():
        if isinstance(value, bool):
            fit = _widen(fit, candidate, module, name, value)
    if module is not None:
        difference = max(difference, _try_examples(fit, candidate, module.eval())[1])
        module.bfloat16()
    _check_dtypes(_make_runs(fit, candidate, module), make_examples(form, module, candidate.parameters), isinstance(form, Pool))
    return fit, difference


def _check_state(form: Any, code: Code) -> None:
    """Check that a module neither sets its attributes nor passes itself on. A core that is a layer must not read attributes."""
    if form.kind == MODULE and not isinstance(form, Attention) and (code.attributes or code.writes or code.passes_self):
        raise Differs(f"its code uses its attributes {', '.join(sorted(code.attributes | code.writes)) or 'in an unknown way'}")
    if form.kind == MODULE and code.writes:
        raise Differs(f"its code sets its attributes {', '.join(sorted(code.writes))}")
    if form.kind == MODULE and code.passes_self:
        raise Differs("its code hands itself to other code")


def _find_flags(module: Any, names: Set[str], cores: Sequence[Any]) -> dict[str, tuple[Any, ...]]:
    """Return name -> value for the attributes in `names` that hold no core."""
    flags = {}
    for name in sorted(names):
        value = getattr(module, name, None)
        core = getattr(value, "func", value)
        if any(core is other or type(core) is other for other in cores):
            continue
        if not isinstance(value, (bool, int, float, str, type(None))):
            raise Differs(f"its code reads the attribute {name}, which no form has")
        flags[name] = (value,)
    return flags


def _widen(fit: Fit, candidate: Candidate, module: Any, name: str, value: bool) -> Fit:
    """Return a fit that serves both values of a boolean flag or option, if the other value gives the same results."""
    field = "flags" if name in fit.flags else "options"
    wider = dataclasses.replace(fit, **{field: {**getattr(fit, field), name: (value, not value)}})  # type: ignore[arg-type]
    if field == "flags":
        setattr(module, name, not value)
    try:
        _try_examples(wider, candidate, module, {} if field == "flags" else {name: not value})
        return wider
    except Exception:  # Unknown code may raise anything.
        return fit
    finally:
        if field == "flags":
            setattr(module, name, value)


def _try_examples(fit: Fit, candidate: Candidate, module: Any, more: Arguments | None = None) -> tuple[Fit, float]:
    """Compare the results of all examples. `more`: further arguments of each call.

    A module may refuse masks, or a width of reference points. The returned fit does not serve what the module refuses.
    """
    runs, served, refusals, difference = _make_runs(fit, candidate, module), [], [], 0.0
    for example in make_examples(fit.form, module, candidate.parameters):
        try:
            difference = max(difference, _compare_first(runs, [{**way, **(more or {})} for way in example.ways], module))
            served.append(example)
        except Fails as error:
            refusals.append(error)
    is_attention = isinstance(fit.form, Attention)
    if refusals and not (is_attention and any(example.has_memory for example in served)):
        raise refusals[0]
    if not is_attention:
        return fit, difference
    masked = any(example.masked for example in served)
    widths = {example.width for example in served if example.masked == masked}
    return dataclasses.replace(fit, widths=tuple(sorted(widths)), masked=masked), difference


def _compare_first(runs: tuple[_Run, _Run], ways: Sequence[Arguments], module: Any) -> float:
    """Try the ways to write an example in turn. Return the difference for the first way that the original accepts."""
    refusals = []
    for way in ways:
        try:
            return _compare(*runs, way, module)
        except Fails as error:
            refusals.append(error)
    raise refusals[0]


def _make_runs(fit: Fit, candidate: Candidate, module: Any) -> tuple[_Run, _Run]:
    """Return functions that call the original and its stand-in. Both take arguments by role, and draw equal random numbers."""
    form, function, parameters = fit.form, candidate.function, candidate.parameters
    layout, bound = getattr(form, "layout", ROWS), () if form.kind == FUNCTION else (module,)
    is_autograd = form.kind == AUTOGRAD
    original = (lambda _, *arguments: candidate.original.apply(*arguments)) if is_autograd else function

    def run(called: Callable[..., Any], inputs: Arguments) -> Any:
        torch.default_generator.manual_seed(0)  # A trial does not restore the generators of GPUs, so leave them alone.
        if inputs.get("value") is not None and layout is not ROWS:
            inputs = {**inputs, "value": layout.theirs(inputs["value"], inputs["sizes"])}
        arguments = {name: inputs.get(find_role(name), parameters.defaults.get(name)) for name in parameters.all}
        by_name = {name: arguments.pop(name) for name in parameters.keyword_only}
        return called(*bound, *arguments.values(), **by_name)

    return functools.partial(run, original), functools.partial(run, make_stand_in(function, fit, _refuse))


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise Refused("no known form fits it: the form does not serve the calls of its trial")


def _check_dtypes(runs: tuple[_Run, _Run], examples: Iterable[Example], is_pool: bool) -> None:
    """Check that in bfloat16 and under autocast, results have the original's dtypes. Skip calls that the original refuses.

    A pool is not tried under autocast: its autograd function is over a compiled file, which has no autocast, and it may be
    replaced already.
    """
    theirs, ours = runs
    for inputs in (way for example in examples for way in example.ways):
        low = {n: i.bfloat16() if isinstance(i, Tensor) and i.is_floating_point() else i for n, i in inputs.items()}
        for under_autocast in (False,) if is_pool else (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=under_autocast), torch.no_grad():
                try:
                    expected = [out.dtype for out in tree_flatten(theirs(low))[0]]
                except Exception:  # A core may not run in 16 bits.
                    continue
                dtypes = [out.dtype for out in tree_flatten(ours(low))[0]]
            if dtypes != expected:
                words = f"its results are {expected[0]}, ours {dtypes[0]}, for bfloat16"
                raise Differs(f"{words} under autocast" if under_autocast else words)


def _build(kind: type, form: Attention) -> Any:
    """Return a float64 module with random parameters. It has the sizes of SMALL, or its defaults if they cannot be set."""
    small = SMALL.list_arguments(form.uneven)
    try:
        module: Any = kind(**{name: small[name] for name in inspect.signature(kind).parameters if name in small})
        if module.sampling_offsets.in_features not in (SMALL.width, 2 * SMALL.width):
            module = kind()
        module = module.to(torch.float64).train()
    except Exception as error:
        raise Fails("" if form.uneven else _describe_error(error)) from error
    rand = make_random(torch.float64)
    for p in module.parameters():
        p.data = SMALL.spread * (2 * rand(*p.shape) - 1)
    if not form.reads_points_of(module):
        raise ValueError("it has its own number of points for each level, or one for all")
    return module


def _describe_error(error: Exception) -> str:
    return f"it does not run on a small example: {type(error).__name__}: {error}"


def _compare(theirs: _Run, ours: _Run, inputs: Arguments, module: Any) -> float:
    """Return the largest difference of the outputs, and of the gradients of all floating inputs and parameters.

    Raise Differs or DiffersBy if the results are not the same, and Fails if the original raises.
    """
    parameters = [] if module is None else [p for p in module.parameters() if p.requires_grad]
    try:
        expected = _compute(theirs, inputs, parameters)
    except Exception as error:  # Unknown code may raise anything.
        raise Fails(_describe_error(error)) from error
    if not all(isinstance(out, Tensor) for out in expected[0]):
        raise Differs("it returns something else beside tensors")
    results = _compute(ours, inputs, parameters)
    if len(results[0]) != len(expected[0]) or any(a.shape != b.shape for a, b in zip(results[0], expected[0], strict=True)):
        raise Differs("its results have other shapes")
    difference = max(_measure(a, b) for part in (0, 1) for a, b in zip(results[part], expected[part], strict=True))
    is_single = any(out.dtype != torch.float64 for out in expected[0])
    if not difference < (_SINGLE if is_single else CLOSE):
        raise DiffersBy(difference)
    if [out.dtype for out in results[0]] != [out.dtype for out in expected[0]]:
        raise Differs("its results have another dtype")
    return difference


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


def _measure(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference of two elements, divided by the largest element of `theirs` if that is above 1."""
    ours, theirs = ours.detach().double(), theirs.detach().double()
    if not theirs.numel():
        return 0.0
    largest = float((ours - theirs).abs().max())
    return largest / max(float(theirs.abs().max()), 1.0) if math.isfinite(largest) else math.inf
