"""`mx_driving.onnx.fuse` on files with nodes that change nothing. paddle2onnx writes such nodes everywhere."""

import re

import numpy as np
import onnx
import onnx_ir
import onnx_nodes
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_writings import Stacked, export, feeds, verified

import mx_driving.onnx
from mx_driving.onnx import _file, _graph


def test_the_rest_of_the_file_stays_as_it_is(before, after):
    """Nodes that change nothing remain outside attention: 1 / (-0.0 + 0) is infinite, 1 / -0.0 is negative."""
    export(Stacked(), before, "older")
    model, value = onnx.load(before), helper.make_tensor_value_info
    for name, numbers in (("negative", -0.0), ("none", 0.0)):
        model.graph.initializer.append(numpy_helper.from_array(np.array([numbers], np.float32), name))
    (y,) = (output.name for output in model.graph.output)
    steps = [("Identity", ["negative"], "same"), ("Add", ["same", "none"], "sum"), ("Reciprocal", ["sum"], "infinite")]
    steps += [("Identity", [y], "copy"), ("Identity", ["copy"], "z")]
    model.graph.node.extend(helper.make_node(kind, read, [made], name=f"to {made}") for kind, read, made in steps)
    model.graph.output.extend([value("infinite", TensorProto.FLOAT, [1]), value("z", TensorProto.FLOAT, None)])
    onnx.save(model, before)
    assert len(mx_driving.onnx.fuse(before, after).replaced) == 1
    kept = {node.name: (list(node.input), list(node.output)) for node in model.graph.node[-5:]}
    assert kept.items() <= {node.name: (list(node.input), list(node.output)) for node in onnx.load(after).graph.node}.items()
    assert verified(before).right
    y, infinite, z = onnx_nodes.session(after, mx_driving.onnx.library()).run(None, feeds())
    assert infinite == np.inf
    np.testing.assert_array_equal(y, z)


GRAPH = """<ir_version: 8, opset_import: ["" : 18]>
graph (float[3, 3] x, float[n, 3] free, float[1, 3] thin, float default) => (y) <
 float zero = {0}, float[2, 1, 1] zeros = {0, 0}, float[1, 3] row = {0, 0, 0}, float[3, 1] column = {0, 0, 0}, float one = {1},
 float[3] ones = {1, 1, 1}, float[3] others = {1, 1, 2}, float default = {1}, float half = {0.5}, bool yes = {1},
 int64[1] first = {0}, int64[1] second = {1}, int64[1] last = {-1}, int64[1] low = {-9}, int64[1] high = {9},
 int64[4] pads = {0, 1, 0, -1}, int64[4] no_pads = {0, 0, 0, 0}, int64[2] same = {-1, 3}, int64[2] rows = {3, -1}
> { y = NODE }"""
SAME = """
Add(x, row)  Add(free, row)  Sub(free, zero)  Mul(ones, x)  Div(x, one)  Pow(x, one)  Max(x)  Dropout(x, half)
Cast<to = 1>(x)  CastLike(x, one)  Reshape(x, same)  Reshape(free, same)  Expand(x, second)  Pad(x, no_pads)
Slice(x, first, high, first)  Transpose<perm = [0, 1]>(x)  Concat<axis = 1>(x)  Split<num_outputs = 1>(x)
"""
OTHER = """
Add(x, zeros)  Add(free, column)  Sub(zero, x)  Mul(default, x)  Mul(x, half)  Mul(x, others)  Div(one, x)  Pow(one, x)
Max(x, zero)  Dropout(x, half, yes)  Cast<to = 10>(x)  CastLike(x, first)  Reshape(free, rows)  Squeeze(thin)
Expand(thin, rows)  Pad(x, pads)  Slice(x, last, low, first, last)  Slice(x, second, high, first)
Transpose<perm = [1, 0]>(x)  Concat<axis = 0>(x, x)
"""


@pytest.mark.parametrize(
    ("node", "same"), [(node, texts is SAME) for texts in (SAME, OTHER) for node in re.split(r"  |\n", texts) if node]
)
def test_what_a_node_returns(node, same, tmp_path):
    """`default` is an input, so it is no constant. `row` does not broadcast to a larger shape."""
    onnx.save(onnx.parser.parse_model(GRAPH.replace("NODE", node.replace("<", " <").replace(">", "> "))), tmp_path / "one.onnx")
    model = _file.load(tmp_path / "one.onnx").model
    (found,) = (_graph.find_returned(one, 18) for one in model.graph)
    assert (found is not None) == same


@pytest.mark.parametrize(("opset", "attributes", "same"), [(6, {}, False), (6, {"is_test": 1}, True), (7, {}, True)])
def test_dropout_of_older_opsets(opset, attributes, same):
    node = onnx_ir.node("Dropout", [onnx_ir.val("x")], attributes)
    assert (_graph.find_returned(node, opset) is not None) == same
