"""A pytest plugin for transformers' own tests: what they import, the same random numbers each time, the patch, and a record.

MX_DRIVING_PATCH=1 calls `mx_driving.patch("transformers")`. MX_DRIVING_RECORD names a file, which gets a line of JSON for each
test.
"""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import random
import sys
import types

import numpy
import pytest
import torch

import mx_driving

# Modules that the sdist's tests import and the sdist lacks, and the classes that they take from there.
MISSING = {
    "tests.exporters": (),
    "tests.exporters.test_export": ("ExportTesterMixin",),
    "tests.generation": (),
    "tests.generation.test_utils": ("GenerationTesterMixin",),
}


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    for name, classes in MISSING.items():
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in MISSING:
                raise
            sys.modules[name] = types.ModuleType(name)
            vars(sys.modules[name]).update({kind: type(kind, (), {}) for kind in classes}, __path__=[])
    if os.environ.get("MX_DRIVING_PATCH"):
        print(mx_driving.patch("transformers"))


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """A test must see the same inputs and weights in both runs."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    common = sys.modules.get("tests.test_modeling_common")
    if common is not None:
        common.global_rng.seed(0)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    record, part_of_test = os.environ.get("MX_DRIVING_RECORD"), hasattr(report, "context")  # some tests have thousands of parts
    if not record or (report.outcome == "passed" and (report.when != "call" or part_of_test)):
        return
    file, kind, test = report.nodeid.rsplit("::", 2)
    model = kind.removeprefix("Test_") if kind.startswith("Test_") else pathlib.PurePosixPath(file).parent.name
    with pathlib.Path(record).open("a", encoding="utf-8") as lines:
        lines.write(json.dumps({"model": model, "test": test, "outcome": report.outcome}) + "\n")
