"""mxd_run calls a C function by its name; mxd_last_error has the sentence of a refusal, which is that of the Python checks."""

import concurrent.futures
import ctypes
import re

import cases
import pytest
import refusals
import torch
from test_memory_of_calls import is_written
from test_memory_of_calls import run as run_function
from test_refusals import BAD_DTYPE, BAD_LEVEL, BAD_SHAPE, CALLS, EVERY, OK, call_of, described

import mx_driving
from mx_driving import _backends
from mx_driving._operator import checks
from mx_driving._operator.description import OPERATORS

BAD_NAME, BAD_MEMORY, NOT_GIVEN = 5, 6, -1


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
    with pytest.raises((TypeError, ValueError)) as caught:
        checks.check_inputs(OPERATORS[operator], *tensors)
    sentence = re.sub(r", wh(ose axes \d and \d look swapped|ich looks like \w+)$", "", str(caught.value))
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
    if refusal.changes_shape_of_value or not all(t.is_cpu and t.dtype in _backends.native._DTYPE for t in tensors):
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
