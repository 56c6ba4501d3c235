"""The pages' tables, from the CSV files of benchmarks/results and docs/support.

`make tables` writes them between the marks `<!-- table: NAME -->` and `<!-- end -->` of the pages. It also draws charts
and pictures.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable
from functools import partial

import benchmark_tables as times
import charts
import pictures
import support_tables as support

TABLES: dict[str, Callable[[], str]] = {
    "models": lambda: times.forwards("whole model", times.MODES, times.of_models(), times.BY_MODE),
    "module_forwards": times.module_forwards,
    "operators": lambda: times.forwards("operator", times.MODES[:1], times.of_operators(), times.BENCH),
    "modules_by_mode": times.modules_by_mode,
    "measured": lambda: times.made(times.read(times.BENCH)) + "\n",
    "forward": lambda: times.speed_ups("forward"),
    "forward_backward": lambda: times.speed_ups("forward + backward"),
    "with_logits": lambda: times.beside(times.BARE, times.RIVALS[:2]),
    "modules": lambda: times.beside(times.PARTS, times.MODULES),
    "floors": times.floors,
    "other_measured": times.other_measured,
    "other_forward": lambda: times.other_processors("forward"),
    "other_forward_backward": lambda: times.other_processors("forward + backward"),
    "other_with_logits": times.other_processors_with_logits,
    "libraries": times.libraries,
    "onnx_files": times.onnx_files,
    "detectors": lambda: times.plain("epyc-zen3-2-cores-detectors.csv"),
    "train_bev": lambda: times.plain("epyc-zen4-2-cores-train-bev.csv"),
    "digits_precision": lambda: times.plain(times.DIGITS),
    "gpu": times.gpu,
    "gpu_models": times.gpu_models,
    "onnx_forms": support.onnx_forms,
    "tested": support.tested,
    "needs": support.needs,
    "wheels": support.wheels,
    "known": support.known,
    "limits": support.limits,
    "deploy": support.deploy,
    "nn_modules": support.modules,
    "tested_libraries": support.tested_libraries,
}


TABLES |= {name: partial(charts.markdown, name) for name in charts.CHARTS}
HERE = pathlib.Path(__file__).parent
MARKED = re.compile(r"(<!-- (?:table|chart): (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def refresh(text: str) -> str:
    """Return a page's text with fresh tables between its marks."""
    return MARKED.sub(lambda mark: f"{mark[1]}\n{TABLES[mark[2]]()}\n{mark[3]}", text)


def refresh_rows(text: str) -> str:
    """Return the text of a README, whose headers differ, with fresh rows of `first` and `first_on_gpu`."""
    tables = f"{times.first()}{times.first_on_gpu()}".replace("\u00a0", " ").splitlines()
    rows = {line.split(" | ")[0]: line for line in tables if re.search(r"\| \d", line)}
    return "".join(rows.get(line.split(" | ")[0], line) + "\n" for line in text.splitlines())


def main() -> None:
    pages = [(page, refresh) for page in HERE.glob("*.md")]
    pages += [(readme, refresh_rows) for readme in HERE.parent.glob("README*.md")]
    for page, refreshed in pages:
        page.write_text(refreshed(page.read_text(encoding="utf-8")), encoding="utf-8")
    charts.write(HERE / "images")
    pictures.write(HERE / "images")


if __name__ == "__main__":
    main()
