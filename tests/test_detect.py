"""examples/detect.py on a checkpoint of the person's own and on random weights: same boxes before and after, and a picture."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

transformers = pytest.importorskip("transformers")
FILE = pathlib.Path(__file__).parent.parent / "examples" / "detect.py"


def run(*options: str) -> str:
    command = [sys.executable, str(FILE), "--rounds", "1", *options]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.filterwarnings("ignore")
def test_checkpoint_and_photo_of_ones_own(tmp_path):
    from PIL import Image

    config = transformers.RTDetrV2Config(num_queries=30, decoder_layers=2, num_labels=3)
    transformers.RTDetrV2ForObjectDetection(config).save_pretrained(tmp_path / "detector")
    size = {"height": 160, "width": 224}
    transformers.RTDetrImageProcessor(size=size).save_pretrained(tmp_path / "detector")
    Image.radial_gradient("L").resize((200, 120)).save(tmp_path / "photo.png")
    out = tmp_path / "seen.png"
    said = run("--checkpoint", str(tmp_path / "detector"), "--photo", str(tmp_path / "photo.png"), "--out", str(out))
    assert "replaced transformers.models.rt_detr_v2.modeling_rt_detr_v2.multi_scale_deformable_attention_v2" in said
    assert "RTDetrV2ForObjectDetection, 160 x 224" in said
    found = re.search(r"largest difference of logits and boxes: (\S+); 2 layers", said)
    assert found
    assert float(found[1]) < 1e-4
    assert Image.open(out).size[0] > 900


def test_random_weights(tmp_path):
    from PIL import Image

    Image.radial_gradient("L").resize((96, 64)).save(tmp_path / "photo.png")
    photo = str(tmp_path / "photo.png")
    said = run("--model", "deformable_detr", "--photo", photo, "--count", "2", "--out", str(tmp_path / "seen.png"))
    assert "12 layers sample deformably" in said
    assert Image.open(tmp_path / "seen.png").size[0] > 900
