"""Lets torchvision be imported beside a torch that its compiled part was not built for: declares the operators it looks for.

The operators have no kernel, and a call of one fails. No model here calls one before its boxes are found.
"""

from __future__ import annotations

import importlib

import torch

NAMES = (
    *("nms", "qnms", "roi_align", "_roi_align_backward", "ps_roi_align", "_ps_roi_align_backward", "roi_pool"),
    *("_roi_pool_backward", "ps_roi_pool", "_ps_roi_pool_backward", "qroi_align", "deform_conv2d", "_deform_conv2d_backward"),
)
_declared = []  # torch forgets a declaration with its object


def declare() -> None:
    """Nothing happens where torchvision has its own operators."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError:  # "operator torchvision::nms does not exist"
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in NAMES:
            library.define(f"{name}(Tensor x) -> Tensor")
        _declared.append(library)
        importlib.import_module("torchvision")
