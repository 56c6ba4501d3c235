"""The situation of a call: training or not, gradients recorded or not and of which inputs, autocast, dtypes, the device,
numbers of axes, and which optional inputs are given.

A situation is proven for the sizes between the smallest and the largest that were compared, and for a layer as it was.
"""

from __future__ import annotations

import contextlib
import numbers
import operator
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ._comparison import PLACES

Arguments = Mapping[str, Any]  # by role
_TENSOR = operator.attrgetter("dtype", "requires_grad", "device", "shape")
_is_compiling, _is_inference = torch.compiler.is_compiling, torch.is_inference_mode_enabled
_TABLE = 2  # axes of a table of levels
_MOST_ELEMENTS = 64  # of a tensor
_MAIN = 3  # tensors that most calls have: query, value and reference, or value, locations and weights
_BY_VALUE = (bool, int, float, str, type(None))


def write_look(described: Sequence[str], arguments: Arguments) -> str:
    """Return an expression that reads a call with arguments `g` of certain types. Calls of equal readings have one verdict. It
    is one expression, because it runs in each call."""
    tensors = [role for role, a in arguments.items() if isinstance(a, Tensor)]
    floating = [role for role in tensors if arguments[role].is_floating_point()]
    main = [role for role in tensors if role in described]
    main = main if len(main) == _MAIN else tensors
    flags = "".join(f"g[{role!r}].requires_grad, " for role in floating)
    trained = "*[p.requires_grad for own in parameters for p in own.values() if p is not None]"
    places = [f"g[{role!r}].is_cpu or g[{role!r}].device" for role in tensors[:1]]
    parts = [f"is_grad_enabled() and ({flags}{trained})", *_MODES, *places]
    parts += [*(f"g[{role!r}].shape" for role in main), *(f"g[{role!r}].dtype" for role in floating)]
    for role, a in arguments.items():
        if isinstance(a, (list, tuple)):
            parts.append(_write_reading(f"g[{role!r}]", a))
        elif role not in (*main, *floating):
            is_array = hasattr(type(a), "tobytes")
            parts.append(f"g[{role!r}]" if isinstance(a, _BY_VALUE) else f"type(g[{role!r}])")
            parts += [f"g[{role!r}].tobytes()"] * is_array
    if isinstance(arguments.get("shapes"), Tensor) and arguments.get("sizes") is None:
        parts.append("read_table(g['shapes'])")
    return ", ".join(parts)


def _write_reading(place: str, sequence: Any) -> str:
    """Return an expression of what counts of a list or a tuple."""
    if any(isinstance(leaf, Tensor) for leaf in tree_leaves(sequence)):
        return f"tuple(map(read, list_leaves({place})))"
    for expression in (f"tuple({place})", f"tuple(map(tuple, {place}))"):
        with contextlib.suppress(TypeError):
            hash(eval(expression.replace(place, "sequence")))
            return expression
    return f"str({place})"


def _read_table(table: Tensor) -> Any:
    """Return the sides of levels, where a look at them does not wait for a GPU, and nothing is traced or transformed."""
    if not table.is_cpu or torch._C._get_tracing_state() is not None or torch._C._are_functorch_transforms_active():
        return None
    return tuple(map(tuple, table.tolist())) if table.dim() == _TABLE else str(table.tolist())  # pyright: ignore


def _read_entry(entry: Any) -> Any:
    if isinstance(entry, Tensor):
        return *_TENSOR(entry), *_list_numbers(entry)
    return entry if isinstance(entry, _BY_VALUE) else type(entry)


def can_compare(arguments: Arguments) -> bool:
    """Return whether a call has numbers, and nothing but the caller looks at what is computed."""
    tensors = [t for a in arguments.values() for t in (a if isinstance(a, (list, tuple)) else (a,)) if isinstance(t, Tensor)]
    if any(type(t) not in (Tensor, torch.nn.Parameter) or t.device.type == "meta" for t in tensors):
        return False
    captures = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    modes = torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active()  # pyright: ignore
    is_traced = torch._C._get_tracing_state() is not None
    return not (captures or modes or is_traced or torch.autograd.forward_ad._current_level >= 0)


def describe(layer: Any, arguments: Arguments) -> tuple[Any, ...]:
    """Return the situation of a call. torch.compile reads this function."""
    recorded = torch.is_grad_enabled()
    device = [*(t.device.type for t in arguments.values() if isinstance(t, Tensor)), "cpu"][0]
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    facts = tuple([_describe_argument(role, a, recorded) for role, a in arguments.items()])
    trained = tuple([p.requires_grad for p in layer.parameters()]) if recorded and layer is not None else ()
    return layer is not None and layer.training, recorded, autocast, device, facts, trained


def describe_untraced(layer: Any, arguments: Arguments) -> tuple[Any, ...]:
    """Return the situation of a call that may be traced: torch.jit makes sizes tensors. torch.compile reads this function."""
    if _is_compiling():
        return describe(layer, arguments)
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # pyright: ignore
    try:
        return describe(layer, arguments)
    finally:
        torch._C._set_tracing_state(state)  # pyright: ignore


def _describe_argument(role: str, argument: Any, recorded: bool) -> Any:
    if isinstance(argument, Tensor):
        axis = -1 if role in PLACES else 0 if role == "shapes" else None
        size = argument.shape[axis] if axis is not None and argument.dim() else None
        return role, argument.dtype, recorded and argument.requires_grad, argument.dim(), size
    if isinstance(argument, (list, tuple)):
        return role, len(argument), tuple([_describe_argument("", t, recorded) for t in argument if isinstance(t, Tensor)])
    return role, argument if isinstance(argument, _BY_VALUE) else type(argument).__name__


def list_sizes(arguments: Arguments) -> list[Any]:
    """Return what may grow: the sizes of tensors, the numbers in lists, the sides of levels where a CPU has them, and 1 in
    inference mode."""
    leaves = [leaf for a in arguments.values() for leaf in _list_leaves(a)]
    sizes = [size for leaf in leaves if isinstance(leaf, Tensor) for size in leaf.shape]
    inner = [t for a in arguments.values() if isinstance(a, (list, tuple)) for t in _list_leaves(a)]
    sides = [number for t in (arguments.get("shapes"), *inner) for number in _list_numbers(t)]
    return sizes + sides + [n for n in leaves if isinstance(n, numbers.Number)] + [_is_inference()]


def _list_numbers(t: Any) -> list[int]:
    """Return what a small tensor of whole numbers has, such as sides of levels, where a look at it waits for no GPU."""
    is_small = isinstance(t, Tensor) and t.is_cpu and not t.is_floating_point() and t.dtype != torch.bool
    return t.flatten().tolist() if is_small and t.numel() <= _MOST_ELEMENTS else []


def _list_leaves(argument: Any) -> list[Any]:
    """Return what is in lists, tuples and arrays, such as torch.Size and NumPy's."""
    if hasattr(type(argument), "tolist") and not isinstance(argument, Tensor):
        argument = argument.tolist()
    return [leaf for part in argument for leaf in _list_leaves(part)] if isinstance(argument, (list, tuple)) else [argument]


def is_exporting() -> bool:
    """Return whether the older ONNX exporter traces. It has no node for an operator."""
    onnx = sys.modules.get("torch.onnx")
    return torch._C._get_tracing_state() is not None and onnx is not None and onnx.is_in_onnx_export()


def spell(situation: tuple[Any, ...]) -> str:
    """Return a situation in words."""
    training, recorded, autocast, device, facts, trained = situation
    dtypes = sorted(
        {str(f[1]).removeprefix("torch.") for f in facts if isinstance(f[1], torch.dtype) and f[1].is_floating_point}
    )
    given = [role for role, *fact in facts if fact != [None]]
    under = f" under autocast to {str(autocast).removeprefix('torch.')}" if autocast else ""
    frozen = f" and {trained.count(False)} frozen parameters" if False in trained else ""
    mode = f"{'training' if training else 'evaluation'}, {'with' if recorded else 'without'} gradients{frozen}"
    return f"in {mode}, {' and '.join(dtypes)} on {device}{under}, with {', '.join(given)}"


# what the expression of a look may name
_MODES = ("is_inference()", "is_any_autocast() and (get_autocast_dtype('cpu'), get_autocast_dtype('cuda'))")
READS = {
    "is_any_autocast": getattr(torch._C, "_is_any_autocast_enabled", torch.is_autocast_enabled),
    **{"is_grad_enabled": torch.is_grad_enabled, "is_inference": _is_inference},
    **{"get_autocast_dtype": torch.get_autocast_dtype, "read_table": _read_table},
    **{"read": _read_entry, "list_leaves": _list_leaves},
}
