"""`mx-driving verify`: run the deformable attention of an ONNX file on a runtime, and judge the outputs."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer
from rich.markup import escape

from .._io import grid, open_console, print_json, say, show
from .._operator.rules import need
from .start import DTYPES, Inputs, Json, Threads, arrays, one_of, use_threads

_RUNTIME = (
    "onnxruntime, openvino, tensorrt, or a program: it is called with three more words, the paths of a file to run, of its "
    "inputs (.npz), and of its outputs (.npz), which it writes."
)
_ORIGINAL = "The file that path_in was made of, by `mx-driving fuse` in another form; it says where attention is."
_PRECISION = "Dtype that the runtime computes in, if it is narrower than the file's."


def verify(
    path_in: Annotated[str, typer.Argument(help="The ONNX file to read.")],
    runtime: Annotated[str, typer.Option(metavar="NAME", help=_RUNTIME)],
    inputs: Inputs = None,
    original: Annotated[str | None, typer.Option(metavar="PATH", help=_ORIGINAL)] = None,
    precision: Annotated[str | None, typer.Option(metavar="NAME", parser=one_of(*DTYPES), help=_PRECISION)] = None,
    threads: Threads = 0,
    as_json: Json = False,
) -> None:
    """Check how a runtime computes the deformable attention of an ONNX file.

    Each match of deformable attention (standard operators or one node) runs as a file of its own: on the inputs that it
    gets in the whole file, and on random inputs with locations across every border of the maps. The output is compared
    with our operator in float64. Errors are in units of the tolerance of the file's dtype: up to 1 is right. A wrong
    output is compared with known mistakes, such as align_corners; the first that gives the same numbers is named.

    Then the whole file runs, and its outputs are compared with onnxruntime's on the CPU. The tolerance is found by
    perturbing weights and inputs by a few units in the last place.

    Exit status 0: every match and every output is right, or only as coarse as the precision.

    Example: `mx-driving verify detector.onnx --runtime openvino --inputs picture.npz`
    """
    need("mx-driving verify", "[onnx] onnxruntime", "onnx", "onnxscript", "onnxruntime")
    from ..onnx import _runtimes
    from ..onnx._check import check

    use_threads(threads)
    fed, run = arrays(inputs), _runtimes.find_runtime(runtime)
    console = None if as_json else open_console(f"mx-driving verify: {path_in} on {runtime}")
    report = check(path_in, run, fed, getattr(torch, precision) if precision else None, original)
    if console is None:
        print_json({"path": path_in, "runtime": runtime, **report.facts()})
        raise typer.Exit(not report.right)

    def word(right: bool, verdict: str) -> str:
        return f"[{'green' if right else 'red'}]{verdict if right else 'wrong'}[/]"

    # Errors of matches in units of the tolerance.
    table = grid(None, {"match": 0, "inputs": 0}, {"error": 0, "in float32": 0})
    table.add_column("verdict")
    for comparison in report.comparisons:
        facts = comparison.facts()
        error, float32 = ("" if facts[name] is None else f"{facts[name]:.2g}" for name in ("error", "float32"))
        verdict = word(comparison.right, facts["verdict"])
        table.add_row(escape(facts["match"]), facts["inputs"], error or "none", float32, verdict)
    show(console, table)
    # The share of an output's numbers that rounding does not explain, and the share allowed for near ties.
    table = grid(None, {"output": 0}, {"largest difference": 0, "numbers off": 0, "may be off": 0})
    table.add_column("verdict")
    for output in report.outputs:
        shares = [f"{100 * share:.3g} %" for share in (output.off, output.may)]
        table.add_row(escape(output.name), f"{output.difference:.1e}", *shares, word(output.right, "right"))
    show(console, table)
    # The matches, the reasons of wrong comparisons, and what was left out. Equal sentences occur once.
    words: dict[str, dict[str, None]] = {}
    for match in report.matches:
        words.setdefault(match.words, {})[match.name] = None
    sentences = [f"{len(names)} {'match' if len(names) == 1 else 'matches'}: {escape(text)}" for text, names in words.items()]
    reasons: dict[tuple[str, str], list[Any]] = {}
    for comparison in report.comparisons:
        if comparison.why:
            reasons.setdefault(("yellow" if comparison.right else "red", comparison.why), []).append(comparison)
    for (colour, why), comparisons in reasons.items():
        names = list(dict.fromkeys(comparison.match.name for comparison in comparisons))
        who = [names[0] if len(names) == 1 else f"{len(names)} matches", *dict.fromkeys(c.inputs for c in comparisons)]
        sentences.append(f"[bold {colour}]{escape(', '.join(who))}:[/] {escape(why)}")
    sentences += [f"[bold red]{escape(o.name)}:[/] {escape(o.problem)}" for o in report.outputs if o.problem]
    sentences += [f"[bold yellow]{escape(o.name)}:[/] {escape(o.note)}" for o in report.outputs if o.note]
    sentences += [f"left out {escape(name)}: {escape(why)}" for name, why in report.left.items()]
    for sentence in sentences:
        say(console, sentence)
    rights = [verdict.right for verdict in (*report.comparisons, *report.outputs)]
    left = f"; {len(report.left)} left out" if report.left else ""
    counts = f"{len(report.comparisons)} comparisons of matches, {len(report.outputs)} of outputs{left}"
    wrong = f"[bold red]{rights.count(False)} of {len(rights)} comparisons are wrong[/]"
    say(console, f"[bold green]all is well[/]: {counts}" if report.right else wrong)
    if not report.right:
        raise typer.Exit(1)
