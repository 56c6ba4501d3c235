"""One row per sentence of mx_driving.nn: a wrong input is refused before any work, compiled or not."""

from __future__ import annotations

import re

import pytest
import torch

from mx_driving import _checks, nn

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
PILLARS = nn.MSDeformableAttention3D(16, 4, 2, 4)

LEVELS = {"value": VALUE, "spatial_shapes": SHAPES, "level_start_index": STARTS, "padding_mask": PADDING}
GOOD = {
    MULTI_SCALE: {"query": QUERY, "reference_points": torch.rand(2, 5, 2, 2), **LEVELS},
    GEOMETRIC: {"query": QUERY, "reference_points": torch.rand(2, 5, 4, 2), **LEVELS},
    AGGREGATION: {
        "instance_feature": QUERY,
        "anchor": torch.rand(2, 5, 11),
        "anchor_embed": QUERY,
        "feature_maps": FEATURES,
        "spatial_shape": SHAPE,
        "scale_start_index": START,
        "projection_mat": torch.rand(2, 3, 4, 4),
        "image_wh": torch.rand(2, 3, 2),
    },
}
GOOD[BY_CAMERA] = GOOD[AGGREGATION]
TABLES = {"spatial_shapes": SHAPES, "level_start_index": STARTS}
CELLS = {"query": QUERY, "query_pos": QUERY, **TABLES}
GOOD[TEMPORAL] = {  # its queries are the cells of its maps
    **TABLES,
    "query": VALUE,
    "query_pos": VALUE,
    "reference_points": torch.rand(2, 2, 30, 2, 2),
    "value": torch.rand(2, 2, 30, 16),
}
GOOD[SPATIAL] = {
    **CELLS,
    "reference_points": torch.rand(2, 3, 5, 2, 2),
    "value": torch.rand(2, 3, 30, 16),
    "bev_mask": torch.rand(2, 3, 5, 2) < 0.4,
}
GOOD[PILLARS] = {
    "query": torch.rand(1, 5, 16),
    "reference_points": torch.rand(1, 5, 2, 2),
    "value": VALUE,
    "counts": [3, 2],
    **TABLES,
}
TENSOR = "must be a torch.Tensor; got"

# function, its maps, the error, the sentence
FLATTEN = [
    (nn.flatten_levels, MAPS[0], TypeError, "maps must be a list of tensors, one for each level; got Tensor"),
    (nn.flatten_levels, [], ValueError, "maps must hold at least one level; got none"),
    (nn.flatten_levels, {"p3": MAPS[0]}, TypeError, f"maps[0] {TENSOR} str"),
    (nn.flatten_levels, [MAPS[0], None], TypeError, f"maps[1] {TENSOR} NoneType"),
    (nn.flatten_levels, [MAPS[0][0]], ValueError, "maps[0] must have shape (bs, c, H, W); got (16, 4, 6)"),
    (nn.flatten_levels, CAMERAS, ValueError, "maps[0] must have shape (bs, c, H, W); got (2, 3, 16, 4, 6)"),
    (nn.flatten_levels, [MAPS[0], MAPS[1][:, :8]], ValueError, "maps[1] must have shape (bs=2, c=16, H, W); got (2, 8, 2, 3)"),
    (nn.flatten_levels, [MAPS[0], MAPS[1][:1]], ValueError, "maps[1] must have shape (bs=2, c=16, H, W); got (1, 16, 2, 3)"),
    (nn.flatten_levels, [MAPS[0], MAPS[1][0]], ValueError, "maps[1] must have shape (bs=2, c=16, H, W); got (16, 2, 3)"),
    (nn.flatten_levels, [MAPS[0], MAPS[1].to("meta")], ValueError, "maps[1] must be on maps[0]'s device (cpu); got meta"),
    (nn.flatten_cameras, CAMERAS[0], TypeError, "maps must be a list of tensors, one for each level; got Tensor"),
    (nn.flatten_cameras, (), ValueError, "maps must hold at least one level; got none"),
    (nn.flatten_cameras, MAPS, ValueError, "maps[0] must have shape (bs, cam, c, H, W); got (2, 16, 4, 6)"),
    (
        nn.flatten_cameras,
        [CAMERAS[0], CAMERAS[1][:, :2]],
        ValueError,
        "maps[1] must have shape (bs=2, cam=3, c=16, H, W); got (2, 2, 16, 2, 3)",
    ),
]

# module, which input, what it becomes, the error, the sentence
ROWS = [
    *(
        row
        for module, count in ((MULTI_SCALE, "num_levels=2, 2 or 4"), (GEOMETRIC, "num_heads=4, 2"))
        for row in [
            (module, "query", None, TypeError, f"query {TENSOR} NoneType"),
            (module, "query", QUERY[0], ValueError, "query must have shape (bs, num_queries, embed_dims=16); got (5, 16)"),
            (
                module,
                "query",
                torch.rand(2, 5, 32),
                ValueError,
                "query must have shape (bs, num_queries, embed_dims=16); got (2, 5, 32)",
            ),
            (
                module,
                "reference_points",
                [0.5, 0.5],
                TypeError,
                "reference_points must be a torch.Tensor, as torch.tensor(reference_points) makes it; got list",
            ),
            (
                module,
                "reference_points",
                torch.rand(2, 5, 1, 2),
                ValueError,
                f"reference_points must have shape (bs=2, num_queries=5, {count}); got (2, 5, 1, 2)",
            ),
            (
                module,
                "reference_points",
                torch.rand(2, 5, 3, 2),
                ValueError,
                f"reference_points must have shape (bs=2, num_queries=5, {count}); got (2, 5, 3, 2)",
            ),
            (
                module,
                "reference_points",
                torch.rand(1, 5, 2, 2),
                ValueError,
                f"reference_points must have shape (bs=2, num_queries=5, {count}); got (1, 5, 2, 2)",
            ),
            (
                module,
                "reference_points",
                torch.rand(2, 4, 2, 2),
                ValueError,
                f"reference_points must have shape (bs=2, num_queries=5, {count}); got (2, 4, 2, 2)",
            ),
            (module, "value", MAPS, TypeError, f"value {TENSOR} list"),
            (
                module,
                "value",
                MAPS[0],
                ValueError,
                "value must have shape (bs=2, num_keys, embed_dims=16); got (2, 16, 4, 6)",
            ),
            (
                module,
                "value",
                VALUE[..., :8],
                ValueError,
                "value must have shape (bs=2, num_keys, embed_dims=16); got (2, 30, 8)",
            ),
            (module, "value", VALUE[:1], ValueError, "value must have shape (bs=2, num_keys, embed_dims=16); got (1, 30, 16)"),
            (
                module,
                "spatial_shapes",
                SHAPES.tolist(),
                TypeError,
                "spatial_shapes must be a torch.Tensor, as torch.tensor(spatial_shapes) makes it; got list",
            ),
            (module, "spatial_shapes", SHAPES[:1], ValueError, "spatial_shapes must have shape (num_levels=2, 2); got (1, 2)"),
            (
                module,
                "level_start_index",
                STARTS[:1],
                ValueError,
                "level_start_index must have shape (num_levels=2); got (1,)",
            ),
            (
                module,
                "padding_mask",
                PADDING[:, :3],
                ValueError,
                "padding_mask must have shape (bs=2, num_keys=30); got (2, 3)",
            ),
            (module, "padding_mask", PADDING[:1], ValueError, "padding_mask must have shape (bs=2, num_keys=30); got (1, 30)"),
            (module, "padding_mask", PADDING.float(), TypeError, "padding_mask must have dtype bool; got float32"),
            (
                module,
                "padding_mask",
                [True],
                TypeError,
                "padding_mask must be a torch.Tensor, as torch.tensor(padding_mask) makes it; got list",
            ),
        ]
    ),
    (
        MULTI_SCALE,
        "reference_points",
        torch.rand(2, 5, 2, 3),
        ValueError,
        "reference_points must have 4 axes, the last of 2 or 4 numbers; got (2, 5, 2, 3)",
    ),
    (
        GEOMETRIC,
        "reference_points",
        torch.rand(2, 5, 4, 4),
        ValueError,
        "reference_points must have 4 axes, the last of 2 numbers; got (2, 5, 4, 4)",
    ),
    (
        AGGREGATION,
        "instance_feature",
        QUERY[..., :8],
        ValueError,
        "instance_feature must have shape (bs, anchor, embed_dims=16); got (2, 5, 8)",
    ),
    (
        AGGREGATION,
        "anchor_embed",
        QUERY[:, :1],
        ValueError,
        "anchor_embed must have shape (bs=2, anchor=5, embed_dims=16); got (2, 1, 16)",
    ),
    (
        AGGREGATION,
        "anchor",
        torch.rand(2, 5, 7),
        ValueError,
        "anchor must have shape (bs=2, anchor=5, 8 or more); got (2, 5, 7)",
    ),
    (
        AGGREGATION,
        "anchor",
        torch.rand(2, 1, 11),
        ValueError,
        "anchor must have shape (bs=2, anchor=5, 8 or more); got (2, 1, 11)",
    ),
    (AGGREGATION, "feature_maps", CAMERAS, TypeError, f"feature_maps {TENSOR} list"),
    (
        AGGREGATION,
        "feature_maps",
        FEATURES[..., :8],
        ValueError,
        "feature_maps must have shape (bs=2, num_feat, embed_dims=16); got (2, 90, 8)",
    ),
    (
        AGGREGATION,
        "feature_maps",
        FEATURES[:1],
        ValueError,
        "feature_maps must have shape (bs=2, num_feat, embed_dims=16); got (1, 90, 16)",
    ),
    (AGGREGATION, "spatial_shape", SHAPE[0], ValueError, "spatial_shape must have shape (cam=3, scale=2, 2); got (2, 2)"),
    (
        AGGREGATION,
        "spatial_shape",
        SHAPE[:, :1],
        ValueError,
        "spatial_shape must have shape (cam=3, scale=2, 2); got (3, 1, 2)",
    ),
    (
        AGGREGATION,
        "scale_start_index",
        START[:2],
        ValueError,
        "scale_start_index must have shape (cam=3, scale=2); got (2, 2)",
    ),
    (
        AGGREGATION,
        "projection_mat",
        torch.rand(3, 4, 4),
        ValueError,
        "projection_mat must have shape (bs=2, cam, 3 or 4, 4); got (3, 4, 4)",
    ),
    (
        AGGREGATION,
        "projection_mat",
        torch.rand(1, 3, 4, 4),
        ValueError,
        "projection_mat must have shape (bs=2, cam, 3 or 4, 4); got (1, 3, 4, 4)",
    ),
    (
        AGGREGATION,
        "projection_mat",
        torch.rand(2, 3, 3, 3),
        ValueError,
        "projection_mat must have shape (bs=2, cam, 3 or 4, 4); got (2, 3, 3, 3)",
    ),
    (
        AGGREGATION,
        "projection_mat",
        torch.rand(2, 3, 2, 4),
        ValueError,
        "projection_mat must have shape (bs=2, cam, 3 or 4, 4); got (2, 3, 2, 4)",
    ),
    (
        BY_CAMERA,
        "projection_mat",
        torch.rand(2, 3, 4, 4),
        ValueError,
        "projection_mat must have shape (bs=2, cam=6, 3 or 4, 4); got (2, 3, 4, 4)",
    ),
    (AGGREGATION, "image_wh", torch.rand(2, 2), ValueError, "image_wh must have shape (bs=2, cam=3, 2); got (2, 2)"),
    (AGGREGATION, "image_wh", torch.rand(2, 1, 2), ValueError, "image_wh must have shape (bs=2, cam=3, 2); got (2, 1, 2)"),
    (
        AGGREGATION,
        "image_wh",
        (80, 60),
        TypeError,
        "image_wh must be a torch.Tensor, as torch.tensor(image_wh) makes it; got tuple",
    ),
]

ROWS += [
    row
    for module, count in ((TEMPORAL, 30), (SPATIAL, 5))
    for row in [
        (module, "query", None, TypeError, f"query {TENSOR} NoneType"),
        (module, "query", QUERY[..., :8], ValueError, "query must have shape (bs, num_queries, embed_dims=16); got (2, 5, 8)"),
        (module, "query_pos", 0.5, TypeError, f"query_pos {TENSOR} float"),
        (
            module,
            "query_pos",
            QUERY[:1],
            ValueError,
            f"query_pos must have shape (bs=2, num_queries={count}, embed_dims=16); got (1, 5, 16)",
        ),
        (module, "spatial_shapes", SHAPES[:1], ValueError, "spatial_shapes must have shape (num_levels=2, 2); got (1, 2)"),
        (module, "level_start_index", STARTS[:1], ValueError, "level_start_index must have shape (num_levels=2); got (1,)"),
        (module, "reference_points", None, TypeError, f"reference_points {TENSOR} NoneType"),
    ]
]
ROWS += [
    *(
        (
            TEMPORAL,
            "reference_points",
            torch.rand(shape),
            ValueError,
            f"reference_points must have shape (bs=2, 2, num_queries=30, num_levels=2, 2 or 4); got {shape}",
        )
        for shape in [(2, 30, 2, 2), (4, 30, 2, 2, 2), (2, 2, 30, 1, 2), (2, 2, 30, 2, 3), (2, 2, 5, 2, 2)]
    ),
    (TEMPORAL, "value", MAPS, TypeError, f"value {TENSOR} list"),
    *(
        (
            TEMPORAL,
            "value",
            torch.rand(shape),
            ValueError,
            f"value must have shape (bs=2, 2, num_queries=30, embed_dims=16); got {shape}",
        )
        for shape in [(4, 30, 16), (2, 1, 30, 16), (2, 2, 5, 16)]
    ),
    *(
        (
            SPATIAL,
            "reference_points",
            torch.rand(shape),
            ValueError,
            f"reference_points must have shape (bs=2, cam=3, num_queries=5, num_Z_anchors, 2); got {shape}",
        )
        for shape in [(3, 2, 5, 2, 2), (2, 3, 5, 2), (2, 3, 4, 2, 2), (2, 3, 5, 2, 4)]
    ),
    (SPATIAL, "reference_points", torch.rand(2, 3, 5, 3, 2), ValueError, "num_Z_anchors must divide num_points=4; got 3"),
    *(
        (
            SPATIAL,
            "value",
            torch.rand(shape),
            ValueError,
            f"value must have shape (bs=2, cam, num_keys, embed_dims=16); got {shape}",
        )
        for shape in [(6, 30, 16), (1, 3, 30, 16), (2, 3, 30, 8)]
    ),
    (SPATIAL, "bev_mask", None, TypeError, f"bev_mask {TENSOR} NoneType"),
    (SPATIAL, "bev_mask", torch.rand(2, 3, 5, 2), TypeError, "bev_mask must have dtype bool; got float32"),
    *(
        (
            SPATIAL,
            "bev_mask",
            torch.zeros(shape, dtype=torch.bool),
            ValueError,
            f"bev_mask must have shape (bs=2, cam=3, num_queries=5, num_Z_anchors=2); got {shape}",
        )
        for shape in [(3, 2, 5, 2), (2, 3, 5)]
    ),
]

# module, its arguments, the error, the sentence
MADE = [
    (nn.MultiScaleDeformableAttention, {"num_levels": 0}, "num_levels must be at least 1; got 0"),
    (nn.MultiScaleDeformableAttention, {"num_points": -1}, "num_points must be at least 1; got -1"),
    (nn.MultiScaleDeformableAttention, {"num_heads": 0}, "num_heads must divide embed_dims=256; got 0"),
    (nn.TemporalSelfAttention, {"num_heads": 3}, "num_heads must divide embed_dims=256; got 3"),
    (nn.TemporalSelfAttention, {"num_levels": 0}, "num_levels must be at least 1; got 0"),
    (nn.TemporalSelfAttention, {"dropout": 1.0}, "dropout must be a share below 1; got 1.0"),
    (nn.SpatialCrossAttention, {"num_heads": 3}, "num_heads must divide embed_dims=256; got 3"),
    (nn.SpatialCrossAttention, {"num_points": 0}, "num_points must be at least 1; got 0"),
    (nn.SpatialCrossAttention, {"dropout": -0.5}, "dropout must be a share below 1; got -0.5"),
    (nn.GeometricKernelAttention, {"num_levels": 0}, "num_levels must be at least 1; got 0"),
    (nn.GeometricKernelAttention, {"kernel_size": (3, 0)}, "kernel_size[1] must be at least 1; got 0"),
    (nn.GeometricKernelAttention, {"dilation": 0}, "dilation must be at least 1; got 0"),
    (nn.DeformableFeatureAggregation, {"num_levels": 0}, "num_levels must be at least 1; got 0"),
    (nn.DeformableFeatureAggregation, {"num_cams": 0}, "num_cams must be at least 1; got 0"),
    (nn.DeformableFeatureAggregation, {"attn_drop": 1.0}, "attn_drop must be a share below 1; got 1.0"),
    (nn.DeformableFeatureAggregation, {"attn_drop": -0.1}, "attn_drop must be a share below 1; got -0.1"),
    (
        nn.DeformableFeatureAggregation,
        {"fix_scale": (0, 0, 0, 1, 1, 1)},
        "fix_scale must have shape (points, 3); got (6,)",
    ),
    (
        nn.DeformableFeatureAggregation,
        {"fix_scale": (), "num_learnable_pts": 0},
        "fix_scale must hold a point where num_learnable_pts is 0; got none",
    ),
]


ROWS += [
    (PILLARS, "counts", [5], ValueError, "counts must hold a number from 0 on for each of 2 pictures; got [5]"),
    (PILLARS, "counts", [6, -1], ValueError, "counts must hold a number from 0 on for each of 2 pictures; got [6, -1]"),
    (PILLARS, "counts", [3, 3], ValueError, "query must have shape (1, sum(counts)=6, embed_dims=16); got (1, 5, 16)"),
    (PILLARS, "query", QUERY, ValueError, "query must have shape (1, sum(counts)=5, embed_dims=16); got (2, 5, 16)"),
    (PILLARS, "query", None, TypeError, f"query {TENSOR} NoneType"),
    (
        PILLARS,
        "reference_points",
        torch.rand(1, 4, 2, 2),
        ValueError,
        "reference_points must have shape (1, sum(counts)=5, num_Z_anchors, 2); got (1, 4, 2, 2)",
    ),
    (PILLARS, "value", VALUE[0], ValueError, "value must have shape (pictures, num_keys, embed_dims=16); got (30, 16)"),
]


def refused(call, error, sentence):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == sentence


@pytest.mark.parametrize(("function", "maps", "error", "sentence"), FLATTEN, ids=[f"{r[0].__name__}: {r[-1]}" for r in FLATTEN])
def test_flatten(function, maps, error, sentence):
    refused(lambda: function(maps), error, sentence)


@pytest.mark.parametrize(
    ("module", "name", "given", "error", "sentence"), ROWS, ids=[f"{type(r[0]).__name__}: {r[-1]}" for r in ROWS]
)
def test_module(module, name, given, error, sentence):
    refused(lambda: module(**{**GOOD[module], name: given}), error, sentence)


@pytest.mark.parametrize(("module", "arguments", "sentence"), MADE, ids=[f"{r[0].__name__}: {r[-1]}" for r in MADE])
def test_making(module, arguments, sentence):
    refused(lambda: module(**arguments), ValueError, sentence)


def test_legal_inputs_are_taken():
    """Views of a dictionary, projections without their last row, boxes, no mask."""
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
    """One graph for every batch and number of queries, and an exported program that takes them all."""
    torch._dynamo.reset()
    module.eval()
    good = GOOD[module]
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="eager")
    torch.testing.assert_close(compiled(**good), module(**good))
    if module in (TEMPORAL, AGGREGATION) and (sentence := _checks.needs.lacks("A program with free sizes, of a module")):
        pytest.skip(sentence)
    batch, queries = torch.export.Dim("batch"), torch.export.Dim("queries")
    tables = {"spatial_shapes", "level_start_index", "spatial_shape", "scale_start_index"}
    asked = {"query", "reference_points", "instance_feature", "anchor", "anchor_embed"}
    asked = set() if module is TEMPORAL else asked  # its queries are the cells of its maps
    dims = {n: None if n in tables else {0: batch, **({1: queries} if n in asked else {})} for n in good}
    program = torch.export.export(module, (), good, dynamic_shapes=dims).module()
    more = {n: t if n in tables else torch.cat([t, t[:1]]) for n, t in good.items()}
    more = {n: t[:, :3] if n in asked else t for n, t in more.items()}
    torch.testing.assert_close(program(**more), module(**more))


def test_spatial_compiles_around_its_cameras():
    torch._dynamo.reset()
    SPATIAL.eval()
    compiled = torch.compile(SPATIAL, backend="eager")
    for mask in (GOOD[SPATIAL]["bev_mask"], ~GOOD[SPATIAL]["bev_mask"]):  # cameras see other numbers of queries
        good = {**GOOD[SPATIAL], "bev_mask": mask}
        torch.testing.assert_close(compiled(**good), SPATIAL(**good))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(SPATIAL, backend="eager", fullgraph=True)(**GOOD[SPATIAL])


def test_pyramids_compile():
    torch._dynamo.reset()
    for function, maps in ((nn.flatten_levels, MAPS), (nn.flatten_cameras, CAMERAS)):
        compiled = torch.compile(function, fullgraph=True, backend="eager")
        for a, b in zip(compiled(maps), function(maps), strict=True):
            assert torch.equal(a, b)


def test_compiled_refuses_too():
    torch._dynamo.reset()
    compiled = torch.compile(MULTI_SCALE, backend="eager")
    with pytest.raises(Exception, match=re.escape("padding_mask must have dtype bool; got float32")):
        compiled(**{**GOOD[MULTI_SCALE], "padding_mask": PADDING.float()})
