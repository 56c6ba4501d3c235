"""Show verdicts as a table, as sentences, and as rows of JSON and CSV files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rich.markup import escape

from .._show import grid
from .judge import COARSE, RIGHT, WRONG, Verdict

COLOURS = {RIGHT: "green", COARSE: "yellow", WRONG: "red"}


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


def make_headline(verdict: Verdict) -> str:
    """Return lines that name a call, its function and its inputs."""
    facts = {**_describe(verdict), "caller": Path(verdict.call.about.get("caller", "")).name}
    function = facts.pop("function")
    if function.endswith(facts["operator"]):
        del facts["operator"]
    lines = [function, *(f"{name}: {fact}" for name, fact in facts.items() if fact not in ("", 0))]
    return "\n  ".join([f"[bold]{escape(verdict.call.name)}[/]", *map(escape, filter(None, lines))])


def make_table(verdict: Verdict) -> Any:
    """Return a table of the results of a call, within 80 columns."""
    table = grid(None, {"error of, in units": 34}, {"device": 6, "float32": 7, "ours": 6})
    table.add_column("verdict")
    for judged in verdict.results:
        counts = [f", {n} {word}" for n, word in ((judged.nans, "NaN"), (judged.infinities, "infinite")) if n]
        numbers = (judged.device, judged.float32, judged.ours)
        errors = ("inf" if math.isinf(error) else f"{error:.2g}" if error < 1000 else f"{error:.0e}" for error in numbers)
        word = f"[{COLOURS[judged.verdict]}]{judged.verdict}[/]"
        table.add_row("".join([judged.result, *counts]), *errors, word)
    return table


def make_sentences(verdict: Verdict) -> list[str]:
    """Return sentences about a call for the lines below its table. Results with the same reason share a sentence."""
    names: dict[tuple[str, str], list[str]] = {}
    for judged in verdict.results:
        if judged.why:
            names.setdefault((judged.verdict, judged.why), []).append(judged.result)
    lines = []
    for (word, why), results in names.items():
        subject = f"{verdict.call.name}, {', '.join(results)}"
        lines.append(f"[bold {COLOURS[word]}]{word}:[/] {escape(f'{subject}: {why}')}")
    return lines + [escape(f"{verdict.call.name}: {note}") for note in verdict.notes]


def make_rows(verdict: Verdict) -> list[dict[str, Any]]:
    """Return the rows of a call for a CSV file and for JSON, one for each result."""
    return [
        {
            **{"call": verdict.call.name, **_describe(verdict)},
            **{"result": judged.result, "NaN out": judged.nans, "infinite out": judged.infinities},
            **{"not judged": judged.left_out, "device": judged.device, "float32": judged.float32, "ours": judged.ours},
            **{"verdict": judged.verdict, "why": judged.why},
        }
        for judged in verdict.results
    ]
