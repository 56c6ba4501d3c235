"""`mx-driving replay` reads every readable file, and prints a sentence about every other file."""

import json
import re

import pytest
import torch
from recorded_calls import NAMES, A, G, M, call, computed, replay, save

from mx_driving._replay import judge

INPUTS, GRAD = call(M)
RIGHT = M, INPUTS, GRAD, computed(M, INPUTS, GRAD)  # arguments of `save`
TENSORS = {**dict(zip(NAMES, INPUTS, strict=True)), **RIGHT[3], "grad_output": GRAD}

pytestmark = pytest.mark.usefixtures("wide_terminal")


@pytest.fixture
def folder(tmp_path):
    """Return a recording of a right call, call-000000."""
    save(tmp_path / "calls", *RIGHT)
    return tmp_path / "calls"


def not_read(folder):
    """Return the sentences about unreadable files. call-000000 must be right."""
    result = replay(folder)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 1
    assert "\ncall-000000\n" in result.output
    return re.findall("not read: (.*)", result.output)


def without(name):
    return {key: t for key, t in TENSORS.items() if key != name}


def shortened(name):
    return {**TENSORS, name: TENSORS[name][:, :-1].contiguous()}


FILE = "call-000001.pt must be a whole file that record.py wrote; got"
LEGAL = f"call-000001 must be a legal call of {M}; got"
OPERATOR = f"the operator of call-000001.pt must be one of {M}, {A}, {G}, bev_pool_v3; got"
BAD = {  # facts about the call, tensors, format, and the sentence
    "format": ({}, TENSORS, "7", "call-000001.pt must have format 1, the one that this version reads; got 7"),
    "no operator": ({"operator": None}, TENSORS, "1", f"{OPERATOR} None"),
    "operator": ({"operator": "M"}, TENSORS, "1", f"{OPERATOR} M"),
    "with logits": ({"operator": M + "_with_logits"}, TENSORS, "1", f"{OPERATOR} multi_scale"),
    "index": ({"index": "7"}, TENSORS, "1", "the index of call-000001.pt must be of type int; got 7"),
    "strides": ({"strides": [1, 2]}, TENSORS, "1", "the strides of call-000001.pt must be of type dict; got [1, 2]"),
    "no locations": ({}, without("locations"), "1", "call-000001 must hold locations; got grad_locations, grad_output"),
    "weights": ({}, shortened("weights"), "1", f"{LEGAL} attention_weights must have shape"),
    "table": ({}, {**TENSORS, "starts": TENSORS["starts"] + 5}, "1", f"{LEGAL} value_level_start_index[1] must leave room"),
    "output": ({}, shortened("output"), "1", "output of call-000001 must be floating, of shape (2, 30, 24); got (2, 29, 24)"),
    "no grad_output": ({}, without("grad_output"), "1", "call-000001 must hold grad_output for its gradients to be judged"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_read_is_one_sentence_and_all_else_is_judged(what, folder):
    about, tensors, form, words = BAD[what]
    about = json.dumps({"operator": M, **about})
    torch.save({"metadata": {"format": form, "call": about}, "tensors": tensors}, folder / "call-000001.pt")
    (sentence,) = not_read(folder)
    assert sentence.startswith(words)
    is_judged = "\ncall-000001\n" in replay(folder).output
    assert is_judged == (what in ("output", "no grad_output"))


HEAD = {"format": "1", "call": json.dumps({"operator": M})}
EDITED = {  # sentence -> contents of the file
    "call-000001.pt must be a dict; got list": [1],
    "metadata of call-000001.pt must be a dict of str; got NoneType": {"tensors": TENSORS},
    "metadata of call-000001.pt must be a dict of str; got int": {"metadata": {**HEAD, "format": 1}, "tensors": TENSORS},
    "tensors of call-000001.pt must be a dict of Tensor; got list": {"metadata": HEAD, "tensors": [1]},
    "tensors of call-000001.pt must be a dict of Tensor; got str": {"metadata": HEAD, "tensors": {"value": "x"}},
    "tensors of call-000001.pt must be a dict of Tensor; got int": {"metadata": HEAD, "tensors": {1: TENSORS["value"]}},
    "call of call-000001.pt must be a dict; got NoneType": {"metadata": {"format": "1"}, "tensors": TENSORS},
    "call of call-000001.pt must be a dict; got list": {"metadata": {**HEAD, "call": "[]"}, "tensors": TENSORS},
}


@pytest.mark.parametrize("sentence", EDITED)
def test_an_edited_file_is_one_sentence(sentence, folder):
    torch.save(EDITED[sentence], folder / "call-000001.pt")
    assert not_read(folder) == [sentence]


@pytest.mark.parametrize("size", [0, 1000])
def test_a_cut_file_is_one_sentence(folder, size):
    """A killed recorder leaves a cut file. If the file of the gradients is cut, the output is judged."""
    save(folder, *RIGHT, "call-000001")
    for name in ("call-000000-gradients", "call-000001"):
        file = folder / f"{name}.pt"
        file.write_bytes(file.read_bytes()[:size])
    gradients, call = not_read(folder)
    assert gradients.startswith("call-000000-gradients.pt must be a whole file that record.py wrote; got ")
    assert call.startswith(FILE)
    output = replay(folder).output
    assert "│ output " in output
    assert "│ grad_value " not in output


def test_gradients_without_their_call(folder):
    save(folder, *RIGHT, "call-000001")
    (folder / "call-000001.pt").unlink()
    assert not_read(folder) == ["call-000001-gradients must lie beside call-000001, which has its inputs; got no such file"]


def test_a_call_that_our_code_fails_on_is_one_sentence(folder, monkeypatch):
    """After any error, such as a lack of memory, the other calls are judged."""
    save(folder, *RIGHT, "call-000001")
    count = judge._count_not_finite
    fails = iter([False] * 6 + [True])  # a call counts its inputs and four results
    monkeypatch.setattr(judge, "_count_not_finite", lambda tensors: 1 / 0 if next(fails) else count(tensors))
    assert not_read(folder) == ["call-000001 must be a call that can be judged; got division by zero"]


def test_no_recording(mx, folder, tmp_path, monkeypatch):
    """An empty name does not mean the working folder."""
    rule = "mx-driving: calls must be a folder that record.py wrote, or one file of it; got"
    nothing, empty = tmp_path / "nothing", tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(folder)
    assert mx("replay", ".")[0] == 0
    assert mx("replay", "") == (2, "", f"{rule} ''\n")
    assert mx("replay", nothing) == (2, "", f"{rule} {nothing}, which is not there\n")
    assert mx("replay", empty) == (2, "", f"mx-driving: calls must hold files call-*.pt; got none in {empty}\n")
    (empty / "call-000000.pt").write_bytes(b"")
    assert mx("replay", empty)[1].rstrip().endswith("no call was judged, 1 thing not read")


def test_one_file_or_one_call(folder):
    save(folder, M, INPUTS, GRAD, {name: t + 1 for name, t in RIGHT[3].items()}, "call-000001")
    assert replay(folder / "call-000000.pt").exit_code == 0
    assert replay(folder, "--call", "*00").exit_code == 0
    assert replay(folder, "--call", "*01").exit_code == 1


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
    """The path of a caller may have bytes that are no text."""
    monkeypatch.setenv("COLUMNS", "80")
    function = "a_package.of_a_module.MultiScaleDeformableAttention.ms_deform_attn_forward"
    save(folder, *RIGHT, "call-000001", function=function, caller="/\ud800/train.py:7")
    result = replay(folder, "--threads", 1, "--csv", folder / "x.csv")
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines()[1:])) <= 80
    assert f"\n  {function}\n" in result.output


@pytest.mark.parametrize("name", ["call-000000.pt", "call-000000-gradients.pt", "manifest.json", "link"])
def test_no_file_of_the_recording_is_overwritten(mx, folder, name):
    (folder / "manifest.json").write_text("{}")
    (folder / "link").symlink_to(folder / "call-000000.pt")
    before = (folder / name).read_bytes()
    for calls in (folder, folder / "call-000000.pt"):
        code, _, error = mx("replay", calls, "--csv", folder / name)
        assert (code, error) == (2, f"mx-driving: --csv must be another file than those that are read; got {folder / name}\n")
    assert (folder / name).read_bytes() == before
