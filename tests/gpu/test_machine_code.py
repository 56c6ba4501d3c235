"""What the compiled kernels look like on GPUs that are not here; `python tests/helpers/machine_code.py` prints the figures.

Without a GPU a kernel is judged by its machine code: registers, reads, reductions, instructions. The figures are those of one
compiler, so constraints.txt pins Triton.
"""

from __future__ import annotations

import csv
import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from cases import AGGREGATION, MULTI_SCALE, OPERATORS

from mx_driving import _backends

triton = pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(_backends.triton.why_not() is not None, reason=str(_backends.triton.why_not())),
    pytest.mark.skipif(
        tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6),
        reason="Triton 3.6 or later: the figures are its machine code's",
    ),
    pytest.mark.long,
    pytest.mark.xdist_group("machine code"),  # one worker compiles
]
ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "helpers" / "machine_code.py"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """All figures, from one process of its own: in this one Triton interprets."""
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_kernel_dtype_and_target_is_there(found):
    rows = {(r["operator"], r["target"], r["dtype"], r["direction"]) for r in found["models"]}
    assert len(rows) == len(OPERATORS) * (2 + 2 + 3) * 2


def test_no_stack_and_no_spills(found):
    for row in found["models"] + found["odd"]:
        assert row["stack"] == row["spills"] == 0, row


def test_registers_allow_half_the_occupancy(found):
    for row in found["models"] + found["odd"]:
        assert row["occupancy"] >= 0.5, row


def test_rows_are_read_16_bytes_at_once(found):
    """Except 16-bit rows in backward kernels, which take 8: see launch.MOST_HELD."""
    for row in found["models"]:
        narrow = row["direction"] == "backward" and row["dtype"] != "float32"
        reads = row["reads of 8 bytes" if narrow else "reads of 16 bytes"]
        assert reads >= 4, row
        assert narrow or row["single reads of rows"] == 0, row


def test_gradients_are_added_by_reductions_without_fences(found):
    for row in found["models"]:
        assert row["fences"] == row["atomics that return"] == 0, row
        assert bool(row["reductions"]) == (row["direction"] == "backward"), row
        if row["target"] >= 90:
            assert row["vector reductions"] == row["reductions"], row


def test_instruction_counts(found):
    """8 x 32 channels, 4 levels of 4 points, float32: what the classic CUDA kernel does in about 1,490 and 272."""
    rows = [r for r in found["models"] if r["operator"] == MULTI_SCALE and r["dtype"] == "float32"]
    assert len(rows) == 6
    for row in rows:
        if row["direction"] == "forward":
            assert 200 < row["instructions per row"] <= 400, row
        else:
            assert 30 < row["instructions per row and point"] <= 60, row


def test_amd_no_scratch_and_no_spills(found):
    rows = {(r["operator"], r["target"], r["direction"]) for r in found["amd"]}
    assert len(rows) == len(OPERATORS) * len(_backends.triton.AMD) * 2
    for row in found["amd"]:
        assert row["scratch"] == row["spills"] == 0, row
        assert row["registers"] <= 128, row  # half of the occupancy where a wave has 64 lanes
        assert row["lanes"] == (64 if row["target"].startswith("gfx9") else 32), row


def test_amd_rows_are_read_16_bytes_at_once(found):
    """Except 16-bit rows in backward kernels, and those of 256 channels, of which each of 64 lanes has four."""
    for row in found["amd"]:
        narrow = row["dtype"] != "float32" and (row["direction"] == "backward" or row["operator"] == AGGREGATION)
        assert row["reads of 8 bytes" if narrow else "reads of 16 bytes"] >= 4, row


def test_amd_gradients_are_added_by_the_memory(found):
    """Triton 3.6 knows a float addition in memory for CDNA 3 and 4. For RDNA 3 it makes a loop that compares and swaps."""
    for row in found["amd"]:
        backward, swaps = row["direction"] == "backward", row["target"] == "gfx1100"
        assert bool(row["additions"]) == (backward and not swaps), row
        assert bool(row["compare and swap"]) == (backward and swaps), row


def test_the_recorded_model_is_of_these_kernels(found):
    """benchmarks/gpu_static.py wrote the file; the site shows it."""
    with (ROOT / "benchmarks" / "results" / "gpu-static.csv").open(newline="") as file:
        recorded = {(r["target"], r["direction"]): r for r in csv.DictReader(file) if r["operator"] == MULTI_SCALE}
    compared = 0
    for row in found["models"] + found["amd"]:
        target = row["target"] if isinstance(row["target"], str) else f"sm_{row['target']}"
        file_row = recorded.get((target, row["direction"]))
        if file_row and row["operator"] == MULTI_SCALE and row["dtype"] == "float32":
            assert int(file_row["registers"]) == row["registers"], row
            count = row.get("instructions per row", 0) / 16 or row.get("instructions per row and point")
            assert not count or float(file_row["instructions"]) == pytest.approx(count, abs=0.06), row
            compared += 1
    assert compared == len(recorded) == 6


def test_the_recorded_comparison_is_of_these_kernels(found):
    """benchmarks/gpu_peers.py wrote the file; the site shows it."""
    with (ROOT / "benchmarks" / "results" / "gpu-peers.csv").open(newline="") as file:
        recorded = {r["direction"]: r for r in csv.DictReader(file) if r["kernel"] == "mx_driving"}
    rows = [r for r in found["models"] if (r["operator"], r["target"], r["dtype"]) == (MULTI_SCALE, 90, "float32")]
    assert {row["direction"] for row in rows} == recorded.keys()
    for row in rows:
        assert int(recorded[row["direction"]]["registers"]) == row["registers"]
        count = row.get("instructions per row", 0) / 16 or row["instructions per row and point"]
        assert float(recorded[row["direction"]]["instructions"]) == pytest.approx(count, abs=0.06)


def test_nothing_is_compiled_again_for_other_sizes(found):
    """Batch 1 to 16, 1 to 300 queries, maps of 1 x 1 to 16 x 16: one compilation of each kernel."""
    counts = found["compilations"]
    assert len(counts) == 2 * len(OPERATORS) + 3
    assert set(counts.values()) == {1}, counts


def test_bev_pool_v3(found):
    """No program adds to what another writes, so there are no reductions and no fences either."""
    rows = found["pool"]
    assert {row["of"] for row in rows} == {"output", "feat", "depth"}
    assert {row["target"] for row in rows} == {80, 90, 100, *_backends.triton.AMD}
    for row in rows:
        assert row.get("stack", row.get("scratch")) == row["spills"] == 0, row
        assert row["registers"] <= 128, row
        if row["target"] in _backends.triton.AMD:
            assert row["additions"] == row["compare and swap"] == 0, row
        else:
            assert row["occupancy"] >= 0.5, row
            assert row["fences"] == row["reductions"] == row["atomics that return"] == 0, row
        if row["channels"] % 8 == 0:
            assert row["reads of 16 bytes" if row["dtype"] == "float32" else "reads of 8 bytes"] >= 1, row


def test_every_variant_compiles(found):
    """Compile every combination of wanted gradients, deterministic mode, dtypes of locations and layouts. The interpreter does
    not compile, so it would let faults pass."""
    assert found["variants"] >= 50
