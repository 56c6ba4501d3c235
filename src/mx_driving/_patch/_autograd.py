"""Replace an autograd function by the operator, computed in the dtypes of the function's own code.

Its extension cannot be tried, so its code gives the dtypes: the `cast_inputs` of torch.amp.custom_fwd around its forward, and
the casts that forward itself calls. A class gets an `apply` that calls the operator. It also gets a forward and a backward,
because torch.compile reads those two and ignores `apply`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _dispatch
from ._forms import Form

# a name in forward's code -> the dtype it casts the inputs to; type_as casts to value's
_DTYPES = {
    "float": torch.float32,
    "float32": torch.float32,
    "double": torch.float64,
    "float64": torch.float64,
    "half": torch.float16,
    "float16": torch.float16,
}


def _cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t.to(dtype) if t.is_floating_point() else t


def _casts_of(forward: Any) -> Callable[..., tuple[Tensor, ...]]:
    """Return the casts of a function's five tensors, read from the decorators and the code of a class's forward, in that order.

    They are a function, not an object that can be called: torch.compile takes such an object only from torch 2.13 on.
    """
    device_type, under_autocast = "cpu", None
    while hasattr(forward, "__wrapped__"):
        cells = dict(zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True))
        if {"device_type", "cast_inputs"} <= set(cells):
            device_type, under_autocast = cells["device_type"].cell_contents, cells["cast_inputs"].cell_contents
        forward = forward.__wrapped__
    names = forward.__code__.co_names
    always = next((_DTYPES[n] for n in names if n in _DTYPES), None)
    to_value = "type_as" in names

    def casts(*inputs: Tensor) -> tuple[Tensor, ...]:
        if under_autocast is not None and torch.is_autocast_enabled(device_type):
            kept = (torch.float64,)  # custom_fwd casts neither these nor tensors on another device
            inputs = tuple(i if i.dtype in kept or i.device.type != device_type else _cast(i, under_autocast) for i in inputs)
        dtype = inputs[0].dtype if to_value else always
        return inputs if dtype is None else tuple(_cast(i, dtype) for i in inputs)

    return casts


def methods(form: Form, core: Any) -> dict[str, staticmethod]:
    """Return the class's new methods, by name."""
    casts, kernel = _casts_of(core.forward), _dispatch.functions.as_compiled(form.replacement)

    def apply(value: Any, shapes: Any, starts: Any, locations: Any, weights: Any, im2col_step: Any = None) -> Tensor:
        return kernel(*form.inputs(*casts(value, shapes, starts, locations, weights)))

    @functools.wraps(core.forward)
    def forward(
        ctx: Any, value: Any, shapes: Any, starts: Any, locations: Any, weights: Any, im2col_step: Any = None
    ) -> Tensor:
        inputs = casts(value, shapes, starts, locations, weights)
        ctx.shapes = [i.shape for i in inputs]
        return _dispatch.functions.forward(ctx, kernel, *form.inputs(*inputs))

    @functools.wraps(core.backward)
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _dispatch.functions.backward(ctx, form.replacement.__name__, grad_output)
        own = [g if g is None else g.view(shape) for g, shape in zip(gradients, ctx.shapes, strict=False)]
        return (*own, *gradients[len(own) :])

    return {"apply": staticmethod(apply), "forward": staticmethod(forward), "backward": staticmethod(backward)}
