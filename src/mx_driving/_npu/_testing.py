"""`torch_npu.testing.testcase`: the vendor's TestCase, with its rules of what is equal."""
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


def _float_error(np: Any, x: Any, y: Any, prec: float, least: float) -> str:
    """Why two arrays count as different; "" if they do not.

    An element may err by `prec`, absolutely or relatively to the larger of the two. The arrays differ if both kinds of error
    occur, each in more than a fraction `prec` of all elements.
    """
    kind = np.float64 if x.dtype.kind == "f" else np.int64
    x, y = x.astype(kind), y.astype(kind)
    holes = np.isnan(x)
    if not np.array_equal(holes, np.isnan(y)):
        return "NaN stands at different places"
    with np.errstate(invalid="ignore"):  # inf - inf, an error to the vendor, too
        error = np.where(holes, 0, np.abs(y - x))
        scale = np.where(holes, 1, np.maximum(np.abs(x), np.abs(y)))
        absolute, relative = int((~(error <= prec)).sum()), int((~(error / (scale + least) <= prec)).sum())
    if min(absolute, relative) <= x.size * prec:
        return ""
    return f"{absolute} of {x.size} elements err by more than {prec}, {relative} relatively; the largest error is {error.max()}"


def _array(value: Any, like: Any) -> Any:
    """A numpy array of what may be a tensor, a number or a sequence beside a tensor."""
    import numpy as np

    if isinstance(value, Sequence) and isinstance(like, torch.Tensor):
        value = torch.as_tensor(value, dtype=like.dtype)
    if isinstance(value, torch.Tensor):
        return value.detach().numpy()
    return np.array(value) if isinstance(value, Number) else value


class TestCase(unittest.TestCase):
    """unittest's, with a seed for each test and with comparisons of tensors and arrays."""

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
        self,
        x: Any,
        y: Any,
        prec: float = 1.0e-4,
        prec16: float = 1.0e-3,
        auto_trans_dtype: bool = False,
        message: str | None = None,
    ) -> None:
        """Tensors, numpy arrays, numbers, or sequences of them are equal within the vendor's tolerance.

        Args:
            prec: what an element may err, absolutely or relatively, and what fraction of them may err by more.
            prec16: the same for float16 and bfloat16.
            auto_trans_dtype: whether x is converted to y's dtype before.
            message: said where NaN stands at different places.
        """
        if isinstance(x, Sequence) and isinstance(y, Sequence):
            for one, other in zip(x, y, strict=False):
                self.assertRtolEqual(one, other, prec, prec16, auto_trans_dtype, message)
            return
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
            x = x.to(y.dtype) if auto_trans_dtype else x
            if x.dtype == y.dtype == torch.bfloat16:
                self._bfloat16_equal(x, y, prec16)
                return
        elif isinstance(x, torch.Tensor) != isinstance(y, torch.Tensor) and not isinstance(x, Sequence) | isinstance(
            y, Sequence
        ):
            self.fail(f"dtype error: {type(x).__name__} and {type(y).__name__}")
        self._arrays_equal(_array(x, y), _array(y, x), prec, prec16, message)

    def _bfloat16_equal(self, x: torch.Tensor, y: torch.Tensor, prec: float) -> None:
        """Every element within prec + prec * |y|."""
        if x.shape != y.shape:
            self.fail(f"shape error: {tuple(x.shape)} and {tuple(y.shape)}")
        if not torch.allclose(x, y, rtol=prec, atol=prec):
            self.fail(f"result error: bfloat16 elements err by more than {prec}")

    def _arrays_equal(self, x: Any, y: Any, prec: float, prec16: float, message: str | None) -> None:
        import numpy as np

        if x.shape != y.shape:
            self.fail(f"shape error: {x.shape} and {y.shape}")
        if x.dtype != y.dtype:
            self.fail(f"dtype error: {x.dtype} and {y.dtype}")
        if x.dtype.name not in _COMPARED:
            self.fail(f"dtype error: {x.dtype} cannot be compared")
        if x.dtype == np.bool_:
            error = "" if np.array_equal(x, y) else "truth values differ"
        else:
            error = _float_error(np, x, y, *((prec16, 6e-8) if x.dtype == np.float16 else (prec, 1e-9)))
        if error:
            self.fail(message if message and error.startswith("NaN") else f"result error: {error}")

    def assertEqual(
        self,
        x: Any,
        y: Any,
        prec: Any = None,
        message: str = "",
        allow_inf: bool = False,
        exact_dtype: bool | None = None,
    ) -> None:
        """unittest's; tensors, numbers, and containers of them within `prec`, which is 1e-5 where it is not given.

        Infinities must be allowed, as at the vendor's.
        """
        if isinstance(prec, str):  # a message, by unittest's order
            prec, message = None, prec
        exact = self.exact_dtype if exact_dtype is None else exact_dtype
        rest = (self.precision if prec is None else prec, message, allow_inf, exact)
        if isinstance(x, dict) and isinstance(y, dict):
            super().assertEqual(set(x), set(y), message)
            for key in x:
                self.assertEqual(x[key], y[key], *rest)
        elif isinstance(x, list | tuple) and isinstance(y, list | tuple):
            super().assertEqual(len(x), len(y), message)
            for one, other in zip(x, y, strict=True):
                self.assertEqual(one, other, *rest)
        elif any(isinstance(value, torch.Tensor | Number) for value in (x, y)):
            self._numbers_equal(x, y, *rest)
        else:
            super().assertEqual(x, y, message or None)

    def _numbers_equal(self, x: Any, y: Any, prec: float, message: str, allow_inf: bool, exact: bool) -> None:
        if x is None or y is None:
            super().assertEqual(x, y, message or None)
        x, y = torch.as_tensor(x), torch.as_tensor(y)
        if not allow_inf and (x.isinf().any() or y.isinf().any()):
            self.fail(message or "numbers must be finite unless allow_inf is set")
        torch.testing.assert_close(
            x,
            y,
            rtol=0,
            atol=prec,
            equal_nan=True,
            check_dtype=exact,
            msg=(lambda text: f"{message}\n{text}") if message else None,
        )
