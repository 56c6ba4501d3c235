"""Small models of transformers with deformable attention, for the tests of `ModelTesterMixin`, which transformers' sdist has.

The sdist has no files of models, which say how small a model may be and what it is given. Here is a row for each model instead.
`make test-transformers CHECKOUT=folder` runs transformers' own files of a source tree instead of this one.
"""

from __future__ import annotations

import importlib
import os
import unittest
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from tests.test_modeling_common import ModelTesterMixin  # pyright: ignore

BATCH, SIDE, LABELS, TARGETS = 2, 64, 10, 3
WIDTHS = [10, 20, 30, 40]
Inputs = dict[str, Any]


def _resnet(kind: str = "RTDetrResNetConfig", first: int = 2) -> Any:
    stages = [f"stage{n}" for n in range(first, 5)]
    return getattr(transformers, kind)(embeddings_size=10, hidden_sizes=WIDTHS, depths=[1, 1, 2, 1], out_features=stages)


def _hgnet() -> Any:
    """All four stages, which models with masks need."""
    return transformers.HGNetV2Config(  # pyright: ignore
        embedding_size=10, hidden_sizes=WIDTHS, depths=[1, 1, 1, 1], stem_channels=[3, 8, 12],
        stage_in_channels=[12, 10, 20, 30], stage_mid_channels=[6, 6, 6, 6], stage_out_channels=WIDTHS,
        stage_num_blocks=[1, 1, 1, 1], stage_numb_of_layers=[1, 1, 1, 1], out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip


def _swin(first: int = 2) -> Any:
    sizes: Any = {"image_size": SIDE, "window_size": 4, "embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 1, 1]}
    return transformers.SwinConfig(**sizes, out_features=[f"stage{n}" for n in range(first, 5)])  # pyright: ignore


def _vit(kind: str, **more: Any) -> Any:
    """A transformer without convolutions, whose last two of three layers are read."""
    sizes: Any = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": SIDE, "patch_size": 8}
    return getattr(transformers, kind)(**sizes, **more)


def _bert() -> Any:
    sizes: Any = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    return transformers.BertConfig(**sizes, vocab_size=1100, max_position_embeddings=8)  # pyright: ignore


def _clip() -> Any:
    sizes: Any = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return transformers.CLIPTextConfig(**sizes, **ends, projection_dim=16, vocab_size=64, max_position_embeddings=8)  # pyright: ignore


def _reading_order() -> Any:
    from transformers.models.pp_doclayout_v2.configuration_pp_doclayout_v2 import PPDocLayoutV2ReadingOrderConfig as Config

    sizes: Any = {"hidden_size": 24, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 2}
    return Config(**sizes, coordinate_size=4, shape_size=4, num_classes=LABELS)


_LAYERS = {"encoder_layers": 2, "decoder_layers": 2}
_HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
_SIZES: Any = {"d_model": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_queries": 12, "num_labels": LABELS}
_DETR: Any = {**_LAYERS, **_HEADS, **_SIZES, "dropout": 0.0}
_HYBRID: Any = {
    **_DETR, "encoder_layers": 1, "encoder_hidden_dim": 32, "encoder_in_channels": WIDTHS[1:],
    "decoder_in_channels": [32, 32, 32], "num_denoising": 0,
}  # fmt: skip
_LIGHT: Any = {
    "decoder_layers": 2,
    "decoder_self_attention_heads": 2,
    "decoder_cross_attention_heads": 4,
    "group_detr": 2,
    "dropout": 0.0,
}
_MASKS: Any = {
    **_LAYERS, "num_attention_heads": 2, "hidden_dim": 32, "encoder_feedforward_dim": 32, "dim_feedforward": 32,
    "num_queries": 12, "num_labels": LABELS, "dropout": 0.0,
}  # fmt: skip


def _grounding() -> Inputs:
    """Three levels: a fourth has a single pixel here, whose normalisation fails."""
    return {**_DETR, "backbone_config": _swin(), "text_config": _bert(), "max_text_len": 16, "num_feature_levels": 3}


def boxes() -> Inputs:
    target = {"class_labels": torch.arange(TARGETS) % 2, "boxes": torch.full((TARGETS, 4), 0.4)}
    return {"labels": [{name: t.clone() for name, t in target.items()} for _ in range(BATCH)]}


def masks() -> Inputs:
    shapes = (torch.arange(SIDE * SIDE).view(SIDE, SIDE) // (400 * (n + 1)) % 2 for n in range(TARGETS))
    target = torch.stack(list(shapes)).float()
    return {
        "mask_labels": [target.clone() for _ in range(BATCH)],
        "class_labels": [torch.arange(TARGETS) for _ in range(BATCH)],
    }


def _tasks() -> Inputs:
    return {"task_inputs": torch.arange(1, 9).expand(BATCH, -1)}


def _prompt() -> Inputs:
    """Two names, a full stop behind each, between BERT's first and last token."""
    ids = torch.tensor([[101, 5, 7, 1012, 9, 1012, 102]]).expand(BATCH, -1).contiguous()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _classes() -> Inputs:
    names, task = torch.tensor([[1, 5, 2], [1, 6, 2]] * BATCH), torch.tensor([[1, 9, 2]] * BATCH)
    attended = {"classes_attention_mask": torch.ones_like(names), "tasks_attention_mask": torch.ones_like(task)}
    counts = torch.full((BATCH,), 2)
    return {"classes_input_ids": names, "tasks_input_ids": task, "classes_structure": counts, **attended}


@dataclass(frozen=True)
class Small:
    """A model: what its configuration differs in, what it is given beside a picture, and what it is to learn."""

    changes: Callable[[], Mapping[str, Any]]
    inputs: Callable[[], Inputs] = dict
    labels: Callable[[], Inputs] | None = boxes  # None where the model says that it does not train
    kinds: tuple[str, ...] = ("Model", "ForObjectDetection")
    beside: frozenset[str] = frozenset()  # what transformers itself returns beside the graph


MODELS = {
    "d_fine": Small(lambda: {**_HYBRID, "backbone_config": _resnet()}),
    "deformable_detr": Small(
        lambda: {**_DETR, "backbone_config": _resnet("ResNetConfig"), "num_feature_levels": 3, "use_timm_backbone": False}
    ),
    "deimv2": Small(lambda: {**_HYBRID, "backbone_config": _resnet()}),
    "grounding_dino": Small(_grounding, _prompt),
    "lw_detr": Small(
        lambda: {
            **_SIZES,
            **_LIGHT,
            "projector_scale_factors": [1.0],
            "backbone_config": _vit(
                "LwDetrViTConfig", num_windows=4, window_block_indices=[0], out_features=["stage2", "stage3"]
            ),
        }
    ),
    "mask2former": Small(
        lambda: {**_MASKS, "backbone_config": _swin(1), "feature_size": 32, "mask_feature_size": 32},
        labels=masks,
        kinds=("Model", "ForUniversalSegmentation"),
        beside=frozenset({"encoder_hidden_states[0]"}),
    ),
    "mm_grounding_dino": Small(_grounding, _prompt),
    "omdet_turbo": Small(
        lambda: {
            "backbone_config": _swin(),
            "use_timm_backbone": False,
            "apply_layernorm_after_vision_backbone": False,
            "text_config": _clip(),
            "text_projection_in_dim": 16,
            "text_projection_out_dim": 16,
            "task_encoder_hidden_dim": 32,
            "class_embed_dim": 16,
            "num_queries": 12,
            "encoder_hidden_dim": 32,
            "vision_features_channels": [32, 32, 32],
            "encoder_in_channels": [16, 32, 64],
            "encoder_attention_heads": 2,
            "encoder_dim_feedforward": 32,
            "decoder_hidden_dim": 32,
            "decoder_num_heads": 2,
            "decoder_num_layers": 2,
            "decoder_dim_feedforward": 32,
        },
        _classes,
        labels=None,
        kinds=("ForObjectDetection",),
    ),
    "oneformer": Small(
        lambda: {**_MASKS, "backbone_config": _swin(1), "conv_dim": 32, "mask_dim": 32, "task_seq_len": 8},
        _tasks,
        labels=masks,
        kinds=("Model", "ForUniversalSegmentation"),
        beside=frozenset({"attentions[1]"}),
    ),
    "pp_doclayout_v2": Small(
        lambda: {
            **_HYBRID,
            "backbone_config": _resnet(),
            "class_thresholds": [0.5] * LABELS,
            "class_order": list(range(LABELS)),
            "reading_order_config": _reading_order(),
        },
        labels=None,
        kinds=("ForObjectDetection",),
    ),
    "pp_doclayout_v3": Small(
        lambda: {**_HYBRID, "backbone_config": _hgnet(), "x4_feat_dim": WIDTHS[0], "mask_feature_channels": [16, 16]},
        labels=None,
        kinds=("ForObjectDetection",),
    ),
    "pp_doclayout_v4": Small(
        lambda: {**_HYBRID, "backbone_config": _resnet(), "hidden_size": 32}, labels=None, kinds=("ForObjectDetection",)
    ),
    "rf_detr": Small(
        lambda: {
            **_SIZES,
            **_LIGHT,
            "backbone_config": _vit("RfDetrDinov2Config", num_windows=1, out_features=["stage2", "stage3"]),
        }
    ),
    "rt_detr": Small(lambda: {**_HYBRID, "backbone_config": _resnet()}),
    "rt_detr_v2": Small(lambda: {**_HYBRID, "backbone_config": _resnet()}),
}


NUMBERS = {  # what the mixin calls a number, and what configurations call it
    "hidden_size": ("hidden_size", "d_model", "hidden_dim", "encoder_hidden_dim"),
    "num_attention_heads": (
        "num_attention_heads",
        "decoder_attention_heads",
        "decoder_self_attention_heads",
        "decoder_num_heads",
    ),
    "num_hidden_layers": ("num_hidden_layers", "encoder_layers", "decoder_layers", "decoder_num_layers"),
}


class Tester:
    """What `ModelTesterMixin` asks of a model: a small configuration, inputs, and some of its numbers."""

    batch_size = BATCH

    def __init__(self, name: str) -> None:
        self.small = MODELS[name]
        self.is_training = self.small.labels is not None
        self.config_class = kinds_of(name)[0].config_class

    def get_config(self) -> Any:
        config = self.config_class(**self.small.changes())
        config.num_labels = LABELS
        return config

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, Inputs]:
        config = self.get_config()
        for wanted, names in NUMBERS.items():
            setattr(self, wanted, next(getattr(config, name) for name in names if hasattr(config, name)))
        return config, {"pixel_values": torch.rand(BATCH, 3, SIDE, SIDE), **self.small.inputs()}


def kinds_of(name: str) -> list[Any]:
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    first = next(kind for kind in module.__all__ if kind.endswith("PreTrainedModel"))
    whole = first.removesuffix("PreTrainedModel")
    return [getattr(module, whole + part) for part in MODELS[name].kinds]


class OwnTests(ModelTesterMixin):
    """Transformers' common tests, with this file's inputs. `name` is a row of `MODELS`."""

    name = ""
    test_resize_embeddings = False
    # of embedded words, and of hidden states that are sequences: encoders here have pictures
    test_inputs_embeds = test_inputs_embeds_matches_input_ids = test_model_get_set_embeddings = test_hidden_states_output = None

    def setUp(self) -> None:
        self.model_tester = Tester(self.name)

    def _prepare_for_class(self, inputs_dict: Inputs, model_class: Any, return_labels: bool = False) -> Inputs:
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels=return_labels)
        headed, labels = not model_class.__name__.endswith("Model"), MODELS[self.name].labels
        return {**inputs, **(labels() if labels and return_labels and headed else {})}

    def test_attention_outputs(self) -> None:
        """The mixin's own has one axis of keys in mind. Weights are shares, and asking for them changes no output."""
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        for kind in self.all_model_classes:
            model = kind._from_config(config, attn_implementation="eager").eval()
            given = self._prepare_for_class(inputs, kind)
            asked, unasked = model(**given, output_attentions=True), model(**given)
            found = [t for name in WATCHED if "attentions" in name for t in tensors(asked.get(name))]
            assert found
            for weights in found:
                sums = weights.flatten(min(3, weights.dim() - 1)).sum(
                    -1
                )  # over levels, too, where points have an axis of theirs
                torch.testing.assert_close(sums, torch.ones_like(sums))
            torch.testing.assert_close(answer(asked), answer(unasked))

    def test_retain_grad_hidden_states_attentions(self) -> None:
        """The mixin's own asks for the gradient of decoder queries, which none of these models learns."""
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        kind = self.all_model_classes[0]
        model = kind._from_config(config, attn_implementation="eager")
        outputs = model(**self._prepare_for_class(inputs, kind), output_attentions=True, output_hidden_states=True)
        watched = {f"{name}[{n}]": t for name in WATCHED for n, t in enumerate(tensors(outputs.get(name))) if t.requires_grad}
        assert watched
        for t in watched.values():
            t.retain_grad()
        answer(outputs).sum().backward()
        without = [name for name, t in watched.items() if t.grad is None and name not in MODELS[self.name].beside]
        assert without == [], f"the answer's gradient must reach what was returned; it does not reach {without}"


def tensors(found: Any) -> list[torch.Tensor]:
    """All in a tuple of tuples."""
    if isinstance(found, torch.Tensor):
        return [found]
    return [t for part in found or () for t in tensors(part)]


def answer(outputs: Any) -> torch.Tensor:
    """What a model returns from its last layer."""
    return next(outputs[name] for name in ANSWERS if outputs.get(name) is not None)


ANSWERS = (
    "logits", "last_hidden_state", "decoder_class_logits", "class_queries_logits", "transformer_decoder_last_hidden_state",
    "transformer_decoder_object_queries",
)  # fmt: skip
WATCHED = ("encoder_hidden_states", "encoder_attentions", "decoder_attentions", "cross_attentions", "attentions")


def _tests_of(name: str) -> type:
    given = {"name": name, "all_model_classes": tuple(kinds_of(name))}
    return type(f"Test_{name}", (OwnTests, unittest.TestCase), given)


globals().update({f"Test_{name}": _tests_of(name) for name in os.environ.get("MX_DRIVING_MODELS", "").split()})
