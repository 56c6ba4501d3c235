"""Patched detectors in 32 and 16 bits. Torch's own grid_sample loses its place in 16 bits on a CPU: docs/pytorch.md has the
report. test_transformers.py has every model in float64."""

import pytest
import torch
import torch.nn.functional as F

transformers = pytest.importorskip("transformers")

import models  # noqa: E402
from detectors import STAGES, small_deformable_detr  # noqa: E402

import mx_driving  # noqa: E402

HEIGHT, WIDTH = 192, 256  # the rows of the largest level, 24 x 32 x 64 channels, do not fit in 16 bits
ANCHORS = 24 * 32 + 12 * 16 + 6 * 8
WIDTHS = {"d_model": 64, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "decoder_layers": 2, "num_labels": 3}
HYBRID = {
    **{"encoder_hidden_dim": 64, "encoder_in_channels": [16, 16, 32], "decoder_in_channels": [64] * 3},
    **{"hidden_expansion": 0.5, "num_queries": ANCHORS},  # all anchors: no rounding error chooses others
}
BLOCKS = {
    **{"stem_channels": [3, 8, 8], "stage_in_channels": [8, 8, 16, 16], "stage_mid_channels": [8] * 4},
    **{"stage_out_channels": [8, 16, 16, 32], "stage_num_blocks": [1] * 4, "stage_numb_of_layers": [1] * 4},
}


def d_fine():
    backbone = transformers.HGNetV2Config(embedding_size=8, **STAGES, **BLOCKS)
    return transformers.DFineForObjectDetection(transformers.DFineConfig(backbone_config=backbone, **WIDTHS, **HYBRID))


def scores(model, picture):
    """The scores of each class in order: queries that nearly tie may change places."""
    with torch.no_grad():
        logits = model(pixel_values=picture).logits
    return logits.double().sort(1).values


def distance(found, expected):
    return float((found - expected).square().mean().sqrt() / expected.std())


NARROW = [(dtype, autocast) for dtype in (torch.bfloat16, torch.float16) for autocast in (False, True)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("dtype", "autocast"), [(torch.float32, False), *NARROW], ids=str)
@pytest.mark.parametrize("build", [small_deformable_detr, d_fine])
def test_a_patched_detector_is_near_the_wider_one(build, dtype, autocast, monkeypatch):
    """No farther than twice the distance of its own code with the sampling in float32: two draws of the same roundings."""
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    torch.manual_seed(0)
    model, picture = build().eval(), torch.rand(1, 3, HEIGHT, WIDTH)
    models.make_sensitive(models.Subject("small", model, {"pixel_values": picture}))
    model = model.to(dtype).to(wide)  # weights that both dtypes have
    expected = scores(model, picture.to(dtype).to(wide))
    picture, modes = picture.to(dtype), {"dtype": dtype} if autocast else {"enabled": False}
    picture = picture.to(wide) if autocast else picture
    model.to(picture.dtype)
    with mx_driving.patched(model) as done, torch.autocast("cpu", **modes):
        found = scores(model, picture)
    assert len(done.layers) == (3 if build is small_deformable_detr else 2)
    assert found.isfinite().all()
    sample = F.grid_sample
    monkeypatch.setattr(F, "grid_sample", lambda v, grid, **options: sample(v.float(), grid.float(), **options).to(v.dtype))
    with torch.autocast("cpu", **modes):
        theirs = distance(scores(model, picture), expected)
    assert distance(found, expected) < 2 * theirs < 0.2
