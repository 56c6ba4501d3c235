"""What `pytest --record` writes, and the table of features by torch."""

from __future__ import annotations

import pathlib
from types import SimpleNamespace

import outcomes
import pytest
import torch

from mx_driving import _needs


def test_counts_replace_those_of_the_same_place(tmp_path, monkeypatch):
    def stats(**tests):
        return {key: [SimpleNamespace(nodeid=f"tests/test_{name}.py::test[{i}]") for i, name in enumerate(names)]
                for key, names in tests.items()}  # fmt: skip

    file, tests = tmp_path / "support" / "tests.csv", tmp_path / "tests"
    monkeypatch.setattr(outcomes, "TESTS", tests)
    tests.mkdir()
    for name in "ab":
        (tests / f"test_{name}.py").touch()
    place = outcomes.here("oldest")
    assert place["torch"] == str(torch.__version__)
    outcomes.write(file, place, outcomes.counts(stats(passed=["a", "a", "b"], error=["a"], skipped=["b"])))
    outcomes.write(file, place, outcomes.counts(stats(passed=["a"])))
    outcomes.write(file, {**place, "torch": "2.6.0"}, outcomes.counts(stats(failed=["a"])))
    for run in (place, {**place, "torch": "2.6.0"}):
        outcomes.write(file, run, outcomes.counts(stats(passed=["gone"])))
    outcomes.write(file, place, {})
    rows = [(r["torch"], r["file"], r["passed"], r["failed"], r["skipped"]) for r in outcomes.read(file)]
    here = place["torch"]
    expected = [("2.6.0", "test_a.py", "0", "1", "0"), (here, "test_a.py", "1", "0", "0"), (here, "test_b.py", "1", "0", "1")]
    assert sorted(rows) == sorted(expected)


def test_a_version_of_torch_that_is_none_is_refused(tmp_path):
    """A row once lost its first characters: 2.13.0+cpu became 3.0+cpu."""
    file, place = tmp_path / "tests.csv", outcomes.here("newest")
    outcomes.write(file, place, {})
    with pytest.raises(ValueError, match=r"torch must be a version of three numbers; got '3.0\+cpu'"):
        outcomes.write(file, {**place, "torch": "3.0+cpu"}, {})
    file.write_text(file.read_text() + "3.0+cpu,3.11.7,Linux x86_64,AMD EPYC,newest,test_a.py,19,0,0,2026-11-22\n")
    with pytest.raises(ValueError, match="torch must be a version of three numbers"):
        outcomes.write(file, place, {})
    assert outcomes.read(pathlib.Path(__file__).parents[2] / "docs/support/tests.csv")


@pytest.mark.parametrize("feature", _needs.NEEDS)
def test_an_older_torch_lacks_a_feature(feature, monkeypatch):
    oldest = _needs.NEEDS[feature].torch
    for version, lacking in (("2.6.0+cu124", True), (f"{oldest}.0", False), ("2.13.0+cpu", False), ("3.0.0a0", False)):
        monkeypatch.setattr(torch, "__version__", version)
        assert (_needs.lacks(feature) is not None) == lacking, version
    monkeypatch.setattr(torch, "__version__", "2.6.0")
    with pytest.raises(NotImplementedError, match=f"needs torch {oldest} or later; got 2.6.0: older ones fail, since "):
        _needs.check(feature)
