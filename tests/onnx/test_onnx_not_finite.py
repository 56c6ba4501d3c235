"""`verify` and `fuse --time` leave out numbers that depend on NaN or infinite locations, and name the source of these."""

import numpy as np
import onnx_writings as writings
import pytest
import torch
import wrong_runtime
from onnx_other_nodes import PLUGIN, save
from onnx_other_nodes import feeds as feeds_of
from onnx_stand_ins import run_plugins

import mx_driving.onnx
from mx_driving.onnx import _outputs, _runtimes
from mx_driving.onnx._check import check

SENTENCE = "queries are left out: their locations are NaN or infinite, "


MASK = torch.tensor([0.0, 1, 1, 1, 1, 1, 1])[:, None, None, None, None]


class Divided(writings.Stacked):
    """The first query's locations are 0 / 0."""

    def forward(self, value, locations, weights):
        ones = MASK * (2 + weights[:, :, :1, :1, None, None])
        return super().forward(value, locations * (ones / ones), weights)


class Constant(writings.Stacked):
    """The file has NaN among its constants, and cumulative sums behind attention."""

    def forward(self, value, locations, weights):
        return super().forward(value, locations + torch.where(MASK == 0, torch.nan, 0), weights).flip(1).cumsum(1)


def feeds(bad=()):
    arrays = writings.feeds()
    for index, number in bad:
        arrays["l"][index] = number
    return arrays


BAD = [((0, 1, 2), np.nan), ((1, 3, 0, 1, 2, 0), np.inf), ((1, 4), -np.inf)]


def other_number_for_nan(path, arrays):
    """Run a file on a right runtime, with 0.2 in place of NaN and infinite locations."""
    fed = {n: np.where(np.isfinite(a), a, 0.2).astype(a.dtype) if n in ("l", "locations") else a for n, a in arrays.items()}
    return _runtimes.find_runtime("onnxruntime")(path, fed)


@pytest.mark.parametrize("sample", [torch.nn.functional.grid_sample, writings.masked])
@pytest.mark.parametrize("run", [_runtimes.find_runtime("onnxruntime"), other_number_for_nan])
def test_verify_leaves_out_what_the_inputs_make(run, sample, before):
    path = before
    writings.export(writings.Stacked(sample), path, "older, fixed sizes")
    report = check(path, run, feeds(BAD))
    assert report.right
    first, second = report.comparisons
    assert (first.why, second.why) == (f"3 of 14 {SENTENCE}as in the file's input l", "")
    assert report.outputs[0].note.endswith(" % of its numbers depend on locations that are NaN or infinite: not compared")
    assert not any(one.why for one in check(path, run, feeds()).comparisons)


def test_a_fault_beside_them_is_found(before):
    writings.export(writings.Stacked(), before, "older, fixed sizes")
    report = check(before, lambda path, fed: wrong_runtime.run("swapped axes", str(path), fed), feeds(BAD))
    assert not any(one.right for one in (*report.comparisons, *report.outputs))
    assert all("x and y are swapped in the locations" in one.why for one in report.comparisons)
    assert report.comparisons[0].why.endswith(f"; 3 of 14 {SENTENCE}as in the file's input l")


ORIGINS = [(Divided(), "first from Div (/Div"), (Constant(), "as in the file's constant ")]


@pytest.mark.parametrize(("module", "origin"), ORIGINS)
def test_what_the_file_makes_is_named(module, origin, mx, before, after, tmp_path):
    writings.export(module, before, "older")
    np.savez(tmp_path / "inputs.npz", **feeds())
    status, said, problem = mx("verify", before, "--runtime", "onnxruntime", "--inputs", tmp_path / "inputs.npz")
    assert (status, problem) == (0, "")
    assert f"2 of 14 {SENTENCE}{origin}" in " ".join(said.split())
    options = ("--time", "--seconds", "0", "--inputs", tmp_path / "inputs.npz")
    status, said, problem = mx("fuse", before, after, *options)
    assert (status, problem, "change places" in said) == (0, "", False)
    assert f"14.3 % of their numbers are left out: they depend on locations that are NaN or infinite, {origin}" in said


def test_other_differences_are_still_told(before, after):
    writings.export(writings.Stacked(), before, "older")
    report = mx_driving.onnx.fuse(before, after)
    writings.export(writings.Stacked(order=(1, 0)), after, "older")
    compared = _outputs.compare(before, after, 0, feeds(BAD), list(report.locations.values()))
    assert compared.off or compared.difference > 0.1
    assert compared.note.startswith("10.7 % of their numbers are left out")


def test_plugins_have_locations_too(before):
    save(before, PLUGIN)
    arrays = feeds_of(PLUGIN)
    arrays["references"][0, 1] = np.nan
    report = check(before, run_plugins, arrays)
    assert report.right
    assert report.comparisons[0].why == f"1 of 14 {SENTENCE}as in the file's input references"


def test_an_output_without_axes_is_compared():
    assert _outputs._difference([np.float32(2)], [np.array(1, np.float32)]) == (0.5, 0)
