"""Draw rows of bench.py as bars, compare them with an earlier file, and make tables of traits and plans."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable
from itertools import chain, cycle
from pathlib import Path
from typing import Any

from mx_driving._io import grid, writable, writing
from mx_driving._measure.report import OURS, PLAIN, Row
from mx_driving._operator.rules import Problem, need, ruled

FLOOR, HEAD_MAJOR_FLOOR = "gather loop", "gather loop, head-major"
PARTS, LAYERS_AND_FLOOR = "layers + operator", "layers + floor"  # the parts of a module, timed alone
KEY = ("workload", "dtype", "direction", "implementation")


def writable_picture(name: str, path: Path, what: str) -> None:
    """Check before the work that matplotlib is installed and can write the file's format."""
    need(what, "[demo]", "matplotlib", "PIL")
    from matplotlib.figure import Figure

    ending = path.suffix.lower()[1:]
    try:  # matplotlib may list a format whose writer fails
        if not ending:
            raise ValueError("no ending")
        Figure(figsize=(1, 1)).savefig(io.BytesIO(), format=ending)
    except Exception:  # each writer raises its own classes
        raise Problem(f"{name} must end in a kind of picture such as .png, .jpg or .pdf; got {path.name!r}") from None
    writable(name, path)


def traits_table(workload: str, traits: dict[str, tuple[str, ...]]) -> Any:
    """Return a table of ratios between two ways of running this package."""
    shown = grid(workload, {"mx_driving with itself": 32}, dict.fromkeys(("forward", "backward", "forward +\nbackward"), 10))
    for name, figures in traits.items():
        shown.add_row(name, *figures)
    return shown


def plans_table(title: str, plans: dict[str, dict[str, str]]) -> Any:
    """Return a table of decisions with a column for each direction."""
    shown = grid(title, {"decision": 18, **dict.fromkeys(plans, 28)}, {})
    for decision in dict.fromkeys(chain.from_iterable(plans.values())):
        shown.add_row(decision.replace("_", " "), *(plan.get(decision, "") for plan in plans.values()))
    return shown


def read(path: Path) -> list[Row]:
    """Return the rows of a file that `write` wrote."""
    rule = f"--compare={path} must be a file that bench.py --csv wrote"
    with ruled(rule, OSError, ValueError, TypeError, csv.Error), path.open(newline="", encoding="utf-8") as file:
        rows: list[Row] = list(csv.DictReader(file))
        missing = [name for name in (*KEY, "milliseconds") if rows and rows[0].get(name) is None]
        if missing or not rows:
            raise Problem(f"{rule}; got no {missing[0] if missing else 'row'}")
        if not all(0 < float(row["milliseconds"]) < math.inf for row in rows):
            raise Problem(f"{rule}; got times that are not positive")
    return rows


def in_common(before: Iterable[Row], measured: set[tuple[str, str, str]]) -> None:
    """Raise a Problem unless a row of the earlier file has a workload, dtype and implementation that will be measured."""
    if not any((r["workload"], r["dtype"], r["implementation"]) in measured for r in before):
        raise Problem(f"the two measurements must have rows of {OURS} in common; got none")


def plot(rows: list[Row], path: Path) -> None:
    """Draw how many times longer each rival takes: a panel for each direction, a group of bars for each workload."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    directions = list(dict.fromkeys(r["direction"] for r in rows))
    names = list(dict.fromkeys(r["implementation"] for r in rows))
    colours = dict(zip(names, cycle(plt.get_cmap("tab20").colors), strict=False))  # pyright: ignore
    groups = list(dict.fromkeys((r["workload"], r["dtype"]) for r in rows))
    height = 1.5 + 0.22 * len(groups) * len(names)  # titles, the axis and the legend take more than an inch
    figure, panels = plt.subplots(1, len(directions), figsize=(5.5 * len(directions), height), sharey=True, squeeze=False)
    for panel, direction in zip(panels[0], directions, strict=True):
        for i, group in enumerate(groups):
            bars = [r for r in rows if (r["workload"], r["dtype"]) == group and r["direction"] == direction]
            for j, bar in enumerate(bars):
                y = i + (j - (len(bars) - 1) / 2) * 0.8 / len(names)
                name = bar["implementation"]
                panel.barh(y, bar["times ours"], 0.8 / len(names), color=colours[name])
                panel.annotate(f" {bar['milliseconds']:.3g} ms", (bar["times ours"], y), va="center", fontsize=7)
        panel.set(title=direction, xscale="log", xlabel="time / time of mx_driving")
        panel.margins(x=0.15)
        panel.axvline(1, color="black", linewidth=0.8)
    panels[0][0].set_yticks(range(len(groups)), [w if d == "float32" else f"{w}, {d}" for w, d in groups], fontsize=8)
    panels[0][0].invert_yaxis()
    handles = [plt.Rectangle((0, 0), 1, 1, color=colours[n]) for n in names]  # pyright: ignore
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)
    figure.set_layout_engine("constrained")
    with writing("--plot", path):
        figure.savefig(path, dpi=110)
    plt.close(figure)


SLOWER = 1.25


def slower(rows: list[Row], before: Iterable[Row]) -> list[str]:
    """Return a sentence for each of our rows that takes more than SLOWER times as long as in the earlier file. If both
    files have plain torch, divide times by those of plain torch in the same run, so that the machine's pace cancels out."""
    old = {tuple(r[k] for k in KEY): float(r["milliseconds"]) for r in before}
    new = {tuple(r[k] for k in KEY): float(r["milliseconds"]) for r in rows}
    common = [key for key in new if key[3] == OURS and key in old]
    if not common:
        raise Problem(f"the two measurements must have rows of {OURS} in common; got none")
    sentences = []
    for key in common:
        plain = (*key[:3], PLAIN)
        pace = new[plain] / old[plain] if plain in new and plain in old else 1.0
        ratio = new[key] / old[key] / pace
        if ratio > SLOWER:
            sentences.append(f"{', '.join(key[:3])}: {ratio:.2f} times the earlier {old[key]:.3g} ms (now {new[key]:.3g} ms)")
    return sentences
