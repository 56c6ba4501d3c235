"""ONNX files with nodes that other libraries write for the operators. onnx_stand_ins.py runs them."""

import functools
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import helper, numpy_helper

TABLES, STEP = ("value", "shapes", "level_starts"), {"im2col_step": 64}
FORK = "MultiScaleDeformableAttnTRT"  # BEVFormer_tensorrt's plugin; a fork of it has the operator's five inputs
SHAPES = {
    **{"value": (2, 42, 4, 8), "l": (2, 7, 4, 2, 3, 2), "w": (2, 7, 4, 2, 3)},
    **{"references": (2, 7, 1, 4), "offsets": (2, 7, 4 * 2 * 4 * 2), "logits": (2, 7, 4, 2 * 4)},
}


class Node(NamedTuple):
    """A library's node of attention."""

    kind: str
    domain: str = ""
    attributes: dict[str, Any] = {}  # noqa: RUF012
    table: type = np.int64
    inputs: tuple[str, ...] = (*TABLES, "l", "w")


NVIDIA = Node("MultiscaleDeformableAttnPlugin_TRT", "com.microsoft", {"plugin_version": "2"}, np.int32)
MMDEPLOY = Node("MMCVMultiScaleDeformableAttention", "mmdeploy", STEP)
DL4AGX = Node("MultiScaleDeformableAttentionPlugin", "custom_op", STEP)
PLUGIN = Node(FORK, inputs=(*TABLES[:2], "references", "offsets", "logits"))
KINDS = {
    "mmdeploy": MMDEPLOY,
    "mmdeploy without a domain": MMDEPLOY._replace(domain=""),
    "DL4AGX": DL4AGX,
    "Autoware": Node("MultiScaleDeformableAttentionPlugin"),
    "NVIDIA in onnxruntime's domain": NVIDIA,
    "BEVFormer_tensorrt": PLUGIN,
    "BEVFormer_tensorrt, pairs of float16": PLUGIN._replace(kind=FORK + "2"),
    "BEVFormer_tensorrt with a domain": PLUGIN._replace(domain="trt.plugins", table=np.int32),
}


def _write(path, nodes, inputs, output, tables, domain, opset=17, batch=None):
    """Write a graph. The output has the shape `output`, and the dtype of the first input. `batch` names the first axes."""

    def describe(name, shape, dtype):
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(dtype), [batch or shape[0], *shape[1:]])

    infos = [describe(name, array.shape, array.dtype) for name, array in inputs.items()]
    output = describe("output", output, next(iter(inputs.values())).dtype)
    opsets = [helper.make_opsetid("", opset), *([helper.make_opsetid(domain, 1)] if domain else [])]
    initializers = [numpy_helper.from_array(array, name) for name, array in tables.items()]
    graph = helper.make_graph(nodes, "graph", infos, [output], initializers)
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)


def feeds(node, dtype=np.float32):
    random = np.random.default_rng(0)
    return {name: (random.random(SHAPES[name]) * 1.4 - 0.2).astype(dtype) for name in node.inputs if name in SHAPES}


def save(path, node, dtype=np.float32):
    """Write two layers of attention, as exporters do: no tensor between them has a shape."""
    arrays, moved = feeds(node, dtype), node.inputs[3]
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
    _write(path, nodes, arrays, (2, 7, 32), tables, node.domain, batch="b")


def save_aggregation(path, kind, domain, dtype=np.float32):
    """Write two layers of aggregation. Return inputs with locations on pictures, on their borders, and outside."""
    random = np.random.default_rng(0)
    shapes = np.array([[[4, 6], [2, 3]], [[5, 3], [1, 2]], [[4, 6], [2, 3]]], np.int32)
    starts = (np.cumsum(shapes.prod(-1)) - shapes.prod(-1).reshape(-1)).reshape(3, 2).astype(np.int32)
    locations = random.random((2, 5, 4, 3, 2)) * 1.4 - 0.2
    locations[0, 0, :, 0, 0] = 0, 1, -0.01, 1.01
    fed = {"f": random.random((2, int(shapes.prod(-1).sum()), 8)), "l": locations, "w": random.random((2, 5, 4, 3, 2, 4))}
    fed = {name: array.astype(dtype) for name, array in fed.items()}
    tables = {"shapes": shapes, "starts": starts, "matrix": random.random((8, 96)).astype(dtype)}
    tables["sizes"] = np.array([0, 0, *fed["w"].shape[2:]])
    make = functools.partial(helper.make_node, kind, domain=domain)
    nodes = [
        make(["f", "shapes", "starts", "l", "w"], ["first"], name="first"),
        helper.make_node("MatMul", ["first", "matrix"], ["rows"]),
        helper.make_node("Reshape", ["rows", "sizes"], ["again"]),
        make(["f", "shapes", "starts", "l", "again"], ["output"], name="second"),
    ]
    _write(path, nodes, fed, (2, 5, 8), tables, domain, batch="b")
    return fed


POOLS = {"bev_pool_v2": "mmdeploy", "BEVPoolV2TRT": "", "BEVPoolV2TRT2": "", "QuickCumsumCuda": "autoware"}
SIZES = {"batch_size": 2, "dimension": 3, "height": 4, "width": 5}
POINTS = 60


def draw_intervals(name):
    """Return starts and lengths: runs of one cell, as BEVDet makes them; or intervals that skip or share points; or none."""
    random = np.random.default_rng(0)
    if name == "runs":
        starts = np.unique(np.sort(random.choice(POINTS, 20, replace=False)) * (np.arange(20) > 0))
        return starts, np.diff([*starts, POINTS])
    starts = random.permutation(40)[: 0 if name == "none" else 20]
    return starts, random.integers(0, 5, len(starts))


def draw_pool(kind, intervals, dtype=np.float32):
    random = np.random.default_rng(1)
    starts, lengths = (array.astype(np.int32) for array in draw_intervals(intervals))
    if kind == "QuickCumsumCuda":
        rows = random.standard_normal((POINTS, 6)).astype(dtype)
        axes = ("height", "width", "dimension", "batch_size")
        cells = np.stack([random.integers(0, SIZES[axis], POINTS) for axis in axes], 1)
        return {"rows": rows, "cells": cells.astype(np.int32), "lengths": lengths, "starts": starts}
    depth, feat = random.random((2, 4, 3, 5)).astype(dtype), random.standard_normal((2, 3, 5, 6)).astype(dtype)
    ranks = {"depth": depth.size, "feat": 30, "bev": 20}
    ranks = {f"ranks_{name}": random.integers(0, most, POINTS).astype(np.int32) for name, most in ranks.items()}
    return {"depth": depth, "feat": feat, **ranks, "starts": starts, "lengths": lengths}


def save_pool(path, kind, arrays, opset=17, constants=(), **attributes):
    """Write a pool. Return the arrays that are inputs; `constants` are in the file."""
    attributes = attributes or (SIZES if kind == "QuickCumsumCuda" else {"out_height": 4, "out_width": 5})
    fed = {name: array for name, array in arrays.items() if name not in constants}
    nodes = [helper.make_node(kind, list(arrays), ["pool"], domain=POOLS[kind], **attributes)]
    nodes += [helper.make_node("Relu", ["pool"], ["output"])]
    shape = (2, 3, 4, 5, 6) if kind == "QuickCumsumCuda" else (1, 4, 5, 6)
    _write(path, nodes, fed, shape, {name: arrays[name] for name in constants}, POOLS[kind], opset)
    return fed
