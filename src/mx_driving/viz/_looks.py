"""Record the inputs of a model's operator calls: `recording()` keeps each call of a sampling operator as a `Look`."""

from __future__ import annotations

import contextlib
import fnmatch
import numbers
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import _torch_private
from .._operator import composition, geometry, rules
from .._operator.description import OPERATORS, SAMPLING
from ._pictures import need_numbers


@dataclass(frozen=True)
class Look:
    """The inputs of one call of a sampling operator, detached from autograd.

    For an operator with logits, these are the inputs of its bare operator, with the computed locations and weights.
    """

    operator: str
    table: Tensor  # value or feature_maps
    shapes: Tensor
    starts: Tensor
    locations: Tensor
    weights: Tensor
    layer: str = ""  # the innermost module that made the call, by its name in the outermost module that runs; "" if unknown
    # A module that samples its cameras in turn makes several looks in one call. The looks share this number. 0: no such module.
    _call: int = field(default=0, init=False, repr=False)

    def samples(self, query: int, camera: int = 0, scene: int = 0) -> tuple[Tensor, Tensor]:
        """Return the samples of a query as `sampling_points` draws them.

        Args:
            query: the query's number.
            camera: the camera of `deformable_aggregation`; 0 for attention, whose batch has an entry for each camera.
            scene: the entry of the batch.

        Returns:
            Locations [num_heads, num_levels, num_points, 2], (x, y), 0..1 is the picture, NaN for samples that read nothing;
            and weights [num_heads, num_levels, num_points]. `deformable_aggregation` has groups for heads, scales for levels.

        Raises:
            TypeError, ValueError: there is no such query, camera or scene, or the look holds no numbers.
        """
        aggregation = OPERATORS[self.operator].kind == "aggregation"
        if camera and not aggregation:
            rules.fail(ValueError, "camera", f"be 0 for {self.operator}, whose cameras are entries of the batch", camera)
        (scenes, queries), cameras = self.weights.shape[:2], self.weights.shape[3] if aggregation else 1
        for name, index, count in (("query", query, queries), ("scene", scene, scenes), ("camera", camera, cameras)):
            if not isinstance(index, numbers.Integral) or isinstance(index, bool):
                rules.fail(TypeError, name, "be a whole number", repr(index))
            if not 0 <= index < count:
                rules.fail(
                    ValueError, name, f"be a number from 0 to {count - 1}" if count else "be in a look with queries", index
                )
        locations, weights = to_one_layout(self, scene, camera)
        return locations[query].expand(*weights.shape[1:], 2), weights[query]

    def __repr__(self) -> str:
        tensors = {name: t for name, t in vars(self).items() if isinstance(t, Tensor)}
        inputs = [f"{name} {list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, t in tensors.items()]
        layer = f" of {self.layer}" * bool(self.layer)
        return f"Look({self.operator}{layer}: {', '.join(inputs)}, on {self.table.device})"


def to_one_layout(look: Look, entry: int, camera: int) -> tuple[Tensor, Tensor]:
    """Return locations and weights of all queries in one camera, in one layout for all operators: see `Samples`."""
    need_numbers(("looks", look.locations), ("looks", look.weights))
    if OPERATORS[look.operator].kind == "aggregation":
        locations = look.locations[entry, :, :, camera].cpu().float()
        within = geometry.inside(locations)[..., None]
        weights = look.weights[entry, :, :, camera].permute(0, 3, 2, 1)
        return locations.where(within, torch.nan)[:, None, None], weights.cpu().float()
    locations, weights = look.locations[entry].cpu().float(), look.weights[entry].cpu().float()
    sizes = look.shapes.cpu().flip(-1).float()[:, None]  # (W, H) of each level
    if OPERATORS[look.operator].rows == 1:  # the operator reads whole pixels: it truncates and clamps locations
        return ((locations.nan_to_num(0.0).trunc().clamp_min(0).minimum(sizes - 1)) + 0.5) / sizes, weights
    shown = geometry.on_map(geometry.pixels(locations, sizes), sizes)
    return locations.where(shown[..., None], torch.nan), weights


class Looks(list[Look]):
    """The looks of a recording, in the order of the calls."""

    def of(self, layer: str) -> Looks:
        """Return the looks of the layers with this name, and of the layers inside them.

        Args:
            layer: one or more parts of a layer's name, such as "encoder", "spatial" or "layers.0" of
                "encoder.layers.0.spatial". `*` stands for any text: "decoder.layers.*.cross_attn".

        Raises:
            ValueError: no such layer made a recorded call. The message lists the layers that made calls.
        """
        looks = Looks(look for look in self if fnmatch.fnmatchcase(f".{look.layer}.", f"*.{layer}.*"))
        if not looks:
            layers = ", ".join(dict.fromkeys(look.layer for look in self if look.layer)) or "no layer with a name"
            rules.fail(ValueError, "layer", f"be part of a name of the recorded layers ({layers})", repr(layer))
        return looks


_CODE_OF_A_CALL = _torch_private.CALL_OF_A_LAYER


class _KeepLooks(_torch_private.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.looks = Looks()
        self.calls, self.last_call = 0, None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, _, name = func.name().partition("::")
        name = name.removesuffix("_autocast")
        if namespace == "mx_driving" and name in SAMPLING:
            inputs, bare = [a.detach() if isinstance(a, Tensor) else a for a in args], OPERATORS[name].bare
            tensors = composition.bare_inputs(name, *inputs) if bare else inputs
            # Name the layer: the innermost running module, by its name in the outermost running module; "" outside of modules.
            # Read the modules from the stack. Hooks on all modules would turn off fast paths, such as that of
            # TransformerEncoderLayer. Tell the calls of a module that samples its cameras in turn by the dict of its keyword
            # arguments: torch makes a new dict for every call.
            running, call, frame = [], None, sys._getframe()
            while frame := frame.f_back:
                if frame.f_code is _CODE_OF_A_CALL:
                    running.append(frame.f_locals["self"])
                    if getattr(running[-1], "_samples_cameras_in_turn", False):
                        call = frame.f_locals["kwargs"]
            names = {id(module): name for name, module in running[-1].named_modules()} if running else {}
            layer = next((names[id(module)] for module in running if id(module) in names), "")
            self.looks.append(Look(bare or name, *tensors, layer=layer))
            if call is not None:
                self.calls, self.last_call = self.calls + (call is not self.last_call), call
                object.__setattr__(self.looks[-1], "_call", self.calls)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def recording() -> Iterator[Looks]:
    """Record every call of a sampling operator inside the `with` block, in order: calls by modules, patched models or any code.

    A look has the name of the layer that made the call; `looks.of("spatial")` selects looks by such names. `bev_pool_v3` and
    its other names sample nothing: their calls are not recorded. Functions of torch.compile run eagerly inside the block.

    >>> import torch, mx_driving
    >>> attention = mx_driving.nn.MultiScaleDeformableAttention(16, num_levels=1)
    >>> levels = mx_driving.nn.flatten_levels([torch.rand(1, 16, 4, 4)])
    >>> with recording() as looks:
    ...     out = attention(torch.rand(1, 3, 16), torch.rand(1, 3, 1, 2), *levels)
    >>> [(look.operator, tuple(look.locations.shape)) for look in looks]
    [('multi_scale_deformable_attn', (1, 3, 8, 1, 4, 2))]
    """
    # Turn torch.compile off. Under a dispatch mode, torch.compile would skip or split functions, even after the block.
    eager: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if not torch.compiler.is_dynamo_compiling():
        with contextlib.suppress(RuntimeError):  # the block is inside a compiled function
            eager = torch.compiler.set_stance("force_eager")
    with eager, _KeepLooks() as mode:
        yield mode.looks
