"""`mx-driving replay` reads all that can be read, and says in a sentence what cannot."""

from __future__ import annotations

import json
import re

import cases
import pytest
import torch
from recorded_calls import NAMES, A, G, M, call, computed, replay, save

import mx_driving
from mx_driving._vendor.replay import judge

ONE_OF = f"one of {M}, {A}, {G}, bev_pool_v3"


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


INPUTS, GRAD = call(M)
RIGHT = M, INPUTS, GRAD, computed(M, INPUTS, GRAD)  # what `save` takes
TENSORS = {**dict(zip(NAMES, INPUTS, strict=True)), **RIGHT[3], "grad_output": GRAD}


@pytest.fixture
def folder(tmp_path):
    """A recording of a right call, call-000000."""
    save(tmp_path / "calls", *RIGHT)
    return tmp_path / "calls"


def off_by_one(results):
    return {name: t + 1 for name, t in results.items()}


def spoil(folder, name, what):
    file = folder / f"{name}.pt"
    tensors, more = dict(TENSORS), {}
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
    torch.save({"metadata": {} if what == "foreign" else metadata, "tensors": tensors}, file)


BAD = {
    "cut": "call-000001.pt must be a whole file that record.py wrote; got",
    "empty": "call-000001.pt must be a whole file that record.py wrote; got",
    "format": "call-000001.pt must have format 1, the one that this version reads; got 7",
    "foreign": "call-000001.pt must have format 1, the one that this version reads; got None",
    "no locations": "call-000001 must hold locations; got grad_locations, grad_output, grad_value, grad_weights, output",
    "weights": "call-000001 must be a legal call of multi_scale_deformable_attn; got attention_weights must have shape",
    "table": "call-000001 must be a legal call of multi_scale_deformable_attn; got value_level_start_index[1] must leave room",
    "output": "output of call-000001 must be floating, of shape (2, 30, 24); got (2, 29, 24) float32",
    "operator": f"the operator of call-000001 must be {ONE_OF}; got convolution",
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_read_is_said_and_all_else_is_judged(what, folder):
    for name in ("call-000001", "call-000002"):
        save(folder, *RIGHT, name)
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
    "a list": ([], "call-000001.pt must be a whole file that record.py wrote; got list indices must be integers"),
    "no operator": ({"index": 3}, "call-000001.pt must be a whole file that record.py wrote; got 'operator'"),
    "operator": ({"operator": "M"}, f"the operator of call-000001 must be {ONE_OF}; got M"),
    "with logits": ({"operator": M + "_with_logits"}, f"the operator of call-000001 must be {ONE_OF}; got multi_scale"),
    "caller": ({"caller": {"file": 7}}, "the caller of call-000001 must be of type str; got {'file': 7}"),
    "index": ({"index": "7"}, "the index of call-000001 must be of type int; got 7"),
    "strides": ({"strides": [1, 2]}, "the strides of call-000001 must be of type dict; got [1, 2]"),
    "no table": ("[", "call-000001.pt must be a whole file that record.py wrote; got"),
}


@pytest.mark.parametrize("what", EDITED)
def test_an_edited_description_is_one_sentence(what, folder):
    edited, words = EDITED[what]
    described = {"operator": M, **edited} if isinstance(edited, dict) and what != "no operator" else edited
    text = edited if what == "no table" else json.dumps(described)
    torch.save({"metadata": {"format": "1", "call": text}, "tensors": TENSORS}, folder / "call-000001.pt")
    (sentence,) = not_read(folder)
    assert sentence.startswith(words)


FOREIGN = {
    "none": lambda t: {**t, "output": None},
    "list": lambda t: list(t.values()),
    "sparse": lambda t: {**t, "value": t["value"].to_sparse()},
    "ranks": lambda t: {name: t.flatten() for name, t in t.items()},
    "complex": lambda t: {**t, "value": t["value"] + 0j},
}


@pytest.mark.parametrize("what", FOREIGN)
def test_foreign_tensors_are_one_sentence(what, folder):
    metadata = {"format": "1", "call": json.dumps({"operator": M})}
    torch.save({"metadata": metadata, "tensors": FOREIGN[what](TENSORS)}, folder / "call-000001.pt")
    (sentence,) = not_read(folder)
    assert re.match(r"call-000001(\.pt)? must be .*; got ", sentence)


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
    wrong = off_by_one(results)
    save(tmp_path / "wrong", M, inputs, grad, wrong)
    assert replay(tmp_path / "wrong").exit_code == int(any(t.numel() for t in wrong.values()))


def test_a_call_that_our_code_fails_on_is_one_sentence(folder, monkeypatch):
    """Whatever it is, such as no memory: the others are judged."""
    save(folder, *RIGHT, "call-000001")
    of_all = judge.off_map
    monkeypatch.setattr(judge, "off_map", lambda call: of_all(call) if "0" in call.name[-1] else 1 / 0)
    assert not_read(folder) == ["call-000001 must be a call that can be judged; got division by zero"]


def test_text_that_no_terminal_takes_is_shown_all_the_same(tmp_path):
    folder, wrong = tmp_path / "$calls$", (M, INPUTS, GRAD, off_by_one(RIGHT[3]))
    save(folder, *wrong, "$\\frac-é", caller="/a/\ud800\x1b[31m.py:7", function="\n" * 300)
    found = replay(folder, "--csv", tmp_path / "x.csv", "--plot", tmp_path / "x.png")
    assert isinstance(found.exception, SystemExit), found.exception
    assert "??[31m.py:7" in found.output
    assert (tmp_path / "x.png").exists()


def test_nothing_read_is_a_sentence_and_no_picture(tmp_path):
    (tmp_path / "call-000000.pt").write_bytes(b"")
    found = replay(tmp_path, "--plot", tmp_path / "x.png", "--csv", tmp_path / "x.csv")
    assert found.output.rstrip().endswith("no call was judged, 1 thing not read")
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        ({"ended_early": "the disk is full", "finished": "2026"}, "the recording ended early: the disk is full"),
        (
            {"ended_early": "", "finished": ""},
            "the recording has no end: its program still runs, was killed, or could write no more",
        ),
        ({"ended_early": "", "finished": "2026"}, ""),
        ({}, ""),
    ],
)
def test_why_a_recording_ended_early(folder, manifest, words):
    (folder / "manifest.json").write_text(json.dumps(manifest))
    found = replay(folder)
    assert found.exit_code == 0
    assert words in found.output
    assert ("the recording" in found.output) == bool(words)
    (folder / "manifest.json").write_text("[]")
    (sentence,) = not_read(folder)
    assert sentence.startswith("manifest.json must be a manifest that record.py wrote; got ")


def test_what_a_killed_recorder_leaves_is_mentioned(tmp_path):
    (tmp_path / "call-000000.pt.part").write_bytes(b"")
    found = replay(tmp_path)
    assert re.fullmatch(
        r"calls must hold .*; got none in .*; call-000000\.pt\.part must be whole; got one that .*", str(found.exception)
    )


def test_of_a_cut_file_of_gradients_the_call_is_judged(folder):
    spoil(folder, "call-000000-gradients", "cut")
    (folder / "call-000009.pt.part").write_bytes(b"")
    found = replay(folder)
    assert found.exit_code == 1
    assert "not read: call-000000-gradients.pt must be a whole file" in found.output
    assert "not read: call-000009.pt.part must be whole; got one that the recording did not finish" in found.output
    assert "│ call-000000 " in found.output
    assert "│   output " in found.output
    assert "│   grad_value " not in found.output


def test_gradients_without_their_call_or_added_to_something(folder):
    save(folder, *RIGHT, "call-000001", cleared=False)
    (folder / "call-000000.pt").unlink()
    found = replay(folder)
    assert "not read: call-000000-gradients must lie beside call-000000, which has its inputs; got no such file" in found.output
    assert "not read: gradients of call-000001 must be zero before a function adds to them; got others" in found.output
    assert "│ call-000001 " in found.output
    assert "│   output " in found.output
    assert "│   grad_value " not in found.output


@pytest.mark.parametrize("what", ["nothing", "empty"])
def test_no_recording(mx, what, tmp_path):
    if what == "empty":
        (tmp_path / what).mkdir()
    code, out, err = mx("replay", tmp_path / what)
    assert (code, out) == (1, "")
    assert re.fullmatch(r"mx-driving: calls must .*; got .*\n", err)


def test_an_empty_name_is_not_the_working_folder(mx, folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert mx("replay", ".")[0] == 0
    assert mx("replay", "") == (
        1,
        "",
        "mx-driving: calls must be a folder that record.py wrote, or one file of it; got ''\n",
    )


def test_one_file_one_call_and_a_picture(folder, tmp_path):
    save(folder, M, INPUTS, GRAD, off_by_one(RIGHT[3]), "call-000001")
    assert replay(folder / "call-000000.pt").exit_code == 0
    assert replay(folder, "--call", "*00").exit_code == 0
    assert replay(folder, "--call", "*01").exit_code == 1
    assert replay(folder, "--plot", tmp_path / "x.png").exit_code == 1
    assert (tmp_path / "x.png").stat().st_size > 10000


@pytest.mark.parametrize("right", [True, False])
def test_json_has_all_that_the_table_has(mx, folder, right):
    if not right:
        save(folder, M, INPUTS, GRAD, {**RIGHT[3], "output": RIGHT[3]["output"] * torch.inf}, "call-000001")
        (folder / "call-000002.pt").write_bytes(b"")
    code, out, _ = mx("replay", folder, "--json")
    facts = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert code == (not right)
    assert facts["right"] is right
    assert len(facts["results"]) == (4 if right else 8)
    assert facts["results"][0].items() >= {"call": "call-000000", "result": "output", "verdict": "right", "operator": M}.items()
    if not right:
        assert facts["results"][4]["device"] is None  # it is infinite
        assert facts["not_read"][0].startswith("call-000002.pt must be a whole file that record.py wrote; got ")


def test_the_table_fits_80_columns(folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    save(folder, *RIGHT, "call-000001", function="a_package.of_a_module.MultiScaleDeformableAttention.ms_deform_attn_forward")
    assert max(map(len, replay(folder, "--threads", 1).output.splitlines()[1:])) <= 80
