"""The pages' tables, from the CSV files of benchmarks/results and docs/support.

`python docs/tables.py` prints them; `python docs/tables.py README.md README.zh-CN.md` refreshes their rows of times.
"""

from __future__ import annotations

import pathlib
import re
import sys
from collections.abc import Callable

import benchmark_tables as times
import support_tables as support

TABLES: dict[str, Callable[[], str]] = {
    "first": times.first,
    "first_on_gpu": times.first_on_gpu,
    "numbers": times.numbers,
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
    "bev_pool": lambda: times.plain("epyc-zen4-2-cores-bev-pool.csv"),
    "gpu": times.gpu,
    "gpu_rivals": times.gpu_rivals,
    "gpu_models": times.gpu_models,
    "onnx_forms": support.onnx_forms,
    "tested": support.tested,
    "tested_by_file": support.tested_by_file,
    "needs": support.needs,
    "wheels": support.wheels,
    "limits": support.limits,
    "deploy": support.deploy,
    "tested_libraries": support.tested_libraries,
}


def write(folder: pathlib.Path) -> None:
    for name, table in TABLES.items():
        (folder / f"{name}.md").write_text(table(), encoding="utf-8")


def refresh(page: pathlib.Path) -> None:
    """Write the rows of `first` and `first_on_gpu` into a page's rows of the same names."""
    tables = f"{times.first()}{times.first_on_gpu()}".replace("\u00a0", " ").splitlines()
    rows = {line.split(" | ")[0]: line for line in tables if re.search(r"\| \d", line)}
    fresh = [rows.get(line.split(" | ")[0], line) for line in page.read_text(encoding="utf-8").splitlines()]
    page.write_text("\n".join(fresh) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for page in sys.argv[1:]:
        refresh(pathlib.Path(page))
    for name, table in () if sys.argv[1:] else TABLES.items():
        print(f"## {name}\n\n{table()}")
