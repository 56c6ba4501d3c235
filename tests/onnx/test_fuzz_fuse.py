"""`mx_driving.onnx.fuse` on exported files that are changed at random (strategies.py).

It either writes a file that onnxruntime loads, and whose outputs are the source's for several free sizes, or raises ValueError
with a sentence, and writes nothing.
"""

import functools
import math
import random
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx_nodes import session
from onnx_writings import Calls, Joined, Stacked, Summed, decomposed, export, masked, on_a_padded_map
from strategies import SEEDS, change_model, fuzz

import mx_driving.onnx

MOST = 2**26  # numbers of an input
CORPUS: dict[str, Callable[[Path], Any]] = {
    "stacked": lambda path: export(Stacked(), path, "older"),
    "unequal points": lambda path: export(Joined([2, 4]), path, "older"),
    "summed": lambda path: export(Summed(), path, "older"),
    "our samples": lambda path: export(Calls(), path, "our samples"),
    "equal points": lambda path: export(Joined([3, 3]), path, "older"),
    "fixed": lambda path: export(Stacked(), path, "older, fixed sizes", 16),
    "masked": lambda path: export(Stacked(masked), path, "older", 13),
    "padded": lambda path: export(Joined([2, 4], on_a_padded_map), path, "older", 11),
    "decomposed": lambda path: export(Stacked(decomposed), path, "older", 15),
    "dynamo": lambda path: export(Stacked(), path, "free sizes"),
}
FREE = [{"bs": 2, "q": 7}, {"bs": 1, "q": 150}, {"bs": 5, "q": 1}, {"bs": 3, "q": 33}]
DTYPES = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16, "tensor(int64)": np.int64}


@functools.cache
def model(name: str) -> onnx.ModelProto:
    """Return a file of the corpus. It has the file name of other tests, which share the export."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        CORPUS[name](path := Path(folder, "before.onnx"))
        return onnx.load(path)


def feeds(running: onnxruntime.InferenceSession, free: dict[str, int], numbers: np.random.Generator) -> dict[str, Any] | None:
    """Return random inputs, or None if an input of the file is too large for any memory."""
    sizes = {"v": (free["bs"], 42, 4, 8), "l": (free["bs"], free["q"], 4, 2, 3, 2), "w": (free["bs"], free["q"], 4, 6)}
    arrays = {}
    for one in running.get_inputs():
        shape = sizes.get(one.name, ())
        said = one.shape or shape
        shape = [s if isinstance(s, int) else free.get(s, t) for s, t in zip(said, (*shape, *[1] * 9), strict=False)]
        if math.prod(shape) > MOST:
            return None
        array = numbers.random(shape) * (1.4 if one.name == "l" else 1) - (0.3 if one.name == "l" else 0)
        arrays[one.name] = array.astype(DTYPES.get(one.type, np.float32))
    return arrays


def outcome(running: onnxruntime.InferenceSession, fed: dict[str, Any]) -> list[Any] | None:
    """Return the outputs, or None if the file refuses these sizes."""
    try:
        return running.run(None, fed)
    except Exception:  # onnxruntime has a dozen kinds of its own
        return None


def compare(before: Path, after: Path, seed: int) -> None:
    try:
        theirs = session(before, mx_driving.onnx.library())
    except Exception:  # of others' nodes, or of some that nothing reads: those are left out
        return
    ours = session(after, mx_driving.onnx.library())
    for place, free in enumerate(FREE):
        fed = feeds(theirs, free, np.random.default_rng(seed + place))
        expected = outcome(theirs, fed) if fed else None
        if fed is None or expected is None:
            continue
        got = outcome(ours, fed)
        assert got is not None, f"with {free} the source runs and the new file does not"
        for one, other in zip(expected, got, strict=True):
            differ(one, other, free)


def differ(expected: Any, got: Any, free: dict[str, int]) -> None:
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype), free
    finite = np.isfinite(expected)
    tolerance = (1e-2 if expected.dtype == np.float16 else 1e-4) * np.abs(expected[finite]).max(initial=1e-3)
    one, other = (np.where(finite, array, 0).astype(np.float64) for array in (got, expected))
    np.testing.assert_allclose(one, other, rtol=0, atol=tolerance, err_msg=str(free))


def fuse(data: bytes, seed: int, folder: Path) -> str:
    """Fuse a file. If it is written, compare it with its source; first convert other forms to our node."""
    before, after, again = (folder / f"{name}.onnx" for name in ("before", "after", "again"))
    before.write_bytes(data)
    form = mx_driving.onnx.FUSED_FORMS[seed % 4]
    try:
        mx_driving.onnx.fuse(before, after, form)
    except ValueError as error:
        left = sorted(path.name for path in folder.iterdir())
        if "\n" in str(error) or " must " not in str(error) or left != ["before.onnx"]:
            raise AssertionError(f"no sentence, or a file is left ({left}): {error}") from error
        return "refused"
    if form != "onnxruntime":
        mx_driving.onnx.fuse(after, again)
    compare(before, again if again.exists() else after, seed)
    return "written"


KEPT = [
    ("unequal points", 14350),  # a part of a constant whose sizes come from an input
    ("summed", 3762913),  # one query's weights for all queries
    ("summed", 1768623638),  # two queries' weights, and locations of one
    ("stacked", 5155),  # value with another name of its batch, written in one form and then in the next
    ("padded", 171),  # a Cast to -1, which is no dtype
]


def try_file(name: str, seed: int) -> str:
    """Return "written" or "refused". Both take less than a minute of processor time."""
    data, number = change_model(model(name), random.Random(seed))
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        outcome = fuse(data, number, Path(folder))
    assert time.process_time() - began < 60
    return outcome


@pytest.mark.parametrize(("name", "seed"), KEPT)
def test_what_was_found_once(name, seed):
    assert try_file(name, seed) in ("written", "refused")


def test_a_changed_file_is_fused_right_or_refused():
    outcomes = []

    @fuzz(20)
    @given(st.sampled_from(list(CORPUS)), SEEDS)
    def try_files(name, seed):
        outcomes.append(try_file(name, seed))

    try_files()
    assert {"written", "refused"} <= set(outcomes)
