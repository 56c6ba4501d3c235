"""compat.install("torch_npu"): the vendor's tests and code for its device run on a CPU, and everything can be given back."""
# ruff: noqa: PT009 (assertEqual is what is tested)

import pathlib

import numpy as np
import pytest
import torch
from programs import python

from mx_driving._vendor.npu import _testing

HELPERS = pathlib.Path(__file__).parents[1] / "helpers"
REFUSED = "runs on an Ascend device; mx_driving.compat's stand-in for torch_npu has no such thing for a CPU"


def run(*programs: str) -> list[str]:
    """Return what programs of helpers/npu_programs.py print, one after the other in one process."""
    return python("-W", "ignore", HELPERS / "npu_programs.py", *programs).stdout.splitlines()


PROGRAMS = {
    "training scripts, torch.compile": ("copies", "elsewhere", "device_module", "mixed_precision", "compiled", "idioms"),
    "names, the default device, torch.compile": ("names", "compiled_after_default_device"),
    "transfer_to_npu, torch.compile": ("transfer", "compiled"),
}


@pytest.mark.parametrize("what", PROGRAMS)
def test_programs_for_the_device(what):
    run(*PROGRAMS[what])


def test_the_vendors_tests_run_and_other_names_are_refused():
    assert run("vendors_tests", "refusals") == [
        "2 0 0 0",
        f"AttributeError torch_npu.npu_fusion_attention {REFUSED}",
        f"ModuleNotFoundError torch_npu.npu_fusion_attention {REFUSED}",
        f"ModuleNotFoundError torch_npu.profiler {REFUSED}",
        f"ModuleNotFoundError torch_npu.testing.common_utils {REFUSED}",
        f"AttributeError torch_npu.npu.NPUGraph {REFUSED}",
        f"ModuleNotFoundError torch_npu.npu.NPUGraph {REFUSED}",
        'ValueError what must be "extensions" or "torch_npu"; got \'torch_mlu\'',
        "False",
    ]


def test_mmengine_finds_the_device():
    pytest.importorskip("mmengine")
    run("mmengine")


def test_all_is_given_back(tmp_path):
    """`install` may be called twice. A real torch_npu is refused, imported or not."""
    (tmp_path / "torch_npu.py").write_text("")
    refused = f"torch_npu must not be installed where mx_driving.compat stands in for it; got {tmp_path / 'torch_npu.py'}"
    done = python("-W", "ignore", HELPERS / "npu_given_back.py", tmp_path)
    assert done.stdout.splitlines() == [refused, refused]


case = _testing.TestCase()
CLOSE = np.ones(1000, np.float32)
NAN, FAR = CLOSE.copy(), CLOSE * 1.001
NAN[3] = np.nan


def off(count: int, by: float, base: np.ndarray = CLOSE) -> np.ndarray:
    """Return an array of which `count` elements err by `by`."""
    wrong = base.copy()
    wrong[:count] += by
    return wrong


EQUAL = {
    "small": (CLOSE, off(1000, 9e-5)),
    "relatively small": (CLOSE * 1000, CLOSE * 1000.09),
    "absolutely small": (CLOSE * 1e-6, CLOSE * 9e-5),
    "a share of prec": (np.ones(20000, np.float32), off(2, 1.0, np.ones(20000, np.float32))),
    "prec is given": (CLOSE, off(1000, 9e-3), 1e-2),
    "float16": (CLOSE.astype(np.float16), off(1000, 9e-4).astype(np.float16)),
    "float64": (CLOSE.astype(np.float64), off(1000, 9e-5).astype(np.float64)),
    "bfloat16": (torch.ones(3).bfloat16(), torch.ones(3).bfloat16()),
    "NaN at the same place": (NAN, NAN),
    "tensors": (torch.ones(3, requires_grad=True), torch.ones(3)),
    "a tensor and a list": (torch.ones(3), [1.0, 1.0, 1.0]),
    "lists of arrays": ([CLOSE, NAN], [CLOSE, NAN]),
    "numbers": (1.0, 1.00001),
    "integers": (np.arange(3, dtype=np.uint8), np.arange(3, dtype=np.uint8)),
    "truth": (np.array([True]), np.array([True])),
    "nothing": (np.zeros(0, np.float32), np.zeros(0, np.float32)),
    "dtype transferred": (torch.ones(3).double(), torch.ones(3), 1e-4, 1e-3, True),
}
DIFFERENT = {
    "large": (CLOSE, off(1000, 2e-4), "1000 of 1000 elements err by more than 0.0001"),
    "a share above prec": (CLOSE, off(1, 1.0), "1 of 1000 elements"),
    "float16": (CLOSE.astype(np.float16), FAR.astype(np.float16) + np.float16(2e-3), "more than 0.001"),
    "bfloat16": (torch.ones(3).bfloat16(), torch.full((3,), 1.01).bfloat16(), "bfloat16 elements err"),
    "NaN elsewhere": (CLOSE, NAN, "NaN stands at different places"),
    "infinite": (CLOSE * np.inf, CLOSE * np.inf, "1000 of 1000"),
    "shape": (CLOSE, CLOSE[1:], "shape error"),
    "dtype": (CLOSE, CLOSE.astype(np.float64), "dtype error"),
    "a tensor and an array": (torch.ones(1000), CLOSE, "dtype error"),
    "complex": (CLOSE.astype(np.complex64), CLOSE.astype(np.complex64), "cannot be compared"),
    "integers": (np.array([1, 200], np.uint8), np.array([200, 1], np.uint8), "the largest error is 199"),
    "truth": (np.array([True]), np.array([False]), "truth values"),
    "one of a list": ([CLOSE, CLOSE], [CLOSE, FAR], "result error"),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_to_the_vendor(name):
    case.assertRtolEqual(*EQUAL[name])


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_to_the_vendor(name):
    x, y, sentence = DIFFERENT[name]
    with pytest.raises(AssertionError, match=sentence):
        case.assertRtolEqual(x, y)


def test_assert_equal():
    """Numbers, tensors and containers of these may differ by 1e-5. unittest compares other objects."""
    ones = torch.ones(2)
    for x, y in ((1.0, 1.000009), (ones, ones + 9e-6), ([ones], [ones.double()]), ("a", "a")):
        case.assertEqual(x, y)
        case.assertEqual({"key": x}, {"key": y})
    case.assertEqual(1.0, 1.01, 0.1)
    case.assertEqual(torch.tensor(float("inf")), torch.tensor(float("inf")), allow_inf=True)
    for x, y in ((1.0, 1.00002), (ones, ones + 2e-5), ((1,), (1, 2)), ("a", "b"), (1, None), (np.inf, np.inf)):
        with pytest.raises(AssertionError):
            case.assertEqual(x, y)
        with pytest.raises(AssertionError, match="said so"):
            case.assertEqual(x, y, "said so")
    with pytest.raises(AssertionError):
        case.assertEqual(torch.ones(2), torch.ones(2).double(), exact_dtype=True)


def test_each_test_begins_with_the_same_seed(monkeypatch):
    seen = []
    for seed in ("666", "666", "7"):
        monkeypatch.setenv("SEED", seed)
        case.setUp()
        seen.append(torch.rand(2))
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])
