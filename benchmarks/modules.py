"""Measure modules beside other packages' modules and beside the sum of their parts, as rows of bench.py."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import floor
import torch
from figures import LAYERS_AND_FLOOR, PARTS
from module_workloads import Forward, ModuleWorkload, Subject
from torch import Tensor, nn

import mx_driving
from mx_driving._agreement import output_difference
from mx_driving._measure.plain import make_rival, make_training_call
from mx_driving._measure.report import OURS, PLAIN, Row
from mx_driving._measure.speed import Call, Calls, time_rows
from mx_driving._operator.rules import Problem

# The allowed difference of outputs, as a fraction of the largest entry, and of gradients, as a fraction of their norm. Some
# samples of an encoder lie so close to a pixel centre that rounding decides the gradient of the location, which jumps there.
CLOSE, CLOSE_GRADIENTS = 1e-4, 1e-2
AUTOCAST = "autocast to bfloat16"  # in the column dtype


def measure_module(workload: ModuleWorkload, peers: bool, seconds: float, dtype: str = "float32") -> list[Row]:
    """Return a row for each direction and implementation.

    "forward" computes no gradients. "forward + backward" computes the gradients of all parameters and of the inputs that
    earlier layers compute. In float32 all implementations must agree. "bfloat16" measures two modes: autocast, also of the
    parts of the module, and a module and inputs in bfloat16.
    """
    subject = workload.make(torch.Generator().manual_seed(0))
    if dtype == "bfloat16":
        return [*_autocast_rows(workload.name, subject, seconds), *_bfloat16_rows(workload.name, subject, seconds)]
    implementations = _ours_and_plain(subject)
    if peers:
        others = implementations | subject.packages()
        del others[OURS]
        torch.compiler.reset()
        compiled = {_compiled_name(name): (module, torch.compile(run)) for name, (module, run) in others.items()}
        implementations |= others | compiled
    calls = {name: _directions(module, run, subject) for name, (module, run) in implementations.items()}
    _need_the_same(workload.name, calls)
    return time_rows(workload.name, "float32", calls | _parts(subject), seconds)


def _ours_and_plain(subject: Subject) -> dict[str, tuple[nn.Module, Forward]]:
    return {OURS: (subject.module, subject.module), PLAIN: (subject.module, subject.plainly)}


def _autocast_rows(name: str, subject: Subject, seconds: float) -> list[Row]:
    subject = subject._replace(inputs=tuple(t.bfloat16() if i in subject.maps else t for i, t in enumerate(subject.inputs)))
    with torch.autocast("cpu", torch.bfloat16):
        calls = {one: _directions(module, run, subject) for one, (module, run) in _ours_and_plain(subject).items()}
    calls = {one: {way: _under_autocast(call) for way, call in by.items()} for one, by in calls.items()}
    return time_rows(name, AUTOCAST, calls | _parts_under_autocast(subject), seconds)


def _bfloat16_rows(name: str, subject: Subject, seconds: float) -> list[Row]:
    """Return rows in bfloat16. Do not compare results: bfloat16 reference points are up to a quarter of a pixel off."""
    inputs = tuple(_to_bfloat16(x) for x in subject.inputs)
    subject = subject._replace(module=subject.module.bfloat16(), inputs=inputs)
    calls = {one: _directions(module, run, subject) for one, (module, run) in _ours_and_plain(subject).items()}
    return time_rows(name, "bfloat16", calls, seconds)


def _to_bfloat16(x: Any) -> Any:
    return x.bfloat16() if isinstance(x, Tensor) and x.is_floating_point() else x


def _compiled_name(name: str) -> str:
    return "torch.compile" if name == PLAIN else f"{name}, compiled"


def _directions(module: nn.Module, run: Forward, subject: Subject) -> dict[str, Call]:
    """Return the calls of both directions: without gradients, and with the gradients of inputs and parameters."""
    learned = [subject.inputs[i].detach().requires_grad_() for i in subject.learned]
    inputs = list(subject.inputs)
    for i, leaf in zip(subject.learned, learned, strict=True):
        inputs[i] = leaf
    # sorted by name, because packages define them in different orders
    parameters = [p for _, p in sorted(module.named_parameters()) if p.requires_grad]

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (run(*subject.inputs),)

    grad = _mixture(forward()[0])

    def both() -> tuple[Tensor, ...]:
        output = run(*inputs)
        return (output.detach(), *torch.autograd.grad(output, [*learned, *parameters], grad))

    return {"forward": forward, "forward + backward": both}


def _mixture(output: Tensor) -> Tensor:
    """Return a gradient of the output as a contiguous tensor: products with an expanded tensor take less time."""
    return torch.linspace(-1, 1, output.shape[-1]).expand_as(output).contiguous()


def _need_the_same(workload: str, calls_of: Calls) -> None:
    """Raise a Problem unless every implementation gives our output and our gradients."""
    ours = calls_of[OURS]["forward + backward"]()
    for name, calls in calls_of.items():
        output, *gradients = calls["forward + backward"]()
        differences = {
            "output": max(output_difference(out, ours[0]) / CLOSE for out in (output, *calls["forward"]())),
            "gradients": max(_of_norm(*pair) / CLOSE_GRADIENTS for pair in zip(gradients, ours[1:], strict=True)),
        }
        for what, times_allowed in differences.items():
            if not times_allowed <= 1:
                raise Problem(
                    f"{workload}: {what} of {name} must be those of {OURS}; got {times_allowed:.2g} times what may differ"
                )


def _of_norm(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def _parts(subject: Subject) -> Calls:
    """Return calls of the module's parts: its linear layers and its bare operator, each on inputs that are computed before.
    Only fusion could be faster than their sum. Also return the layers with the gather loop in place of the operator."""
    calls = _operators_of(subject)
    layers = _layers_of(subject)
    operators = _in_turn(_operator(name, args) for name, args in calls)
    calls_of_parts = {PARTS: _in_turn([layers, operators])}
    if floor.why_not() is None:
        calls_of_parts[LAYERS_AND_FLOOR] = _in_turn([layers, *(_floor(name, args) for name, args in calls)])
    return calls_of_parts


def _parts_under_autocast(subject: Subject) -> Calls:
    """Return calls of the parts: the linear layers under autocast, which converts their weights in each run, and the bare
    operator on bfloat16 tensors that are computed before."""
    layers = {way: _under_autocast(call) for way, call in _layers_of(subject).items()}
    calls = [(name, tuple(map(_to_bfloat16, args))) for name, args in _operators_of(subject)]
    return {PARTS: _in_turn([layers, *(_operator(name, args) for name, args in calls)])}


def _under_autocast(call: Call) -> Call:
    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            call()

    return run


def _operators_of(subject: Subject) -> list[tuple[str, tuple[Tensor, ...]]]:
    """Return the bare operators that a module calls, with their inputs."""
    with torch.no_grad(), mx_driving.viz.recording() as looks:
        subject.module(*subject.inputs)
    return [
        (look.operator, (look.table.contiguous(), look.shapes, look.starts, look.locations, look.weights)) for look in looks
    ]


def _layers_of(subject: Subject) -> dict[str, Call]:
    return _in_turn(_directions(layer, layer, _alone(layer, x)) for layer, x in subject.layers)


def _alone(layer: nn.Module, x: Tensor) -> Subject:
    return Subject(layer, (x,), (0,), (), layer)


def _operator(name: str, args: tuple[Tensor, ...]) -> dict[str, Call]:
    function, _, places = make_rival(name, args)
    return {
        "forward": lambda: function(*args),
        "forward + backward": make_training_call(function, args, places, torch.ones_like(function(*args))),
    }


def _floor(name: str, args: tuple[Tensor, ...]) -> dict[str, Call]:
    forward, backward = (floor.gather_floor(name, args, backward=way) for way in (False, True))
    return {"forward": forward, "forward + backward": lambda: (forward(), backward())}


def _in_turn(parts: Iterable[dict[str, Call]]) -> dict[str, Call]:
    """Return a call for each direction that makes the calls of all parts in turn."""
    parts = list(parts)

    def all_of(way: str) -> Call:
        def run() -> None:
            for part in parts:
                part[way]()

        return run

    return {way: all_of(way) for way in ("forward", "forward + backward")}
