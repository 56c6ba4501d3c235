"""The table of foreign functions: functions of the vendor's library and of compiled extensions, and the autograd functions that
call these. `compat`, `patch`, `ops` and `replay` read it.

record.py also runs on machines without this package, so it cannot import the table. It has a copy of the shared text instead;
tests/package/test_rooms.py compares the two. A zip application would need no copy, but it would need a build, and nobody could
edit it where it runs.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

# Begin of the text that mx_driving/_foreign_functions.py and mx_driving_portable/record.py share.
_POOL = "bev_pool_v3"
DIFFERENTIABLE = {
    "multi_scale_deformable_attn": ("value", "locations", "weights"),
    "deformable_aggregation": ("value", "locations", "weights"),
    "geometric_kernel_attention": ("value", "weights"),
    _POOL: ("feat", "depth"),
}


class Function(NamedTuple):
    """A function of the vendor's library or of a compiled extension that computes one of the operators.

    module: the last part of its module's name, or all of it; "mx_driving" stands for every module of the vendor's library.
    parameters: our names. The function writes to parameters with "=", and adds to parameters with "+". A function without such
        parameters returns its results.
    layout: the axes of a pool's output, and of its grad_output.
    """

    module: str
    name: str
    operator: str
    parameters: str
    layout: str = "BCDHW"

    @property
    def backward(self) -> bool:
        return "grad_output" in self.parameters

    @property
    def names(self) -> list[str]:
        return [name.rstrip("=+") for name in self.parameters.split()]

    @property
    def outputs(self) -> list[str]:
        """Return the names of the tensors that the function changes, except `memo`, which is no result of an operator."""
        return [name[:-1] for name in self.parameters.split() if name[-1] in "=+"]


_SAMPLES = "value shapes starts locations weights"
_GRADIENTS = f"{_SAMPLES} grad_output grad_value= grad_locations= grad_weights="
_RANKS = "ranks_depth ranks_feat ranks_bev interval_lengths interval_starts"
_SUM = "interval_lengths interval_starts B D H W"
_LIFT = "depth feat ranks_depth ranks_feat ranks_bev bev_feat_shape"
# Grammar: an unindented line is "operator [layout]: parameters"; only pools have a layout. An indented line below it is
# "modules: functions": each of these modules has each of these functions, with these parameters.
#
# Sparse4D before v3, GaussianFormer and Far3D call `deformable_aggregation_ext` with value [bs, cam, num_feat, c]. TrackFormer
# and TransTrack call `MultiScaleDeformableAttention` without starts.
_TABLE = f"""
multi_scale_deformable_attn: {_SAMPLES}
    mx_driving: multi_scale_deformable_attn npu_multi_scale_deformable_attn_function MultiScaleDeformableAttnFunction.apply
multi_scale_deformable_attn: {_SAMPLES} step
    MultiScaleDeformableAttention detrex._C adet._C groundingdino._C mmcv._ext: ms_deform_attn_forward
multi_scale_deformable_attn: {_SAMPLES} grad_output step
    MultiScaleDeformableAttention detrex._C adet._C groundingdino._C: ms_deform_attn_backward
multi_scale_deformable_attn: {_GRADIENTS} step
    mmcv._ext: ms_deform_attn_backward
deformable_aggregation: {_SAMPLES}
    mx_driving: deformable_aggregation npu_deformable_aggregation AdsDeformableAggregation.apply
    deformable_aggregation_ext: deformable_aggregation_forward
deformable_aggregation: {_SAMPLES} grad_output grad_value+ grad_locations+ grad_weights+
    deformable_aggregation_ext: deformable_aggregation_backward
geometric_kernel_attention: {_SAMPLES}
    mx_driving: geometric_kernel_attention npu_geometric_kernel_attention npu_geometric_kernel_attention_func
    mx_driving: GeometricKernelAttentionFunc.apply
geometric_kernel_attention: {_SAMPLES} step
    GeometricKernelAttention: geometric_kernel_attn_cuda_forward
geometric_kernel_attention: {_SAMPLES} grad_output step
    GeometricKernelAttention: geometric_kernel_attn_cuda_backward
bev_pool_v3: {_LIFT}
    mx_driving: bev_pool_v3
bev_pool_v3 BDHWC: {_LIFT}
    mx_driving: BEVPoolV3.apply
bev_pool_v3: {_LIFT} interval_starts interval_lengths
    mx_driving: bev_pool_v2
bev_pool_v3 BDHWC: depth feat output= {_RANKS}
    bev_pool_v2_ext: bev_pool_v2_forward
bev_pool_v3 BDHWC: grad_output grad_depth+ grad_feat+ depth feat {_RANKS}
    bev_pool_v2_ext: bev_pool_v2_backward bev_pool_v2_backward_opt
bev_pool_v3: feat geom_feat B D H W
    mx_driving: bev_pool
bev_pool_v3 BDHWC: feat geom_feat {_SUM}
    bev_pool_ext: bev_pool_forward
bev_pool_v3 BDHWC: grad_output geom_feat {_SUM}
    bev_pool_ext: bev_pool_backward
bev_pool_v3 BDHWC: feat geom_xyzb {_SUM}
    bev_pool_ext: bev_sum_pool_forward
bev_pool_v3 BDHWC: grad_output geom_xyzb {_SUM}
    bev_pool_ext: bev_sum_pool_backward
bev_pool_v3: geom_xyz feat voxel_num
    mx_driving: npu_voxel_pooling_train
bev_pool_v3 BYXC: B n C X Y Z geom_xyz feat output+ memo
    voxel_pooling_train_ext: voxel_pooling_train_forward_wrapper
    voxel_pooling_ext: voxel_pooling_forward_wrapper
bev_pool_v3 BYXC: B cams bins height width C X Y Z geom_xyz depth feat output+
    voxel_pooling_inference_ext: voxel_pooling_inference_forward_wrapper
"""


def _read_table(text: str) -> Iterator[Function]:
    operator = layout = parameters = ""
    for line in text.strip().split("\n"):
        left, right = line.split(": ")
        if not line.startswith(" "):
            operator, _, layout = left.partition(" ")
            parameters = right
            continue
        for module, name in itertools.product(left.split(), right.split()):
            yield Function(module, name, operator, parameters, layout or "BCDHW")


FUNCTIONS = tuple(_read_table(_TABLE))

KEYWORDS: dict[str, str] = {  # the vendor's, mmcv's and transformers' names of parameters -> ours
    **dict.fromkeys(("feature_maps", "mc_ms_feat"), "value"),
    **dict.fromkeys(("value_spatial_shapes", "spatial_shapes", "spatial_shape", "shape"), "shapes"),
    **dict.fromkeys(("value_level_start_index", "level_start_index", "scale_start_index", "offset"), "starts"),
    **dict.fromkeys(("sampling_locations", "sample_locations", "sampling_location"), "locations"),
    **dict.fromkeys(("attention_weights", "weight"), "weights"),
    **{"im2col_step": "step", "grad_sampling_loc": "grad_locations", "grad_attn_weight": "grad_weights"},
    "input_features": "feat",  # in npu_voxel_pooling_train
}


def insert_starts(args: Any) -> list[Any]:
    """Return the arguments of a sampling function, with None for starts if the function has no starts.

    mmcv's plain torch, TrackFormer and TransTrack have none: their levels lie one after the other.
    """
    third: Any = args[2] if len(args) > 2 else None
    has_locations = hasattr(third, "is_floating_point") and third.dim() > 2 and third.is_floating_point()
    return [*args[:2], None, *args[2:]] if has_locations else list(args)


# End of the shared text.


class AutogradFunction(NamedTuple):
    """An autograd function of a repository, which calls one of these functions. `patch` replaces it.

    pattern: a regular expression for the function's name.
    parameters: the function's own names of its parameters, without ctx.
    words: our names of the same parameters.
    """

    pattern: str
    operator: str
    parameters: str
    words: str
    layout: str = "BCDHW"


_MMCV = "value value_spatial_shapes value_level_start_index sampling_locations attention_weights im2col_step"
_SPARSE4D = "mc_ms_feat spatial_shape scale_start_index sampling_location weights"
_ATTENTION, _POOLING = "(?i)(ms|multi_?scale)_?deform", "(?i)cumsum|pool"
_LIFT_BY_INTERVALS, _CELLS = f"{_LIFT} interval_starts interval_lengths", "ranks B D H W"
AUTOGRAD_FUNCTIONS = (
    AutogradFunction(_ATTENTION, "multi_scale_deformable_attn", _MMCV, f"{_SAMPLES} step"),
    AutogradFunction(
        _ATTENTION,
        "multi_scale_deformable_attn",
        _MMCV.replace("value_level_start_index ", ""),
        "value shapes locations weights step",
    ),
    AutogradFunction("(?i)geometric", "geometric_kernel_attention", _MMCV, f"{_SAMPLES} step"),
    AutogradFunction("(?i)deformable_?aggregation", "deformable_aggregation", _SPARSE4D, _SAMPLES),
    AutogradFunction(_POOLING, _POOL, _LIFT_BY_INTERVALS, _LIFT_BY_INTERVALS, "BDHWC"),
    AutogradFunction(_POOLING, _POOL, f"x geom_feats {_CELLS}", f"feat geom_feat {_CELLS}", "BDHWC"),
    AutogradFunction(_POOLING, _POOL, f"feats coords {_CELLS} pooling_method", f"feat geom_xyzb {_CELLS} method", "BDHWC"),
    AutogradFunction(_POOLING, _POOL, "x geom_feats ranks", "feat places ranks"),  # Lift-Splat
    AutogradFunction("(?i)voxels_?sum", _POOL, "x geometry ranks", "feat places ranks"),  # FIERY
    AutogradFunction(_POOLING, _POOL, "geom_xyz input_features voxel_num", "geom_xyz feat voxel_num"),
    AutogradFunction(_POOLING, _POOL, "geom_xyz depth_features context_features voxel_num", "geom_xyz depth feat voxel_num"),
)


def find_autograd_function(name: str, parameters: Sequence[str]) -> AutogradFunction | None:
    """Return the entry for an autograd function of this name whose forward has these parameters, or None."""
    entries = (entry for entry in AUTOGRAD_FUNCTIONS if entry.parameters.split() == list(parameters))
    return next((entry for entry in entries if re.search(entry.pattern, name)), None)
