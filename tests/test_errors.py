"""One row per error message: the whole sentence, before any work."""

from __future__ import annotations

import cases
import pytest
import torch
from cases import AGGREGATION, GEOMETRIC, MULTI_SCALE

import mx_driving

GOOD = {
    MULTI_SCALE: lambda: cases.cast(cases.multi_scale(2, 3, 4, 2, [(3, 4), (2, 2)], 2), torch.float32),
    AGGREGATION: lambda: cases.cast(cases.aggregation(2, 3, 2, 4, 2, [[(3, 4)], [(2, 2)]]), torch.float32),
    GEOMETRIC: lambda: cases.cast(cases.geometric(2, 3, 4, 2, [(3, 4), (2, 2)], 2), torch.float32),
}
QUERY_AXES = "(bs=2, num_queries=3, num_heads=2, num_levels=2, num_points=2"
FLOATING = "have dtype float32, float64, float16 or bfloat16"
t = torch.tensor

# operator, which argument, what it becomes, the error, the sentence
ROWS = [
    (MULTI_SCALE, 0, lambda a: a.numpy(), TypeError, "value must be a torch.Tensor; got ndarray"),
    (
        MULTI_SCALE,
        1,
        lambda a: a.tolist(),
        TypeError,
        "value_spatial_shapes must be a torch.Tensor, as torch.tensor(value_spatial_shapes) makes it; got list",
    ),
    (MULTI_SCALE, 0, lambda a: a[0], ValueError, "value must have shape (bs, num_keys, num_heads, embed_dims); got (16, 2, 4)"),
    (MULTI_SCALE, 1, lambda a: a[0], ValueError, "value_spatial_shapes must have shape (num_levels, 2); got (2,)"),
    (MULTI_SCALE, 1, lambda a: a[:, :1], ValueError, "value_spatial_shapes must have shape (num_levels=2, 2); got (2, 1)"),
    (MULTI_SCALE, 2, lambda a: a[:1], ValueError, "value_level_start_index must have shape (num_levels=2); got (1,)"),
    (
        MULTI_SCALE,
        3,
        lambda a: a[..., 0],
        ValueError,
        "sampling_locations must have shape (bs, num_queries, num_heads, num_levels, num_points, 2); got (2, 3, 2, 2, 2)",
    ),
    (
        MULTI_SCALE,
        3,
        lambda a: a[:1],
        ValueError,
        f"sampling_locations must have shape {QUERY_AXES}, 2); got (1, 3, 2, 2, 2, 2)",
    ),
    (MULTI_SCALE, 4, lambda a: a[..., :1], ValueError, f"attention_weights must have shape {QUERY_AXES}); got (2, 3, 2, 2, 1)"),
    *(
        row
        for operator in (MULTI_SCALE, GEOMETRIC)
        for row in [
            (
                operator,
                0,
                lambda a: a.transpose(1, 2),
                ValueError,
                "value must have shape (bs=2, num_keys, num_heads=2, embed_dims); "
                "got (2, 2, 16, 4), whose axes 1 and 2 look swapped",
            ),
            (
                operator,
                0,
                lambda a: a[:, :, :1],
                ValueError,
                "value must have shape (bs=2, num_keys, num_heads=2, embed_dims); got (2, 16, 1, 4)",
            ),
            (
                operator,
                0,
                lambda a: a[:1],
                ValueError,
                "value must have shape (bs=2, num_keys, num_heads=2, embed_dims); got (1, 16, 2, 4)",
            ),
        ]
    ),
    (MULTI_SCALE, 0, lambda a: a.long(), TypeError, f"value must {FLOATING}; got int64"),
    (MULTI_SCALE, 0, lambda a: a.cfloat(), TypeError, f"value must {FLOATING}; got complex64"),
    (MULTI_SCALE, 1, lambda a: a.float(), TypeError, "value_spatial_shapes must have dtype int32 or int64; got float32"),
    (MULTI_SCALE, 2, lambda a: a.short(), TypeError, "value_level_start_index must have dtype int32 or int64; got int16"),
    (MULTI_SCALE, 3, lambda a: a.long(), TypeError, f"sampling_locations must {FLOATING}; got int64"),
    (MULTI_SCALE, 4, lambda a: a.bool(), TypeError, f"attention_weights must {FLOATING}; got bool"),
    (MULTI_SCALE, 4, lambda a: a.to("meta"), ValueError, "attention_weights must be on value's device (cpu); got meta"),
    (MULTI_SCALE, 1, lambda a: t([[3, 4], [0, 2]]), ValueError, "value_spatial_shapes[1] must be positive (H, W); got (0, 2)"),
    (
        MULTI_SCALE,
        1,
        lambda a: t([[-3, -4], [2, 2]]),
        ValueError,
        "value_spatial_shapes[0] must be positive (H, W); got (-3, -4)",
    ),
    (MULTI_SCALE, 2, lambda a: t([-1, 12]), ValueError, "value_level_start_index[0] must not be negative; got -1"),
    (
        MULTI_SCALE,
        2,
        lambda a: t([0, 13]),
        ValueError,
        "value_level_start_index[1] must leave room for 2 x 2 rows among 16; got 13 (needs 17 rows)",
    ),
    (
        MULTI_SCALE,
        1,
        lambda a: t([[3, 4], [2**62, 2**62]]),
        ValueError,
        f"value_level_start_index[1] must leave room for {2**62} x {2**62} rows among 16; got 12 (needs {12 + 2**124} rows)",
    ),
    (AGGREGATION, 4, lambda a: None, TypeError, "weight must be a torch.Tensor; got NoneType"),
    (AGGREGATION, 0, lambda a: a[0], ValueError, "feature_maps must have shape (bs, num_feat, c); got (16, 4)"),
    (AGGREGATION, 1, lambda a: a[0], ValueError, "spatial_shape must have shape (cam=2, scale=1, 2); got (1, 2)"),
    (AGGREGATION, 2, lambda a: a[0], ValueError, "scale_start_index must have shape (cam, scale); got (1,)"),
    (
        AGGREGATION,
        3,
        lambda a: a[..., 0],
        ValueError,
        "sample_locations must have shape (bs, anchor, pts, cam, 2); got (2, 3, 2, 2)",
    ),
    (
        AGGREGATION,
        3,
        lambda a: a[:, :, :, :1],
        ValueError,
        "sample_locations must have shape (bs=2, anchor=3, pts=2, cam=2, 2); got (2, 3, 2, 1, 2)",
    ),
    (
        AGGREGATION,
        4,
        lambda a: a[0],
        ValueError,
        "weight must have shape (bs, anchor, pts, cam, scale, group); got (3, 2, 2, 1, 2)",
    ),
    (
        AGGREGATION,
        4,
        lambda a: a[:, :2],
        ValueError,
        "weight must have shape (bs=2, anchor=3, pts=2, cam=2, scale=1, group=2); got (2, 2, 2, 2, 1, 2)",
    ),
    (AGGREGATION, 0, lambda a: a[..., :3], ValueError, "weight must have a group count that divides c=3; got 2"),
    (AGGREGATION, 4, lambda a: a[..., :0], ValueError, "weight must have a group count that divides c=4; got 0"),
    (AGGREGATION, 3, lambda a: a.int(), TypeError, f"sample_locations must {FLOATING}; got int32"),
    (
        AGGREGATION,
        1,
        lambda a: t([[[3, 4]], [[2, -2]]]),
        ValueError,
        "spatial_shape[1, 0] must be positive (H, W); got (2, -2)",
    ),
    (
        AGGREGATION,
        2,
        lambda a: t([[5], [12]]),
        ValueError,
        "scale_start_index[0, 0] must leave room for 3 x 4 rows among 16; got 5 (needs 17 rows)",
    ),
    (GEOMETRIC, 0, lambda a: a.int(), TypeError, f"value must {FLOATING}; got int32"),
    (GEOMETRIC, 3, lambda a: a.bool(), TypeError, "sampling_locations must have a floating or an integer dtype; got bool"),
    (GEOMETRIC, 1, lambda a: a[:1], ValueError, "level_start_index must have shape (num_levels=1); got (2,)"),
    (GEOMETRIC, 1, lambda a: t([[3, 4], [2, 0]]), ValueError, "spatial_shapes[1] must be positive (H, W); got (2, 0)"),
    (GEOMETRIC, 2, lambda a: t([0, -5]), ValueError, "level_start_index[1] must not be negative; got -5"),
]


@pytest.mark.parametrize(("operator", "place", "change", "error", "sentence"), ROWS, ids=[f"{r[0]}: {r[-1]}" for r in ROWS])
def test_sentence(operator, place, change, error, sentence):
    args = list(GOOD[operator]())
    args[place] = change(args[place])
    with pytest.raises(error) as caught:
        getattr(mx_driving, operator)(*args)
    assert str(caught.value) == sentence


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_levels_are_checked_below_the_door_too(implementation, operator, backward):
    """torch.ops called directly: the kernel itself refuses, and so does the reference behind the same door."""
    args = list(GOOD[operator]())
    args[2] = args[2] + 1
    op = getattr(torch.ops.mx_driving, operator + ("_backward" if backward else "")).default
    mask = ([True] * len(cases.DIFFERENTIABLE[operator]),) if backward else ()
    grad = (cases.grad_for(operator, tuple(args)).float(),) if backward else ()
    with pytest.raises(ValueError, match="must leave room for 2 x 2 rows among 16"):
        op(*grad, *args, *mask)


@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_wrong_shapes_below_the_door_are_refused(operator):
    """Memory safety does not depend on the door."""
    args = list(GOOD[operator]())
    args[4] = args[4][..., :1].contiguous() if operator != AGGREGATION else args[4][:, :1].contiguous()
    with pytest.raises(RuntimeError, match="shapes that do not agree"):
        getattr(torch.ops.mx_driving, operator).default(*args)
