"""The C functions check each pointer, and that no other argument shares memory that the call writes. A mistake is a status.

A description does not own its memory, so each of these mistakes is one slip in a program in C.
"""

import ctypes
import itertools

import numpy
import pytest
import torch
from cases import MULTI_SCALE_LOGITS
from test_refusals import BAD_SHAPE, CALLS, EVERY, OK, call_of, described

from mx_driving import _backends

BAD_NAME, BAD_MEMORY = 5, 6
OPTIONAL = ("image_size", "pair_scale")


def is_written(argument: str) -> bool:
    return argument == "output" or argument.startswith("gradient of ")


def run(call, **other) -> int:
    """Call the C function, and return its status. None is passed as a null pointer."""
    packed = [a if a is None else a.packed() for a in {**call.arguments, **other}.values()]
    options = [0] if call.function.startswith(MULTI_SCALE_LOGITS) else []
    return getattr(_backends.native.loaded(), "mxd_" + call.function)(*packed, *options, 1)


@pytest.mark.parametrize(("name", "backward"), EVERY)
def test_null(name, backward):
    call = call_of(name, backward)
    for argument, good in call.arguments.items():
        null_tensor, null_data = run(call, **{argument: None}), run(call, **{argument: good._replace(pointer=0)})
        gradient = argument.startswith("gradient of ")
        assert null_tensor == (OK if gradient or argument in OPTIONAL else BAD_MEMORY), argument
        assert null_data == (OK if gradient else BAD_MEMORY), argument


@pytest.mark.parametrize("name", CALLS)
def test_a_tensor_without_elements_needs_no_memory(name):
    call = call_of(name, False)
    empty = {n: a._replace(pointer=0).sized(0, 0) for n, a in call.arguments.items()}
    batched = {n: a for n, a in empty.items() if call.arguments[n].shape[0] == call.arguments["output"].shape[0]}
    assert run(call, **batched) == OK
    assert run(call, **{**batched, "output": None}) == BAD_MEMORY


@pytest.mark.parametrize(("name", "backward"), EVERY)
def test_a_result_has_no_stride_of_zero(name, backward):
    call = call_of(name, backward)
    for argument, good in call.arguments.items():
        for axis, size in enumerate(good.shape):
            strides = (*good.strides[:axis], 0, *good.strides[axis + 1 :])
            refused = call.status(**{argument: good._replace(strides=strides)}) == BAD_MEMORY
            assert refused == (is_written(argument) and size > 1), (argument, axis)


@pytest.mark.parametrize(("name", "backward"), EVERY)
def test_a_result_shares_no_memory(name, backward):
    call = call_of(name, backward)
    for argument, written in call.arguments.items():
        for other, good in call.arguments.items():
            if not is_written(argument) or other == argument:
                continue
            last = sum((size - 1) * stride for size, stride in zip(written.shape, written.strides, strict=True))
            for place in (0, last):
                there = good._replace(pointer=written.pointer + 4 * place)
                assert call.status(**{other: there}) == BAD_MEMORY, (argument, other)


def test_slices_of_one_tensor_share_none():
    """Two gradients may be slices of one tensor, as those of linear layers that are one matrix product."""
    call = call_of("references", True)
    offsets, logits = (call.arguments[f"gradient of {n}"] for n in ("sampling_offsets", "attention_logits"))
    bs, queries, heads, levels, points, _ = offsets.shape
    whole = torch.zeros(bs, queries, heads, levels, points, 3)
    by_head = torch.zeros(bs, queries, heads, levels * points * 3).split(levels * points * 2, -1)
    for first, second in (
        (whole[..., :2], whole[..., 2]),
        (whole[..., 1:], whole[..., 0]),
        (whole[..., ::2], whole[..., 1]),
        (by_head[0].unflatten(-1, (levels, points, 2)), by_head[1].unflatten(-1, (levels, points))),
    ):
        given = {"gradient of sampling_offsets": described(first), "gradient of attention_logits": described(second)}
        assert (first.shape, second.shape) == (offsets.shape, logits.shape)
        assert run(call, **given) == OK
        moved = described(second)._replace(pointer=first.data_ptr())
        assert run(call, **{**given, "gradient of attention_logits": moved}) == BAD_MEMORY


def addresses(a) -> list[int]:
    steps = [range(0, size * stride, stride) if stride else [0] * size for size, stride in zip(a.shape, a.strides, strict=True)]
    return [a.pointer + 4 * sum(place) for place in itertools.product(*steps)]


def test_any_strides():
    """An accepted call writes no address twice: the test counts the addresses of all elements."""
    call, table, seen = call_of("samples", True), torch.tensor([[1, 2]]), set()
    sizes = {"sampling_locations": (1, 2, 1, 1, 2, 2), "attention_weights": (1, 2, 1, 1, 2), "value": (1, 2, 1, 3)}
    sizes |= {f"gradient of {n}": shape for n, shape in sizes.items()} | {"grad_output": (1, 2, 1, 3)}
    sizes |= {"value_spatial_shapes": (1, 2), "value_level_start_index": (1,)}
    given = {n: a._replace(shape=sizes[n]) for n, a in call.arguments.items()}
    given["value_spatial_shapes"] = described(table)
    random, room = numpy.random.default_rng(0), torch.zeros(200)
    for _ in range(2000):
        found = {}
        for name in ("sampling_locations", "attention_weights"):
            good = given[f"gradient of {name}"]
            strides = tuple(int(s) for s in random.integers(-4, 13, len(good.shape)))
            pointer = room.data_ptr() + 4 * int(random.integers(80, 100))
            found[f"gradient of {name}"] = good._replace(pointer=pointer, strides=strides)
        places = [place for a in found.values() for place in addresses(a)]
        status = call.status(**{**given, **found})
        once = len(set(places)) == len(places)
        assert status == BAD_MEMORY or once, found
        seen.add((status, once))
    assert seen == {(OK, True), (BAD_MEMORY, True), (BAD_MEMORY, False)}


@pytest.mark.parametrize("stride", [2**62, 2**63 - 1, -(2**63), -(2**61)])
@pytest.mark.parametrize("argument", ["value", "output"])
def test_addresses_have_64_bits(argument, stride):
    call = call_of("samples", False)
    good = call.arguments[argument]
    beyond = good._replace(strides=(stride, *good.strides[1:]))
    assert call.status(**{argument: beyond}) == BAD_MEMORY
    one = {n: a.sized(0, 1) if a.shape[0] == 3 else a for n, a in call.arguments.items()}
    assert call.status(**{**one, argument: beyond.sized(0, 1)}) == OK  # one element: the stride is never used


def describe(name, arguments, text, size) -> int:
    return _backends.native.loaded().mxd_describe_plan(name, arguments, 1, text, size)


def test_null_where_a_plan_is_described():
    call, text = call_of("samples", False), ctypes.create_string_buffer(64)
    name = call.function.encode()
    packed = [a.packed() for a in call.arguments.values()]
    arguments = (ctypes.c_char_p * len(packed))(*packed)
    assert describe(None, arguments, text, 64) == BAD_NAME
    assert describe(name, None, text, 64) == BAD_MEMORY
    assert describe(name, arguments, None, 64) == BAD_MEMORY
    assert text.raw == bytes(64)
    assert describe(name, arguments, None, 0) == OK
    arguments[0] = None
    assert describe(name, arguments, text, 64) == BAD_MEMORY


def test_a_null_name_is_no_instruction_set():
    before = _backends.native.isa()
    assert _backends.native.loaded().mxd_use_isa(None) == -1
    assert _backends.native.isa() == before


def test_shapes_that_do_not_agree_are_named_before_memory_that_is_shared():
    call = call_of("samples", False)
    output = call.arguments["output"].sized(1, 4)._replace(pointer=call.arguments["value"].pointer)
    assert call.status(output=output) == BAD_SHAPE


def test_a_tensor_whose_memory_was_given_back():
    """FSDP frees the memory of parameters between uses."""
    value, *rest = [t.clone() for t in call_of("samples", False).memory[:5]]
    value.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="value must have memory for its elements; got NULL"):
        torch.ops.mx_driving.multi_scale_deformable_attn(value, *rest)
