"""What a measurement is shown as: a table, a CSV file, bars, a comparison with an earlier file."""

from __future__ import annotations

import csv
import platform
import subprocess
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

import torch

from .. import _native

Row = dict[str, Any]
OURS = "mx_driving"
KEY = ("workload", "dtype", "direction", "implementation")


def _commit() -> str:
    """Of the source this package runs from; nothing where it is installed from a wheel."""
    try:
        git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
        found = subprocess.run(git, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f", commit {found.stdout.strip()}"


def machine() -> str:
    """Machine, versions, commit, date: what a number means nothing without."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = models[0] if models else cpu
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    return f"{date.today()}, {cpu}, {_native.isa()}, {torch.get_num_threads()} threads, {versions}{_commit()}"


def table(rows: list[Row]) -> Any:
    from rich.table import Table

    shown = Table(title="mx-driving bench", title_justify="left")
    for name in KEY:
        shown.add_column(name)
    for name in ("ms", "times ours"):
        shown.add_column(name, justify="right")
    previous = None
    for row in rows:
        key = (row["workload"], row["dtype"], row["direction"])
        if previous is not None and key != previous:
            shown.add_section()
        first = key if key != previous else ("", "", "")
        shown.add_row(*first, row["implementation"], f"{row['milliseconds']:.2f}", f"{row['times ours']:.2f}")
        previous = key
    return shown


def traits_table(traits: list[Row]) -> Any:
    from rich.table import Table

    shown = Table(title="Ratios of mx_driving with itself", title_justify="left")
    for name in traits[0]:
        shown.add_column(name, justify="left" if name == "workload" else "right")
    for row in traits:
        shown.add_row(*(str(value) for value in row.values()))
    return shown


def write(rows: list[Row], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], "machine"])
        writer.writeheader()
        writer.writerows({**row, "machine": machine()} for row in rows)


def plot(rows: list[Row], path: Path) -> None:
    """One panel a direction, one group of bars a workload: how many times longer each rival takes, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    directions = list(dict.fromkeys(r["direction"] for r in rows))
    names = list(dict.fromkeys(r["implementation"] for r in rows))
    colours = dict(zip(names, plt.get_cmap("tab10").colors, strict=False))  # pyright: ignore
    groups = list(dict.fromkeys((r["workload"], r["dtype"]) for r in rows))
    height = 0.6 + 0.22 * len(groups) * len(names)
    figure, panels = plt.subplots(1, len(directions), figsize=(5.5 * len(directions), height), sharey=True, squeeze=False)
    for panel, direction in zip(panels[0], directions, strict=True):
        for i, group in enumerate(groups):
            bars = [r for r in rows if (r["workload"], r["dtype"]) == group and r["direction"] == direction]
            for j, bar in enumerate(bars):
                place = i + (j - (len(bars) - 1) / 2) * 0.8 / len(names)
                name = bar["implementation"]
                panel.barh(place, bar["times ours"], 0.8 / len(names), color=colours[name])
                panel.annotate(f" {bar['milliseconds']:.3g} ms", (bar["times ours"], place), va="center", fontsize=7)
        panel.set(title=direction, xscale="log", xlabel="time / time of mx_driving")
        panel.margins(x=0.15)
        panel.axvline(1, color="black", linewidth=0.8)
    panels[0][0].set_yticks(range(len(groups)), [w if d == "float32" else f"{w}, {d}" for w, d in groups], fontsize=8)
    panels[0][0].invert_yaxis()
    handles = [plt.Rectangle((0, 0), 1, 1, color=colours[n]) for n in names]  # pyright: ignore
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)
    figure.set_layout_engine("constrained")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def slower(rows: list[Row], before: Iterable[Row], tolerance: float) -> list[str]:
    """A sentence for each of our rows that takes more than 1 + tolerance times as long as in the earlier file, measured in
    the same run's plain torch where both have it: a slower day of the machine then cancels."""
    old = {tuple(r[k] for k in KEY): float(r["milliseconds"]) for r in before}
    new = {tuple(r[k] for k in KEY): float(r["milliseconds"]) for r in rows}
    common = [key for key in new if key[3] == OURS and key in old]
    if not common:
        raise ValueError("the two measurements have no row of mx_driving in common")
    sentences = []
    for key in common:
        yardstick = (*key[:3], "plain torch")
        pace = new[yardstick] / old[yardstick] if yardstick in new and yardstick in old else 1.0
        ratio = new[key] / old[key] / pace
        if ratio > 1 + tolerance:
            sentences.append(f"{', '.join(key[:3])}: {ratio:.2f} times the earlier {old[key]:.3g} ms (now {new[key]:.3g} ms)")
    return sentences
