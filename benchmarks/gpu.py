"""Measure the operators on a GPU, other implementations, and the limits of the GPU's memory.

    python benchmarks/gpu.py                            ours and every rival that is installed; benchmarks/results/<gpu>.csv
    python benchmarks/gpu.py --ours --out times.csv     ours alone
    python benchmarks/gpu.py --rivals plain,classic --dtype float32 --out rivals.csv
    python benchmarks/gpu.py --dry-run                  tiny sizes, the kernels' PTX executed: checks this script

Times are medians of CUDA events. Each call takes the next of several copies of its inputs. All copies together are three times
as large as the L2 cache, so that a call finds none of its inputs there. `kernel` is the time in a CUDA graph, without Python;
`call` is the time of the same calls from Python, one after the other. A row is written as soon as it is measured.
"""

from __future__ import annotations

import argparse
import csv
import functools
import pathlib
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from typing import Any, NamedTuple

import ceilings
import torch
from gpu_workloads import GPU_WORKLOADS, WITH_LOGITS
from torch import Tensor

import mx_driving
from mx_driving import _backends, reference
from mx_driving._agreement import entry_differences, rounding_limit
from mx_driving._measure.plain import make_plain
from mx_driving._measure.workloads import AGGREGATION, MULTI_SCALE, POOL, WORKLOADS, Workload
from mx_driving._operator import composition
from mx_driving._operator.description import OPERATORS

DRY = "--dry-run" in sys.argv
DEVICE = "cpu" if DRY else "cuda"
ROUNDS = 1 if DRY else 30
DTYPES = (torch.float32,) if DRY else (torch.float32, torch.bfloat16, torch.float16)
RESULTS = pathlib.Path(__file__).parent / "results"
CALLS = (*GPU_WORKLOADS, next(w for w in WORKLOADS if w.name == "BEVDet-R50, 80 channels"), *WITH_LOGITS)
RIVALS = ("plain", "compiled", "deformops-triton", "deformops-cuda", "classic")

Args = tuple[Any, ...]  # tensors, and the sizes of bev_pool_v3
Function = Callable[..., Tensor]


class Target(NamedTuple):
    """Times in milliseconds on an H200; a "call" includes Python. A time above `gate` gives exit status 1; `aim` is a wish."""

    gate: float
    aim: float


# The least ratio of a rival's time to ours, forward and backward, in float32 on any GPU.
RATIOS = {"classic": (3.0, 2.5), "deformops-triton": (1.2, 1.2), "deformops-cuda": (1.2, 1.2)}
TARGETS = {
    ("Encoder, batch 2, 22,223 queries", "float32", "forward", "kernel"): Target(0.30, 0.20),
    ("Encoder, batch 2, 22,223 queries", "bfloat16", "forward", "kernel"): Target(0.20, 0.13),
    ("Encoder, batch 2, 22,223 queries", "float16", "forward", "kernel"): Target(0.20, 0.13),
    ("Encoder, batch 2, 22,223 queries", "float32", "backward", "kernel"): Target(1.5, 1.0),
    ("BEVFormer spatial cross-attention, 6 x 9680", "float32", "forward", "kernel"): Target(0.8, 0.5),
    ("Decoder, batch 2, 900 queries", "float32", "forward", "kernel"): Target(0.012, 0.008),
    ("Decoder, batch 2, 900 queries", "float32", "forward", "call"): Target(0.040, 0.020),
    ("Sparse4D, batch 6, 900 x 13", "float32", "forward", "kernel"): Target(0.25, 0.15),
    ("Sparse4D, batch 6, 900 x 13", "float32", "backward", "kernel"): Target(1.2, 0.8),
}


def events(run: Callable[[], Any], calls: int) -> float:
    """Return the seconds of one call if `run` makes `calls` calls: the median over rounds."""
    if not DRY:
        run()
    times = []
    for _ in range(ROUNDS):
        if DRY:
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
            continue
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times) / calls


def captured(calls: list[Callable[[], Any]]) -> Callable[[], Any]:
    """Return a function that replays all calls as one CUDA graph."""
    if DRY:
        return functools.partial(_all, calls)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()  # compiles the kernel and fills the allocator's cache
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def bytes_of(args: Args) -> int:
    return sum(a.nbytes for a in args if isinstance(a, Tensor))


def copies(args: Args) -> list[Args]:
    """Return at least 4 copies of the inputs, together three times as large as the L2 cache if 64 copies suffice."""
    size = bytes_of(args)
    cache = 0 if DRY else torch.cuda.get_device_properties(0).L2_cache_size
    return [
        tuple(a.clone() if isinstance(a, Tensor) else a for a in args)
        for _ in range(max(1 if DRY else 4, min(64, -(-3 * cache // size))))
    ]


def _import_rival(name: str) -> Function | None:
    """Return another package's multi-scale attention, or None if the package is not installed."""
    try:
        if name == "classic":
            from torch_ms_deform_attn.functional import ms_deform_attn  # pyright: ignore[reportMissingImports]

            return ms_deform_attn
        from deformops.registry import Backend, msda  # pyright: ignore[reportMissingImports]

        return functools.partial(msda, backend=Backend.TRITON if name == "deformops-triton" else Backend.CUDA)
    except ImportError as error:
        print(f"{name} is not measured: {error}")
        return None


def rivals(workload: Workload, names: list[str]) -> Iterator[tuple[str, Function]]:
    usual = make_plain(workload.operator)
    for name in names:
        if name == "plain":
            yield name, usual
        elif name == "compiled":
            torch._dynamo.reset()  # else the ninth workload would exceed the recompilation limit and run uncompiled
            yield name, torch.compile(usual)
        elif workload.operator == MULTI_SCALE and (function := _import_rival(name)):
            yield name, function


def ours(workload: Workload, backward: bool, grad: Tensor) -> Function:
    """Return our forward or backward. A dry run calls the Triton kernel itself: the dispatcher would choose a CPU kernel."""
    wanted = [True] * len(OPERATORS[workload.operator].differentiable)
    if DRY:
        kernel = _backends.triton.kernel(workload.operator, backward)
    else:
        kernel = getattr(torch.ops.mx_driving, workload.operator + "_backward" * backward).default
    return (lambda *args: kernel(grad, *args, wanted)) if backward else kernel


def autograd_backward(function: Function, workload: Workload, args: Args, grad: Tensor) -> Callable[[], Any]:
    """Return a call of only a rival's backward, which keeps its graph."""
    places = OPERATORS[workload.operator].differentiable
    leaves = [a.detach().requires_grad_() if i in places else a for i, a in enumerate(args)]
    output = function(*leaves)
    return lambda: torch.autograd.grad(output, [leaves[i] for i in places], grad, retain_graph=True)


def for_rival(name: str, args: Args) -> Args:
    """Convert all inputs to one floating dtype. Plain torch reads the tables, so keep them on the CPU to avoid a wait."""
    args = tuple(a.to(args[0].dtype) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
    reads = name in ("plain", "compiled") and args[3].is_floating_point() and len(args) == 5  # a bare operator
    return (args[0], args[1].cpu(), args[2].cpu(), *args[3:]) if reads else args


def first_queries(workload: Workload, args: Args, batch: int, count: int) -> Args:
    """Return the inputs with fewer queries, or with fewer points for bev_pool_v3."""
    if workload.operator == POOL:
        return (*args[:2], *(ranks[:count] for ranks in args[2:5]), *args[5:])
    axes = [t.axes for t in OPERATORS[workload.operator].tensors]

    def cut(t: Tensor | None, axes: tuple[str, ...]) -> Tensor | None:
        if t is None or axes[0] != "bs":
            return t
        return t[:batch, :count] if axes[1] in ("num_queries", "anchor") else t[:batch]

    return (*args[:3], *map(cut, args[3:], axes[3:]), *args[len(axes) :])


def check(workload: Workload, args: Args) -> None:
    """Refuse to measure a wrong result: compare the first queries with the reference in float64."""
    some = first_queries(workload, args, args[0].shape[0], 60)
    got = ours(workload, False, args[0])(*some)
    wide = tuple(a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in some)
    true = getattr(reference, workload.operator)(*wide)
    # Positions in float32 on a map of 248 pixels, and the rounding of the result to 16 bits.
    limit = rounding_limit(args[0].dtype, torch.float32, true.abs(), true.abs().max().item(), 0, 248)
    error = (entry_differences(got, true) / limit).max().item()
    if got.dtype != args[0].dtype or not error <= 1:
        raise SystemExit(f"{workload.name}: off by {error:.2g} times the allowed error: not measured")


def moved(workload: Workload, args: Args, backward: bool) -> tuple[int, int]:
    """Return the bytes of value that samples read, and the bytes that they add to its gradient, as if all were on the map."""
    if workload.operator == POOL:
        return len(args[2]) * args[0].shape[1] * args[0].element_size(), 0
    if OPERATORS[workload.operator].bare:
        args = composition.bare_inputs(workload.operator, *args)
    if workload.operator.startswith(AGGREGATION):
        seen = ((args[3] > 0) & (args[3] < 1)).all(-1).sum().item()
        samples, channels = seen * args[4].shape[4], args[0].shape[2]
    else:
        samples, channels = args[4].numel(), args[0].shape[3]
    corners = OPERATORS[workload.operator].rows
    rows = int(samples * corners * channels)
    return rows * args[0].element_size(), rows * 4 * backward


def make_inputs(workload: Workload, dtype: torch.dtype) -> Args:
    """Return inputs in which value and the outputs of linear layers (offsets, logits) have this dtype."""
    made, names = workload.make(torch.Generator().manual_seed(0)), OPERATORS[workload.operator].inputs
    narrow = {0, *(i for i, name in enumerate(names) if name in ("sampling_offsets", "attention_logits", "logits"))}
    args = tuple(a.to(DEVICE, dtype if i in narrow else a.dtype) if isinstance(a, Tensor) else a for i, a in enumerate(made))
    if DRY and workload.operator == POOL:
        return (*args[:2], *(ranks[:50] % 16 for ranks in args[2:5]), 1, 1, 4, 4)
    return (args[0][:1], *first_queries(workload, args, 1, 2)[1:]) if DRY else args


def measure(workload: Workload, dtype: torch.dtype, peaks: ceilings.Ceilings, names: list[str]) -> Iterator[dict[str, Any]]:
    args = make_inputs(workload, dtype)
    check(workload, args)
    grad = torch.randn_like(ours(workload, False, args[0])(*args))
    for backward in (False, True):
        read, added = moved(workload, args, backward)
        least = max(read / peaks.cached_read, added / peaks.reduction, bytes_of(args) / peaks.copy)
        direction, mine = "backward" if backward else "forward", 0.0
        for name, seconds in _times(workload, args, grad, backward, names):
            mine = mine or seconds
            yield _row(workload, dtype, direction, name, seconds, mine, least)


def run_once(workload: Workload, dtype: torch.dtype) -> None:
    args = make_inputs(workload, dtype)
    output = ours(workload, False, args[0])(*args)
    ours(workload, True, torch.ones_like(output))(*args)


def _times(workload: Workload, args: Args, grad: Tensor, backward: bool, names: list[str]) -> Iterator[tuple[str, float]]:
    """Yield the name and the seconds of each implementation, our kernel first."""
    rotated = copies(args)
    calls = [functools.partial(ours(workload, backward, grad), *a) for a in rotated]
    yield "mx_driving, kernel", events(captured(calls), len(calls))
    yield "mx_driving, call", events(functools.partial(_all, calls), len(calls))
    for name, rival in rivals(workload, names):
        sets = [for_rival(name, a) for a in rotated]
        try:
            if backward:
                calls = [autograd_backward(rival, workload, a, grad) for a in sets]
            else:
                calls = [functools.partial(rival, *a) for a in sets]
            yield name, events(functools.partial(_all, calls), len(calls))
        except (RuntimeError, NotImplementedError, ValueError) as error:
            print(f"{name} does not run {workload.name} in {args[0].dtype}: {str(error).splitlines()[0]}")


def _all(calls: list[Callable[[], Any]]) -> None:
    for call in calls:
        call()


def _row(workload, dtype, direction, name, seconds, mine, least) -> dict[str, Any]:
    kind = str(dtype).removeprefix("torch.")
    row = {"workload": workload.name, "dtype": kind, "direction": direction, "implementation": name}
    row |= {"milliseconds": round(seconds * 1e3, 5), "times ours": round(seconds / mine, 2)}
    # the least possible time divided by the time; above 1 if first-level caches serve reads
    row["of the ceiling"] = round(least / seconds, 2) if name == "mx_driving, kernel" else ""
    target = TARGETS.get((workload.name, kind, direction, name.removeprefix("mx_driving, ")))
    row |= {"gate": target.gate if target else "", "aim": target.aim if target else ""}
    return row


def machine() -> str:
    import triton

    gpu = "no GPU: a dry run" if DRY else torch.cuda.get_device_name()
    return f"{date.today()}, {gpu}, torch {torch.__version__}, Triton {triton.__version__}, CUDA {torch.version.cuda}"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, PTX executed on the CPU; measures nothing")
    parser.add_argument("--once", action="store_true", help="each of our kernels once, for a profiler; measures nothing")
    parser.add_argument("--ours", action="store_true", help="without rivals")
    parser.add_argument("--rivals", default=",".join(RIVALS), help=f"of {', '.join(RIVALS)}; default all")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16; default all")
    parser.add_argument("--out", type=pathlib.Path, help="the CSV file; default benchmarks/results/<gpu>.csv")
    options = parser.parse_args()
    options.rivals = [] if options.ours else options.rivals.split(",")
    if unknown := set(options.rivals) - set(RIVALS):
        parser.error(f"--rivals must be of {', '.join(RIVALS)}; got {', '.join(sorted(unknown))}")
    return options


def use_ptx() -> None:
    """Execute the kernels' PTX on the CPU."""
    sys.path[:0] = [str(pathlib.Path(__file__).parent.parent / "tests" / "gpu")]
    import ptx
    import triton

    triton.runtime.driver.set_active(ptx.Driver(90))  # pyright: ignore[reportArgumentType]


COLUMNS = ["workload", "dtype", "direction", "implementation", "milliseconds", "times ours", "of the ceiling", "gate", "aim"]
PEAKS = ("copy GB/s", "L2 read GB/s", "reduction GB/s")


def main() -> None:
    options = parsed()
    if DRY:
        use_ptx()
    elif not torch.cuda.is_available():
        raise SystemExit("there is no GPU here; --dry-run checks this script without one")
    print(machine(), "mx_driving", mx_driving.__version__)
    dtypes = [dtype for dtype in DTYPES if options.dtype in (None, str(dtype).removeprefix("torch."))]
    workloads = CALLS[2:] if DRY else CALLS
    if options.once:
        return _all([functools.partial(run_once, workload, dtype) for workload in workloads for dtype in dtypes])
    peaks = ceilings.measure(lambda call: events(call, 1), DEVICE, DRY)
    if not DRY:
        print("ceilings, GB/s:", ", ".join(f"{name} {value / 1e9:.0f}" for name, value in peaks._asdict().items()))
    name = "dry-run" if DRY else re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    path = options.out or (pathlib.Path("/dev/null") if DRY else RESULTS / f"{name}.csv")
    constant = {column: round(value / 1e9) for column, value in zip(PEAKS, peaks, strict=True)} | {"machine": machine()}
    missed = []
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*COLUMNS, *constant])
        writer.writeheader()
        for workload, dtype in ((w, d) for w in workloads for d in dtypes):
            for row in measure(workload, dtype, peaks, options.rivals):
                print("  ".join(f"{value}" for value in list(row.values())[: 4 if DRY else None] if value != ""), flush=True)
                writer.writerow({**row, **constant})
                file.flush()
                missed.append(None if DRY else _missed(row))
    if DRY:
        return print("dry run: nothing was measured")
    print("\n".join(filter(None, missed)) or "every gate that applies is met")
    sys.exit(any(missed))


def _missed(row: dict[str, Any]) -> str | None:
    what = f"{row['workload']}, {row['dtype']}, {row['direction']}"
    if row["gate"] and row["milliseconds"] > row["gate"] and "H200" in torch.cuda.get_device_name():
        return f"gate missed: {what}: {row['milliseconds']} ms > {row['gate']} ms"
    ratios = RATIOS.get(row["implementation"])
    if ratios and row["dtype"] == "float32" and row["times ours"] < ratios[row["direction"] == "backward"]:
        return f"gate missed: {what}: {row['implementation']} takes only {row['times ours']} times as long"
    return None


if __name__ == "__main__":
    main()
