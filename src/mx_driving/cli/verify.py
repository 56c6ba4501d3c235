"""`mx-driving verify`: deformable attention of an ONNX file on a runtime, judged."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer
from rich.markup import escape

from .._cli_support.problems import need
from .._cli_support.show import grid, open_console, say, show
from .options import DType, Inputs, Threads, arrays, use_threads

_RUNTIME = (
    "onnxruntime, openvino, tensorrt, or a program: it is called with three more words, the paths of a file to run, of its "
    "inputs (.npz), and of its outputs (.npz), which it writes."
)
_ORIGINAL = "The file that path_in was made of, by `mx-driving fuse` in another form; it says where the places are."
_PRECISION = "Dtype that the runtime computes in, if it is narrower than the file's."


def verify(
    path_in: Annotated[str, typer.Argument(metavar="PATH_IN", help="The ONNX file to read.")],
    runtime: Annotated[str, typer.Option(metavar="NAME", help=_RUNTIME)],
    inputs: Inputs = None,
    original: Annotated[str | None, typer.Option(metavar="PATH", help=_ORIGINAL)] = None,
    precision: Annotated[DType | None, typer.Option(metavar="NAME", help=_PRECISION)] = None,
    threads: Threads = 0,
) -> None:
    """Judge what a runtime makes of deformable attention in an ONNX file.

    Each place of deformable attention, of standard operators or one node, runs on the runtime as a file of its own: on what
    the whole file computes there, and on random numbers whose locations lie across every border of the maps. The output is
    compared with our operator in float64. Errors are in units of what the file's dtype may lose: up to 1 is right. A wrong
    place is compared with known mistakes, such as align_corners, and the first that gives the same numbers is named.

    Then the whole file runs, beside onnxruntime on the CPU. Weights and inputs changed by a few units in the last place show
    how far rounding moves its outputs.

    Exit status 0 means: every place and every output is right, or only as coarse as the precision.

    Example: `mx-driving verify detector.onnx --runtime openvino --inputs picture.npz`
    """
    need("mx-driving verify", "[onnx] onnxruntime", "onnx", "onnxscript", "onnxruntime")
    from ..verify import runtimes
    from ..verify.verify import verify as verified

    use_threads(threads)
    given, run = arrays(inputs), runtimes.named(runtime)
    console = open_console(f"mx-driving verify: {path_in} on {runtime}")
    report = verified(path_in, run, given, getattr(torch, precision.value) if precision else None, original)
    show(console, _places(report))
    show(console, _outputs(report))
    for sentence in _sentences(report):
        say(console, sentence)
    if not report.right:
        wrong = sum(not one.right for one in (*report.places, *report.outputs))
        say(console, f"[bold red]{wrong} of {len(report.places) + len(report.outputs)} comparisons are wrong[/]")
        raise typer.Exit(1)
    left = f"; {len(report.left)} left out" if report.left else ""
    say(
        console,
        f"[bold green]all is well[/]: {len(report.places)} comparisons of places, {len(report.outputs)} of outputs{left}",
    )


def _word(right: bool, word: str = "right") -> str:
    return f"[{'green' if right else 'red'}]{word if right else 'wrong'}[/]"


def _places(report: Any) -> Any:
    """Errors in units of what the dtype may lose."""
    table = grid(None, {"place": 0, "inputs": 0}, {"error": 0, "in float32": 0})
    table.add_column("verdict")
    for one in report.places:
        result = one.verdict.results[0] if one.verdict else None
        errors = [f"{e:.2g}" for e in (result.device, result.float32)] if result else ["none", ""]
        table.add_row(escape(one.place.name), one.inputs, *errors, _word(one.right, result.verdict if result else ""))
    return table


def _outputs(report: Any) -> Any:
    """Of how many numbers rounding does not explain the difference, and of how many it may not, because of near ties."""
    table = grid(None, {"output": 0}, {"largest difference": 0, "numbers off": 0, "may be off": 0})
    table.add_column("verdict")
    for one in report.outputs:
        parts = [f"{100 * part:.2g} %" for part in (one.off, one.may)]
        table.add_row(escape(one.name), f"{one.difference:.1e}", *parts, _word(one.right))
    return table


def _sentences(report: Any) -> list[str]:
    """What the places are, why a comparison is wrong, and what was left out. What is said twice is said once."""
    words: dict[str, dict[str, None]] = {}
    for one in report.places:
        words.setdefault(one.place.words, {})[one.place.name] = None
    said = [f"{len(names)} {'place' if len(names) == 1 else 'places'}: {escape(what)}" for what, names in words.items()]
    reasons: dict[tuple[str, str], list[Any]] = {}
    for one in report.places:
        if why := one.problem or one.verdict.results[0].why:
            reasons.setdefault(("yellow" if one.right else "red", why), []).append(one)
    said += [f"[bold {colour}]{escape(_which(of))}:[/] {escape(why)}" for (colour, why), of in reasons.items()]
    said += [f"[bold red]{escape(one.name)}:[/] {escape(one.problem)}" for one in report.outputs if one.problem]
    return said + [f"left out {escape(name)}: {escape(why)}" for name, why in report.left.items()]


def _which(comparisons: list[Any]) -> str:
    """The place, or how many, and the inputs."""
    names = list(dict.fromkeys(one.place.name for one in comparisons))
    places = names[0] if len(names) == 1 else f"{len(names)} places"
    return ", ".join([places, *dict.fromkeys(one.inputs for one in comparisons)])
