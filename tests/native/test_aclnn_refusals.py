"""Refusals of mx_driving.aclnn: each status of phase one with its sentence, for null, dtypes, shapes, limits and views.

test_streams.cpp has formats, and numbers that are no dtype."""

import ctypes
import itertools

import pytest
import torch
from aclnn_calls import DTYPES, FAULT, INVALID, NAMES, NULLPTR, OK, nine, phase_one, replaced
from hypothesis import given, settings
from hypothesis import strategies as st

from mx_driving import aclnn

forward_phase_one = aclnn.multi_scale_deformable_attn_function_get_workspace_size
LIBRARY = aclnn._library()
RAW = LIBRARY.aclnnMultiScaleDeformableAttentionGradGetWorkspaceSize


def raw_phase_one(tensors, size, executor, handle_of=None):
    """Call the C function. `handle_of` replaces handles of some tensors by index."""
    handles = [aclnn._describe(name, t) for name, t in zip(NAMES, tensors, strict=True)]
    status = RAW(*((handle_of or {}).get(i, handle) for i, handle in enumerate(handles)), size, executor)
    assert all(LIBRARY.aclDestroyTensor(handle) == OK for handle in handles)
    return status


@pytest.mark.parametrize("index", range(9))
def test_null(index):
    assert phase_one(*replaced(index, None)) == (NULLPTR, 0, None)
    assert aclnn.recent_error() == f"{NAMES[index]} must be a tensor; got NULL"
    assert aclnn.recent_error() is None


def test_null_results_and_nothing_written_on_failure():
    size, executor = ctypes.c_uint64(99), ctypes.c_void_p(98)
    assert raw_phase_one(nine(), None, ctypes.byref(executor)) == NULLPTR
    assert raw_phase_one(nine(), ctypes.byref(size), None) == NULLPTR
    assert raw_phase_one(replaced(1, torch.ones(3, 2)), ctypes.byref(size), ctypes.byref(executor)) == INVALID
    value = LIBRARY.aclCreateTensor((ctypes.c_int64 * 4)(*nine()[0].shape), 4, 0, None, 0, 2, None, 0, None)
    assert raw_phase_one(nine(), ctypes.byref(size), ctypes.byref(executor), {0: value}) == NULLPTR
    assert aclnn.recent_error() == "value must have memory for its elements; got NULL"
    assert LIBRARY.aclDestroyTensor(value) == OK
    assert (size.value, executor.value) == (99, 98)


@pytest.mark.parametrize("index", range(9))
def test_dtypes_out_of_range(index):
    for dtype in (torch.float32, torch.int16, torch.uint8) if index in (1, 2) else (torch.float64, torch.int32, torch.bool):
        assert phase_one(*replaced(index, lambda t, dtype=dtype: t.to(dtype)))[0] == INVALID
        assert (aclnn.recent_error() or "").startswith(f"{NAMES[index]} must have dtype ")


@pytest.mark.parametrize("backward", [False, True])
def test_mixtures_of_dtypes(backward):
    """All mixtures of three floating dtypes are tried. A call with one dtype is legal, all others are refused."""
    tensors = nine(queries=2, sizes=((2, 2),), points=1)
    call, floating = (phase_one, (0, 3, 4, 5, 6, 7, 8)) if backward else (forward_phase_one, (0, 3, 4, 5))
    tensors = tensors if backward else [*tensors[:5], torch.zeros(1, 2, 16)]
    for mixture in itertools.product(DTYPES, repeat=len(floating)):
        mixed = [*tensors]
        for index, dtype in zip(floating, mixture, strict=True):
            mixed[index] = mixed[index].to(dtype)
        status, _, executor = call(*mixed)
        if len(set(mixture)) == 1:
            assert status == OK, aclnn.recent_error()
        else:
            assert (status, executor) == (INVALID, None), mixture
            assert " must have value's dtype ACL_" in (aclnn.recent_error() or "")


@pytest.mark.parametrize("index", range(9))
def test_shapes_that_do_not_agree(index):
    t = nine()[index]
    longer = ([size + 8 * (axis == one) for axis, size in enumerate(t.shape)] for one in range(t.dim()))
    for shape in ([*t.shape, 1], t.shape[:-1] if index != 5 else t.shape[:1], *longer):
        assert phase_one(*replaced(index, t.new_ones(shape)))[0] == INVALID
        assert " must have " in (aclnn.recent_error() or "")


def test_the_forwards_output_has_three_axes():
    """CANN's sources refuse four axes since July 2026. gradOutput may still have four, as older documents say."""
    inputs = nine()[:5]
    assert forward_phase_one(*inputs, torch.zeros(1, 5, 16))[0] == OK
    assert forward_phase_one(*inputs, torch.zeros(1, 5, 2, 8))[0] == INVALID
    assert aclnn.recent_error() == "output must have 3 axes (bs, num_queries, num_heads * channels); got (1, 5, 2, 8)"
    for shape in ((1, 5, 17), (1, 6, 16), (2, 5, 16), (5, 16), (1, 5, 1, 2, 8)):
        assert forward_phase_one(*inputs, torch.zeros(shape))[0] == INVALID
        rule = "output must have shape (bs=1, num_queries=5, num_heads * channels=16); got"
        assert (aclnn.recent_error() or "").startswith(rule)
    assert phase_one(*replaced(5, torch.ones(1, 5, 2, 8)))[0] == OK


LEVELS_16 = [(1, 1)] * 16
MANY = {"queries": 500000, "heads": 1, "points": 1, "sizes": [(1, 1)]}
LIMITS = [
    ({"channels": 256}, {"channels": 264}, "value must have channels a multiple of 8 and <= 256; got 264"),
    ({"channels": 16}, {"channels": 12}, "value must have channels a multiple of 8 and <= 256; got 12"),
    ({"heads": 16}, {"heads": 17}, "value must have num_heads <= 16; got 17"),
    ({"sizes": LEVELS_16}, {"sizes": [*LEVELS_16, (1, 1)]}, "spatialShape must have num_levels <= 16; got 17"),
    ({"points": 16}, {"points": 17}, "location must have num_points <= 16; got 17"),
    ({**MANY, "queries": 499999}, MANY, "location must have num_queries < 500000; got 500000"),
]


@pytest.mark.parametrize(("within", "past", "sentence"), LIMITS, ids=[row[2] for row in LIMITS])
def test_limits(within, past, sentence):
    status, size, executor = phase_one(*nine(**within))
    assert (status, size > 0, executor is not None) == (OK, True, True)
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


def forward(**sizes):
    sizes = {"queries": 32, "channels": 32, "heads": 2, "points": 4, **sizes}
    tensors = nine(**sizes)
    return forward_phase_one(*tensors[:5], tensors[0].new_zeros(1, sizes["queries"], sizes["heads"] * sizes["channels"]))[0]


@pytest.mark.parametrize("product", ["A2", "A3", "950"])
def test_limits_of_a_product(product, monkeypatch):
    """The forward needs 32 queries on every product, and refuses none, too. gradOutput needs three axes."""
    four_axes = list(nine(queries=32, heads=2))
    four_axes[5] = four_axes[5].unflatten(-1, (2, -1))
    assert forward(queries=31) == forward(queries=0) == phase_one(*four_axes)[0] == OK
    monkeypatch.setenv("MX_DRIVING_CANN_PRODUCT", product)
    assert forward() == phase_one(*nine(queries=1))[0] == OK
    for queries in (31, 0):
        assert forward(queries=queries) == INVALID
        assert aclnn.recent_error() == f"location must have num_queries >= 32 on {product}; got {queries}"
    assert phase_one(*four_axes)[0] == INVALID
    rule = f"gradOutput must have 3 axes (bs, num_queries, num_heads * channels) on {product}"
    assert aclnn.recent_error().startswith(f"{rule}; got (1, 32, 2, ")


def test_limits_of_310p(monkeypatch):
    """The forward has these limits if the product is named. The product has no gradient."""
    assert [forward(**sizes) for sizes, _ in LIMITS_OF_310P] == [OK] * 5 + [INVALID]
    monkeypatch.setenv("MX_DRIVING_CANN_PRODUCT", "310P")
    for heads, points, dtype in itertools.product((2, 4, 8), (4, 8), DTYPES[:2]):
        assert forward(heads=heads, points=points, dtype=dtype) == OK
    for sizes, sentence in LIMITS_OF_310P:
        assert forward(**sizes) == INVALID
        assert aclnn.recent_error() == sentence
    with pytest.raises(TypeError, match="on 310P; got ACL_BF16"):
        aclnn.multi_scale_deformable_attn_function_out(*nine(queries=32, channels=32, dtype=torch.bfloat16, points=4)[:5])
    assert phase_one(*nine(queries=32, channels=32, points=4))[0] == INVALID
    assert aclnn.recent_error() == "gradOutput must not be given on 310P, which has no gradient; got a tensor"
    monkeypatch.setenv("MX_DRIVING_CANN_PRODUCT", "910")
    assert forward() == INVALID
    assert aclnn.recent_error() == "MX_DRIVING_CANN_PRODUCT must be A2, A3, 950, 310P or empty; got 910"


@pytest.mark.parametrize("index", [6, 7, 8])
def test_the_memory_of_an_output_is_its_own(index):
    """The sentences have CANN's names. test_refusals.py has all cases of this check."""
    assert phase_one(*replaced(index, lambda t: t[:, :1].expand(t.shape)))[0] == INVALID
    assert f"{NAMES[index]} must have strides that keep its elements apart" in (aclnn.recent_error() or "")
    tensors, source = nine(), (0, 3, 4)[index - 6]
    tensors[index] = tensors[source]
    assert phase_one(*tensors)[0] == INVALID
    assert aclnn.recent_error() == f"{NAMES[index]} must share no memory with {NAMES[source]}; got addresses that both have"


def create(t, shape, dtype, strides, offset, format, room):
    """Create a tensor of C with any description."""
    sizes, steps, rooms = ((ctypes.c_int64 * len(list_))(*list_) for list_ in (shape, strides, [room]))
    return LIBRARY.aclCreateTensor(sizes, len(shape), dtype, steps, offset, format, rooms, 1, t.data_ptr())


@pytest.mark.parametrize(
    ("strides", "offset", "room", "status"),
    [
        ((256, 16, 8, 1), 0, 256, OK),
        ((256, 16, 8, 1), 1, 256, INVALID),
        ((256, 16, 8, 1), 0, 255, INVALID),
        ((256, 16, 8, -1), 7, 256, OK),
        ((256, 16, 8, -1), 6, 256, INVALID),
        ((256, 16, 2**62, 1), 0, 256, INVALID),
        ((256, 2**63 - 1, 8, 1), 0, 256, INVALID),
        ((256, 16, 8, 1), -(2**63), 256, INVALID),
    ],
)
def test_a_view_that_leaves_its_storage(strides, offset, room, status):
    """Only a C program can describe such a view; torch refuses it."""
    tensors, size, executor = nine(), ctypes.c_uint64(), ctypes.c_void_p()
    grad_value = create(tensors[6], (1, 16, 2, 8), 0, strides, offset, 2, room)
    assert raw_phase_one(tensors, ctypes.byref(size), ctypes.byref(executor), {6: grad_value}) == status
    assert LIBRARY.aclDestroyTensor(grad_value) == OK
    assert not executor or LIBRARY.aclDestroyAclOpExecutor(executor) == OK


EDGES = [0, 1, 2, 8, 16, 17, 256, 264, 499999, 500000, 2**31 - 1, 2**31, 2**32, 2**47, 2**62, 2**63 - 1]
NUMBERS = st.one_of(st.integers(-3, 20), st.sampled_from([*EDGES, *(-n - 1 for n in EDGES)]), st.integers(-(2**63), 2**63 - 1))
FIELDS = ["shape", "strides", "strides", "offset", "dtype", "format", "room", "element"]
CHANGES = st.lists(st.tuples(st.integers(0, 8), st.sampled_from(FIELDS), st.integers(0, 5), NUMBERS), max_size=3)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(CHANGES)
def test_anything_may_stand_in_a_description(changes):
    """Each call returns a status, and writes results only on success. Accepted calls run, for any index tables."""
    tensors = nine()
    plain = [{"shape": [*t.shape], "strides": [*t.stride()], "room": t.numel()} for t in tensors]
    described = [{"offset": 0, "format": 2, "dtype": aclnn._DTYPE[t.dtype], **p} for t, p in zip(tensors, plain, strict=True)]
    for index, field, axis, number in changes:
        if field in ("shape", "strides"):
            numbers = described[index][field]
            numbers[axis % len(numbers)] = number
        elif field == "element":
            tensors[index].flatten()[axis % tensors[index].numel()] = number
        else:
            described[index][field] = number if field in ("offset", "room") else (number + 2**31) % 2**32 - 2**31
    handles = {i: create(t, **each) for i, (t, each) in enumerate(zip(tensors, described, strict=True))}
    size, executor = ctypes.c_uint64(0x1234), ctypes.c_void_p()
    status = raw_phase_one(tensors, ctypes.byref(size), ctypes.byref(executor), handles)
    assert all(LIBRARY.aclDestroyTensor(handle) == OK for handle in handles.values())
    if status != OK:
        assert status in (NULLPTR, INVALID)
        assert (size.value, executor.value) == (0x1234, None)
        assert " must " in (aclnn.recent_error() or "")
    elif any(field in ("room", "dtype") for _, field, _, _ in changes):  # the description may be larger than the memory
        assert LIBRARY.aclDestroyAclOpExecutor(executor) == OK
    else:
        workspace = ctypes.create_string_buffer(size.value)
        assert LIBRARY.aclnnMultiScaleDeformableAttentionGrad(workspace, size, executor, None) == OK
        assert aclnn.synchronize() in (OK, FAULT)


@pytest.mark.parametrize(
    ("index", "bad", "error", "sentence"),
    [
        (0, lambda t: t.double(), TypeError, "value must have dtype ACL_FLOAT, ACL_FLOAT16 or ACL_BF16; got ACL_DOUBLE"),
        (5, None, TypeError, "grad_output must be a tensor; got NULL"),
        (2, torch.tensor([0]), ValueError, "level_start_index must have shape (num_levels=2,); got (1,)"),
        (2, torch.tensor([0, 99]), ValueError, "level_start_index[1] must leave room for 2 x 2 rows among 16; got 99"),
        (4, "weights", TypeError, "attn_weight must be a torch.Tensor; got str"),
        (6, torch.empty(1, device="meta"), ValueError, "grad_value must be a plain strided tensor on the CPU; got "),
        (5, lambda t: t.bfloat16(), TypeError, "grad_output must have value's dtype ACL_FLOAT; got ACL_BF16"),
        (8, torch.ones(1, 5, 2, 2, 4), ValueError, "grad_attn_weight must have shape (bs=1, num_queries=5, num_heads=2, num_l"),
    ],
)
def test_convenience_raises(index, bad, error, sentence):
    with pytest.raises(error) as caught:
        aclnn.multi_scale_deformable_attention_grad_out(*replaced(index, bad))
    assert str(caught.value).startswith(sentence)
    assert caught.value.argument == sentence.partition(" ")[0].partition("[")[0]


def test_the_forwards_convenience_raises():
    tensors = nine()
    with pytest.raises(TypeError, match="output must have value's dtype ACL_FLOAT; got ACL_FLOAT16"):
        aclnn.multi_scale_deformable_attn_function_out(*tensors[:5], torch.empty(1, 5, 16, dtype=torch.float16))
    with pytest.raises(ValueError, match="value must have shape"):
        aclnn.multi_scale_deformable_attn_function_out(tensors[0][0], *tensors[1:5])
