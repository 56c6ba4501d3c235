"""`mx_driving.onnx.fuse` on files exported from other libraries' code of deformable attention."""

import itertools
import re
from unittest import mock

import numpy as np
import onnx
import onnx_writings as writings
import pytest
import torch
from onnx_graphs import CHANGED, CONSTANTS, GRAPHS, Fixed
from onnx_writings import (
    WRITINGS,
    Calls,
    Cut,
    Joined,
    Stacked,
    Summed,
    assert_refused,
    export,
    inputs,
    kinds,
    masked,
    run,
    verified,
)
from tolerance import allowed
from torch.nn.functional import grid_sample

import mx_driving.onnx
from mx_driving.onnx import _find


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_becomes_the_node(name, before, after):
    """The old and the new file are within rounding of the module in float64."""
    graph = GRAPHS[name]
    graph.save(before)
    report = mx_driving.onnx.fuse(before, after)
    assert (len(report.replaced), report.left) == (1, {})
    points = "2 + 4" if "unequal" in name else "3"
    assert list(report.replaced.values()) == [f"4 heads of 8 channels, {points} points on maps of 6 x 5, 3 x 4"]
    assert set(graph.nodes) <= set(kinds(before))
    assert not {"GridSample", "Floor"} & set(kinds(after))
    assert kinds(after).count("multi_scale_deformable_attn") == 1
    (names,) = report.nodes.values()
    assert set(names) <= {node.name for node in onnx.load(before).graph.node}
    assert any(name.startswith("nothing/") for name in names) == ("change nothing" in name or "paddle" in name)
    for sizes in (graph.sizes,) if "fixed sizes" in graph.exporter else (graph.sizes, (3, 11), (1, 40)):
        value, locations, weights = (t.to(graph.dtype) for t in inputs(*sizes))
        if type(graph.module) is Calls:
            weights = weights.softmax(-1)
        true = graph.compute((value, locations, weights))
        scale = np.full_like(true, 1.5)  # values are at most 1.5, and the weights of a query sum up to 1
        limit = allowed(graph.dtype, graph.dtype, true, scale, 24, 6) if graph.atol is None else graph.atol
        for path in (before, after) if graph.atol is None else (after,):
            assert (np.abs(run(path, (value, locations, weights)) - true) <= limit).all()


@pytest.mark.parametrize("name", [*CONSTANTS, *CHANGED])
def test_verify_finds_the_match(name, before):
    GRAPHS[name].save(before)
    report = verified(before, inputs(*GRAPHS[name].sizes))
    assert (report.right, len(report.comparisons)) == (True, 2)


def add_to_itself(model):
    (total,) = (node for node in model.graph.node if node.op_type == "Add" and "ReduceSum" in node.input[0] + node.input[1])
    total.input[1] = total.input[0]


NEAR_MISSES = {
    "align_corners": (Stacked(align_corners=True), "GridSample's align_corners is 1; the operator's is 0"),
    "padding": (Stacked(padding_mode="border"), "GridSample's padding_mode is border; the operator's is zeros"),
    "mode": (Stacked(mode="nearest"), "GridSample's mode is nearest; the operator's is linear"),
    "factor": (Stacked(factor=3), "its grid is not 2 * locations - 1"),
    "shift": (Stacked(shift=0.5), "its grid is not 2 * locations - 1"),
    "order": (Stacked(order=(1, 0)), "it computes something else"),
    "summed, order": (Summed(1, 0), "it computes something else"),
    "gathers, factor": (Stacked(masked, factor=3), "it computes something else"),
    "gathers, padding": (Stacked(writings.at_the_border), "it computes something else"),
    "gathers, values": (Stacked(writings.of_capped_values), "Where ("),
    "nearest": (Joined([2, 4], writings.nearest), 'its samples are nearest rows ("discrete"); the operator interpolates'),
    "a level twice": (Summed(), "", add_to_itself),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_a_near_miss_stays(name, before):
    module, why, *changes = NEAR_MISSES[name]
    export(module, before, "older, fixed sizes")
    with writings.edit(before) as model:
        for change in changes:
            change(model)
    assert_refused(before, f"path_in must hold deformable attention made of GridSample or gathers; .*{re.escape(why)}")


def with_views(path, count):
    """Insert `count` Gather nodes that keep all batches, in a chain, behind each of value, locations and weights."""
    with writings.edit(path) as model:
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.arange(2), "all"))
        for end in "vlw":
            (made,) = (node for node in model.graph.node if end in node.input)
            names = [f"{end}/{number}" for number in range(count)] + [made.output[0]]
            made.output[0] = names[0]
            chain = [onnx.helper.make_node("Gather", [a, "all"], [b]) for a, b in itertools.pairwise(names)]
            place = list(model.graph.node).index(made) + 1
            rest = list(model.graph.node)[place:]
            del model.graph.node[place:]
            model.graph.node.extend(chain + rest)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["right", "wrong"])
def test_of_many_candidates_few_are_tried(order, before, after):
    """Each view of a tensor is a candidate, so the file has more than a thousand combinations."""
    export(Stacked(order=order), before, "older, fixed sizes")
    with_views(before, 10)
    with mock.patch.object(_find, "prove", wraps=_find.prove) as tried:
        if order == (0, 1):
            assert len(mx_driving.onnx.fuse(before, after).replaced) == 1
        else:
            assert_refused(before, "it computes something else")
    assert tried.call_count in (range(1, 6) if order == (0, 1) else range(6, 60))


def test_the_command_compares_and_times(mx, before, after, tmp_path):
    arrays = tmp_path / "inputs.npz"
    export(Stacked(), before, "older")
    np.savez(arrays, **writings.feeds())
    status, said, problem = mx("fuse", before, after, "--time", "--inputs", arrays, "--seconds", 0)
    assert (status, problem) == (0, "")
    words = re.search(r"outputs differ by (\S+) of their magnitude; \S+ ms before, \S+ ms after, medians of 3 rounds", said)
    assert words, said
    assert float(words[1]) < 1e-5


ALL = slice(None)
CUTS = {
    "queries of the output": Cut(after=(ALL, slice(100))),
    "the last queries of the output": Cut(after=(ALL, slice(-300, None))),
    "a batch of the output": Cut(after=(slice(2),)),
    "queries of the inputs": Cut(before=(ALL, slice(100))),
    "a batch of the inputs": Cut(before=(slice(2),)),
    "queries of the sum": Stacked(between=lambda total: total[:, :, :100]),
    "seven queries of the sum": Stacked(between=lambda total: total[:, :, torch.arange(7)]),
    "the last queries of grids": Stacked(lambda image, grid, **options: grid_sample(image, grid[:, -40:], **options)),
}
INSIDE = ("queries of the sum", "seven queries of the sum", "the last queries of grids")


@pytest.mark.parametrize("name", CUTS)
def test_no_cut_of_a_free_axis_is_lost(name, before, after, tmp_path, monkeypatch):
    """A trial with a batch of two and seven queries does not show a Slice [0:100]."""
    monkeypatch.chdir(tmp_path)  # onnxruntime's inference of sizes would leave a file in the working folder
    export(CUTS[name], before, "older")
    if name in INSIDE:
        return assert_refused(before, r"a trial in onnxruntime failed|it gives")
    assert len(mx_driving.onnx.fuse(before, after).replaced) == 1
    for sizes in ((1, 150), (4, 7), (1, 400)):
        np.testing.assert_allclose(run(after, inputs(*sizes)), run(before, inputs(*sizes)), atol=1e-5)


SMALL = [("summed", "w", 1, 1, "w"), ("summed", "l", 1, 1, "l"), ("summed", "w", 1, "other", "w"), ("summed", "w", 1, 11, "l")]
SMALL += [("stacked", "w", 1, 1, "w"), ("stacked", "v", 0, 1, "v")]


@pytest.mark.parametrize(("writing", "tensor", "axis", "size", "narrow"), SMALL)
@pytest.mark.parametrize("form", ["onnxruntime", "gather"])
def test_a_size_of_one_that_the_source_broadcasts(writing, tensor, axis, size, narrow, form, before, after):
    """A tensor has size 1, fixed or free, and another tensor has more. The new file runs for the sizes of the source."""
    export(WRITINGS[writing], before, "older")
    writings.set_size(before, tensor, axis, size)
    mx_driving.onnx.fuse(before, after, form)
    arguments = dict(zip("vlw", inputs(3, 11), strict=True))
    arguments[narrow] = arguments[narrow].narrow(axis, 0, 1)
    if writing == "stacked":
        with pytest.raises(Exception, match=r"Grid batch size|Reshape"):
            run(before, arguments.values())
    else:
        np.testing.assert_allclose(run(after, arguments.values()), run(before, arguments.values()), rtol=0, atol=1e-5)
        assert "Expand" in kinds(after)


class Twice(torch.nn.Module):
    """Two attentions of unequal constants."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Fixed(Stacked(), "l", 2), Fixed(Summed(), "lw", 2)
        self.second.fixed_l += 0.1

    def forward(self, value, locations, weights):
        return self.first(value, locations, weights) + self.second(value, locations, weights)


@pytest.mark.needs("An ONNX file of opset 20")
def test_constants_of_two_attentions(before, after):
    arguments = inputs()
    export(Twice(), before, "fixed sizes")
    assert len(mx_driving.onnx.fuse(before, after).replaced) == 2
    np.testing.assert_allclose(run(after, arguments), run(before, arguments), rtol=0, atol=1e-5)
    report = verified(before, arguments)
    assert (report.right, len(report.comparisons)) == (True, 4)


class Both(Fixed):
    """The first is deformable attention, the second is not, because its corners are aligned."""

    def forward(self, value, locations, weights):
        other = Stacked(align_corners=True)
        return super().forward(value, locations, weights) + other(value, self.fixed_l, weights)


@pytest.mark.needs("An ONNX file of opset 20")
def test_constants_of_what_stays_are_untouched(before, after):
    module, arguments = Both(Summed(), "l"), inputs(1)
    export(module, before, "fixed sizes", arguments=arguments)
    report = mx_driving.onnx.fuse(before, after)
    assert len(report.replaced) == 1
    assert ["align_corners is 1" in why for why in report.left.values()] == [True]
    assert "align_corners is 1" in str(report)
    checked = verified(before, arguments)
    assert (checked.right, len(checked.comparisons), checked.left) == (True, 2, report.left)
    samplers = [node for node in onnx.load(after).graph.node if node.op_type == "GridSample"]
    old, new = ({t.name: t.SerializeToString() for t in onnx.load(path).graph.initializer} for path in (before, after))
    assert len(samplers) == 2
    assert all(new[node.input[1]] == old[node.input[1]] for node in samplers)
    np.testing.assert_allclose(run(after, arguments), run(before, arguments), rtol=0, atol=1e-5)
