"""`pytest --record=FILE tests`: how many tests of each file passed, failed and were skipped, and where, for docs/support.md."""

import collections
import csv
import datetime
import pathlib
import platform
from typing import Any

import torch

from mx_driving._measure.report import find_processor

TESTS = pathlib.Path(__file__).parents[1]
OUTCOMES = {"passed": "passed", "failed": "failed", "error": "failed", "skipped": "skipped"}
WHERE = ("torch", "python", "system", "processor", "packages")
RUN = ("torch", "python", "system", "packages")  # a run replaces the rows of these, whatever its processor
COLUMNS = (*WHERE, "file", "passed", "failed", "skipped", "date")


def here(packages: str) -> dict[str, str]:
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": find_processor(),
        "packages": packages,
    }


def counts(stats: dict[str, list[Any]]) -> dict[str, collections.Counter[str]]:
    """File -> outcome -> number of tests, of pytest's reports."""
    found: dict[str, collections.Counter[str]] = {}
    for key, outcome in OUTCOMES.items():
        for report in stats.get(key, []):
            found.setdefault(pathlib.Path(report.nodeid.partition("::")[0]).name, collections.Counter())[outcome] += 1
    return found


def read(path: pathlib.Path) -> list[dict[str, str]]:
    """Return the rows of a file; none if it does not exist."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: pathlib.Path, place: dict[str, str], by_file: dict[str, collections.Counter[str]]) -> None:
    """Replace the rows of the same run and test file, drop the rows of test files that are gone, and keep all others."""
    tests = {file.name for file in TESTS.rglob("test_*.py")}
    rows = [row for row in read(path) if row["file"] in tests]
    rows = [row for row in rows if row["file"] not in by_file or any(row[column] != place[column] for column in RUN)]
    date = datetime.date.today().isoformat()
    for name, outcomes in by_file.items():
        numbers = {outcome: str(outcomes[outcome]) for outcome in ("passed", "failed", "skipped")}
        rows.append({**place, "file": name, **numbers, "date": date})
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with part.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: [row[column] for column in (*WHERE, "file")]))
    part.replace(path)  # whole or not at all
