"""Wrong inputs of mx_driving.nn are refused in sentences: one of each rule, and each size of each input. Modules compile."""

import functools
import re

import pytest
import torch
from refusals import said

from mx_driving import _needs, nn

torch.manual_seed(0)  # The inputs do not depend on the files that pytest imports before.
MAPS = [torch.rand(2, 16, 4, 6), torch.rand(2, 16, 2, 3)]
CAMERAS = [torch.rand(2, 3, 16, 4, 6), torch.rand(2, 3, 16, 2, 3)]
VALUE, SHAPES, STARTS = nn.flatten_levels(MAPS)
FEATURES, SHAPE, START = nn.flatten_cameras(CAMERAS)
QUERY = torch.rand(2, 5, 16)
PADDING = torch.zeros(2, 30, dtype=torch.bool)

MULTI_SCALE = nn.MultiScaleDeformableAttention(16, 4, 2, 3)
GEOMETRIC = nn.GeometricKernelAttention(16, 4, 2)
AGGREGATION = nn.DeformableFeatureAggregation(16, 4, 2, 3)
BY_CAMERA = nn.DeformableFeatureAggregation(16, 4, 2, 6, use_camera_embed=False)
TEMPORAL = nn.TemporalSelfAttention(16, 4, 2, 3, dropout=0.0)
SPATIAL = nn.SpatialCrossAttention(16, 4, 2, 4)
PILLARS, EVEN = nn.MSDeformableAttention3D(16, 4, 2, 4), nn.MSDeformableAttention3D(16, 4, 2, 4)

LEVELS = {"value": VALUE, "spatial_shapes": SHAPES, "level_start_index": STARTS, "padding_mask": PADDING}
GOOD = {
    MULTI_SCALE: {"query": QUERY, "reference_points": torch.rand(2, 5, 2, 2), **LEVELS},
    GEOMETRIC: {"query": QUERY, "reference_points": torch.rand(2, 5, 4, 2), **LEVELS},
    AGGREGATION: {
        **{"instance_feature": QUERY, "anchor": torch.rand(2, 5, 11), "anchor_embed": QUERY, "feature_maps": FEATURES},
        **{"spatial_shape": SHAPE, "scale_start_index": START, "projection_mat": torch.rand(2, 3, 4, 4)},
        "image_wh": torch.rand(2, 3, 2),
    },
}
GOOD[BY_CAMERA] = GOOD[AGGREGATION]
TABLES = {"spatial_shapes": SHAPES, "level_start_index": STARTS}
REFERENCES, MAPS_OF_TWO = torch.rand(2, 2, 30, 2, 2), torch.rand(2, 2, 30, 16)  # queries are the cells of the maps
GOOD[TEMPORAL] = {"query": VALUE, "query_pos": VALUE, "reference_points": REFERENCES, "value": MAPS_OF_TWO, **TABLES}
CELLS = {"query": QUERY, "query_pos": QUERY, "reference_points": torch.rand(2, 3, 5, 2, 2), "value": torch.rand(2, 3, 30, 16)}
GOOD[SPATIAL] = {**CELLS, "bev_mask": torch.rand(2, 3, 5, 2) < 0.4, **TABLES}
ROWS_OF_ONE = {"query": torch.rand(1, 5, 16), "reference_points": torch.rand(1, 5, 2, 2)}
GOOD[PILLARS] = {**ROWS_OF_ONE, "value": VALUE, "counts": [3, 2], **TABLES}
GOOD[EVEN] = {"query": QUERY, "reference_points": torch.rand(2, 5, 2, 2), "value": VALUE, **TABLES}
UNBATCHED = {"spatial_shapes", "level_start_index", "spatial_shape", "scale_start_index"}  # inputs without a batch
ASKED = ("query", "reference_points", "instance_feature", "anchor", "anchor_embed")  # inputs whose axis 1 has the queries

# A wrong shape, and the axes in its sentence: one row for each rule. Another test below tries all sizes.
SHAPES_OF = [
    (MULTI_SCALE, "reference_points", (2, 5, 1, 2), "(bs=2, num_queries=5, num_levels=2, 2 or 4)"),
    (AGGREGATION, "anchor", (2, 5, 7), "(bs=2, anchor=5, 8 or more)"),
    (BY_CAMERA, "projection_mat", (2, 3, 4, 4), "(bs=2, cam=6, 3 or 4, 4)"),
    (PILLARS, "query", (2, 5, 16), "(1, sum(counts)=5, embed_dims=16)"),
]
DTYPE = "must have the dtype of the module's parameters, float32"
FLOATS, INDEX = "must have dtype float32, float64, float16 or bfloat16", "must have dtype int32 or int64"
HEIGHTS = "reference_points must have a num_Z_anchors count that divides num_points=4"
# module, argument, wrong value, sentence
OTHERS = [
    (MULTI_SCALE, "query", None, "query must be a torch.Tensor; got NoneType"),
    (AGGREGATION, "image_wh", (8, 6), "image_wh must be a torch.Tensor, as torch.tensor(image_wh) makes it; got tuple"),
    (MULTI_SCALE, "padding_mask", PADDING.float(), "padding_mask must have dtype bool; got float32"),
    (SPATIAL, "bev_mask", torch.rand(2, 3, 5, 2), "bev_mask must have dtype bool; got float32"),
    (MULTI_SCALE, "query", QUERY.half(), f"query {DTYPE}; got float16"),
    (GEOMETRIC, "value", VALUE.bfloat16(), f"value {DTYPE}; got bfloat16"),
    (SPATIAL, "value", torch.rand(2, 3, 30, 16).half(), f"value {DTYPE}; got float16"),
    (PILLARS, "query", torch.rand(1, 5, 16).double(), f"query {DTYPE}; got float64"),
    (TEMPORAL, "value", torch.rand(2, 2, 30, 16).half(), f"value {DTYPE}; got float16"),
    (AGGREGATION, "instance_feature", QUERY.half(), f"instance_feature {DTYPE}; got float16"),
    (SPATIAL, "reference_points", torch.rand(2, 3, 5, 3, 2),
     "bev_mask must have shape (bs=2, cam=3, num_queries=5, num_Z_anchors=3); got (2, 3, 5, 2)"),
    (EVEN, "reference_points", torch.rand(2, 5, 3, 2), f"{HEIGHTS}; got 3"),
    (PILLARS, "counts", [5], "counts must hold a number from 0 on for each of 2 pictures; got [5]"),
    (PILLARS, "counts", [6, -1], "counts must hold a number from 0 on for each of 2 pictures; got [6, -1]"),
    *((PILLARS, "counts", wrong, f"counts must be a list of whole numbers; got {wrong!r}")
      for wrong in (5, "ab", [2.5, 2.5], PADDING.sum(1))),
    *((module, name, GOOD[module][name].to(dtype), f"{name} {FLOATS}; got {str(dtype)[6:]}")
      for module, names in {TEMPORAL: ["query_pos"], SPATIAL: ["query_pos"], AGGREGATION: ["anchor_embed", "anchor"]}.items()
      for name in names for dtype in (torch.int64, torch.bool, torch.complex64, torch.float8_e5m2)),
]  # fmt: skip
ROWS = [(*row[:2], torch.zeros(row[2]), f"{row[1]} must have shape {row[3]}; got {row[2]}") for row in SHAPES_OF] + OTHERS

SIDES = "must have a height and a width of at least 1"
# function, maps, sentence
FLATTEN = [
    (nn.flatten_levels, MAPS[0], "maps must be a list of tensors, one for each level; got Tensor"),
    (nn.flatten_cameras, (), "maps must hold at least one level; got none"),
    (nn.flatten_levels, None, "maps must be a list of tensors, one for each level; got NoneType"),
    (nn.flatten_levels, [MAPS[0], MAPS[1][:, :, :0]], f"maps[1] {SIDES}; got (2, 16, 0, 3)"),
    (nn.flatten_cameras, [CAMERAS[0][..., :0]], f"maps[0] {SIDES}; got (2, 3, 16, 4, 0)"),
    (nn.flatten_levels, {"p3": MAPS[0]}, "maps[0] must be a torch.Tensor; got str"),
    (nn.flatten_levels, [MAPS[0], None], "maps[1] must be a torch.Tensor; got NoneType"),
    (nn.flatten_levels, CAMERAS, "maps[0] must have shape (bs, c, H, W); got (2, 3, 16, 4, 6)"),
    (nn.flatten_cameras, MAPS, "maps[0] must have shape (bs, cam, c, H, W); got (2, 16, 4, 6)"),
    (nn.flatten_levels, [MAPS[0], MAPS[1][:, :8]], "maps[1] must have shape (bs=2, c=16, H, W); got (2, 8, 2, 3)"),
    (nn.flatten_levels, [MAPS[0], MAPS[1][:1]], "maps[1] must have shape (bs=2, c=16, H, W); got (1, 16, 2, 3)"),
    (nn.flatten_levels, [MAPS[0], MAPS[1][0]], "maps[1] must have shape (bs=2, c=16, H, W); got (16, 2, 3)"),
    (nn.flatten_levels, [MAPS[0], MAPS[1].to("meta")], "maps[1] must be on maps[0]'s device (cpu); got meta"),
    (nn.flatten_cameras, [CAMERAS[0], CAMERAS[1][:, :2]],
     "maps[1] must have shape (bs=2, cam=3, c=16, H, W); got (2, 2, 16, 2, 3)"),
]  # fmt: skip

AGGREGATE, WHOLE, FRACTION = nn.DeformableFeatureAggregation, "be a whole number", "be a fraction below 1"
# module, argument, wrong value, rule
SAMPLERS = nn.MultiScaleDeformableAttention, nn.TemporalSelfAttention, nn.SpatialCrossAttention
COUNTS = dict.fromkeys(SAMPLERS, ("num_levels", "num_points"))
COUNTS |= {nn.GeometricKernelAttention: ("num_levels", "dilation"), AGGREGATE: ("num_levels", "num_cams")}
MADE = [
    *((kind, name, wrong, "be at least 1") for kind, names in COUNTS.items() for name in names for wrong in (0, -1)),
    *((kind, "num_heads", wrong, "divide embed_dims=256") for kind in [*COUNTS][:4] for wrong in (0, 3)),
    *((kind, "dropout", wrong, FRACTION) for kind in [*COUNTS][1:3] for wrong in (1.0, -0.5)),
    *((AGGREGATE, "attn_drop", wrong, FRACTION) for wrong in (1.0, -0.1)),
    *((kind, "embed_dims", wrong, "be at least 1") for kind in COUNTS for wrong in (0, -8)),
    *((kind, name, wrong, WHOLE) for kind in COUNTS for name in ("embed_dims", "num_levels") for wrong in (None, 1.5)),
    *((kind, "num_heads", wrong, WHOLE) for kind in [*COUNTS][:4] for wrong in (None, 2.0)),
    *((kind, "dropout", None, FRACTION) for kind in [*COUNTS][1:3]),
    *((nn.GeometricKernelAttention, "kernel_size", wrong, "be (height, width)") for wrong in (3, (1, 2, 3), None)),
    (AGGREGATE, "num_learnable_pts", -1, "be at least 0"),
    (AGGREGATE, "proj_drop", 2, FRACTION),
    (AGGREGATE, "num_groups", None, WHOLE),
    *((AGGREGATE, "fix_scale", wrong, "be rows of three numbers") for wrong in (None, [[1, 2], [1]], [["a"]])),
    (AGGREGATE, "num_groups", 3, "divide embed_dims=256"),
    (AGGREGATE, "residual_mode", "sum", "be 'add' or 'cat'"),
]
MADE_OF_PARTS = [
    (nn.GeometricKernelAttention, {"kernel_size": (1.5, 3)}, "kernel_size[0] must be a whole number; got 1.5"),
    (nn.GeometricKernelAttention, {"kernel_size": (3, 0)}, "kernel_size[1] must be at least 1; got 0"),
    (AGGREGATE, {"fix_scale": (0, 0, 0, 1, 1, 1)}, "fix_scale must have shape (points, 3); got (6,)"),
    (AGGREGATE, {"fix_scale": (), "num_learnable_pts": 0},
     "fix_scale must hold a point where num_learnable_pts is 0; got none"),
]  # fmt: skip


MATRICES = torch.rand(2, 3, 4, 4)
# Methods for inspection: call, sentence
INSPECTED = [
    (lambda: MULTI_SCALE.sampling(QUERY, torch.rand(2, 5, 2, 3), SHAPES),
     "reference_points must have shape (bs=2, num_queries=5, num_levels=2, 2 or 4); got (2, 5, 2, 3)"),
    (lambda: MULTI_SCALE.sampling(QUERY, torch.zeros(2, 5, 2, 2).int(), SHAPES), f"reference_points {FLOATS}; got int32"),
    (lambda: MULTI_SCALE.sampling(QUERY, torch.rand(2, 5, 2, 2), SHAPES.float()), f"spatial_shapes {INDEX}; got float32"),
    (lambda: GEOMETRIC.pixels(torch.rand(2, 5, 3, 2), SHAPES),
     "reference_points must have shape (bs, num_queries, num_heads=4, 2); got (2, 5, 3, 2)"),
    (lambda: GEOMETRIC.pixels(torch.rand(2, 5, 4, 2), SHAPES[:1]),
     "spatial_shapes must have shape (num_levels=2, 2); got (1, 2)"),
    (lambda: GEOMETRIC.pixels(torch.zeros(2, 5, 4, 2).int(), SHAPES), f"reference_points {FLOATS}; got int32"),
    (lambda: GEOMETRIC.pixels(torch.rand(2, 5, 4, 2), SHAPES.float()), f"spatial_shapes {INDEX}; got float32"),
    (lambda: GEOMETRIC.pixels(None, SHAPES), "reference_points must be a torch.Tensor; got NoneType"),
    (lambda: AGGREGATION.weights(QUERY[0], MATRICES),
     "feature must have shape (bs=2, anchor, embed_dims=16); got (5, 16)"),
    (lambda: AGGREGATION.weights(QUERY, MATRICES[..., 0]),
     "projection_mat must have shape (bs=2, cam, 3 or 4, 4); got (2, 3, 4)"),
    (lambda: AGGREGATION.weights(QUERY.half(), MATRICES), f"feature {DTYPE}; got float16"),
    (lambda: BY_CAMERA.weights(None, None), "feature must be a torch.Tensor; got NoneType"),
]  # fmt: skip
# call, sentence
REFUSALS = [
    *INSPECTED,
    *((functools.partial(function, maps), sentence) for function, maps, sentence in FLATTEN),
    *((functools.partial(module, **{**GOOD[module], name: other}), sentence) for module, name, other, sentence in ROWS),
    *((functools.partial(kind, **{name: wrong}), f"{name} must {rule}; got {wrong!r}") for kind, name, wrong, rule in MADE),
    *((functools.partial(kind, **arguments), sentence) for kind, arguments, sentence in MADE_OF_PARTS),
]


@pytest.mark.parametrize(("call", "sentence"), REFUSALS, ids=[sentence for _, sentence in REFUSALS])
def test_refusals(call, sentence):
    assert said(call) == sentence


# Axes that may be longer, because no other input has the same axis.
FREE = {AGGREGATION: {("feature_maps", 1), ("anchor", 2)}, SPATIAL: {("value", 2)}}
FREE |= {module: {("value", 1)} for module in (PILLARS, EVEN)}


def fits(axis, size):
    """Return whether the axis in a sentence allows the right size."""
    numbers = re.findall(r"\d+", axis)
    return not numbers or str(size) in numbers or (axis.endswith(" or more") and size >= int(numbers[0]))


@pytest.mark.parametrize("module", [m for m in GOOD if m is not BY_CAMERA], ids=lambda module: type(module).__name__)
def test_each_input_is_held_to_its_kind_and_sizes(module):
    """The sentence begins with the name of the input, or of an input that disagrees with it."""
    free = set()
    for name, given in ((name, t) for name, t in GOOD[module].items() if isinstance(t, torch.Tensor)):
        call = functools.partial(module, **{**GOOD[module], name: "a word"})
        assert said(call) == f"{name} must be a torch.Tensor; got str"
        longer = [(axis, torch.cat([given, given.narrow(axis, 0, 1)], axis)) for axis in range(given.dim())]
        for axis, other in (("one more", given[None]), *longer):
            inputs = {**GOOD[module], name: other}
            try:
                module(**inputs)
                free.add((name, axis))
            except ValueError as error:
                named = re.match(r"(\w+)(\[\d\])? must ", str(error))
                assert named
                assert named[1] in inputs
                if axes := re.fullmatch(rf"{name} must have shape \((.*)\); got (\(.*?\)).*", str(error)):
                    assert axes[2] == str(tuple(other.shape))
                    assert [*map(fits, axes[1].split(", "), given.shape)] == [True] * given.dim()
    assert free == FREE.get(module, set())


def test_legal_inputs_are_taken():
    """Maps in a view of a dictionary or in an iterator; boxes; no mask; projections without their last row."""
    value, *_ = nn.flatten_levels(dict(enumerate(MAPS)).values())
    assert torch.equal(value, VALUE)
    assert torch.equal(nn.flatten_cameras(iter(CAMERAS))[0], FEATURES)
    MULTI_SCALE(**{**GOOD[MULTI_SCALE], "reference_points": torch.rand(2, 5, 2, 4), "padding_mask": None})
    AGGREGATION.eval()
    whole = AGGREGATION(**GOOD[AGGREGATION])
    without = GOOD[AGGREGATION]["projection_mat"][:, :, :3]
    assert torch.equal(AGGREGATION(**{**GOOD[AGGREGATION], "projection_mat": without}), whole)
    nn.DeformableFeatureAggregation(16, 4, 2, 3, fix_scale=())


@pytest.mark.parametrize("module", [MULTI_SCALE, GEOMETRIC, AGGREGATION, TEMPORAL], ids=lambda m: type(m).__name__)
def test_modules_compile_and_export(module):
    """One graph, and one exported program, serve every batch and number of queries."""
    module.eval()
    good = GOOD[module]
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="eager")
    torch.testing.assert_close(compiled(**good), module(**good))
    if module in (TEMPORAL, AGGREGATION) and (sentence := _needs.lacks("A program with free sizes, of a module")):
        pytest.skip(sentence)
    batch, queries = torch.export.Dim("batch"), torch.export.Dim("queries")
    asked = () if module is TEMPORAL else ASKED  # its queries are the cells of its maps
    dims = {n: None if n in UNBATCHED else {0: batch, **({1: queries} if n in asked else {})} for n in good}
    program = torch.export.export(module, (), good, dynamic_shapes=dims).module()
    more = {n: t if n in UNBATCHED else torch.cat([t, t[:1]]) for n, t in good.items()}
    more = {n: t[:, :3] if n in asked else t for n, t in more.items()}
    torch.testing.assert_close(program(**more), module(**more))


def test_spatial_compiles_around_its_cameras():
    SPATIAL.eval()
    compiled = torch.compile(SPATIAL, backend="eager")
    for mask in (GOOD[SPATIAL]["bev_mask"], ~GOOD[SPATIAL]["bev_mask"]):  # cameras see other numbers of queries
        good = {**GOOD[SPATIAL], "bev_mask": mask}
        torch.testing.assert_close(compiled(**good), SPATIAL(**good))
    torch._dynamo.reset()
    whole = torch.compile(SPATIAL, backend="eager", fullgraph=True)
    if torch.__version__.startswith("2.8."):  # this one runs the cameras between the graphs all the same
        torch.testing.assert_close(whole(**GOOD[SPATIAL]), SPATIAL(**GOOD[SPATIAL]))
    else:
        with pytest.raises(torch._dynamo.exc.Unsupported):
            whole(**GOOD[SPATIAL])


@pytest.mark.parametrize(("module", "name"), [(TEMPORAL, "query_pos"), (SPATIAL, "query_pos"), (AGGREGATION, "anchor_embed")])
def test_positions_may_have_16_bits(module, name):
    good = GOOD[module]
    torch.testing.assert_close(module.eval()(**{**good, name: good[name].half()}), module(**good), rtol=1e-2, atol=1e-2)
    with pytest.raises(TypeError, match=f"^{name} must have the dtype of the module's parameters, float32; got float64$"):
        module(**{**good, name: good[name].double()})


@pytest.mark.parametrize("module", [m for m in GOOD if "query" in GOOD[m] or m is AGGREGATION], ids=lambda m: type(m).__name__)
def test_inputs_are_on_one_device(module):
    for name, t in GOOD[module].items():
        if t is not None and isinstance(t, torch.Tensor):
            with pytest.raises(ValueError, match=r"^\w+ must be on \w+'s device \((cpu|meta)\); got (meta|cpu)$"):
                module(**{**GOOD[module], name: t.to("meta")})


def test_a_graph_refuses_a_shape_in_the_same_words():
    wrong = {**GOOD[MULTI_SCALE], "reference_points": torch.rand(2, 6, 2, 2)}
    sentence = "reference_points must have shape (bs=2, num_queries=5, num_levels=2, 2 or 4); got (2, 6, 2, 2)"
    assert said(functools.partial(MULTI_SCALE, **wrong)) == sentence
    if _needs.is_older_than("2.13"):
        pytest.skip("older ones do not show the sentence of an exception in a graph")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=re.escape(sentence)):
        torch.compile(MULTI_SCALE, fullgraph=True, dynamic=False, backend="eager")(**wrong)


def test_pyramids_compile():
    for function, maps in ((nn.flatten_levels, MAPS), (nn.flatten_cameras, CAMERAS)):
        compiled = torch.compile(function, fullgraph=True, backend="eager")
        assert all(torch.equal(a, b) for a, b in zip(compiled(maps), function(maps), strict=True))


NO_QUERIES = {"query": 1, "query_pos": 1, "reference_points": 2, "bev_mask": 2}
EMPTY = [(module, dict.fromkeys(GOOD[module].keys() - UNBATCHED, 0)) for module in GOOD if module not in (BY_CAMERA, PILLARS)]
EMPTY += [(module, dict.fromkeys(ASKED, 1)) for module in (MULTI_SCALE, GEOMETRIC, AGGREGATION, EVEN)]
EMPTY += [(SPATIAL, {"reference_points": 1, "value": 1, "bev_mask": 1}), (SPATIAL, NO_QUERIES)]


@pytest.mark.parametrize(("module", "axes"), EMPTY)
def test_every_parameter_has_a_gradient_of_a_batch_that_is_empty(module, axes):
    """Without scenes, cameras or queries, parameters have gradients, because DistributedDataParallel waits for all of them."""
    module.train()
    inputs = {n: t.narrow(axes[n], 0, 0) if n in axes else t for n, t in GOOD[module].items()}
    learned = [p for p in module.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(module(**inputs).sum(), learned, allow_unused=True)
    assert all(g is not None and g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_aggregation_of_maps_and_anchors_of_another_dtype(dtype):
    """Feature maps, anchors and projections may have another dtype than the parameters."""
    names = ("anchor", "feature_maps", "projection_mat", "image_wh", "anchor_embed")
    module = AGGREGATION.eval()
    other = {n: t.to(dtype) if n in names[:4] else t for n, t in GOOD[AGGREGATION].items()}
    rounded = {n: t.float() if n in names[:4] else t for n, t in other.items()}
    output = module(**other)
    assert output.dtype == torch.float32
    torch.testing.assert_close(output, module(**rounded), rtol=2e-3, atol=2e-3)
    points, exact = (module.kps_generator(each["anchor"], each["instance_feature"]) for each in (other, rounded))
    assert points.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(points.float(), exact, rtol=1e-6, atol=1e-6)  # a point in 16 bits is centimetres away
