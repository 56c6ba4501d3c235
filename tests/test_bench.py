"""`mx-driving bench`: workloads make sense, rivals compute the same, wrong kernels are not timed."""

from __future__ import annotations

import csv
import pathlib
import shutil
import statistics
import subprocess
import sys

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import mx_driving
from mx_driving.cli.app import app
from mx_driving.measure import floor, plain
from mx_driving.measure.accuracy import Checked
from mx_driving.measure.floor import add_rows, corner_rows
from mx_driving.measure.report import slower
from mx_driving.measure.traits import extra_memory, import_seconds, one_query, traits
from mx_driving.measure.workloads import AGGREGATION, EXAMPLES, WORKLOADS

SMALL = "RT-DETR*"
needs_the_floor = pytest.mark.skipif(floor.why_not() is not None, reason="the gather floor's library (make native)")


def test_names_are_unique_and_every_operator_is_there():
    assert len({w.name for w in WORKLOADS}) == len(WORKLOADS)
    assert len({w.operator for w in WORKLOADS}) == 3


@pytest.mark.parametrize("name", ["RT-DETR decoder", "Sparse4D v3", "MapTR nano", "Vendor example small [1, 16, 32, 4, 1, 8]"])
def test_plain_forms_compute_the_same(name):
    """Each rival computes what we do, on some queries of a workload."""
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


def run_bench(*options: str):
    return CliRunner().invoke(app, ["bench", "--workload", SMALL, "--seconds", "0.1", *options])


def test_explain_prints_a_plan_and_measures_nothing(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("mx_driving.cli.bench.measure", None)
    result = run_bench("--explain", "--dtype", "float32", "--dtype", "bfloat16", "--threads", "24")
    assert result.exit_code == 0, result.output
    lines = [line for line in result.output.splitlines() if "value gradient" in line]
    assert ["BY_PARTS, 3 a head" in lines[0], "BY_BANDS, 3, buffered" in lines[1]] == [True, True]


@pytest.mark.parametrize("with_floor", [pytest.param(True, marks=needs_the_floor), False])
def test_rows_csv_and_bars(tmp_path, monkeypatch, with_floor):
    monkeypatch.setenv("COLUMNS", "200")
    if not with_floor:
        monkeypatch.setattr(floor, "_library_path", lambda: tmp_path / "libmx_driving_floor.so")
    out, bars = tmp_path / "rows.csv", tmp_path / "rows.png"
    result = run_bench("--workload", "Vendor example small*", "--csv", str(out), "--plot", str(bars))
    assert result.exit_code == 0, result.output
    assert result.output.count("The gather floor is left out") == (0 if with_floor else 1)
    rows = list(csv.DictReader(out.open()))
    assert {(r["direction"], r["implementation"]) for r in rows} == {
        *((d, i) for d in ("forward", "forward + backward") for i in ("mx_driving", "plain torch")),
        ("backward", "mx_driving"),
        *((d, "gather floor") for d in ("forward", "backward") if with_floor),
    }
    assert all(float(r["milliseconds"]) > 0 and int(r["rounds"]) >= 3 for r in rows)
    assert "torch " + torch.__version__ in rows[0]["machine"]
    with Image.open(bars) as picture:
        assert min(picture.size) > 100
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 10


@pytest.mark.parametrize(("factor", "code"), [(1000.0, 0), (0.001, 1)])
def test_compare_with_an_earlier_file(tmp_path, factor, code):
    """The earlier run took `factor` times as long. It is a failure only if that run was faster."""
    out = tmp_path / "rows.csv"
    assert run_bench("--csv", str(out)).exit_code == 0
    rows = list(csv.DictReader(out.open()))
    for row in rows:
        if row["implementation"] == "mx_driving":
            row["milliseconds"] = str(float(row["milliseconds"]) * factor)
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    result = run_bench("--compare", str(out))
    assert result.exit_code == code
    assert ("times the earlier" in result.output) == bool(code)


def test_compare_cancels_a_slow_day():
    def rows(ours: float, plain_torch: float):
        shared = {"workload": "w", "dtype": "float32", "direction": "forward"}
        both = {"mx_driving": ours, "plain torch": plain_torch}
        return [{**shared, "implementation": name, "milliseconds": time} for name, time in both.items()]

    assert slower(rows(2, 20), rows(1, 10), 0.25) == []
    assert len(slower(rows(2, 10), rows(1, 10), 0.25)) == 1
    with pytest.raises(ValueError, match="must have rows of mx_driving in common; got none"):
        slower(rows(1, 1), [], 0.25)


def test_a_wheel_does_not_hold_the_gather_floor(tmp_path):
    """CMake installs it only where the option is given, and only editable installations give it."""
    cmake = pathlib.Path(sys.executable).with_name("cmake")
    cmake = cmake if cmake.exists() else shutil.which("cmake") or pytest.skip("cmake")
    root = pathlib.Path(__file__).parent.parent

    def installed(*options: str) -> bool:
        subprocess.run([cmake, "-S", root, "-B", tmp_path, *options], check=True, capture_output=True)
        return "mx_driving_floor" in (tmp_path / "cmake_install.cmake").read_text()

    assert not installed()
    assert installed("-DMXD_GATHER_FLOOR=ON")
    settings = pytest.importorskip("tomllib").loads((root / "pyproject.toml").read_text())["tool"]["scikit-build"]
    switches = [o for o in settings.pop("overrides") if "MXD_GATHER_FLOOR" in str(o)]
    assert [o["if"] for o in switches] == [{"state": "editable"}]
    assert "MXD_GATHER_FLOOR" not in str(settings)


@needs_the_floor
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_the_gather_floor_writes_rows_of_the_dtype_of_value(dtype):
    """And nothing behind the last one."""
    value = torch.randn(1, 7, 2, 20, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = torch.tensor([[[[0, 1, 2, 3], [4, 5, 6, 7]]] * 2], dtype=torch.int32)  # 7: a row of zeros
    memory = torch.full((3, 2, 20), 5.0, dtype=dtype)
    add_rows(value, rows, memory[None, :2])
    expected = torch.stack([value[0, :4].double().sum(0), value[0, 4:].double().sum(0)])
    torch.testing.assert_close(memory[:2], expected.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    assert (memory[2] == 5).all()


@needs_the_floor
@pytest.mark.parametrize("name", ["RT-DETR decoder", "Sparse4D v3", "MapTR nano"])
def test_the_gather_floor_reads_and_adds_the_rows(name):
    """Against plain indexing, forward and backward."""
    workload = next(w for w in WORKLOADS if w.name == name)
    args = workload.make(torch.Generator().manual_seed(0))
    args = (*args[:3], args[3][:, :30], args[4][:, :30])
    value = args[0].unsqueeze(2) if workload.operator == AGGREGATION else args[0]
    rows = corner_rows(workload.operator, args)
    bs, heads, queries, _ = rows.shape
    padded = torch.nn.functional.pad(value, (0, 0, 0, 0, 0, 1)).double()  # num_keys: a row of zeros; -1: that row too
    found = torch.stack([padded[b, rows[b, h].long(), h].sum(-2) for b in range(bs) for h in range(heads)])
    expected = found.view(bs, heads, queries, -1).transpose(1, 2)
    output = torch.empty(expected.shape)
    add_rows(value, rows, output)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-4)
    grad_value, one = torch.zeros_like(value), torch.ones_like(output)
    add_rows(value, rows, one, grad_value)
    keys = value.shape[1]
    real = torch.where(rows < 0, keys, rows)
    counts = torch.stack([real[b, h].flatten().bincount(minlength=keys + 1) for b in range(bs) for h in range(heads)])
    expected = counts[:, :keys].view(bs, heads, keys).transpose(1, 2)[..., None].expand_as(value)
    assert torch.equal(grad_value, expected.float())


def test_corner_rows_are_the_operators_own():
    """The operator's gradient of value is not zero exactly where rows are read."""
    workload = next(w for w in WORKLOADS if w.name == "Sparse4D v3")
    args = workload.make(torch.Generator().manual_seed(0))
    args = (*args[:3], args[3][:, :30], args[4][:, :30])
    grad = torch.ones(1, 30, args[0].shape[2])
    backward = torch.ops.mx_driving.deformable_aggregation_backward.default
    read = backward(grad, *args, [True, False, False])[0].abs().sum(-1)[0].nonzero().flatten()
    rows = corner_rows(AGGREGATION, args).unique()
    assert torch.equal(read, rows[(rows >= 0) & (rows < args[0].shape[1])])


def test_memory_beside_inputs_and_outputs_is_within_16_megabytes():
    """The median of three, because Linux counts the pages of a thread in batches: 256 KB are 1.4 % of this value, and there are
    two threads."""
    encoder = next(w for w in WORKLOADS if w.name == "Deformable-DETR encoder")
    runs = [extra_memory(encoder, "float32") for _ in range(3)]
    forward, backward = (statistics.median(shares) for shares in zip(*runs, strict=True))
    value = encoder.make(torch.Generator())[0]
    limit = (16 << 20) / (value.numel() * value.itemsize)
    head = 1 / value.shape[2] - 2 * 0.014
    assert head < forward < limit  # a copy of one head
    assert head < backward < limit  # or of one head for each thread


def test_memory_of_a_16_bit_gradient_is_one_head_of_float32_for_each_thread():
    encoder = next(w for w in WORKLOADS if w.name == "Deformable-DETR encoder")
    forward, backward = extra_memory(encoder, "bfloat16")
    heads = encoder.make(torch.Generator())[0].shape[2]
    assert forward == pytest.approx(1 / heads, abs=0.05)
    assert backward == pytest.approx(2 * torch.get_num_threads() / heads, abs=0.05)


def test_a_wrong_kernel_is_not_timed(monkeypatch):
    row = Checked(EXAMPLES[0], "float32", "cpu: native", {"output": 1.0}, {"output": 1e-6}, 0, 0)
    monkeypatch.setattr("mx_driving.measure.speed.check_one", lambda *a, **k: row)
    result = CliRunner().invoke(app, ["bench", "--workload", SMALL])
    assert result.exit_code != 0
    assert "output of multi_scale_deformable_attn is off" in str(result.exception)


def test_what_import_and_a_call_cost(monkeypatch):
    """Times are measured; how long they are is not judged here."""
    monkeypatch.setattr("mx_driving.measure.traits.PROCESSES", 1)
    assert import_seconds() > 0
    plain, recorded = one_query()
    assert plain > 0
    assert recorded > 0


def test_traits_come_in_pairs():
    """Each figure of the vendor's small example is (forward, backward)."""
    found = traits(next(w for w in WORKLOADS if w.name.startswith("Vendor example small")), 0.01)
    assert set(found) == {
        *("bfloat16 / float32, time", "float16 / float32, time", "1 thread / 2 threads, time"),
        *("float32, scratch memory / value", "bfloat16, scratch memory / value"),
    }
    assert all(float(number) >= 0 for name, pair in found.items() if "time" in name for number in pair)
    assert all(len(pair) == 2 for pair in found.values())
