"""The operators under the vendor's paths. Each public function has the other names of its module as attributes.

`from mx_driving.ops import multi_scale_deformable_attn` gives a function, as in torchvision.ops and mmcv.ops. In the vendor's
library it gives a module, so `mx_driving.ops.multi_scale_deformable_attn.MultiScaleDeformableAttnFunction` must also work. A
module with a `__call__` would not do: torch.compile and type checkers do not accept a module as a function.
"""

import sys

from .bev_pool import bev_pool
from .bev_pool_v2 import bev_pool_v2
from .bev_pool_v3 import bev_pool_v3
from .deformable_aggregation_with_logits import deformable_aggregation_with_logits
from .geometric_kernel_attention import geometric_kernel_attention
from .geometric_kernel_attention_with_logits import geometric_kernel_attention_with_logits
from .multi_scale_deformable_attn import multi_scale_deformable_attn
from .multi_scale_deformable_attn_with_logits import multi_scale_deformable_attn_with_logits
from .npu_deformable_aggregation import deformable_aggregation, npu_deformable_aggregation
from .npu_geometric_kernel_attention import npu_geometric_kernel_attention
from .voxel_pooling_train import npu_voxel_pooling_train

__all__ = [
    "bev_pool",
    "bev_pool_v2",
    "bev_pool_v3",
    "deformable_aggregation",
    "deformable_aggregation_with_logits",
    "geometric_kernel_attention",
    "geometric_kernel_attention_with_logits",
    "multi_scale_deformable_attn",
    "multi_scale_deformable_attn_with_logits",
    "npu_deformable_aggregation",
    "npu_geometric_kernel_attention",
    "npu_voxel_pooling_train",
]

for _name in __all__:
    _module = sys.modules.get(f"{__name__}.{_name}")
    if _module is not None:  # deformable_aggregation has no module of its name
        vars(globals()[_name]).update({_n: getattr(_module, _n) for _n in _module.__all__})
