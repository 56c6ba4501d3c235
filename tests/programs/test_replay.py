"""`mx-driving replay` judges recorded calls, names known mistakes, and reads all that can be read."""

from __future__ import annotations

import csv
import json
import re
import sys
import types

import cases
import fuzz_recordings
import pytest
import torch
from device_machine import KINDS, device_machine, recorded, run
from safetensors.torch import save_file
from typer.testing import CliRunner

import mx_driving
from mx_driving._installing import pip_install
from mx_driving.cli.app import app
from mx_driving.replay import judge
from mx_driving_portable import record

NAMES = ("value", "shapes", "starts", "locations", "weights")


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def replay(*args):
    return CliRunner().invoke(app, ["replay", *map(str, args)])


def call(operator, dtype=torch.float32):
    """The inputs and grad_output of a call, in a dtype that a device has."""
    inputs = {
        cases.MULTI_SCALE: lambda: cases.multi_scale(2, 30, 8, 3, [(14, 26), (8, 13)], 3),
        cases.AGGREGATION: lambda: cases.aggregation(2, 30, 3, 8, 2, [[(14, 26), (8, 13)], [(15, 24), (3, 12)]]),
        cases.GEOMETRIC: lambda: cases.geometric(2, 30, 8, 3, [(14, 26), (8, 13)], 3, integral=False),
    }[operator]()
    inputs = tuple(t.to(dtype) if t.is_floating_point() else t for t in inputs)
    return inputs, cases.grad_for(operator, inputs).to(dtype)


def computed(operator, inputs, grad):
    """What a device gives: numpy's truth in the value's dtype."""
    results = [torch.from_numpy(t).to(inputs[0].dtype) for t in cases.truth_of(operator, inputs, grad).results]
    names = ["grad_" + NAMES[i] for i in cases.DIFFERENTIABLE[operator]]
    return dict(zip(("output", *names), results, strict=True))


def save(folder, operator, inputs, grad, results, name="call-000000", form=record.FORMAT, **more):
    folder.mkdir(exist_ok=True)
    about = {
        "function": "device.function",
        "operator": operator,
        "index": 0,
        "device": "npu:0",
        "caller": "/a/train.py:7",
        **more,
    }
    tensors = {**dict(zip(NAMES, inputs, strict=True)), "output": results["output"]}
    gradients = {"grad_output": grad, **{key: t for key, t in results.items() if key != "output"}}
    metadata = {"format": str(form), "call": json.dumps(about)}
    for ending, some in (("", tensors), ("-gradients", gradients)):
        save_file({key: t.contiguous() for key, t in some.items()}, folder / f"{name}{ending}.safetensors", metadata)


@pytest.mark.parametrize("kind", KINDS)
def test_a_recording_of_each_kind_is_right(kind, tmp_path):
    folder = device_machine(tmp_path, kind)
    named = ["--function", "own.kernels.sample=multi_scale_deformable_attn"] if kind == "by name" else []
    run(folder, "record.py", "--every", "3", *named, "program.py")
    found = replay(folder / "calls", "--csv", tmp_path / "x.csv")
    assert found.exit_code == 0, found.output
    calls = [name for name in recorded(folder / "calls") if "gradients" not in name]
    assert found.output.rstrip().endswith(f"all is well: {len(calls)} calls are right")
    with (tmp_path / "x.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert {row["call"] for row in rows} == set(calls)
    assert {row["result"] for row in rows} == {"output", "grad_value", "grad_locations", "grad_weights"}
    assert {row["verdict"] for row in rows} == {"right"}
    assert all(0 < float(row[column]) <= 1 for row in rows for column in ("device", "float32", "ours"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_right_results_are_right_in_every_dtype(operator, dtype, tmp_path):
    inputs, grad = call(operator, dtype)
    save(tmp_path / "calls", operator, inputs, grad, computed(operator, inputs, grad))
    found = replay(tmp_path / "calls")
    assert found.exit_code == 0, found.output


def moved(inputs, places, move):
    return tuple(move(t) if i in places else t for i, t in enumerate(inputs))


def swapped(operator, inputs, grad):
    found = computed(operator, moved(inputs, (3,), lambda l: l.flip(-1)), grad)
    return {name: t.flip(-1) if name == "grad_locations" else t for name, t in found.items()}


def shifted(operator, inputs, grad):
    size = inputs[1].flip(-1)[:, None]
    wide = moved(inputs, (0, 3, 4), lambda t: t.double())
    found = computed(operator, moved(wide, (3,), lambda l: l + 0.5 / size), grad.double())
    return {name: t.float() for name, t in found.items()}


def turned(operator, inputs, grad):
    return computed(operator, moved(inputs, (1,), lambda s: s.flip(-1)), grad)


def exchanged(operator, inputs, grad):
    found = computed(operator, moved(inputs, (3,), lambda l: l.flip(3)), grad)
    return {name: t.flip(3) if name == "grad_locations" else t for name, t in found.items()}


def rounded_backward(operator, inputs, grad):
    wrong = computed(operator, moved(inputs, (3,), torch.round), grad)
    return {**wrong, "output": computed(operator, inputs, grad)["output"]}


def halved(operator, inputs, grad):
    found = computed(operator, inputs, grad)
    return {**found, "grad_value": found["grad_value"] / 2}


def in_pixels(operator, inputs, grad):
    found = computed(operator, inputs, grad)
    return {**found, "grad_locations": found["grad_locations"] / inputs[1].flip(-1)[:, None]}


def never_run(operator, inputs, grad):
    return {name: torch.zeros_like(t) for name, t in computed(operator, inputs, grad).items()}


def one_nan(operator, inputs, grad):
    found = computed(operator, inputs, grad)
    found["output"][1, 7, 3] = torch.nan
    return found


def one_wrong(operator, inputs, grad):
    found = computed(operator, inputs, grad)
    found["output"][1, 7, 3] += 1
    return found


def partly(fault, dim, *parts):
    """The fault on some parts of an axis of the weights alone. Results are sums over the parts, but for weights' gradients."""

    def planted(operator, inputs, grad):
        *rest, weights = inputs
        chosen = torch.zeros(weights.shape[dim], dtype=torch.bool)
        chosen[list(parts)] = True
        chosen = chosen.view([-1 if i == dim else 1 for i in range(weights.dim())])
        wrong = fault(operator, (*rest, torch.where(chosen, weights, 0)), grad)
        right = computed(operator, (*rest, torch.where(chosen, 0, weights)), grad)
        both = {name: wrong[name] + right[name] for name in wrong}
        return {**both, "grad_weights": torch.where(chosen, wrong["grad_weights"], right["grad_weights"])}

    planted.__name__ = f"{fault.__name__}-{dim}-{parts}"
    return planted


def clamped(axis):
    def planted(operator, inputs, grad):
        size = inputs[1].flip(-1)[:, None]
        wide = moved(inputs, (0, 3, 4), lambda t: t.double())
        least, on = 0.5 / size, torch.tensor([axis == "x", axis == "y"])
        at = torch.where(on, torch.minimum(torch.maximum(wide[3], least), 1 - least), wide[3])
        found = computed(operator, moved(wide, (3,), lambda l: at), grad.double())
        found["grad_locations"] = torch.where(at == wide[3], found["grad_locations"], 0)
        return {name: t.float() for name, t in found.items()}

    planted.__name__ = f"clamped_{axis}"
    return planted


def row_scaled(operator, inputs, grad):
    found = computed(operator, inputs, grad)
    found["output"][1, 7] *= 1.5
    return found


def gradient_of_a_level_is_zero(operator, inputs, grad):
    found = computed(operator, inputs, grad)
    found["grad_value"][:, inputs[2][1] :] = 0
    return found


A, G, M = cases.AGGREGATION, cases.GEOMETRIC, cases.MULTI_SCALE
EVERY = "output, grad_value, grad_locations, grad_weights: "
PLANTED = [
    (M, swapped, "output, grad_value, grad_locations, grad_weights: x and y are swapped in the locations"),
    (A, swapped, "output, grad_value, grad_locations, grad_weights: x and y are swapped in the locations"),
    (G, swapped, "output, grad_value, grad_weights: x and y are swapped in the locations"),
    (M, turned, "output, grad_value, grad_locations, grad_weights: shapes are read as (W, H)"),
    (M, shifted, "output, grad_value, grad_locations, grad_weights: samples lie half a pixel too far right and down"),
    (M, exchanged, "output, grad_value, grad_locations, grad_weights: levels of locations are read in the order 1, 0"),
    (G, exchanged, "output, grad_value, grad_weights: levels of locations are read in the order 1, 0"),
    (M, one_nan, "output: 1 of 1440 entries are NaN, in [1, 7, 3], while the inputs give numbers; all other entries are right"),
    (G, rounded_backward, "grad_value, grad_weights: locations are rounded half to even, as the vendor's backward does"),
    (M, halved, "grad_value: it is 0.5 times the truth"),
    (M, in_pixels, "grad_locations: it is the gradient of pixels, where that of shares of the map is asked for"),
    (A, never_run, "output, grad_value, grad_locations, grad_weights: it is zero everywhere, as if the kernel had not run"),
    (M, partly(shifted, 3, 1), EVERY + "on level 1 alone: samples lie half a pixel too far right and down"),
    (M, partly(swapped, 3, 1), EVERY + "on level 1 alone: x and y are swapped in the locations"),
    (G, partly(swapped, 3, 0), "output, grad_value, grad_weights: on level 0 alone: x and y are swapped in the locations"),
    (A, partly(swapped, 3, 1), EVERY + "on camera 1 alone: x and y are swapped in the locations"),
    (A, partly(swapped, 4, 1), EVERY + "on level 1 alone: x and y are swapped in the locations"),
    (M, partly(turned, 2, 0, 2), EVERY + "on heads 0 and 2 alone: shapes are read as (W, H)"),
    (M, partly(swapped, 0, 1), EVERY + "on batch 1 alone: x and y are swapped in the locations"),
    (M, partly(never_run, 4, 2), EVERY + "on point 2 alone: samples are left out"),
    (A, partly(never_run, 2, 2), EVERY + "on point 2 alone: samples are left out"),
    (M, clamped("y"), EVERY + "samples beyond the border read the border's pixels in y alone"),
    (M, clamped("x"), EVERY + "samples beyond the border read the border's pixels in x alone"),
    (M, row_scaled, "output: 24 of 1440 entries are 1.5 times the truth, in [1, 7, 0..23], on batch 1"),
    (M, gradient_of_a_level_is_zero, "grad_value: all wrong entries are zero: "),
    (A, one_wrong, "output: nothing known explains it; 1 of 480 entries are wrong, in [1, 7, 3]"),
]


@pytest.mark.parametrize(("operator", "fault", "words"), PLANTED, ids=[f"{o}-{f.__name__}" for o, f, _ in PLANTED])
def test_planted_faults_are_named(operator, fault, words, tmp_path):
    inputs, grad = call(operator)
    save(tmp_path / "calls", operator, inputs, grad, fault(operator, inputs, grad))
    found = replay(tmp_path / "calls")
    assert found.exit_code == 1
    assert f"wrong: call-000000, {words}" in found.output
    assert found.output.rstrip().endswith("1 of 1 calls wrong")


def test_a_fault_on_the_device_machine_is_recorded_and_named(tmp_path):
    """From the program on one machine to the sentence on the other."""
    folder = device_machine(tmp_path, "mmcv")
    kernels = folder / "mmcv/kernels.py"
    kernels.write_text(kernels.read_text().replace("locations[:, :, :, l]", "locations.flip(-1)[:, :, :, l]"))
    run(folder, "record.py", "program.py")
    found = replay(folder / "calls")
    assert found.exit_code == 1
    assert "call-000000, output: x and y are swapped in the locations" in found.output
    assert "call-000001, grad_value, grad_locations, grad_weights: x and y are swapped in the locations" in found.output


def test_nan_weights_off_the_map(tmp_path):
    """The rule gives numbers; multiplying everything, as the vendor's did before 7.2, does not."""
    (value, shapes, starts, locations, weights), grad = call(M)
    locations[0, 3, 1, 0, 0], weights[0, 3, 1, 0, 0] = -5.0, torch.nan
    inputs = (value, shapes, starts, locations, weights)
    right = computed(M, inputs, grad)
    assert right["output"].isfinite().all()
    save(tmp_path / "right", M, inputs, grad, right)
    assert replay(tmp_path / "right").exit_code == 0
    spoilt = {**right, "output": right["output"].clone()}
    spoilt["output"][0, 3, 8:16] = torch.nan
    save(tmp_path / "wrong", M, inputs, grad, spoilt)
    found = replay(tmp_path / "wrong")
    assert found.exit_code == 1
    assert re.search(r"call-000000, output: (it is grid_sample \* weight|NaN are not masked).*7\.2", found.output)


def test_nan_that_come_in_are_not_the_operators(tmp_path):
    (value, *rest), grad = call(M)
    value[:, 5] = torch.nan
    save(tmp_path / "calls", M, (value, *rest), grad, computed(M, (value, *rest), grad))
    found = replay(tmp_path / "calls")
    assert found.exit_code == 0, found.output
    assert "call-000000: its NaN and infinities come from the inputs: float64 has the same" in found.output
    assert "48 NaN" in found.output  # of value: 2 batches, 3 heads, 8 channels


def test_an_input_read_as_if_it_were_contiguous(tmp_path):
    (value, *rest), grad = call(M)
    strides = (value[0].numel(), 8, value.shape[1] * 8, 1)  # heads before keys
    memory = torch.empty_strided(value.shape, strides).copy_(value)
    misread = memory.as_strided((value.numel(),), (1,)).view(value.shape)
    wrong = {**computed(M, (value, *rest), grad), "output": computed(M, (misread, *rest), grad)["output"]}
    save(tmp_path / "calls", M, (value, *rest), grad, wrong, strides={"value": strides})
    assert "call-000000, output: value is not contiguous, and is read as if it were" in replay(tmp_path / "calls").output


def test_sums_in_16_bits_are_coarse_not_wrong(tmp_path):
    inputs, grad = call(M, torch.float16)
    results = computed(M, inputs, grad)
    results["output"] += 6e-4 * results["output"].abs().max() * torch.sign(torch.randn_like(results["output"]))
    save(tmp_path / "calls", M, inputs, grad, results)
    found = replay(tmp_path / "calls")
    assert found.exit_code == 0, found.output
    assert "coarse: call-000000, output: as inexact as sums in float16" in found.output


def test_calls_that_the_vendors_device_would_refuse_are_remarked_on(tmp_path):
    def saved(name, heads, points):
        inputs = cases.multi_scale(1, 5, 8, heads, [(4, 6)], points)
        inputs = tuple(t.float() if t.is_floating_point() else t for t in inputs)
        grad = cases.grad_for(M, inputs).float()
        save(tmp_path / "calls", M, inputs, grad, computed(M, inputs, grad), name)

    saved("call-000000", 8, 4)
    assert "device would refuse" not in replay(tmp_path / "calls").output
    saved("call-000001", 16, 4)
    saved("call-000002", 16, 4)
    saved("call-000003", 2, 65)
    found = replay(tmp_path / "calls")
    assert found.exit_code == 0
    said = [line for line in found.output.splitlines() if "device would refuse" in line]
    assert said == [
        "the vendor's device would refuse call-000001 and 1 more: value must have num_heads <= 8 (Atlas A2 limit); got 16",
        "the vendor's device would refuse call-000003: "
        "sampling_locations must have num_points * num_levels <= 64 (Atlas A2 limit); got 65",
    ]


def spoil(folder, name, what):
    file = folder / f"{name}.safetensors"
    (inputs, grad), more = call(M), {}
    results = computed(M, inputs, grad)
    tensors = {**dict(zip(NAMES, inputs, strict=True)), **results, "grad_output": grad}
    if what == "cut":
        file.write_bytes(file.read_bytes()[:1000])
        return
    if what == "empty":
        file.write_bytes(b"")
        return
    if what == "no locations":
        del tensors["locations"]
    if what == "weights":
        tensors["weights"] = tensors["weights"][:, :-1].contiguous()
    if what == "table":
        tensors["starts"] = tensors["starts"] + 5
    if what == "output":
        tensors["output"] = tensors["output"][:, :-1].contiguous()
    if what == "operator":
        more["operator"] = "convolution"
    about = {"operator": M, **more}
    metadata = {"format": "7" if what == "format" else "1", "call": json.dumps(about)}
    save_file(tensors, file, None if what == "foreign" else metadata)


BAD = {
    "cut": "call-000001.safetensors must be a whole file that record.py wrote; got",
    "empty": "call-000001.safetensors must be a whole file that record.py wrote; got",
    "format": "call-000001.safetensors must have format 1, the one that this version reads; got 7",
    "foreign": "call-000001.safetensors must have format 1, the one that this version reads; got none",
    "no locations": "call-000001 must hold locations; got grad_locations, grad_output, grad_value, grad_weights, output",
    "weights": "call-000001 must be a legal call of multi_scale_deformable_attn; got attention_weights must have shape",
    "table": "call-000001 must be a legal call of multi_scale_deformable_attn; got value_level_start_index[1] must leave room",
    "output": "output of call-000001 must be floating, of shape (2, 30, 24); got (2, 29, 24) float32",
    "operator": "the operator of call-000001 must be one of the three; got convolution",
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_read_is_said_and_all_else_is_judged(what, tmp_path):
    folder, (inputs, grad) = tmp_path / "calls", call(M)
    for name in ("call-000000", "call-000001", "call-000002"):
        save(folder, M, inputs, grad, computed(M, inputs, grad), name)
    spoil(folder, "call-000001", what)
    found = replay(folder)
    assert found.exit_code == 1
    assert f"not read: {BAD[what]}" in found.output
    judged = set(re.findall(r"│ (call-\d+) ", found.output))
    assert {"call-000000", "call-000002"} <= judged
    assert ("call-000001" in judged) == (what == "output")  # its gradients can be judged
    assert "Traceback" not in found.output


def not_read(folder):
    """The sentences about what was not read, where call-000000 is right."""
    found = replay(folder)
    assert isinstance(found.exception, SystemExit), found.exception
    assert found.exit_code == 1
    assert "│ call-000000 " in found.output
    return re.findall("not read: (.*)", found.output)


EDITED = {
    "a list": ([], "what call-000001 says about its call must be a table; got list"),
    "text": ("text", "what call-000001 says about its call must be a table; got str"),
    "null": (None, "what call-000001 says about its call must be a table; got NoneType"),
    "no operator": ({"index": 3}, "call-000001 must name its operator; got index"),
    "operator": ({"operator": [M]}, "the operator of call-000001 must be one of the three; got ['multi_scale_"),
    "with logits": ({"operator": M + "_with_logits"}, "the operator of call-000001 must be one of the three; got multi_scale"),
    "caller": ({"caller": {"file": 7}}, "the caller of call-000001 must be text; got {'file': 7}"),
    "function": ({"function": None}, "the function of call-000001 must be text; got None"),
    "index": ({"index": "7"}, "the index of call-000001 must be a whole number; got 7"),
    "packed": ({"packed": "no"}, "the packed of call-000001 must be true or false; got no"),
    "cleared": ({"cleared": 1}, "the cleared of call-000001 must be true or false; got 1"),
    "strides": ({"strides": [1, 2]}, "the strides of call-000001 must be lists of whole numbers, by input; got [1, 2]"),
    "stride": ({"strides": {"value": 7}}, "the strides of call-000001 must be lists of whole numbers, by input; got {'val"),
    "negative": ({"strides": {"value": [-1, 3]}}, "the strides of call-000001 must be lists of whole numbers, by input; got"),
    "deep": ("[" * 100000, "call-000001.safetensors must be a whole file that record.py wrote; got"),
}  # fmt: skip


@pytest.mark.parametrize("what", EDITED)
def test_an_edited_description_is_one_sentence(what, tmp_path):
    folder, (inputs, grad) = tmp_path / "calls", call(M)
    save(folder, M, inputs, grad, computed(M, inputs, grad))
    edited, words = EDITED[what]
    described = {"operator": M, **edited} if isinstance(edited, dict) and what != "no operator" else edited
    text = edited if what == "deep" else json.dumps(described)
    tensors = {**dict(zip(NAMES, inputs, strict=True)), **computed(M, inputs, grad)}
    save_file(tensors, folder / "call-000001.safetensors", {"format": "1", "call": text})
    (sentence,) = not_read(folder)
    assert sentence.startswith(words)


def expanded(name, queries):
    """A tensor with many queries and little memory."""
    return lambda t: {**t, name: t[name][:, :1].expand(-1, queries, *t[name].shape[2:])}


FOREIGN = {
    "none": (lambda t: {**t, "output": None}, "output of call-000001.pt must be a torch.Tensor; got NoneType"),
    "list": (lambda t: list(t.values()), "the tensors of call-000001.pt must be a table; got list"),
    "nothing": (lambda t: None, "the tensors of call-000001.pt must be a table; got NoneType"),
    "sparse": (lambda t: {**t, "value": t["value"].to_sparse()}, "value of call-000001.pt must be a plain strided tensor"),
    "rank": (lambda t: {**t, "weights": t["weights"].sum()}, "call-000001 must be a legal call of multi_scale_deformable_attn"),
    "ranks": (lambda t: {name: t.flatten() for name, t in t.items()}, "call-000001 must be a legal call of multi_scale"),
    "complex": (lambda t: {**t, "value": t["value"] + 0j}, "call-000001 must be a legal call of multi_scale_deformable_attn"),
    "quantized": (
        lambda t: {**t, "shapes": torch.quantize_per_tensor(t["shapes"].float(), 1, 0, torch.qint8)},
        "call-000001 must be a legal call of multi_scale_deformable_attn; got Creation of quantized tensor",
    ),
    "2^34": (expanded("locations", 2**34), "locations of call-000001.pt must be contiguous; got strides"),
    "output": (expanded("output", 2**34), "output of call-000001.pt must be contiguous; got strides"),
    "empty": (
        lambda t: {**t, "value": torch.empty(2, 0, 3, 2**34), "shapes": t["shapes"][:0], "starts": t["starts"][:0],
                   "locations": t["locations"][:, :, :, :0], "weights": t["weights"][:, :, :, :0]},
        "call-000001 must have at most 1073741824 numbers in its output, to be computed here; got 3092376453120",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("what", FOREIGN)
def test_foreign_tensors_are_one_sentence(what, tmp_path):
    folder, (inputs, grad) = tmp_path / "calls", call(M)
    save(folder, M, inputs, grad, computed(M, inputs, grad))
    edit, words = FOREIGN[what]
    tensors = edit({**dict(zip(NAMES, inputs, strict=True)), **computed(M, inputs, grad), "grad_output": grad})
    metadata = {"format": "1", "call": json.dumps({"operator": M})}
    torch.save({"metadata": metadata, "tensors": tensors}, folder / "call-000001.pt")
    (sentence,) = not_read(folder)
    assert sentence.startswith(words)


@pytest.mark.parametrize("metadata", ["text", {"format": 1}, {"format": "1"}, {"format": "1", "call": 7}, None])
def test_foreign_metadata_is_one_sentence(metadata, tmp_path):
    folder, (inputs, grad) = tmp_path / "calls", call(M)
    save(folder, M, inputs, grad, computed(M, inputs, grad))
    torch.save({"metadata": metadata, "tensors": dict(zip(NAMES, inputs, strict=True))}, folder / "call-000001.pt")
    (sentence,) = not_read(folder)
    assert re.search("call-000001.pt .*must .*; got", sentence)


EMPTY = {
    "batches": lambda: cases.multi_scale(0, 5, 8, 3, [(4, 6)], 2),
    "queries": lambda: cases.multi_scale(2, 0, 8, 3, [(4, 6)], 2),
    "points": lambda: cases.multi_scale(2, 5, 8, 3, [(4, 6)], 0),
    "levels": lambda: (torch.rand(2, 7, 3, 8), torch.empty(0, 2, dtype=torch.int64), torch.empty(0, dtype=torch.int64),
                       torch.empty(2, 5, 3, 0, 2, 2), torch.empty(2, 5, 3, 0, 2)),
}  # fmt: skip


@pytest.mark.parametrize("axis", EMPTY)
def test_empty_calls_are_judged(axis, tmp_path):
    inputs = tuple(t.float() if t.is_floating_point() else t for t in EMPTY[axis]())
    names, learned = ["grad_value", "grad_locations", "grad_weights"], [0, 3, 4]
    leaves = [t.clone().requires_grad_(i in learned) for i, t in enumerate(inputs)]
    output = mx_driving.multi_scale_deformable_attn(*leaves)
    grad = torch.ones_like(output)
    gradients = torch.autograd.grad(output, [leaves[i] for i in learned], grad)
    results = {"output": output.detach(), **dict(zip(names, gradients, strict=True))}
    save(tmp_path / "right", M, inputs, grad, results)
    assert replay(tmp_path / "right").exit_code == 0
    wrong = {name: t + 1 for name, t in results.items()}
    save(tmp_path / "wrong", M, inputs, grad, wrong)
    assert replay(tmp_path / "wrong").exit_code == int(any(t.numel() for t in wrong.values()))


def test_a_call_that_our_code_fails_on_is_one_sentence(tmp_path, monkeypatch):
    """Whatever it is, such as no memory: the others are judged."""
    folder, (inputs, grad) = tmp_path / "calls", call(M)
    for name in ("call-000000", "call-000001"):
        save(folder, M, inputs, grad, computed(M, inputs, grad), name)
    of_all = judge.off_map
    monkeypatch.setattr(judge, "off_map", lambda call: of_all(call) if "0" in call.name[-1] else 1 / 0)
    assert not_read(folder) == ["call-000001 must be a call that can be judged; got division by zero"]


def test_text_that_no_terminal_takes_is_shown_all_the_same(tmp_path):
    folder, (inputs, grad) = tmp_path / "$calls$", call(M)
    save(folder, M, inputs, grad, one_wrong(M, inputs, grad), "$\\frac-é", caller="/a/\ud800\x1b[31m.py:7", function="\n" * 300)
    found = replay(folder, "--csv", tmp_path / "x.csv", "--plot", tmp_path / "x.png")
    assert isinstance(found.exception, SystemExit), found.exception
    assert "??[31m.py:7" in found.output
    assert (tmp_path / "x.png").exists()


def test_nothing_read_is_a_sentence_and_no_picture(tmp_path):
    (tmp_path / "call-000000.pt").write_bytes(b"")
    found = replay(tmp_path, "--plot", tmp_path / "x.png", "--csv", tmp_path / "x.csv")
    assert found.output.rstrip().endswith("no call was judged, 1 thing not read")
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize("manifest", [{"ended": "the disk is full"}, {"ended_early": "the disk is full", "finished": "2026"}])
def test_why_a_recording_ended_early(tmp_path, manifest):
    folder, (inputs, grad) = tmp_path / "calls", call(M)
    save(folder, M, inputs, grad, computed(M, inputs, grad))
    (folder / "manifest.json").write_text(json.dumps(manifest))
    found = replay(folder)
    assert found.exit_code == 0
    assert "the recording ended early: the disk is full" in found.output
    (folder / "manifest.json").write_text("[]")
    assert not_read(folder) == ["manifest.json must be a manifest that record.py wrote; got list"]


def test_what_a_killed_recorder_leaves_is_mentioned(tmp_path):
    for name in (".tmpV3fYq1", "call-000000.safetensors.part"):
        (tmp_path / name).write_bytes(b"")
    found = replay(tmp_path)
    assert re.fullmatch(r"calls must hold .*; got none in .*; \.tmpV3fYq1 must be whole; got one that .*", str(found.exception))


def test_of_a_cut_file_of_gradients_the_call_is_judged(tmp_path):
    folder, (inputs, grad) = tmp_path / "calls", call(M)
    save(folder, M, inputs, grad, computed(M, inputs, grad))
    spoil(folder, "call-000000-gradients", "cut")
    (folder / "call-000009.safetensors.part").write_bytes(b"")
    found = replay(folder)
    assert found.exit_code == 1
    assert "not read: call-000000-gradients.safetensors must be a whole file" in found.output
    assert "not read: call-000009.safetensors.part must be whole; got one that the recording did not finish" in found.output
    assert re.search(r"│ call-000000 +│ output +│", found.output)


def test_gradients_without_their_call_or_added_to_something(tmp_path):
    folder, (inputs, grad) = tmp_path / "calls", call(M)
    save(folder, M, inputs, grad, computed(M, inputs, grad))
    save(folder, M, inputs, grad, computed(M, inputs, grad), "call-000001", cleared=False)
    (folder / "call-000000.safetensors").unlink()
    found = replay(folder)
    assert "not read: call-000000-gradients must lie beside call-000000, which has its inputs; got no such file" in found.output
    assert "not read: gradients of call-000001 must be zero before a function adds to them; got others" in found.output
    assert re.search(r"│ call-000001 +│ output +│", found.output)


@pytest.mark.parametrize("what", ["nothing", "empty"])
def test_no_recording(what, tmp_path, monkeypatch, capsys):
    from mx_driving.cli.app import main

    if what == "empty":
        (tmp_path / what).mkdir()
    monkeypatch.setattr(sys, "argv", ["mx-driving", "replay", str(tmp_path / what)])
    with pytest.raises(SystemExit) as stop:
        main()
    said = capsys.readouterr()
    assert (stop.value.code, said.out) == (1, "")
    assert re.fullmatch(r"mx-driving: calls must .*; got .*\n", said.err)


def test_one_file_one_call_and_a_picture(tmp_path):
    folder, (inputs, grad) = tmp_path / "calls", call(M)
    for name in ("call-000000", "call-000001"):
        save(folder, M, inputs, grad, swapped(M, inputs, grad) if "1" in name else computed(M, inputs, grad), name)
    assert replay(folder / "call-000000.safetensors").exit_code == 0
    assert replay(folder, "--call", "*00").exit_code == 0
    assert replay(folder, "--call", "*01").exit_code == 1
    assert replay(folder, "--plot", tmp_path / "x.png").exit_code == 1
    assert (tmp_path / "x.png").stat().st_size > 10000


def test_pt_files_are_read_too(tmp_path, monkeypatch):
    module = types.ModuleType("stand_in")
    module.attend = lambda *args: mx_driving.multi_scale_deformable_attn(*args)
    monkeypatch.setitem(sys.modules, "stand_in", module)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    (value, *rest), _ = call(M)
    with record.recording(tmp_path / "calls", functions={"stand_in.attend": M}):
        module.attend(value.requires_grad_(), *rest).sum().backward()
    monkeypatch.setitem(sys.modules, "safetensors", None)
    found = replay(tmp_path / "calls")
    assert found.exit_code == 0, found.output
    assert "grad_value" in found.output


def test_without_safetensors_it_says_what_to_install(tmp_path, monkeypatch):
    inputs, grad = call(M)
    save(tmp_path / "calls", M, inputs, grad, computed(M, inputs, grad))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    found = replay(tmp_path / "calls")
    assert found.exit_code == 1
    assert f"must have safetensors installed ({pip_install('[replay]')})" in found.output


def test_broken_recordings_are_sentences_or_are_judged(tmp_path):
    """Some of what `make fuzz-recordings` tries, and what it found once."""
    for seed in (*fuzz_recordings.KEPT, *range(25)):
        folder = tmp_path / str(seed)
        folder.mkdir()
        assert not fuzz_recordings.finding(seed, folder), seed
