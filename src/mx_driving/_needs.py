"""Features that need a newer torch than the package. Tests skip by this table; the support page shows it."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Need(NamedTuple):
    torch: str  # the oldest of 2.6, 2.8, 2.11 and 2.13 on which the feature's tests pass, or what the exporter's source says
    why: str  # what older versions do


NEEDS = {
    "DTensor on a mesh of several dimensions": Need("2.8", 'their redistribution ends with "redistribute failed!"'),
    "DTensor under torch.compile": Need("2.13", "they run the operator on memory that nobody has filled"),
    "Sampling by Triton": Need("2.8", "their Triton 3.2 adds up a gradient wrongly, at least in its interpreter"),
    "An ONNX file of opset 20": Need("2.8", "their exporter leaves functions in the file that it cannot convert"),
    "An ONNX file of opset 16 or 17": Need("2.9", "their exporter converts to no opset before 18"),
    "A program with free sizes, of a module": Need("2.8", "they take some free sizes of some modules for fixed ones"),
    "A compiled model of transformers 5": Need("2.8", "their compiler cannot trace transformers' own decorators"),
    "fully_shard on a CPU": Need("2.8", "they ask a CPU for streams that only a GPU has"),
}


def is_older_than(version: str) -> bool:
    """Return whether torch is older than a version "2.10". A pre-release counts as the release."""
    ours, theirs = ([int(part) for part in text.split(".")[:2]] for text in (torch.__version__, version))
    return ours < theirs


def lacks(feature: str) -> str | None:
    """Return why this torch does not have a feature, as a sentence; None if it has the feature."""
    need = NEEDS[feature]
    if not is_older_than(need.torch):
        return None
    return f"{feature} needs torch {need.torch} or later; got {torch.__version__}: older ones fail, since {need.why}"


def check(feature: str) -> None:
    """Raise NotImplementedError if this torch lacks a feature."""
    sentence = lacks(feature)
    if sentence is not None:
        raise NotImplementedError(sentence)
