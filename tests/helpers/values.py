"""Comparison of results with truth, and marks that try a test on all implementations."""

from collections.abc import Sequence
from typing import Any

import cases
import logits_cases
import pytest
import torch
from small_cases import TINY

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
F32, F64, F16, B16 = DTYPES
MIXED = [(F16, F32, F32), (B16, F32, B16), (F32, F64, F32), (B16, F32, F64), (F32, F16, F64), (F64, F32, F16)]
NATIVE = [name for name in cases.wanted_implementations() if name.startswith("native")]
natively = pytest.mark.parametrize("implementation", NATIVE, indirect=True)
# For tests whose inputs are small, or come from `first`.
everywhere = pytest.mark.parametrize("implementation", cases.wanted_implementations(small=True), indirect=True)


def everywhere_each(operators: Sequence[str]) -> Any:
    """Mark a test of (implementation, operator). Triton runs bare operators alone, of which the others are composed."""
    pairs = [(i, o) for o in operators for i in cases.wanted_implementations(small=o in cases.OPERATORS)]
    return pytest.mark.parametrize(("implementation", "operator"), pairs, indirect=["implementation"])


def first(operator: str, implementation: str = "native", dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """Return the inputs of an operator's first case, or small inputs for the executed PTX."""
    if (implementation == "triton" and not cases.ON_GPU) or operator == cases.POOL:
        return cases.cast(TINY[operator](), dtype)
    return cases.cast(next(c for c in (*cases.CASES, *logits_cases.CASES) if c.operator == operator).make(), dtype)


def misaligned(t: torch.Tensor) -> torch.Tensor:
    """Return the same numbers, an element after an address that is a multiple of 16."""
    return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)


def assert_same_sums(implementation: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Check that two sums have the same bits. Triton may differ: atomics add in any order, and each mask is another kernel."""
    near = 0.0 if implementation != "triton" else 1e-4 if cases.ON_GPU else 2e-6
    torch.testing.assert_close(found, expected, rtol=near, atol=near)


def run(implementation, operator, args: Sequence[Any], grad, mask: list[bool] | None = None) -> list[torch.Tensor]:
    """Return the output and the gradients."""
    args = tuple(args)
    return [cases.forward_of(implementation, operator)(*args), *cases.gradients_of(implementation, operator, grad, args, mask)]


def covering(name, items: Sequence[Any], dtypes: Sequence[torch.dtype], id_of=str, start: str | tuple[str, ...] = "") -> Any:
    """Mark a test of (implementation, item, dtype). The best native implementation and a GPU try each item with each dtype. The
    other implementations try an item with one dtype, in turn. test_plan.py and `make compare` compare instruction sets with
    each other. The names of implementations begin with `start`."""
    implementations = [name for name in cases.wanted_implementations() if name.startswith(start)]
    best = next((i for i in reversed(implementations) if i.startswith("native")), implementations[0])
    rows = []
    for k, item in enumerate(items):
        for n, implementation in enumerate(implementations):
            for dtype in dtypes if implementation in (best, "triton") else dtypes[(k + n) % len(dtypes) :][:1]:
                rows.append(pytest.param(implementation, item, dtype, id=f"{implementation}-{id_of(item)}-{dtype}"))
    return pytest.mark.parametrize(("implementation", name, "dtype"), rows, indirect=["implementation"])


def compare(implementation, operator, args, grad=None, some_seen=True):
    """Compare forward and backward with the truth of these inputs. Without `grad`, one is drawn in value's dtype. With
    `some_seen`, the true output must not be zero."""
    grad = cases.grad_for(operator, args).to(args[0].dtype) if grad is None else grad
    output = cases.forward_of(implementation, operator)(*args)
    gradients = cases.gradients_of(implementation, operator, grad, args)
    true = cases.truth_of(operator, args, grad)
    assert true.results[0].any() or not some_seen, "the true output is zero everywhere: this case tests nothing"
    cases.assert_near(true, operator, args, (output, *gradients))


def skip_unless_every_kernel(implementation: str) -> None:
    """Skip a Triton kernel without a GPU: `make test-ptx` compiles it, because each kernel takes a third of a second."""
    if implementation == "triton" and not cases.EVERY_KERNEL:
        pytest.skip("make test-ptx compiles this kernel")


class Through(torch.nn.Module):
    """Call a function or a layer. Modules cannot read a layer's weights through this class, so that they must call it."""

    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, *inputs):
        return self.call(*inputs)
