"""Shared code of all launches: the layout of value, the size of a tile, the device, the optional check of index tables."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver

from ... import _data_checks
from ..._operator import checks
from . import from_cpp

# The most channels that a thread of a backward kernel holds. Eight channels would fill a read of 16 bytes in a 16-bit dtype,
# but the rows of four corners, their products and the gradient would then take more than 64 registers, which leaves less than
# half of the occupancy.
MOST_PER_THREAD = 4
_MOST_THREADS = 512  # threads of a program; more threads would have too few registers


class Gpu(NamedTuple):
    """The facts about a GPU that a plan depends on."""

    lanes: int  # threads that run in step, Triton's "warp": 32 on NVIDIA and RDNA, 64 on CDNA
    capped: bool  # whether the compiler can limit how many registers a thread may take


_NVIDIA = Gpu(32, True)


def gpu() -> Gpu:
    """Return the GPU that the next launch runs on, or is compiled for."""
    if not torch.version.hip and not getattr(torch.version, "xpu", None):
        return _NVIDIA
    target = driver.active.get_current_target()
    return Gpu(target.warp_size, target.backend == "cuda")


class Layout(NamedTuple):
    """The layout of value in memory."""

    lane: int  # neighbouring elements that a thread reads at once: 16 bytes if strides allow
    key: int  # elements from row to row, if the model's sizes determine this number; 0: kernels take it from `strides`
    strides: tuple[int, ...]  # strides of all axes but channels, in units of `lane`, so that the compiler knows the alignment


def packed(value: Tensor) -> Tensor:
    """Return `value`, or a copy if its channels are not contiguous, because a kernel would have to read such channels singly.

    The other axes may have any strides.
    """
    return value if value.stride(-1) == 1 or value.shape[-1] == 1 else value.contiguous()


def paired(t: Tensor) -> Tensor:
    """Return `t`, contiguous and aligned, so that a single access can read a pair of neighbours."""
    t = t.contiguous()
    return t.clone() if t.data_ptr() % (2 * t.element_size()) else t


def layout(shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int, run: int) -> Layout:
    """Return the layout of a value [bs, num_keys, ..., channels]. A head or group has `run` neighbouring channels."""
    strides = [step if size > 1 else 0 for step, size in zip(stride[:-1], shape[:-1], strict=True)]
    lane = math.gcd(16 // itemsize, run, *strides)
    row = math.prod(shape[2:])
    key = strides[1] if shape[1] > 1 else row
    return Layout(lane, key if key in (row, shape[-1]) else 0, tuple(step // lane for step in strides))


class Plan(NamedTuple):
    """The parameters of a launch. Plans are cached by layout, because computing a plan takes a third of a small call's time."""

    queries: int  # queries of a program
    parts: int  # programs that share these queries: a program for each head, or for each point
    strides: tuple[int, ...]
    options: dict[str, int]  # constants of the compiled kernel: the model's sizes, never batch, queries or map sizes


class Tile(NamedTuple):
    rows: int
    columns: int  # channels, rounded up to a power of two
    warps: int


def tile(channels: int, per_thread: int, warps: int, lanes: int) -> Tile:
    """Return a tile for `warps` warps, or for more warps if a row needs more. A thread holds `per_thread` channels of a row."""
    columns = triton.next_power_of_2(channels)
    rows = max(1, min(lanes // 2 * warps, lanes * warps * per_thread // columns))
    return Tile(rows, columns, max(warps, most_warps(columns, per_thread, lanes)))


def most_warps(elements: int, per_thread: int, lanes: int) -> int:
    return min(_MOST_THREADS // lanes, elements // (lanes * per_thread))


def plan(layout: Layout, tile: Tile, queries: int, parts: int, registers: int | None, **sizes: int) -> Plan:
    """Return a plan. `sizes` are the operator's own constants; `registers` limits the registers of a thread, if not None.

    With a limit the compiler takes more registers than without, and keeps more reads in flight. On an H100 the float32 forward
    of attention is 1.03 to 1.3 times as fast with a limit of 56 as without (40 registers); 48 is as fast, but spills at 64
    channels. The 16-bit forward is slower with 48; 64 is not measured. Triton has no such option on AMD.
    """
    shape = {"ROWS": tile.rows, "COLUMNS": tile.columns, "LANE": layout.lane, "KEY": layout.key}
    options = {**sizes, **shape, "num_warps": tile.warps, **({"maxnreg": registers} if registers else {})}
    return Plan(queries, parts, layout.strides, options)


def unroll(points: int) -> int:
    """Return how many points a loop unrolls: the largest divisor of `points` up to four. The reads of these points are in
    flight together. With more points, registers would spill."""
    return max(n for n in (1, 2, 3, 4) if points % n == 0)


# Triton versions whose compiled kernels `run` can launch directly. With other versions, Triton launches all kernels.
_LAUNCHES_ALIKE = "3.4.", "3.5.", "3.6.", "3.7.", "3.8.", "3.9."
_compiled: dict[tuple[Any, ...], tuple[CompiledKernel, list[int]]] = {}  # key in `run` -> (kernel, its constants)
_dtype = operator.attrgetter("dtype")


def run(
    kernel: Any, programs: int, tensors: Sequence[Tensor], numbers: Sequence[int], options: dict[str, int], **flags: int
) -> None:
    """Launch a kernel on the current stream of its tensors' device. The kernel must not be specialized for its numbers.

    Triton takes 12 us to find a call's compiled kernel. So on NVIDIA, cache compiled kernels by dtypes, constants and device.
    But let Triton launch if an address is not a multiple of 16, if a number may need 64 bits, or if a profiler has set hooks.
    """
    device = driver.active.get_current_device()
    if tensors[0].get_device() not in (device, -1):
        with getattr(torch, tensors[0].device.type).device(tensors[0].device):
            return run(kernel, programs, tensors, numbers, options, **flags)
    key = (id(kernel), device, *options.values(), *flags.values(), *map(_dtype, tensors))
    addresses = functools.reduce(operator.or_, map(Tensor.data_ptr, tensors))
    # A profiler's hook is a function in Triton 3.4, and a list of functions later.
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    watched = getattr(hooks[0], "calls", hooks[0]) or getattr(hooks[1], "calls", hooks[1])
    usual = not (addresses & 15 or sum(numbers) >> 31 or watched)
    if usual and (entry := _compiled.get(key)):
        compiled, constants = entry
        if from_cpp.keep_kernel:
            from_cpp.keep_kernel(compiled, options)
        stream, handles = driver.active.get_current_stream(device), (compiled.function, compiled.packed_metadata)
        return compiled.run(programs, 1, 1, stream, *handles, None, None, None, *tensors, *numbers, *constants)
    # Ask for fused multiply-add: Triton 3.10 has turned it off by default, and 27 % more float instructions run without it.
    compiled = kernel[(programs,)](*tensors, *numbers, **options, **flags, enable_fp_fusion=True)
    if usual and triton.__version__.startswith(_LAUNCHES_ALIKE) and gpu() is _NVIDIA and isinstance(compiled, CompiledKernel):
        names = kernel.arg_names[len(tensors) + len(numbers) :]
        _compiled[key] = compiled, [(options | flags)[name] for name in names]
        if from_cpp.keep_kernel:
            from_cpp.keep_kernel(compiled, options)


def check(shapes_name: str, starts_name: str, shapes: Tensor, starts: Tensor, num_keys: int) -> None:
    """Check the index tables as on a CPU, but only inside data_checks(), because reading waits for the device."""
    if _data_checks.enabled():
        checks.check_levels(shapes_name, starts_name, shapes, starts, num_keys)
