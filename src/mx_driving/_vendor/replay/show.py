"""Shows verdicts as a table, as sentences, as JSON and as a CSV file."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

from rich.markup import escape
from torch import Tensor

from ..._cli_support.files import writing
from ..._cli_support.show import grid
from .calls import RecordedCall
from .judge import COARSE, RIGHT, WRONG, Judged, Verdict

COLOURS = {RIGHT: "green", COARSE: "yellow", WRONG: "red"}


def table(verdicts: list[Verdict]) -> Any:
    """Return a table within 80 columns: a call and its inputs stand above its results."""
    shown = grid(None, {"error of, in units": 34}, {"device": 6, "float32": 7, "ours": 6})
    shown.columns[0].max_width, shown.columns[0].overflow = 34, "fold"
    shown.add_column("verdict")
    for verdict in verdicts:
        shown.add_row(f"[bold]{escape(verdict.call.name)}[/]\n{escape(_describe(verdict))}")
        rows = [
            (
                f"  {_counted(j.result, j.nans, j.infinities)}",
                *map(_in_units, (j.device, j.float32, j.ours)),
                f"[{COLOURS[j.verdict]}]{j.verdict}[/]",
            )
            for j in verdict.results
        ]
        shown.add_row(*map("\n".join, zip(*rows, strict=True)), end_section=True)
    return shown


def _describe(verdict: Verdict) -> str:
    call, about = verdict.call, verdict.call.about
    file, _, line = about.get("caller", "").rpartition(":")
    caller = f"{Path(file).name}:{line}" if file else ""
    autocast = ", under autocast" if about.get("autocast") else ""
    lines = [about.get("function", ""), f"call {about.get('index', '?')} on {about.get('device', '?')}{autocast}", caller]
    lines += [about.get("reason", ""), *(f"{name} {_shape(t)}" for name, t in _shown_inputs(call).items())]
    return "\n".join(filter(None, [*lines, _counted(_describe_indices(verdict), verdict.nans, verdict.infinities)]))


def _shown_inputs(call: RecordedCall) -> dict[str, Tensor]:
    indices = (0, 3, 4) if call.row.kind != "pooling" else call.row.differentiable
    return {call.input_names[i]: call.inputs[i] for i in indices}


def _describe_indices(verdict: Verdict) -> str:
    call = verdict.call
    if call.row.kind == "pooling":
        cell = call.inputs[4]
        order = "sorted" if bool((cell.diff() >= 0).all()) else "not sorted"
        return f"{len(cell)} points, {order} by cell\ncells {'x'.join(map(str, call.sizes))}"
    levels = call.sampling.shapes.flatten(0, -2).tolist()
    maps = ", ".join(f"{h}x{w}" for h, w in levels[:4]) + (" ..." if len(levels) > 4 else "")
    unseen = "of points unseen" if call.row.kind == "aggregation" else "off the map"
    return f"maps {maps}\n{100 * verdict.off_map:.3g} % {unseen}"


def _shape(t: Tensor) -> str:
    return f"{'x'.join(map(str, t.shape))} {str(t.dtype).removeprefix('torch.')}"


def _counted(text: str, nans: int, infinities: int) -> str:
    return text + (f", {nans} NaN" if nans else "") + (f", {infinities} infinite" if infinities else "")


def _in_units(error: float) -> str:
    return "inf" if math.isinf(error) else f"{error:.2g}" if error < 1000 else f"{error:.0e}"


def sentences(verdict: Verdict) -> list[str]:
    """Return what is to be said of a call beside its row. Results with one reason share a sentence."""
    reasons: dict[tuple[str, str], list[Judged]] = {}
    for judged in verdict.results:
        if judged.why:
            reasons.setdefault((judged.verdict, judged.why), []).append(judged)
    lines = []
    for (word, why), results in reasons.items():
        names = ", ".join(judged.result for judged in results)
        lines.append(f"[bold {COLOURS[word]}]{word}:[/] {escape(f'{verdict.call.name}, {names}: {why}')}")
    return lines + [escape(f"{verdict.call.name}: {note}") for note in verdict.notes]


def remarks(verdicts: list[Verdict]) -> list[str]:
    """Return a sentence for each limit of the vendor's device that calls break."""
    names: dict[str, list[str]] = {}
    for verdict in verdicts:
        if verdict.limit:
            names.setdefault(verdict.limit, []).append(verdict.call.name)
    several = {limit: f" and {len(calls) - 1} more" if len(calls) > 1 else "" for limit, calls in names.items()}
    return [escape(f"the vendor's device would refuse {calls[0]}{several[limit]}: {limit}") for limit, calls in names.items()]


def rows(verdict: Verdict) -> list[dict[str, Any]]:
    """Return a row for each result of a call, for a CSV file and for JSON."""
    call = verdict.call
    about = {key: call.about.get(key, "") for key in ("function", "operator", "index", "caller", "reason")}
    inputs = {name: _shape(t) for name, t in zip(("value", "locations", "weights"), _shown_inputs(call).values(), strict=False)}
    of_inputs = {"off map": verdict.off_map, "NaN in": verdict.nans, "infinite in": verdict.infinities}
    return [
        {
            **{"call": call.name, **about, "value": "", "locations": "", "weights": "", **inputs, **of_inputs},
            **{"result": judged.result, "NaN out": judged.nans, "infinite out": judged.infinities},
            **{"not judged": judged.left_out, "device": judged.device, "float32": judged.float32, "ours": judged.ours},
            **{"verdict": judged.verdict, "why": judged.why},
        }
        for judged in verdict.results
    ]


def write(verdicts: list[Verdict], path: Path) -> None:
    every = [row for verdict in verdicts for row in rows(verdict)]
    with writing("--csv", path), path.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv.DictWriter(file, list(every[0]) if every else ["call"])
        writer.writeheader()
        writer.writerows(every)
