"""What `pytest --record` writes, and the table of features by torch."""

from __future__ import annotations

import csv
from types import SimpleNamespace

import outcomes
import pytest
import torch

from mx_driving import _checks


def test_counts_replace_those_of_the_same_place(tmp_path):
    def stats(**tests):
        return {key: [SimpleNamespace(nodeid=f"tests/test_{name}.py::test[{i}]") for i, name in enumerate(names)]
                for key, names in tests.items()}  # fmt: skip

    file = tmp_path / "support" / "tests.csv"
    place = outcomes.here("oldest")
    assert place["torch"] == str(torch.__version__)
    outcomes.write(file, place, outcomes.counts(stats(passed=["a", "a", "b"], error=["a"], skipped=["b"])))
    outcomes.write(file, place, outcomes.counts(stats(passed=["a"])))
    outcomes.write(file, {**place, "torch": "2.6.0"}, outcomes.counts(stats(failed=["a"])))
    with file.open() as lines:
        rows = [(r["torch"], r["file"], r["passed"], r["failed"], r["skipped"]) for r in csv.DictReader(lines)]
    here = place["torch"]
    expected = [("2.6.0", "test_a.py", "0", "1", "0"), (here, "test_a.py", "1", "0", "0"), (here, "test_b.py", "1", "0", "1")]
    assert sorted(rows) == sorted(expected)


@pytest.mark.parametrize("feature", _checks.needs.NEEDS)
def test_an_older_torch_lacks_a_feature(feature, monkeypatch):
    oldest = _checks.needs.NEEDS[feature].torch
    for version, lacking in (("2.6.0+cu124", True), (f"{oldest}.0", False), ("2.13.0+cpu", False), ("3.0.0a0", False)):
        monkeypatch.setattr(torch, "__version__", version)
        assert (_checks.needs.lacks(feature) is not None) == lacking, version
    monkeypatch.setattr(torch, "__version__", "2.6.0")
    with pytest.raises(NotImplementedError, match=f"needs torch {oldest} or later; got 2.6.0: older ones fail, since "):
        _checks.needs.check(feature)
