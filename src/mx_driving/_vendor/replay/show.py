"""Shows verdicts as a table, as sentences, as JSON, as a CSV file and as a picture."""

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
        names = [f"  {_counted(j.result, j.nans, j.infinities)}" for j in verdict.results]
        errors = [[_in_units(error) for error in (j.device, j.float32, j.ours)] for j in verdict.results]
        words = [f"[{COLOURS[j.verdict]}]{j.verdict}[/]" for j in verdict.results]
        columns = [names, *map(list, zip(*errors, strict=True)), words]
        shown.add_row(*map("\n".join, columns), end_section=True)
    return shown


def _describe(verdict: Verdict) -> str:
    call, about = verdict.call, verdict.call.about
    file, _, line = about.get("caller", "").rpartition(":")
    caller = f"{Path(file).name}:{line}" if file else ""
    lines = [about.get("function", ""), f"call {about.get('index', '?')} on {about.get('device', '?')}", caller]
    lines += [about.get("reason", ""), *(f"{name} {_shape(t)}" for name, t in _shown_inputs(call).items())]
    return "\n".join(filter(None, [*lines, _counted(_describe_indices(verdict), verdict.nans, verdict.infinities)]))


def _shown_inputs(call: RecordedCall) -> dict[str, Tensor]:
    indices = (0, 3, 4) if call.row.kind != "pooling" else call.row.differentiable
    return {call.input_names[i]: call.inputs[i] for i in indices}


def _describe_indices(verdict: Verdict) -> str:
    call = verdict.call
    if call.row.kind == "pooling":
        cell, sizes = call.inputs[4:]
        order = "sorted" if bool((cell.diff() >= 0).all()) else "not sorted"
        return f"{len(cell)} points, {order} by cell\ncells {'x'.join(map(str, sizes.tolist()))}"
    levels = call.sampling.shapes.flatten(0, -2).tolist()
    maps = ", ".join(f"{h}x{w}" for h, w in levels[:4]) + (" ..." if len(levels) > 4 else "")
    return (
        f"maps {maps}\n{100 * verdict.off_map:.3g} % {'of points unseen' if call.row.kind == 'aggregation' else 'off the map'}"
    )


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
    with writing("--csv", path), path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(every[0]) if every else ["call"])
        writer.writeheader()
        writer.writerows(every)


def plot(verdicts: list[Verdict], path: Path) -> None:
    """Draw a panel for each result: errors of device, float32 and ours by call. Infinite errors are drawn at the top."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    every = [(i, judged) for i, verdict in enumerate(verdicts) for judged in verdict.results]
    names = list(dict.fromkeys(judged.result for _, judged in every))
    finite = [e for _, j in every for e in (j.device, j.float32, j.ours) if 0 < e < math.inf]
    top, bottom = max([10.0, *finite]) * 10, min([0.01, *finite]) / 2
    figure, panels = plt.subplots(len(names), 1, figsize=(8, 1 + 2 * len(names)), sharex=True, squeeze=False)
    for panel, name in zip(panels[:, 0], names, strict=True):
        of_panel = [(i, judged) for i, judged in every if judged.result == name]
        for label, marker, colour in (("device", "o", "#d62728"), ("float32", "_", "#888888"), ("ours", "x", "#1f77b4")):
            heights = [min(max(getattr(judged, label), bottom), top) for _, judged in of_panel]
            panel.plot([i for i, _ in of_panel], heights, marker, color=colour, label=label, markersize=6)
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set(yscale="log", ylim=(bottom / 2, top * 2), ylabel=f"{name}\nerror in units")
    panels[-1, 0].set_xticks(range(len(verdicts)), [v.call.name for v in verdicts], rotation=90, fontsize=7, parse_math=False)
    panels[0, 0].legend(loc="upper right", fontsize=8)
    figure.set_layout_engine("constrained")
    with writing("--plot", path):
        figure.savefig(path, dpi=110)
    plt.close(figure)
