"""`mx_driving.onnx.fuse` on files in 16 bits, whose exporters and converters write Cast nodes in many places."""

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from onnx_stand_ins import run_form
from onnx_writings import WRITINGS, Calls, Stacked, assert_refused, export, feeds, inputs, kinds, masked, run

import mx_driving.onnx
from mx_driving.onnx import FUSED_FORMS

WRITTEN = {**WRITINGS, "gathers": Stacked(masked), "one table": Calls()}
PARTS = {
    "sums": ("ReduceSum",),
    "weighted samples": ("Mul",),
    "samples": ("GridSample",),
    "grids": ("Sub",),
    "sides": ("Concat",),
    "views": ("Reshape", "Transpose", "Slice", "Gather"),
    "sums and products": ("ReduceSum", "Mul", "Add"),
    "all": None,
}
FREE = ("Shape", "Constant", "ConstantOfShape", "Range", "Cast")


def compute_in(model, ops, dtype):
    """Let float32 nodes of these types compute in another dtype, between casts."""
    values = (*model.graph.value_info, *model.graph.input, *model.graph.output)
    floats = {v.name for v in values if v.type.tensor_type.elem_type == TensorProto.FLOAT}
    floats |= {t.name for t in model.graph.initializer if t.data_type == TensorProto.FLOAT}
    floats |= {node.output[0] for node in model.graph.node if node.op_type == "Constant" and node.attribute[0].t.data_type == 1}
    nodes, outputs = [], {v.name for v in model.graph.output}
    for node in model.graph.node:
        chosen = (node.op_type not in FREE) if ops is None else node.op_type in ops
        if not chosen or node.output[0] not in floats:
            nodes.append(node)
            continue
        for index, name in enumerate(node.input):
            if name in floats:
                node.input[index] = f"{name}/{len(nodes)}"
                nodes.append(helper.make_node("Cast", [name], [node.input[index]], to=dtype))
        name = node.output[0]
        node.output[0] = f"{name}/narrow"
        nodes += [node, helper.make_node("Cast", [node.output[0]], [name], to=TensorProto.FLOAT)]
    assert len(nodes) > len(model.graph.node)
    del model.graph.node[:], model.graph.value_info[:]
    model.graph.node.extend(nodes)
    assert outputs <= {name for node in nodes for name in node.output}


NO_SUCH_NODES = {("summed", "sides"), ("gathers", "samples"), ("one table", "samples")}
CHANGED = [(writing, part) for writing in WRITTEN for part in PARTS if (writing, part) not in NO_SUCH_NODES]


@pytest.mark.parametrize(("writing", "part"), CHANGED)
def test_casts_around_any_part_are_seen(writing, part, before, after):
    export(WRITTEN[writing], before, "fixed sizes" if writing == "one table" else "older")
    model = onnx.shape_inference.infer_shapes(onnx.load(before))
    compute_in(model, PARTS[part], TensorProto.FLOAT16)
    onnx.save(model, before)
    report = mx_driving.onnx.fuse(before, after)
    assert (len(report.replaced), report.left) == (1, {})
    assert not {"GridSample", "Floor"} & set(kinds(after))
    arguments = inputs()
    true = WRITTEN[writing](*(t.double() for t in arguments)).numpy()
    np.testing.assert_allclose(run(after, arguments), true, rtol=0, atol=2e-2)


def save_dynamo(path, dtype, opset):
    arguments = tuple(t.to(dtype) for t in inputs())
    torch.onnx.export(Stacked(), arguments, path, dynamo=True, opset_version=opset, verbose=False, input_names=["v", "l", "w"])
    return arguments


@pytest.mark.needs("An ONNX file of opset 20")
@pytest.mark.parametrize("opset", [18, 20])
@pytest.mark.parametrize("form", FUSED_FORMS)
def test_half_files_of_torch_s_exporter(form, opset, before, after):
    """The exporter writes sums in float32, so NVIDIA's node is in float32, too."""
    arguments = save_dynamo(before, torch.float16, opset)
    assert len(mx_driving.onnx.fuse(before, after, form=form).replaced) == 1
    assert "GridSample" not in kinds(after)
    true = Stacked()(*(t.double() for t in arguments)).numpy()
    model, output = onnx.load(after), run_form(after, form, feeds(arguments))
    if form in ("npu", "tensorrt"):
        (node,) = (node for node in model.graph.node if node.domain)
        casts = {cast.output[0]: cast.attribute[0].i for cast in model.graph.node if cast.op_type == "Cast"}
        assert [casts[node.input[index]] for index in (0, 3, 4)] == [TensorProto.FLOAT] * 3
    assert output.dtype == np.float16
    np.testing.assert_allclose(output, true, rtol=0, atol=4e-3)


@pytest.mark.needs("An ONNX file of opset 20")
@pytest.mark.parametrize("form", FUSED_FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_files_that_onnxruntime_cannot_run(dtype, form, before, after):
    """onnxruntime has no GridSample of bfloat16, and none of float64 before opset 20."""
    save_dynamo(before, dtype, 18)
    if dtype == torch.float64 and form in ("npu", "tensorrt"):
        return assert_refused(before, "its tensors are float64; ", form)
    report = mx_driving.onnx.fuse(before, after, form=form)
    assert list(report.replaced.values()) == ["4 heads of 8 channels, 3 points on maps of 6 x 5, 3 x 4"]
    (output,) = onnx.load(after).graph.output
    assert output.type.tensor_type.elem_type == (TensorProto.BFLOAT16 if dtype == torch.bfloat16 else TensorProto.DOUBLE)


@pytest.mark.needs("An ONNX file of opset 20")
def test_a_near_miss_in_16_bits_stays(before, after):
    """A trial in float16 would have a tolerance of a fifth of the output."""
    arguments = tuple(t.half() for t in inputs())
    names = {"input_names": ["v", "l", "w"], "verbose": False}
    torch.onnx.export(Stacked(factor=2.0625), arguments, before, dynamo=True, opset_version=18, **names)
    assert_refused(before, "its grid is not 2")
    torch.onnx.export(Stacked(masked, factor=2.0078125), arguments, before, dynamo=True, opset_version=18, **names)
    assert_refused(before, "it computes something else")
