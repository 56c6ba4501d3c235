"""examples/deploy_onnx.py on a small detector: the boxes of torch from our operators in onnxruntime."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import onnx
import pytest
import torch

transformers = pytest.importorskip("transformers")
FILE = pathlib.Path(__file__).parent.parent / "examples" / "deploy_onnx.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FILE), "--rounds", "1", *options]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})


@pytest.fixture(scope="module")
def detector(tmp_path_factory):
    """The folder of a saved detector of one stage, so that no ranking chooses queries."""
    from PIL import Image

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("saved")
    stages = {"out_features": ["stage2", "stage3", "stage4"], "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}
    backbone = transformers.ResNetConfig(embedding_size=8, layer_type="basic", **stages)
    layers = {"encoder_layers": 1, "decoder_layers": 2, "d_model": 64}
    config = transformers.DeformableDetrConfig(
        backbone_config=backbone, use_timm_backbone=False, num_queries=30, num_labels=3, **layers
    )
    transformers.DeformableDetrForObjectDetection(config).save_pretrained(folder)
    transformers.DeformableDetrImageProcessor(size={"height": 96, "width": 128}).save_pretrained(folder)
    Image.radial_gradient("L").resize((128, 96)).save(folder / "photo.png")
    return folder


@pytest.mark.needs("An ONNX file of opset 20")
def test_the_boxes_of_torch(detector, tmp_path):
    said = run(
        "--checkpoint",
        str(detector),
        "--photo",
        str(detector / "photo.png"),
        "--folder",
        str(tmp_path),
        "--forms",
        "onnxruntime",
    )
    assert said.returncode == 0, said.stderr
    differences = dict(re.findall(r"^ *(.+): +[\d.]+ ms, boxes (\S+)$", said.stdout, re.MULTILINE))
    assert list(differences) == ["torch", "torch, patched", "onnxruntime, onnxruntime"]
    assert max(map(float, differences.values())) < 1e-5
    nodes = onnx.load(tmp_path / "onnxruntime.onnx").graph.node
    assert {node.op_type for node in nodes if node.domain == "mx_driving"} == {"multi_scale_deformable_attn_with_logits"}


def test_what_is_no_detector_is_refused():
    said = run("--model", "bert")
    assert said.returncode == 1
    assert re.search(r"--model must be one of .*; got bert\n", said.stderr)
