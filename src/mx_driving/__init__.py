"""The deformable sampling operators of Ascend DrivingSDK, for every machine that has PyTorch.

In this package's comments, Ascend is "the vendor", and DrivingSDK "the vendor's library". Its module is also named mx_driving.
"""

import sys as _sys

__version__ = "0.4.0"  # the native library must have the same version
__distribution__ = "mx-driving-portable"  # _operator looks for this name, which the vendor's __init__.py lacks

# `python -m mx_driving.config` imports this file first. The command prints paths, and must not wait seconds for torch.
if not (_sys.argv[:1] == ["-m"] and "mx_driving.config" in [word.removeprefix("-m") for word in _sys.orig_argv]):
    from . import compat, geometry, kernels, nn, onnx, ops, viz
    from ._backends import backends
    from ._data_checks import DataWarning, data_checks
    from ._foreign.absent import explain_missing as _explain_missing
    from ._patch import Patch, patch, patched
    from ._vendor import compiled as _C
    from ._vendor.limits import atlas_limits
    from .ops.bev_pool import bev_pool
    from .ops.bev_pool_v2 import bev_pool_v2
    from .ops.bev_pool_v3 import bev_pool_v3
    from .ops.deformable_aggregation_with_logits import deformable_aggregation_with_logits
    from .ops.geometric_kernel_attention import geometric_kernel_attention, npu_geometric_kernel_attention
    from .ops.geometric_kernel_attention_with_logits import geometric_kernel_attention_with_logits
    from .ops.multi_scale_deformable_attn import (
        MultiScaleDeformableAttnFunction,
        multi_scale_deformable_attn,
        npu_multi_scale_deformable_attn_function,
    )
    from .ops.multi_scale_deformable_attn_with_logits import multi_scale_deformable_attn_with_logits
    from .ops.npu_deformable_aggregation import deformable_aggregation, npu_deformable_aggregation
    from .ops.voxel_pooling_train import npu_voxel_pooling_train

    # Register our _C. If the vendor's distribution is installed too, this folder has the vendor's compiled _C, and
    # `import mx_driving._C` would find that file.
    _sys.modules[f"{__name__}._C"] = _C
    __getattr__ = _explain_missing(__name__)
    ops.__getattr__ = _explain_missing(ops.__name__)

__all__ = [
    "DataWarning",
    "MultiScaleDeformableAttnFunction",
    "Patch",
    "atlas_limits",
    "backends",
    "bev_pool",
    "bev_pool_v2",
    "bev_pool_v3",
    "compat",
    "data_checks",
    "deformable_aggregation",
    "deformable_aggregation_with_logits",
    "geometric_kernel_attention",
    "geometric_kernel_attention_with_logits",
    "geometry",
    "kernels",
    "multi_scale_deformable_attn",
    "multi_scale_deformable_attn_with_logits",
    "nn",
    "npu_deformable_aggregation",
    "npu_geometric_kernel_attention",
    "npu_multi_scale_deformable_attn_function",
    "npu_voxel_pooling_train",
    "onnx",
    "ops",
    "patch",
    "patched",
    "viz",
]
