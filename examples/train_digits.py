"""Train a small Deformable DETR on scenes of handwritten digits, once with its own sampling code and once patched, and compare.

    python examples/train_digits.py --out runs/digits                 # two trainings of 2,000 steps: some minutes
    python examples/train_digits.py --out runs/digits --steps 100     # boxes mean little yet; losses can be compared

A scene has one to three of scikit-learn's 1,797 digits in a random size and place; nothing is downloaded. Both trainings begin
with the same weights and see the same scenes. --out gets losses.csv, a loss for each 20 steps, and precision.csv: the average
precision on scenes of other digits, by the model's own code and patched, in float32, under autocast and in bfloat16.

Needs `pip install '.[examples]' 'transformers>=5'`.
"""

from __future__ import annotations

import argparse
import copy
import csv
import datetime
import itertools
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sentences import at_least_one, in_a_sentence
from sklearn.datasets import load_digits
from torch import Tensor, nn
from transformers import DeformableDetrConfig, DeformableDetrForObjectDetection, ResNetConfig, __version__

import mx_driving

SIDE = 64  # pixels of a scene
SIZES = (14, 29)  # pixels of a digit: the least, and an exclusive bound
HELD_OUT = 397  # digits that only scenes for the evaluation show
BATCH = 16  # scenes of a step
EVERY = 20  # steps for one entry of losses.csv
THRESHOLDS = torch.linspace(0.5, 0.95, 10)  # overlaps from which a box counts as found, as in COCO
CODES = ("its own code", "mx_driving")


class Digits:
    """Draw scenes from a part of scikit-learn's digits, the same for the same seed."""

    def __init__(self, held_out: bool, seed: int) -> None:
        part = slice(-HELD_OUT, None) if held_out else slice(-HELD_OUT)
        digits = load_digits()
        self.images = torch.tensor(digits.images[part]).float() / 16
        self.classes = torch.tensor(digits.target[part])
        self.generator = torch.Generator().manual_seed(seed)

    def scene(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a picture, and its class_labels [digits] and boxes [digits, 4]. Leave out a digit that would touch another."""
        picture = 0.15 * torch.rand(SIDE, SIDE, generator=self.generator)
        classes, boxes = [], []
        for _ in range(int(torch.randint(1, 4, (), generator=self.generator))):
            size, digit = (int(torch.randint(*ends, (), generator=self.generator)) for ends in (SIZES, (0, len(self.images))))
            left, top = torch.randint(0, SIDE - size + 1, (2,), generator=self.generator).tolist()
            if any(left < x + s and x < left + size and top < y + s and y < top + size for x, y, s in boxes):
                continue
            boxes.append((left, top, size))
            classes.append(self.classes[digit])
            enlarged = F.interpolate(self.images[digit, None, None], (size, size), mode="bilinear")[0, 0]
            picture[top : top + size, left : left + size] += enlarged
        x, y, size = torch.tensor(boxes).T / SIDE
        centred = torch.stack([x + size / 2, y + size / 2, size, size], -1)
        return picture.expand(3, -1, -1), {"class_labels": torch.stack(classes), "boxes": centred}

    def scenes(self, count: int) -> tuple[Tensor, list[dict[str, Tensor]]]:
        pictures, labels = zip(*(self.scene() for _ in range(count)), strict=True)
        return torch.stack(pictures), list(labels)


def make_detector() -> DeformableDetrForObjectDetection:
    """Return a Deformable DETR with 0.3 million random weights: two layers in the encoder, two in the decoder."""
    stages = {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1], "out_features": ["stage1", "stage2", "stage3"]}
    backbone = ResNetConfig(embedding_size=16, layer_type="basic", **stages)
    layer = {"layers": 2, "attention_heads": 4, "ffn_dim": 128}
    layers = {f"{part}_{name}": number for part in ("encoder", "decoder") for name, number in layer.items()}
    sizes = {"d_model": 64, "num_feature_levels": 3, "num_queries": 12, "num_labels": 10, "dropout": 0.0}
    parts = {"backbone_config": backbone, "use_timm_backbone": False, "with_box_refine": True, "auxiliary_loss": True}
    return DeformableDetrForObjectDetection(DeformableDetrConfig(**layers, **sizes, **parts))


def train(model: nn.Module, name: str, steps: int) -> list[float]:
    """Return the mean loss of each EVERY steps."""
    digits, losses, means = Digits(held_out=False, seed=1), [], []
    optimiser = torch.optim.AdamW(model.parameters(), weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=steps)
    model.train()
    for step in range(1, steps + 1):
        pictures, labels = digits.scenes(BATCH)
        loss = model(pixel_values=pictures, labels=labels).loss
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        losses.append(float(loss))
        if step % EVERY == 0:
            means.append(round(sum(losses[-EVERY:]) / EVERY, 4))
            print(f"{name}, step {step}: loss {means[-1]}", flush=True)
    return means


@torch.no_grad()
def predict(model: nn.Module, pictures: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """Return scores [n, queries, classes] and boxes [n, queries, 4] in float32."""
    if mode == "bfloat16":
        model, pictures = copy.deepcopy(model).bfloat16(), pictures.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        outputs = [model(pixel_values=part) for part in pictures.split(50)]
    scores = torch.cat([output.logits.float().sigmoid() for output in outputs])
    return scores, torch.cat([output.pred_boxes.float() for output in outputs])


def overlap(boxes: Tensor, others: Tensor) -> Tensor:
    """Return the intersection over union of each box [n, 4] with each other [m, 4]."""
    low, high = (boxes[:, None, :2] + sign * boxes[:, None, 2:] / 2 for sign in (-1, 1))
    other_low, other_high = (others[:, :2] + sign * others[:, 2:] / 2 for sign in (-1, 1))
    shared = (torch.minimum(high, other_high) - torch.maximum(low, other_low)).clamp(min=0).prod(-1)
    return shared / (boxes[:, None, 2:].prod(-1) + others[:, 2:].prod(-1) - shared)


def find_hits(scores: Tensor, boxes: Tensor, labels: list[dict[str, Tensor]]) -> Tensor:
    """Return whether a query is the best guess of a digit [thresholds, n, queries, classes]. True boxes do not touch."""
    hits = torch.zeros(len(THRESHOLDS), *scores.shape, dtype=torch.bool)
    for scene, label in enumerate(labels):
        for digit in label["class_labels"].unique():
            order = scores[scene, :, digit].argsort(descending=True)
            overlaps = overlap(boxes[scene, order], label["boxes"][label["class_labels"] == digit])
            fitting = overlaps >= THRESHOLDS[:, None, None]
            hits[:, scene, order, digit] = (fitting & (fitting.cumsum(1) == 1)).any(-1)
    return hits


def average_precision(scores: Tensor, boxes: Tensor, labels: list[dict[str, Tensor]]) -> Tensor:
    """Return the area under each precision-recall curve [thresholds, classes]; every query guesses, and NaN is no guess."""
    scores = scores.nan_to_num(nan=-1.0)
    order = scores.flatten(0, 1).argsort(0, descending=True)
    hits = (find_hits(scores, boxes, labels) & (scores >= 0)).flatten(1, 2).take_along_dim(order[None], 1).double()
    precision = hits.cumsum(1) / torch.arange(1, len(order) + 1)[:, None]
    best_from_here = precision.flip(1).cummax(1).values.flip(1)
    totals = torch.cat([label["class_labels"] for label in labels]).bincount(minlength=scores.shape[-1])
    return (best_from_here * hits).sum(1) / totals  # NaN: no scene has the digit


def measure(model: nn.Module, code: str, mode: str, pictures: Tensor, labels: list[dict[str, Tensor]]) -> dict[str, str]:
    """Return columns of precision.csv: means over digits and thresholds, in per cent."""
    with mx_driving.patched(model) if code == CODES[1] else nullcontext():
        scores, boxes = predict(model.eval(), pictures, mode)
    table = 100 * average_precision(scores, boxes, labels)
    means = {"AP": f"{table.nanmean():.1f}", "AP at 0.5": f"{table[0].nanmean():.1f}"}
    return {"sampling": code, "mode": mode, **means}


def compare(steps: int, count: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of losses.csv and of precision.csv."""
    torch.manual_seed(0)
    untrained, held_out = make_detector(), Digits(held_out=True, seed=2).scenes(count)
    curves, precision = {}, []
    machine = f"{datetime.date.today()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads, "
    machine += f"torch {torch.__version__}, transformers {__version__}"
    for trained in CODES:
        model, start = copy.deepcopy(untrained), time.perf_counter()
        with mx_driving.patched(model) if trained == CODES[1] else nullcontext():
            curves[trained] = train(model, trained, steps)
        done = {"trained with": trained, "training s": f"{time.perf_counter() - start:.0f}"}
        for mode, code in itertools.product(("float32", "autocast", "bfloat16"), CODES):
            precision.append({**done, **measure(model, code, mode, *held_out), "machine": machine})
            print(*list(precision[-1].values())[:-1], sep=", ", flush=True)
    losses = [dict(zip(CODES, pair, strict=True)) for pair in zip(*curves.values(), strict=True)]
    return [{"step": EVERY * number, **pair} for number, pair in enumerate(losses, 1)], precision


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([rows[0], *(row.values() for row in rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/digits"), help="folder of losses.csv and precision.csv")
    parser.add_argument("--steps", type=at_least_one, default=2000)
    parser.add_argument("--scenes", type=at_least_one, default=300, help="scenes of digits that are held out")
    options = parser.parse_args()
    with in_a_sentence(parser.prog):
        if options.steps < EVERY:
            raise ValueError(f"--steps must be at least {EVERY}; got {options.steps}")
        options.out.mkdir(parents=True, exist_ok=True)
        losses, precision = compare(options.steps, options.scenes)
        write(options.out / "losses.csv", losses)
        write(options.out / "precision.csv", precision)


if __name__ == "__main__":
    main()
