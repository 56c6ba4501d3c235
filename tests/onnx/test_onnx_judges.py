"""Planted faults x judges x dtypes: each fault is refused, or REASONS says why it cannot be.

The judges are `fuse`'s trial of a match, and `verify`'s verdicts on a match and on an output of the whole file.
"""

import functools
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import onnx
import onnx_writings as writings
import pytest
import torch
from onnx_graphs import compute_in

from mx_driving.onnx import _check, _find, _outputs, _runtimes, _trial
from mx_driving.onnx._file import load

QUERIES = 100  # 2 % of the rows are two: as many as one near tie exchanges
DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "float16", "bfloat16")}
NARROWER = {"float32": torch.float16, "float64": torch.float32, "float16": torch.bfloat16, "bfloat16": torch.bfloat16}


def in_rows(number, share, array, dtype):
    """Put a number into one row, or into a share of the rows."""
    rows = array.copy().reshape(-1, array.shape[-1])
    rows[: max(1, int(share * len(rows)))] = min(number, np.finfo(array.dtype).max) if number == 1e30 else number
    return rows.reshape(array.shape)


def add_to_one_entry(share, array, dtype):
    array = array.copy()
    array.reshape(-1)[array.size // 2] += share * np.abs(array).max()
    return array


def exchange_rows(times, array, dtype):
    array = array.copy()
    for row in range(0, 2 * times, 2):
        array[:, [row, row + 1]] = array[:, [row + 1, row]]
    return array


FAULTS = {
    **{f"a factor of {x}": lambda array, dtype, x=x: array * array.dtype.type(x) for x in (1.1, 1.01, 1.001)},
    "one entry, a tenth of the largest": functools.partial(add_to_one_entry, 0.1),
    "one entry, a hundredth of the largest": functools.partial(add_to_one_entry, 0.01),
    **{f"{x} in one row": functools.partial(in_rows, x, 0.0) for x in (np.nan, np.inf, 1e30)},
    **{f"{x} in 2 % of rows": functools.partial(in_rows, x, 0.02) for x in (np.nan, np.inf, 1e30)},
    "two rows exchanged": functools.partial(exchange_rows, 1),
    "two rows exchanged twice": functools.partial(exchange_rows, 2),
    "rounded once too often": lambda array, dtype: (
        torch.from_numpy(array).to(NARROWER[dtype]).double().numpy().astype(array.dtype)
    ),
    "another shape": lambda array, dtype: array[:, :-1],
    "another dtype": lambda array, dtype: array.astype(np.float32 if array.dtype == np.float64 else np.float64),
    "missing": None,
}
PLANTED = [fault for fault in FAULTS if fault != "two rows exchanged twice"]  # the least exchange that no single tie explains


@functools.cache
def file_of(dtype):
    """Return the bytes of a file with attention that computes in this dtype.

    onnxruntime has no GridSample in float64, and ONNX none in bfloat16: gathers, and casts around sums and products.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.onnx"
        module = writings.Stacked(writings.masked) if dtype == "float64" else writings.Stacked()
        writings.export(module, path, "older, fixed sizes", arguments=inputs_of(dtype))
        if dtype == "bfloat16":
            with writings.edit(path) as model:
                compute_in(model, ("ReduceSum", "Mul", "Add"), onnx.TensorProto.BFLOAT16)
        return path.read_bytes()


def inputs_of(dtype):
    return tuple(t.to(torch.float32 if dtype == "bfloat16" else DTYPES[dtype]) for t in writings.inputs(2, QUERIES))


def refuses_in_the_trial(fault, dtype, path):
    """The trial computes 16 bits in float32."""
    open_session = _trial.open_session

    def open_faulty(model):
        session = open_session(model)
        faulty = mock.Mock(wraps=session)
        faulty.run = lambda names, fed: [] if fault is None else [fault(session.run(names, fed)[0], dtype)]
        return faulty

    with mock.patch.object(_trial, "open_session", open_faulty):
        ((_, found),) = _find.find_samplings(load(path))
    return isinstance(found, str)


@functools.cache
def judged_in_verify(dtype):
    """Return the judgements of one run of verify, as functions of a fault: those of the match, and that of the output."""
    of_match, of_output, compare, judge = [], [], _check._Checker.compare, _outputs.judge

    def keep_match(self, match, words, arrays, run, name):
        outputs = run()
        again = functools.partial(compare, self, match, words, arrays)
        of_match.append(lambda fault: again(lambda: {} if fault is None else {name: fault(outputs[name], dtype)}, name).right)
        return again(lambda: outputs, name)

    def keep_output(name, true, near, got, *more):
        of_output.append(lambda fault: judge(name, true, near, None if fault is None else fault(got, dtype), *more).right)
        return judge(name, true, near, got, *more)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.onnx"
        path.write_bytes(file_of(dtype))
        with mock.patch.object(_check._Checker, "compare", keep_match), mock.patch.object(_outputs, "judge", keep_output):
            assert _check.check(path, _runtimes.find_runtime("onnxruntime"), writings.feeds(inputs_of(dtype))).right
    assert (len(of_match), len(of_output)) == (2, 1)
    return {"match": of_match, "output": of_output}


NEAR_TIE = "two queries whose scores nearly tie change places in a right runtime", "two rows exchanged twice"
STEPS = "a right runtime may truncate to 16 bits, which makes each number smaller by up to 0.001", "a factor of 1.01"
SUMS = "sums in 16 bits are as far off", "one entry, a tenth of the largest"
DECLARED = "fuse casts the node's output to the dtype that the file declares", "missing"
REASONS = {  # (fault, judge, dtype) -> why the judge accepts it, and the least fault of the kind that it refuses
    **{("two rows exchanged", "output", dtype): NEAR_TIE for dtype in DTYPES},
    **{("a factor of 1.001", judge, "float16"): STEPS for judge in ("match", "output")},
    **{("one entry, a hundredth of the largest", judge, "float16"): SUMS for judge in ("match", "output")},
    **{("rounded once too often", judge, "float16"): SUMS for judge in ("match", "output")},
    **{("another dtype", "trial", dtype): DECLARED for dtype in ("float32", "float16", "bfloat16")},
}
JUDGES = {"trial": list(DTYPES), "match": list(DTYPES)[:3], "output": list(DTYPES)[:3]}
TABLE = [(fault, judge, dtype) for judge, dtypes in JUDGES.items() for dtype in dtypes for fault in PLANTED]


@pytest.mark.parametrize(("fault", "judge", "dtype"), TABLE)
def test_a_planted_fault_is_refused(fault, judge, dtype, tmp_path):
    def is_refused(name):
        if judge == "trial":
            (tmp_path / "file.onnx").write_bytes(file_of(dtype))
            return refuses_in_the_trial(FAULTS[name], dtype, tmp_path / "file.onnx")
        return not all(is_right(FAULTS[name]) for is_right in judged_in_verify(dtype)[judge])

    _, least = REASONS.get((fault, judge, dtype), ("", fault))
    assert is_refused(least)
    assert is_refused(fault) == (least == fault)


@pytest.mark.parametrize(("judge", "dtype"), [(judge, dtype) for judge, dtypes in JUDGES.items() for dtype in dtypes])
def test_right_results_are_accepted(judge, dtype, tmp_path):
    if judge == "trial":
        (tmp_path / "file.onnx").write_bytes(file_of(dtype))
        assert not refuses_in_the_trial(lambda array, dtype: array, dtype, tmp_path / "file.onnx")
    else:
        assert all(is_right(lambda array, dtype: array) for is_right in judged_in_verify(dtype)[judge])
