"""Files that `mx_driving.onnx.fuse` reads, writes and refuses."""

from unittest import mock

import numpy as np
import onnx
import pytest
import torch
from onnx_graphs import lift_constants, reverse
from onnx_writings import WRITINGS, Projected, Stacked, assert_refused, edit, export, feeds, inputs, run

import mx_driving.onnx


@pytest.fixture
def outside(tmp_path):
    """Write renamed.onnx, whose weights lie in model.onnx.data."""
    export(Projected().eval(), tmp_path / "whole.onnx", "older")
    path, whole = tmp_path / "renamed.onnx", onnx.load(tmp_path / "whole.onnx")
    onnx.save(whole, path, save_as_external_data=True, location="model.onnx.data", size_threshold=0, convert_attribute=True)
    (tmp_path / "whole.onnx").unlink()
    return path


def snapshot(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "link", "renamed.onnx", "other.onnx"])
def test_no_file_of_the_source_is_written(name, outside, tmp_path):
    """path_out may not be the source, a link to it, or a file whose weights would overwrite the source."""
    (tmp_path / "link").hardlink_to(outside)
    (tmp_path / "other.onnx.data").symlink_to(tmp_path / "model.onnx.data")
    before = snapshot(tmp_path)
    with pytest.raises(ValueError, match="path_out must"):
        mx_driving.onnx.fuse(outside, tmp_path / name)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("in_order", [True, False])
def test_weights_outside_the_file_stay_outside(in_order, outside, tmp_path):
    """So do weights in attributes of nodes, and weights of the nodes that the trial runs."""
    if not in_order:
        model = onnx.load(outside, load_external_data=False)
        reverse(model.graph)
        outside.write_bytes(model.SerializeToString())
    after = tmp_path / "out" / "after.onnx"
    after.parent.mkdir()
    mx_driving.onnx.fuse(outside, after)
    assert [path.name for path in sorted(after.parent.iterdir())] == ["after.onnx", "after.onnx.data"]
    (tmp_path / "model.onnx.data").unlink()
    with torch.no_grad():
        np.testing.assert_allclose(run(after, inputs()), Projected().eval()(*inputs()).numpy(), atol=1e-5)


def test_weights_that_are_not_there(outside, tmp_path):
    weights = tmp_path / "model.onnx.data"
    (tmp_path / "other name").hardlink_to(weights)
    assert_refused(outside, r"beside it; got .*renamed.onnx, and model.onnx.data, which has other names")
    (tmp_path / "other name").unlink()
    weights.write_bytes(weights.read_bytes()[:-1])
    assert_refused(outside, r"its weights beside it; got .*renamed.onnx, and model.onnx.data of \d+ bytes")
    weights.unlink()
    assert_refused(outside, r"must have its weights beside it; got .*renamed.onnx, and no file model.onnx.data")
    weights.symlink_to("/etc/passwd")
    assert_refused(outside, r"renamed.onnx, and model.onnx.data, which lies in another folder")
    weights.unlink()
    weights.symlink_to(weights.name)
    assert_refused(outside, r"must have its weights beside it; got .*renamed.onnx, and no file model.onnx.data")


def test_bad_files(tmp_path):
    plain = tmp_path / "plain.onnx"
    torch.onnx.export(torch.nn.Linear(2, 2).eval(), (torch.ones(1, 2),), plain, dynamo=True, verbose=False)
    assert_refused(plain, r"made of GridSample or gathers; got .*plain.onnx \(it has no weighted samples\)")
    export(Stacked(), tmp_path / "whole.onnx", "older")
    mx_driving.onnx.fuse(tmp_path / "whole.onnx", tmp_path / "fused.onnx")
    assert_refused(tmp_path / "fused.onnx", r"\(it has 1 of the node mx_driving::multi_scale_deformable_attn already")
    with pytest.raises(ValueError, match="path_out must be another file than path_in"):
        mx_driving.onnx.fuse(plain, plain)
    assert_refused(tmp_path / "none.onnx", "path_in must be a file that can be read")
    (tmp_path / "text.onnx").write_text("not a graph")
    (tmp_path / "cut.onnx").write_bytes((tmp_path / "whole.onnx").read_bytes()[:-1000])
    (tmp_path / "letters.onnx").write_bytes((tmp_path / "whole.onnx").read_bytes().replace(b"pytorch", b"pyto\xd3ch"))
    for name in ("text.onnx", "cut.onnx", "letters.onnx"):
        assert_refused(tmp_path / name, f"path_in must be an ONNX file; got .*{name}")


def test_a_default_stays_an_input(before, after):
    """Since IR version 4 an initializer that is also an input is a default, which a caller may override."""
    export(WRITINGS["stacked"], before, "older")
    with edit(before) as model:
        (factor,) = lift_constants(model, chosen=lambda tensor: tensor.max() == 1.5)
    assert len(mx_driving.onnx.fuse(before, after).replaced) == 1
    fed = {factor: np.array(-3, np.float32)}
    np.testing.assert_allclose(run(after, inputs(), **fed), run(before, inputs(), **fed), atol=1e-5)
    assert np.abs(run(after, inputs(), **fed) - run(after, inputs())).max() > 1


@pytest.mark.parametrize("number", [1.0, 2.0, 30, None])
def test_a_default_that_decides_what_is_sampled(number, before):
    """The defaults are 2 or 1 of 2 * locations - 1, the lengths of levels, or all constants."""
    export(WRITINGS["stacked"], before, "older")
    with edit(before) as model:
        lift_constants(model, chosen=lambda tensor: number is None or (tensor.max() == number and tensor.size < 3))
    assert_refused(before, r"an input with a default|its grid is not|does not fix|no tensors have the shapes")


BRANCHES = "function", "function of another opset", "function in a function", "If", "Loop"


def inside(model, kind, out="y"):
    """Return nodes that run the model in a local function, in a branch of If, or in the body of Loop; and the functions."""
    names, helper, opsets = [i.name for i in model.graph.input], onnx.helper, list(model.opset_import)
    inner = onnx.compose.add_prefix(model, "inner/")  # onnx 1.17 renames the inputs of nodes always
    read = (helper.make_node("Identity", [name], [f"inner/{name}"]) for name in names)
    tables = (helper.make_node("Constant", [], [table.name], value=table) for table in inner.graph.initializer)
    (result,), nodes = inner.graph.output, [*read, *tables, *inner.graph.node]
    if kind.startswith("function"):
        opsets = [helper.make_opsetid("", 16)] if "opset" in kind else opsets
        functions = [helper.make_function("theirs", "Attend", names, [result.name], nodes, opsets)]
        if kind.endswith("in a function"):
            call = helper.make_node("Attend", names, [result.name], domain="theirs")
            own = helper.make_opsetid("theirs", 1)
            functions.append(helper.make_function("theirs", "Outer", names, [result.name], [call], [own]))
        return [helper.make_node(functions[-1].name, names, [out], domain="theirs")], functions
    value, tensor = onnx.helper.make_tensor_value_info, onnx.numpy_helper.from_array
    floats = value(result.name, onnx.TensorProto.FLOAT, None)
    yes = helper.make_node("Constant", [], ["yes"], value=tensor(np.array(True)))
    if kind == "If":
        graph = helper.make_graph(nodes, "branch", [], [floats])
        other = helper.make_graph([helper.make_node("Identity", ["v"], ["others"])], "other", [], [value("others", 1, None)])
        return [yes, helper.make_node("If", ["yes"], [out], name="branches", then_branch=graph, else_branch=other)], []
    once = helper.make_node("Constant", [], ["once"], value=tensor(np.array(1)))
    state = [value("number", onnx.TensorProto.INT64, []), value("before", onnx.TensorProto.BOOL, [])]
    going = helper.make_node("Identity", ["before"], ["after"])
    body = helper.make_graph([*nodes, going], "body", state, [value("after", onnx.TensorProto.BOOL, []), floats])
    loop = helper.make_node("Loop", ["once", "yes"], ["turns"], name="loop", body=body)
    first = helper.make_node("Constant", [], ["first"], value=tensor(np.array(0)))
    return [yes, once, loop, first, helper.make_node("Gather", ["turns", "first"], [out], axis=0)], []


def write_inside(path, kind, beside, ours=False):
    """Write attention in a function or subgraph; with `beside` in the main graph, too; with `ours` as our node."""
    export(WRITINGS["stacked"], path, "older")
    if ours:
        mx_driving.onnx.fuse(path, path.with_name("ours.onnx"))
    model = onnx.load(path.with_name("ours.onnx") if ours else path)
    nodes, functions = inside(model, kind)
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [None] * 3)
    main = model.graph if beside else onnx.GraphProto()
    graph = onnx.helper.make_graph([*main.node, *nodes], "outer", list(model.graph.input), [*main.output, output])
    opsets = [*model.opset_import, *[onnx.helper.make_opsetid("theirs", 1)] * bool(functions)]
    onnx.save(onnx.helper.make_model(graph, functions=functions, opset_imports=opsets, ir_version=9), path)


@pytest.mark.parametrize(("kind", "beside"), [*((kind, True) for kind in BRANCHES), ("If", False), ("Loop", False)])
def test_attention_in_functions_and_subgraphs_is_named(kind, beside, mx, before, after, tmp_path):
    """Functions are inlined. Attention in If and Loop is left, and both commands say so."""
    write_inside(before, kind, beside)
    where = f"it lies in a subgraph of {kind} ({'branches' if kind == 'If' else 'loop'})"
    status, said, problem = mx("fuse", before, after)
    np.savez(tmp_path / "inputs.npz", **feeds())
    checked = mx("verify", before, "--runtime", "onnxruntime", "--inputs", tmp_path / "inputs.npz")
    if kind.startswith("function"):
        assert (status, f"{1 + beside} replaced, 0 left" in said) == (0, True)
        assert (checked[0], f"all is well: {2 + 2 * beside} comparisons of matches" in checked[1]) == (0, True)
        np.testing.assert_allclose(run(after, inputs()), run(before, inputs()), atol=1e-5)
    elif beside:
        assert (status, "1 replaced, 1 left" in said, where in said) == (0, True, True)
        assert (checked[0], "1 left out" in checked[1], where in checked[1]) == (0, True, True)
    else:
        assert (status, where in problem) == (2, True)
        assert (checked[0], where in checked[2]) == (2, True)


def test_subgraphs_out_of_order_are_named(before, after):
    write_inside(before, "If", beside=False)
    with edit(before) as model:
        (branch,) = (a.g for a in model.graph.node[-1].attribute if a.name == "then_branch")
        reverse(branch)
    assert_refused(before, r"it lies in a subgraph of If \(branches\)")


@pytest.mark.parametrize("kind", ["function", "If"])
def test_our_nodes_in_functions_and_subgraphs(kind, before, after):
    """A conversion replaces our node in a function. It names our node in a subgraph."""
    write_inside(before, kind, beside=False, ours=True)
    if kind == "function":
        mx_driving.onnx.fuse(before, after, "gather")
        np.testing.assert_allclose(run(after, inputs()), run(before, inputs()), atol=1e-5)
    else:
        assert_refused(before, r"it lies in a subgraph of If \(branches\)", "gather")


def test_a_function_that_cannot_be_inlined_is_named(before, after, monkeypatch):
    write_inside(before, "function", beside=True)
    monkeypatch.setattr(onnx.inliner, "inline_local_functions", mock.Mock(side_effect=RuntimeError("no converter")))
    report = mx_driving.onnx.fuse(before, after)
    assert len(report.replaced) == 1
    assert ["it lies in the local function theirs::Attend; " in why for why in report.left.values()] == [True]


def add_sparse(graph, kind):
    values = onnx.helper.make_tensor("few", onnx.TensorProto.FLOAT, [1], [2.0])
    places = onnx.helper.make_tensor("few/places", onnx.TensorProto.INT64, [1], [3])
    sparse = onnx.helper.make_sparse_tensor(values, places, [8])
    if kind == "constant":
        graph.node.append(onnx.helper.make_node("Constant", [], ["few"], sparse_value=sparse))
    else:
        graph.sparse_initializer.append(sparse)


@pytest.mark.parametrize("kind", ["initializer", "constant", "in a branch"])
def test_sparse_tensors_are_refused(kind, before, after):
    """onnx_ir drops sparse tensors, so the new file would lack them."""
    write_inside(before, "If", beside=True)
    with edit(before) as model:
        add_sparse(model.graph.node[-1].attribute[0].g if kind == "in a branch" else model.graph, kind)
    assert_refused(before, r"^path_in must have dense tensors; got .*before.onnx, where few is sparse$")


def test_a_version_without_nodes(before, after):
    """onnxruntime writes version 1000 of every domain that its process knows into the files that it saves."""
    export(WRITINGS["stacked"], before, "older")
    with edit(before) as model:
        model.opset_import.append(onnx.helper.make_opsetid("mx_driving", 1000))
    for form in ("onnxruntime", "gather"):
        assert len(mx_driving.onnx.fuse(before, after, form).replaced) == 1
        assert {o.version for o in onnx.load(after).opset_import if o.domain == "mx_driving"} <= {1}


def test_a_node_without_a_shape_is_named(before, after):
    export(WRITINGS["stacked"], before, "older")
    with edit(before) as model:
        model.opset_import.append(onnx.helper.make_opsetid("theirs", 1))
        next(node for node in model.graph.node if "l" in node.input).input[0] = "moved"
        model.graph.node.insert(0, onnx.helper.make_node("Move", ["l"], ["moved"], name="move", domain="theirs"))
        del model.graph.value_info[:]
    assert_refused(before, r"the file does not say the shape of the output of theirs::Move \(move\)")


HUGE = """<ir_version: 8, opset_import: ["" : 20]>
huge (float[1, 268435456, 1, 8] v, float[1, q, 1, 1, 1, 2] l, float[1, q, 1, 1] w) => (float[1, q, 8] y)
<int64[4] image = {1, 8, 16384, 16384}, int64[4] grid = {1, -1, 1, 2}, int64[4] row = {1, 1, -1, 1}, int64[1] last = {-1},
 float two = {2}, float one = {1}, int64[3] sum = {1, 8, -1}> {
    moved = Transpose <perm = [0, 2, 3, 1]> (v)
    map = Reshape(moved, image)
    doubled = Mul(l, two)
    centred = Sub(doubled, one)
    places = Reshape(centred, grid)
    samples = GridSample(map, places)
    weights = Reshape(w, row)
    product = Mul(samples, weights)
    total = ReduceSum <keepdims = 0> (product, last)
    shaped = Reshape(total, sum)
    y = Transpose <perm = [0, 2, 1]> (shaped)
}"""


def test_a_small_file_takes_no_huge_memory(before, after):
    onnx.save(onnx.parser.parse_model(HUGE), before)
    assert_refused(before, "a trial of batch 1 and 7 queries has 2147483648 elements")


def test_names_that_are_taken(before, after, capfd):
    """New names differ from those of the graph and of its subgraphs."""
    export(WRITINGS["unequal points"], before, "older")
    model = onnx.load(before)
    mx_driving.onnx.fuse(before, after)
    made = {name for node in onnx.load(after).graph.node for name in (*node.input, *node.output)}
    made -= {name for node in model.graph.node for name in (*node.input, *node.output)}
    assert len(made) > 5
    inner, outer = sorted(made | {"val_0", "val_1"})[::2], sorted(made | {"val_0", "val_1"})[1::2]
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.ones(3), name) for name in outer)
    inside = [onnx.helper.make_node("Constant", [], [name], value_float=1.0) for name in (*inner, "last")]
    value = onnx.helper.make_tensor_value_info
    branches = [onnx.helper.make_graph(inside, "inside", [], [value("last", onnx.TensorProto.FLOAT, [])]) for _ in range(2)]
    model.graph.node.append(onnx.helper.make_node("Constant", [], ["yes"], value=onnx.numpy_helper.from_array(np.array(True))))
    model.graph.node.append(onnx.helper.make_node("If", ["yes"], ["more"], then_branch=branches[0], else_branch=branches[1]))
    model.graph.output.append(value("more", onnx.TensorProto.FLOAT, []))
    onnx.save(model, before)
    run(before, inputs())
    capfd.readouterr()
    assert len(mx_driving.onnx.fuse(before, after).replaced) == 1
    assert capfd.readouterr() == ("", "")
    np.testing.assert_allclose(run(after, inputs()), run(before, inputs()), atol=1e-5)
