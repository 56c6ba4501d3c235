"""Forms of functions over compiled extensions: autograd functions (AUTOGRAD_FUNCTIONS of _foreign_functions.py), and pools,
which sum points into cells, as in BEVDet, BEVFusion and BEVDepth.

A compiled function for CUDA may crash the process if it gets CPU memory. So either the code of an autograd function is known
(known.py), or the trial calls compat's functions in place of the compiled ones. `patch` replaces the autograd function that a
pool calls before it replaces the pool.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .._foreign.stand_ins import differentiable, sum_inside, sum_runs
from .._foreign_functions import AUTOGRAD_FUNCTIONS, AutogradFunction, find_autograd_function
from .._operator.description import POOL
from ..ops.bev_pool_v2 import bev_pool_v2
from ..ops.voxel_pooling_train import npu_voxel_pooling_train
from ._forms import AUTOGRAD, FUNCTION, Form, is_table

_FEATURES = {"depth", "feat", "feats", "x", "input_features"}


@dataclass(frozen=True)
class OverExtension(Form):
    """A function of another library with exactly these parameters, and our function, `run`, that takes the same arguments.

    Attributes:
        example: the name of the example in _examples.py. Without a name, a trial uses the examples of a core.
        pattern: a regular expression that the name of a pool must match.
        dtype: the dtype of a pool's results: "float32", or "promoted", the common dtype of its features.
        foreign: for an autograd function, its entry in the table.
        casts: the dtype to which an autograd function's code converts all inputs, or "value" for the dtype of value.
    """

    parameters: tuple[str, ...]
    run: Callable[..., Any]
    example: str
    pattern: str = ""
    dtype: str = ""
    foreign: AutogradFunction | None = None
    casts: str = ""
    reads_all = True

    @property
    def kind(self) -> str:  # type: ignore[override]
        return AUTOGRAD if self.foreign else FUNCTION

    def fits(self, candidate: Any) -> bool:
        parameters, name = candidate.parameters, candidate.original.__qualname__
        if candidate.kind != self.kind or parameters.all != self.parameters or parameters.variadic:
            return False
        if self.foreign:
            return find_autograd_function(name, parameters.all) is self.foreign
        return re.search(self.pattern, name) is not None

    def answer(self, module: Any, arguments: dict[str, Any]) -> Any:
        if self.foreign and self.foreign.operator != POOL:
            return self.run(*arguments.values())
        words = self.foreign.words.split() if self.foreign else self.parameters
        named = dict(zip(words, arguments.values(), strict=True))
        tensors = {name: t for name, t in named.items() if isinstance(t, Tensor)}
        if not all(t.is_floating_point() if name in _FEATURES else is_table(t) for name, t in tensors.items()):
            return None
        # The operators can only sum, and need coordinates for each row of features.
        if named.get("method", "sum") != "sum" or ("coords" in named and len(named["coords"]) != len(named["feats"])):
            return None
        if not self.dtype:
            return self.run(*arguments.values())
        # BEVDet sums in float32. Plain torch sums depth * features in the common dtype of both, also under autocast.
        features = [t.dtype for name, t in tensors.items() if name in _FEATURES]
        dtype = torch.float32 if self.dtype == "float32" else functools.reduce(torch.promote_types, features)
        if "feat" in named:
            arguments = {**arguments, "feat": named["feat"].to(dtype)}
        return self.run(*arguments.values()).to(dtype)


# The name that a user writes in patch(forms=...) -> the name of the example, in the order of AUTOGRAD_FUNCTIONS.
_AUTOGRAD = {
    **{"attention": "", "attention_without_starts": "", "geometric": "", "aggregation": "aggregation", "lifted": "lifted"},
    **{"sorted_rows": "sorted_rows", "sorted_xyzb": "sorted_xyzb", "lift_splat_function": "runs", "fiery": "runs"},
    **{"frustum": "frustum", "image": "image"},
}
EXTENSIONS = {
    name: OverExtension(tuple(entry.parameters.split()), differentiable(entry), example, foreign=entry)
    for (name, example), entry in zip(_AUTOGRAD.items(), AUTOGRAD_FUNCTIONS, strict=True)
}
_SIZES = ("B", "D", "H", "W")
_BEVDET = EXTENSIONS["lifted"].parameters
_FRUSTUM = ("geom_xyz", "input_features", "voxel_num")
_POOLS = {
    "bevdet": OverExtension(_BEVDET, bev_pool_v2, "lifted", "bev_pool", "float32"),
    "bevdet_plain": OverExtension(_BEVDET, bev_pool_v2, "lifted", "bev_pool", "promoted"),
    "bev_pool": OverExtension(("feats", "coords", *_SIZES), sum_inside, "rows", "bev_pool", "promoted"),
    "cumsum": OverExtension(
        ("feats", "coords", "ranks", *_SIZES), EXTENSIONS["sorted_rows"].run, "sorted_rows", "(?i)cumsum", "promoted"
    ),
    "lift_splat": OverExtension(("x", "geom_feats", "ranks"), sum_runs, "runs", "(?i)cumsum"),
    "voxel_pooling": OverExtension(_FRUSTUM, npu_voxel_pooling_train, "frustum", "voxel_pooling", "promoted"),
}
POOLS = {
    **_POOLS,
    # The same functions without a gradient, as in MapTR.
    **{f"{name}_no_grad": replace(form, run=torch.no_grad()(form.run)) for name, form in _POOLS.items()},
}


def looks_like_a_pool(name: str) -> bool:
    """Return whether the name looks like a pool's: bev_pool, voxel_pooling, QuickCumsum, VoxelsSumming."""
    return re.search("(?i)bev_?pool|voxel_?pool|cumsum|voxels_?sum", name) is not None
