"""What a GPU would need for the attention operators, from machine code alone: no GPU is asked, and no time is measured.

    python benchmarks/gpu_static.py > benchmarks/results/gpu-static.csv                the kernels' figures
    python benchmarks/gpu_static.py --times > benchmarks/results/gpu-static-times.csv  the least times of workloads

A time has three parts, and the longest is the bound. It is stated twice: if every corner's row is found in the first-level
cache, and if each comes from L2. A measured time below the first, or above twice the second, refutes the model.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import pathlib
import re
import sys
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "tests" / "helpers"))

import machine_code
import torch
import triton
from cases import GEOMETRIC, MULTI_SCALE
from gpu_workloads import GPU_WORKLOADS

from mx_driving._backends.triton import launch
from mx_driving._operator.description import OPERATORS

CHANNELS = 32  # of a head
CORNERS = {MULTI_SCALE: 4, GEOMETRIC: 1}  # rows that a sample reads


class Gpu(NamedTuple):
    """What is assumed of a GPU. The clock is a guess of what it holds under load; the rest is its maker's."""

    name: str
    issued: float  # instructions of a warp or wave per clock, all schedulers together
    clock: float  # GHz
    l2: float  # bytes that L2 gives per clock; a reduction takes twice the time of a read
    memory: float  # TB/s


# A wave of 64 takes a SIMD of CDNA four clocks. L2 of the H200 is taken to be the A100's, 5,120 bytes per clock; that of the
# MI300X is 16 channels of 128 bytes in each of 8 dies.
GPUS = {
    80: Gpu("A100", 108 * 4, 1.4, 5120, 2.0),
    90: Gpu("H200", 132 * 4, 1.7, 5120, 4.8),
    "gfx942": Gpu("MI300X", 304 * 4 / 4, 2.1, 16384, 5.3),
}


class Work(NamedTuple):
    """A workload's sizes."""

    name: str
    operator: str
    rows: int  # batch x queries x heads
    samples: int  # of a row
    keys: int  # rows of value: batch x pixels x heads


def works() -> list[Work]:
    found = []
    for workload in GPU_WORKLOADS:
        if workload.operator in CORNERS:
            value, *_, weights = workload.inputs()
            samples = weights[0, 0, 0].numel()
            assert value.shape[3] == CHANNELS, workload.name
            work = Work(workload.name, workload.operator, weights.numel() // samples, samples, value.numel() // CHANNELS)
            found.append(work)
    return found


class Kernel(NamedTuple):
    """Figures of one kernel, in instructions of a warp for each row and sample."""

    instructions: float
    registers: int
    bytes_per_lane: int
    reductions: float


def _of_nvidia(compiled: Any, reads: int, samples: int) -> tuple[float, int, float]:
    code = machine_code.read_code(compiled)
    (first, last) = max(code.loops, key=lambda loop: loop[1] - loop[0])
    body = code.instructions[first : last + 1]
    inside = sum(bool(re.match(r"@!?U?P\d LDG\.E\.", i)) for i in body)
    return code.executed(reads) / samples, code.registers, sum("RED" in i for i in body) * reads / inside / samples


def _of_amd(compiled: Any, reads: int, samples: int) -> tuple[float, int, float]:
    """The same of AMD's assembly: its longest loop runs until all rows are read."""
    lines, labels = [], {}
    for line in compiled.asm["amdgcn"].split("s_endpgm")[0].splitlines():
        if label := re.match(r"(\.LBB\w+):", line):
            labels[label[1]] = len(lines)
        elif re.match(r"\t[a-z]\w+", line):
            lines.append(line)
    jumps = [(labels[m[1]], i) for i, text in enumerate(lines) if (m := re.search(r"s_c?branch\w*\s+(\.LBB\w+)", text))
             and m[1] in labels]  # fmt: skip
    loops = [(begin, end) for begin, end in jumps if begin < end]
    first, last = max(loops, key=lambda loop: loop[1] - loop[0], default=(0, len(lines)))
    body = lines[first : last + 1]
    inside = sum("buffer_load_dwordx4" in text for text in body) if loops else reads
    rounds, rest = divmod(reads, inside)
    assert rest == 0, f"{reads} reads do not come in rounds of {inside}"
    executed = len(lines) + (rounds - 1) * len(body)
    return (
        executed / samples,
        machine_code.amd_figures(compiled)["registers"],
        sum("atomic" in t for t in body) * rounds / samples,
    )


def kernel(operator: str, target: machine_code.Target, backward: bool) -> Kernel:
    args = machine_code.SIZES[operator]()
    args = (*args[:3], args[3].float(), args[4])  # whole pixels are int64 there, and read like rows
    samples = args[4][0, 0, 0].numel()
    compiled = machine_code.compile_one(operator, lambda: args, torch.float32, target, backward)
    lanes = 32 if isinstance(target, int) else compiled.metadata.warp_size
    rows = lanes * launch.MOST_HELD // CHANNELS  # of a warp: a lane holds four channels
    found = (_of_nvidia if isinstance(target, int) else _of_amd)(compiled, samples * CORNERS[operator], samples)
    return Kernel(found[0] / rows, found[1], 4 * launch.MOST_HELD, found[2] / rows)


def figures() -> list[dict[str, Any]]:
    return [
        {
            "operator": operator,
            "direction": "backward" if backward else "forward",
            "target": f"sm_{target}" if isinstance(target, int) else target,
            "instructions": f"{found.instructions:.1f}",
            "registers": found.registers,
            "bytes per lane": found.bytes_per_lane,
            "reductions": f"{found.reductions:g}",
        }
        for operator in CORNERS
        for backward in (False, True)
        for target in GPUS
        for found in [kernel(operator, target, backward)]
    ]


def _touched(work: Work, backward: bool) -> int:
    """Numbers that memory gives or takes once: value, output, locations, weights; backward, zeros and gradients besides."""
    of_sample = 3 + (len(OPERATORS[work.operator].differentiable) if backward else 0)  # a location's gradient is two numbers
    of_sample -= backward and work.operator == GEOMETRIC
    return CHANNELS * (work.keys * (3 if backward else 1) + work.rows) + work.rows * work.samples * of_sample


def times() -> list[dict[str, Any]]:
    rows, given = [], works()
    for target, gpu in GPUS.items():
        for backward in (False, True):
            kernels = {operator: kernel(operator, target, backward) for operator in CORNERS}
            for work in given:
                found = kernels[work.operator]
                count, clocks = work.rows * work.samples, gpu.clock * 1e9
                issue = count * found.instructions / (gpu.issued * clocks)
                corners = count * CORNERS[work.operator] * 4 * CHANNELS / (gpu.l2 * clocks)
                memory = 4 * _touched(work, backward) / (gpu.memory * 1e12)
                adds = 2 * corners if backward else 0.0  # reductions bypass the first-level cache
                least, most = max(issue, memory, adds), max(issue, memory, adds + corners)
                row = {"workload": work.name, "direction": "backward" if backward else "forward", "GPU": gpu.name}
                parts = {"issue": issue, "memory": memory, "reads from L2": corners, "reductions": adds}
                parts |= {"at least": least, "all from L2": most}
                rows.append(row | {name: f"{1e3 * t:.3f}" for name, t in parts.items()})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", action="store_true")
    options = parser.parse_args()
    by = f"{datetime.date.today()}, Triton {triton.__version__}, python benchmarks/gpu_static.py{' --times' * options.times}"
    rows = [{**row, "made by": by} for row in (times() if options.times else figures())]
    writer = csv.DictWriter(sys.stdout, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


if __name__ == "__main__":
    main()
