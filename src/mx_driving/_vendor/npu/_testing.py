"""`torch_npu.testing.testcase`: the vendor's TestCase, with its tolerances."""
# ruff: noqa: PT009 (it is a unittest.TestCase)

from __future__ import annotations

import os
import random
import unittest
from collections.abc import Sequence
from numbers import Number
from typing import Any

import torch

run_tests = unittest.main

_COMPARED = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "float16", "float32", "float64")


def _as_array(value: Any, other: Any) -> Any:
    """Convert a tensor, a number, or a sequence that is compared with a tensor to a numpy array."""
    import numpy as np

    if isinstance(value, Sequence) and isinstance(other, torch.Tensor):
        value = torch.as_tensor(value, dtype=other.dtype)
    if isinstance(value, torch.Tensor):
        return value.detach().numpy()
    return np.array(value) if isinstance(value, Number) else value


class TestCase(unittest.TestCase):
    """unittest.TestCase that seeds each test and compares tensors and arrays."""

    maxDiff = None
    exact_dtype = False
    precision = 1e-5

    @classmethod
    def setUpClass(cls) -> None:
        cls.npu_device = torch.device("npu:0")

    def setUp(self) -> None:
        seed = int(os.environ.get("SEED", "666"))
        torch.manual_seed(seed)
        random.seed(seed)

    def assertRtolEqual(
        self, x: Any, y: Any, prec: float = 1e-4, prec16: float = 1e-3, auto_trans_dtype: bool = False, message: Any = None
    ) -> None:
        """Check that tensors, arrays, numbers, or sequences of these are equal within the vendor's tolerance.

        `prec` (`prec16` for 16 bits) is the allowed error of an element, absolute or relative, and also the allowed fraction of
        elements with a larger error. `auto_trans_dtype` converts x to y's dtype. `message` is the text of the
        error that is raised if x and y have NaN in different places.
        """
        import numpy as np

        if isinstance(x, Sequence) and isinstance(y, Sequence):
            for one, other in zip(x, y, strict=False):
                self.assertRtolEqual(one, other, prec, prec16, auto_trans_dtype, message)
            return
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
            x = x.to(y.dtype) if auto_trans_dtype else x
            if x.dtype == y.dtype == torch.bfloat16:  # numpy has no bfloat16
                if x.shape != y.shape or not torch.allclose(x, y, rtol=prec16, atol=prec16):
                    self.fail(f"result error: bfloat16 elements err by more than {prec16}, or shapes differ")
                return
        elif isinstance(x, torch.Tensor) != isinstance(y, torch.Tensor) and not isinstance(x, Sequence) | isinstance(
            y, Sequence
        ):
            self.fail(f"dtype error: {type(x).__name__} and {type(y).__name__}")
        x, y = _as_array(x, y), _as_array(y, x)
        if x.shape != y.shape:
            self.fail(f"shape error: {x.shape} and {y.shape}")
        if x.dtype != y.dtype or x.dtype.name not in _COMPARED:
            self.fail(f"dtype error: {x.dtype} and {y.dtype} cannot be compared")
        if x.dtype.kind == "f" and not np.array_equal(np.isnan(x), np.isnan(y)):
            self.fail(message or "result error: NaN stands at different places")
        if x.dtype == np.bool_:
            if not np.array_equal(x, y):
                self.fail("result error: truth values differ")
            return
        prec, least = (prec16, 6e-8) if x.dtype.name == "float16" else (prec, 1e-9)
        wide = np.float64 if x.dtype.kind == "f" else np.int64
        x, y = x.astype(wide), y.astype(wide)
        nans = np.isnan(x)
        with np.errstate(invalid="ignore"):  # as in the vendor's TestCase, equal infinities differ: inf - inf is NaN
            error = np.where(nans, 0, np.abs(y - x))
            scale = np.where(nans, 1, np.maximum(np.abs(x), np.abs(y)))
            absolute, relative = int((~(error <= prec)).sum()), int((~(error / (scale + least) <= prec)).sum())
        if min(absolute, relative) > x.size * prec:  # arrays differ if both kinds of error occur, each too often
            text = f"{absolute} of {x.size} elements err by more than {prec}, {relative} relatively"
            self.fail(f"result error: {text}; the largest error is {error.max()}")

    def assertEqual(
        self, x: Any, y: Any, prec: Any = None, message: str = "", allow_inf: bool = False, exact_dtype: bool | None = None
    ) -> None:
        """Check that tensors, numbers, and containers of these are equal within `prec` (1e-5). Check other objects as unittest
        does. Infinities fail without allow_inf, as in the vendor's TestCase."""
        if isinstance(prec, str):  # unittest has the message as third argument
            prec, message = None, prec
        prec, exact = self.precision if prec is None else prec, self.exact_dtype if exact_dtype is None else exact_dtype
        if isinstance(x, dict) and isinstance(y, dict):
            super().assertEqual(set(x), set(y), message)
            x, y = list(x.values()), [y[key] for key in x]
        if isinstance(x, list | tuple) and isinstance(y, list | tuple):
            super().assertEqual(len(x), len(y), message)
            for one, other in zip(x, y, strict=True):
                self.assertEqual(one, other, prec, message, allow_inf, exact)
        elif x is None or y is None or not any(isinstance(value, torch.Tensor | Number) for value in (x, y)):
            super().assertEqual(x, y, message or None)
        else:
            x, y = torch.as_tensor(x), torch.as_tensor(y)
            if not allow_inf and (x.isinf().any() or y.isinf().any()):
                self.fail(message or "numbers must be finite unless allow_inf is set")
            add_message = (lambda text: f"{message}\n{text}") if message else None
            torch.testing.assert_close(x, y, rtol=0, atol=prec, equal_nan=True, check_dtype=exact, msg=add_message)
