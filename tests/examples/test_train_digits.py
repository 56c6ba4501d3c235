"""examples/train_digits.py: its scenes and its precision. Tests run a few steps; docs/training.md has the results."""

import csv
import functools
import sys

import pytest
import torch
from programs import example

pytest.importorskip("transformers")
pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def digits():
    return example("train_digits")


@pytest.fixture(scope="module")
def scenes(digits):
    return digits.Digits(held_out=True, seed=2).scenes(20)


def test_true_boxes_are_found_and_shifted_boxes_at_low_thresholds(digits, scenes):
    pictures, labels = scenes
    assert pictures.shape == (20, 3, 64, 64)
    scores, boxes = torch.zeros(20, 12, 10), torch.rand(20, 12, 4)
    for scene, label in enumerate(labels):
        for query, (digit, box) in enumerate(zip(label["class_labels"], label["boxes"], strict=True)):
            scores[scene, query, digit], boxes[scene, query] = 1, box
    assert (digits.average_precision(scores, boxes, labels).nan_to_num(1) == 1).all()
    boxes[..., 0] += boxes[..., 2] / 5  # intersection over union of 0.8 / 1.2
    table = digits.average_precision(scores, boxes, labels).nanmean(1)
    assert (table > 0).tolist() == [threshold < 0.66 for threshold in digits.THRESHOLDS.tolist()]
    # The second prediction of a digit is a false positive of lower score.
    boxes[:, 6:9], scores[:, 6:9] = boxes[:, :3], scores[:, :3] / 2
    assert torch.equal(digits.average_precision(scores, boxes, labels).nanmean(1), table)
    assert digits.average_precision(scores * torch.nan, boxes, labels).nanmean() == 0


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_both_codes_follow_one_curve(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(digits, "EVERY", 2)
    monkeypatch.setattr(digits, "BATCH", 2)
    monkeypatch.setattr(sys, "argv", ["train_digits.py", "--out", str(tmp_path), "--steps", "4", "--scenes", "5"])
    digits.main()
    losses, precision = (list(csv.DictReader((tmp_path / name).open())) for name in ("losses.csv", "precision.csv"))
    assert [row["step"] for row in losses] == ["2", "4"]
    for row in losses:
        assert float(row["mx_driving"]) == pytest.approx(float(row["its own code"]), rel=1e-3)
    assert len(precision) == 12


def test_too_few_steps_are_refused(refusal, digits, tmp_path):
    refused = functools.partial(refusal, digits, "--out", tmp_path / "run")
    assert "--steps must be at least 20; got 19" in refused("--steps", 19)
