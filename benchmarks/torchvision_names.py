"""Declare torchvision's operators, so that torchvision can be imported without a compiled part for the installed torch.

The operators have no kernels, so calling them fails. The benchmarked models do not call them before the boxes are computed.
"""

from __future__ import annotations

import importlib

import torch

NAMES = (
    *("nms", "qnms", "roi_align", "_roi_align_backward", "ps_roi_align", "_ps_roi_align_backward", "roi_pool"),
    *("_roi_pool_backward", "ps_roi_pool", "_ps_roi_pool_backward", "qroi_align", "deform_conv2d", "_deform_conv2d_backward"),
)
_declared = []  # keeps the libraries alive: torch removes the operators of a deleted library


def declare() -> None:
    """Import torchvision. Declare its operators if its compiled part is missing."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError:  # "operator torchvision::nms does not exist"
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in NAMES:
            library.define(f"{name}(Tensor x) -> Tensor")
        _declared.append(library)
        importlib.import_module("torchvision")
