"""`fuse` and `verify` read nodes that other libraries write for the operators."""

import numpy as np
import onnx
import onnx_other_nodes as others
import onnx_writings as writings
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx_other_nodes import DL4AGX, FORK, MMDEPLOY, PLUGIN, TABLES, draw_pool, feeds, save_aggregation, save_pool
from onnx_stand_ins import AGGREGATES, run_form, run_plugins, swap_axes

import mx_driving.onnx
from mx_driving.onnx import FUSED_FORMS
from mx_driving.onnx._check import check


def assert_same(before, after, fed, form="onnxruntime", rtol=0, atol=2e-5):
    """The new file gives the numbers of the nodes in the old one."""
    true = run_plugins(before, fed)["output"].astype(np.float64)
    np.testing.assert_allclose(run_form(after, form, fed), true, rtol=rtol, atol=atol)


def name_of(kind, domain):
    return f"{domain}::{kind}" if domain else kind


@pytest.mark.parametrize("form", FUSED_FORMS)
@pytest.mark.parametrize("name", others.KINDS)
def test_attention_in_each_form(name, form, before, after):
    node = others.KINDS[name]
    others.save(before, node)
    report = mx_driving.onnx.fuse(before, after, form=form)
    words = f"a node {name_of(node.kind, node.domain)}"
    assert (report.replaced, report.left) == ({"first": words, "second": words}, {})
    assert set(report.nodes.values()) == {("first",), ("second",)}
    assert (node.domain, node.kind) not in {(other.domain, other.op_type) for other in onnx.load(after).graph.node}
    assert_same(before, after, feeds(node), form)


@pytest.mark.parametrize("name", ["mmdeploy", "BEVFormer_tensorrt"])
def test_float16(name, before, after):
    others.save(before, others.KINDS[name], np.float16)
    mx_driving.onnx.fuse(before, after)
    assert_same(before, after, feeds(others.KINDS[name], np.float16), atol=0.2)


@pytest.mark.parametrize("name", others.KINDS)
def test_verify_judges_a_runtime_of_the_node(name, before):
    node = others.KINDS[name]
    others.save(before, node)
    report = check(before, run_plugins, feeds(node))
    assert report.right
    inputs = ("in the file", "across borders")[: 2 - ("references" in node.inputs)]
    expected = [(layer, words) for layer in ("first", "second") for words in inputs]
    assert [(one.match.name, one.inputs) for one in report.comparisons] == expected
    report = check(before, swap_axes(run_plugins), feeds(node))
    assert not any(one.right for one in report.comparisons)
    assert "references" in node.inputs or all("x and y are swapped in the locations" in one.why for one in report.comparisons)


def test_other_plugins_keep_their_domain(after, tmp_path):
    """A file may have nodes that only their runtime knows. Weights outside the file are found, too."""
    before = tmp_path / "in" / "before.onnx"
    before.parent.mkdir()
    others.save(before, PLUGIN)
    whole = onnx.load(before)
    whole.graph.node.insert(0, helper.make_node("RotateTRT", ["value", "references"], ["turned"], name="turn"))
    whole.graph.node[1].input[0] = "turned"
    whole.graph.value_info.append(helper.make_tensor_value_info("turned", TensorProto.FLOAT, others.SHAPES["value"]))
    onnx.save(whole, before, save_as_external_data=True, location="weights", size_threshold=100)
    assert len(mx_driving.onnx.fuse(before, after).replaced) == 2
    kinds = {node.op_type: node.domain for node in onnx.load(after).graph.node}
    assert kinds["RotateTRT"] == ""
    assert {opset.domain for opset in onnx.load(after).opset_import} == {"", "mx_driving"}
    assert not any(node.metadata_props for node in onnx.load(after).graph.node)


@pytest.mark.parametrize("heads_apart", [False, True])
def test_a_fork_s_plugin_with_locations(heads_apart, before, after):
    others.save(before, others.Node(FORK))
    writings.assert_refused(before, f"the file does not say how many axes the output of its node {FORK} has")
    with writings.edit(before) as model:
        for name in ("first", "second"):
            shape = ["b", 7, 4, 8] if heads_apart else ["b", 7, 32]
            model.graph.value_info.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    assert len(mx_driving.onnx.fuse(before, after).replaced) == 2
    others.save(before, MMDEPLOY)
    assert_same(before, after, feeds(MMDEPLOY))


UNKNOWN = "has no weighted samples; not known: its nodes"
OTHERS = [
    (DL4AGX._replace(attributes={"Mode": 2}), "Plugin has the attribute Mode, whose meaning is not known"),
    (DL4AGX._replace(inputs=(*TABLES[:2], "l", "w", *TABLES[2:] * 2)), "has 6 inputs; the operator has 5"),
    (DL4AGX._replace(inputs=(*TABLES, "w", "l")), "Plugin must have one output, and inputs of 4, 2, 1, 6, 5 axes"),
    (DL4AGX._replace(kind="ms_deform_attn_plugin"), "first: its node custom_op::ms_deform_attn_plugin is not known"),
    (DL4AGX._replace(kind="MSDA"), "its node custom_op::MSDA must have one output, and inputs of 3, 3, 2, 5, 6 axes"),
    (DL4AGX._replace(kind="MMCVDeformConv2d", domain=""), rf"{UNKNOWN} MMCVDeformConv2d\)"),
    (DL4AGX._replace(kind="RotatePlugin"), rf"it {UNKNOWN} custom_op::RotatePlugin\)"),
    (DL4AGX._replace(kind="RotatePlugin", domain=""), rf"it {UNKNOWN} RotatePlugin\)"),
    (PLUGIN._replace(inputs=PLUGIN.inputs[:4]), f"its node {FORK} has 4 inputs; one that is read has value, "),
    (PLUGIN._replace(kind=FORK + "3"), f"first: its node {FORK}3 is not known; second: "),
]


@pytest.mark.parametrize(("node", "why"), OTHERS)
def test_others_are_named(node, why, mx, before, after):
    others.save(before, node)
    writings.assert_refused(before, why)
    status, _, problem = mx("verify", before, "--runtime", "onnxruntime", "--json")
    assert (status, problem.count("\n"), " must " in problem) == (2, 1, True)


@pytest.mark.parametrize("form", FUSED_FORMS)
@pytest.mark.parametrize(("kind", "domain"), AGGREGATES)
def test_aggregation_in_each_form(kind, domain, form, before, after, tmp_path):
    fed, again = save_aggregation(before, kind, domain), tmp_path / "again.onnx"
    report = mx_driving.onnx.fuse(before, after, form=form)
    words = f"a node {name_of(kind, domain)}"
    assert (report.replaced, report.left) == ({"first": words, "output": words}, {})
    assert_same(before, after, fed, form, rtol=1e-6, atol=1e-5)
    if form == "onnxruntime" and kind == "MSDA":
        mx_driving.onnx.fuse(after, again, "gather")
        assert_same(before, again, fed, "gather", rtol=1e-6, atol=1e-5)


def test_aggregation_in_float16(before, after):
    fed = save_aggregation(before, "MSDA", "nv", np.float16)
    for form in FUSED_FORMS:
        mx_driving.onnx.fuse(before, after, form)
        assert_same(before, after, fed, form, rtol=5e-3, atol=0)


@pytest.mark.parametrize("bad", [False, True])
def test_verify_judges_aggregation(bad, before):
    """Queries with a location that is not finite are left out."""
    fed = save_aggregation(before, "MSDA", "nv")
    fed["l"][0, 2] = np.nan if bad else fed["l"][0, 2]
    report = check(before, run_plugins, fed)
    assert (report.right, len(report.comparisons), report.left) == (True, 2, {})
    assert ("2 of 20" in report.comparisons[0].why or "1 of 10" in report.comparisons[0].why) == bad
    for precision in (None, torch.float16):
        assert not any(one.right for one in check(before, swap_axes(run_plugins), fed, precision).comparisons)

    def run_in_half(path, arrays):
        return {name: (1.0005 * a).astype(np.float16).astype(a.dtype) for name, a in run_plugins(path, arrays).items()}

    report = check(before, run_in_half, fed)
    assert not report.right
    report = check(before, run_in_half, fed, torch.float16)
    assert (report.right, [one.inputs for one in report.comparisons]) == (True, ["in the file"] * 2)
    assert all("its error is typical of float16" in one.why for one in report.comparisons)


@pytest.mark.parametrize("intervals", ["runs", "any", "none"])
@pytest.mark.parametrize("kind", others.POOLS)
def test_pools_follow_intervals(kind, intervals, before, after):
    fed = save_pool(before, kind, draw_pool(kind, intervals))
    report = mx_driving.onnx.fuse(before, after)
    assert list(report.replaced.values()) == [f"a pool {name_of(kind, others.POOLS[kind])}"]
    assert report.left == {}
    assert run_plugins(before, fed)["output"].any() == (intervals != "none")
    assert_same(before, after, fed, atol=1e-5)


@pytest.mark.parametrize(("opset", "dtype", "constants"), [(11, np.float32, 1), (13, np.float16, 0), (20, np.float64, 1)])
@pytest.mark.parametrize("kind", ["bev_pool_v2", "QuickCumsumCuda"])
def test_opsets_dtypes_and_constants_of_pools(kind, opset, dtype, constants, before, after):
    arrays = draw_pool(kind, "runs", dtype)
    indices = [name for name, array in arrays.items() if array.dtype == np.int32]
    fed = save_pool(before, kind, arrays, opset, indices * constants)
    mx_driving.onnx.fuse(before, after)
    assert_same(before, after, fed, atol=2e-2 if dtype == np.float16 else 1e-5)


@pytest.mark.parametrize("form", ["onnxruntime", "gather"])
def test_attention_behind_a_pool(form, stacked, before, after):
    """The file does not say the shape of the pool's output, which attention samples."""
    save_pool(before, "bev_pool_v2", draw_pool("bev_pool_v2", "runs"), out_height=4, out_width=112)
    attention = onnx.load(stacked).graph
    with writings.edit(before) as model:
        model.graph.node[-1].output[0] = "cells"
        model.graph.node.append(helper.make_node("Reshape", ["cells", "sizes"], ["v"]))
        model.graph.initializer.append(numpy_helper.from_array(np.array([2, -1, 4, 8]), "sizes"))
        model.graph.node.extend(attention.node)
        model.graph.initializer.extend(attention.initializer)
        model.graph.input.extend(value for value in attention.input if value.name != "v")
        model.graph.output[0].CopyFrom(attention.output[0])
    report = mx_driving.onnx.fuse(before, after, form)
    assert (len(report.replaced), len(report.left)) == ((2, 0) if form == "onnxruntime" else (1, 1))


PROBLEMS = {
    "form": ({}, "tensorrt", "pool: it is a pool, mmdeploy::bev_pool_v2, which only the form onnxruntime has"),
    "attributes": ({"output_z": 2, "out_width": 4}, "onnxruntime", "out_width, output_z; the pool has out_height, out_width"),
    "opset": ({"opset": 9}, "onnxruntime", "pools need opset 11 or later"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_pools_that_stay_are_named(name, mx, before, after):
    options, form, why = PROBLEMS[name]
    save_pool(before, "bev_pool_v2", draw_pool("bev_pool_v2", "runs"), **options)
    writings.assert_refused(before, why, form)
    status, _, problem = mx("verify", before, "--runtime", "onnxruntime")
    assert (status, "it is a pool, mmdeploy::bev_pool_v2; " in problem) == (2, True)


def test_verify_runs_attention_beside_a_pool(before, tmp_path):
    """onnxruntime computes the pool by our node, so that the whole file has true outputs."""
    fed = save_pool(tmp_path / "pool.onnx", "bev_pool_v2", draw_pool("bev_pool_v2", "any"))
    pool = onnx.load(tmp_path / "pool.onnx").graph
    pool.output[0].name = pool.node[-1].output[0] = "cells"
    others.save(before, MMDEPLOY)
    with writings.edit(before) as model:
        model.graph.node.extend(pool.node)
        model.graph.input.extend(pool.input)
        model.graph.output.extend(pool.output)
    report = check(before, run_plugins, fed | feeds(MMDEPLOY))
    assert report.right
    assert [output.name for output in report.outputs] == ["output", "cells"]
    assert report.left == {"pool": "it is a pool, mmdeploy::bev_pool_v2; attention is verified"}
