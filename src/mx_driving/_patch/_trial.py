"""Try a form on code that a user names: on small float64 examples, the form's outputs and gradients must equal the code's.

Known code is not tried. New entries of known.jsonl pass the same trial. In a trial, compat's functions take the place of those
of a compiled extension, so an autograd function can be tried on every machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import functools
import inspect
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._foreign.stand_ins import stand_in
from .._foreign_functions import FUNCTIONS
from .._torch_private import tree_flatten
from ._attention import ATTENTION_FORMS, READ, Attention
from ._code import Code, NoKey, Reader
from ._examples import SMALL, make_examples, make_random
from ._extensions import EXTENSIONS, POOLS, OverExtension, looks_like_a_pool
from ._forms import AUTOGRAD, CORES, FUNCTION, MODULE, ROWS, Arguments, Form, find_role
from ._parameters import PLAIN, collect_words, find_source, is_autograd, list_code
from ._replace import Fit, make_fit, make_stand_in
from ._search import Candidate, list_cores
from .known import Known, read_table

# In patch(forms=...), a user writes a key of FORMS, which names one form, or a key of GROUPS, which names several.
# The forms of a group are tried in turn.
FORMS: Mapping[str, Form] = {**ATTENTION_FORMS, **CORES, **EXTENSIONS, **POOLS}
GROUPS: Mapping[str, Mapping[str, Form]] = {"core": {**CORES, **EXTENSIONS}, "pool": {**POOLS, **EXTENSIONS}}
CLOSE = 1e-10  # A smaller difference of the results counts as agreement.
_SINGLE = 1e-4  # the limit instead of CLOSE for a core that computes in float32 even from float64 inputs
_Run = Callable[[Arguments], Any]  # runs a function on arguments by role, with value in our layout


# The rank of a refusal. If all forms are refused, the refusal with the lowest rank is reported.
_DIFFERS = 0  # The results have other shapes, dtypes or containers, or the layer has a state that the form does not know.
_DIFFERS_BY = 1  # The results differ in numbers.
_FAILS = 2  # The original does not run on a small example.
_OTHER = 3


class Refused(Exception):
    """Raised if a form is refused. `args[0]` is the reason."""

    def __init__(self, rank: int, reason: str, difference: float = math.inf) -> None:
        super().__init__(reason)
        self.rank, self.difference = rank, difference


@dataclass(frozen=True)
class Finding:
    """The form of a candidate, if it has one.

    Attributes:
        name: the name of the function or class, with its Python module.
        key: the key of the candidate's code, or "".
        state: "known", "tried" or "unknown".
        form: the name of the form, or of the nearest form if none agrees.
        difference: the largest difference of the results, in float64; inf if they cannot be compared, nan without a trial.
        reason: why no form serves the candidate.
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


def recognize(candidate: Candidate, reader: Reader, named: str = "", tries_all: bool = False) -> Finding:
    """Return the form of a candidate: the form that the table has for its key, or, after a trial, the form that a user names.

    Args:
        named: the form, or the group of forms, that a user names. Try it even if the code is known.
        tries_all: whether to try all forms on unknown code.
    """
    reason = "its code is not known"
    try:
        code = reader.read(candidate.original)
    except NoKey as error:
        reason += f", because {error}"
        code = reader.read_bytecode(candidate.function, candidate.original if candidate.kind == MODULE else None)
    entry = read_table().get(code.key)
    if entry and not named:
        form: Any = FORMS[entry.form]
        form = dataclasses.replace(form, casts=entry.casts) if entry.casts else form
        fit = make_fit(form, candidate, code, entry.flags)
        options = {**fit.options, **entry.options}
        fit = dataclasses.replace(fit, options=options, widths=tuple(entry.widths), masked=entry.masked)
        return Finding(candidate.name, code.key, "known", entry.form, entry.difference, fit=fit)
    if not named and not (tries_all and code.key):
        return Finding(candidate.name, code.key, reason=reason)
    forms = GROUPS.get(named) or ({named: FORMS[named]} if named else FORMS)
    forms = {name: form for name, form in forms.items() if form.fits(candidate)}
    if not forms:
        return Finding(candidate.name, code.key, reason=f"no known form has the parameters {candidate.parameters}")
    return try_forms(forms, candidate, code)


def find_nearest(candidate: Candidate) -> str:
    """Return the key of FORMS or GROUPS that a user should try first on a candidate, or ""."""
    if candidate.kind != MODULE or not set(candidate.function.__code__.co_names) & READ:
        group = "pool" if looks_like_a_pool(candidate.original.__qualname__) else "core"
        return group if any(form.fits(candidate) for form in GROUPS[group].values()) else ""
    words = {*collect_words(candidate.function), *candidate.parameters.all}
    names = [name for name, form in ATTENTION_FORMS.items() if form.fits(candidate)]
    marked = [name for name in names if (mark := ATTENTION_FORMS[name].mark) and mark in words]
    return next(iter([*marked[-1:], *(name for name in names if not ATTENTION_FORMS[name].mark)]), "")


def make_entry(finding: Finding, seen: str) -> tuple[str, Known]:
    """Return the key and the entry of known.jsonl for code that has a form. `seen` is the project and its version."""
    fit = finding.fit
    assert fit is not None
    place = f"{seen} {finding.name.rpartition('.')[2]}".strip()
    casts = getattr(fit.form, "casts", "")
    difference = 0.0 if math.isnan(finding.difference) else float(f"{finding.difference:.0e}")
    return finding.key, Known(
        finding.form, place, difference, dict(fit.flags), dict(fit.options), fit.widths, fit.masked, casts
    )


def try_forms(forms: Mapping[str, Form], candidate: Candidate, code: Code) -> Finding:
    """Return a finding with the first form whose results agree with the original's, or else with the most telling refusal.

    A trial runs on the CPU in one thread, because waking other threads would take longer than the examples. It restores torch's
    settings and random state.
    """
    refusals: dict[str, Refused] = {}
    with contextlib.ExitStack() as trial:
        trial.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        trial.enter_context(torch.random.fork_rng([]))
        trial.enter_context(torch.device("cpu"))
        trial.enter_context(torch.inference_mode(False))
        trial.enter_context(torch.enable_grad())
        trial.enter_context(torch.autocast("cpu", enabled=False))
        trial.enter_context(_replace_extensions(candidate, code))
        for name, form in forms.items():
            casts = ("", "value", "float32") if form.kind == AUTOGRAD else (None,)
            for cast in casts:
                try:
                    tried: Any = form if cast is None else dataclasses.replace(form, casts=cast)  # type: ignore[type-var]
                    fit, difference = _try_form(tried, candidate, code)
                    return Finding(candidate.name, code.key, "tried", name, difference, fit=fit)
                except Refused as error:
                    refusals.setdefault(name, error)
                except (Exception, SystemExit) as error:  # A form may raise anything on unknown code.
                    refusals.setdefault(name, Refused(_OTHER, f"no known form fits it: {type(error).__name__}: {error}"))
    name = min(refusals, key=lambda name: (not refusals[name].args[0], refusals[name].rank, refusals[name].difference))
    reason = refusals[name].args[0] or "it does not run on a small example"
    return Finding(candidate.name, code.key, form=name, difference=refusals[name].difference, reason=reason)


@contextlib.contextmanager
def _replace_extensions(candidate: Candidate, code: Code) -> Iterator[None]:
    """Let compat's functions take the place of the compiled functions that the code and its autograd functions call.

    A compiled function for CUDA may crash the process if it gets CPU memory.
    """
    members = [candidate.original, *code.cores]
    kinds = filter(is_autograd, members)
    functions = [find_source(vars(kind)[name]) for kind in kinds for name in ("forward", "backward") if name in vars(kind)]
    undo: list[tuple[dict[str, Any], str, Any]] = []
    for function in [*functions, *(m for m in members if isinstance(m, types.FunctionType))]:
        space = find_source(function).__globals__
        for own in list_code(function):
            root = ""
            for step in dis.get_instructions(own):
                name = step.argval if isinstance(step.argval, str) else ""
                entries = {len(f.names): stand_in(f) for f in FUNCTIONS if f.name == name and f.module != "mx_driving"}
                target = root or (name if step.opname == "LOAD_GLOBAL" else "")
                if entries and target and not any(target == other for _, other, _ in undo if other != root):
                    undo.append((space, target, space.get(target, undo)))
                    substitute = functools.partial(_call_stand_in, entries)
                    if root:
                        holder = types.SimpleNamespace(**vars(space[root]) if hasattr(space.get(root), "__dict__") else {})
                        setattr(holder, name, substitute)
                        substitute = holder  # type: ignore[assignment]
                    space[target] = substitute
                root = name if step.opname == "LOAD_GLOBAL" else ""
    try:
        yield
    finally:
        for space, name, value in reversed(undo):
            if value is undo:
                space.pop(name, None)
            else:
                space[name] = value


def _call_stand_in(entries: Mapping[int, Callable[..., Any]], *args: Any, **named: Any) -> Any:
    """Call the function whose number of parameters is nearest to that of the arguments: extensions share function names."""
    count = len(args) + len(named)
    return entries[min(entries, key=lambda number: abs(number - count))](*args, **named)


def _try_form(form: Any, candidate: Candidate, code: Code) -> tuple[Fit, float]:
    """Return the fit of the form, and the largest difference of results. Try modules in training and in evaluation."""
    if form.kind == MODULE and not isinstance(form, Attention) and code.key and (code.attributes or code.writes):
        raise Refused(_DIFFERS, f"its code uses its attributes {', '.join(sorted(code.attributes | code.writes))}")
    if form.kind == MODULE and code.writes:
        raise Refused(_DIFFERS, f"its code sets its attributes {', '.join(sorted(code.writes))}")
    if form.kind == MODULE and code.passes_self:
        raise Refused(_DIFFERS, "its code hands itself to other code")
    module, flags, cores = None, {}, []
    if isinstance(form, Attention):
        cores = list_cores(candidate.original)
        module = _build(candidate.original, form)
        if not code.key:  # Bytecode does not tell a layer's attributes from those of tensors.
            held = {*vars(module), *module._modules, *module._parameters, *module._buffers}
            code = dataclasses.replace(code, attributes=code.attributes & held)
        held_cores = [*code.cores, *cores]
        for name in sorted(code.attributes - READ - form.reads):
            value = getattr(module, name, None)
            core = getattr(value, "func", value)
            if any(core is other or type(core) is other for other in held_cores):
                continue
            if not isinstance(value, PLAIN):
                raise Refused(_DIFFERS, f"its code reads the attribute {name}, which no form has")
            flags[name] = (value,)
    elif form.kind == MODULE:
        module = candidate.original()
    fit = make_fit(form, candidate, code, flags, tuple(cores))
    fit, difference = _try_examples(fit, candidate, module)
    # Serve both values of a boolean flag or option if the form agrees with the original at the other value, too.
    for name, (value, *_) in {**fit.flags, **fit.options}.items():
        if isinstance(value, bool):
            is_flag, both = name in fit.flags, {name: (value, not value)}
            flags, options = {**fit.flags, **(both if is_flag else {})}, {**fit.options, **({} if is_flag else both)}
            wider = dataclasses.replace(fit, flags=flags, options=options)
            if is_flag:
                setattr(module, name, not value)
            with contextlib.suppress(Exception, SystemExit):  # Unknown code may raise anything.
                _try_examples(wider, candidate, module, {} if is_flag else {name: not value})
                fit = wider
            if is_flag:
                setattr(module, name, value)
    if module is not None:
        difference = max(difference, _try_examples(fit, candidate, module.eval())[1])
        module.bfloat16()
    _check_dtypes(fit, candidate, module)
    return fit, difference


def _try_examples(fit: Fit, candidate: Candidate, module: Any, more: Arguments | None = None) -> tuple[Fit, float]:
    """Compare the form's results with the original's on all examples. `more`: further arguments of each call.

    An example is one call, written in several ways. Compare the first way that the original accepts. A module may refuse masks,
    or a width of reference points. The returned fit does not serve what the module refuses.
    """
    runs, served, refusals, difference = _make_runs(fit, candidate, module), [], [], 0.0
    for example in make_examples(fit.form, module, candidate.parameters):
        failures = []
        for way in example.ways:
            try:
                difference = max(difference, _compare(*runs, {**way, **(more or {})}, module))
                served.append(example)
                break
            except Refused as error:
                if error.rank != _FAILS:
                    raise
                failures.append(error)
        else:
            refusals.append(failures[0])
    is_attention = isinstance(fit.form, Attention)
    if refusals and not (is_attention and any(example.has_memory for example in served)):
        raise refusals[0]
    if not is_attention:
        return fit, difference
    masked = any(example.masked for example in served)
    widths = {example.width for example in served if example.masked == masked}
    return dataclasses.replace(fit, widths=tuple(sorted(widths)), masked=masked), difference


def _make_runs(fit: Fit, candidate: Candidate, module: Any) -> tuple[_Run, _Run]:
    """Return functions that call the original and its stand-in. Both take arguments by role, and draw equal random numbers."""
    form, function, parameters = fit.form, candidate.function, candidate.parameters
    layout, bound = getattr(form, "layout", ROWS), () if form.kind == FUNCTION else (module,)
    is_autograd = form.kind == AUTOGRAD
    original = (lambda _, *arguments: candidate.original.apply(*arguments)) if is_autograd else function

    def run(called: Callable[..., Any], inputs: Arguments) -> Any:
        torch.default_generator.manual_seed(0)  # Seed the CPU alone: a trial does not restore generators of GPUs.
        if inputs.get("value") is not None and layout is not ROWS:
            inputs = {**inputs, "value": layout.theirs(inputs["value"], inputs["sizes"])}
        arguments = {name: inputs.get(find_role(name), parameters.defaults.get(name)) for name in parameters.all}
        by_name = {name: arguments.pop(name) for name in parameters.keyword_only}
        return called(*bound, *arguments.values(), **by_name)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise Refused(_OTHER, "no known form fits it: the form does not serve the calls of its trial")

    return functools.partial(run, original), functools.partial(run, make_stand_in(function, fit, refuse))


def _check_dtypes(fit: Fit, candidate: Candidate, module: Any) -> None:
    """Check that in bfloat16 and under autocast, results have the original's dtypes. Skip calls that the original refuses.

    A compiled extension ignores autocast, so pools and autograd functions are not tried under autocast.
    """
    theirs, ours = _make_runs(fit, candidate, module)
    over_extension = isinstance(fit.form, OverExtension)
    for inputs in (way for example in make_examples(fit.form, module, candidate.parameters) for way in example.ways):
        low = {n: i.bfloat16() if isinstance(i, Tensor) and i.is_floating_point() else i for n, i in inputs.items()}
        for under_autocast in (False,) if over_extension else (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=under_autocast), torch.no_grad():
                try:
                    expected = [out.dtype for out in tree_flatten(theirs(low))[0]]
                except (Exception, SystemExit):  # Some cores do not run in 16 bits.
                    continue
                dtypes = [out.dtype for out in tree_flatten(ours(low))[0]]
            if dtypes != expected:
                words = f"its results are {expected[0]}, ours {dtypes[0]}, for bfloat16"
                raise Refused(_DIFFERS, f"{words} under autocast" if under_autocast else words)


def _build(kind: type, form: Attention) -> Any:
    """Return a float64 module with random parameters. It has the sizes of SMALL, or its default sizes if it takes no sizes."""
    small = SMALL.list_arguments(form.uneven)
    try:
        module: Any = kind(**{name: small[name] for name in inspect.signature(kind).parameters if name in small})
        if module.sampling_offsets.in_features not in (SMALL.width, 2 * SMALL.width):
            module = kind()
        module = module.to(torch.float64).train()
    except (Exception, SystemExit) as error:
        raise Refused(_FAILS, "" if form.uneven else _describe_error(error)) from error
    rand = make_random()
    for p in module.parameters():
        p.data = SMALL.spread * (2 * rand(*p.shape) - 1)
    if not form.reads_points_of(module):
        raise ValueError("it has its own number of points for each level, or one for all")
    return module


def _describe_error(error: BaseException) -> str:
    return f"it does not run on a small example: {type(error).__name__}: {error}"


def _compare(theirs: _Run, ours: _Run, inputs: Arguments, module: Any) -> float:
    """Return the largest difference of results: of outputs, and of gradients of all floating inputs and parameters.

    Raise Refused if the results are not the same, or the original raises.
    """
    parameters = [] if module is None else [p for p in module.parameters() if p.requires_grad]
    try:
        their_leaves, expected, expected_container = _call(theirs, inputs, parameters)
    except (Exception, SystemExit) as error:  # Unknown code may raise anything.
        raise Refused(_FAILS, _describe_error(error)) from error
    if not all(isinstance(out, Tensor) for out in expected):
        raise Refused(_DIFFERS, "it returns something else beside tensors")
    leaves, results, container = _call(ours, inputs, parameters)
    if container != expected_container:
        raise Refused(_DIFFERS, f"it returns a {expected_container}, the operator a {container}")
    if any(a.shape != b.shape for a, b in zip(results, expected, strict=True)):
        raise Refused(_DIFFERS, "its results have other shapes")
    try:
        expected_gradients = _differentiate(expected, their_leaves)
    except (Exception, SystemExit) as error:
        raise Refused(_FAILS, _describe_error(error)) from error
    gradients = _differentiate(results, leaves)
    pairs = [*zip(results, expected, strict=True), *zip(gradients, expected_gradients, strict=True)]
    # An input without a gradient, such as locations of geometric_kernel_attention, has a gradient of zeros here.
    difference = 0.0
    for our, their in ((a.detach().double(), b.detach().double()) for a, b in pairs if b.numel()):
        # Divide by the original's largest element if that is above 1.
        largest = float((our - their).abs().max())
        difference = max(difference, largest / max(float(their.abs().max()), 1.0) if math.isfinite(largest) else math.inf)
    is_single = any(out.dtype != torch.float64 for out in expected)
    if not difference < (_SINGLE if is_single else CLOSE):
        reason = f"its result on a small example differs from the operator's by {difference:.1e}"
        raise Refused(_DIFFERS_BY, reason, difference)
    if [out.dtype for out in results] != [out.dtype for out in expected]:
        raise Refused(_DIFFERS, "its results have another dtype")
    return difference


def _call(run: _Run, inputs: Arguments, parameters: Sequence[Tensor]) -> tuple[list[Tensor], list[Any], str]:
    """Return the tensors to differentiate by, the outputs, and the name of their container. Trajectories have no gradient."""
    floating = {n: i for n, i in inputs.items() if isinstance(i, Tensor) and i.is_floating_point() and n != "trajectories"}
    tensors = {n: i.clone().requires_grad_() for n, i in floating.items()}
    result = run({**inputs, **tensors})
    outputs, container = tree_flatten(result)
    name = type(result).__name__ if isinstance(result, Tensor) else f"{type(result).__name__} {container}"
    return [*tensors.values(), *parameters], outputs, name


def _differentiate(outputs: Sequence[Any], leaves: Sequence[Tensor]) -> list[Tensor]:
    ends = [out for out in outputs if isinstance(out, Tensor) and out.requires_grad]
    if not ends:
        return [torch.zeros(())] * len(leaves)
    rand = make_random()
    directions = [(rand(*out.shape) - 0.5).to(out.dtype) for out in ends]
    gradients = torch.autograd.grad(ends, leaves, directions, allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(gradients, leaves, strict=True)]
