"""`mx-driving verify` accepts right runtimes, and names planted faults."""

import functools
import io
import sys
from pathlib import Path
from unittest import mock

import cases
import numpy as np
import onnx
import onnx_writings as writings
import pytest
import test_onnx as forms
import test_onnxruntime as nodes
import torch
import wrong_runtime
from onnx_stand_ins import run_plugins, swap_axes
from onnx_writings import feeds
from onnxscript import ir
from small_cases import GROWING
from test_onnx_fuse import NEAR_MISSES

import mx_driving.onnx
from mx_driving._operator.rules import Problem
from mx_driving.onnx import _outputs, _runtimes
from mx_driving.onnx._check import check

PROGRAM = Path(wrong_runtime.__file__)
WORDS = {
    "align_corners": "as with align_corners=True",
    "border padding": "samples beyond the border read the border's pixels",
    "swapped axes": "x and y are swapped in the locations",
    "half a pixel": "samples lie half a pixel too far right and down",
    "a level out of order": "levels of weights are read in the order 1, 0",
}


RIGHT = _runtimes.find_runtime("onnxruntime")


def reasons(report):
    return [one.why for one in report.comparisons]


def with_fault(fault):
    return lambda path, arrays: wrong_runtime.run(fault, str(path), arrays)


@pytest.mark.parametrize("fault", WORDS)
def test_a_planted_fault_is_found_and_named(fault, stacked):
    report = check(stacked, with_fault(fault), feeds())
    assert not any(one.right for one in (*report.comparisons, *report.outputs))
    assert [one.inputs for one in report.comparisons] == ["in the file", "across borders"]
    assert all(WORDS[fault] in why for why in reasons(report))


def test_border_padding_is_found_where_no_location_of_the_file_is_off_the_map(stacked):
    """The file adds 0.1 to locations, and the smallest map has 3 x 4 pixels."""
    arrays = feeds()
    arrays["l"] = 0.15 + arrays["l"].clip(0, 1) * 0.5
    report = check(stacked, with_fault("border padding"), arrays)
    assert [one.right for one in report.comparisons] == [True, False]
    assert WORDS["border padding"] in reasons(report)[1]


def test_a_fault_only_within_the_whole_file_is_named(stacked):
    """A compiler may fuse a match with nodes around it. Then the match's own file is right, and the whole file is wrong."""

    def run(path, arrays):
        return wrong_runtime.run("swapped axes" if "v" in arrays else "none", str(path), arrays)

    report = check(stacked, run, feeds())
    found = {one.inputs: one.right for one in report.comparisons}
    assert found == {"in the file": True, "across borders": True, "within the file": False}
    assert WORDS["swapped axes"] in reasons(report)[2]
    assert not report.outputs[0].right


WRITINGS = {
    "free sizes": (writings.Stacked(), "free sizes"),
    "unequal points": (writings.Joined([2, 4]), "older"),
    "gathers": (writings.Stacked(writings.masked), "older"),
    "weights": (writings.Projected(), "older"),
    "our samples": (writings.Calls(), "our samples"),
}


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("name", WRITINGS)
def test_right_runtimes(name, runtime, before):
    pytest.importorskip(runtime)
    module, exporter = WRITINGS[name]
    writings.export(module, before, exporter)
    report = check(before, _runtimes.find_runtime(runtime), feeds(writings.inputs(3, 11)))
    assert report.right, reasons(report)
    assert len(report.comparisons) == 2
    assert all(one.judged.device < 0.2 for one in report.comparisons)


def test_a_size_of_one_that_the_file_broadcasts(before):
    path, arrays = before, feeds()
    writings.export(writings.Summed(), path, "older")
    writings.set_size(path, "w", 1, 1)
    report = check(path, RIGHT, arrays | {"w": arrays["w"][:, :1]})
    assert report.right
    assert [one.inputs for one in report.comparisons] == ["in the file", "across borders"]


def save_node(model, operator, path):
    """Write the file, and return its inputs."""
    onnx.save(model, path)
    tensors = [a.numpy() for a in cases.cast(GROWING[operator](3, 5), torch.float32) if isinstance(a, torch.Tensor)]
    return dict(zip((one.name for one in model.graph.input), tensors, strict=True))


@pytest.mark.needs("An ONNX file of opset 20")
@pytest.mark.parametrize("operator", cases.EVERY)
def test_our_nodes_are_matches(operator, tmp_path):
    """Only multi_scale_deformable_attn runs with random locations across borders."""
    arrays = save_node(nodes.one_node(operator), operator, tmp_path / "node.onnx")
    report = check(tmp_path / "node.onnx", RIGHT, arrays)
    assert report.right, reasons(report)
    assert len(report.comparisons) == (2 if operator == cases.MULTI_SCALE else 1)
    assert {one.match.operator for one in report.comparisons} == {operator}

    def doubled(path, fed):
        return {name: 2 * array for name, array in RIGHT(path, fed).items()}

    report = check(tmp_path / "node.onnx", doubled, arrays)
    assert not report.right
    assert set(reasons(report)) == {"it is 2 times the truth"}


@pytest.mark.parametrize("name", ["stacked", "unequal points"])
def test_a_file_in_another_form_has_the_matches_of_the_original(name, before, after):
    """The new file has the names of tensors of the original."""
    writings.export(writings.WRITINGS[name], before, "older")
    mx_driving.onnx.fuse(before, after, "gather")
    for original in (before, None):
        report = check(after, RIGHT, feeds(writings.inputs(3, 11)), original=original)
        assert report.right, reasons(report)
        assert len(report.comparisons) == 2
    report = check(after, swap_axes(RIGHT), feeds(writings.inputs(3, 11)), original=before)
    assert not any(one.right for one in report.comparisons)
    assert all("x and y are swapped" in why for why in reasons(report))
    writings.export(writings.Projected(), after, "older")
    with pytest.raises(Problem, match=r"path_in must be made of --original, with its names of tensors; got .*: it has no "):
        check(after, RIGHT, feeds(writings.inputs(3, 11)), original=before)


@pytest.mark.needs("An ONNX file of opset 20")
@pytest.mark.parametrize("form", ["npu", "tensorrt"])
def test_nodes_of_plugins_are_matches(form, tmp_path):
    """A stand-in runs the nodes, because no runtime here does. A stand-in that swaps x and y is found."""
    arrays = save_node(forms.exported(cases.MULTI_SCALE, form), cases.MULTI_SCALE, tmp_path / "node.onnx")

    report = check(tmp_path / "node.onnx", run_plugins, arrays)
    assert report.right, reasons(report)
    assert len(report.comparisons) == 2
    report = check(tmp_path / "node.onnx", swap_axes(run_plugins), arrays)
    assert not report.right
    assert all("x and y are swapped" in why for why in reasons(report))


def test_a_runtime_that_computes_in_16_bits(stacked):
    """The runtime is wrong in the file's dtype, and right or coarse in its own."""

    def in_half(path, arrays):
        fed = {name: a.astype(np.float16).astype(np.float32) for name, a in arrays.items()}
        return {name: a.astype(np.float16).astype(np.float32) for name, a in wrong_runtime.run("none", str(path), fed).items()}

    assert not check(stacked, in_half, feeds()).right
    assert check(stacked, in_half, feeds(), torch.float16).right
    assert not check(stacked, with_fault("half a pixel"), feeds(), torch.float16).right


def test_positions_that_the_file_rounds_to_16_bits(before):
    """2 * x - 1 in float16 moves a sample by up to 0.001 of a pixel here. Few entries look like a factor."""
    random = torch.Generator().manual_seed(1)
    writings.export(writings.Stacked(), before, "older, fixed sizes", arguments=tuple(t.half() for t in writings.inputs(1, 1)))

    def round_grids(path, arrays):
        if "locations" in arrays:  # the file of a match; the runtime may compute the rest in float32
            grids = (2 * arrays["locations"] - 1).astype(np.float16).astype(np.float32)
            value, weights = (torch.from_numpy(arrays[name]).float() for name in ("value", "weights"))
            tables = torch.tensor(writings.MAPS), torch.tensor([0, writings.AREAS[0]])
            located = (torch.from_numpy(grids) + 1) / 2
            args = value.view(1, 42, 4, 8), *tables, located.view(1, 1, 4, 2, 3, 2), weights.view(1, 1, 4, 2, 3)
            return {"output": mx_driving.multi_scale_deformable_attn(*args).half().numpy()}
        return RIGHT(path, arrays)

    for _ in range(12):
        value, locations, weights = (torch.rand(t.shape, generator=random) for t in writings.inputs(1, 1))
        arrays = feeds(tuple(t.half() for t in (value, locations * 1.4 - 0.3, weights)))
        report = check(before, round_grids, arrays)
        assert report.right, reasons(report)


ROWS = np.random.default_rng(0).random((1, 100, 5)).astype(np.float32)
NEAR = [ROWS * np.float32(1 + 3e-7), ROWS * np.float32(1 - 2e-7)]


def exchanged(array, *queries):
    array = array.copy()
    array[:, queries] = array[:, queries[::-1]]
    return array


ANOTHER = np.where(np.arange(100)[:, None] < 1, np.float32(0.5), ROWS)
CLASSES = np.arange(100)
EXCHANGED = [exchanged(ROWS, *range(10)), *NEAR]  # as many queries may change places as do so here, and twice that
OTHER_SHAPES = [ROWS[:, :90], ROWS[:0]]  # of no use: a few ulps of the largest number are allowed
OUTPUTS = {
    "equal": (ROWS, NEAR, ROWS, True),
    "a few ulps": (ROWS, NEAR, ROWS * np.float32(1 + 1e-6), True),
    "a column that is off": (ROWS, NEAR, ROWS + np.array([0, 0, 0, 0, 1e-4], np.float32), False),
    "ten queries exchanged": (ROWS, NEAR, exchanged(ROWS, *range(10)), False),
    "no numbers": (ROWS, NEAR, np.full_like(ROWS, np.nan), False),
    "exchanged as in the file": (ROWS, EXCHANGED, exchanged(ROWS, *range(20, 30)), True),
    "more exchanged than in the file": (ROWS, EXCHANGED, exchanged(ROWS, *range(40)), False),
    "no changed file, a few ulps": (ROWS, OTHER_SHAPES, ROWS * np.float32(1 + 1e-6), True),
    "no changed file, off": (ROWS, OTHER_SHAPES, ROWS + np.float32(1e-4), False),
    "no changed file, another shape": (ROWS, OTHER_SHAPES, ROWS[:, :90], False),
    "two classes exchanged": (CLASSES, [CLASSES], exchanged(CLASSES[None], 3, 4)[0], True),
    "a class that no query has": (CLASSES, [CLASSES], np.where(CLASSES < 1, -1, CLASSES), False),
    "a class twice": (CLASSES, [CLASSES], np.where(CLASSES < 1, 7, CLASSES), False),
    "a query of a changed file": (ROWS, [ANOTHER, *NEAR], ANOTHER, True),
    "five classes": (CLASSES, [CLASSES], np.where(CLASSES < 5, -1, CLASSES), False),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_of_the_whole_file(name):
    true, near, got, right = OUTPUTS[name]
    assert _outputs.judge("boxes", true, near, got).right == right


@pytest.mark.parametrize("program", ["fuse", "verify"])
def test_a_name_that_standard_output_cannot_show(program, mx, monkeypatch, tmp_path):
    """Standard output is ASCII, as with PYTHONIOENCODING=ascii: a letter becomes its escape."""
    path, output = tmp_path / "für.onnx", io.BytesIO()
    writings.export(writings.Stacked(), path, "older, fixed sizes")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, "ascii", write_through=True))
    more = (tmp_path / "fürs.onnx",) if program == "fuse" else ("--runtime", "onnxruntime")
    status, _, problem = mx(program, path, *more)
    said = output.getvalue().decode("ascii")
    assert (status, problem) == (0, "")
    assert "f\\xfcr" in said
    assert ("1 replaced" if program == "fuse" else "all is well") in said


BAD_PATHS = {
    "empty": ("", "must be the path of a file; got ''"),
    "another encoding": ("b\udcfc.onnx", "must have a name in UTF-8, which Python reads if PYTHONUTF8=1; got b'b\\xfc.onnx'"),
}


@pytest.mark.parametrize("name", BAD_PATHS)
@pytest.mark.parametrize("argument", ["path_in", "path_out", "--original"])
def test_bad_paths_are_refused_in_a_sentence(name, argument, mx, stacked, after):
    path, sentence = BAD_PATHS[name]
    if argument == "--original":
        command = ("verify", stacked, "--runtime", "onnxruntime", "--original", path)
    else:
        command = ("fuse", *((path, after) if argument == "path_in" else (stacked, path)))
    assert mx(*command) == (2, mock.ANY, f"mx-driving: {argument} {sentence}\n")
    if argument == "path_in":
        assert mx("verify", path, "--runtime", "onnxruntime")[2] == f"mx-driving: path_in {sentence}\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_a_full_standard_output_is_named(mx, monkeypatch, stacked, after):
    """The file is whole: standard output is full, not path_out."""
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        status, _, problem = mx("fuse", stacked, after)
    sentence = "mx-driving: standard output must take what is printed; got No space left on device\n"
    assert (status, problem) == (2, sentence)
    assert onnx.load(after).graph.node


@pytest.fixture
def command(mx, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    return functools.partial(mx, "verify")


@pytest.mark.parametrize(("fault", "status"), [("none", 0), ("swapped axes", 1)])
def test_the_command_with_a_program(fault, status, command, stacked, tmp_path):
    np.savez(tmp_path / "inputs.npz", **feeds())
    runtime = f"{sys.executable} {PROGRAM} '{fault}'"
    code, said, problem = command(stacked, "--runtime", runtime, "--inputs", tmp_path / "inputs.npz")
    assert (code, problem) == (status, "")
    well = "all is well: 2 comparisons of matches, 1 of outputs"
    assert said.rstrip().endswith("3 of 3 comparisons are wrong" if status else well)
    assert "4 heads of 8 channels, 3 points on maps of 6 x 5, 3 x 4" in said
    assert ("in the file, across borders: x and y are swapped in the locations" in said) == bool(status)


def test_bad_use_is_refused_in_a_sentence(command, stacked, tmp_path):
    writings.export(writings.Stacked(), tmp_path / "free.onnx", "older")
    writings.export(NEAR_MISSES["padding"][0], tmp_path / "miss.onnx", "older, fixed sizes")
    np.save(tmp_path / "one.npy", np.ones(3))
    no_runtime = "--runtime must be onnxruntime, openvino, tensorrt or a program that is there; got"
    free = "--inputs must have 'l', whose sizes q the file leaves free; got none"
    for file, runtime, more, sentence in (
        (stacked, "nobody", (), f"{no_runtime} 'nobody'"),
        (stacked, "'", (), no_runtime),
        (stacked, "onnxruntime:None", (), "--runtime onnxruntime:NAME must name one of its providers"),
        (stacked, "onnxruntime", ("--original", tmp_path / "none.onnx"), "--original must be a file that can be read; got"),
        (stacked, "onnxruntime", ("--original", tmp_path / "one.npy"), "--original must be an ONNX file; got"),
        (tmp_path / "miss.onnx", "onnxruntime", (), "padding_mode is border"),
        (tmp_path / "free.onnx", "onnxruntime", (), free),
        (stacked, "onnxruntime", ("--inputs", stacked), "--inputs must be an .npz file; got"),
        (stacked, "onnxruntime", ("--inputs", tmp_path / "none.npz"), "--inputs must be an .npz file; got"),
        (stacked, "onnxruntime", ("--inputs", tmp_path / "one.npy"), "an .npz file, of arrays by name"),
    ):
        status, _, problem = command(file, "--runtime", runtime, *more)
        assert (status, problem.count("\n")) == (2, 1)
        assert sentence in problem


VALUE, WEIGHTS = "'v' as float32 of shape (2, 42, 4, 8); got", "'w' as float32 of shape (2, 7, 4, 6); got"
BAD_INPUTS = {
    "an unknown name": ({"value": 0}, "arrays for the file's inputs, v, l, w; got value"),
    "another case": ({"V": 0, "l": None}, "arrays for the file's inputs, v, l, w; got V"),
    "a missing input": ({"l": None}, "all inputs of the file, v, l, w; got no l"),
    "no input": (dict.fromkeys("vlw"), "an array for each input of the file; got "),
    "a wrong dtype": ({"v": np.ones((2, 42, 4, 8))}, f"{VALUE} float64 of shape (2, 42, 4, 8)"),
    "whole numbers": ({"w": np.ones((2, 7, 4, 6), int)}, f"{WEIGHTS} int64 of shape (2, 7, 4, 6)"),
    "a wrong size": ({"v": np.ones((2, 40, 4, 8), "f")}, f"{VALUE} float32 of shape (2, 40, 4, 8)"),
    "a wrong rank": ({"v": np.ones((2, 42, 32), "f")}, f"{VALUE} float32 of shape (2, 42, 32)"),
}


@pytest.mark.parametrize("program", ["verify", "fuse"])
@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_inputs_are_refused_in_a_sentence(name, program, mx, stacked, tmp_path):
    """None leaves an array out. With random numbers in its place the command would say that all is well."""
    changes, sentence = BAD_INPUTS[name]
    arrays = {key: array for key, array in {**feeds(), **changes}.items() if array is not None}
    np.savez(tmp_path / "inputs.npz", **arrays)
    run = ("--runtime", "onnxruntime") if program == "verify" else (tmp_path / "fused.onnx", "--time")
    status, said, problem = mx(program, stacked, *run, "--inputs", tmp_path / "inputs.npz")
    assert (status, problem.count("\n")) == (2, 1)
    assert problem.startswith(f"mx-driving: --inputs must have {sentence}")
    assert "all is well" not in said


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_weights_and_inputs_are_changed_by_ulps_of_their_own(dtype):
    """Scales of a Resize have one axis and stay unchanged."""
    array, scales = np.linspace(-1, 1, 1000, dtype=dtype).reshape(10, 100), np.array([1, 1, 2, 2], dtype)
    weights = [ir.Value(name=name, const_value=ir.tensor(numbers)) for name, numbers in (("w", array), ("scales", scales))]
    model = ir.Model(ir.Graph([], [], nodes=[], initializers=weights, opset_imports={"": 20}), ir_version=10)
    fed = {"x": array, "s": scales, "n": np.arange(3), "sentinel": np.full((1, 1), np.finfo(dtype).max)}
    for moved in _outputs.change_by_ulps(model, fed, 0.0):
        for numbers in (moved["x"], weights[0].const_value.numpy()):
            ulps = np.abs(numbers.astype(np.float64) - array) / np.abs(array) / np.finfo(dtype).eps
            assert numbers.dtype == dtype
            assert 1 < ulps.max() < 6
        assert all((moved[name] == fed[name]).all() for name in "sn")
        assert (weights[1].const_value.numpy() == scales).all()
        assert np.isfinite(moved["sentinel"]).all()
