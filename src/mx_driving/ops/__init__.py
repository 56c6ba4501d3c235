"""The operators at the vendor's places: each name here is a function, and has the other names of its module as attributes.

`from mx_driving.ops import multi_scale_deformable_attn` brings what can be called, as torchvision's and mmcv's ops do, and
`mx_driving.ops.multi_scale_deformable_attn.MultiScaleDeformableAttnFunction` is found as at the vendor's, where the first is
a module. A module with a `__call__` would be neither what torch.compile nor what type checkers take for a function.
"""

import sys

from .geometric_kernel_attention import geometric_kernel_attention
from .multi_scale_deformable_attn import multi_scale_deformable_attn
from .npu_deformable_aggregation import deformable_aggregation, npu_deformable_aggregation
from .npu_geometric_kernel_attention import npu_geometric_kernel_attention

__all__ = [
    "deformable_aggregation",
    "geometric_kernel_attention",
    "multi_scale_deformable_attn",
    "npu_deformable_aggregation",
    "npu_geometric_kernel_attention",
]

for _name in __all__:
    _module = sys.modules.get(f"{__name__}.{_name}")
    if _module is not None:  # deformable_aggregation has no module of its name
        vars(globals()[_name]).update({_n: getattr(_module, _n) for _n in _module.__all__})
