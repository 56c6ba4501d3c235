"""`--record FILE` writes what each test gave, a row for each: library, version, what was tried, outcome, and a sentence."""

import csv
import importlib.metadata
import pathlib
import platform
import subprocess
import sys
from datetime import date

import pytest
import torch

sys.path.append(str(pathlib.Path(__file__).parents[2] / "benchmarks"))
import torchvision_names

torchvision_names.declare()
torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption("--record", type=pathlib.Path, help="write the outcome of every test to this CSV file")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    given = item.callspec.params
    own_file = f"ONNX file of {given['file']}" if "file" in given else "patch by name"
    report.tried = given["library"], given.get("model", own_file)
    report.sentence = str(call.excinfo.value).strip().split("\n")[0] if call.excinfo else ""
    return report


def pytest_terminal_summary(terminalreporter, config):
    path = config.getoption("--record")
    reports = [r for some in ("passed", "failed", "error") for r in terminalreporter.stats.get(some, []) if hasattr(r, "tried")]
    if path and reports:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(("library", "version", "tried", "outcome", "message", "made"))
            writer.writerows(sorted(_row(report) for report in reports))


def _row(report) -> tuple[str, ...]:
    library, what = report.tried
    made = f"{date.today()}, torch {torch.__version__}, Python {platform.python_version()}{commit()}"
    return library, _version(library), what, report.outcome, report.sentence, made


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def commit() -> str:
    """Return the commit a record is made at, "changed" where the package or its tests differ; nothing where there is no git."""
    commands = ["git", "rev-parse", "--short", "HEAD"], ["git", "status", "--porcelain", "../../src", "../../native", ".."]
    try:
        here = pathlib.Path(__file__).parent
        name, changes = (subprocess.check_output(words, cwd=here, text=True).strip() for words in commands)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f", commit {name}{' changed' if changes else ''}"
