"""Stand-ins for other libraries' nodes of the operators. They check inputs and dtypes, and compute in float64."""

import pathlib

import numpy as np
import onnx
import onnx.reference
import onnx_nodes
import torch
import truth

import mx_driving.onnx


def _output(value, shapes, starts, locations, weights):
    assert shapes.dtype == starts.dtype == np.int32
    size = (*locations.shape[:2], *value.shape[2:])
    tensors = (value.astype(np.float64), shapes, starts, locations.astype(np.float64), weights.astype(np.float64))
    output = truth.multi_scale_deformable_attn(*tensors, np.zeros((*size[:2], size[2] * size[3]))).results[0]
    return output.reshape(size).astype(value.dtype)


class MultiscaleDeformableAttnPlugin_TRT(onnx.reference.op_run.OpRun):
    """NVIDIA's plugin for TensorRT."""

    op_domain = "trt.plugins"

    def _run(self, value, shapes, starts, locations, weights, plugin_version=None):
        assert value.dtype == locations.dtype == weights.dtype
        assert value.dtype in (np.float32, np.float16)
        return (_output(value, shapes, starts, locations, weights),)


class MultiScaleDeformableAttn(onnx.reference.op_run.OpRun):
    """The vendor's node."""

    op_domain = "npu"

    def _run(self, value, shapes, starts, locations, weights):
        assert value.dtype == locations.dtype == weights.dtype == np.float32
        blocks = _output(value, shapes, starts, locations, weights)
        return (blocks.reshape(*blocks.shape[:2], -1),)


class MultiScaleDeformableAttnTRT(onnx.reference.op_run.OpRun):
    """BEVFormer_tensorrt's plugin: the samples of a level use the reference points in turn; softmax over all samples."""

    op_domain = ""

    def _run(self, value, shapes, references, offsets, logits):
        bs, queries, heads, levels = *references.shape[:2], value.shape[2], len(shapes)
        offsets = offsets.reshape(bs, queries, heads, levels, -1, references.size // (2 * bs * queries), 2).astype(np.float64)
        locations = references.reshape(bs, queries, 1, 1, 1, -1, 2) + offsets / shapes[:, ::-1].reshape(1, 1, 1, -1, 1, 1, 2)
        powers = np.exp(logits.reshape(bs, queries, heads, -1).astype(np.float64))
        weights = (powers / powers.sum(-1, keepdims=True)).reshape(bs, queries, heads, levels, -1)
        starts = np.cumsum([0, *shapes.prod(1)])[:-1].astype(np.int32)
        locations = locations.reshape(*weights.shape, 2)
        return (_output(value, shapes.astype(np.int32), starts, locations, weights),)


class MultiScaleDeformableAttnTRT2(MultiScaleDeformableAttnTRT):
    """The same plugin for pairs of float16."""


class _Joined(onnx.reference.op_run.OpRun):
    """mmdeploy's node for mmcv, and the node of DL4AGX and Autoware. Exporters write tables of int64."""

    def _run(self, value, shapes, starts, locations, weights, im2col_step=None):
        assert value.dtype == locations.dtype == weights.dtype
        blocks = _output(value, shapes.astype(np.int32), starts.astype(np.int32), locations, weights)
        return (blocks.reshape(*blocks.shape[:2], -1),)


class _Aggregation(onnx.reference.op_run.OpRun):
    """Sparse4D's kernel. Exporters name it differently."""

    def _run(self, features, shapes, starts, locations, weights):
        assert shapes.dtype == starts.dtype == np.int32
        tensors = (features.astype(np.float64), shapes, starts, locations.astype(np.float64), weights.astype(np.float64))
        zeros = np.zeros((*locations.shape[:2], features.shape[2]))
        return (truth.deformable_aggregation(*tensors, zeros).results[0].astype(features.dtype),)


class _Pool(onnx.reference.op_run.OpRun):
    """BEVDet's kernel: all points of an interval are added to the cell of its first point."""

    def _run(self, depth, feat, ranks_depth, ranks_feat, ranks_bev, starts, lengths, out_height=None, out_width=None):
        output = np.zeros((out_height * out_width, feat.shape[-1]))
        depth, rows = depth.reshape(-1).astype(np.float64), feat.reshape(-1, feat.shape[-1]).astype(np.float64)
        for start, length in zip(starts, lengths, strict=True):
            for point in range(start, start + length):
                output[ranks_bev[start]] += depth[ranks_depth[point]] * rows[ranks_feat[point]]
        return (output.reshape(1, out_height, out_width, -1).astype(feat.dtype),)


class QuickCumsumCuda(onnx.reference.op_run.OpRun):
    """Autoware's pool. A cell is (row, column, layer, scene)."""

    op_domain = "autoware"

    def _run(self, rows, cells, lengths, starts, batch_size=None, dimension=None, height=None, width=None):
        output = np.zeros((batch_size, dimension, height, width, rows.shape[1]))
        for start, length in zip(starts, lengths, strict=True):
            row, column, layer, scene = cells[start] if length else (0, 0, 0, 0)
            output[scene, layer, row, column] += rows[start : start + length].astype(np.float64).sum(0)
        return (output.astype(rows.dtype),)


def _in_domain(base, name, domain):
    return type(name, (base,), {"op_domain": domain})


AGGREGATES = [
    ("MSDA", "nv"),
    ("DeformableAttentionAggrPlugin", "custom"),
    ("DeformableAttentionAggrPlugin", ""),
    ("DeformableAggregation", "sparsedrivev2"),
    ("DeformableAggregation", "SparseDrive"),
]
PLUGINS = [
    MultiscaleDeformableAttnPlugin_TRT,
    _in_domain(MultiscaleDeformableAttnPlugin_TRT, "MultiscaleDeformableAttnPlugin_TRT", "com.microsoft"),
    MultiScaleDeformableAttn,
    MultiScaleDeformableAttnTRT,
    MultiScaleDeformableAttnTRT2,
    _in_domain(MultiScaleDeformableAttnTRT, "MultiScaleDeformableAttnTRT", "trt.plugins"),
    *(_in_domain(_Joined, "MMCVMultiScaleDeformableAttention", domain) for domain in ("mmdeploy", "")),
    *(_in_domain(_Joined, "MultiScaleDeformableAttentionPlugin", domain) for domain in ("custom_op", "")),
    *(_in_domain(_Aggregation, name, domain) for name, domain in AGGREGATES),
    _in_domain(_Pool, "bev_pool_v2", "mmdeploy"),
    _in_domain(_Pool, "BEVPoolV2TRT", ""),
    _in_domain(_Pool, "BEVPoolV2TRT2", ""),
    QuickCumsumCuda,
]


def run_plugins(path, arrays):
    """Run a file or a model. Return outputs by name."""
    running = onnx.reference.ReferenceEvaluator(str(path) if isinstance(path, pathlib.Path) else path, new_ops=PLUGINS)
    return dict(zip(running.output_names, running.run(None, arrays), strict=True))


def swap_axes(run):
    """Return a runtime that takes x for y in locations and reference points.

    Locations are the array of pairs with the most axes; weights of two points have pairs in their last axis, too.
    """

    def run_swapped(path, arrays):
        most = max((a.ndim for a in arrays.values() if a.shape[-1:] == (2,)), default=0)
        chosen = [n for n, a in arrays.items() if n.startswith("ref") or (a.shape[-1:] == (2,) and a.ndim == most > 4)]
        pairs = {n: arrays[n].reshape(*arrays[n].shape[:-1], -1, 2) for n in chosen}
        return run(path, arrays | {n: pair[..., ::-1].reshape(arrays[n].shape) for n, pair in pairs.items()})

    return run_swapped


def run_form(path, form, arrays):
    """Run a file that `fuse` wrote in a form: stand-ins for nodes of others, our library for our nodes alone."""
    if form in ("npu", "tensorrt"):
        return next(iter(run_plugins(path, arrays).values()))
    library = mx_driving.onnx.library() if form == "onnxruntime" else ""
    return onnx_nodes.session(path, library).run(None, arrays)[0]


def beside_the_nodes(model, *args):
    names = [i.name for i in model.graph.input]
    (output,) = run_plugins(model, dict(zip(names, (a.numpy() for a in args), strict=True))).values()
    return torch.from_numpy(output)
