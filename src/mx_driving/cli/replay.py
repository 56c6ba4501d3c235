"""`mx-driving replay`: compute calls that were recorded on a device again, and judge the recorded results."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from .._io import grid, open_console, print_json, say, show, writable, write_csv
from .._operator.rules import Problem, ruled
from .._vendor.limits import suspended
from .start import Csv, Json, Threads, matching, use_threads

if TYPE_CHECKING:
    from .._replay.judge import Verdict

_COLOURS = {"right": "green", "coarse": "yellow", "wrong": "red"}


def replay(
    calls: Annotated[str, typer.Argument(help="Folder that record.py wrote, or one file of it.")],
    only: Annotated[
        list[str] | None, typer.Option("--call", help="Only calls whose name matches, e.g. `'*000012'`; may be repeated.")
    ] = None,
    threads: Threads = 0,
    out: Csv = None,
    as_json: Json = False,
) -> None:
    """Check recorded calls of the operators against float64.

    Each call of the recording is computed in float64, in float32 and by our kernels, on the recorded inputs. The table has
    the errors of the device's output and gradients against float64, in units of what rounding may lose: up to 1 is
    right. "float32" is the reference in the recorded dtypes, and "ours" our kernels.

    A wrong result is compared with the results of known mistakes: differences of vendors' versions, x and y swapped, half a
    pixel of shift, and more. The first mistake that gives the same numbers is named. "Coarse" means an error typical of
    16-bit sums.

    Calls are recorded on the device's machine by `python record.py program.py`; the file is mx_driving_portable/record.py.

    Exit status 0: every call could be read, and every result is right or coarse.

    Example: `mx-driving replay calls --csv calls.csv`
    """
    from rich.progress import track

    from .._replay.calls import find_calls, list_files, read
    from .._replay.judge import judge

    if not calls:  # Path("") is the working folder
        raise Problem("calls must be a folder that record.py wrote, or one file of it; got ''")
    path = Path(calls)
    stems = find_calls(path)
    stems = {name: stems[name] for name in matching("--call", only, stems)}
    if out:
        writable("--csv", out, [path.with_name("manifest.json"), path / "manifest.json", *list_files(stems.values())])
    use_threads(threads)
    console = None if as_json else open_console(f"mx-driving replay: {path}")
    verdicts: list[Verdict] = []
    problems = []  # sentences about calls and results that could not be read or judged
    for name in track(stems, description="judging", console=console, transient=True, disable=console is None):
        try:  # suspended() lifts the vendor's limits, which the environment may set.
            with suspended(), ruled(f"{name} must be a call that can be judged"):
                call, left_out = read(name, stems[name])
                problems += left_out
                if call.results:
                    verdicts.append(judge(call))
        except Problem as problem:
            problems.append(str(problem))
    rows = [
        {
            **{"call": verdict.call.name, **_describe(verdict)},
            **{"result": judged.result, "NaN out": judged.nans, "infinite out": judged.infinities},
            **{"not judged": judged.left_out, "device": judged.device, "float32": judged.float32, "ours": judged.ours},
            **{"verdict": judged.verdict, "why": judged.why},
        }
        for verdict in verdicts
        for judged in verdict.results
    ]
    wrong, judged = sum(verdict.is_wrong for verdict in verdicts), len(verdicts)
    if out:
        write_csv(rows, out, "call")
    if console:
        for verdict in verdicts:
            _show_errors(console, verdict)
        sentences = [sentence for verdict in verdicts for sentence in _make_sentences(verdict)]
        not_read = [f"[bold red]not read:[/] {escape(problem)}" for problem in problems]
        if wrong or problems:
            outcome = "[bold red]" + (f"{wrong} of {judged} calls wrong" if judged else "no call was judged")
            outcome += f", {len(problems)} {'thing' if len(problems) == 1 else 'things'} not read[/]" if problems else "[/]"
        else:
            outcome = f"[bold green]all is well[/]: {judged} {'call is' if judged == 1 else 'calls are'} right"
        for sentence in (*sentences, *not_read, outcome):
            say(console, sentence)
    else:
        notes = [{"call": verdict.call.name, "note": note} for verdict in verdicts for note in verdict.notes]
        print_json({"right": not (wrong or problems), "results": rows, "notes": notes, "not_read": problems})
    if wrong or problems:
        raise typer.Exit(1)


def _describe(verdict: Verdict) -> dict[str, Any]:
    """Return facts about a call and its inputs, by name."""
    call = verdict.call
    facts = {"on": call.about.get("device", "")}
    facts |= {name: call.about.get(name, "") for name in ("function", "operator", "index", "caller", "reason")}
    for name, t in zip(call.input_names, call.inputs, strict=True):
        facts[name] = f"{'x'.join(map(str, t.shape))} {str(t.dtype).removeprefix('torch.')}"
    if call.description.kind == "pooling":
        cell = call.inputs[4]
        order = "sorted" if bool((cell.diff() >= 0).all()) else "not sorted"
        facts |= {"points": f"{len(cell)}, {order} by cell", "cells": "x".join(map(str, call.sizes))}
    else:
        facts["maps"] = ", ".join(f"{h}x{w}" for h, w in call.sampling.shapes.flatten(0, -2).tolist())
    return {**facts, "NaN in": verdict.nans, "infinite in": verdict.infinities}


def _show_errors(console: Any, verdict: Verdict) -> None:
    """Print lines that name a call, its function and its inputs, and a table of its results within 80 columns."""
    facts = {**_describe(verdict), "caller": Path(verdict.call.about.get("caller", "")).name}
    function = facts.pop("function")
    if function.endswith(facts["operator"]):
        del facts["operator"]
    lines = [function, *(f"{name}: {fact}" for name, fact in facts.items() if fact not in ("", 0))]
    say(console, "\n  ".join([f"[bold]{escape(verdict.call.name)}[/]", *map(escape, filter(None, lines))]))
    table = grid(None, {"error of, in units": 34}, {"device": 6, "float32": 7, "ours": 6})
    table.add_column("verdict")
    for judged in verdict.results:
        counts = [f", {n} {word}" for n, word in ((judged.nans, "NaN"), (judged.infinities, "infinite")) if n]
        numbers = (judged.device, judged.float32, judged.ours)
        errors = ("inf" if math.isinf(error) else f"{error:.2g}" if error < 1000 else f"{error:.0e}" for error in numbers)
        word = f"[{_COLOURS[judged.verdict]}]{judged.verdict}[/]"
        table.add_row("".join([judged.result, *counts]), *errors, word)
    show(console, table)


def _make_sentences(verdict: Verdict) -> list[str]:
    """Return sentences about a call for the lines below its table. Results with the same reason share a sentence."""
    names: dict[tuple[str, str], list[str]] = {}
    for judged in verdict.results:
        if judged.why:
            names.setdefault((judged.verdict, judged.why), []).append(judged.result)
    lines = []
    for (word, why), results in names.items():
        subject = f"{verdict.call.name}, {', '.join(results)}"
        lines.append(f"[bold {_COLOURS[word]}]{word}:[/] {escape(f'{subject}: {why}')}")
    return lines + [escape(f"{verdict.call.name}: {note}") for note in verdict.notes]
