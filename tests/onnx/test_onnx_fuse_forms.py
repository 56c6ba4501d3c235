"""`mx_driving.onnx.fuse` to each form, from other libraries' code and from another form."""

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from onnx_graphs import CHANGED, Graph
from onnx_stand_ins import run_form
from onnx_writings import WRITINGS, Calls, Joined, Logits, Stacked, assert_refused, edit, export, feeds, inputs, kinds, masked

import mx_driving
import mx_driving.onnx
from mx_driving.onnx import FUSED_FORMS

NODES = {"onnxruntime": "multi_scale_deformable_attn", "npu": "MultiScaleDeformableAttn"}
NODES["tensorrt"] = "MultiscaleDeformableAttnPlugin_TRT"


IN_EACH_FORM = {
    **{name: Graph(module) for name, module in WRITINGS.items()},
    **{f"gathers, opset {opset}": Graph(Joined([2, 4], masked), opset=opset) for opset in (11, 13)},
    **CHANGED,
}


def judge(path, form, writing):
    for sizes in ((2, 7), (3, 11), (1, 40)):
        expected = writing(*inputs(*sizes)).numpy()
        np.testing.assert_allclose(run_form(path, form, feeds(inputs(*sizes))), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("form", FUSED_FORMS)
@pytest.mark.parametrize("name", IN_EACH_FORM)
def test_each_form_gives_the_same(name, form, before, after):
    IN_EACH_FORM[name].save(before)
    report = mx_driving.onnx.fuse(before, after, form=form)
    assert (len(report.replaced), report.left) == (1, {})
    assert "GridSample" not in kinds(after)
    nodes = [node for node in onnx.load(after).graph.node if node.domain]
    assert [node.op_type for node in nodes] == ([NODES[form]] if form in NODES else [])
    old, new = ({o.domain for o in onnx.load(path).opset_import} for path in (before, after))
    assert new == old | {node.domain for node in nodes}
    judge(after, form, IN_EACH_FORM[name].module)


@pytest.mark.parametrize("old", FUSED_FORMS)
@pytest.mark.parametrize("form", FUSED_FORMS)
def test_one_form_becomes_another(old, form, tmp_path):
    whole, before, after = (tmp_path / f"{name}.onnx" for name in ("whole", "before", "after"))
    export(WRITINGS["unequal points"], whole, "older")
    mx_driving.onnx.fuse(whole, before, form=old)
    if old == form:
        return assert_refused(before, f"it has 1 (of the node .*::{NODES.get(old)}|in the form {old}) already", form)
    report = mx_driving.onnx.fuse(before, after, form=form)
    assert not report.left
    (words,) = report.replaced.values()
    assert words.endswith(f"::{NODES[old]}" if old in NODES else "3 x 4")
    assert not {NODES.get(old), *(["Floor"] if form != "gather" else [])} & set(kinds(after))
    judge(after, form, WRITINGS["unequal points"])


def swap_sides(model):
    """Swap heights and widths of the maps, by which locations are multiplied."""
    for table in model.graph.initializer:
        if list(table.dims) == [6, 2]:
            table.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(table)[:, ::-1].copy(), table.name))


def set_another_kind(old, new):
    def change(model):
        next(node for node in model.graph.node if node.op_type == old).op_type = new

    return change


NEAR_MISSES = {
    "Ceil": (set_another_kind("Floor", "Ceil"), "it has no weighted samples"),
    "addition": (set_another_kind("Abs", "Neg"), "it computes something else"),
    "sides": (swap_sides, "it computes something else|a trial in onnxruntime failed"),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_a_near_miss_of_gathers_stays(name, before, after, tmp_path):
    whole, before = tmp_path / "whole.onnx", before
    export(Calls(), whole, "our nodes")
    mx_driving.onnx.fuse(whole, before, form="gather")
    model, (change, why) = onnx.load(before), NEAR_MISSES[name]
    change(model)
    onnx.save(model, before)
    assert_refused(before, f"path_in must hold deformable attention made of .*{why}")


def judge_dtypes(before, after, form, writing, arguments):
    """Other nodes than ours have no float64, and a cast to float32 would lose digits. The sentence names the tensor."""
    double = any(t.dtype == torch.float64 for t in arguments)
    if double and form in ("npu", "tensorrt"):
        return assert_refused(before, f"_?[a-z0-9_]+: its tensors are float64; .*::{NODES[form]} has float32, which", form)
    assert len(mx_driving.onnx.fuse(before, after, form=form).replaced) == 1
    output = run_form(after, form, feeds(arguments))
    true = writing(*(t.double() for t in arguments)).numpy()
    assert output.dtype == arguments[0].numpy().dtype
    np.testing.assert_allclose(output, true, rtol=0, atol=4e-3 if arguments[0].dtype == torch.float16 else 2e-6)


DTYPES = [(16, 16, 16), (64, 64, 64), (16, 32, 32), (16, 32, 16), (32, 16, 16), (32, 32, 64), (64, 32, 32), (16, 64, 32)]


@pytest.mark.parametrize("bits", DTYPES)
@pytest.mark.parametrize("form", ["gather", "npu", "tensorrt"])
def test_a_node_of_other_dtypes(form, bits, before, after, tmp_path):
    """`bits` are of value, locations and weights. The output has the dtype of value in each form."""
    arguments = tuple(t.to(getattr(torch, f"float{n}")) for t, n in zip(inputs(), bits, strict=True))
    export(Calls(), before, "our nodes", arguments=arguments)
    judge_dtypes(before, after, form, Calls(), arguments)
    if (form, bits) == ("tensorrt", (16, 16, 16)):  # NVIDIA's node is in float16: only the two tables are cast
        assert kinds(after).count("Cast") == 2
    if form == "gather":
        again = tmp_path / "again.onnx"
        judge_dtypes(after, again, "onnxruntime", Calls(), arguments)


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


def test_what_is_not_on_the_map_contributes_zero(before, after):
    """Samples off the map contribute 0, even if the location or the weight is NaN."""
    export(Calls(), before, "our nodes")
    mx_driving.onnx.fuse(before, after, form="gather")
    value, locations, weights = inputs()
    locations[0, :, :, :, 0], locations[0, :, :, :, 1], locations[0, :, :, :, 2] = float("nan"), 1e30, -7
    weights[0] = float("nan")
    output = run_form(after, "gather", feeds((value, locations, weights)))
    assert (output[0] == 0).all()
    np.testing.assert_allclose(output[1], Calls()(value, locations, weights)[1].numpy(), atol=2e-6)


def test_what_a_form_cannot_say(before, after):
    export(Calls(free=True), before, "our nodes")
    name = onnx.load(before).graph.output[0].name
    assert_refused(before, f"{name}: the file does not fix the sizes of its maps, which gathers need", "gather")
    for form in ("npu", "tensorrt"):  # these read the sizes when they run
        mx_driving.onnx.fuse(before, after, form=form)
        judge(after, form, Calls())
        after.unlink()
    export(Logits(), before, "our nodes")
    name = onnx.load(before).graph.output[0].name
    assert_refused(before, f"{name}: it is a node mx_driving::multi_scale_deformable_attn_with_logits, which no", "tensorrt")


def test_the_version_of_the_plugin(before, after):
    export(Stacked(), before, "older")
    for version in (None, "2"):
        mx_driving.onnx.fuse(before, after, form="tensorrt", plugin_version=version)
        (node,) = (node for node in onnx.load(after).graph.node if node.domain)
        assert [onnx.helper.get_attribute_value(a).decode() for a in node.attribute] == ([version] if version else [])
    assert_refused(before, "plugin_version must come with form 'tensorrt'; got '2' with 'npu'", "npu", plugin_version="2")
    assert_refused(before, "form must be one of gather, npu, onnxruntime, tensorrt; got 'grid_sample'", "grid_sample")


def test_the_command_writes_each_form(mx, before, after):
    export(Stacked(), before, "older")
    status, said, _ = mx("fuse", before, after, "--form", "tensorrt", "--plugin-version", "2")
    assert (status, "1 replaced, 0 left" in said, NODES["tensorrt"] in kinds(after)) == (0, True, True)
    for wrong, rule in (
        (["plugin"], "form must be one of gather, npu, onnxruntime, tensorrt; got 'plugin'"),
        (["npu", "--time"], "--time must come with a form that onnxruntime runs; got npu"),
    ):
        status, _, problem = mx("fuse", before, after, "--form", *wrong)
        assert (status, rule in problem) == (2, True)


def beside(path, name, kind, dtype, numbers):
    """Add a node of a constant to the file. Its output is an output of the file."""
    with edit(path) as model:
        table = onnx.helper.make_tensor(f"{name}/table", dtype, [len(numbers)], numbers)
        model.graph.node.append(onnx.helper.make_node("Constant", [], [table.name], value=table))
        model.graph.node.append(onnx.helper.make_node(kind, [table.name] * (4 if kind == "Slice" else 1), [name]))
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, dtype, [1]))


@pytest.mark.parametrize("form", FUSED_FORMS)
def test_a_file_that_cannot_run_is_refused_in_each_form(form, before, after, tmp_path):
    """The file has a Slice along axis 1 of a tensor with one axis."""
    export(Stacked(), before, "fixed sizes")
    beside(before, "cut", "Slice", TensorProto.INT64, [1])
    assert_refused(before, r"^path_in must be a file that can be run .*Unexpected axis value: 1", form)


@pytest.mark.parametrize("form", FUSED_FORMS)
def test_another_runtime_may_have_a_kernel_that_onnxruntime_lacks(form, before, after):
    export(Stacked(), before, "fixed sizes")
    beside(before, "error", "Erf", TensorProto.BFLOAT16, [1.0])
    report = mx_driving.onnx.fuse(before, after, form=form)
    assert len(report.replaced) == 1
    assert after.is_file()
    lacking = "Could not find an implementation for Erf" if form in ("gather", "onnxruntime") else ""
    assert lacking in report.problem
    assert bool(report.problem) == bool(lacking) == ("onnxruntime does not run it on a CPU" in str(report))
