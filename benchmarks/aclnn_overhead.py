"""What the two phases of mx_driving.aclnn cost beside the operator's own backward. Run: python benchmarks/aclnn_overhead.py

Each row is the median of runs taken in turn; "one query" shows the cost of the calls themselves.
"""

from __future__ import annotations

import statistics
import time

import torch

import mx_driving  # noqa: F401  registers the operator
from mx_driving import _backends, aclnn

WORKLOADS = {
    # bs, queries, channels, heads, levels, points; every level 60 x 40
    "vendor example large [6, 9680, 32, 8, 4, 4]": ((6, 9680, 32, 8, 4, 4), 7),
    "one query [1, 1, 8, 1, 1, 1]": ((1, 1, 8, 1, 1, 1), 3000),
}


def make(bs, queries, channels, heads, levels, points):
    shapes = torch.tensor([[60, 40]] * levels)
    value = torch.rand(bs, 2400 * levels, heads, channels) * 0.01
    inputs = (
        value,
        shapes,
        torch.arange(levels) * 2400,
        torch.rand(bs, queries, heads, levels, points, 2),
        torch.rand(bs, queries, heads, levels, points) + 1e-5,
    )
    return inputs, torch.rand(bs, queries, heads * channels) * 1e-3


def seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(sizes, runs):
    inputs, grad = make(*sizes)
    outputs = [torch.empty_like(inputs[i]) for i in (0, 3, 4)]
    tensors = (*inputs, grad, *outputs)
    backward = torch.ops.mx_driving.multi_scale_deformable_attn_backward.default
    workspace = torch.empty(1 << 16, dtype=torch.uint8)
    times = {"operator's backward": [], "phase one": [], "phase two and synchronise": []}
    for _ in range(runs):
        times["operator's backward"].append(seconds(lambda: backward(grad, *inputs, [True] * 3)))
        start = time.perf_counter()
        status, size, executor = aclnn.multi_scale_deformable_attention_grad_get_workspace_size(*tensors)
        middle = time.perf_counter()
        aclnn.multi_scale_deformable_attention_grad(workspace, size, executor)
        status = status or aclnn.synchronize()
        times["phase two and synchronise"].append(time.perf_counter() - middle)
        times["phase one"].append(middle - start)
        if status:
            raise SystemExit(aclnn.recent_error())
    return {name: statistics.median(samples) for name, samples in times.items()}


def main():
    print(f"{torch.get_num_threads()} threads, {_backends.native.isa()}, torch {torch.__version__}")
    for name, (sizes, runs) in WORKLOADS.items():
        print(name)
        for what, median in measure(sizes, runs).items():
            print(f"  {what:26} {median * 1e3:10.4f} ms")


if __name__ == "__main__":
    main()
