"""`fuse` and `verify` read files that onnxruntime runs although onnx's checker refuses them. They name real faults."""

import numpy as np
import onnx
import pytest
from onnx_writings import Stacked, assert_refused, export, inputs, kinds, masked, run, verified
from onnxruntime.transformers.float16 import convert_float_to_float16

import mx_driving.onnx
from mx_driving.onnx import FUSED_FORMS


def reverse(graph):
    nodes = [*graph.node][::-1]
    del graph.node[:]
    graph.node.extend(nodes)


EASED = {
    "in reverse": reverse,
    "an output without a shape": lambda graph: graph.output[0].type.tensor_type.ClearField("shape"),
    "an output without a type": lambda graph: graph.output[0].ClearField("type"),
    "a graph without a name": lambda graph: graph.ClearField("name"),
}


@pytest.fixture
def change(tmp_path):
    def save(alter, sample=None):
        path = tmp_path / "before.onnx"
        export(Stacked(sample) if sample else Stacked(), path, "older")
        model = onnx.load(path)
        alter(model.graph)
        onnx.save(model, path)
        return path

    return save


@pytest.mark.parametrize("form", FUSED_FORMS)
@pytest.mark.parametrize("kind", EASED)
def test_what_onnxruntime_runs_is_read(kind, form, change, after):
    before, after = change(EASED[kind]), after
    report = mx_driving.onnx.fuse(before, after, form=form)
    assert (len(report.replaced), report.left) == (1, {})
    assert "GridSample" not in kinds(after)
    if form in ("onnxruntime", "gather"):
        np.testing.assert_allclose(run(after, inputs()), run(before, inputs()), rtol=0, atol=2e-6)
    if form == "gather":
        assert verified(before).right


@pytest.mark.parametrize("sample", [None, masked])
def test_onnxruntime_s_converter_to_float16(sample, change, after):
    """The converter writes the casts of inputs and outputs at the graph's end."""
    before, after = change(lambda graph: None, sample), after
    half = convert_float_to_float16(onnx.load(before), keep_io_types=True)
    made = {name: index for index, node in enumerate(half.graph.node) for name in node.output}
    assert any(made.get(name, 0) > index for index, node in enumerate(half.graph.node) for name in node.input)
    onnx.save(half, before)
    assert len(mx_driving.onnx.fuse(before, after).replaced) == 1
    np.testing.assert_allclose(run(after, inputs()), run(before, inputs()), rtol=0, atol=1e-2)


def read_nowhere(graph):
    graph.node[-1].input[0] = "nowhere"


@pytest.mark.parametrize(
    ("alter", "why"),
    [
        (read_nowhere, r"no node or input gives nowhere, which \w+ \(.+\) reads"),
        (lambda graph: graph.input[1].ClearField("type"), "the input l has no type"),
        (lambda graph: graph.input[1].type.tensor_type.ClearField("elem_type"), "l has no dtype"),
    ],
)
def test_what_is_missing_is_named(alter, why, change, mx, after):
    before = change(alter)
    assert_refused(before, why)
    status, _, problem = mx("verify", before, "--runtime", "onnxruntime")
    assert (status, problem.count("\n")) == (2, 1)
