"""`pytest --record FILE`: how many tests of each file passed, failed and were skipped, and where. docs/support.md shows it."""

from __future__ import annotations

import collections
import csv
import datetime
import pathlib
import platform
from typing import Any

import torch

from mx_driving.measure.report import processor

OUTCOMES = {"passed": "passed", "failed": "failed", "error": "failed", "skipped": "skipped"}
WHERE = ("torch", "python", "system", "processor", "packages")
COLUMNS = (*WHERE, "file", "passed", "failed", "skipped", "date")


def here(packages: str) -> dict[str, str]:
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "packages": packages,
    }


def counts(stats: dict[str, list[Any]]) -> dict[str, collections.Counter[str]]:
    """File -> outcome -> number of tests, of pytest's reports."""
    found: dict[str, collections.Counter[str]] = {}
    for key, outcome in OUTCOMES.items():
        for report in stats.get(key, []):
            found.setdefault(pathlib.Path(report.nodeid.partition("::")[0]).name, collections.Counter())[outcome] += 1
    return found


def write(path: pathlib.Path, place: dict[str, str], found: dict[str, collections.Counter[str]]) -> None:
    """Replace the rows of the same place and test file, and keep all others."""
    rows = []
    if path.exists():
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    rows = [row for row in rows if row["file"] not in found or any(row[column] != place[column] for column in WHERE)]
    date = datetime.date.today().isoformat()
    for name, by_outcome in found.items():
        numbers = {outcome: str(by_outcome[outcome]) for outcome in ("passed", "failed", "skipped")}
        rows.append({**place, "file": name, **numbers, "date": date})
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: [row[column] for column in (*WHERE, "file")]))
