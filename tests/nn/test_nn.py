"""The modules: numbers and gradients against published.py, checkpoint names, initialisation, errors, compilation."""

import copy

import published
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from values import Through

import mx_driving
from mx_driving import nn
from mx_driving.nn import spatial_cross_attention

SIZES = [(9, 7), (5, 4), (3, 2)]


def randomise(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Draw all parameters but fix_scale, which are zero at first, and convert the module to float64."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "fix_scale" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module.double()


def pyramid(channels: int, bs: int = 2, seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    maps = [torch.randn(bs, channels, *size, generator=generator, dtype=torch.float64) for size in SIZES]
    return nn.flatten_levels(maps)


def rand(*shape: int, seed: int = 2) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_same(module, inputs, writing):
    """Compare outputs, and gradients of all parameters and floating inputs, in float64, where only rounding may differ."""
    leaves = [i.requires_grad_() for i in inputs if i is not None and i.is_floating_point()]
    parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
    wanted = [*leaves, *parameters.values()]
    got, true = module(*inputs), writing({**dict(module.named_parameters())}, *inputs)
    torch.testing.assert_close(got, true, rtol=1e-11, atol=1e-11)
    g = torch.randn(got.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    ours = torch.autograd.grad(got, wanted, g, allow_unused=True)
    theirs = torch.autograd.grad(true, wanted, g, allow_unused=True)
    names = [*(f"input {i}" for i in range(len(leaves))), *parameters]
    for name, a, b in zip(names, ours, theirs, strict=True):
        if a is None or b is None:  # one has no gradient where the other has zeros
            assert all(g is None or not g.any() for g in (a, b)), name
        else:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("numbers", [2, 4])
@pytest.mark.parametrize("padded", [False, True])
def test_multi_scale(numbers, padded):
    module = randomise(nn.MultiScaleDeformableAttention(24, num_heads=3, num_levels=3, num_points=2))
    value, shapes, starts = pyramid(24)
    padding = rand(2, value.shape[1], seed=9) < 0.3 if padded else None
    inputs = (rand(2, 11, 24), rand(2, 11, 3, numbers, seed=5) * 1.2 - 0.1, value, shapes, starts, padding)
    assert_same(module, inputs, lambda state, *a: published.multi_scale(state, (3, 3, 2), *a))


@pytest.mark.parametrize(("numbers", "first"), [(2, False), (4, False), (2, True)])
def test_temporal(numbers, first):
    """`first`: there is no previous map."""
    module = randomise(nn.TemporalSelfAttention(24, num_heads=3, num_levels=3, num_points=2)).eval()
    value, shapes, starts = pyramid(24, bs=4)
    query, pos = rand(2, value.shape[1], 24), rand(2, value.shape[1], 24, seed=4)
    reference = rand(2, 2, value.shape[1], 3, numbers, seed=5) * 1.2 - 0.1
    inputs = (query, reference, None if first else value.unflatten(0, (2, 2)), shapes, starts, pos)
    assert_same(module, inputs, lambda state, *a: published.temporal(state, (3, 3, 2), *a))


def test_temporal_without_gradients_and_near_the_end_of_float16():
    """The mean of both maps is then taken in place. Their sum would be infinite."""
    module = nn.TemporalSelfAttention(16, 2, 1, 2).half().eval()
    module.load_state_dict({name: torch.zeros_like(t) for name, t in module.state_dict().items()})
    with torch.no_grad():
        module.value_proj.bias.fill_(60000)
        module.output_proj.weight.copy_(torch.eye(16))
    maps, shapes, starts = pyramid(16, bs=2)
    maps, shapes, starts = maps[:, : int(shapes[0].prod())].half(), shapes[:1], starts[:1]
    query = torch.zeros_like(maps[:1])
    args = (query, torch.full((1, 2, query.shape[1], 1, 2), 0.5).half(), maps[None], shapes, starts)
    with torch.no_grad():
        found = module(*args)
    assert torch.equal(found, torch.full_like(query, 60000))
    assert torch.equal(module(*args), found)


def pillars(bs: int, cams: int, queries: int, heights: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return reference points and a mask. Cameras see different queries; one camera sees none; no camera sees query 3."""
    reference = rand(bs, cams, queries, heights, 2, seed=5) * 2 - 0.5
    mask = ((reference > 0) & (reference < 1)).all(-1) & (rand(bs, cams, queries, 1, seed=6) < 0.6)
    mask[-1, 1], mask[:, :, 3] = False, False
    return reference, mask


def spatial(bs: int = 2, queries: int = 11) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Return a module for three cameras, and its inputs without positions."""
    module = randomise(nn.SpatialCrossAttention(24, num_heads=3, num_levels=3, num_points=4)).eval()
    value, shapes, starts = pyramid(24, bs=bs * 3)
    reference, mask = pillars(bs, 3, queries, 2)
    return module, (rand(bs, queries, 24), reference, value.unflatten(0, (bs, 3)), shapes, starts, mask)


@pytest.mark.parametrize("positions", [False, True])
def test_spatial(positions):
    module, inputs = spatial()
    mask = inputs[-1]
    counts = mask.any(-1).sum(2)
    assert counts.unique().numel() > 3
    assert counts[1, 1] == 0
    assert mask.any(-1).sum(1).max() > 1
    inputs = (*inputs, rand(2, 11, 24, seed=4) if positions else None)
    assert_same(module, inputs, lambda state, *a: published.spatial(state, (3, 3, 4), *a))


# Cameras see 3, 7, 2, 3, 0 and 1 queries. A query has 108 offsets and logits.
@pytest.mark.parametrize(("most", "groups"), [(1, [3, 7, 2, 3, 0, 1]), (14 * 108, [10, 5, 1]), (10**6, [16])])
def test_spatial_in_groups_of_cameras(most, groups, monkeypatch):
    """Groups of cameras pass the layers together, and do not change results. A hook runs once for each group."""
    (module, args), asked = spatial(), []
    module.deformable_attention.register_forward_hook(lambda _module, inputs, _outputs: asked.append(inputs[0].shape[1]))
    monkeypatch.setattr(spatial_cross_attention, "_TOGETHER", most)
    found = module(*args)
    assert asked == groups
    torch.testing.assert_close(found, published.spatial(dict(module.named_parameters()), (3, 3, 4), *args, None))


def exported(module, inputs):
    axes = ({0: "bs", 1: "q"}, {0: "bs", 2: "q"}, {0: "bs"}, None, None, {0: "bs", 2: "q"})
    free = tuple(axis and dict.fromkeys(axis, torch.export.Dim.DYNAMIC) for axis in axes)
    return torch.export.export(module, inputs, dynamic_shapes=free).module()


# Example and call differ in batch, in queries, and in the cameras that see them.
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "graph_of", [pytest.param(exported, marks=pytest.mark.needs("A program with free sizes, of a module")), torch.jit.trace]
)
def test_spatial_in_a_graph(graph_of):
    module, example = spatial()
    graph = graph_of(module, example)
    for sizes in ((2, 11), (3, 17)):
        inputs = spatial(*sizes)[1]
        expected = published.spatial(dict(module.named_parameters()), (3, 3, 4), *inputs, None)
        torch.testing.assert_close(graph(*inputs), expected)


def test_spatial_where_nobody_can_count_what_a_camera_sees():
    """The numbers in masks are unknown in graphs of make_fx, under vmap, and in fake tensors."""
    module, inputs = spatial()
    *others, mask = inputs
    masks = torch.stack([mask, mask.roll(1, 1), mask.roll(3, 2)])
    expected = torch.stack([module(*others, mask) for mask in masks])
    for mode in ("real", "fake"):
        graph = make_fx(lambda mask: module(*others, mask), tracing_mode=mode, _allow_non_fake_inputs=True)(mask)
        torch.testing.assert_close(graph(masks[2]), expected[2])
    torch.testing.assert_close(torch.vmap(lambda mask: module(*others, mask))(masks), expected)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert module(*others, mode.from_tensor(mask)).shape == expected[0].shape


@pytest.mark.parametrize(("bs", "queries"), [(0, 5), (2, 0)])
def test_spatial_without_a_scene_or_a_query_on_the_meta_device(bs, queries):
    module = nn.SpatialCrossAttention(8, 2, 3, 2)
    _, shapes, starts = pyramid(8)
    reference, mask = torch.zeros(bs, 2, queries, 2, 2), torch.zeros(bs, 2, queries, 2, dtype=torch.bool)
    args = (torch.zeros(bs, queries, 8), reference, torch.zeros(bs, 2, 89, 8), shapes, starts, mask)
    assert module.to("meta")(*(t.to("meta") for t in args)).shape == (bs, queries, 8)


def test_pictures_with_their_own_numbers_of_queries_also_in_one_graph():
    module = randomise(nn.MSDeformableAttention3D(24, num_heads=3, num_levels=3, num_points=4))
    value, shapes, starts = pyramid(24, bs=3)
    query, reference = rand(1, 9, 24), rand(1, 9, 2, 2, seed=5)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    for call, counts in ((module, [4, 0, 5]), (compiled, [4, 2, 3]), (compiled, [3, 2, 4])):
        found = call(query, reference, value, shapes, starts, counts)
        for one, q, r, v in zip(found, query.split(counts, 1), reference.split(counts, 1), value.split(1), strict=True):
            torch.testing.assert_close(one, module(q, r, v, shapes, starts))


def test_spatial_without_a_visible_query():
    """The output is the projection of zero. Gradients are zero and not None, so that all processes have them."""
    module = randomise(nn.SpatialCrossAttention(8, 2, 3, 2)).eval()
    value, shapes, starts = pyramid(8, bs=2)
    reference, mask = pillars(1, 2, 5, 2)
    query = rand(1, 5, 8)
    output = module(query, reference, value[None], shapes, starts, torch.zeros_like(mask))
    torch.testing.assert_close(output, query + module.output_proj.bias)
    assert not any(found.any() for found in torch.autograd.grad(output.sum(), list(module.deformable_attention.parameters())))


@pytest.mark.parametrize(("kernel_size", "dilation", "padded"), [((3, 5), 1, False), ((2, 3), 2, True), ((1, 1), 1, False)])
def test_geometric(kernel_size, dilation, padded):
    module = randomise(nn.GeometricKernelAttention(24, 4, 3, kernel_size, dilation))
    value, shapes, starts = pyramid(24)
    padding = rand(2, value.shape[1], seed=9) < 0.3 if padded else None
    inputs = (rand(2, 11, 24), rand(2, 11, 4, 2, seed=5) * 1.4 - 0.2, value, shapes, starts, padding)
    assert_same(module, inputs, lambda state, *a: published.geometric(state, (4, 3, kernel_size, dilation), *a))


def test_geometric_window_order():
    """Points (x, y) are ordered column by column, as by MapTR's meshgrid."""
    module = nn.GeometricKernelAttention(8, 1, kernel_size=(3, 2), dilation=2)
    assert module.grid_offsets.tolist() == [[-2, -2], [-2, 0], [-2, 2], [0, -2], [0, 0], [0, 2]]


def cameras(bs: int = 2, cams: int = 3, seed: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Cameras at the origin that look around: projections to pixels of pictures of 80 x 60, and their sizes."""
    matrices = []
    for c in range(bs * cams):
        angle = torch.tensor(2 * torch.pi * c / cams + 0.1 * seed, dtype=torch.float64)
        forward = torch.stack([angle.cos(), angle.sin()])
        rows = torch.zeros(4, 4, dtype=torch.float64)
        rows[2, :2] = forward
        rows[0, :2] = 40 * forward + 50 * torch.stack([forward[1], -forward[0]])
        rows[1, :2] = 30 * forward
        rows[1, 2], rows[2, 3], rows[3, 3] = -50, 0.4, 1
        matrices.append(rows)
    wh = torch.tensor([80.0, 60.0], dtype=torch.float64).expand(bs, cams, 2).clone()
    return torch.stack(matrices).view(bs, cams, 4, 4), wh


@pytest.mark.parametrize("mode", ["cat", "add"])
@pytest.mark.parametrize(("camera_embed", "learnable"), [(True, 3), (True, 0), (False, 2)])
def test_aggregation(mode, camera_embed, learnable):
    options = {"num_learnable_pts": learnable, "use_camera_embed": camera_embed, "residual_mode": mode}
    module = randomise(nn.DeformableFeatureAggregation(16, 4, 2, 3, **options)).eval()
    projection, wh = cameras()
    maps = [torch.randn(2, 3, 16, *s, generator=torch.Generator().manual_seed(8), dtype=torch.float64) for s in SIZES[:2]]
    yaw = rand(2, 6, seed=6) * 6.28
    anchor = torch.cat([rand(2, 6, 3) * 10 - 5, rand(2, 6, 3, seed=7), yaw.sin()[..., None], yaw.cos()[..., None]], -1)
    anchor = torch.cat([anchor, rand(2, 6, 3)], -1)  # velocities are not read
    inputs = (rand(2, 6, 16), anchor, rand(2, 6, 16, seed=3), *nn.flatten_cameras(maps), projection, wh)

    def writing(state, *a):
        return published.aggregation(state, (4, 2), *a, mode=mode)

    with torch.no_grad():  # the writing turns an anchor by a constant matrix, so its gradient is not compared here
        torch.testing.assert_close(module(*inputs), writing(dict(module.named_parameters()), *inputs), rtol=1e-11, atol=1e-11)
        assert (module(*inputs)[..., :16] - module.output_proj.bias).abs().amax() > 0.1  # the cameras see something
    if not camera_embed:  # else the matrix is also an input of the weights
        scaled = projection.clone()
        scaled[:, :, :2] /= wh[..., None]
        torch.testing.assert_close(module(*inputs[:-2], scaled), module(*inputs), rtol=1e-11, atol=1e-11)


def test_aggregation_gradients():
    """By finite differences: every input, through projection, softmax and sampling."""
    module = nn.DeformableFeatureAggregation(4, 2, 1, 2, num_learnable_pts=1, fix_scale=((0.2, 0.1, 0),), attn_drop=0.0)
    randomise(module)
    projection, wh = cameras(1, 2)
    maps = [torch.randn(1, 2, 4, 4, 5, generator=torch.Generator().manual_seed(8), dtype=torch.float64)]
    value, shape, start = nn.flatten_cameras(maps)
    anchor = torch.tensor([[[3.0, 1.0, 0.3, 0.1, 0.2, 0.0, 0.6, 0.8]]], dtype=torch.float64)
    leaves = [rand(1, 1, 4), anchor, rand(1, 1, 4, seed=1), value, projection]
    for leaf in leaves:
        leaf.requires_grad_()
    assert torch.autograd.gradcheck(lambda f, a, e, m, p: module(f, a, e, m, shape, start, p, wh), leaves)


def test_aggregation_drops_pairs_in_training_only():
    module = nn.DeformableFeatureAggregation(8, 2, 2, 3, attn_drop=0.5)
    projection, _ = cameras(1)
    feature = torch.rand(1, 400, 8)
    torch.manual_seed(0)
    dropped = module.weights(feature, projection.float())
    gone = (dropped == 0).all(-1).all(-1)  # [bs, anchor, pts, cam]
    assert ((dropped == 0) == gone[..., None, None]).all()  # a pair goes as a whole
    assert 0.45 < gone.float().mean() < 0.55
    kept = module.eval().weights(feature, projection.float())
    torch.testing.assert_close(dropped[~gone], kept[~gone] * 2)
    torch.testing.assert_close(kept.sum((2, 3, 4)), torch.ones(1, 400, 2))


def test_weights_draws_other_pairs_than_forward_and_a_recording_keeps_those():
    """In training. The recorded weights give forward's output, and those of `weights` do not."""
    torch.manual_seed(0)
    module = randomise(nn.DeformableFeatureAggregation(24, 4, 2, 3, attn_drop=0.5))
    projection, wh = cameras()
    maps = nn.flatten_cameras([torch.rand(2, 3, 24, *s, dtype=torch.float64) for s in SIZES[:2]])
    query = rand(2, 11, 24)
    with mx_driving.viz.recording() as looks:
        output = module(query, rand(2, 11, 8), query, *maps, projection, wh)
    used, *others = looks[0].weights, module.weights(query * 2, projection), module.weights(query * 2, projection)
    features = [mx_driving.deformable_aggregation(*maps, looks[0].locations, weights) for weights in (used, *others)]
    outputs = [torch.cat([module.output_proj(feature), query], -1) for feature in features]
    torch.testing.assert_close(outputs[0], output)
    assert not torch.allclose(outputs[1], output)
    assert not torch.equal(*others)
    module.eval()
    torch.testing.assert_close(used[used != 0], 2 * module.weights(query * 2, projection)[used != 0])


def test_recorded_looks_are_the_modules_own():
    """Recorded looks have the locations and weights that the modules' own methods compute, with the same dropped pairs."""
    value, shapes, starts = pyramid(24)
    query, reference = rand(2, 11, 24), rand(2, 11, 3, 2, seed=5)
    multi_scale = randomise(nn.MultiScaleDeformableAttention(24, 3, 3, 2))
    geometric = randomise(nn.GeometricKernelAttention(24, 3, 3))
    aggregation = randomise(nn.DeformableFeatureAggregation(24, 4, 2, 3, attn_drop=0.5))
    projection, wh = cameras()
    maps = nn.flatten_cameras([torch.rand(2, 3, 24, *s, dtype=torch.float64) for s in SIZES[:2]])
    with mx_driving.viz.recording() as looks:
        multi_scale(query, reference, value, shapes, starts)
        geometric(query, reference, value, shapes, starts)
        torch.manual_seed(0)
        aggregation(query, rand(2, 11, 8), query, *maps, projection, wh)
    operators = ["multi_scale_deformable_attn", "geometric_kernel_attention", "deformable_aggregation"]
    assert [look.operator for look in looks] == operators
    locations, weights = multi_scale.sampling(query, reference, shapes)
    torch.manual_seed(0)
    dropped = aggregation.weights(query + query, projection)
    found = looks[0].locations, looks[0].weights, looks[1].locations, looks[2].weights
    torch.testing.assert_close(found, (locations, weights, geometric.pixels(reference, shapes), dropped))


OFFSETS, WEIGHTS, VALUE, OUTPUT = "sampling_offsets", "attention_weights", "value_proj", "output_proj"
INNER = {"deformable_attention.sampling_offsets": (512, 256), "deformable_attention.attention_weights": (256, 256)}
NORMS = dict.fromkeys(("camera_encoder.2", "camera_encoder.5"), (256,))
LEARNED = {"kps_generator.learnable_fc": (18, 256), "weights_fc": (8 * 4 * 13, 256)}
# Layers in checkpoints of BEVFormer, Deformable-DETR, mmcv, Sparse4D and MapTR, with the shapes of their weights.
CHECKPOINTS = [
    (nn.TemporalSelfAttention(), {OFFSETS: (128, 512), WEIGHTS: (64, 512), VALUE: (256, 256), OUTPUT: (256, 256)}),
    (nn.SpatialCrossAttention(), {**INNER, "deformable_attention.value_proj": (256, 256), OUTPUT: (256, 256)}),
    (nn.MultiScaleDeformableAttention(), {OFFSETS: (256, 256), WEIGHTS: (128, 256), VALUE: (256, 256), OUTPUT: (256, 256)}),
    (nn.GeometricKernelAttention(), {WEIGHTS: (4 * 1 * 15, 256), VALUE: (256, 256)}),
    (nn.DeformableFeatureAggregation(),
     {"camera_encoder.0": (256, 12), "camera_encoder.3": (256, 256), OUTPUT: (256, 256), **NORMS, **LEARNED}),
    (nn.DeformableFeatureAggregation(use_camera_embed=False, num_learnable_pts=0),
     {OUTPUT: (256, 256), "weights_fc": (8 * 6 * 4 * 7, 256)}),
]  # fmt: skip


@pytest.mark.parametrize(("module", "layers"), CHECKPOINTS)
def test_checkpoint_names(module, layers):
    shapes = {name: tuple(t.shape) for name, t in module.state_dict().items()}
    if isinstance(module, nn.DeformableFeatureAggregation):
        assert shapes.pop("kps_generator.fix_scale") == (7, 3)
    biases = {f"{name}.bias": shape[:1] for name, shape in layers.items()}
    assert shapes == {f"{name}.weight": shape for name, shape in layers.items()} | biases


@pytest.mark.parametrize(("heads", "levels", "points"), [(8, 4, 4), (3, 2, 5)])
def test_initialisation(heads, levels, points):
    module = nn.MultiScaleDeformableAttention(24, heads, levels, points)
    torch.testing.assert_close(module.sampling_offsets.bias.detach(), published.grid_bias(heads, levels, points))
    for zero in (module.sampling_offsets.weight, module.attention_weights.weight, module.attention_weights.bias):
        assert not zero.any()
    temporal = nn.TemporalSelfAttention(24, heads, levels, points)
    spatial = nn.SpatialCrossAttention(24, heads, levels, points)
    torch.testing.assert_close(temporal.sampling_offsets.bias.detach(), published.grid_bias(heads, 2 * levels, points))
    inner = spatial.deformable_attention
    torch.testing.assert_close(inner.sampling_offsets.bias.detach(), published.grid_bias(heads, levels, points))
    for other in (module, temporal, spatial, inner, nn.GeometricKernelAttention(24), nn.DeformableFeatureAggregation(24)):
        for name, p in other.named_parameters():
            if name in ("value_proj.weight", "output_proj.weight"):
                bound = (6 / 48) ** 0.5
                assert 0.9 * bound < p.abs().max() <= bound
            if name in ("value_proj.bias", "output_proj.bias"):
                assert not p.any()


@pytest.mark.parametrize("kind", [nn.GeometricKernelAttention, nn.DeformableFeatureAggregation, nn.SpatialCrossAttention])
def test_built_on_the_meta_device_and_initialised_elsewhere(kind):
    """FSDP first allocates memory, and then calls reset_parameters of all modules that have it."""
    with torch.device("meta"):
        module = kind(24)
    module.to_empty(device="cpu")
    for t in (*module.parameters(), *module.buffers()):
        t.detach().fill_(77)
    module.apply(lambda each: each.reset_parameters() if hasattr(each, "reset_parameters") else None)
    for name, t in (*kind(24).named_buffers(), *kind(24).named_parameters()):
        found = module.get_buffer(name) if name == "grid_offsets" else module.get_parameter(name)
        assert not (found == 77).any()
        if not t.requires_grad:  # the window, and the fixed points
            assert torch.equal(found, t)


def test_fixed_points_are_a_copy_of_the_callers():
    for points in (torch.tensor([[0.1, 0.2, 0.3]]), [[0.1, 0.2, 0.3]]):
        module = nn.DeformableFeatureAggregation(16, fix_scale=points)
        points[0][0] = 7.0
        assert module.kps_generator.fix_scale[0, 0] == pytest.approx(0.1)
        module.reset_parameters()
        assert module.kps_generator.fix_scale[0, 0] == pytest.approx(0.1)


def bevformer():
    """BEVFormer's two modules with inputs, float32."""
    value, shapes, starts = nn.flatten_levels([torch.rand(12, 16, 6, 5), torch.rand(12, 16, 3, 3)])
    reference, mask = pillars(2, 3, 39, 2)
    query = torch.rand(2, 39, 16)
    temporal, spatial = nn.TemporalSelfAttention(16, 2, 2, 2), nn.SpatialCrossAttention(16, 2, 2, 2)
    value = value.unflatten(0, (2, 6))
    yield temporal, (query, torch.rand(2, 2, 39, 2, 2), value[:, :2], shapes, starts, query)
    yield spatial, (query, reference.float(), value[:, 3:], shapes, starts, mask, query)


def test_autocast():
    """Linear layers run in bfloat16. Sampling, and the sums of BEVFormer's modules, run in float32."""
    value, shapes, starts = nn.flatten_levels([torch.rand(1, 16, 6, 5), torch.rand(1, 16, 3, 3)])
    inputs = (torch.rand(1, 7, 16), torch.rand(1, 7, 2, 2), value, shapes, starts)
    for module, args in ((nn.MultiScaleDeformableAttention(16, 2, 2, 2), inputs), *bevformer()):
        module.eval()
        with torch.autocast("cpu", torch.bfloat16):
            lowered = module(*args)
            lowered.sum().backward()
        assert lowered.dtype == (torch.bfloat16 if isinstance(module, nn.MultiScaleDeformableAttention) else torch.float32)
        torch.testing.assert_close(lowered.float(), module(*args), rtol=0.05, atol=0.02)
        assert all(p.grad is not None for p in module.parameters())


class Conversions(TorchDispatchMode):
    """Counts inputs, which have three axes or more, that become bfloat16."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        lowered = func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") == torch.bfloat16
        self.count += lowered and args[0].dim() > 2
        return func(*args, **kwargs or {})


def test_autocast_converts_an_input_of_plain_layers_once():
    """Layers with hooks get unconverted inputs. The spatial module has the same bits with and without hooks."""
    dtypes = []
    for module, args in bevformer():
        inner = getattr(module.eval(), "deformable_attention", module)
        with torch.autocast("cpu", torch.bfloat16):
            with Conversions() as shared:
                output = module(*args)
            for layer in (inner.sampling_offsets, inner.attention_weights, inner.value_proj):
                layer.register_forward_pre_hook(lambda _, inputs: dtypes.append(inputs[0].dtype))
            with Conversions() as hooked:
                hooked_output = module(*args)
        assert (shared.count, hooked.count) == (3, 4)  # the queries, the maps, and what output_proj reads
        rounding = 1e-2 if inner is module else 0  # hooks end the temporal module's sum of two products, too
        torch.testing.assert_close(output, hooked_output, rtol=0, atol=rounding)
    assert dtypes == [torch.float32] * 6


def every_module():
    yield from bevformer()
    value, shapes, starts = nn.flatten_levels([torch.rand(1, 16, 6, 5)])
    query = torch.rand(1, 7, 16)
    yield nn.MultiScaleDeformableAttention(16, 2, 1, 2), (query, torch.rand(1, 7, 1, 2), value, shapes, starts)
    yield nn.GeometricKernelAttention(16, 2), (query, torch.rand(1, 7, 2, 2), value, shapes, starts)
    aggregation = nn.DeformableFeatureAggregation(16, 2, 1, 2, num_learnable_pts=1)
    features, scales, firsts = nn.flatten_cameras([torch.rand(1, 2, 16, 3, 5)])
    in_view = torch.tensor([[0.1, 0.0, 0.0, 1.0], [0.0, 0.1, 0.0, 1.0], [0.0, 0.0, 0.0, 2.0], [0.0, 0.0, 0.0, 1.0]])
    cameras = in_view.expand(1, 2, 4, 4)  # see every point that is less than 10 away from the middle
    yield aggregation, (query, torch.rand(1, 7, 8), query, features, scales, firsts, cameras)


class Scaled(torch.Tensor):
    """A weight like those of quantisers: a subclass, with which torch's functions compute twice its numbers."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        args = tuple(a.as_subclass(torch.Tensor) * 2 if isinstance(a, cls) else a for a in args)
        return super().__torch_function__(func, types, args, kwargs) if func is not F.linear else func(*args, **kwargs or {})


def scale_weight(layer):
    layer.weight = torch.nn.Parameter(layer.weight.detach().as_subclass(Scaled), requires_grad=False)


def clamp_forward(layer):
    forward = layer.forward

    def clamped(*args):
        out = forward(*args)
        return tuple(t.clamp(-0.1, 0.1) for t in out) if isinstance(out, tuple) else out.clamp(-0.1, 0.1)

    layer.forward = clamped


def clamp_all(layer):
    return torch.nn.modules.module.register_module_forward_hook(
        lambda module, _inputs, output: output.clamp(-0.1, 0.1) if module is layer else None
    )


CHANGES = {
    "own forward": clamp_forward,
    "hook": lambda layer: layer.register_forward_hook(lambda _layer, _inputs, output: output.clamp(-0.1, 0.1)),
    "pre-hook": lambda layer: layer.register_forward_pre_hook(lambda _layer, inputs: (inputs[0].clamp(-0.1, 0.1),)),
    "global hook": clamp_all,
    "weight of a subclass": scale_weight,
    "compiled call": lambda layer: setattr(layer, "_compiled_call_impl", lambda x: layer.forward(x).clamp(-0.1, 0.1)),
    "no bias": lambda layer: setattr(layer, "bias", None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_modules_call_layers_that_are_not_plain(change):
    """The result is the same if the changed layer is wrapped in another module."""
    for module, args in every_module():
        randomise(module).float().eval()
        for name, layer in list(module.named_modules()):
            if not isinstance(layer, torch.nn.Linear) or "camera_encoder" in name:
                continue
            changed = copy.deepcopy(module)
            before, handle = changed(*args), CHANGES[change](layer := changed.get_submodule(name))
            after = changed(*args)
            changed.set_submodule(name, Through(layer))
            expected = changed(*args)
            if change == "global hook":
                handle.remove()
            assert (after - before).abs().max() > 1e-4, name
            torch.testing.assert_close(after, expected)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_traced_module_calls_an_inner_module_that_is_not_plain():
    module, args = spatial()
    clamp_forward(module.eval().deformable_attention)
    with torch.no_grad():
        torch.testing.assert_close(torch.jit.trace(module, args)(*args), module(*args))


def test_backward_hooks_of_each_layer_run():
    seen = []
    for module, args in every_module():
        layers = [layer for layer in module.modules() if type(layer) is torch.nn.Linear]
        for layer in layers:
            layer.register_full_backward_hook(lambda layer, *_: seen.append(layer))
            layer.register_full_backward_pre_hook(lambda layer, *_: seen.append(layer))
        module(*args).sum().backward()
        assert all(seen.count(layer) >= 2 for layer in layers)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_traced_and_on_the_meta_device():
    """torch.jit.trace itself compares the traced module with the original, with and without gradients."""
    for module, args in every_module():
        expected = module.eval()(*args)
        torch.testing.assert_close(torch.jit.trace(module, args)(*args), expected)
        assert module.to("meta")(*(a.to("meta") for a in args)).shape == expected.shape


def test_bevformer_without_gradients():
    """Without gradients, the query is added in place; but not to a tensor that a hook has seen, and not to the query itself."""
    for module, args in bevformer():
        randomise(module).float().eval()
        query, expected = args[0].clone(), module(*args).detach()
        with torch.no_grad():
            torch.testing.assert_close(module(*args), expected)
        for layer in (module.output_proj, module.dropout):
            seen = []
            hook = layer.register_forward_hook(lambda _layer, _inputs, output, seen=seen: seen.append(output))
            with torch.no_grad():
                found = module(*args)
            hook.remove()
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(found - seen[0], query)
        torch.testing.assert_close(args[0], query, rtol=0, atol=0)


def test_bevformer_drops_in_training_only():
    for module, args in bevformer():
        module.dropout.p = 0.5
        torch.nn.init.ones_(module.output_proj.bias)
        gone = module(*args) == args[0]
        assert 0.4 < gone.float().mean() < 0.6
        assert not (module.eval()(*args) == args[0]).any()
