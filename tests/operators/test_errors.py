"""One row per error message: the whole sentence, before any work."""

from __future__ import annotations

import contextlib

import cases
import pytest
import torch
from cases import AGGREGATION, GEOMETRIC, MULTI_SCALE
from small_cases import GOOD
from torch._subclasses.fake_tensor import FakeTensorMode

import mx_driving
from mx_driving import _dispatch, _kernels, reference

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
    (
        MULTI_SCALE,
        0,
        lambda a: a[0],
        ValueError,
        "value must have shape (bs=2, num_keys, num_heads=2, embed_dims); got (16, 2, 4)",
    ),
    (MULTI_SCALE, 1, lambda a: a[0], ValueError, "value_spatial_shapes must have shape (num_levels=2, 2); got (2,)"),
    (MULTI_SCALE, 1, lambda a: a[:, :1], ValueError, "value_spatial_shapes must have shape (num_levels=2, 2); got (2, 1)"),
    (MULTI_SCALE, 2, lambda a: a[:1], ValueError, "value_level_start_index must have shape (num_levels=2); got (1,)"),
    (
        MULTI_SCALE,
        3,
        lambda a: a[..., 0],
        ValueError,
        "sampling_locations must have shape (bs=2, num_queries=3, num_heads=2, num_levels=2, num_points=2, 2); "
        "got (2, 3, 2, 2, 2)",
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
    (AGGREGATION, 0, lambda a: a[0], ValueError, "feature_maps must have shape (bs=2, num_feat, c); got (16, 4)"),
    (AGGREGATION, 1, lambda a: a[0], ValueError, "spatial_shape must have shape (cam=2, scale=1, 2); got (1, 2)"),
    (AGGREGATION, 2, lambda a: a[0], ValueError, "scale_start_index must have shape (cam=2, scale=1); got (1,)"),
    (
        AGGREGATION,
        3,
        lambda a: a[..., 0],
        ValueError,
        "sample_locations must have shape (bs=2, anchor=3, pts=2, cam=2, 2); got (2, 3, 2, 2)",
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
        "weight must have shape (bs=2, anchor=3, pts=2, cam=2, scale=1, group); got (3, 2, 2, 1, 2)",
    ),
    (
        AGGREGATION,
        4,
        lambda a: a[:, :2],
        ValueError,
        "weight must have shape (bs=2, anchor=3, pts=2, cam=2, scale=1, group); got (2, 2, 2, 2, 1, 2)",
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
    (GEOMETRIC, 1, lambda a: a[:1], ValueError, "spatial_shapes must have shape (num_levels=2, 2); got (1, 2)"),
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
    """Called through torch.ops, the kernel itself refuses, and so does the reference."""
    args = list(GOOD[operator]())
    args[2] = args[2] + 1
    op = getattr(torch.ops.mx_driving, operator + ("_backward" if backward else "")).default
    mask = ([True] * len(cases.DIFFERENTIABLE[operator]),) if backward else ()
    grad = (cases.grad_for(operator, tuple(args)).float(),) if backward else ()
    with pytest.raises(ValueError, match="must leave room for 2 x 2 rows among 16"):
        op(*grad, *args, *mask)


def backward_of(operator):
    """torch.ops' backward, and legal arguments for it."""
    args = GOOD[operator]()
    mask = [True] * len(cases.DIFFERENTIABLE[operator])
    op = getattr(torch.ops.mx_driving, operator + "_backward").default
    return op, [cases.grad_for(operator, args).float(), *args, mask]


def refused_on(place, op, args):
    """What `op` says where the tensors are: on a CPU, as the kernels of GPUs are entered, as fakes, or on another device."""
    backward = op._opname.endswith("_backward")
    name = op._opname.removesuffix("_backward")
    if place == "cuda":  # whatever the device, the check comes first
        op = _dispatch.library._cuda(name, backward)
    if place == "reference":
        op = _dispatch.library._reference(name, backward)
    if place in ("meta", "fake"):
        mode = contextlib.nullcontext() if place == "meta" else FakeTensorMode()
        with mode:
            fake = mode.from_tensor if place == "fake" else lambda t: t if t.is_meta else t.to("meta")
            args = [fake(a) if isinstance(a, torch.Tensor) else a for a in args]
            with pytest.raises((TypeError, ValueError)) as caught:
                op(*args)
    else:
        with pytest.raises((TypeError, ValueError)) as caught:
            op(*args)
    return caught.type, str(caught.value)


PLACES = ["cpu", "cuda", "reference", "meta", "fake"]
# The rows of ROWS that hold everywhere without a door. Left out are arguments that are no tensors, which the dispatcher
# refuses, and the contents of index tables, which are read on a CPU alone.
BELOW = [row for row in ROWS if "torch.Tensor" not in row[4] and "[" not in row[4] and "device" not in row[4]]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("operator", "at", "change", "error", "sentence"), BELOW, ids=[r[-1] for r in BELOW])
def test_the_sentence_below_the_door(operator, at, change, error, sentence, backward, place):
    op, args = backward_of(operator)
    if not backward:
        op, args = getattr(torch.ops.mx_driving, operator).default, args[1:6]
    args[at + backward] = change(args[at + backward])
    assert refused_on(place, op, args) == (error, sentence)


GRAD_AXES = {
    MULTI_SCALE: "(bs=2, num_queries=3, num_heads * embed_dims=8)",
    AGGREGATION: "(bs=2, anchor=3, c=4)",
    GEOMETRIC: "(bs=2, num_queries=3, num_heads * embed_dims=8)",
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_grad_output_and_output_mask_are_checked(operator, place):
    op, good = backward_of(operator)
    grad, mask = good[0], good[-1]
    wrong = [
        (0, grad[:1], ValueError, f"grad_output must have shape {GRAD_AXES[operator]}; got {tuple(grad[:1].shape)}"),
        (0, grad[..., :1], ValueError, f"grad_output must have shape {GRAD_AXES[operator]}; got (2, 3, 1)"),
        (0, grad[0], ValueError, f"grad_output must have shape {GRAD_AXES[operator]}; got {tuple(grad[0].shape)}"),
        (0, grad.long(), TypeError, f"grad_output must {FLOATING}; got int64"),
        (6, mask[1:], ValueError, f"output_mask must have {len(mask)} entries, one for each gradient; got {len(mask) - 1}"),
        (6, [*mask, 1], ValueError, f"output_mask must have {len(mask)} entries, one for each gradient; got {len(mask) + 1}"),
    ]
    for at, what, error, sentence in wrong:
        assert refused_on(place, op, [*good[:at], what, *good[at + 1 :]]) == (error, sentence)


@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_devices_are_checked_below_the_door(operator):
    op, good = backward_of(operator)
    names = [argument.name for argument in op._schema.arguments]
    for at, name in enumerate(names[:6]):
        args = list(good)
        args[at] = args[at].to("meta")
        sentence = f"{name} must be on {names[1]}'s device (cpu); got meta"
        if at == 1:  # value itself is elsewhere, so the sentence names the next tensor
            sentence = f"{names[2]} must be on {names[1]}'s device (meta); got cpu"
        assert refused_on("cpu", op, args) == (ValueError, sentence)
        if at:
            forward = getattr(torch.ops.mx_driving, operator).default
            assert refused_on("cpu", forward, args[1:6]) == (ValueError, sentence)


@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_tensors_without_axes_or_elements_are_refused_in_words(operator):
    op, good = backward_of(operator)
    for nothing in (torch.empty(0), torch.empty(()), torch.empty([0] * 7), torch.empty([0] * 9)):
        kind, said = refused_on("cpu", op, [nothing] * 6 + [good[-1]])
        assert kind is ValueError
        assert said.startswith(f"{op._schema.arguments[1].name} must have shape")


@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_a_small_gradient_of_a_large_output_reads_nothing_else(operator):
    """grad_output has one channel of the 2^26 that value has. The kernel must not read the others."""
    op, _ = backward_of(operator)
    value = torch.zeros(1).expand(1, 1, 1, 2**26) if operator != AGGREGATION else torch.zeros(1).expand(1, 1, 2**26)
    levels = (t([[1, 1]]), t([0])) if operator != AGGREGATION else (t([[[1, 1]]]), t([[0]]))
    locations = torch.zeros(1, 1, 1, 1, 1, 2) if operator != AGGREGATION else torch.zeros(1, 1, 1, 1, 2)
    weights = torch.zeros(1, 1, 1, 1, 1) if operator != AGGREGATION else torch.zeros(1, 1, 1, 1, 1, 1)
    mask = [False] * (len(cases.DIFFERENTIABLE[operator]) - 1) + [True]
    kind, said = refused_on("cpu", op, [torch.ones(1, 1, 1), value, *levels, locations, weights, mask])
    assert kind is ValueError
    assert said.startswith("grad_output must have shape")


@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_compiled_calls_are_refused_too(operator):
    op, good = backward_of(operator)
    with pytest.raises((TypeError, ValueError, torch._dynamo.exc.TorchRuntimeError), match="grad_output must have shape"):
        torch.compile(lambda *args: op(*args, good[-1]), backend="eager")(good[0][..., :1], *good[1:6])


@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_more_keys_than_the_native_kernels_number_are_served(operator):
    """The reference serves them. Value is one expanded element, so it takes no memory."""
    keys = 2**31 + 8
    one = torch.full((1,), 3.0)
    if operator == AGGREGATION:
        args = (one.expand(1, keys, 1), t([[[8, keys // 8]]]), t([[0]]), torch.full((1, 1, 1, 1, 2), 0.5))
        weights = torch.full((1, 1, 1, 1, 1, 1), 2.0)
    else:
        args = (one.expand(1, keys, 1, 1), t([[8, keys // 8]]), t([0]), torch.full((1, 1, 1, 1, 1, 2), 0.5))
        weights = torch.full((1, 1, 1, 1, 1), 2.0)
    assert getattr(mx_driving, operator)(*args, weights).item() == 6


@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_gradients_of_more_keys_are_the_references(operator, monkeypatch):
    monkeypatch.setattr(_kernels.native, "_MOST_ROWS", 15)  # one less than there are
    monkeypatch.setattr(_kernels.native, "_library", lambda: pytest.fail("the native library was called"))
    op, good = backward_of(operator)
    for found, expected in zip(op(*good), getattr(reference, operator + "_backward")(*good), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("shape", [(1, 2, 3), (1, 2, 5), (1, 2), (2, 2, 4)])
def test_every_location_to_draw_has_a_weight(shape):
    from mx_driving._checks.inputs import same_samples

    same_samples(torch.zeros(1, 2, 4, 2), torch.zeros(1, 2, 4))
    with pytest.raises(ValueError) as refused:
        same_samples(torch.zeros(1, 2, 4, 2), torch.zeros(shape))
    assert str(refused.value) == f"weights must have shape (1, 2, 4); got {shape}"
