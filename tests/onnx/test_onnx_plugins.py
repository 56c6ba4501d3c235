"""Files with BEVFormer_tensorrt's plugins `MultiScaleDeformableAttnTRT` and `TRT2`: read by `fuse` and `verify`."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnx_nodes
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_stand_ins import run_plugins

import mx_driving.onnx
from mx_driving.onnx import FUSED_FORMS
from mx_driving.onnx._check import check

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("onnx")]
HEADS, CHANNELS, LEVELS, POINTS, REFERENCES, QUERIES = 4, 8, 2, 4, 2, 7


def arrays(seed=0, dtype=np.float32, batch=2):
    random = np.random.default_rng(seed)
    shapes = {
        "value": (batch, 42, HEADS, CHANNELS),
        "references": (batch, QUERIES, 1, 2 * REFERENCES),
        "offsets": (batch, QUERIES, HEADS * LEVELS * POINTS * 2),
        "logits": (batch, QUERIES, HEADS, LEVELS * POINTS),
    }
    tensors = {name: random.standard_normal(shape) for name, shape in shapes.items()}
    tensors["references"] = random.random(shapes["references"])
    return {name: array.astype(dtype) for name, array in tensors.items()}


def model(kind="MultiScaleDeformableAttnTRT", domain="", dtype=np.float32, batch=2, inputs=5, table=np.int64):
    """Two layers: the second one's offsets are computed from the first one's output, whose shape the file does not say."""
    type_of = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    tensors = arrays(dtype=dtype, batch=batch)
    infos = [helper.make_tensor_value_info(name, type_of, array.shape) for name, array in tensors.items()]
    matrix = np.random.default_rng(1).standard_normal((HEADS * CHANNELS, HEADS * LEVELS * POINTS * 2)).astype(dtype)
    tables = [
        numpy_helper.from_array(np.array([[6, 5], [3, 4]], table), "shapes"),
        numpy_helper.from_array(matrix, "matrix"),
        numpy_helper.from_array(np.array([0, 0, -1]), "flat"),
    ]
    names = ["value", "shapes", "references", "offsets", "logits"][:inputs]
    nodes = [
        helper.make_node(kind, names, ["first"], name="first", domain=domain),
        helper.make_node("Reshape", ["first", "flat"], ["rows"]),
        helper.make_node("MatMul", ["rows", "matrix"], ["moved"]),
        helper.make_node(kind, [*names[:3], "moved", *names[4:]][:inputs], ["second"], name="second", domain=domain),
        helper.make_node("Reshape", ["second", "flat"], ["output"]),
    ]
    output = helper.make_tensor_value_info("output", type_of, [batch, QUERIES, HEADS * CHANNELS])
    opsets = [helper.make_opsetid("", 17), *([helper.make_opsetid(domain, 1)] if domain else [])]
    return helper.make_model(helper.make_graph(nodes, "two", infos, [output], tables), opset_imports=opsets, ir_version=8)


def run_form(path, form, fed):
    if form in ("npu", "tensorrt"):
        return run_plugins(path, fed)["output"]
    return onnx_nodes.session(path, mx_driving.onnx.library()).run(None, fed)[0]


@pytest.mark.parametrize("kind", ["MultiScaleDeformableAttnTRT", "MultiScaleDeformableAttnTRT2"])
@pytest.mark.parametrize("form", FUSED_FORMS)
def test_each_form_gives_the_plugin_s_numbers(form, kind, tmp_path):
    before, after = tmp_path / "before.onnx", tmp_path / "after.onnx"
    onnx.save(model(kind), before)
    report = mx_driving.onnx.fuse(before, after, form=form)
    assert (len(report.replaced), report.left, set(report.nodes.values())) == (2, {}, {("first",), ("second",)})
    assert kind not in {node.op_type for node in onnx.load(after).graph.node}
    true = run_plugins(before, arrays())["output"]
    np.testing.assert_allclose(run_form(after, form, arrays()), true, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("domain", "dtype", "table"), [("trt.plugins", np.float32, np.int32), ("", np.float16, np.int32)])
def test_other_domains_and_dtypes(domain, dtype, table, tmp_path):
    before, after = tmp_path / "before.onnx", tmp_path / "after.onnx"
    onnx.save(model(domain=domain, dtype=dtype, table=table), before)
    assert len(mx_driving.onnx.fuse(before, after).replaced) == 2
    onnx.save(model(dtype=dtype, table=table), before)
    true = run_plugins(before, arrays(dtype=dtype))["output"]
    np.testing.assert_allclose(
        run_form(after, "onnxruntime", arrays(dtype=dtype)), true, rtol=0, atol=0.2 if dtype == np.float16 else 2e-5
    )


def test_verify_judges_a_runtime_of_the_plugin(tmp_path):
    onnx.save(model(), tmp_path / "before.onnx")
    report = check(tmp_path / "before.onnx", run_plugins, arrays())
    assert report.right
    assert [(one.match.name, one.inputs) for one in report.comparisons] == [("first", "in the file"), ("second", "in the file")]

    def run_with_axes_swapped(path, fed):
        swapped = {
            n: a.reshape(*a.shape[:-1], -1, 2)[..., ::-1].reshape(a.shape) if n.startswith("ref") else a for n, a in fed.items()
        }
        return run_plugins(path, swapped)

    report = check(tmp_path / "before.onnx", run_with_axes_swapped, arrays())
    assert not any(one.right for one in report.comparisons)


def test_other_plugins_keep_their_domain(tmp_path):
    """A file may have nodes that only their runtime knows. Weights outside the file are found, too."""
    before, after = tmp_path / "in" / "before.onnx", tmp_path / "after.onnx"
    before.parent.mkdir()
    whole = model()
    whole.graph.node.insert(0, helper.make_node("RotateTRT", ["value", "references"], ["turned"], name="turn"))
    whole.graph.node[1].input[0] = "turned"
    whole.graph.value_info.append(helper.make_tensor_value_info("turned", TensorProto.FLOAT, [2, 42, HEADS, CHANNELS]))
    onnx.save(whole, before, save_as_external_data=True, location="weights", size_threshold=100)
    assert len(mx_driving.onnx.fuse(before, after).replaced) == 2
    kinds = {node.op_type: node.domain for node in onnx.load(after).graph.node}
    assert kinds["RotateTRT"] == ""
    assert {opset.domain for opset in onnx.load(after).opset_import} == {"", "mx_driving"}
    assert not any(node.metadata_props for node in onnx.load(after).graph.node)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"inputs": 4},
            "its node MultiScaleDeformableAttnTRT has 4 inputs; one that is read has value, spatial shapes, reference",
        ),
        ({"kind": "MultiScaleDeformableAttnTRT3"}, "first: its node MultiScaleDeformableAttnTRT3 is not known; second: "),
    ],
)
def test_others_are_refused_in_a_sentence(change, why, mx, tmp_path):
    onnx.save(model(**change), tmp_path / "before.onnx")
    with pytest.raises(ValueError, match=why):
        mx_driving.onnx.fuse(tmp_path / "before.onnx", tmp_path / "after.onnx")
    status, _, problem = mx("verify", tmp_path / "before.onnx", "--runtime", "onnxruntime", "--json")
    assert (status, problem.count("\n"), " must " in problem) == (2, 1, True)


def test_the_command_names_the_nodes(mx, tmp_path):
    onnx.save(model(), tmp_path / "before.onnx")
    status, said, _ = mx("fuse", tmp_path / "before.onnx", tmp_path / "after.onnx", "--json")
    facts = json.loads(said)
    assert (status, facts["right"], facts["left"]) == (0, True, [])
    assert [(row["name"], row["nodes"]) for row in facts["replaced"]] == [("first", ["first"]), ("second", ["second"])]
