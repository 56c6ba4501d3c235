"""Shows verdicts as a table, as sentences, as a CSV file and as a picture."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

from rich.markup import escape
from torch import Tensor

from .._cli_support.files import writing
from .._cli_support.show import grid
from . import _pools
from .judge import COARSE, RIGHT, WRONG, Judged, Verdict

COLOURS = {RIGHT: "green", COARSE: "yellow", WRONG: "red"}


def table(verdicts: list[Verdict]) -> Any:
    """A row for each call, a line in it for each result."""
    shown = grid(None, {"call": 0, "error of, in units": 0}, dict.fromkeys(("device", "float32", "ours"), 0))
    shown.add_column("verdict")
    for verdict in verdicts:
        lines = [
            [_counted(j.result, j.nans, j.infinities), *map(_units, (j.device, j.float32, j.ours))] for j in verdict.results
        ]
        words = [f"[{COLOURS[j.verdict]}]{j.verdict}[/]" for j in verdict.results]
        columns = ["\n".join(column) for column in zip(*lines, strict=True)]
        shown.add_row(f"{_call(verdict)}\n{_inputs(verdict)}", *columns, "\n".join(words), end_section=True)
    return shown


def _call(verdict: Verdict) -> str:
    about = verdict.call.about
    file, _, line = about.get("caller", "").rpartition(":")
    where = f"{Path(file).name}:{line}" if file else ""
    made = [f"call {about.get('index', '?')} on {about.get('device', '?')}", where, about.get("reason", "")]
    text = "\n".join([about.get("function", ""), ", ".join(filter(None, made))])
    return f"[bold]{escape(verdict.call.name)}[/]\n{escape(text)}"


def _inputs(verdict: Verdict) -> str:
    call = verdict.call
    if not call.row.samples:
        shapes = [_shape(call.places[i], call.inputs[i]) for i in call.row.differentiable]
        words = _counted(", ".join(_pools.described(*call.inputs)), verdict.nans, verdict.infinities)
        return escape("\n".join([*shapes, words]))
    shapes = [_shape(name, getattr(call.sampling, name)) for name in ("value", "locations", "weights")]
    levels = call.sampling.shapes.flatten(0, -2).tolist()
    maps = ", ".join(f"{h} x {w}" for h, w in levels[:4]) + (" ..." if len(levels) > 4 else "")
    off = f"{100 * verdict.off_map:.3g} % {'of points unseen' if call.row.grouped else 'off the map'}"
    return escape("\n".join([*shapes, f"maps {maps}", _counted(off, verdict.nans, verdict.infinities)]))


def _shape(name: str, t: Tensor) -> str:
    return f"{name} {' x '.join(map(str, t.shape))} {str(t.dtype).removeprefix('torch.')}"


def _counted(text: str, nans: int, infinities: int) -> str:
    return text + (f", {nans} NaN" if nans else "") + (f", {infinities} infinite" if infinities else "")


def _units(error: float) -> str:
    return "inf" if math.isinf(error) else f"{error:.2g}" if error < 1000 else f"{error:.0e}"


def sentences(verdict: Verdict) -> list[str]:
    """What is to be said of a call beside its row. Results with one reason share a sentence."""
    said = []
    reasons: dict[tuple[str, str], list[Judged]] = {}
    for judged in verdict.results:
        if judged.why:
            reasons.setdefault((judged.verdict, judged.why), []).append(judged)
    for (word, why), results in reasons.items():
        names = ", ".join(judged.result for judged in results)
        said.append(f"[bold {COLOURS[word]}]{word}:[/] {escape(f'{verdict.call.name}, {names}: {why}')}")
    return said + [escape(f"{verdict.call.name}: {note}") for note in verdict.notes]


def remarks(verdicts: list[Verdict]) -> list[str]:
    """What the vendor's device would refuse, a sentence for each limit."""
    found: dict[str, list[str]] = {}
    for verdict in verdicts:
        found.setdefault(verdict.limit, []).append(verdict.call.name)
    found.pop("", None)
    several = {limit: f" and {len(names) - 1} more" if len(names) > 1 else "" for limit, names in found.items()}
    return [escape(f"the vendor's device would refuse {names[0]}{several[limit]}: {limit}") for limit, names in found.items()]


def rows(verdict: Verdict) -> list[dict[str, Any]]:
    """Of the CSV file: a row for each result."""
    call = verdict.call
    about = {key: call.about.get(key, "") for key in ("function", "operator", "index", "device", "caller", "reason")}
    places = (0, 3, call.row.weights)
    shapes = {
        name: _shape("", call.inputs[i]).strip() for name, i in zip(("value", "locations", "weights"), places, strict=True)
    }
    of_inputs = {"off map": verdict.off_map, "NaN in": verdict.nans, "infinite in": verdict.infinities}
    return [
        {
            **{"call": call.name, **about, **shapes, **of_inputs, "result": judged.result},
            **{"NaN out": judged.nans, "infinite out": judged.infinities, "not judged": judged.left_out},
            **{"device": judged.device, "float32": judged.float32, "ours": judged.ours},
            **{"verdict": judged.verdict, "why": judged.why},
        }
        for judged in verdict.results
    ]


def write(verdicts: list[Verdict], path: Path) -> None:
    every = [row for verdict in verdicts for row in rows(verdict)]
    with writing("--csv", path), path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(every[0]) if every else ["call"])
        writer.writeheader()
        writer.writerows(every)


def plot(verdicts: list[Verdict], path: Path) -> None:
    """A panel for each result: errors of device, float32 and ours by call. What is infinite is drawn at the top."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    every = [(i, judged) for i, verdict in enumerate(verdicts) for judged in verdict.results]
    names = list(dict.fromkeys(judged.result for _, judged in every))
    finite = [e for _, j in every for e in (j.device, j.float32, j.ours) if 0 < e < math.inf]
    top, bottom = max([10.0, *finite]) * 10, min([0.01, *finite]) / 2
    figure, panels = plt.subplots(len(names), 1, figsize=(8, 1 + 2 * len(names)), sharex=True, squeeze=False)
    for panel, name in zip(panels[:, 0], names, strict=True):
        of_it = [(i, judged) for i, judged in every if judged.result == name]
        for label, marker, colour in (("device", "o", "#d62728"), ("float32", "_", "#888888"), ("ours", "x", "#1f77b4")):
            heights = [min(max(getattr(judged, label), bottom), top) for _, judged in of_it]
            panel.plot([i for i, _ in of_it], heights, marker, color=colour, label=label, markersize=6)
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set(yscale="log", ylim=(bottom / 2, top * 2), ylabel=f"{name}\nerror in units")
    panels[-1, 0].set_xticks(range(len(verdicts)), [v.call.name for v in verdicts], rotation=90, fontsize=7, parse_math=False)
    panels[0, 0].legend(loc="upper right", fontsize=8)
    figure.set_layout_engine("constrained")
    with writing("--plot", path):
        figure.savefig(path, dpi=110)
    plt.close(figure)
