"""The names of bev_pool in graphs: torch.compile, torch.export and ONNX, with the batch and the number of points free."""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest
import torch

import mx_driving
from mx_driving.ops.bev_pool_v3 import BEVPoolV3

C = 4


class Call(torch.nn.Module):
    def forward(self, *args):
        raise NotImplementedError


class V1(Call):
    def forward(self, feat, geom_feat):
        return mx_driving.bev_pool(feat, geom_feat, 2, 1, 3, 5)


class V2(Call):
    def forward(self, depth, feat, ranks_depth, ranks_feat, ranks_bev, starts, lengths):
        shape = (depth.shape[0], 1, 3, 5, feat.shape[-1])
        return mx_driving.bev_pool_v2(depth, feat, ranks_depth, ranks_feat, ranks_bev, shape, starts, lengths)


class V3(Call):
    def forward(self, depth, feat, ranks_depth, ranks_feat, ranks_bev):
        return mx_driving.bev_pool_v3(
            depth, feat, ranks_depth, ranks_feat, ranks_bev, (depth.shape[0], 1, 3, 5, feat.shape[-1])
        )


class Voxels(Call):
    def forward(self, geom_xyz, input_features):
        return mx_driving.npu_voxel_pooling_train(geom_xyz, input_features, (5, 3, 1))


def lifted(batch, points):
    """What v3 takes; sorted by cell, as v2 takes it."""
    depth, feat = torch.rand(batch, 6, 2, 2), torch.randn(batch, 2, 2, C)
    sizes = (depth.numel(), feat.numel() // C, batch * 15)
    of_depth, of_feat, cells = (torch.randint(0, size, (points,)) for size in sizes)
    return depth, feat, of_depth, of_feat, cells.sort().values


def with_intervals(batch, points):
    """All points but those of the first cell."""
    *args, cells = lifted(batch, points)
    lengths = cells.unique_consecutive(return_counts=True)[1]
    return *args, cells, (lengths.cumsum(0) - lengths)[1:], lengths[1:]


def places(batch, points):
    return torch.randn(points, C), torch.stack([torch.randint(0, size, (points,)) for size in (3, 5, 1, batch)], 1)


def voxels(batch, points):
    return torch.randint(-1, 6, (batch, points, 3)), torch.randn(batch, points, C)


class Case(NamedTuple):
    call: type[Call]
    inputs: object
    free: tuple  # of each input, the axes that are free


B, N, K, P = ({"batch": 0}, {"n": 0}, {"intervals": 0}, {"batch": 0, "n": 1})
CASES = [
    Case(V1, places, (N, N)),
    Case(V2, with_intervals, (B, B, N, N, N, K, K)),
    Case(V3, lifted, (B, B, N, N, N)),
    Case(Voxels, voxels, (P, P)),
]
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.call.__name__)


def exported(case, export, **options):
    dims = {name: torch.export.Dim(name) for axes in case.free for name in axes}
    free = tuple({axis: dims[name] for name, axis in axes.items()} for axes in case.free)
    return export(case.call().eval(), case.inputs(2, 30), dynamic_shapes=free, **options)


@cases
def test_compiled_in_one_graph_for_all_sizes(case, monkeypatch):
    monkeypatch.setattr(torch._dynamo.config, "capture_dynamic_output_shape_ops", True)  # as fullgraph does
    torch._dynamo.reset()
    call = torch.compile(case.call(), fullgraph=True, dynamic=True, backend="aot_eager")
    for inputs in (case.inputs(2, 30), case.inputs(2, 19)):
        assert torch.equal(call(*inputs), case.call()(*inputs))


class Vendors(Call):
    def forward(self, *args):
        return BEVPoolV3.apply(*args, (2, 1, 3, 5, C))


def compiled(call, inputs):
    torch._dynamo.reset()
    return torch.compile(call, fullgraph=True, backend="aot_eager")


def strictly_exported(call, inputs):
    return torch.export.export(call, inputs, strict=True).module()


@pytest.mark.parametrize("graph_of", [compiled, strictly_exported])
def test_the_vendors_function_trains_in_a_graph(graph_of):
    """Its forward and backward, which graphs are made of instead of its apply."""
    inputs, gradients = lifted(2, 30), []
    for run in (Vendors(), graph_of(Vendors(), inputs)):
        leaves = [t.clone().requires_grad_() for t in inputs[:2]]
        run(*leaves, *inputs[2:]).square().sum().backward()
        gradients.append([t.grad for t in leaves])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("strict", [False, True])
@cases
def test_exported(case, strict):
    call = exported(case, torch.export.export, strict=strict).module()
    for inputs in (case.inputs(2, 30), case.inputs(1 if case.call is V1 else 3, 19)):
        assert torch.equal(call(*inputs), case.call()(*inputs))


@functools.cache
def session_of(call, form):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    import quick_exports  # noqa: F401

    case = next(case for case in CASES if case.call is call)
    table = mx_driving.onnx.translations(form)
    model = exported(case, torch.onnx.export, dynamo=True, verbose=False, custom_translation_table=table).model_proto
    return session_with_our_nodes(runtime, model)


def session_with_our_nodes(runtime, model):
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(mx_driving.onnx.library())
    return runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run_in_onnxruntime(call, inputs, form="gather"):
    session = session_of(call, form)
    names = [i.name for i in session.get_inputs()]
    (output,) = session.run(None, {name: t.numpy() for name, t in zip(names, inputs, strict=True)})
    return torch.from_numpy(output)


@cases
def test_onnx(case):
    for inputs in (case.inputs(2, 30), case.inputs(1 if case.call is V1 else 3, 19)):
        torch.testing.assert_close(run_in_onnxruntime(case.call, inputs), case.call()(*inputs))


@pytest.mark.parametrize("case", CASES[1:], ids=lambda case: case.call.__name__)
def test_our_node_has_a_free_batch(case):
    """The sizes, which are attributes otherwise, are an input."""
    for inputs in (case.inputs(2, 30), case.inputs(3, 19)):
        assert torch.equal(run_in_onnxruntime(case.call, inputs, "onnxruntime"), case.call()(*inputs))


SIZES = [
    ([2, 1, 3, 5], {}, None),
    ([2, 1, 3, 5], {"bs": 7}, None),  # the input is used where there is one
    (None, {"bs": 2, "d": 1, "h": 3, "w": 5}, None),
    (None, {"bs": 2, "d": 1, "h": 3}, "w must be a whole number, an attribute or an element of sizes; got none"),
    ([2, 1, -3, 5], {}, "h must be a whole number, an attribute or an element of sizes; got -3"),
    ([2, 1, 3], {}, r"sizes must have dtype int64 and shape \(4,\); got int64 and \(3,\)"),
    ([[2, 1, 3, 5]], {}, r"sizes must have dtype int64 and shape \(4,\); got int64 and \(1, 4\)"),
    ([2.0, 1, 3, 5], {}, r"sizes must have dtype int64 and shape \(4,\); got float32 and \(4,\)"),
    ([2**40, 2**40, 3, 5], {}, r"output must have fewer than 2\*\*48 elements; got "),
]


@pytest.mark.parametrize(("sizes", "attributes", "refusal"), SIZES)
def test_the_sizes_of_our_node(sizes, attributes, refusal):
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    helper = onnx.helper
    depth, feat, *ranks = lifted(2, 30)
    tensors = dict(zip("abcde", (feat.view(-1, C), depth.flatten(), ranks[1], ranks[0], ranks[2]), strict=True))
    tensors |= {} if sizes is None else {"sizes": torch.tensor(sizes)}
    node = helper.make_node("bev_pool_v3", list(tensors), ["y"], domain="mx_driving", **attributes)
    kinds = {torch.float32: onnx.TensorProto.FLOAT, torch.int64: onnx.TensorProto.INT64}
    inputs = [helper.make_tensor_value_info(n, kinds[t.dtype], list(t.shape)) for n, t in tensors.items()]
    outputs = [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("mx_driving", 1)]
    model = helper.make_model(helper.make_graph([node], "g", inputs, outputs), opset_imports=opsets, ir_version=10)
    session = session_with_our_nodes(runtime, model)
    feeds = {name: t.numpy() for name, t in tensors.items()}
    if refusal is None:
        assert torch.equal(torch.from_numpy(session.run(None, feeds)[0]), V3()(depth, feat, *ranks))
    else:
        with pytest.raises(Exception, match=refusal):
            session.run(None, feeds)


OUTSIDE = [[-1, 0, 0, 0], [3, 0, 0, 0], [0, 5, 0, 0], [0, -(2**40), 0, 0], [0, 0, 1, 0], [0, 0, 0, 2], [0, 0, 0, -1]]


def test_a_place_outside_is_in_no_cell_of_a_file():
    """It is not in the last one, as if -1 counted from the end; its NaN is in none, either."""
    feat, inside = places(2, 9)
    everything = torch.cat([feat, torch.full((len(OUTSIDE), C), torch.nan)]), torch.cat([inside, torch.tensor(OUTSIDE)])
    torch.testing.assert_close(run_in_onnxruntime(V1, everything), V1()(feat, inside))
    with pytest.raises(ValueError, match=r"^geom_feat\[9\] must lie in "):
        V1()(*everything)


def test_other_forms_have_no_node_of_a_pool():
    """They are written as the default form is."""
    pytest.importorskip("onnxscript")
    for form in set(mx_driving.onnx.FORMS) - {"onnxruntime"}:
        assert torch.ops.mx_driving.bev_pool_v3.default not in mx_driving.onnx.translations(form)


@pytest.mark.parametrize("change", [{5: -1}, {6: 2}], ids=["starts", "lengths"])
def test_an_exported_interval_beyond_the_points(change):
    """The graph asserts what the public function says in a sentence."""
    call, inputs = exported(CASES[1], torch.export.export).module(), list(with_intervals(2, 30))
    for place, by in change.items():
        inputs[place] = inputs[place] + by * (10**6)
    with pytest.raises(RuntimeError, match="interval_starts and interval_lengths must lie within the points"):
        call(*inputs)
