"""The table of foreign functions: functions of the vendor's library and of compiled extensions, and the autograd functions that
call these. `compat`, `_foreign`, `_patch` and `_replay` read the table.

The table is in record.py, which also runs on machines without this package.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from mx_driving_portable.record import _LIFT, _POOL, _SAMPLES, DIFFERENTIABLE, FUNCTIONS, KEYWORDS, Function, insert_starts

__all__ = [
    "AUTOGRAD_FUNCTIONS",
    "DIFFERENTIABLE",
    "FUNCTIONS",
    "KEYWORDS",
    "AutogradFunction",
    "Function",
    "find_autograd_function",
    "insert_starts",
]


class AutogradFunction(NamedTuple):
    """An autograd function of a repository. It calls a function of the table. `patch` replaces the autograd function.

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
