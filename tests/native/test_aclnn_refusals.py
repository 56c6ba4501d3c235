"""mx_driving.aclnn refuses: every status of phase one with its sentence, for null, dtypes, shapes, limits, views, formats."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch
from aclnn_calls import DTYPES, INVALID, NAMES, NULLPTR, OK, nine, phase_one, replaced

from mx_driving._vendor import aclnn


@pytest.mark.parametrize("index", range(9))
def test_null(index):
    tensors = replaced(index, None)
    assert phase_one(*tensors) == (NULLPTR, 0, None)
    assert aclnn.recent_error() == f"{NAMES[index]} must be a tensor; got NULL"
    assert aclnn.recent_error() is None


def raw_phase_one(tensors, size, executor):
    handles = [aclnn._describe(name, t) for name, t in zip(NAMES, tensors, strict=True)]
    status = aclnn._library().aclnnMultiScaleDeformableAttentionGradGetWorkspaceSize(*handles, size, executor)
    for handle in handles:
        aclnn._library().aclDestroyTensor(handle)
    return status


def test_null_results_and_nothing_written_on_failure():
    size, executor = ctypes.c_uint64(99), ctypes.c_void_p(98)
    assert raw_phase_one(nine(), None, ctypes.byref(executor)) == NULLPTR
    assert raw_phase_one(nine(), ctypes.byref(size), None) == NULLPTR
    assert raw_phase_one(replaced(1, torch.ones(3, 2)), ctypes.byref(size), ctypes.byref(executor)) == INVALID
    assert (size.value, executor.value) == (99, 98)


def test_null_memory():
    value = nine()[0]
    handle = aclnn._library().aclCreateTensor((ctypes.c_int64 * 4)(*value.shape), 4, 0, None, 0, 2, None, 0, None)
    others = [aclnn._describe(name, t) for name, t in zip(NAMES[1:], nine()[1:], strict=True)]
    size, executor = ctypes.c_uint64(), ctypes.c_void_p()
    call = aclnn._library().aclnnMultiScaleDeformableAttentionGradGetWorkspaceSize
    assert call(handle, *others, ctypes.byref(size), ctypes.byref(executor)) == NULLPTR
    assert aclnn.recent_error() == "value must have memory for its elements; got NULL"
    for each in (handle, *others):
        assert aclnn._library().aclDestroyTensor(each) == OK


@pytest.mark.parametrize("index", range(9))
def test_dtypes_out_of_range(index):
    for dtype in (torch.float32, torch.int16, torch.uint8) if index in (1, 2) else (torch.float64, torch.int32, torch.bool):
        assert phase_one(*replaced(index, lambda t, dtype=dtype: t.to(dtype)))[0] == INVALID
        assert (aclnn.recent_error() or "").startswith(f"{NAMES[index]} must have dtype ")


def count_accepted(call, tensors, floating):
    """Try every mixture of the three floating dtypes; only calls of one dtype are legal -> (accepted, refused)."""
    accepted = refused = 0
    for mixture in itertools.product(DTYPES, repeat=len(floating)):
        mixed = [*tensors]
        for index, dtype in zip(floating, mixture, strict=True):
            mixed[index] = mixed[index].to(dtype)
        status, _, executor = call(*mixed)
        if len(set(mixture)) == 1:
            assert status == OK, aclnn.recent_error()
            accepted += 1
            continue
        assert (status, executor) == (INVALID, None), mixture
        assert " must have value's dtype ACL_" in (aclnn.recent_error() or "")
        refused += 1
    return accepted, refused


def test_mixtures_of_dtypes():
    tensors = nine(queries=2, sizes=((2, 2),), points=1)
    assert count_accepted(phase_one, tensors, (0, 3, 4, 5, 6, 7, 8)) == (3, 3**7 - 3)
    assert count_accepted(forward_phase_one, [*tensors[:5], torch.zeros(1, 2, 16)], (0, 3, 4, 5)) == (3, 3**4 - 3)


@pytest.mark.parametrize("index", range(3, 9))
def test_the_sentence_of_a_mixture(index):
    assert phase_one(*replaced(index, lambda t: t.half()))[0] == INVALID
    assert aclnn.recent_error() == f"{NAMES[index]} must have value's dtype ACL_FLOAT; got ACL_FLOAT16"


@pytest.mark.parametrize("index", range(9))
def test_shapes_that_do_not_agree(index):
    t = nine()[index]
    longer = ([size + 8 * (axis == one) for axis, size in enumerate(t.shape)] for one in range(t.dim()))
    for shape in ([*t.shape, 1], t.shape[:-1] if index != 5 else t.shape[:1], *longer):
        assert phase_one(*replaced(index, t.new_ones(shape)))[0] == INVALID
        assert " must have " in (aclnn.recent_error() or "")


def test_sentences():
    assert phase_one(*replaced(8, torch.ones(1, 5, 2, 2, 4)))[0] == INVALID
    rule = "gradAttnWeight must have shape (bs=1, num_queries=5, num_heads=2, num_levels=2, num_points=3); "
    assert aclnn.recent_error() == rule + "got (1, 5, 2, 2, 4)"
    assert phase_one(*replaced(5, torch.ones(1, 5, 17)))[0] == INVALID
    rule = "gradOutput must have shape (bs=1, num_queries=5, num_heads * channels=16); "
    assert aclnn.recent_error() == rule + "got (1, 5, 17)"


forward_phase_one = aclnn.multi_scale_deformable_attn_function_get_workspace_size


def test_the_forwards_output_has_three_axes():
    """CANN's sources refuse four since July 2026; gradOutput may still have them, as older documents say."""
    inputs = nine()[:5]
    assert forward_phase_one(*inputs, torch.zeros(1, 5, 16))[0] == OK
    assert forward_phase_one(*inputs, torch.zeros(1, 5, 2, 8))[0] == INVALID
    assert aclnn.recent_error() == "output must have 3 axes (bs, num_queries, num_heads * channels); got (1, 5, 2, 8)"
    for shape in ((1, 5, 17), (1, 6, 16), (2, 5, 16), (5, 16), (1, 5, 1, 2, 8)):
        assert forward_phase_one(*inputs, torch.zeros(shape))[0] == INVALID
        assert (aclnn.recent_error() or "").startswith(
            "output must have shape (bs=1, num_queries=5, num_heads * channels=16); got"
        )
    assert phase_one(*replaced(5, torch.ones(1, 5, 2, 8)))[0] == OK


LEVELS_16 = [(1, 1)] * 16
LIMITS = [
    ({"channels": 256}, {"channels": 264}, "value must have channels a multiple of 8 and <= 256; got 264"),
    ({"channels": 16}, {"channels": 12}, "value must have channels a multiple of 8 and <= 256; got 12"),
    ({"heads": 16}, {"heads": 17}, "value must have num_heads <= 16; got 17"),
    ({"sizes": LEVELS_16}, {"sizes": [*LEVELS_16, (1, 1)]}, "spatialShape must have num_levels <= 16; got 17"),
    ({"points": 16}, {"points": 17}, "location must have num_points <= 16; got 17"),
    (
        {"queries": 499999, "heads": 1, "points": 1, "sizes": [(1, 1)]},
        {"queries": 500000, "heads": 1, "points": 1, "sizes": [(1, 1)]},
        "location must have num_queries < 500000; got 500000",
    ),
]


@pytest.mark.parametrize(("within", "past", "sentence"), LIMITS, ids=[row[2] for row in LIMITS])
def test_limits(within, past, sentence):
    status, size, executor = phase_one(*nine(**within))
    assert status == OK
    assert size > 0
    assert executor is not None
    assert phase_one(*nine(**past)) == (INVALID, 0, None)
    assert aclnn.recent_error() == sentence


LIMITS_OF_310P = [
    ({"channels": 24}, "value must have channels a multiple of 32 on 310P; got 24"),
    ({"heads": 3}, "value must have num_heads 2, 4 or 8 on 310P; got 3"),
    ({"queries": 31}, "location must have num_queries >= 32 on 310P; got 31"),
    ({"points": 3}, "location must have num_points 4 or 8 on 310P; got 3"),
    ({"dtype": torch.bfloat16}, "value must have dtype ACL_FLOAT or ACL_FLOAT16 on 310P; got ACL_BF16"),
    ({"points": 17}, "location must have num_points <= 16; got 17"),
]


def test_limits_of_310p(monkeypatch):
    """The forward's, on request; the product has no gradient."""

    def forward(**sizes):
        sizes = {"queries": 32, "channels": 32, "heads": 2, "points": 4, **sizes}
        tensors = nine(**sizes)
        return forward_phase_one(*tensors[:5], tensors[0].new_zeros(1, sizes["queries"], sizes["heads"] * sizes["channels"]))[0]

    assert [forward(**sizes) for sizes, _ in LIMITS_OF_310P] == [OK] * 5 + [INVALID]
    monkeypatch.setenv("MX_DRIVING_CANN_PRODUCT", "310P")
    for heads, points, dtype in itertools.product((2, 4, 8), (4, 8), DTYPES[:2]):
        assert forward(heads=heads, points=points, dtype=dtype) == OK
    for sizes, sentence in LIMITS_OF_310P:
        assert forward(**sizes) == INVALID
        assert aclnn.recent_error() == sentence
    assert phase_one(*nine(queries=32, channels=32, points=4))[0] == INVALID
    assert aclnn.recent_error() == "gradOutput must not be given on 310P, which has no gradient; got a tensor"
    monkeypatch.setenv("MX_DRIVING_CANN_PRODUCT", "910")
    assert forward() == INVALID
    assert aclnn.recent_error() == "MX_DRIVING_CANN_PRODUCT must be 310P or empty; got 910"


def test_rows_beyond_what_a_kernel_can_count():
    expanded = torch.zeros(1).expand(1, 2**31 - 1, 1, 8)
    tensors = nine(heads=1)
    tensors[0] = tensors[6] = expanded
    assert phase_one(*tensors)[0] == INVALID
    assert aclnn.recent_error() == "value must have num_keys < 2147483647; got 2147483647"


def test_an_output_whose_elements_share_memory():
    for index in (6, 7, 8):
        assert phase_one(*replaced(index, lambda t: t[:, :1].expand(t.shape)))[0] == INVALID
        assert f"{NAMES[index]} must have strides that keep its elements apart" in (aclnn.recent_error() or "")
    window = torch.zeros(64).as_strided((1, 16, 2, 8), (64, 1, 16, 1))
    assert phase_one(*replaced(6, window))[0] == INVALID


@pytest.mark.parametrize("index", [6, 7, 8])
def test_an_output_that_shares_memory(index):
    for other in (other for other in range(9) if other != index):
        tensors = nine(sizes=[(2, 2), (2, 2)], channels=24, queries=8)  # every tensor has room for the first elements of any
        shape, strides = tensors[other].shape, tensors[other].stride()
        if other in (1, 2):
            tensors[other] = tensors[index].flatten().view(torch.int64)[: tensors[other].numel()].view(shape)
        elif tensors[index].numel() >= tensors[other].numel():
            tensors[other] = tensors[index].as_strided(shape, strides)
        else:
            continue
        assert phase_one(*tensors)[0] == INVALID
        assert (aclnn.recent_error() or "").endswith("; got addresses that both have")


def test_a_view_that_leaves_its_storage():
    """torch cannot make one, a C program can."""
    tensors = nine()
    handles = [aclnn._describe(name, t) for name, t in zip(NAMES, tensors, strict=True)]
    shape = (ctypes.c_int64 * 4)(1, 16, 2, 8)
    size, executor = ctypes.c_uint64(), ctypes.c_void_p()
    library = aclnn._library()
    for strides, offset, room, status in (
        ((256, 16, 8, 1), 0, 256, OK),
        ((256, 16, 8, 1), 1, 256, INVALID),
        ((256, 16, 8, 1), 0, 255, INVALID),
        ((256, 16, 8, -1), 7, 256, OK),
        ((256, 16, 8, -1), 6, 256, INVALID),
        ((256, 16, 2**62, 1), 0, 256, INVALID),
        ((256, 2**63 - 1, 8, 1), 0, 256, INVALID),
        ((256, 16, 8, 1), -(2**63), 256, INVALID),
    ):
        grad_value = library.aclCreateTensor(
            shape, 4, 0, (ctypes.c_int64 * 4)(*strides), offset, 2, (ctypes.c_int64 * 1)(room), 1, tensors[6].data_ptr()
        )
        arguments = [*handles[:6], grad_value, *handles[7:]]
        got = library.aclnnMultiScaleDeformableAttentionGradGetWorkspaceSize(
            *arguments, ctypes.byref(size), ctypes.byref(executor)
        )
        assert got == status, (strides, offset, room, aclnn.recent_error())
        if got == OK:
            assert library.aclDestroyAclOpExecutor(executor) == OK
        library.aclDestroyTensor(grad_value)
    for handle in handles:
        library.aclDestroyTensor(handle)


@pytest.mark.parametrize(("format", "status"), [(2, OK), (0, INVALID), (29, INVALID), (-1, INVALID)])
def test_formats(format, status, monkeypatch):
    monkeypatch.setattr(aclnn, "_FORMAT_ND", format)
    assert phase_one(*nine())[0] == status


def test_convenience_raises():
    tensors = nine()
    call = aclnn.multi_scale_deformable_attention_grad_out
    for index, bad, error, sentence in (
        (0, tensors[0].double(), TypeError, "value must have dtype ACL_FLOAT, ACL_FLOAT16 or ACL_BF16; got ACL_DOUBLE"),
        (5, None, TypeError, "grad_output must be a tensor; got NULL"),
        (2, torch.tensor([0]), ValueError, "level_start_index must have shape (num_levels=2,); got (1,)"),
        (2, torch.tensor([0, 99]), ValueError, "level_start_index[1] must leave room for 2 x 2 rows among 16; got 99"),
        (4, "weights", TypeError, "attn_weight must be a torch.Tensor; got str"),
        (6, torch.empty(1, device="meta"), ValueError, "grad_value must be a plain strided tensor on the CPU; got "),
    ):
        arguments = [*tensors]
        arguments[index] = bad
        with pytest.raises(error) as caught:
            call(*arguments)
        assert str(caught.value).startswith(sentence)
    for index, name in enumerate(("location", "attn_weight", "grad_output"), start=3):
        with pytest.raises(TypeError, match=f"^{name} must have value's dtype ACL_FLOAT; got ACL_BF16$"):
            call(*tensors[:index], tensors[index].bfloat16(), *tensors[index + 1 :])
    wrong = torch.empty(1, 5, 16, dtype=torch.float16)
    with pytest.raises(TypeError, match="output must have value's dtype ACL_FLOAT; got ACL_FLOAT16"):
        aclnn.multi_scale_deformable_attn_function_out(*tensors[:5], wrong)
    with pytest.raises(ValueError, match="value must have shape"):
        aclnn.multi_scale_deformable_attn_function_out(tensors[0][0], *tensors[1:5])
