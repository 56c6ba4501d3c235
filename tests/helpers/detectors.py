"""A small detector that somebody has saved, with random weights, for programs that read a checkpoint and a photograph."""

import pathlib

import torch
import transformers
from PIL import Image

STAGES = {"out_features": ["stage2", "stage3", "stage4"], "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}


def small_deformable_detr() -> transformers.DeformableDetrForObjectDetection:
    backbone = transformers.ResNetConfig(embedding_size=8, layer_type="basic", **STAGES)
    layers = {"encoder_layers": 1, "decoder_layers": 2, "d_model": 64, "num_queries": 30, "num_labels": 3}
    config = transformers.DeformableDetrConfig(backbone_config=backbone, use_timm_backbone=False, **layers)
    return transformers.DeformableDetrForObjectDetection(config)


def saved(folder: pathlib.Path, photo: pathlib.Path, height: int = 96, width: int = 128) -> None:
    """Of one stage: in two a ranking chooses the queries, and a rounding error may choose others on some processor."""
    torch.manual_seed(0)
    small_deformable_detr().save_pretrained(folder)
    transformers.DeformableDetrImageProcessor(size={"height": height, "width": width}).save_pretrained(folder)
    Image.radial_gradient("L").resize((width, height)).save(photo)
