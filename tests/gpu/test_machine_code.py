"""Compiled kernels keep their values in registers, and other sizes of a call need no other kernel.

`python benchmarks/machine_code.py` prints every figure of their machine code.
"""

import pathlib
import subprocess

import cases
import logits_cases
import pytest
import torch
from cases import AGGREGATION, AGGREGATION_LOGITS, GEOMETRIC, GEOMETRIC_LOGITS, MULTI_SCALE, MULTI_SCALE_LOGITS
from values import compare

from mx_driving import _backends

triton = pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(cases.ON_GPU, reason="the driver that lists kernels stands in for a GPU"),
    pytest.mark.skipif(_backends.triton.why_not() is not None, reason=str(_backends.triton.why_not())),
]
CUOBJDUMP = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


# Operator, inputs by (batch, queries, height, width).
MODELS = {
    MULTI_SCALE: lambda b, q, h, w: cases.multi_scale(b, q, 32, 8, [(h, w), (w, h)] * 2, 4),
    AGGREGATION: lambda b, q, h, w: cases.aggregation(b, q, 13, 256, 8, [[(h, w), (w, h)] * 2] * 6),
    GEOMETRIC: lambda b, q, h, w: cases.geometric(b, q, 32, 8, [(h, w)], 8),
    MULTI_SCALE_LOGITS: lambda b, q, h, w: logits_cases.multi_scale(b, q, 32, 8, [(h, w), (w, h)] * 2, 4),
    GEOMETRIC_LOGITS: lambda b, q, h, w: logits_cases.geometric(b, q, 32, 8, [(h, w)], (2, 4)),
    AGGREGATION_LOGITS: lambda b, q, h, w: logits_cases.aggregation(b, q, 13, 128, 8, [[(h, w), (w, h)] * 2] * 6),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operator", MODELS)
def test_sizes_of_models(operator, dtype):
    """No stack and no spills; one compilation for calls that differ in batch, queries and sizes of maps."""
    compiled = triton.runtime.driver.active.compiled  # the machine code of every kernel of this process, in order
    before = len(compiled)
    for sizes in [(2, 1, 1, 1), (1, 3, 3, 5)]:
        compare("triton", operator, cases.cast(MODELS[operator](*sizes), dtype))
    kernels = compiled[before:]
    # with logits a further kernel of the backward makes the gradient of the softmax; a kernel makes locations and the sums of
    # the softmax of an aggregation, for both directions
    assert len(kernels) == {MULTI_SCALE_LOGITS: 3, GEOMETRIC_LOGITS: 3, AGGREGATION_LOGITS: 4}.get(operator, 2)
    for kernel in kernels:
        usage = subprocess.run([str(CUOBJDUMP), "-res-usage", str(kernel)], capture_output=True, text=True, check=True).stdout
        assert "STACK:0 " in usage, usage
        assert "LOCAL:0" in usage, usage
