"""`mx-driving bench`: workloads make sense, rivals compute the same, wrong kernels are not timed."""

from __future__ import annotations

import csv

import pytest
import torch
from typer.testing import CliRunner

import mx_driving
from mx_driving.cli import plain
from mx_driving.cli.app import app
from mx_driving.cli.check import Row
from mx_driving.cli.examples import EXAMPLES
from mx_driving.cli.workloads import AGGREGATION, WORKLOADS

SMALL = "RT-DETR*"


def test_names_are_unique_and_every_operator_is_there():
    assert len({w.name for w in WORKLOADS}) == len(WORKLOADS)
    assert len({w.operator for w in WORKLOADS}) == 3


@pytest.mark.parametrize("name", ["RT-DETR decoder", "Sparse4D v3", "MapTR nano", "Vendor example small [1, 16, 32, 4, 1, 8]"])
def test_plain_forms_compute_the_same(name):
    """Some queries of a workload: a rival that computes something else would be no rival."""
    workload = next(w for w in WORKLOADS if w.name == name)
    args = workload.make(torch.Generator().manual_seed(0))
    args = (*args[:3], args[3][:, :40], args[4][:, :40])
    ours = getattr(mx_driving, workload.operator)(*args)
    torch.testing.assert_close(getattr(plain, workload.operator)(*args), ours, rtol=1e-4, atol=1e-5)
    assert ours.abs().max() > 1e-3


def test_sparse4d_points_are_seen_by_one_or_two_cameras():
    workload = next(w for w in WORKLOADS if w.operator == AGGREGATION)
    locations = workload.make(torch.Generator().manual_seed(0))[3]
    seen = ((locations > 0) & (locations < 1)).all(-1).sum(-1).float()
    assert 0.9 < seen.mean() < 2
    assert seen.max() <= 2


def test_rows_and_csv(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    out = tmp_path / "rows.csv"
    result = CliRunner().invoke(app, ["bench", "--workload", SMALL, "--seconds", "0.1", "--csv", str(out)])
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader(out.open()))
    assert {(r["direction"], r["implementation"]) for r in rows} == {
        (d, i) for d in ("forward", "forward + backward") for i in ("mx_driving", "plain torch")
    }
    assert all(float(r["milliseconds"]) > 0 and int(r["rounds"]) >= 3 for r in rows)
    assert "torch " + torch.__version__ in rows[0]["machine"]


def test_no_workload_of_that_name():
    assert CliRunner().invoke(app, ["bench", "--workload", "no such model"]).exit_code == 1


def test_a_wrong_kernel_is_not_timed(monkeypatch):
    row = Row(EXAMPLES[0], "float32", "cpu: native", {"output": 1.0}, {"output": 1e-6}, 0, 0)
    monkeypatch.setattr("mx_driving.cli.bench.check_one", lambda *a, **k: row)
    result = CliRunner().invoke(app, ["bench", "--workload", SMALL])
    assert result.exit_code != 0
    assert "output of multi_scale_deformable_attn is off" in str(result.exception)
