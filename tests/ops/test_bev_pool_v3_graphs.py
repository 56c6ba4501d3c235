"""The names of bev_pool in graphs: torch.compile, torch.export and ONNX, with the batch and the number of points free."""

import functools

import pytest
import torch
from attention_modules import results
from small_cases import comparisons_of_int64
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from values import Through

import mx_driving
from mx_driving.ops.bev_pool_v3 import BEVPoolV3

C = 4


def v1(feat, geom_feat):
    return mx_driving.bev_pool(feat, geom_feat, 2, 1, 3, 5)


def v2(depth, feat, ranks_depth, ranks_feat, ranks_bev, starts, lengths):
    shape = (depth.shape[0], 1, 3, 5, feat.shape[-1])
    return mx_driving.bev_pool_v2(depth, feat, ranks_depth, ranks_feat, ranks_bev, shape, starts, lengths)


def v3(depth, feat, *ranks):
    return mx_driving.bev_pool_v3(depth, feat, *ranks, (depth.shape[0], 1, 3, 5, feat.shape[-1]))


def voxel_pooling(geom_xyz, input_features):
    return mx_driving.npu_voxel_pooling_train(geom_xyz, input_features, (5, 3, 1))


def lifted(batch, points):
    """Return inputs of v3, sorted by cell, as v2 needs them."""
    depth, feat = torch.rand(batch, 6, 2, 2), torch.randn(batch, 2, 2, C)
    sizes = (depth.numel(), feat.numel() // C, batch * 15)
    of_depth, of_feat, cells = (torch.randint(0, size, (points,)) for size in sizes)
    return depth, feat, of_depth, of_feat, cells.sort().values


def with_intervals(batch, points):
    """Return inputs of v2 without the points of the first cell."""
    *args, cells = lifted(batch, points)
    lengths = cells.unique_consecutive(return_counts=True)[1]
    return *args, cells, (lengths.cumsum(0) - lengths)[1:], lengths[1:]


def places(batch, points):
    """Return inputs of bev_pool for two scenes or one, because its batch is a fixed number."""
    sizes = (3, 5, 1, min(batch, 2))
    return torch.randn(points, C), torch.stack([torch.randint(0, size, (points,)) for size in sizes], 1)


# function -> (make its inputs, the free axes of each input)
B, N, K, P = ({"batch": 0}, {"n": 0}, {"intervals": 0}, {"batch": 0, "n": 1})
CALLS = {
    v1: (places, (N, N)),
    v2: (with_intervals, (B, B, N, N, N, K, K)),
    v3: (lifted, (B, B, N, N, N)),
    voxel_pooling: (lambda batch, points: (torch.randint(-1, 6, (batch, points, 3)), torch.randn(batch, points, C)), (P, P)),
}


class Every(torch.nn.Module):
    """All calls in one graph, which takes less time to make than four graphs."""

    def forward(self, *inputs):
        return tuple(call(*args) for call, args in zip(CALLS, inputs, strict=True))


def inputs_of(batch, points):
    return tuple(make(batch, points) for make, _ in CALLS.values())


def assert_equal(found, inputs):
    assert all(torch.equal(output, expected) for output, expected in zip(found, Every()(*inputs), strict=True))


@functools.cache
def program():
    """Export without Dynamo, because the compiled graph below uses Dynamo."""
    dims = {name: torch.export.Dim(name) for name in ("batch", "n", "intervals")}
    free = tuple(tuple({axis: dims[name] for name, axis in axes.items()} for axes in of_call) for _, of_call in CALLS.values())
    return torch.export.export(Every().eval(), inputs_of(2, 30), dynamic_shapes=(free,), strict=False)


def test_compiled_in_one_graph_for_all_sizes(monkeypatch):
    monkeypatch.setattr(torch._dynamo.config, "capture_dynamic_output_shape_ops", True)  # as fullgraph does
    call = torch.compile(Every(), fullgraph=True, dynamic=True, backend="aot_eager")
    for inputs in (inputs_of(2, 30), inputs_of(2, 19)):
        assert_equal(call(*inputs), inputs)


GRAPHS = {
    "compile": lambda call, inputs: torch.compile(call, fullgraph=True, backend="aot_eager"),
    "export": lambda call, inputs: torch.export.export(call, inputs, strict=True).module(),
}


@pytest.mark.parametrize("graph_of", GRAPHS.values(), ids=GRAPHS)
def test_the_vendors_function_trains_in_a_graph(graph_of):
    """Graphs trace forward and backward of the class, and not its apply."""
    inputs, vendors = lifted(2, 30), Through(lambda *args: BEVPoolV3.apply(*args, (2, 1, 3, 5, C)))
    torch.testing.assert_close(results(graph_of(vendors, inputs), *inputs), results(vendors, *inputs))


def test_exported():
    """test_decompositions.py has the reason why graphs compare no int64 numbers."""
    for inputs in (inputs_of(2, 30), inputs_of(3, 19)):
        assert_equal(program().module()(*inputs), inputs)
    assert comparisons_of_int64(program()) == []


@functools.cache
def session_of(form):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    import onnx_nodes
    import quick_exports  # noqa: F401

    table = mx_driving.onnx.translations(form)
    exported = program.__wrapped__()  # torch can write a program to one file only, and not decompose it any more
    model = torch.onnx.export(exported, dynamo=True, verbose=False, custom_translation_table=table)
    return onnx_nodes.session(model.model_proto, mx_driving.onnx.library())


def run_in_onnxruntime(inputs, form="gather"):
    session, tensors = session_of(form), [t.numpy() for args in inputs for t in args]
    names = [i.name for i in session.get_inputs()]
    return [torch.from_numpy(output) for output in session.run(None, dict(zip(names, tensors, strict=True)))]


@pytest.mark.parametrize("form", ["gather", pytest.param("onnxruntime", marks=pytest.mark.needs("An ONNX file of opset 20"))])
def test_onnx(form):
    """If the batch is free, the sizes of our node are an input, and not attributes."""
    for inputs in (inputs_of(2, 30), inputs_of(3, 19)):
        found = run_in_onnxruntime(inputs, form)
        torch.testing.assert_close(found, [*Every()(*inputs)])
        if form == "onnxruntime":
            assert_equal(found, inputs)


SIZES = [
    ([2, 1, 3, 5], {}, None),
    ([2, 1, 3, 5], {"bs": 7}, None),  # the input overrides the attribute
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
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    import onnx_nodes

    depth, feat, *ranks = lifted(2, 30)
    tensors = [feat.view(-1, C), depth.flatten(), ranks[1], ranks[0], ranks[2]]
    tensors += [] if sizes is None else [torch.tensor(sizes)]
    model = onnx_nodes.model(onnx_nodes.Graph("bev_pool_v3", tuple(str(t.dtype).removeprefix("torch.") for t in tensors)))
    model.graph.node[0].attribute.extend(onnx.helper.make_attribute(name, size) for name, size in attributes.items())
    session, arrays = onnx_nodes.session(model, mx_driving.onnx.library()), [t.numpy() for t in tensors]
    if refusal is None:
        assert torch.equal(torch.from_numpy(onnx_nodes.run(session, arrays)), v3(depth, feat, *ranks))
    else:
        with pytest.raises(Exception, match=refusal):
            onnx_nodes.run(session, arrays)


OUTSIDE = [[-1, 0, 0, 0], [3, 0, 0, 0], [0, 5, 0, 0], [0, -(2**40), 0, 0], [0, 0, 1, 0], [0, 0, 0, 2], [0, 0, 0, -1]]


def test_a_place_outside_is_in_no_cell_of_a_file():
    """-1 does not count from the end, and the point's NaN enters no cell."""
    feat, inside = places(2, 9)
    everything = torch.cat([feat, torch.full((len(OUTSIDE), C), torch.nan)]), torch.cat([inside, torch.tensor(OUTSIDE)])
    found = run_in_onnxruntime((everything, *inputs_of(2, 16)[1:]))
    torch.testing.assert_close(found[0], v1(feat, inside))
    with pytest.raises(ValueError, match=r"^geom_feat\[9\] must lie in "):
        v1(*everything)


@pytest.mark.parametrize("change", [{5: -1}, {6: 2}], ids=["starts", "lengths"])
def test_an_exported_interval_beyond_the_points(change):
    """The graph has an assertion in place of the public function's check."""
    call, (first, second, *others) = program().module(), inputs_of(2, 30)
    second = [t + change.get(place, 0) * 10**6 for place, t in enumerate(second)]
    with pytest.raises(RuntimeError, match="interval_starts and interval_lengths must lie within the points"):
        call(first, tuple(second), *others)


STARTS_OF_ENTRIES = torch.tensor([[0, 2, 4], [0, 1, 3], [2, 2, 0]])  # entries of a batch; intervals may overlap
LENGTHS_OF_ENTRIES = torch.tensor([[2, 2, 3], [1, 0, 2], [5, 1, 0]])
POOLED = torch.rand(6, dtype=torch.float64), torch.rand(4, 3, dtype=torch.float64), torch.randint(0, 6, (7,))
TO_CELLS = torch.randint(0, 4, (7,)), torch.tensor([0, 0, 1, 1, 2, 3, 3])


def pool_intervals(depth, starts, lengths):
    return mx_driving.bev_pool_v2(depth, *POOLED[1:], *TO_CELLS, (2, 1, 1, 2, 3), starts, lengths)


@pytest.mark.parametrize("of", ["output", "gradient"])
@pytest.mark.parametrize("dims", [(0, 0), (0, None), (None, 0)])
def test_intervals_are_vmapped(dims, of):
    """Entries differ in the number of points."""
    call = pool_intervals if of == "output" else torch.func.grad(lambda *args: pool_intervals(*args).sin().sum())
    tables = [t if dim == 0 else t[0] for t, dim in zip((STARTS_OF_ENTRIES[:2], LENGTHS_OF_ENTRIES[:2]), dims, strict=True)]
    pairs = [[t[i] if dim == 0 else t for t, dim in zip(tables, dims, strict=True)] for i in range(2)]
    expected = torch.stack([call(POOLED[0], *pair) for pair in pairs])
    assert torch.equal(torch.func.vmap(call, (None, *dims))(POOLED[0], *tables), expected)
    nested = torch.func.vmap(torch.func.vmap(call, (None, *dims)), (None, *dims))
    batched = (t if dim is None else t[None] for t, dim in zip(tables, dims, strict=True))
    assert torch.equal(nested(POOLED[0], *batched)[0], expected)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_traced_graph_asserts_that_intervals_are_right(mode):
    call = lambda *args: mx_driving.bev_pool_v2(*args[:5], (2, 1, 1, 2, 3), *args[5:])  # noqa: E731
    args = (*POOLED, *TO_CELLS, STARTS_OF_ENTRIES[0], LENGTHS_OF_ENTRIES[0])
    graph = make_fx(call, tracing_mode=mode)(*args)
    assert torch.equal(graph(*args), call(*args))
    with pytest.raises(RuntimeError, match="interval_starts and interval_lengths must lie within the points"):
        graph(*args[:-1], LENGTHS_OF_ENTRIES[0] + 5)


def test_intervals_of_linearized_calls_and_of_fake_tensors():
    call = lambda depth: pool_intervals(depth, STARTS_OF_ENTRIES[0], LENGTHS_OF_ENTRIES[0])  # noqa: E731
    out, tangent = torch.func.linearize(call, POOLED[0])
    torch.testing.assert_close((out, tangent(POOLED[0])), (call(POOLED[0]),) * 2)  # it is linear in depth
    shapes = ShapeEnv(allow_dynamic_output_shape_ops=True)
    with FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True) as mode:
        tables = [mode.from_tensor(t[0]) for t in (STARTS_OF_ENTRIES, LENGTHS_OF_ENTRIES)]
        assert pool_intervals(POOLED[0], *tables).shape == (2, 3, 1, 1, 2)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("base", [torch.int32, torch.int64])
@pytest.mark.parametrize("trace", [torch.jit.trace, lambda call, args: make_fx(call)(*args)], ids=["jit", "fx"])
@pytest.mark.parametrize("call", CALLS)
def test_a_traced_graph_called_with_other_dtypes_of_places(call, trace, base):
    """In such a graph only the kernel checks dtypes."""
    args = [t if t.is_floating_point() else t.clamp(min=0, max=4) for t in CALLS[call][0](2, 30)]
    integers = [i for i, t in enumerate(args) if not t.is_floating_point()]
    graph = trace(call, tuple(t.to(base) if i in integers else t for i, t in enumerate(args)))
    for i in integers:
        for dtype in (torch.int32, torch.int64):
            assert torch.equal(graph(*args[:i], args[i].to(dtype), *args[i + 1 :]), call(*args))
        for dtype in (torch.float32, torch.bfloat16, torch.complex64):
            with pytest.raises((RuntimeError, ValueError, TypeError, IndexError)):
                graph(*args[:i], args[i].to(dtype), *args[i + 1 :])


@pytest.mark.parametrize("dims", [(0, 0), (0, None), (1, None)])
def test_voxels_are_vmapped(dims):
    """Entries differ in the number of points in the grid. A point outside adds nothing, not even NaN."""
    geometry, features = torch.randint(-1, 6, (2, 2, 9, 3)), torch.randn(2, 2, 9, C, dtype=torch.float64)
    features = features.masked_fill((geometry.select(-1, 2) != 0)[..., None], torch.nan) if dims == (0, 0) else features[0]
    entries = [(geometry.select(dims[0], i), features[i] if dims[1] == 0 else features) for i in range(2)]
    for call in (voxel_pooling, torch.func.grad(lambda g, f: voxel_pooling(g, f).square().sum(), argnums=1)):
        assert torch.equal(torch.func.vmap(call, dims)(geometry, features), torch.stack([call(*entry) for entry in entries]))
