"""The operators on a GPU, beside their rivals and the GPU's ceilings.

    python benchmarks/gpu.py                 on the current CUDA device; writes benchmarks/results/<gpu>.csv
    python benchmarks/gpu.py --dry-run       tiny sizes in Triton's interpreter: checks this script, measures nothing

Times are medians of CUDA events. Each call takes the next of several copies of its inputs, which are three times the L2 cache
together, so that nothing of a copy's last use is left there. `kernel` is a CUDA graph of such calls, without Python; `call`
is the same from Python, one after the other.
"""

from __future__ import annotations

import argparse
import csv
import functools
import os
import pathlib
import re
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from typing import Any, NamedTuple

if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import ceilings
import torch
from torch import Tensor

import mx_driving
from mx_driving import _backends, reference
from mx_driving._measure import plain
from mx_driving._measure.workloads import AGGREGATION, GPU_WORKLOADS, MULTI_SCALE, WORKLOADS, Workload
from mx_driving._operators import OPERATORS

DRY = "--dry-run" in sys.argv
DEVICE = "cpu" if DRY else "cuda"
ROUNDS = 1 if DRY else 30
DTYPES = (torch.float32,) if DRY else (torch.float32, torch.bfloat16, torch.float16)
RESULTS = pathlib.Path(__file__).parent / "results"

Args = tuple[Tensor, ...]
Function = Callable[..., Tensor]


class Target(NamedTuple):
    """Milliseconds on an H200; for `call`, of a whole call from Python."""

    gate: float
    aim: float


# How many times longer the rival takes: forward and backward, on any GPU, float32.
RATIOS = {"torch-ms-deform-attn": (3.0, 2.5), "deformops": (1.2, 1.2)}
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
    """Seconds of one of the `calls` calls that run makes: the median over rounds."""
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
    """All the calls as one CUDA graph."""
    if DRY:
        return functools.partial(_all, calls)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()  # compiles, and fills the allocator
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def copies(args: Args) -> list[Args]:
    """As many copies of the inputs as three times the L2 cache holds, at least 4."""
    size = sum(a.nbytes for a in args)
    cache = 0 if DRY else torch.cuda.get_device_properties(0).L2_cache_size
    return [tuple(a.clone() for a in args) for _ in range(max(1 if DRY else 4, min(64, -(-3 * cache // size))))]


@functools.cache
def installed() -> dict[str, Function]:
    """Other packages' multi-scale attention; one that is not installed is left out, with a line that says so."""
    found: dict[str, Function] = {}
    try:
        from deformops.registry import Backend, msda  # pyright: ignore[reportMissingImports]

        for backend in (Backend.TRITON, Backend.CUDA):
            found[f"deformops, {backend.value}"] = functools.partial(msda, backend=backend)
    except ImportError:
        print("deformops is not installed: no comparison with it")
    try:
        from torch_ms_deform_attn.functional import ms_deform_attn  # pyright: ignore[reportMissingImports]

        found["torch-ms-deform-attn"] = ms_deform_attn
    except ImportError:
        print("torch-ms-deform-attn is not installed: no comparison with the classic CUDA kernel")
    return found


def rivals(workload: Workload) -> dict[str, Function]:
    usual = getattr(plain, workload.operator)
    found: dict[str, Function] = {"plain torch": usual}
    if not DRY:
        torch._dynamo.reset()  # without this the ninth workload would exceed the limit of recompilations, and run uncompiled
        found["plain torch, compiled"] = torch.compile(usual)
    return found | (installed() if workload.operator == MULTI_SCALE else {})


def ours(workload: Workload, backward: bool, grad: Tensor) -> Function:
    """The operator itself, forward or backward; the dry run takes the kernel, which the CPU's dispatcher does not."""
    wanted = [True] * len(OPERATORS[workload.operator].differentiable)
    if DRY:
        kernel = _backends.triton.kernel(workload.operator, backward)
    else:
        kernel = getattr(torch.ops.mx_driving, workload.operator + "_backward" * backward).default
    return (lambda *args: kernel(grad, *args, wanted)) if backward else kernel


def autograd_backward(function: Function, workload: Workload, args: Args, grad: Tensor) -> Callable[[], Any]:
    """A rival's backward alone: its graph is kept."""
    places = OPERATORS[workload.operator].differentiable
    leaves = [a.detach().requires_grad_(i in places) for i, a in enumerate(args)]
    output = function(*leaves)
    return lambda: torch.autograd.grad(output, [leaves[i] for i in places], grad, retain_graph=True)


def for_rival(name: str, args: Args) -> Args:
    """One floating dtype throughout; plain torch reads the sizes of maps, which on a GPU would wait for it."""
    args = tuple(a.to(args[0].dtype) if a.is_floating_point() else a for a in args)
    reads = name.startswith("plain") and args[3].is_floating_point()
    return (args[0], args[1].cpu(), args[2].cpu(), *args[3:]) if reads else args


def check(workload: Workload, args: Args) -> None:
    """Refuse to measure a wrong result: compare the first queries with the reference in float64."""
    some = (*args[:3], args[3][:, :60], args[4][:, :60])
    got = ours(workload, False, args[0])(*some).double()
    wide = tuple(a.double() if a.is_floating_point() else a for a in some)
    true = getattr(reference, workload.operator)(*wide)
    error = ((got - true).abs().max() / true.abs().max()).item()
    # float32 positions on a map of 200 pixels, and one rounding to 16 bits
    allowed = 512 * torch.finfo(torch.float32).eps + torch.finfo(args[0].dtype).eps
    if not error <= allowed:
        raise SystemExit(f"{workload.name}: off by {error:.2g}, allowed {allowed:.2g}: not measured")


def moved(workload: Workload, args: Args, backward: bool) -> tuple[int, int]:
    """Bytes of value rows read, and of value gradients added, if every sample were on the map."""
    if workload.operator == AGGREGATION:
        seen = ((args[3] > 0) & (args[3] < 1)).all(-1).sum().item()
        samples, channels = seen * args[4].shape[4], args[0].shape[2]
    else:
        samples, channels = args[4].numel(), args[0].shape[3]
    corners = OPERATORS[workload.operator].rows
    rows = int(samples * corners * channels)
    return rows * args[0].element_size(), rows * 4 * backward


def measure(workload: Workload, dtype: torch.dtype, peaks: ceilings.Ceilings) -> list[dict[str, Any]]:
    made = workload.make(torch.Generator().manual_seed(0))
    args = tuple((a.to(dtype) if a.is_floating_point() and i == 0 else a).to(DEVICE) for i, a in enumerate(made))
    if DRY:
        args = (*args[:3], args[3][:1, :2], args[4][:1, :2])
        args = (args[0][:1], *args[1:])
    check(workload, args)
    grad = torch.randn_like(ours(workload, False, args[0])(*args))
    rows = []
    for backward in (False, True):
        times = _times(workload, args, grad, backward)
        read, added = moved(workload, args, backward)
        least = max(read / peaks.cached_read, added / peaks.reduction, sum(a.nbytes for a in args) / peaks.copy)
        direction = "backward" if backward else "forward"
        rows += [_row(workload, dtype, direction, name, seconds, times, least) for name, seconds in times.items()]
    return rows


def _times(workload: Workload, args: Args, grad: Tensor, backward: bool) -> dict[str, float]:
    """Seconds by implementation, ours first."""
    rotated = copies(args)
    calls = [functools.partial(ours(workload, backward, grad), *a) for a in rotated]
    times = {
        "mx_driving, kernel": events(captured(calls), len(calls)),
        "mx_driving, call": events(functools.partial(_all, calls), len(calls)),
    }
    for name, rival in rivals(workload).items():
        sets = [for_rival(name, a) for a in rotated]
        try:
            if backward:
                calls = [autograd_backward(rival, workload, a, grad) for a in sets]
            else:
                calls = [functools.partial(rival, *a) for a in sets]
            times[name] = events(functools.partial(_all, calls), len(calls))
        except (RuntimeError, NotImplementedError, ValueError) as error:
            print(f"{name} does not run {workload.name} in {args[0].dtype}: {str(error).splitlines()[0]}")
    return times


def _all(calls: list[Callable[[], Any]]) -> None:
    for call in calls:
        call()


def _row(workload, dtype, direction, name, seconds, times, least) -> dict[str, Any]:
    kind = str(dtype).removeprefix("torch.")
    mine = times["mx_driving, kernel"]
    row = {"workload": workload.name, "dtype": kind, "direction": direction, "implementation": name}
    row |= {"milliseconds": round(seconds * 1e3, 5), "times ours": round(seconds / mine, 2)}
    # the share of the time that the slowest ceiling explains; above 1 if first-level caches serve reads
    row["of the ceiling"] = round(least / seconds, 2) if name == "mx_driving, kernel" else ""
    target = TARGETS.get((workload.name, kind, direction, name.removeprefix("mx_driving, ")))
    row |= {"gate": target.gate if target else "", "aim": target.aim if target else ""}
    return row


def machine() -> str:
    import triton

    gpu = "no GPU: a dry run" if DRY else torch.cuda.get_device_name()
    return f"{date.today()}, {gpu}, torch {torch.__version__}, Triton {triton.__version__}, CUDA {torch.version.cuda}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes in Triton's interpreter; measures nothing")
    parser.add_argument("--all", action="store_true", help="also the workloads of bench.py")
    options = parser.parse_args()
    if not DRY and not torch.cuda.is_available():
        raise SystemExit("there is no GPU here; --dry-run checks this script without one")
    print(machine(), "mx_driving", mx_driving.__version__)
    peaks = ceilings.measure(lambda call: events(call, 1), DEVICE, DRY)
    if not DRY:
        print("ceilings, GB/s:", ", ".join(f"{name} {value / 1e9:.0f}" for name, value in peaks._asdict().items()))
    rows = []
    chosen = (
        GPU_WORKLOADS[2:] if DRY else (*GPU_WORKLOADS, *(w for w in WORKLOADS if options.all and w.row.samples))
    )  # dry: the small ones
    for workload in chosen:
        for dtype in DTYPES:
            found = measure(workload, dtype, peaks)
            for row in found:
                shown = list(row.values())[:4] if DRY else row.values()
                print("  ".join(f"{value}" for value in shown if value != ""), flush=True)
            rows += found
    if DRY:
        return print("dry run: nothing was measured, nothing is written")
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    with (RESULTS / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], "copy GB/s", "L2 read GB/s", "reduction GB/s", "machine"])
        writer.writeheader()
        peak = {f"{name} GB/s": round(value / 1e9) for name, value in zip(("copy", "L2 read", "reduction"), peaks, strict=True)}
        writer.writerows({**row, **peak, "machine": machine()} for row in rows)
    missed = [text for row in rows if (text := _missed(row))]
    print("\n".join(missed) or "every gate that applies is met")
    sys.exit(bool(missed))


def _missed(row: dict[str, Any]) -> str | None:
    what = f"{row['workload']}, {row['dtype']}, {row['direction']}"
    if row["gate"] and row["milliseconds"] > row["gate"] and "H200" in torch.cuda.get_device_name():
        return f"gate missed: {what}: {row['milliseconds']} ms > {row['gate']} ms"
    ratios = RATIOS.get(row["implementation"].split(",")[0])
    if ratios and row["dtype"] == "float32" and row["times ours"] < ratios[row["direction"] == "backward"]:
        return f"gate missed: {what}: {row['implementation']} takes only {row['times ours']} times as long"
    return None


if __name__ == "__main__":
    main()
