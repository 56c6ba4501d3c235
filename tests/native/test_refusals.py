"""The C functions check each size and dtype. These tests compare the status of calls with one wrong size or dtype.

mxd_describe_plan runs the checks of the function that it describes. It reads index tables, and no other memory.
"""

import ctypes
from typing import NamedTuple

import cases
import pytest
import torch
from refusals import CALLS
from torch import Tensor

from mx_driving import _backends
from mx_driving._operator.description import OPERATORS

OK, BAD_SHAPE, BAD_DTYPE, BAD_LEVEL, OUT_OF_MEMORY = range(5)
INT32 = 3


class Argument(NamedTuple):
    """The fields of a description of a tensor."""

    pointer: int
    dtype: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def packed(self) -> bytes:
        return _backends.native._PACK[len(self.shape)](self.pointer, self.dtype, *self.shape, *self.strides)

    def sized(self, axis: int, size: int):
        return self._replace(shape=(*self.shape[:axis], size, *self.shape[axis + 1 :]))


class Call(NamedTuple):
    """A function of C, its arguments by name, and the tensors that own their memory."""

    function: str
    arguments: dict[str, Argument]
    memory: list[Tensor]

    def status(self, **other: Argument) -> int:
        packed = [argument.packed() for argument in {**self.arguments, **other}.values()]
        pointers, text = (ctypes.c_char_p * len(packed))(*packed), ctypes.create_string_buffer(1024)
        return _backends.native.loaded().mxd_describe_plan(self.function.encode(), pointers, 1, text, len(text))


def copy_with_room(t: Tensor) -> Tensor:
    """Return a copy with free memory behind it, for descriptions of larger tensors."""
    room = t.new_zeros(4 * t.numel())
    return room[: t.numel()].view(t.shape).copy_(t)


def described(t: Tensor) -> Argument:
    return Argument(t.data_ptr(), _backends.native._DTYPE[t.dtype], tuple(t.shape), t.stride())


def call_of(name: str, backward: bool) -> Call:
    operator, make = CALLS[name]
    row = OPERATORS[operator]
    inputs = [a for a in cases.cast(make(), torch.float32) if isinstance(a, Tensor)]
    levels = inputs[2].shape[-1]
    if inputs[row.weights].dim() == 4:
        inputs[row.weights] = inputs[row.weights].unflatten(-1, (levels, -1))
    value, queries = inputs[0], inputs[row.weights].shape[1]
    output = torch.zeros(value.shape[0], queries, *value.shape[2:])
    named = dict(zip(row.inputs, inputs, strict=True))
    if not backward:
        named["output"] = output
    else:
        gradients = {f"gradient of {row.inputs[i]}": torch.zeros(inputs[i].shape) for i in row.differentiable}
        named = {"grad_output": output, **named, **gradients}
    named = {n: copy_with_room(t) for n, t in named.items()}
    return Call(operator + "_backward" * backward, {n: described(t) for n, t in named.items()}, list(named.values()))


EVERY = [(name, backward) for name in CALLS for backward in (False, True)]


@pytest.mark.parametrize(("name", "backward"), EVERY)
def test_each_size_is_held_to_the_others(name, backward):
    call = call_of(name, backward)
    assert call.status() == OK
    value = OPERATORS[call.function.removesuffix("_backward")].inputs[0]
    for argument, good in call.arguments.items():
        for axis, size in enumerate(good.shape):
            for other in (size - 1, size + 1, -size, -1, 0):  # 0: no check divides by a size
                expected = BAD_SHAPE
                if argument == value and axis == 1 and not backward and other >= 0:
                    expected = OK if other > size else BAD_LEVEL  # rows
                if argument == "reference_points" and axis == 2 and other == 1 and name != "window" and not backward:
                    expected = OK  # one reference point for all levels
                assert call.status(**{argument: good.sized(axis, other)}) == expected, (argument, axis, other)


@pytest.mark.parametrize(("name", "backward"), EVERY)
def test_each_tensor_has_its_dtypes(name, backward):
    call = call_of(name, backward)
    floating, index = {0, 1, 11, 27}, {3, 9}
    for (argument, good), t in zip(call.arguments.items(), call.memory, strict=True):
        allowed = index if good.dtype in index else floating
        if name == "nearest" and argument == "sampling_locations":
            allowed = floating | index
        if not backward and argument == "output":
            allowed = {good.dtype}  # value's
        if not backward and argument == OPERATORS[call.function].inputs[0]:
            allowed = {good.dtype, 1, 27}  # 16 bits: the output may be float32
        for dtype in (*floating, *index, -1, 2, 12):
            expected = OK if dtype in allowed else BAD_DTYPE
            narrow, wide = t.int(), torch.zeros(good.shape, dtype=torch.float64)  # enough memory for any dtype
            other = good if good.dtype in index else described(wide)
            other = described(narrow) if dtype == INT32 else other._replace(dtype=dtype)
            assert call.status(**{argument: other}) == expected, (argument, dtype)


@pytest.mark.parametrize("name", CALLS)
def test_a_gradient_without_memory_may_have_any_size_and_dtype(name):
    call = call_of(name, True)
    for argument, good in call.arguments.items():
        if argument.startswith("gradient of "):
            assert call.status(**{argument: good._replace(pointer=0, dtype=5, shape=(-3,) * len(good.shape))}) == OK


SIZES_BEYOND = [(0, 3), (3, 0), (-1, 3), (3, -1), (2, 12), (22, 1), (1, 22)]
SIZES_BEYOND += [(2**31, 2**31), (2**62, 4), (1, 2**63 - 1), (-(2**63), 1)]  # products beyond 64 bits
BEYOND = [*((size, 0) for size in SIZES_BEYOND), *(((1, 1), start) for start in (21, 22, -1, 2**62))]


@pytest.mark.parametrize("name", ["samples", "window"])
@pytest.mark.parametrize(("size", "start", "status"), [((1, 1), 20, OK), *((*level, BAD_LEVEL) for level in BEYOND)])
def test_a_level_has_rows_and_lies_in_value(name, size, start, status):
    """value has 21 rows."""
    call = call_of(name, False)
    tables = map(described, levels := (torch.tensor([size, (1, 1)]), torch.tensor([start, 0])))
    assert call.status(**dict(zip(OPERATORS[call.function].inputs[1:3], tables, strict=True))) == status, levels


def sized(call: Call, **sizes: tuple[int, ...]) -> dict[str, Argument]:
    """Return arguments of these sizes with strides of 0: all elements share one address."""
    return {name: call.arguments[name]._replace(shape=shape, strides=(0,) * len(shape)) for name, shape in sizes.items()}


@pytest.mark.parametrize(("channels", "status"), [(2**8 - 1, OK), (2**8, BAD_SHAPE), (2**50, BAD_SHAPE)])
def test_a_tensor_has_fewer_than_2_to_the_48_elements(channels, status):
    call, batch, keys = call_of("samples", False), 2**20, 2**20
    samples = {"sampling_locations": (batch, 0, 1, 2, 6, 2), "attention_weights": (batch, 0, 1, 2, 6)}
    given = sized(call, value=(batch, keys, 1, channels), output=(batch, 0, 1, channels), **samples)
    assert call.status(**given) == status


@pytest.mark.parametrize(("keys", "status"), [(2**31 - 2, OK), (2**31 - 1, BAD_SHAPE)])
def test_rows_have_numbers_of_32_bits(keys, status):
    call = call_of("samples", False)
    assert call.status(**sized(call, value=(3, keys, 4, 7))) == status


@pytest.mark.parametrize(("points", "status"), [(2**30, OK), (2**30 + 1, OUT_OF_MEMORY), (2**31 + 1, OUT_OF_MEMORY)])
def test_a_query_has_at_most_2_to_the_32_numbers(points, status):
    """A query stores two numbers for each sample."""
    call = call_of("samples", False)
    given = sized(call, sampling_locations=(3, 5, 4, 2, points, 2), attention_weights=(3, 5, 4, 2, points))
    assert call.status(**given) == status


@pytest.mark.parametrize(("points", "status"), [(2**31, OK), (2**31 + 1, OUT_OF_MEMORY), (2**62, OUT_OF_MEMORY)])
def test_an_anchor_has_at_most_2_to_the_32_pairs(points, status):
    """There is no scale, so that no tensor has as many elements as there are pairs."""
    call, cams = call_of("projected", False), 2
    sizes = {"spatial_shape": (cams, 0, 2), "scale_start_index": (cams, 0), "key_points": (4, 0, points, 3)}
    sizes |= {"projection": (4, cams, 4, 4), "logits": (4, 0, cams, 0, points, 5), "image_size": (4, cams, 2)}
    sizes |= {"pair_scale": (4, 0, cams, points), "output": (4, 0, 5)}
    assert call.status(**sized(call, **sizes)) == status
