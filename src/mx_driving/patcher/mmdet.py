"""The vendor's import path for patches of mmdet."""

from ._patcher import pseudo_sampler, resnet_add_relu, resnet_fp16, resnet_maxpool

__all__ = ["pseudo_sampler", "resnet_add_relu", "resnet_fp16", "resnet_maxpool"]
