"""torch.onnx makes its registry of functions anew for each export, which takes longer than a small export itself. Where this is
imported each opset's is made once; an export has a copy, to which it adds its own functions."""

from __future__ import annotations

import copy
import functools
from typing import Any

from torch.onnx._internal.exporter._registration import ONNXRegistry

_made = functools.cache(ONNXRegistry.from_torchlib)


def _copied(*args: Any, **options: Any) -> ONNXRegistry:
    found = copy.copy(_made(*args, **options))
    found.functions = {target: list(known) for target, known in found.functions.items()}
    return found


ONNXRegistry.from_torchlib = staticmethod(_copied)  # pyright: ignore[reportAttributeAccessIssue]
