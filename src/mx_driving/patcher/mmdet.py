"""The vendor's patches of mmdet."""

from ._needless import FASTER, leaves

__all__ = ["pseudo_sampler", "resnet_add_relu", "resnet_fp16", "resnet_maxpool"]

pseudo_sampler = leaves("pseudo_sampler", FASTER, __name__)
resnet_add_relu = leaves("resnet_add_relu", FASTER, __name__)
resnet_maxpool = leaves("resnet_maxpool", FASTER, __name__)
resnet_fp16 = leaves("resnet_fp16", FASTER, __name__)
