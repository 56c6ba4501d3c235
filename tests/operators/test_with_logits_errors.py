"""The operators with logits: one row per error message, as test_errors.py has for the bare ones."""

from __future__ import annotations

import cases
import logits_cases
import pytest
import torch
from cases import AGGREGATION_LOGITS, GEOMETRIC_LOGITS, MULTI_SCALE_LOGITS

import mx_driving
from mx_driving import _dispatch

GOOD = {
    MULTI_SCALE_LOGITS: lambda: cases.cast(logits_cases.multi_scale(2, 3, 4, 2, [(3, 4), (2, 2)], 2), torch.float32),
    AGGREGATION_LOGITS: lambda: cases.cast(logits_cases.aggregation(2, 3, 2, 4, 2, [[(3, 4)], [(2, 2)]]), torch.float32),
    GEOMETRIC_LOGITS: lambda: cases.cast(logits_cases.geometric(2, 3, 4, 2, [(3, 4), (2, 2)], (1, 2)), torch.float32),
}
FLOATING = "have dtype float32, float64, float16 or bfloat16"
ROWS = [
    *(
        (MULTI_SCALE_LOGITS, *row)
        for row in [
            (0, lambda a: a.numpy(), TypeError, "value must be a torch.Tensor; got ndarray"),
            (5, lambda a: None, TypeError, "attention_logits must be a torch.Tensor; got NoneType"),
            (
                0,
                lambda a: a.transpose(1, 2),
                ValueError,
                "value must have shape (bs=2, num_keys, num_heads=2, embed_dims); "
                "got (2, 2, 16, 4), whose axes 1 and 2 look swapped",
            ),
            (1, lambda a: a[:1], ValueError, "value_spatial_shapes must have shape (num_levels=2, 2); got (1, 2)"),
            (
                3,
                lambda a: a[:, :, :, :1],
                ValueError,
                "reference_points must have shape (bs=2, num_queries=3, num_levels=2 or 1, 2 or 4); "
                "got (2, 3, 2, 1), whose axes 2 and 3 look swapped",
            ),
            (
                3,
                lambda a: a.repeat(1, 1, 2, 1),
                ValueError,
                "reference_points must have shape (bs=2, num_queries=3, num_levels=2 or 1, 2 or 4); "
                "got (2, 3, 4, 2), whose axes 2 and 3 look swapped",
            ),
            (
                4,
                lambda a: a[..., 0],
                ValueError,
                "sampling_offsets must have shape (bs=2, num_queries=3, num_heads=2, num_levels=2, num_points, 2); "
                "got (2, 3, 2, 2, 2)",
            ),
            (
                5,
                lambda a: a[..., :3],
                ValueError,
                "attention_logits must have shape (bs=2, num_queries=3, num_heads=2, num_levels * num_points=4); "
                "got (2, 3, 2, 3)",
            ),
            (
                5,
                lambda a: a.view(2, 3, 2, 4, 1),
                ValueError,
                "attention_logits must have shape (bs=2, num_queries=3, num_heads=2, num_levels=2, num_points=2); "
                "got (2, 3, 2, 4, 1)",
            ),
            (3, lambda a: a.long(), TypeError, f"reference_points must {FLOATING}; got int64"),
            (4, lambda a: a.int(), TypeError, f"sampling_offsets must {FLOATING}; got int32"),
            (5, lambda a: a.bool(), TypeError, f"attention_logits must {FLOATING}; got bool"),
            (2, lambda a: a.short(), TypeError, "value_level_start_index must have dtype int32 or int64; got int16"),
            (5, lambda a: a.to("meta"), ValueError, "attention_logits must be on value's device (cpu); got meta"),
            (6, lambda a: "heads", ValueError, "reference_axis must be 'level' or 'point'; got 'heads'"),
            (
                2,
                lambda a: a + 1,
                ValueError,
                "value_level_start_index[1] must leave room for 2 x 2 rows among 16; got 13 (needs 17 rows)",
            ),
        ]
    ),
    *(
        (AGGREGATION_LOGITS, *row)
        for row in [
            (4, lambda a: None, TypeError, "projection must be a torch.Tensor; got NoneType"),
            (
                6,
                lambda a: a.tolist(),
                TypeError,
                "image_size must be a torch.Tensor, as torch.tensor(image_size) makes it; got list",
            ),
            (0, lambda a: a[0], ValueError, "feature_maps must have shape (bs=2, num_feat, c); got (16, 4)"),
            (3, lambda a: a[..., :2], ValueError, "key_points must have shape (bs=2, anchor=3, pts=2, 3); got (2, 3, 2, 2)"),
            (4, lambda a: a[:, :, :3], ValueError, "projection must have shape (bs=2, cam=2, 4, 4); got (2, 2, 3, 4)"),
            (
                5,
                lambda a: a.transpose(3, 4),
                ValueError,
                "logits must have shape (bs=2, anchor=3, cam=2, scale=1, pts=2, group); "
                "got (2, 3, 2, 2, 1, 2), whose axes 3 and 4 look swapped",
            ),
            (0, lambda a: a[..., :3], ValueError, "logits must have a group count that divides c=3; got 2"),
            (6, lambda a: a[0], ValueError, "image_size must have shape (bs=2, cam=2, 2); got (2, 2)"),
            (
                7,
                lambda a: a.transpose(2, 3)[:, :, :1],
                ValueError,
                "pair_scale must have shape (bs=2, anchor=3, cam=2, pts=2); got (2, 3, 1, 2)",
            ),
            (7, lambda a: a.bool(), TypeError, f"pair_scale must {FLOATING}; got bool"),
            (6, lambda a: a.int(), TypeError, f"image_size must {FLOATING}; got int32"),
            (7, lambda a: a.to("meta"), ValueError, "pair_scale must be on feature_maps's device (cpu); got meta"),
            (
                2,
                lambda a: a + 1,
                ValueError,
                "scale_start_index[1, 0] must leave room for 2 x 2 rows among 16; got 13 (needs 17 rows)",
            ),
        ]
    ),
    *(
        (GEOMETRIC_LOGITS, *row)
        for row in [
            (4, lambda a: a.tolist(), TypeError, "window must be a torch.Tensor, as torch.tensor(window) makes it; got list"),
            (
                0,
                lambda a: a[:, :, :1],
                ValueError,
                "value must have shape (bs=2, num_keys, num_heads=2, embed_dims); got (2, 16, 1, 4)",
            ),
            (
                3,
                lambda a: a[0],
                ValueError,
                "reference_points must have shape (bs=2, num_queries=3, num_heads=2, 2); got (3, 2, 2)",
            ),
            (
                3,
                lambda a: a[:, :, :1],
                ValueError,
                "reference_points must have shape (bs=2, num_queries=3, num_heads=2, 2); got (2, 3, 1, 2)",
            ),
            (4, lambda a: a[0], ValueError, "window must have shape (num_points, 2); got (2,)"),
            (
                4,
                lambda a: a[:, :1],
                ValueError,
                "window must have shape (num_points, 2); got (2, 1), whose axes 0 and 1 look swapped",
            ),
            (4, lambda a: a.bool(), TypeError, "window must have dtype int32 or int64; got bool"),
            (4, lambda a: a.float(), TypeError, "window must have dtype int32 or int64; got float32"),
            (3, lambda a: a.long(), TypeError, f"reference_points must {FLOATING}; got int64"),
            (2, lambda a: a[:1], ValueError, "level_start_index must have shape (num_levels=2); got (1,)"),
            (
                5,
                lambda a: a[..., :3],
                ValueError,
                "attention_logits must have shape (bs=2, num_queries=3, num_heads=2, num_levels * num_points=4); "
                "got (2, 3, 2, 3)",
            ),
            (1, lambda a: a * 0, ValueError, "spatial_shapes[0] must be positive (H, W); got (0, 0)"),
        ]
    ),
]


@pytest.mark.parametrize(("operator", "place", "change", "error", "sentence"), ROWS, ids=[f"{r[0]}: {r[-1]}" for r in ROWS])
def test_sentence(operator, place, change, error, sentence):
    args = list(GOOD[operator]())
    args[place] = change(args[place])
    with pytest.raises(error) as caught:
        getattr(mx_driving, operator)(*args)
    assert str(caught.value) == sentence


def test_references_of_points_divide_them():
    args = list(GOOD[MULTI_SCALE_LOGITS]())
    args[3], args[6] = args[3].repeat(1, 1, 2, 1)[:, :, :3], "point"
    sentence = r"must have shape \(bs=2, num_queries=3, a divisor of num_points=2, 2 or 4\); got \(2, 3, 3, 2\)"
    with pytest.raises(ValueError, match=f"reference_points {sentence}"):
        mx_driving.multi_scale_deformable_attn_with_logits(*args)


BELOW = [row for row in ROWS if not any(word in row[4] for word in ("torch.Tensor", "[", "device"))]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("operator", "place", "change", "error", "sentence"), BELOW, ids=[r[-1] for r in BELOW])
def test_the_sentence_below_the_door(operator, place, change, error, sentence, backward):
    """Through torch.ops, as the kernels of GPUs are entered, and on a device that holds no data."""
    args = list(GOOD[operator]())
    grad, mask = cases.grad_for(operator, tuple(args)).float(), [True] * len(cases.DIFFERENTIABLE[operator])
    args[place] = change(args[place])
    name = operator + "_backward" * backward
    meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in args]
    for op, given, g in (
        (getattr(torch.ops.mx_driving, name).default, args, grad),
        (_dispatch.library._cuda(operator, backward), args, grad),
        (getattr(torch.ops.mx_driving, name).default, meta, grad.to("meta")),
    ):
        with pytest.raises(error) as caught:
            op(*([g, *given, mask] if backward else given))
        assert str(caught.value) == sentence
