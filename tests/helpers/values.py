"""A result beside its truth, and the dtypes and layouts that a result must not depend on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cases
import logits_cases
import pytest
import torch
from small_cases import TINY

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
MIXED = [
    (torch.float16, torch.float32, torch.float32),
    (torch.bfloat16, torch.float32, torch.bfloat16),
    (torch.float32, torch.float64, torch.float32),
    (torch.bfloat16, torch.float32, torch.float64),
    (torch.float32, torch.float16, torch.float64),
    (torch.float64, torch.float32, torch.float16),
]

NATIVE = [name for name in cases.wanted_implementations() if name.startswith("native")]
natively = pytest.mark.parametrize("implementation", NATIVE, indirect=True)
# Inputs are small, or those of `first`.
everywhere = pytest.mark.parametrize("implementation", cases.wanted_implementations(small=True), indirect=True)


def everywhere_each(operators: Sequence[str]) -> Any:
    """Marks a test of (implementation, operator). Triton has the bare operators: the others are composed of these."""
    pairs = [(i, o) for o in operators for i in cases.wanted_implementations(small=o in cases.OPERATORS)]
    return pytest.mark.parametrize(("implementation", "operator"), pairs, indirect=["implementation"])


def first(operator: str, implementation: str = "native", dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """The inputs of an operator's first case, or small ones for the executed PTX."""
    if implementation == "triton" and not cases.ON_GPU:
        return cases.cast(TINY[operator](), dtype)
    return cases.cast(next(c for c in (*cases.CASES, *logits_cases.CASES) if c.operator == operator).make(), dtype)


def assert_same_sums(implementation: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """The same bits. A GPU's atomics add in any order, and other gradients make another kernel, whose roundings differ."""
    near = 0.0 if implementation != "triton" else 1e-4 if cases.ON_GPU else 2e-6
    torch.testing.assert_close(found, expected, rtol=near, atol=near)


def run(
    implementation: str, operator: str, args: Sequence[Any], grad: torch.Tensor, mask: list[bool] | None = None
) -> list[torch.Tensor]:
    """The output and the gradients."""
    args = tuple(args)
    return [cases.forward_of(implementation, operator)(*args), *cases.gradients_of(implementation, operator, grad, args, mask)]


def covering(
    name: str, items: Sequence[Any], dtypes: Sequence[torch.dtype], id_of: Callable[[Any], str] = str, start: Any = ""
) -> Any:
    """Marks a test of (implementation, item, dtype): each item with each dtype on the best native implementation and on a GPU,
    and with one dtype in turn on every other one. test_plan.py and `make compare` compare instruction sets with each other. The
    names of implementations begin with `start`."""
    implementations = [name for name in cases.wanted_implementations() if name.startswith(start)]
    best = next((i for i in reversed(implementations) if i.startswith("native")), implementations[0])
    rows = []
    for k, item in enumerate(items):
        for n, implementation in enumerate(implementations):
            for dtype in dtypes if implementation in (best, "triton") else dtypes[(k + n) % len(dtypes) :][:1]:
                rows.append(pytest.param(implementation, item, dtype, id=f"{implementation}-{id_of(item)}-{dtype}"))
    return pytest.mark.parametrize(("implementation", name, "dtype"), rows, indirect=["implementation"])


def compare(implementation, operator, args, grad, skip=(), some_seen=True):
    """Forward and backward against truth computed from exactly these inputs; with `some_seen` a sample must be on a map."""
    output = cases.forward_of(implementation, operator)(*args)
    gradients = cases.gradients_of(implementation, operator, grad, args)
    true = cases.truth_of(operator, args, grad)
    assert true.results[0].any() or not some_seen, "the true output is zero everywhere: this case tests nothing"
    cases.assert_near(true, operator, args, (output, *gradients), skip)


def skip_unless_every_kernel(implementation: str) -> None:
    """Skip kernels that only `make test-ptx` compiles where there is no GPU: each takes a third of a second."""
    if implementation == "triton" and not cases.EVERY_KERNEL:
        pytest.skip("make test-ptx compiles this kernel")
