"""What recording costs a program: mx_driving_portable/record.py at every 100th call, beside the same calls without it.

    MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=68719476736 python benchmarks/recording.py [--calls 200] [--only decoder]

A call is a forward and a backward with all gradients, on one thread. Rounds with and without recording take turns, and a
recorded one ends when all files are written. The cost is the median over rounds of the ratio of neighbours: by the clock; of
the program's own thread, which copies; and of all threads, which counts the one that writes. On a busy machine the clock says
little. "--nan" looks at every result. What a recording takes to begin and to end, once in a program, is a figure of its own.
Without the two variables the times of the calls alone change by more than recording costs, because freed memory goes back to
the system.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from pathlib import Path

import torch

import mx_driving
from mx_driving.measure.workloads import WORKLOADS
from mx_driving_portable import record

CLOCKS = {time.perf_counter: "clock", time.thread_time: "own thread", time.process_time: "all threads"}
WAYS = {"every 100": {"every": 100}, "every 100, --nan": {"every": 100, "nan": True}}


def seconds(workload, calls, options, began_and_ended=None):
    """By each clock, with what it takes to write what the calls left behind, but not to begin and to end."""
    row = workload.row
    args = [t.detach().requires_grad_(i in row.differentiable) for i, t in enumerate(workload.inputs())]
    wanted = [args[i] for i in row.differentiable]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(None):
        start = time.perf_counter()
        recorder = record.start(Path(folder) / "calls", megabytes=1e5, **options) if options else None
        began = [clock() for clock in CLOCKS]
        for _ in range(calls):
            output = getattr(mx_driving, workload.operator)(*args)
            torch.autograd.grad(output, wanted, torch.ones_like(output))
        while recorder and recorder.writer.waiting:
            time.sleep(1e-3)
        ended = [clock() for clock in CLOCKS]
        if recorder:
            recorder.stop()
            began_and_ended.append(time.perf_counter() - start - ended[0] + began[0])
        return [end - begin for begin, end in zip(began, ended, strict=True)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for workload in WORKLOADS:
        if workload.row.bare or not workload.row.samples or given.only not in workload.name:
            continue
        seconds(workload, 2, None)
        for name, options in WAYS.items():
            once: list[float] = []
            pairs = [
                (seconds(workload, given.calls, None), seconds(workload, given.calls, options, once))
                for _ in range(given.rounds)
            ]
            costs = [statistics.median(recorded[i] / alone[i] for alone, recorded in pairs) - 1 for i in range(len(CLOCKS))]
            shown = ", ".join(f"{name} {cost:+.1%}" for name, cost in zip(CLOCKS.values(), costs, strict=True))
            each = statistics.median(alone[0] for alone, _ in pairs) / given.calls * 1e3
            fixed = statistics.median(once) * 1e3
            print(f"{workload.name}, {name}: {shown}; {each:.2f} ms a call; once {fixed:.0f} ms", flush=True)


if __name__ == "__main__":
    main()
