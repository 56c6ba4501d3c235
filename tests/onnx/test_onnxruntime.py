"""Our custom operators of onnxruntime have the bits and the sentences of torch's operators, and use the session's threads."""

import collections
import functools
import pathlib
import re

import cases
import numpy as np
import onnx
import onnx_nodes
import onnxruntime
import onnxruntime.capi.onnxruntime_pybind11_state
import pytest
import torch
from cases import AGGREGATION_LOGITS, GEOMETRIC, MULTI_SCALE, MULTI_SCALE_LOGITS
from hypothesis import assume, given
from onnx_nodes import Graph
from small_cases import GROWING, One
from strategies import fuzz, node_calls
from test_onnx import any_sizes, in_onnx
from test_onnx import run as run_without_ours

import mx_driving
import mx_driving.onnx
from mx_driving import _needs
from mx_driving._operator.description import OPERATORS

KINDS = ("float32", "float16", "bfloat16", "double", "int64", "int32", "int16", "uint8", "bool")
DTYPES = {kind: getattr(torch, kind) for kind in KINDS}
ONNX_TYPES = {dtype: kind for kind, dtype in DTYPES.items()}


def graph_of(operator, args):
    """Return a graph of one node that takes the tensors among `args`."""
    count = len(OPERATORS[operator].inputs)
    types = tuple("" if a is None else ONNX_TYPES[a.dtype] for a in args[:count])
    return Graph(operator, types, *args[count:])


def arrays_of(args):
    """Return the arrays of the tensors. numpy has no bfloat16, so the graph takes float32 instead."""
    return [(a.float() if a.dtype == torch.bfloat16 else a).numpy() for a in args if isinstance(a, torch.Tensor)]


def run(operator, args, threads=1):
    session = onnx_nodes.session_of(graph_of(operator, args), mx_driving.onnx.library(), threads)
    return torch.from_numpy(onnx_nodes.run(session, arrays_of(args))).to(args[0].dtype)


def check(operator, args, threads=1):
    expected = getattr(mx_driving, operator)(*args)
    assert torch.equal(run(operator, args, threads), expected)


def exported(module, tensors, dynamic_shapes=None):
    if sentence := _needs.lacks("An ONNX file of opset 20"):
        pytest.skip(sentence)
    return in_onnx(module, tensors, "onnxruntime", dynamic_shapes=dynamic_shapes)


def run_exported(model, tensors, threads=1):
    session = onnx_nodes.session(model, mx_driving.onnx.library(), threads)
    return torch.from_numpy(onnx_nodes.run(session, [t.numpy() for t in tensors]))


@functools.cache
def one_node(operator):
    """Export an operator of float32 tensors as our node, for any batch and queries. GROWING has the other arguments."""
    args, *more = any_sizes(operator)
    return exported(One(operator, args), *more)


@pytest.mark.parametrize("operator", cases.EVERY)
def test_an_export_is_one_node_with_the_same_bits_for_any_batch_and_queries(operator):
    model = one_node(operator)
    assert [(node.domain, node.op_type) for node in model.graph.node] == [("mx_driving", operator)]
    assert {o.domain: o.version for o in model.opset_import} == {"mx_driving": 1, "": 20}
    onnx.checker.check_model(model)
    for bs, count in ((3, 5), (1, 7), (4, 1)):
        args = cases.cast(GROWING[operator](bs, count), torch.float32)
        tensors = tuple(a for a in args if isinstance(a, torch.Tensor))
        assert torch.equal(run_exported(model, tensors), getattr(mx_driving, operator)(*args))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("operator", cases.EVERY)
def test_every_dtype(operator, dtype):
    check(operator, cases.cast(GROWING[operator](3, 5), dtype))


def test_small_integers_are_cast_by_the_export():
    args = list(cases.cast(GROWING[GEOMETRIC](2, 5), torch.float32))
    args[3] = args[3].to(torch.int16)
    model = exported(One(GEOMETRIC, args), tuple(args))
    assert [node.op_type for node in model.graph.node] == ["Cast", GEOMETRIC]
    assert torch.equal(run_exported(model, args), mx_driving.geometric_kernel_attention(*args))


def test_optional_inputs_are_left_out_by_the_export():
    args = cases.cast(GROWING[AGGREGATION_LOGITS](2, 5), torch.float32)[:6]
    model = exported(One(AGGREGATION_LOGITS, args), args)
    assert [name for name in model.graph.node[0].input if name] == [i.name for i in model.graph.input]
    assert torch.equal(run_exported(model, args), mx_driving.deformable_aggregation_with_logits(*args))


AXES = [("points", "'points'"), ("", "''"), ("p" * 40, "40 letters")]
AXES += [(axis, "an attribute of another type") for axis in (1, 0.5, ("point",))]


@pytest.mark.parametrize(("axis", "fact"), AXES)
def test_a_wrong_axis_is_refused_when_the_session_is_made(axis, fact):
    types = ("float32", "int64", "int64", "float32", "float32", "float32")
    with pytest.raises(Exception, match=f"reference_axis must be 'level' or 'point'; got {fact}"):
        onnx_nodes.session_of(Graph(MULTI_SCALE_LOGITS, types, axis), mx_driving.onnx.library(), 1)


# Sizes that pay for two threads, with levels that are packed (attention of 2048 queries) and without.
LARGE = {
    "packed": (MULTI_SCALE, lambda: cases.multi_scale(1, 2048, 16, 4, [(9, 11), (5, 7)], 4)),
    "not packed": (MULTI_SCALE, lambda: cases.multi_scale(1, 600, 32, 8, [(30, 40), (15, 20)], 4)),
    "anchors": (cases.AGGREGATION, lambda: cases.aggregation(1, 200, 13, 64, 8, [[(16, 44), (8, 22)]] * 3)),
}


@pytest.mark.parametrize("name", LARGE)
def test_the_same_bits_on_any_number_of_threads_again_and_again(name):
    operator, make = LARGE[name]
    args = cases.cast(make(), torch.float32)
    expected = getattr(mx_driving, operator)(*args)
    for threads in (1, 2, 3):
        assert all(torch.equal(run(operator, args, threads), expected) for _ in range(5))


def threads_of_this_process():
    return len(list(pathlib.Path("/proc/self/task").iterdir()))


@pytest.mark.skipif(not pathlib.Path("/proc/self/task").exists(), reason="counts threads as Linux does")
def test_no_thread_is_started_but_the_sessions():
    operator, make = LARGE["not packed"]
    args = cases.cast(make(), torch.float32)
    session = onnx_nodes.session(onnx_nodes.model(graph_of(operator, args)), mx_driving.onnx.library(), 3)
    before = threads_of_this_process()
    onnx_nodes.run(session, arrays_of(args))
    assert threads_of_this_process() == before


def refusal(operator, args):
    """Return onnxruntime's message without its own words before our sentence."""
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument) as caught:
        run(operator, args)
    return str(caught.value).partition("Status Message: ")[2]


@pytest.mark.parametrize("operator", cases.EVERY)
def test_axes_are_counted(operator):
    """An input with one axis more or less is refused with the sentence of torch."""
    args = cases.cast(GROWING[operator](2, 5), torch.float32)
    for index, a in enumerate(args):
        for other in (a[0], a[None]) if isinstance(a, torch.Tensor) else ():
            changed = (*args[:index], other, *args[index + 1 :])
            with pytest.raises(ValueError, match="must have shape") as expected:
                getattr(mx_driving, operator)(*changed)
            assert refusal(operator, changed) == str(expected.value)


def in_torch(graph, arrays):
    """Call the operator in torch with the same inputs. Return its output, or the sentence of its error."""
    rest = iter(arrays)
    tensors = [torch.from_numpy(np.array(next(rest))).to(DTYPES[kind]) if kind else None for kind in graph.types]
    options = [graph.axis or "level"] if OPERATORS[graph.operator].options else []
    try:
        return getattr(mx_driving, graph.operator)(*tensors, *options)
    except (ValueError, TypeError) as error:
        return str(error)


def test_anything_gives_the_bits_or_the_sentence_of_torch():
    """Try random shapes, dtypes and tables; `make fuzz-native` does the same under a sanitizer."""
    library, ran, refused = mx_driving.onnx.library(), collections.Counter(), collections.Counter()

    @fuzz(60)
    @given(node_calls())
    def try_calls(calls):
        graph, threads, inputs = calls
        assume(not (graph.operator == GEOMETRIC and graph.types[3] in ("uint8", "int16")))  # torch takes them as pixels
        session = onnx_nodes.session_of(graph, library, threads)
        for arrays in inputs:
            output = onnx_nodes.outcome(lambda: onnx_nodes.run(session, arrays))  # noqa: B023
            expected = in_torch(graph, arrays)
            if isinstance(expected, str):
                assert isinstance(output, str), (graph, [a.shape for a in arrays], expected)
                sentence = output.partition("Status Message: ")[2]
                if " must have shape " in expected:  # the first tensor that disagrees with those before it: perhaps another one
                    assert re.match(r"\w+ must have shape \(.+\); got \(.*\)$", sentence), graph
                else:
                    assert sentence == expected.partition("; axes 1 and 2")[0], graph  # without the hint
                refused[graph.operator] += 1
            else:
                assert not isinstance(output, str), (graph, [a.shape for a in arrays], output)
                same = torch.from_numpy(output).to(expected.dtype)
                torch.testing.assert_close(same, expected, rtol=0, atol=0, equal_nan=True)
                ran.update([graph.operator, *graph.types])  # "": an optional input that is not there

    try_calls()
    assert min(ran.total(), refused.total()) > 100
    assert set(ran) == {*cases.EVERY, "", "float32", "float16", "bfloat16", "double", "int64", "int32"}
    assert set(refused) == set(cases.EVERY)


def test_without_the_library_the_reason_is_told(monkeypatch):
    monkeypatch.setattr("mx_driving._backends.native.why_not", lambda: "libmx_driving.so is damaged")
    with pytest.raises(RuntimeError, match=r"libmx_driving\.so is damaged"):
        mx_driving.onnx.library()


def test_a_session_that_was_not_told_of_the_library_says_so():
    args = cases.cast(GROWING[MULTI_SCALE](2, 5), torch.float32)
    with pytest.raises(Exception, match="mx_driving"):
        run_without_ours(onnx_nodes.model(graph_of(MULTI_SCALE, args)), *args)
