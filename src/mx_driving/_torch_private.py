"""Private names of torch, each with the reason for its use. tests/dispatch/test_private_names.py tries them.

No other file of this package uses a private name of torch, except mx_driving_portable/record.py, which people copy alone.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, _decomp, nn
from torch._functorch.utils import enable_single_level_autograd_function as allow_function_of_one_level
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction as FunctionOfOneLevel
from torch.jit import _builtins
from torch.nn.modules import module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

__all__ = ["FakeTensor", "FunctionOfOneLevel", "TorchDispatchMode", "allow_function_of_one_level", "tree_flatten"]

# ---- tracing, dispatch modes and transforms

_functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
# Under torch.jit.trace sizes are tensors, and each number that is read from a tensor becomes a constant of the graph.
is_tracing = torch.jit.is_tracing  # pyright: ignore[reportPrivateImportUsage]
# FakeTensorMode and other modes see every operation, so we do not read the numbers of tensors under a mode.
count_dispatch_modes = torch._C._len_torch_dispatch_stack
# Inside torch.vmap and torch.func, torch calls our kernels once for each level.
are_transforms_active = torch._C._are_functorch_transforms_active
# A context without the transforms. Inside torch.func.grad and jvp, torch 2.6 cannot read the numbers of any tensor.
outside_transforms = torch._C._DisableFuncTorch  # pyright: ignore[reportAttributeAccessIssue]
# Whether torch.vmap or torch.func has wrapped a tensor. A wrapped tensor also has the type Tensor.
is_transformed = _functorch.is_functorch_wrapped_tensor


def is_traced_by_make_fx() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def has_no_memory(t: Tensor) -> bool:
    """Return whether t has no numbers to read, although its type is Tensor: a zero tensor, or a tensor of functionalization."""
    return t._is_zerotensor() or torch._is_functional_tensor(t)  # pyright: ignore[reportPrivateImportUsage]


def without_gradients(t: Tensor) -> Tensor:
    """Return the tensor that torch.func.grad or jvp has wrapped, or t itself."""
    while _functorch.is_gradtrackingtensor(t):
        t = _functorch.get_unwrapped(t)
    return t


def without_transforms(t: Tensor) -> Tensor:
    """Return the tensor inside all wrappers of torch.vmap and torch.func, including the axes that vmap maps over."""
    while is_transformed(t):
        t = _functorch.get_unwrapped(t)
    return t


def is_batched(t: Tensor) -> bool:
    """Return whether vmap maps over an axis of t, also inside other transforms."""
    return not torch.compiler.is_compiling() and _functorch.is_batchedtensor(without_gradients(t))


# ---- kernels of the Autograd key, which serve reverse mode, forward mode and torch.func

DispatchKey = torch._C.DispatchKey
# The keys that a redispatch from our Autograd kernel may choose from.
BELOW_AUTOGRAD = torch._C._after_autograd_keyset
# A context that excludes the Autograd keys, so that autograd does not record the torch operations of a Python kernel.
below_autograd = torch._C._AutoDispatchBelowAutograd
# Compiled autograd asks an autograd function for this key. Older torch lacks it.
compiled_autograd_key = getattr(torch.autograd.Function, "_compiled_autograd_key", None)
# Autograd turns forward mode off inside the forward of an autograd function. Outer levels of torch.func still need it.
enable_forward_mode = forward_ad._set_fwd_grad_enabled


def find_forward_class(ctx: Any) -> Any:
    """Return the autograd function whose apply made this context, or None for another object."""
    return getattr(type(ctx), "_forward_cls", None)


def is_forward_mode_active() -> bool:
    return forward_ad._current_level >= 0


# ---- exporters and compilers

# assert_in_graph(condition, sentence) raises the sentence when the graph runs, if the condition is 0. torch._assert would read
# the condition during tracing.
assert_in_graph = torch.ops.aten._assert_async.msg


def register_decomposition(op: Any, decomposition: Any, fake: Any) -> None:
    """Register a decomposition. torch.onnx.export reads it; compilers do not."""
    _decomp.decomposition_table[op] = decomposition
    # A fake tensor of dynamic shape would go through the decomposition if the operator had no meta entry of its own.
    _decomp.meta_table[op] = fake


def keep_whole_in_inductor(op: Any) -> None:
    """Let inductor call the operator as it is, if inductor is imported. If CI is set in the environment, inductor refuses an
    operator that has a decomposition, unless FALLBACK_ALLOW_LIST holds its name."""
    lowering = sys.modules.get("torch._inductor.lowering")
    if hasattr(lowering, "FALLBACK_ALLOW_LIST"):  # missing while another thread executes the module
        lowering.FALLBACK_ALLOW_LIST.add(op.name())  # pyright: ignore[reportOptionalMemberAccess]


def skip_in_compile(function: Any) -> None:
    """Let torch.compile call the function as it is. torch.compiler.disable does the same, but imports the compiler."""
    function._torchdynamo_disable = True


def mark_as_constant(function: Any) -> None:
    """Let torch.compile call the function while it compiles, and take its result as a constant.
    torch.compiler.assume_constant_result does the same, but imports the compiler."""
    function._dynamo_marked_constant = True


# ---- the functions of torch as they were when mx_driving was imported: `patch` skips code that calls a replacement

ORIGINALS: dict[Any, dict[str, Any]] = {space: dict(vars(space)) for space in (torch, nn.functional)}
# Include the methods that Tensor inherits, because a library that restores a method sets it on Tensor itself.
ORIGINALS[torch.Tensor] = {name: getattr(torch.Tensor, name, None) for name in dir(torch.Tensor) if name[:2] != "__"}

# ---- modules: F.linear replaces calls of layers without hooks

GLOBAL_HOOKS = (
    module._global_forward_pre_hooks,
    module._global_forward_hooks,
    module._global_backward_pre_hooks,
    module._global_backward_hooks,
)


def has_hooks(layer: nn.Module) -> bool:
    own = layer._forward_pre_hooks or layer._forward_hooks or layer._backward_pre_hooks or layer._backward_hooks
    return bool(own) or any(GLOBAL_HOOKS)


# The code of the frame in which torch calls a layer. It is the same for all layers.
CALL_OF_A_LAYER = nn.Module._call_impl.__code__


def is_compiled_in_place(layer: nn.Module) -> bool:
    """Return whether layer.compile() was called."""
    return layer._compiled_call_impl is not None


# ---- DTensor


def local_tensor(t: Any) -> Tensor:
    """Return the shard of a DTensor. to_local() would record an operation."""
    return t._local_tensor


def cache_shardings_by_mask(op: Any, first: int) -> None:
    """Let DTensor's cache of a backward's shardings also compare options and mask: the arguments from `first` on. The mask
    matters, because a gradient that is not needed is empty, and has another sharding."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[op] = RuntimeSchemaInfo(first, needs_pytree=True)


# ---- the stand-in for torch_npu

# torch.jit.script finds its builtins by identity, so it has to know the functions that replace them.
find_scripted, register_scripted = _builtins._find_builtin, _builtins._register_builtin
scripted_builtins = _builtins._get_builtin_table
# torch.load asks these functions in order for the device of a storage. A public function adds to the list, but none removes.
STORAGE_PLACES: list[Any] = torch.serialization._package_registry


def device_constructors() -> Any:
    """Return torch's functions that take a device and make a tensor."""
    from torch.utils._device import _device_constructors

    return _device_constructors()
