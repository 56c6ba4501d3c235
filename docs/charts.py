"""The pages' bar charts, drawn from the CSV files of benchmarks/results: `make tables` writes them to docs/images.

A chart is as wide as a telephone; the site enlarges it. The SVG file has all values as text. A page has
them in a table, or as the chart's text alternative.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import benchmark_tables as times
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

WIDTH = 3.7  # inches
INK, GRID = "#1b1b1b", "#d5d5d5"
# Letters stay text: outlines would make a file five times as large. The salt gives elements the same ids in each run.
SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "mx_driving", "font.size": 8}
SETTINGS |= {"legend.frameon": False, "legend.fontsize": 7.5}
SETTINGS |= {"text.color": INK, "xtick.color": INK, "axes.labelcolor": INK, "axes.edgecolor": GRID, "grid.color": GRID}
# Colour-blind people can tell these colours apart.
GREY, ORANGE, GREEN, BLUE = "#8c8c8c", "#e08a1e", "#2ca089", "#3b82c4"
COLOURS = {
    "plain PyTorch": GREY,
    "its own code": GREY,
    "torch.compile": GREEN,
    "deformops": GREEN,
    "torch-ms-deform-attn": ORANGE,
    "mx_driving": BLUE,
}
MARKERS = {"torch-ms-deform-attn": "D", "torch.compile": "o", "deformops": "o"}


def digits(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


class Chart(NamedTuple):
    title: str
    rows: dict[str, dict[str, float]]  # row -> implementation -> value
    draw: Callable[[Any, dict[str, dict[str, float]]], None]
    unit: str

    def alternative(self) -> str:
        """Return the values as text, in the order of the rows."""
        rows = (f"{row}: {', '.join(f'{name} {digits(value)}' for name, value in by.items())}" for row, by in self.rows.items())
        return f"Bar chart. {self.title}, {self.unit}. {'; '.join(rows)}."


def cpu_models() -> Chart:
    rows = [row for row in times.read(times.BY_MODE) if row["mode"] == times.MODES[0]]
    rows.sort(key=lambda row: -float(row["speed-up"]))
    values = {
        row["model"]: {"its own code": float(row["before s"]) * 1e3, "mx_driving": float(row["after s"]) * 1e3} for row in rows
    }
    return Chart("Whole models on a CPU, float32", values, draw_times, "milliseconds; shorter is better")


def cpu_modules() -> Chart:
    modules = times.by_implementation("forward", times.MODULES_BY_MODE)
    values = {
        name.removeprefix("Module: "): {"plain PyTorch": float(by["plain torch"]["times ours"])} for name, by in modules.items()
    }
    return Chart("Modules on a CPU, forward, float32", values, draw_ratios, "how many times longer plain PyTorch takes")


def cpu_operators() -> Chart:
    names = {"plain torch": "plain PyTorch", "torch.compile": "torch.compile", "torch-ms-deform-attn": "torch-ms-deform-attn"}
    workloads = {name: by for name, by in times.bare_workloads("forward").items() if not name.startswith("Vendor example")}
    values = {row: {names[n]: float(r["times ours"]) for n, r in by.items() if n in names} for row, by in workloads.items()}
    return Chart(
        "Operators on a CPU, forward, float32", values, draw_ratios, "how many times longer others take than mx_driving"
    )


def gpu_models() -> Chart:
    names = {"plain": "its own code", "torch-ms-deform-attn": "torch-ms-deform-attn", "mx_driving": "mx_driving"}
    values = {
        name: {names[variant]: float(row["milliseconds"]) for variant, row in by.items()}
        for name, by in times.gpu_calls(short=True).items()
    }
    return Chart("Whole models on an H100", values, draw_times, "milliseconds; shorter is better")


def gpu_operators() -> Chart:
    names = {"plain": "plain PyTorch", "deformops-triton": "deformops", "classic": "torch-ms-deform-attn"}
    values = {}
    for direction in ("forward", "backward"):
        for row, by in times.by_implementation(direction, times.GPU).items():
            ours = float(by["mx_driving, call"]["milliseconds"])
            values[f"{row}; {direction}"] = {n: float(by[key]["milliseconds"]) / ours for key, n in names.items() if key in by}
    return Chart(
        "Operators on an H100, float32", values, draw_ratios, "how many times longer others take than mx_driving, a call"
    )


def draw_times(axes: Any, rows: dict[str, dict[str, float]]) -> None:
    """Draw a bar for each implementation, with its time behind it, below the name of the row."""
    step, seen = 0.0, set[str]()
    longest = max(value for by in rows.values() for value in by.values())
    for row, by in rows.items():
        axes.text(0, step, row, va="center")
        for number, (name, value) in enumerate(by.items(), 1):
            axes.barh(step + number * 0.8, value, 0.7, color=COLOURS[name], label=None if name in seen else name)
            gain = f"  ({by['its own code'] / value:.2f} x)" if name == "mx_driving" else ""
            axes.text(value + longest * 0.01, step + number * 0.8, digits(value) + gain, va="center", fontsize=7)
            seen.add(name)
        step += 0.8 * len(by) + 1.1
    axes.set(xlim=(0, longest * 1.16), ylim=(step - 0.7, -0.7))
    axes.legend(ncols=2)


def draw_ratios(axes: Any, rows: dict[str, dict[str, float]]) -> None:
    """Draw a bar from 1 for plain PyTorch, and a mark for each other implementation, on a logarithmic axis."""
    seen = set[str]()
    for number, (row, by) in enumerate(rows.items()):
        axes.text(1.04, number * 2, row, va="center")
        for name, value in by.items():
            label = None if name in seen else name
            seen.add(name)
            if name in MARKERS:
                axes.plot(value, number * 2 + 0.85, MARKERS[name], color=COLOURS[name], label=label, markersize=5, zorder=3)
            else:
                axes.barh(number * 2 + 0.85, value - 1, 0.8, left=1, color=COLOURS[name], label=label)
    axes.axvline(1, color=BLUE, linewidth=1.5, label="mx_driving")
    axes.set_xscale("log")
    ratios = [value for by in rows.values() for value in by.values()]
    largest = max(ratios)
    axes.set(xlim=(min(0.93, 0.9 * min(ratios)), largest * 1.2), ylim=(len(rows) * 2 - 0.4, -0.9))
    axes.set_xticks([tick for tick in (1, 3, 10, 30, 100, 300) if tick < largest])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} x"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.legend(ncols=2)


def figure(chart: Chart) -> Figure:
    """Return the drawn chart. Its height depends on the number of bars."""
    drawn = Figure(figsize=(WIDTH, 1), layout="constrained")
    axes = drawn.subplots()
    axes.xaxis.grid(True, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.tick_params(left=False, labelleft=False, bottom=False, which="both")
    chart.draw(axes, chart.rows)
    axes.set_xlabel(chart.unit)
    axes.get_legend().set(loc="lower left", bbox_to_anchor=(-0.02, 1), title=chart.title, alignment="left")
    bottom, top = axes.get_ylim()
    drawn.set_size_inches(WIDTH, 0.135 * abs(bottom - top) + 0.95)
    return drawn


CHARTS = {"chart_models": cpu_models, "chart_modules": cpu_modules, "chart_operators": cpu_operators}
CHARTS |= {"chart_gpu_models": gpu_models, "chart_gpu_operators": gpu_operators}


def markdown(name: str) -> str:
    """Return the line of a page that shows a chart. The text alternative has the values of a chart that has no table."""
    chart = CHARTS[name]()
    values = (
        chart.alternative()
        if name == "chart_gpu_operators"
        else f"Bar chart. {chart.title}, {chart.unit}; tables have the values."
    )
    alternative = values.replace("*", "\\*")
    return f"![{alternative}](images/{name}.svg)\n"


def write(folder: pathlib.Path) -> None:
    """Write the SVG file of each chart."""
    for name, make in CHARTS.items():
        chart = make()
        with rc_context(SETTINGS):
            figure(chart).savefig(folder / f"{name}.svg", metadata={"Date": None, "Description": chart.alternative()})
