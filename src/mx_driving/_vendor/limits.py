"""The limits that the vendor documents for its operators on Atlas A2, as data by release. Enforced only on request."""

from __future__ import annotations

import contextlib
import math
import operator
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _torch_private
from .._operator import checks, composition, rules
from .._operator.description import AGGREGATION, GEOMETRIC, MULTI_SCALE, OPERATORS, POOL
from ..ops._arguments import CALL_CHECKS

RELEASES = ("7.1", "7.2", "7.3", "26.0", "26.2")  # of Ascend DrivingSDK, oldest first
NEWEST = RELEASES[-1]
_VARIABLE = "MX_DRIVING_ATLAS_LIMITS"

Sizes = dict[str, dict[str, Any]]  # argument -> quantity -> value
_RELATIONS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    "<": operator.lt,
    ">=": operator.ge,
    "==": operator.eq,
    "a multiple of": lambda number, factor: number % factor == 0,
}


class Limit(NamedTuple):
    """One documented limit: `argument` must have `quantity` `relation` `bound`.

    `bound` is a value, or the name of another quantity of the argument. A limit with `when` holds only in that case: in all
    other cases `attention_sizes` sets the quantity to 0. `document` is a path in the vendor's repository, Ascend/DrivingSDK.
    """

    operator: str
    argument: str
    quantity: str
    relation: str
    bound: Any
    document: str
    first: str = RELEASES[0]
    last: str = NEWEST
    when: str = ""


# Paths of the vendor's documents: before release 26.0, and from 26.0 on.
_OLD, _NEW = ("docs/api/context/{}.md".format, "docs/zh/api/context/{}.md".format)
_PADDED = "num_heads * num_levels * num_points (rounded up to 8)"
_FULL = " when num_points * num_levels is 64 and embed_dims 64"
LIMITS = (
    Limit(MULTI_SCALE, "sampling_locations", "num_points * num_levels", "<=", 64, _OLD(MULTI_SCALE)),
    Limit(MULTI_SCALE, "value", "num_heads", "<=", 8, _OLD(MULTI_SCALE)),
    Limit(MULTI_SCALE, "value", "embed_dims", "a multiple of", 8, _OLD(MULTI_SCALE)),
    Limit(MULTI_SCALE, "value", "embed_dims", "<=", 64, _OLD(MULTI_SCALE), last="7.3"),
    Limit(MULTI_SCALE, "value", "num_heads", "<=", 7, _OLD(MULTI_SCALE), last="7.1", when=_FULL),
    Limit(MULTI_SCALE, "value", "embed_dims", "<=", 256, _NEW(MULTI_SCALE), first="26.0"),
    Limit(AGGREGATION, "feature_maps", "bs", "<=", 128, _OLD(AGGREGATION)),
    Limit(AGGREGATION, "feature_maps", "c", "<=", 256, _OLD(AGGREGATION)),
    Limit(AGGREGATION, "weight", "cam", "<=", 6, _OLD(AGGREGATION)),
    Limit(AGGREGATION, "weight", "scale", "<=", 4, _OLD(AGGREGATION)),
    Limit(AGGREGATION, "weight", "anchor", "<=", 2048, _OLD(AGGREGATION)),
    Limit(AGGREGATION, "weight", "pts", "<=", 2048, _OLD(AGGREGATION)),
    Limit(AGGREGATION, "weight", "group", "==", 8, _OLD(AGGREGATION)),
    Limit(AGGREGATION, "feature_maps", "c / group", "a multiple of", 8, _OLD(AGGREGATION)),
    Limit(AGGREGATION, "feature_maps", "num_elements", "<=", 150_000_000, _OLD(AGGREGATION)),
    Limit(AGGREGATION, "sample_locations", "num_elements", "<=", 150_000_000, _OLD(AGGREGATION)),
    Limit(AGGREGATION, "weight", "num_elements", "<=", 150_000_000, _OLD(AGGREGATION)),
    Limit(AGGREGATION, "feature_maps", "num_feat", "==", "sum of H * W", _OLD(AGGREGATION)),
    Limit(AGGREGATION, "sample_locations", "the smallest value", ">=", 0, _OLD(AGGREGATION)),
    Limit(AGGREGATION, "sample_locations", "the largest value", "<=", 1, _OLD(AGGREGATION)),
    Limit(GEOMETRIC, "value", "embed_dims", "a multiple of", 8, _OLD(GEOMETRIC)),
    Limit(GEOMETRIC, "sampling_locations", f"{_PADDED} * embed_dims", "<", 16384, _OLD(GEOMETRIC)),
    Limit(GEOMETRIC, "sampling_locations", _PADDED, "<", 256, _OLD(GEOMETRIC)),
    Limit(POOL, "feat", "dtype", "==", "float32", _OLD(POOL)),
    Limit(POOL, "depth", "dtype", "==", "float32", _OLD(POOL)),
    Limit(POOL, "feat", "C", "a multiple of", 8, _OLD(POOL)),
    Limit(POOL, "feat", "C", "<=", 360, _NEW(POOL), first="26.2"),
    Limit(POOL, "bev_feat_shape", "B * D * H * W * C", "<=", 2**31, _OLD(POOL)),
)


_RULE = f"{', '.join(RELEASES[:-1])} or {NEWEST}"


# The release that the environment names, then the releases of all open atlas_limits() of all threads.
open_releases: list[str] = []


def atlas_limits(release: str = NEWEST) -> contextlib.AbstractContextManager[None]:
    """Enforce the limits that the vendor documents for Atlas A2. Inside the block, a call beyond a limit raises ValueError.

    The vendor has no operators with logits: with its library, models compute locations and weights and call the bare operator.
    So a call of an operator with logits must keep the limits of its bare operator, and the error names the bare operator's
    inputs. This check computes all locations.

    Two limits of `deformable_aggregation` concern numbers, not shapes: the range of locations, and the sum of the maps' sizes.
    These two are checked where the numbers can be read: not in torch.compile or torch.export, and not for meta tensors.

    The limits hold in all threads of the process. If a generator opens the block, they also hold while the generator is
    suspended.
    `MX_DRIVING_ATLAS_LIMITS` in the environment enforces limits in a whole program: `1` (true, yes, on) those of the newest
    release, or the name of a release. Any other word raises ValueError when the package is imported.

    Args:
        release: a release of the vendor's library: "7.1", "7.2", "7.3", "26.0" or "26.2", the newest.

    Raises:
        ValueError: `release` is not in this list.
    """
    if release not in RELEASES:
        rules.fail(ValueError, "release", f"be {_RULE}", repr(release))
    return _hold_to(release)


@contextlib.contextmanager
def _hold_to(release: str) -> Iterator[None]:
    open_releases.append(release)
    CALL_CHECKS.append(hold)
    try:
        yield
    finally:
        CALL_CHECKS.remove(hold)
        open_releases.remove(release)


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Suspend all limits inside the block, also those of the environment."""
    before, open_releases[:], CALL_CHECKS[:] = (open_releases[:], CALL_CHECKS[:]), [], []
    try:
        yield
    finally:
        open_releases[:], CALL_CHECKS[:] = before


def current() -> str:
    """Return the release of the last opened atlas_limits(), else the environment's, else the newest release."""
    return open_releases[-1] if open_releases else NEWEST


def hold(name: str, *args: Any) -> None:
    """Raise ValueError if a call breaks a limit of an open release."""
    bare = OPERATORS[name].bare or name
    with torch.no_grad():
        inputs = composition.bare_inputs(name, *args) if bare != name else args
        sizes = _find_sizes(bare, *inputs)
        if bare == AGGREGATION and inputs[3].numel() and not torch.compiler.is_compiling():
            locations = _torch_private.without_transforms(inputs[3])  # has all entries of a vmapped axis
            if checks.has_numbers(locations):
                with _torch_private.outside_transforms():
                    smallest, largest = (round(number, 4) for number in torch.stack(locations.aminmax()).tolist())
                sizes["sample_locations"].update({"the smallest value": smallest, "the largest value": largest})
        for release in dict.fromkeys(open_releases):
            for broken in _broken(bare, sizes, release):
                rules.fail(ValueError, *broken)


def _broken(name: str, sizes: Sizes, release: str) -> Iterator[tuple[str, str, Any]]:
    """Yield (argument, rule, fact) for each limit of the release that the sizes break."""
    for limit in LIMITS:
        in_force = RELEASES.index(limit.first) <= RELEASES.index(release) <= RELEASES.index(limit.last)
        if limit.operator == name and in_force:
            quantities = sizes[limit.argument]
            value = quantities.get(limit.quantity + limit.when)
            bound = quantities.get(limit.bound, limit.bound)
            if value is not None and not _RELATIONS[limit.relation](value, bound):
                shown = f"{limit.bound} ({bound})" if limit.bound in quantities else limit.bound
                rule = f"have {limit.quantity} {limit.relation} {shown}{limit.when} (Atlas A2 limit of {release})"
                yield limit.argument, rule, value


def first_broken(name: str, sizes: Sizes) -> str:
    """Return a sentence about the first limit that the sizes break in the `current` release; "" if they keep all limits."""
    return next((f"{argument} must {rule}; got {fact}" for argument, rule, fact in _broken(name, sizes, current())), "")


def attention_sizes(heads: int, channels: int, samples: int) -> Sizes:
    """Return the quantities of multi_scale_deformable_attn that have limits. `samples` is num_levels * num_points."""
    full = samples == 64 and -(-channels // 8) == 8
    value = {"num_heads": heads, "embed_dims": channels, "num_heads" + _FULL: heads if full else 0}
    return {"value": value, "sampling_locations": {"num_points * num_levels": samples}}


def _find_sizes(operator: str, value: Tensor, *inputs: Any) -> Sizes:
    """Return the quantities that have limits, for a call of a bare operator."""
    if operator == POOL:
        depth, channels = inputs[0], value.shape[1]
        dtypes = {name: {"dtype": str(t.dtype).removeprefix("torch.")} for name, t in (("feat", value), ("depth", depth))}
        elements = {"B * D * H * W * C": math.prod(inputs[4:]) * channels}
        return {"feat": {**dtypes["feat"], "C": channels}, "depth": dtypes["depth"], "bev_feat_shape": elements}

    shapes, _, locations, weight = inputs
    if operator == MULTI_SCALE:
        return attention_sizes(value.shape[2], value.shape[3], locations.shape[3] * locations.shape[4])

    if operator == GEOMETRIC:
        channels, padded = value.shape[3], value.shape[2] * locations.shape[3] * (-(-locations.shape[4] // 8) * 8)
        samples = {_PADDED: padded, f"{_PADDED} * embed_dims": padded * channels}
        return {"value": {"embed_dims": channels}, "sampling_locations": samples}

    bs, num_feat, channels = value.shape
    weight_sizes = dict(zip(("anchor", "pts", "cam", "scale", "group"), weight.shape[1:], strict=True))
    maps = {"bs": bs, "c": channels, "c / group": channels // weight.shape[-1]}
    if not torch.compiler.is_compiling() and checks.has_numbers(shapes := _torch_private.without_gradients(shapes)):
        with _torch_private.outside_transforms():
            maps |= {"num_feat": num_feat, "sum of H * W": int(shapes.long().prod(-1).sum())}
    return {
        "feature_maps": {**maps, "num_elements": value.numel()},
        "weight": {**weight_sizes, "num_elements": weight.numel()},
        "sample_locations": {"num_elements": locations.numel()},
    }


_word = os.environ.get(_VARIABLE, "").lower()
if _word not in (*rules.ON, *rules.OFF, *RELEASES):
    _rule = f"be 1, true, yes or on; 0, false, no, off or empty; or a release: {_RULE}"
    rules.fail_setting(_VARIABLE, _rule, os.environ[_VARIABLE])
if _word not in rules.OFF:
    open_releases.append(NEWEST if _word in rules.ON else _word)
    CALL_CHECKS.append(hold)
