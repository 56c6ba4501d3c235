"""Whole models of the installed transformers on a GPU: plain, with the usual CUDA kernel, and after `mx_driving.patch`.

    python benchmarks/gpu_models.py deformable_detr --batch 1 --batch 8 --train 4 --compile --csv mine.csv
    python benchmarks/gpu_models.py rt_detr_v2 --dry-run      small pictures on the CPU: checks this script

`patch` changes classes of transformers, so each variant has a process of its own. Times are medians of wall time. At batch 1
Python takes more of it than the GPU. "GPU milliseconds" are the sum of the times of all kernels, from torch's profiler. A row
is host-bound if its wall time is more than 1.25 times the kernels' time. Models have random weights. "compiled forward" is
`torch.compile(mode="reduce-overhead")`. Products of float32 use TF32.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib
import json
import pathlib
import statistics
import subprocess
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from datetime import date
from typing import Any

import models
import torch
from torch import Tensor

import mx_driving

VARIANTS = ("plain", "torch-ms-deform-attn", "mx_driving")
MODES = ("float32", "autocast to bfloat16", "bfloat16")
COLUMNS = (
    "model",
    "measure",
    "mode",
    "batch",
    "variant",
    "milliseconds",
    "GPU milliseconds",
    "launches",
    "MiB",
    "host-bound",
    "machine",
)
DRY = "--dry-run" in sys.argv
DEVICE = "cpu" if DRY else "cuda"
Call = Callable[[], Any]


def synchronize() -> None:
    if not DRY:
        torch.cuda.synchronize()


def use_cuda_kernel(model: torch.nn.Module) -> int:
    """Replace sampling in transformers by torch-ms-deform-attn, in float32 like mmcv. Return the number of replacements."""
    from torch_ms_deform_attn.functional import ms_deform_attn  # pyright: ignore[reportMissingImports]

    def sample(
        self: Any, value: Tensor, shapes: Tensor, sizes: Any, starts: Tensor, locations: Tensor, weights: Tensor, step: int
    ):
        tensors = value, locations, weights
        if torch.is_autocast_enabled(DEVICE) or len({t.dtype for t in tensors}) > 1:
            tensors = (t.float() for t in tensors)
        v, l, w = (t.contiguous() for t in tensors)
        with torch.autocast(DEVICE, enabled=False):
            return ms_deform_attn(v, shapes, starts, l, w, 64).to(value.dtype)

    def sample_sizes(value: Tensor, sizes: Any, locations: Tensor, weights: Tensor) -> Tensor:
        shapes = torch.as_tensor(sizes, device=value.device)
        starts = torch.cat((shapes.new_zeros(1), shapes.prod(1).cumsum(0)[:-1]))
        return sample(None, value, shapes, None, starts, locations, weights, 64)

    cores = [m for m in model.modules() if type(m).__name__ == "MultiScaleDeformableAttention"]
    for core in cores:
        core.forward = types.MethodType(sample, core)
    module = importlib.import_module(type(model).__module__)
    has_function = hasattr(module, "multi_scale_deformable_attention")
    if has_function:
        module.multi_scale_deformable_attention = sample_sizes  # pyright: ignore[reportAttributeAccessIssue]
    return len(cores) + has_function


def build(name: str, variant: str) -> models.Subject:
    subject = models.build(name, *((256, 320) if DRY else (800, 1066)))
    subject.model.to(DEVICE)
    subject.inputs = {key: t.to(DEVICE) for key, t in subject.inputs.items()}
    if variant == "mx_driving":
        mx_driving.patch(subject.model)
    elif variant != "plain" and not use_cuda_kernel(subject.model):
        raise SystemExit(f"{name} has no sampling that {variant} can replace")
    return subject


def inputs_of(subject: models.Subject, batch: int, dtype: torch.dtype) -> dict[str, Tensor]:
    inputs = {key: t.to(dtype) if t.is_floating_point() else t for key, t in subject.inputs.items()}
    return {key: t.repeat(batch, *[1] * (t.dim() - 1)) if t.shape[:1] == (1,) else t for key, t in inputs.items()}


def time_call(call: Call, least: int = 4, most: int = 20) -> float:
    """Return the median of some calls in milliseconds."""
    times: list[float] = []
    for _ in range(2):
        call()
    synchronize()
    while len(times) < least or (sum(times) < 500 and len(times) < most):
        begin = time.perf_counter()
        call()
        synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def profile_kernels(call: Call) -> dict[str, Any]:
    """Return how many kernels a call launches, and the sum of their times."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(2):
            call()
        synchronize()
    events = [e for e in profiler.events() or [] if e.device_type == torch.autograd.DeviceType.CUDA]
    return {"launches": len(events) // 2, "GPU milliseconds": round(sum(e.self_device_time_total for e in events) / 2e3, 2)}


def measure(call: Call) -> dict[str, Any]:
    if DRY:
        call()
        return {"milliseconds": round(time_call(call, 1, 1), 2)}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    row: dict[str, Any] = {"milliseconds": round(time_call(call), 2)}
    row["MiB"] = round(torch.cuda.max_memory_allocated() / 2**20)
    row |= profile_kernels(call)
    return row | {"host-bound": "yes" if row["milliseconds"] > 1.25 * row["GPU milliseconds"] else ""}


def training_step(subject: models.Subject, inputs: dict[str, Tensor]) -> Any:
    outputs = subject.read(subject.model(**inputs)).values()
    loss = torch.stack([torch.where(out.isfinite(), out, 0).float().square().mean() for out in outputs]).sum()
    return torch.autograd.grad(loss, [p for p in subject.model.parameters() if p.requires_grad], allow_unused=True)


def rows_of(subject: models.Subject, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of one variant. The model stays in bfloat16, the last mode."""
    if options.compile:
        compiled, inputs = (
            torch.compile(subject.model, mode=None if DRY else "reduce-overhead"),
            inputs_of(subject, 1, torch.float32),
        )
        with torch.no_grad():
            yield {"measure": "compiled forward", "mode": "float32", "batch": 1, **measure(lambda: compiled(**inputs))}
    for mode in MODES:
        dtype = torch.bfloat16 if mode == "bfloat16" else torch.float32
        subject.model.to(dtype)
        autocast = torch.autocast(DEVICE, torch.bfloat16) if mode == MODES[1] else contextlib.nullcontext()
        for batch in options.batch:
            inputs = inputs_of(subject, batch, dtype)
            with torch.no_grad(), autocast:
                yield {"measure": "forward", "mode": mode, "batch": batch, **measure(lambda x=inputs: subject.model(**x))}
        for batch in options.train if mode != "bfloat16" else ():
            inputs = inputs_of(subject, batch, dtype)
            with autocast:
                row = measure(lambda x=inputs: training_step(subject, x))
            yield {"measure": "training step", "mode": mode, "batch": batch, **row}


def machine() -> str:
    import transformers

    name = "dry run" if DRY else torch.cuda.get_device_name()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, mx_driving {mx_driving.__version__}"
    return f"{date.today()}, {name}, {versions}"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="+", help="a folder of transformers/models")
    parser.add_argument("--batch", type=int, action="append", help="pictures of a forward; may be repeated")
    parser.add_argument("--train", type=int, action="append", help="pictures of a training step; may be repeated")
    parser.add_argument("--compile", action="store_true", help='also torch.compile(mode="reduce-overhead") at batch 1')
    parser.add_argument("--variant", choices=VARIANTS, help="this variant alone, in this process")
    parser.add_argument("--csv", type=pathlib.Path)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    options.batch, options.train = options.batch or [1], options.train or []
    return options


def run_variant(name: str, options: argparse.Namespace) -> None:
    """Print a line of JSON for each row."""
    warnings.filterwarnings("ignore")
    torch.set_float32_matmul_precision("high")
    for row in rows_of(build(name, options.variant), options):
        title = models.TITLES.get(name, name)
        print(json.dumps({"model": title, "variant": options.variant, **row, "machine": machine()}), flush=True)


def main() -> None:
    options = parsed()
    if not DRY and not torch.cuda.is_available():
        raise SystemExit("there is no GPU here; --dry-run checks this script without one")
    if options.variant:
        return run_variant(options.model[0], options)
    rows = []
    arguments = [a for n, a in enumerate(sys.argv[1:], 1) if a not in options.model and "--csv" not in (a, sys.argv[n - 1])]
    for name in options.model:
        for variant in VARIANTS[:: 2 if DRY else 1]:
            command = [sys.executable, __file__, name, "--variant", variant, *arguments]
            process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            print(f"{name}, {variant}: status {process.returncode}\n{process.stdout}", flush=True)
            rows += [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
