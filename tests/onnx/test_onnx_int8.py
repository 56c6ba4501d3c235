"""int8 beside our node: fuse after quantisation or before it."""

import itertools
import json
import logging

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx_writings import Stacked, Summed, export, feeds, inputs, kinds, run
from onnxruntime.quantization import CalibrationDataReader, quantize_static

import mx_driving.onnx

LINEAR = {"op_types_to_quantize": ["Conv", "MatMul", "Gemm"]}


class Layer(torch.nn.Module):
    def __init__(self, writing):
        super().__init__()
        torch.manual_seed(0)
        self.writing, self.project, self.last = writing, torch.nn.Linear(8, 8), torch.nn.Linear(32, 16)

    def forward(self, value, locations, weights):
        return self.last(self.writing(self.project(value), locations, weights))


class Reader(CalibrationDataReader):
    def __init__(self):
        self.fed = itertools.chain([feeds()])

    def get_next(self):
        return next(self.fed, None)


def quantize(path_in, path_out, **options):
    logging.disable(logging.WARNING)
    try:
        quantize_static(path_in, path_out, Reader(), **options)
    finally:
        logging.disable(logging.NOTSET)


@pytest.fixture(params=[Stacked, Summed], ids=["stacked", "summed"])
def exported(request, tmp_path):
    export(Layer(request.param()).eval(), tmp_path / "float.onnx", "older, fixed sizes")
    return tmp_path / "float.onnx"


def test_fuse_after_quantisation_gives_the_int8_file_s_numbers(exported, tmp_path):
    quantize(exported, tmp_path / "int8.onnx", **LINEAR)
    report = mx_driving.onnx.fuse(tmp_path / "int8.onnx", tmp_path / "fused.onnx")
    assert (len(report.replaced), report.left) == (1, {})
    assert {"QuantizeLinear", "multi_scale_deformable_attn"} <= set(kinds(tmp_path / "fused.onnx"))
    true, made = (run(tmp_path / name, inputs()) for name in ("int8.onnx", "fused.onnx"))
    step = np.abs(run(exported, inputs())).max() / 127  # rounding may move a number across the end of a step
    assert np.abs(made - true).max() < 2 * step
    assert np.abs(made - true).mean() < 0.02 * step


def test_attention_in_int8_is_named_and_its_nodes_can_be_left_out(exported, mx, tmp_path):
    quantize(exported, tmp_path / "int8.onnx")
    with pytest.raises(ValueError, match="pairs of QuantizeLinear and DequantizeLinear stand between its nodes") as error:
        mx_driving.onnx.fuse(tmp_path / "int8.onnx", tmp_path / "fused.onnx")
    assert "GridSample_" not in str(error.value)
    status, _, problem = mx("verify", tmp_path / "int8.onnx", "--runtime", "onnxruntime")
    assert (status, "pairs of QuantizeLinear and DequantizeLinear" in problem) == (2, True)
    status, said, _ = mx("fuse", exported, tmp_path / "fused.onnx", "--json")
    (match,) = json.loads(said)["replaced"]
    model = onnx.load(exported)
    assert {node.name for node in model.graph.node if node.op_type in ("GridSample", "ReduceSum")} <= set(match["nodes"])
    assert {node.op_type for node in model.graph.node if node.name in match["nodes"]} & {"MatMul", "Softmax"} == set()
    quantize(exported, tmp_path / "around.onnx", nodes_to_exclude=match["nodes"])
    assert len(mx_driving.onnx.fuse(tmp_path / "around.onnx", tmp_path / "again.onnx").replaced) == 1


def test_a_fused_file_is_calibrated(exported, tmp_path):
    mx_driving.onnx.fuse(exported, tmp_path / "fused.onnx")
    make = onnxruntime.InferenceSession.__init__
    with pytest.raises(Exception, match="multi_scale_deformable_attn"):
        quantize(tmp_path / "fused.onnx", tmp_path / "int8.onnx", **LINEAR)
    with mx_driving.onnx.register_library():  # 7 bits of weights: without VNNI, onnxruntime's sums of 8 bits saturate
        quantize(tmp_path / "fused.onnx", tmp_path / "int8.onnx", **LINEAR, reduce_range=True)
    assert onnxruntime.InferenceSession.__init__ is make
    true, made = run(exported, inputs()), run(tmp_path / "int8.onnx", inputs())
    assert {"QuantizeLinear", "multi_scale_deformable_attn"} <= set(kinds(tmp_path / "int8.onnx"))
    assert np.abs(made - true).max() < 0.1 * np.abs(true).max()


def test_verify_names_nodes_and_numbers_in_json(exported, mx, tmp_path):
    np.savez(tmp_path / "inputs.npz", **feeds())
    status, said, problem = mx("verify", exported, "--runtime", "onnxruntime", "--inputs", tmp_path / "inputs.npz", "--json")
    facts = json.loads(said)
    assert (status, problem, facts["right"], facts["left"]) == (0, "", True, [])
    (match,) = facts["matches"]
    assert any("GridSample" in name for name in match["nodes"])
    assert [row["inputs"] for row in facts["comparisons"]] == ["in the file", "across borders"]
    assert all(row["match"] == match["name"] and 0 <= row["error"] < 1 for row in facts["comparisons"])
    assert [row["verdict"] for row in facts["outputs"]] == ["right"]
