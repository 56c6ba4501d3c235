"""Nodes that other libraries write for the operators: read by `fuse` and `verify` as the equation that they are."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_nodes
import onnx_writings
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_stand_ins import AGGREGATES, run_plugins

import mx_driving.onnx
from mx_driving.onnx import FUSED_FORMS
from mx_driving.onnx._check import check

TABLES, STEP = ("value", "shapes", "level_starts"), {"im2col_step": 64}
FORK = "MultiScaleDeformableAttnTRT"  # BEVFormer_tensorrt's plugin; a fork of it has the operator's five inputs
SHAPES = {
    **{"value": (2, 42, 4, 8), "l": (2, 7, 4, 2, 3, 2), "w": (2, 7, 4, 2, 3)},
    **{"references": (2, 7, 1, 4), "offsets": (2, 7, 4 * 2 * 4 * 2), "logits": (2, 7, 4, 2 * 4)},
}


class Node(NamedTuple):
    """How a library writes attention."""

    kind: str
    domain: str = ""
    attributes: dict[str, Any] = {}  # noqa: RUF012
    table: type = np.int64
    inputs: tuple[str, ...] = (*TABLES, "l", "w")


PLUGIN = Node(FORK, inputs=(*TABLES[:2], "references", "offsets", "logits"))
KINDS = {
    "mmdeploy": Node("MMCVMultiScaleDeformableAttention", "mmdeploy", STEP),
    "mmdeploy without a domain": Node("MMCVMultiScaleDeformableAttention", "", STEP),
    "DL4AGX": Node("MultiScaleDeformableAttentionPlugin", "custom_op", STEP),
    "Autoware": Node("MultiScaleDeformableAttentionPlugin"),
    "NVIDIA in onnxruntime's domain": Node(
        "MultiscaleDeformableAttnPlugin_TRT", "com.microsoft", {"plugin_version": "2"}, np.int32
    ),
    "BEVFormer_tensorrt": PLUGIN,
    "BEVFormer_tensorrt, pairs of float16": PLUGIN._replace(kind=FORK + "2"),
    "BEVFormer_tensorrt with a domain": PLUGIN._replace(domain="trt.plugins", table=np.int32),
}


def feeds(node, dtype=np.float32):
    random = np.random.default_rng(0)
    return {name: (random.random(SHAPES[name]) * 1.4 - 0.2).astype(dtype) for name in node.inputs if name in SHAPES}


def save(path, node, dtype=np.float32):
    """Two layers, as exporters write them: no tensor between them has a shape."""
    type_of, arrays = helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), feeds(node)
    infos = [helper.make_tensor_value_info(name, type_of, ["b", *a.shape[1:]]) for name, a in arrays.items()]
    moved = node.inputs[3]
    tables = {"shapes": np.array([[6, 5], [3, 4]], node.table), "level_starts": np.array([0, 30], node.table)}
    columns = arrays[moved][0, 0].size
    tables |= {"matrix": (np.random.default_rng(1).random((32, columns)) * 0.03).astype(dtype), "flat": np.array([0, 0, -1])}
    tables |= {"sizes": np.array([0, 0, *arrays[moved].shape[2:]])}
    make = functools.partial(helper.make_node, node.kind, domain=node.domain, **node.attributes)
    nodes = [
        make(node.inputs, ["first"], name="first"),
        helper.make_node("Reshape", ["first", "flat"], ["rows"]),
        helper.make_node("MatMul", ["rows", "matrix"], ["moved"]),
        helper.make_node("Reshape", ["moved", "sizes"], ["again"]),
        make(["again" if name == moved else name for name in node.inputs], ["second"], name="second"),
        helper.make_node("Reshape", ["second", "flat"], ["output"]),
    ]
    output = helper.make_tensor_value_info("output", type_of, ["b", 7, 32])
    opsets = [helper.make_opsetid("", 17), *([helper.make_opsetid(node.domain, 1)] if node.domain else [])]
    initializers = [numpy_helper.from_array(array, name) for name, array in tables.items()]
    graph = helper.make_graph(nodes, "two", infos, [output], initializers)
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)


def run_form(path, form, fed):
    if form in ("npu", "tensorrt"):
        return run_plugins(path, fed)["output"]
    return onnx_nodes.session(path, mx_driving.onnx.library()).run(None, fed)[0]


@pytest.mark.parametrize("form", FUSED_FORMS)
@pytest.mark.parametrize("name", KINDS)
def test_attention_in_each_form(name, form, tmp_path):
    node = KINDS[name]
    before, after = tmp_path / "before.onnx", tmp_path / "after.onnx"
    save(before, node)
    report = mx_driving.onnx.fuse(before, after, form=form)
    words = f"a node {node.domain}::{node.kind}" if node.domain else f"a node {node.kind}"
    assert (report.replaced, report.left) == ({"first": words, "second": words}, {})
    assert set(report.nodes.values()) == {("first",), ("second",)}
    assert (node.domain, node.kind) not in {(other.domain, other.op_type) for other in onnx.load(after).graph.node}
    true = run_plugins(before, feeds(node))["output"]
    np.testing.assert_allclose(run_form(after, form, feeds(node)), true, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["mmdeploy", "BEVFormer_tensorrt"])
def test_float16(name, tmp_path):
    before, after, fed = tmp_path / "before.onnx", tmp_path / "after.onnx", feeds(KINDS[name], np.float16)
    save(before, KINDS[name], np.float16)
    mx_driving.onnx.fuse(before, after)
    np.testing.assert_allclose(run_form(after, "onnxruntime", fed), run_plugins(before, fed)["output"], rtol=0, atol=0.2)


@pytest.mark.parametrize("name", KINDS)
def test_verify_judges_a_runtime_of_the_node(name, tmp_path):
    node = KINDS[name]
    save(tmp_path / "before.onnx", node)
    report = check(tmp_path / "before.onnx", run_plugins, feeds(node))
    assert report.right
    inputs = ("in the file", "across borders")[: 2 - ("references" in node.inputs)]
    assert [(one.match.name, one.inputs) for one in report.comparisons] == [
        (layer, words) for layer in ("first", "second") for words in inputs
    ]

    def swapped(path, fed):
        pairs = {n: a.reshape(*a.shape[:-1], -1, 2) for n, a in fed.items() if a.ndim == 6 or n.startswith("ref")}
        return run_plugins(path, fed | {n: pair[..., ::-1].reshape(fed[n].shape) for n, pair in pairs.items()})

    report = check(tmp_path / "before.onnx", swapped, feeds(node))
    assert not any(one.right for one in report.comparisons)
    assert "references" in node.inputs or all("x and y are swapped in the locations" in one.why for one in report.comparisons)


def test_other_plugins_keep_their_domain(tmp_path):
    """A file may have nodes that only their runtime knows. Weights outside the file are found, too."""
    before, after = tmp_path / "in" / "before.onnx", tmp_path / "after.onnx"
    before.parent.mkdir()
    save(before, PLUGIN)
    whole = onnx.load(before)
    whole.graph.node.insert(0, helper.make_node("RotateTRT", ["value", "references"], ["turned"], name="turn"))
    whole.graph.node[1].input[0] = "turned"
    whole.graph.value_info.append(helper.make_tensor_value_info("turned", TensorProto.FLOAT, SHAPES["value"]))
    onnx.save(whole, before, save_as_external_data=True, location="weights", size_threshold=100)
    assert len(mx_driving.onnx.fuse(before, after).replaced) == 2
    kinds = {node.op_type: node.domain for node in onnx.load(after).graph.node}
    assert kinds["RotateTRT"] == ""
    assert {opset.domain for opset in onnx.load(after).opset_import} == {"", "mx_driving"}
    assert not any(node.metadata_props for node in onnx.load(after).graph.node)


@pytest.mark.parametrize("heads_apart", [False, True])
def test_a_fork_s_plugin_with_locations(heads_apart, tmp_path):
    before, after = tmp_path / "before.onnx", tmp_path / "after.onnx"
    save(before, Node(FORK))
    with pytest.raises(ValueError, match=f"the file does not say how many axes the output of its node {FORK} has"):
        mx_driving.onnx.fuse(before, after)
    model = onnx.load(before)
    for name in ("first", "second"):
        shape = ["b", 7, 4, 8] if heads_apart else ["b", 7, 32]
        model.graph.value_info.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    onnx.save(model, before)
    assert len(mx_driving.onnx.fuse(before, after).replaced) == 2
    save(before, MMDEPLOY)
    true = run_plugins(before, feeds(MMDEPLOY))["output"]
    np.testing.assert_allclose(run_form(after, "onnxruntime", feeds(MMDEPLOY)), true, rtol=0, atol=2e-5)


MMDEPLOY, DL4AGX = KINDS["mmdeploy"], KINDS["DL4AGX"]


@pytest.mark.parametrize(
    ("node", "why"),
    [
        (
            DL4AGX._replace(attributes={"Mode": 2}),
            "MultiScaleDeformableAttentionPlugin has the attribute Mode, whose meaning is not known",
        ),
        (DL4AGX._replace(inputs=(*TABLES[:2], "l", "w", *TABLES[2:] * 2)), "has 6 inputs; the operator has 5"),
        (DL4AGX._replace(inputs=(*TABLES, "w", "l")), "Plugin must have one output, and inputs of 4, 2, 1, 6, 5 axes"),
        (
            DL4AGX._replace(kind="ms_deform_attn_plugin"),
            "first: its node custom_op::ms_deform_attn_plugin is not known",
        ),
        (DL4AGX._replace(kind="MSDA"), "its node custom_op::MSDA must have one output, and inputs of 3, 3, 2, 5, 6 axes"),
        (
            DL4AGX._replace(kind="MMCVDeformConv2d", domain=""),
            r"has no weighted samples; not known: its nodes MMCVDeformConv2d\)",
        ),
        (DL4AGX._replace(kind="RotatePlugin"), r"it has no weighted samples; not known: its nodes custom_op::RotatePlugin\)"),
        (DL4AGX._replace(kind="RotatePlugin", domain=""), r"it has no weighted samples; not known: its nodes RotatePlugin\)"),
        (
            PLUGIN._replace(inputs=PLUGIN.inputs[:4]),
            f"its node {FORK} has 4 inputs; one that is read has value, ",
        ),
        (PLUGIN._replace(kind=FORK + "3"), f"first: its node {FORK}3 is not known; second: "),
    ],
)
def test_others_are_named(node, why, mx, tmp_path):
    save(tmp_path / "before.onnx", node)
    with pytest.raises(ValueError, match=why):
        mx_driving.onnx.fuse(tmp_path / "before.onnx", tmp_path / "after.onnx")
    status, _, problem = mx("verify", tmp_path / "before.onnx", "--runtime", "onnxruntime", "--json")
    assert (status, problem.count("\n"), " must " in problem) == (2, 1, True)


def save_aggregation(path, kind, domain, dtype=np.float32, free=True):
    """Two layers of aggregation. Locations lie on pictures, on their borders, and outside."""
    random = np.random.default_rng(0)
    shapes = np.array([[[4, 6], [2, 3]], [[5, 3], [1, 2]], [[4, 6], [2, 3]]], np.int32)
    starts = (np.cumsum(shapes.prod(-1)) - shapes.prod(-1).reshape(-1)).reshape(3, 2).astype(np.int32)
    locations = random.random((2, 5, 4, 3, 2)) * 1.4 - 0.2
    locations[0, 0, :, 0, 0] = 0, 1, -0.01, 1.01
    fed = {"f": random.random((2, int(shapes.prod(-1).sum()), 8)), "l": locations, "w": random.random((2, 5, 4, 3, 2, 4))}
    fed = {name: array.astype(dtype) for name, array in fed.items()}
    type_of, batch = helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), "b" if free else 2
    infos = [helper.make_tensor_value_info(name, type_of, [batch, *a.shape[1:]]) for name, a in fed.items()]
    tables = {"shapes": shapes, "starts": starts, "matrix": random.random((8, 96)).astype(dtype)}
    tables["sizes"] = np.array([0, 0, *fed["w"].shape[2:]])
    make = functools.partial(helper.make_node, kind, domain=domain)
    nodes = [
        make(["f", "shapes", "starts", "l", "w"], ["first"], name="first"),
        helper.make_node("MatMul", ["first", "matrix"], ["rows"]),
        helper.make_node("Reshape", ["rows", "sizes"], ["again"]),
        make(["f", "shapes", "starts", "l", "again"], ["output"], name="second"),
    ]
    output = helper.make_tensor_value_info("output", type_of, [batch, 5, 8])
    opsets = [helper.make_opsetid("", 17), *([helper.make_opsetid(domain, 1)] if domain else [])]
    initializers = [numpy_helper.from_array(array, name) for name, array in tables.items()]
    graph = helper.make_graph(nodes, "two", infos, [output], initializers)
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return fed


@pytest.mark.parametrize("form", FUSED_FORMS)
@pytest.mark.parametrize(("kind", "domain"), AGGREGATES)
def test_aggregation_in_each_form(kind, domain, form, tmp_path):
    before, after, again = (tmp_path / f"{name}.onnx" for name in ("before", "after", "again"))
    fed = save_aggregation(before, kind, domain)
    report = mx_driving.onnx.fuse(before, after, form=form)
    words = f"a node {domain}{'::' * bool(domain)}{kind}"
    assert (report.replaced, report.left) == ({"first": words, "output": words}, {})
    true = run_plugins(before, fed)["output"]
    np.testing.assert_allclose(run_form(after, form, fed), true, rtol=1e-6, atol=1e-5)
    if form == "onnxruntime" and kind == "MSDA":
        mx_driving.onnx.fuse(after, again, "gather")
        np.testing.assert_allclose(run_form(again, "gather", fed), true, rtol=1e-6, atol=1e-5)


def test_aggregation_in_float16(tmp_path):
    before, after = tmp_path / "before.onnx", tmp_path / "after.onnx"
    fed = save_aggregation(before, "MSDA", "nv", np.float16)
    for form in FUSED_FORMS:
        mx_driving.onnx.fuse(before, after, form)
        true = run_plugins(before, fed)["output"].astype(np.float64)
        np.testing.assert_allclose(run_form(after, form, fed), true, rtol=5e-3, atol=0)


@pytest.mark.parametrize("bad", [False, True])
def test_verify_judges_aggregation(bad, tmp_path):
    """Queries with a location that is not finite are left out."""
    fed = save_aggregation(tmp_path / "before.onnx", "MSDA", "nv")
    fed["l"][0, 2] = np.nan if bad else fed["l"][0, 2]
    report = check(tmp_path / "before.onnx", run_plugins, fed)
    assert (report.right, len(report.comparisons), report.left) == (True, 2, {})
    assert ("2 of 20" in report.comparisons[0].why or "1 of 10" in report.comparisons[0].why) == bad

    def swapped(path, fed):
        return run_plugins(path, {n: a[..., ::-1] if a.ndim == 5 else a for n, a in fed.items()})

    assert not any(one.right for one in check(tmp_path / "before.onnx", swapped, fed).comparisons)


POOLS = {"bev_pool_v2": "mmdeploy", "BEVPoolV2TRT": "", "BEVPoolV2TRT2": "", "QuickCumsumCuda": "autoware"}
SIZES = {"batch_size": 2, "dimension": 3, "height": 4, "width": 5}
POINTS = 60


def draw_intervals(name):
    """Runs of one cell, as BEVDet makes them; any intervals, which leave points out and share others; none."""
    random = np.random.default_rng(0)
    if name == "runs":
        starts = np.unique(np.sort(random.choice(POINTS, 20, replace=False)) * (np.arange(20) > 0))
        return starts, np.diff([*starts, POINTS])
    starts = random.permutation(40)[: 0 if name == "none" else 20]
    return starts, random.integers(0, 5, len(starts))


def draw_pool(kind, intervals, dtype):
    random = np.random.default_rng(1)
    starts, lengths = (array.astype(np.int32) for array in draw_intervals(intervals))
    if kind == "QuickCumsumCuda":
        rows = random.standard_normal((POINTS, 6)).astype(dtype)
        cells = np.stack(
            [random.integers(0, SIZES[name], POINTS) for name in ("height", "width", "dimension", "batch_size")], 1
        )
        return {"rows": rows, "cells": cells.astype(np.int32), "lengths": lengths, "starts": starts}
    depth, feat = random.random((2, 4, 3, 5)).astype(dtype), random.standard_normal((2, 3, 5, 6)).astype(dtype)
    ranks = {"depth": depth.size, "feat": 30, "bev": 20}
    ranks = {f"ranks_{name}": random.integers(0, most, POINTS).astype(np.int32) for name, most in ranks.items()}
    return {"depth": depth, "feat": feat, **ranks, "starts": starts, "lengths": lengths}


def save_pool(path, kind, arrays, opset=17, constants=(), **attributes):
    attributes = attributes or (SIZES if kind == "QuickCumsumCuda" else {"out_height": 4, "out_width": 5})
    domain, free = POOLS[kind], [name for name in arrays if name not in constants]
    infos = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(arrays[n].dtype), arrays[n].shape) for n in free]
    dtype = helper.np_dtype_to_tensor_dtype(next(iter(arrays.values())).dtype)
    shape = (2, 3, 4, 5, 6) if kind == "QuickCumsumCuda" else (1, 4, 5, 6)
    output = helper.make_tensor_value_info("output", dtype, shape)
    nodes = [helper.make_node(kind, list(arrays), ["pool"], domain=domain, **attributes)]
    nodes += [helper.make_node("Relu", ["pool"], ["output"])]
    tables = [numpy_helper.from_array(arrays[name], name) for name in constants]
    opsets = [helper.make_opsetid("", opset), *([helper.make_opsetid(domain, 1)] if domain else [])]
    model = helper.make_model(helper.make_graph(nodes, "pool", infos, [output], tables), opset_imports=opsets, ir_version=8)
    onnx.save(model, path)
    return {name: arrays[name] for name in free}


@pytest.mark.parametrize("intervals", ["runs", "any", "none"])
@pytest.mark.parametrize("kind", POOLS)
def test_pools_follow_intervals(kind, intervals, tmp_path):
    before, after = tmp_path / "before.onnx", tmp_path / "after.onnx"
    fed = save_pool(before, kind, draw_pool(kind, intervals, np.float32))
    report = mx_driving.onnx.fuse(before, after)
    assert (list(report.replaced.values()), report.left) == ([f"a pool {POOLS[kind]}{'::' * bool(POOLS[kind])}{kind}"], {})
    true = run_plugins(before, fed)["output"]
    assert true.any() == (intervals != "none")
    np.testing.assert_allclose(run_form(after, "onnxruntime", fed), true, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("opset", "dtype", "constants"), [(11, np.float32, 1), (13, np.float16, 0), (20, np.float64, 1)])
@pytest.mark.parametrize("kind", ["bev_pool_v2", "QuickCumsumCuda"])
def test_opsets_dtypes_and_constants_of_pools(kind, opset, dtype, constants, tmp_path):
    before, after = tmp_path / "before.onnx", tmp_path / "after.onnx"
    arrays = draw_pool(kind, "runs", dtype)
    indices = [name for name, array in arrays.items() if array.dtype == np.int32]
    fed = save_pool(before, kind, arrays, opset, indices * constants)
    mx_driving.onnx.fuse(before, after)
    true = run_plugins(before, fed)["output"]
    np.testing.assert_allclose(run_form(after, "onnxruntime", fed), true, rtol=0, atol=2e-2 if dtype == np.float16 else 1e-5)


@pytest.mark.parametrize("form", ["onnxruntime", "gather"])
def test_attention_behind_a_pool(form, tmp_path):
    """The file does not say the shape of the pool's output, which attention samples."""
    before, after, attention = (tmp_path / f"{name}.onnx" for name in ("before", "after", "attention"))
    onnx_writings.export(onnx_writings.Stacked(), attention, "older, fixed sizes")
    save_pool(before, "bev_pool_v2", draw_pool("bev_pool_v2", "runs", np.float32), out_height=4, out_width=112)
    model, other = onnx.load(before), onnx.load(attention)
    model.graph.node[-1].output[0] = "cells"
    model.graph.node.append(helper.make_node("Reshape", ["cells", "sizes"], ["v"]))
    model.graph.initializer.append(numpy_helper.from_array(np.array([2, -1, 4, 8]), "sizes"))
    model.graph.node.extend(other.graph.node)
    model.graph.initializer.extend(other.graph.initializer)
    model.graph.input.extend(value for value in other.graph.input if value.name != "v")
    model.graph.output[0].CopyFrom(other.graph.output[0])
    onnx.save(model, before)
    report = mx_driving.onnx.fuse(before, after, form)
    assert (len(report.replaced), len(report.left)) == ((2, 0) if form == "onnxruntime" else (1, 1))


PROBLEMS = {
    "form": ({}, "tensorrt", "pool: it is a pool, mmdeploy::bev_pool_v2, which only the form onnxruntime has"),
    "attributes": ({"output_z": 2, "out_width": 4}, "onnxruntime", "out_width, output_z; the pool has out_height, out_width"),
    "opset": ({"opset": 9}, "onnxruntime", "pools need opset 11 or later"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_pools_that_stay_are_named(name, mx, tmp_path):
    options, form, why = PROBLEMS[name]
    save_pool(tmp_path / "before.onnx", "bev_pool_v2", draw_pool("bev_pool_v2", "runs", np.float32), **options)
    with pytest.raises(ValueError, match=why):
        mx_driving.onnx.fuse(tmp_path / "before.onnx", tmp_path / "after.onnx", form)
    status, _, problem = mx("verify", tmp_path / "before.onnx", "--runtime", "onnxruntime")
    assert (status, "it is a pool, mmdeploy::bev_pool_v2; " in problem) == (2, True)


def test_verify_runs_attention_beside_a_pool(tmp_path):
    """onnxruntime computes the pool by our node, so that the whole file has true outputs."""
    path, pool = tmp_path / "before.onnx", tmp_path / "pool.onnx"
    save(path, MMDEPLOY)
    fed = save_pool(pool, "bev_pool_v2", draw_pool("bev_pool_v2", "any", np.float32))
    model, other = onnx.load(path), onnx.load(pool)
    other.graph.output[0].name = other.graph.node[-1].output[0] = "cells"
    model.graph.node.extend(other.graph.node)
    model.graph.input.extend(other.graph.input)
    model.graph.output.extend(other.graph.output)
    onnx.save(model, path)
    report = check(path, run_plugins, fed | feeds(MMDEPLOY))
    assert report.right
    assert [output.name for output in report.outputs] == ["output", "cells"]
    assert report.left == {"pool": "it is a pool, mmdeploy::bev_pool_v2; attention is verified"}


@pytest.mark.parametrize("form", FUSED_FORMS)
def test_grid_sample_of_onnxruntime_s_domain(form, tmp_path):
    """onnxruntime had it before opset 16."""
    before, after = tmp_path / "before.onnx", tmp_path / "after.onnx"
    onnx_writings.export(onnx_writings.Stacked(), before, "older")
    model = onnx.load(before)
    for node in model.graph.node:
        node.domain = "com.microsoft" * (node.op_type == "GridSample")
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    onnx.save(model, before)
    assert len(mx_driving.onnx.fuse(before, after, form=form).replaced) == 1
    assert "GridSample" not in onnx_writings.kinds(after)
    if form in ("onnxruntime", "gather"):
        arguments = onnx_writings.inputs()
        true = onnx_writings.Stacked()(*(t.double() for t in arguments)).numpy()
        np.testing.assert_allclose(onnx_writings.run(after, arguments), true, rtol=0, atol=2e-6)


def test_a_function_with_a_node_in_it(tmp_path):
    before, after = tmp_path / "before.onnx", tmp_path / "after.onnx"
    kind, domain, attributes, *_ = MMDEPLOY
    save(before, MMDEPLOY)
    true = run_plugins(before, feeds(MMDEPLOY))["output"]
    model = onnx.load(before)
    inner = helper.make_node(kind, list("abcde"), ["o"], domain=domain, **attributes)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(domain, 1)]
    model.functions.append(helper.make_function("local", "Attention", list("abcde"), ["o"], [inner], opsets))
    model.opset_import.append(helper.make_opsetid("local", 1))
    for node in model.graph.node:
        if node.domain == domain:
            node.CopyFrom(helper.make_node("Attention", node.input, node.output, domain="local"))
    onnx.save(model, before)
    assert len(mx_driving.onnx.fuse(before, after).replaced) == 2
    np.testing.assert_allclose(run_form(after, "onnxruntime", feeds(MMDEPLOY)), true, rtol=0, atol=2e-5)
