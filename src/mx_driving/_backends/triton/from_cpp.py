"""Launch kernels from C++ if MX_DRIVING_GPU_LAUNCH=1: those of the bare attention operators, and the forwards of the attention
operators with logits. This code has never run on a GPU.

Triton compiles the kernels. native/src/torch/gpu.cpp caches them by dtypes, sizes, device and mask, and launches them. If the
kernel of a call is not cached, or C++ cannot serve the call (`is_usual`), C++ calls the Python operator of the same name in
torch.ops.mx_driving_triton. Then `launch.run` hands the kernel over to C++.
"""

from __future__ import annotations

import ctypes
import functools
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..._operator.rules import flag
from .. import native

_ON = flag("MX_DRIVING_GPU_LAUNCH")
_ATTENTION = "multi_scale_deformable_attn", "geometric_kernel_attention"
_KINDS = "", "_autocast", "_with_logits", "_with_logits_autocast", "_backward"
OPERATORS = tuple(operator + kind for operator in _ATTENTION for kind in _KINDS)
# The arguments of a compiled kernel are tensors and then numbers.
_NUMBERS = ["i32", "i32", "i64", "i64", "i64"]  # queries, keys, three strides
_TENSORS = {"_forward": (7,), "_backward": (11, 12)}  # number of tensors; 11 without the gradient of locations
_FUNCTIONS = {
    "libcuda.so.1": ("cuLaunchKernel", "cuCtxGetDevice", "cuMemsetD32Async"),
    "libtorch_cuda.so": ("aoti_torch_get_current_cuda_stream",),
    "libtorch_cpu.so": ("_ZN2at13globalContextEv", "_ZNK2at7Context23deterministicAlgorithmsEv"),
}
keep_kernel: Callable[..., None] | None = None  # if it is set, `launch.run` passes compiled kernels and options to it
_library: Any = None


@functools.cache
def why_not() -> str | None:
    """Turn on the launch of kernels from C++. Return None, or why it stays off."""
    if not _ON:
        return "MX_DRIVING_GPU_LAUNCH is not set"
    if sys.platform != "linux" or torch.version.hip or not torch.version.cuda:
        return "torch is not built for CUDA on Linux"
    if reason := native.why_by_ctypes():
        return reason
    try:
        folder = pathlib.Path(torch.__file__).parent / "lib"
        libraries = {name: ctypes.CDLL(name if name.startswith("libcuda") else str(folder / name)) for name in _FUNCTIONS}
        functions = [getattr(libraries[library], name) for library, names in _FUNCTIONS.items() for name in names]
        return start([address_of(function) for function in functions])
    except (OSError, AttributeError) as error:
        return str(error)


def describe() -> str:
    """Return the end of the sentence of `backends()`: whether C++ launches kernels, or why not."""
    if not _ON:
        return ""
    reason = why_not()
    return f", not launched from C++: {reason}" if reason else ", attention launched from C++, never run on a GPU"


def address_of(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def start(addresses: Sequence[int]) -> str | None:
    """Let C++ serve calls on CUDA from now on. Return None, or why C++ cannot."""
    global keep_kernel
    library = native.loaded()
    library.mxd_launch_on_gpu.restype = ctypes.c_char_p
    problem = library.mxd_launch_on_gpu((ctypes.c_void_p * len(addresses))(*addresses))
    keep_kernel = None if problem else _keep
    return problem and problem.decode()


def stop() -> None:
    """Let Python serve all calls, because Python runs the data checks and the hooks of a profiler."""
    global keep_kernel
    native.loaded().mxd_launch_on_gpu(None)
    keep_kernel = None


def _keep(compiled: Any, options: dict[str, int]) -> None:
    """Hand the kernel of the current call over to C++, if C++ can pass the kernel's arguments."""
    kinds = [kind for kind in compiled.src.signature.values() if kind != "constexpr"]
    tensors, metadata = kinds[: -len(_NUMBERS)], compiled.metadata
    scratch = getattr(metadata, "global_scratch_size", 0) or getattr(metadata, "profile_scratch_size", 0)
    if kinds[-len(_NUMBERS) :] != _NUMBERS or len(tensors) not in _TENSORS.get(metadata.name, ()) or scratch:
        return
    if not all(kind.startswith("*") for kind in tensors) or metadata.num_ctas != 1:
        return
    numbers = (ctypes.c_void_p(compiled.function), metadata.num_warps * 32, metadata.shared)
    native.loaded().mxd_keep_gpu_kernel(*numbers, ctypes.c_int64(options["ROWS"]), ctypes.c_int64(options["LANE"]))


def define(name: str, schema: str, kernel: Callable[..., Any]) -> None:
    """Define the Python fallback that C++ calls when it has no kernel."""
    global _library
    if _library is None:
        _library = torch.library.Library("mx_driving_triton", "DEF")
    _library.define(schema)
    _library.impl(name, kernel, "CompositeExplicitAutograd")
