"""The vendor's other operators: programs can import their names, but a call raises NotImplementedError."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from .._operator.description import OPERATORS

# The public functions and classes of Ascend DrivingSDK that this package lacks, with their older names, as of April 2026.
_NAMES = """
assign_score_withk border_align box_iou_quadri box_iou_rotated boxes_iou_bev boxes_overlap_bev npu_boxes_overlap_bev
cal_anchors_heading cartesian_to_frenet cylinder_query deform_conv2d diff_iou_rotated_2d dynamic_scatter npu_dynamic_scatter
furthest_point_sample_with_dist furthest_point_sampling npu_furthest_point_sampling graph_softmax grid_sampler2d_v2
grid_sampler3d_v1 group_points npu_group_points hypot knn modulated_deform_conv2d nms3d npu_nms3d nms3d_normal
npu_nms3d_normal nms3d_on_sight npu_nms3d_on_sight npu_add_relu npu_assign_target_of_single_head npu_batch_matmul
npu_draw_gaussian_to_heatmap npu_fake_tensor_quant npu_fake_tensor_quant_inplace npu_fake_tensor_quant_with_axis
npu_fused_bias_leaky_relu npu_gaussian npu_index_select npu_max_pool2d npu_points_in_box points_in_box npu_points_in_box_all
points_in_boxes_all npu_rotated_iou npu_rotated_overlaps npu_unique pixel_group radius roi_align_rotated roiaware_pool3d
roipoint_pool3d scatter_add scatter_max npu_scatter_max scatter_mean sigmoid_focal_loss three_interpolate three_nn
unique_voxel voxelization DeformConv2dFunction ModulatedDeformConv2dFunction RoIPointPool3d SparseConv3d SparseConvTensor
SparseConvolution SparseInverseConv3d SparseModule SparseSequential SubMConv3d Voxelization
"""
OTHERS = frozenset(_NAMES.split())
_HERE = f"the operators here are {', '.join(OPERATORS)}, bev_pool, bev_pool_v2 and npu_voxel_pooling_train"


@functools.cache
def _make_absent(module: str, name: str) -> Any:
    """Return a function that raises NotImplementedError; for a name with a capital, a class whose `__init__` raises it."""

    def call(*args: Any, **named: Any) -> None:
        raise NotImplementedError(f"{module}.{name} is an operator of the vendor's alone; {_HERE}")

    if name[0].isupper():
        return type(name, (), {"__module__": module, "__init__": call, "apply": staticmethod(call)})
    call.__module__, call.__name__, call.__qualname__ = module, name, name
    return call


def explain_missing(module: str) -> Callable[[str], Any]:
    """Return a module's `__getattr__`. For a name that neither library has, perhaps a typo, the error lists our operators."""

    def __getattr__(name: str) -> Any:
        if name in OTHERS:
            return _make_absent(module, name)
        sentence = f"module {module!r} has no attribute {name!r}"
        sentence = sentence if name.startswith("_") else f"{sentence}; {_HERE}"
        raise AttributeError(sentence, name=name, obj=sys.modules.get(module))

    return __getattr__
