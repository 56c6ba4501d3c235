"""`mx-driving replay` of a right call and a changed one: the right one is judged, the other one judged or named."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from recorded_calls import A, G, M, call, computed, replay, save
from strategies import change_recording, dice, fuzz

FILES = st.sampled_from(("call-000001.pt", "call-000001-gradients.pt"))
CALLS = {operator: (*call(operator), computed(operator, *call(operator))) for operator in (M, A, G)}


@fuzz(15)
@given(st.sampled_from((M, A, G)), FILES, st.booleans(), dice())
def test_a_changed_recording_is_judged_or_named(operator, name, whole, random):
    with tempfile.TemporaryDirectory() as folder:
        for stem in ("call-000000", "call-000001"):
            save(Path(folder, "calls"), operator, *CALLS[operator], stem)
        file = Path(folder, "calls", name)
        if whole:
            torch.save(change_recording(torch.load(file), random), file)
        else:
            data = bytearray(file.read_bytes())
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)
            file.write_bytes(data[: random.choice([len(data), len(data), random.randrange(len(data))])])
        done = replay(Path(folder, "calls"))
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
    judged = set(re.findall(r"(call-\d+) ", done.output))
    assert "call-000000" in judged
    assert "call-000001" in judged or re.search(r"must .*; got ", " ".join(done.output.split()))
