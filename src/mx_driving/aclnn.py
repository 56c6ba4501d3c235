"""CANN's two-phase interface over torch tensors on the CPU: the same library, and the same checks, that C programs use.

    status, size, executor = multi_scale_deformable_attention_grad_get_workspace_size(value, ..., grad_attn_weight)
    workspace = torch.empty(size, dtype=torch.uint8)
    status = multi_scale_deformable_attention_grad(workspace, size, executor, stream)
    status = synchronize(stream)

Phase one checks and returns a status; it does not raise where CANN returns a status. `recent_error()` is the sentence that
belongs to the status. Phase two runs the call and returns. Phase one reads no data, so only phase two finds a level that does
not fit in num_keys: the stream remembers a status, and `synchronize` returns it. The header
native/include/aclnnop/aclnn_multi_scale_deformable_attention_grad.h is the reference. Its names are in camelCase, as are the
names in the sentences of errors.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import os
import re
import weakref
from ctypes import POINTER, c_char_p, c_int, c_int64, c_uint64, c_void_p
from typing import Any, NoReturn

import torch
from torch import Tensor

from . import _backends
from ._operator import rules

__all__ = [
    "Executor",
    "Status",
    "Stream",
    "multi_scale_deformable_attention_grad",
    "multi_scale_deformable_attention_grad_get_workspace_size",
    "multi_scale_deformable_attention_grad_out",
    "multi_scale_deformable_attn_function",
    "multi_scale_deformable_attn_function_get_workspace_size",
    "multi_scale_deformable_attn_function_out",
    "recent_error",
    "synchronize",
]


class Status(enum.IntEnum):
    """CANN's status codes, as far as this library returns them."""

    ACLNN_SUCCESS = 0
    ACL_ERROR_INVALID_PARAM = 100000
    ACLNN_ERR_PARAM_NULLPTR = 161001
    ACLNN_ERR_PARAM_INVALID = 161002
    ACL_ERROR_BAD_ALLOC = 200000
    ACL_ERROR_INTERNAL_ERROR = 500000
    ACL_ERROR_RT_AICORE_EXCEPTION = 507015


_ERRORS = {
    Status.ACLNN_ERR_PARAM_NULLPTR: TypeError,
    Status.ACLNN_ERR_PARAM_INVALID: ValueError,
    Status.ACL_ERROR_RT_AICORE_EXCEPTION: ValueError,
    Status.ACL_ERROR_BAD_ALLOC: MemoryError,
}
# the dtypes of the C interface, and the dtypes that it refuses by name
_DTYPE = _backends.native.DTYPES | {torch.int8: 2, torch.uint8: 4, torch.int16: 6, torch.bool: 12}
_DTYPE |= {torch.complex64: 16, torch.complex128: 17}
_UNDEFINED_DTYPE = -1
_FORMAT_ND = 2
_NO_EXECUTOR = 1  # an address without an executor

_GRAD, _FORWARD = "aclnnMultiScaleDeformableAttentionGrad", "aclnnMultiScaleDeformableAttnFunction"
_INPUTS = ("value", "spatial_shape", "level_start_index", "location", "attn_weight")
_NAMES = {_GRAD: (*_INPUTS, "grad_output", "grad_value", "grad_location", "grad_attn_weight"), _FORWARD: (*_INPUTS, "output")}


@functools.cache
def _library() -> ctypes.CDLL:
    library = _backends.native.loaded()
    library.aclGetRecentErrMsg.restype = c_char_p
    library.aclCreateTensor.restype = c_void_p
    sizes = POINTER(c_int64)
    library.aclCreateTensor.argtypes = [sizes, c_uint64, c_int, sizes, c_int64, c_int, sizes, c_uint64, c_void_p]
    for name in ("aclDestroyTensor", "aclDestroyAclOpExecutor", "aclrtSynchronizeStream", "aclrtDestroyStream"):
        getattr(library, name).argtypes = [c_void_p]
    library.aclrtCreateStream.argtypes = [POINTER(c_void_p)]
    for operator, names in _NAMES.items():
        results = [POINTER(c_uint64), POINTER(c_void_p)]
        getattr(library, operator + "GetWorkspaceSize").argtypes = [c_void_p] * len(names) + results
        getattr(library, operator).argtypes = [c_void_p, c_uint64, c_void_p, c_void_p]
    return library


def recent_error() -> str | None:
    """Return the sentence of this thread's last failure (*name* must *rule*; got *fact*), and forget the failure."""
    message = _library().aclGetRecentErrMsg()
    return message.decode() if message is not None else None


class Executor:
    """A call prepared by phase one. It holds the call's tensors. Phase two or this object's deletion frees the handle."""

    def __init__(self, handle: int, tensors: tuple[Tensor | None, ...]) -> None:
        self._handle, self._tensors = handle, tensors
        self._free = weakref.finalize(self, _library().aclDestroyAclOpExecutor, handle)


class Stream:
    """Runs a call at once, and keeps the first error until `synchronize`."""

    def __init__(self) -> None:
        handle = c_void_p()
        status = _library().aclrtCreateStream(ctypes.byref(handle))
        if status:
            _raise(status)
        self._handle = handle.value
        weakref.finalize(self, _library().aclrtDestroyStream, self._handle)

    def synchronize(self) -> Status:
        """Return the first error since the last call, or ACLNN_SUCCESS."""
        return synchronize(self)


def synchronize(stream: Stream | None = None) -> Status:
    """Return a stream's first error since the last call, or ACLNN_SUCCESS; None is the default stream."""
    return Status(_library().aclrtSynchronizeStream(stream and stream._handle))


def _check_host_memory(name: str, t: Any) -> None:
    """Check that a C function can read and write the memory of t."""
    rules.need_tensors((name, t))
    if t.device.type != "cpu" or t.layout != torch.strided or t.is_neg() or t.is_conj():
        rules.fail(ValueError, name, "be a plain strided tensor on the CPU", f"{t.layout} on {t.device}")


def _describe(name: str, t: Tensor | None) -> int | None:
    """Return a new aclTensor for a tensor; None for None. The caller destroys the aclTensor."""
    if t is None:
        return None
    _check_host_memory(name, t)
    axes, storage = t.dim(), t.untyped_storage()
    numbers = c_int64 * axes
    handle = _library().aclCreateTensor(
        numbers(*t.shape),
        axes,
        _DTYPE.get(t.dtype, _UNDEFINED_DTYPE),
        numbers(*t.stride()),
        t.storage_offset(),
        _FORMAT_ND,
        (c_int64 * 1)(storage.nbytes() // t.element_size()),
        1,
        storage.data_ptr(),
    )
    if not handle:
        raise ValueError(f"{name} must have at most 8 axes; got {axes}")
    return handle


def _phase_one(operator: str, tensors: tuple[Tensor | None, ...]) -> tuple[Status, int, Executor | None]:
    library, handles = _library(), []
    size, executor = c_uint64(), c_void_p()
    try:
        for name, t in zip(_NAMES[operator], tensors, strict=True):
            handles.append(_describe(name, t))
        phase_one = getattr(library, operator + "GetWorkspaceSize")
        status = Status(phase_one(*handles, ctypes.byref(size), ctypes.byref(executor)))
    finally:
        for handle in filter(None, handles):
            library.aclDestroyTensor(handle)
    if status or executor.value is None:
        return status, 0, None
    return status, size.value, Executor(executor.value, tensors)


def _phase_two(
    operator: str, workspace: Tensor | None, workspace_size: int, executor: Executor | None, stream: Stream | None
) -> Status:
    if workspace is not None:
        _check_host_memory("workspace", workspace)
        if not workspace.is_contiguous() or workspace.nbytes < workspace_size:
            fact = f"{workspace.nbytes} of strides {workspace.stride()}"
            rules.fail(ValueError, "workspace", f"have workspace_size={workspace_size} bytes in a row", fact)
    memory = None if workspace is None else workspace.data_ptr()
    handle = None
    if executor is not None:  # phase two frees the handle, and another executor may then get its address
        handle, executor._handle = executor._handle, _NO_EXECUTOR
        executor._free.detach()
    return Status(getattr(_library(), operator)(memory, workspace_size, handle, stream and stream._handle))


def _raise(status: int, kind: type[Exception] | None = None) -> NoReturn:
    """Raise an error with the sentence of the last failure; without `kind`, the error that belongs to the status."""
    sentence = recent_error() or f"status {status}"
    name, space, rest = sentence.partition(" ")
    name = re.sub(r"(?<=[a-z])[A-Z]", lambda letter: "_" + letter.group().lower(), name)
    rules.refuse(kind or _ERRORS.get(Status(status), RuntimeError), name, name + space + rest)


def _output(tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype) if tensor is None else tensor


def _both_phases(operator: str, tensors: tuple[Any, ...], stream: Stream | None) -> None:
    status, size, executor = _phase_one(operator, tensors)
    if status == Status.ACLNN_SUCCESS:
        status = _phase_two(operator, torch.empty(size, dtype=torch.uint8), size, executor, stream)
    if status == Status.ACLNN_SUCCESS:
        status = synchronize(stream)
    if status == Status.ACLNN_ERR_PARAM_INVALID:
        # CANN has one status for wrong dtypes and wrong shapes, and phase one checks dtypes first.
        value, shapes, starts, *others = tensors
        floating = rules.FLOATING - {torch.float64}
        if operator == _FORWARD and os.environ.get("MX_DRIVING_CANN_PRODUCT") == "310P":
            floating -= {torch.bfloat16}
        fit = all(t.dtype == value.dtype for t in others) and value.dtype in floating
        _raise(status, None if fit and {shapes.dtype, starts.dtype} <= rules.INDEX else TypeError)
    if status != Status.ACLNN_SUCCESS:
        _raise(status)


def multi_scale_deformable_attention_grad_get_workspace_size(
    value: Tensor | None,
    spatial_shape: Tensor | None,
    level_start_index: Tensor | None,
    location: Tensor | None,
    attn_weight: Tensor | None,
    grad_output: Tensor | None,
    grad_value: Tensor | None,
    grad_location: Tensor | None,
    grad_attn_weight: Tensor | None,
) -> tuple[Status, int, Executor | None]:
    """Phase one of the gradients of `mx_driving.multi_scale_deformable_attn`: check nine tensors, plan the call.

    Args:
        value: [bs, num_keys, num_heads, channels], channels a multiple of 8 and <= 256, num_heads <= 16
        spatial_shape: [num_levels, 2], (H, W), int32 or int64, num_levels <= 16
        level_start_index: [num_levels], row of each level in num_keys, int32 or int64
        location: [bs, num_queries, num_heads, num_levels, num_points, 2], (x, y), 0..1 is the map,
            num_queries < 500000, num_points <= 16
        attn_weight: [bs, num_queries, num_heads, num_levels, num_points]
        grad_output: [bs, num_queries, num_heads, channels] or [bs, num_queries, num_heads * channels]
        grad_value, grad_location, grad_attn_weight: written by phase two; shapes of value, location, attn_weight

    All floating tensors, inputs and outputs, have one dtype: float32, float16 or bfloat16. Strides are free, but no two
    elements of an output may share memory. None stands for a null pointer.

    Returns:
        status, workspace_size in bytes (0 for an empty input), executor (None unless status is ACLNN_SUCCESS).
        ACLNN_ERR_PARAM_NULLPTR (161001) for a None, ACLNN_ERR_PARAM_INVALID (161002) for a dtype, shape or limit.

    Raises:
        TypeError: an argument that is neither a tensor nor None.
        ValueError: a tensor that is not in the host's memory.

    Source: CANN's aclnnMultiScaleDeformableAttentionGradGetWorkspaceSize.
    """
    tensors = (value, spatial_shape, level_start_index, location, attn_weight)
    return _phase_one(_GRAD, (*tensors, grad_output, grad_value, grad_location, grad_attn_weight))


def multi_scale_deformable_attention_grad(
    workspace: Tensor | None, workspace_size: int, executor: Executor | None, stream: Stream | None = None
) -> Status:
    """Phase two: run the call that phase one prepared.

    The outputs are written when the call returns, unless a level does not fit into num_keys: then `synchronize(stream)` returns
    the error. An executor runs once. It is also used up if a check fails.

    Args:
        workspace: at least workspace_size contiguous bytes; None if phase one returned 0
        workspace_size: the size that phase one returned, or more
        executor: from phase one

    Source: CANN's aclnnMultiScaleDeformableAttentionGrad.
    """
    return _phase_two(_GRAD, workspace, workspace_size, executor, stream)


def multi_scale_deformable_attention_grad_out(
    value: Tensor,
    spatial_shape: Tensor,
    level_start_index: Tensor,
    location: Tensor,
    attn_weight: Tensor,
    grad_output: Tensor,
    grad_value: Tensor | None = None,
    grad_location: Tensor | None = None,
    grad_attn_weight: Tensor | None = None,
    stream: Stream | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Both phases and `synchronize` in one call. It takes the arguments of phase one, and raises instead of returning statuses.

    Args:
        grad_value, grad_location, grad_attn_weight: overwritten and returned; None allocates one of the inputs' dtype

    Raises:
        TypeError: a dtype, or None. ValueError: a shape, a limit, a level that does not fit. MemoryError: no memory.

    Example:
        >>> import torch
        >>> one = torch.ones
        >>> grads = multi_scale_deformable_attention_grad_out(
        ...     one(1, 1, 1, 8), one(1, 2).int(), torch.tensor([0]), torch.zeros(1, 32, 1, 1, 1, 2), one(1, 32, 1, 1, 1),
        ...     one(1, 32, 8))
        >>> [g.flatten()[0].item() for g in grads]
        [8.0, 4.0, 2.0]
    """
    rules.need_tensors(("value", value), ("location", location), ("attn_weight", attn_weight))
    outputs = (
        _output(grad_value, value.shape, value.dtype),
        _output(grad_location, location.shape, location.dtype),
        _output(grad_attn_weight, attn_weight.shape, attn_weight.dtype),
    )
    inputs = (value, spatial_shape, level_start_index, location, attn_weight, grad_output)
    _both_phases(_GRAD, (*inputs, *outputs), stream)
    return outputs


def multi_scale_deformable_attn_function_get_workspace_size(
    value: Tensor | None,
    spatial_shape: Tensor | None,
    level_start_index: Tensor | None,
    location: Tensor | None,
    attn_weight: Tensor | None,
    output: Tensor | None,
) -> tuple[Status, int, Executor | None]:
    """Phase one of the forward: as `multi_scale_deformable_attention_grad_get_workspace_size`.

    Args:
        output: written by phase two, [bs, num_queries, num_heads * channels], value's dtype
    """
    return _phase_one(_FORWARD, (value, spatial_shape, level_start_index, location, attn_weight, output))


def multi_scale_deformable_attn_function(
    workspace: Tensor | None, workspace_size: int, executor: Executor | None, stream: Stream | None = None
) -> Status:
    """Phase two of the forward: as `multi_scale_deformable_attention_grad`."""
    return _phase_two(_FORWARD, workspace, workspace_size, executor, stream)


def multi_scale_deformable_attn_function_out(
    value: Tensor,
    spatial_shape: Tensor,
    level_start_index: Tensor,
    location: Tensor,
    attn_weight: Tensor,
    output: Tensor | None = None,
    stream: Stream | None = None,
) -> Tensor:
    """The forward in one call, as `multi_scale_deformable_attention_grad_out`. If output is None, it allocates the output: [bs,
    num_queries, num_heads * channels] in value's dtype."""
    rules.need_tensors(("value", value), ("location", location))
    shaped = value.dim() == 4 and location.dim() == 6  # phase one refuses other shapes
    rows = (value.shape[0], location.shape[1], value.shape[2] * value.shape[3]) if shaped else ()
    output = _output(output, rows, value.dtype)
    _both_phases(_FORWARD, (value, spatial_shape, level_start_index, location, attn_weight, output), stream)
    return output
