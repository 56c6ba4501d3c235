"""The C functions check sizes, dtypes and pointers, and that no other argument shares memory that a call writes: a mistake is a
status. mxd_run calls them by name; mxd_last_error has the sentence, which is that of the Python checks.

A description does not own its memory, so a mistake is one slip in a program in C. mxd_describe_plan runs the checks of the
function that it describes. It reads index tables, and no other memory.
"""

import concurrent.futures
import ctypes
import itertools
import re
from typing import NamedTuple

import cases
import numpy
import pytest
import refusals
import torch
from cases import MULTI_SCALE_LOGITS
from refusals import CALLS
from torch import Tensor

import mx_driving
from mx_driving import _backends
from mx_driving._operator import checks
from mx_driving._operator.description import OPERATORS

OK, BAD_SHAPE, BAD_DTYPE, BAD_LEVEL, OUT_OF_MEMORY, BAD_NAME, BAD_MEMORY = range(7)
INT32, NOT_GIVEN = 3, -1
OPTIONAL = ("image_size", "pair_scale")


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
    return Argument(t.data_ptr(), _backends.native.DTYPES[t.dtype], tuple(t.shape), t.stride())


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


def is_written(argument: str) -> bool:
    return argument == "output" or argument.startswith("gradient of ")


def run_function(call, **other) -> int:
    """Call the C function, and return its status. None is passed as a null pointer."""
    packed = [a if a is None else a.packed() for a in {**call.arguments, **other}.values()]
    options = [0] if call.function.startswith(MULTI_SCALE_LOGITS) else []
    return getattr(_backends.native.loaded(), "mxd_" + call.function)(*packed, *options, 1)


@pytest.mark.parametrize(("name", "backward"), EVERY)
def test_null(name, backward):
    call = call_of(name, backward)
    for argument, good in call.arguments.items():
        null_tensor, null_data = (run_function(call, **{argument: a}) for a in (None, good._replace(pointer=0)))
        gradient = argument.startswith("gradient of ")
        assert null_tensor == (OK if gradient or argument in OPTIONAL else BAD_MEMORY), argument
        assert null_data == (OK if gradient else BAD_MEMORY), argument


@pytest.mark.parametrize("name", CALLS)
def test_a_tensor_without_elements_needs_no_memory(name):
    call = call_of(name, False)
    empty = {n: a._replace(pointer=0).sized(0, 0) for n, a in call.arguments.items()}
    batched = {n: a for n, a in empty.items() if call.arguments[n].shape[0] == call.arguments["output"].shape[0]}
    assert run_function(call, **batched) == OK
    assert run_function(call, **{**batched, "output": None}) == BAD_MEMORY


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
        assert run_function(call, **given) == OK
        moved = described(second)._replace(pointer=first.data_ptr())
        assert run_function(call, **{**given, "gradient of attention_logits": moved}) == BAD_MEMORY


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


@pytest.mark.parametrize("name", [None, b"sse9"])
def test_another_name_is_no_instruction_set(name):
    before = _backends.native.isa()
    assert _backends.native.loaded().mxd_use_isa(name) == -1
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


def run(name, packed, option=0, threads=1, count=None) -> int:
    """Call mxd_run with packed tensors. None stands for an argument that is left out."""
    missing = _backends.native._PACK[1](0, NOT_GIVEN, 0, 0)
    tensors = b"".join(missing if t is None else t for t in packed)
    options = (ctypes.c_int64 * 1)(option)
    count = len(packed) if count is None else count
    return _backends.native.loaded().mxd_run(name.encode(), tensors, count, options, threads)


def last_error() -> str:
    function = _backends.native.loaded().mxd_last_error
    function.restype = ctypes.c_char_p
    return function().decode()


def filled(call):
    torch.manual_seed(0)
    for t in call.memory:
        if t.is_floating_point():
            t.copy_(torch.rand(t.shape))
    return call


@pytest.mark.parametrize(("name", "backward"), EVERY)
def test_the_results_are_those_of_the_function(name, backward):
    call = filled(call_of(name, backward))
    written = [t for argument, t in zip(call.arguments, call.memory, strict=True) if is_written(argument)]
    assert run(call.function, [a.packed() for a in call.arguments.values()]) == OK
    first = [t.clone() for t in written]
    for t in written:
        t.fill_(7)
    assert run_function(call) == OK
    assert all(torch.equal(a, b) for a, b in zip(first, written, strict=True))


@pytest.mark.parametrize("name", CALLS)
def test_an_argument_that_is_not_given(name):
    """mxd_run has the status of the C function that gets a null pointer."""
    call = filled(call_of(name, True))
    for argument in call.arguments:
        status = run(call.function, [None if n == argument else a.packed() for n, a in call.arguments.items()])
        assert status == run_function(call, **{argument: None})
        assert status == OK or last_error() == f"{argument} must be given; got no tensor"


def test_an_option():
    call = filled(call_of("references", False))
    packed = {n: a.packed() for n, a in call.arguments.items()}
    shape = "reference_points must have shape (bs=3, num_queries=5, a divisor of num_points=7, 2 or 4); got (3, 5, 2, 2)"
    axis = "reference_axis must be 0 or 1; got "
    for option, sentence in ((1, shape), (2, axis + "2"), (-1, axis + "-1")):
        assert (run(call.function, packed.values(), option), last_error()) == (BAD_SHAPE, sentence)
    points = torch.rand(3, 5, 7, 2)
    packed["reference_points"] = described(points).packed()
    assert run(call.function, packed.values(), 1) == OK
    assert run(call.function, packed.values(), 0) == BAD_SHAPE


def test_names_and_counts():
    call = call_of("samples", False)
    packed = [a.packed() for a in call.arguments.values()]
    library = _backends.native.loaded()
    rule = "name must be a function's, such as multi_scale_deformable_attn_backward; got "
    for name, fact in ((b"multi_scale", "'multi_scale'"), (b"", "''"), (None, "NULL")):
        assert library.mxd_run(name, b"".join(packed), 6, None, 1) == BAD_NAME
        assert last_error() == rule + fact
    assert library.mxd_run(call.function.encode(), None, 6, None, 1) == BAD_MEMORY
    assert last_error() == "tensors must be an array; got NULL"
    for count in (5, 7, 0, -1):
        assert run(call.function, packed, count=count) == BAD_SHAPE
        assert last_error() == f"count must be the 6 of multi_scale_deformable_attn; got {count}"
    assert run(call.function, packed) == OK
    assert last_error() == "count must be the 6 of multi_scale_deformable_attn; got -1"  # the last refusal


def python_sentence(operator, tensors) -> str:
    """Return the sentence of the Python checks without the hint at its end."""
    sentence = refusals.said(lambda: checks.check_inputs(OPERATORS[operator], *tensors))
    sentence = re.sub(r", wh(ose axes \d and \d look swapped|ich looks like \w+)$", "", sentence)
    return sentence.replace("a floating or an integer dtype", "a floating dtype, int32 or int64")


@pytest.mark.parametrize("name", CALLS)
def test_sentences_are_those_of_the_python_checks(name):
    """If tensors disagree, Python takes the majority size. C refuses the first tensor that disagrees with an earlier one."""
    call = call_of(name, False)
    inputs, refused = dict(list(zip(call.arguments, call.memory, strict=True))[:-1]), set()
    for argument, t in inputs.items():
        floating = t.is_floating_point()
        dtypes = [t.int().float() if not floating else t.long()]
        swaps = [t.transpose(a, a + 1) for a in range(t.dim() - 1) if t.shape[a] != t.shape[a + 1]]
        sizes = [torch.cat([t, t.narrow(a, 0, 1)], a) for a in range(t.dim())]
        for other in (*dtypes, *swaps, *sizes):
            changed = {**inputs, argument: other}
            packed = [described(t).packed() for t in changed.values()]
            status = run(call.function, [*packed, call.arguments["output"].packed()])
            if status in (OK, BAD_LEVEL) or last_error().startswith("output "):  # the inputs agree
                continue
            sentence, expected = last_error(), python_sentence(call.function, changed.values())
            assert status == (BAD_DTYPE if "dtype" in expected else BAD_SHAPE)
            if sentence == expected:
                refused.add(expected.split(" must ", 1)[0])
                continue
            blamed = sentence.split(" must have shape ", 1)[0]
            assert list(inputs).index(blamed) > list(inputs).index(argument)
            assert sentence.endswith(f"; got {tuple(changed[blamed].shape)}")
    assert refused == set(inputs)


def can_describe(refusal) -> bool:
    """Return whether the call can be described in C: no words, known dtypes, the right number of axes, logits on two axes."""
    tensors = [a for a in refusal.args() if isinstance(a, torch.Tensor)]
    if refusal.changes_shape_of_value or not all(t.is_cpu and t.dtype in _backends.native.DTYPES for t in tensors):
        return False
    original, changed = refusals.GOOD[refusal.operator]()[refusal.index], refusal.args()[refusal.index]
    has_logits = refusal.operator in cases.WITH_LOGITS and refusal.index == cases.WEIGHTS[refusal.operator]
    return isinstance(changed, torch.Tensor) and changed.dim() == original.dim() and (changed.dim() > 4 or not has_logits)


@pytest.mark.parametrize("refusal", [r for r in (*refusals.SHAPES, *refusals.NUMBERS) if can_describe(r)], ids=str)
def test_sentences_of_the_table(refusal):
    """The C interface has the sentences of all other layers."""
    args, weights = refusal.args(), cases.WEIGHTS[refusal.operator]
    if args[weights].dim() == 4:
        args[weights] = args[weights].unflatten(-1, (2, -1))
    output = torch.zeros(2, 3, *args[0].shape[2:])
    tensors = [a for a in args if not isinstance(a, str)]
    assert run(refusal.operator, [None if t is None else described(t).packed() for t in (*tensors, output)]) != OK
    assert last_error() == refusals.without_hint(refusal.sentence)


def test_each_thread_has_its_own_sentence():
    call = call_of("samples", False)
    packed = [a.packed() for a in call.arguments.values()]

    def refused(count):
        run(call.function, packed, count=count)
        return last_error()

    refused(1)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(last_error).result() == ""
        assert pool.submit(refused, 2).result().endswith("got 2")
    assert last_error().endswith("got 1")


def test_subnormal_numbers_are_widened():
    """The value is float16, the locations are float64."""
    value = (torch.arange(-1032, 1032).double() * 2**-24).half().view(1, -1, 1, 8)
    assert (value.double() * 2**24 == torch.arange(-1032, 1032).view_as(value)).all()
    rows = value.shape[1]
    shapes, starts = cases.levels_of((1, rows))
    x = (torch.arange(rows).double() + 0.5) / rows
    locations = torch.stack([x, torch.full_like(x, 0.5)], -1).view(1, rows, 1, 1, 1, 2)
    with cases.implementations()["native-baseline"]():
        out = mx_driving.multi_scale_deformable_attn(value, shapes, starts, locations, torch.ones(1, rows, 1, 1, 1).double())
    assert torch.equal(out.view_as(value).double(), value.double())


def test_channels_that_lie_apart_are_widened():
    value, *others = cases.multi_scale(2, 5, 8, 2, [(3, 4), (2, 2)], 3)
    value = value.float()
    apart = torch.stack([value, -value], -1)[..., 0]
    assert apart.stride(-1) == 2
    with cases.implementations()["native-baseline"]():
        output, expected = (mx_driving.multi_scale_deformable_attn(v, *others) for v in (apart, value))
    assert torch.equal(output, expected)
