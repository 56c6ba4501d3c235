"""Our GPU kernels beside others' of the same operator, by their machine code for sm_90: no GPU is asked.

    python benchmarks/gpu_peers.py deformops-3.0.1-py3-none-any.whl mmcv-2.2.0.tar.gz > benchmarks/results/gpu-peers.csv

`pip download --no-deps --only-binary :all: --python-version 3.12 deformops==3.0.1` fetches the first file. The second is the
sdist of mmcv on PyPI. It holds the classic CUDA kernel of Deformable-DETR, which most extensions copy, and needs nvcc. Neither
has to be installed.
"""

from __future__ import annotations

import csv
import datetime
import importlib
import itertools
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import types
import zipfile
from typing import Annotated, Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "tests" / "helpers"))

import cases
import machine_code
import torch
import triton
import typer
from cases import MULTI_SCALE

from mx_driving._cli_support.problems import Problem, in_a_sentence

TARGET = 90
LEVELS, SAMPLES = 4, 16  # of machine_code.SIZES

# What the classic kernels need of PyTorch's headers, and the two that are launched for 32 channels.
CLASSIC = """
#include <cstdint>
#include "{header}"
using F = float;
using I = const int64_t*;
template __global__ void ms_deformable_im2col_gpu_kernel<F>(
    int, const F*, I, I, const F*, const F*, int, int, int, int, int, int, int, F*);
template __global__ void ms_deformable_col2im_gpu_kernel_shm_blocksize_aware_reduce_v1<F, 32>(
    int, const F*, const F*, I, I, const F*, const F*, int, int, int, int, int, int, int, F*, F*, F*);
"""


class Kernel(NamedTuple):
    """A kernel's machine code, and what is known of its work."""

    code: machine_code.Code
    rows: int  # of value that a warp samples for
    read: str  # what the reads of its innermost loop look like
    reads: int  # of these for each sample


def ours() -> tuple[Kernel, ...]:
    found = []
    for backward in (False, True):
        compiled = machine_code.compile_one(MULTI_SCALE, machine_code.SIZES[MULTI_SCALE], torch.float32, TARGET, backward)
        found.append(Kernel(machine_code.read_code(compiled), 4, r"^@!?U?P\d LDG\.E\.128", 4))
    return tuple(found)


def deformops(wheel: pathlib.Path, folder: pathlib.Path) -> tuple[Kernel, ...]:
    """The kernels that its registry takes on Hopper, by their own launches: 32 queries and 4 warps to a program."""
    zipfile.ZipFile(wheel).extractall(folder)
    sys.path.insert(0, str(folder))
    for name in ("deformops.backends", "deformops.backends.triton"):  # theirs import every backend, which needs Python 3.12
        sys.modules[name] = package = types.ModuleType(name)
        package.__path__ = [str(folder / name.replace(".", "/"))]
    launch = importlib.import_module("deformops.backends.triton._launch")
    kernels = importlib.import_module("deformops.backends.triton._kernels.msda_query_tiled")
    value, shapes, starts, locations, weights = cases.cast(machine_code.SIZES[MULTI_SCALE](), torch.float32)
    grad = torch.ones(*locations.shape[:3], value.shape[3])
    with machine_code.compiling(TARGET) as compiled:
        launch.query_tiled_forward_launch(value, shapes, starts, locations, weights, 0)
        kernels.atomic_backward_launch(grad, value, shapes, starts, locations, weights)
    return tuple(Kernel(machine_code.read_code(kernel), 8, r"LDG\.E\.128", 8) for kernel in compiled)


def classic(sdist: pathlib.Path, folder: pathlib.Path) -> tuple[Kernel, ...]:
    """A lane has one channel, so a warp one row; three more reads are a sample's location and weight."""
    with tarfile.open(sdist) as archive:
        headers = [m for m in archive.getmembers() if "/csrc/common/cuda/" in m.name and m.name.endswith((".cuh", ".hpp"))]
        archive.extractall(folder, headers, filter="data")
    (header,) = folder.rglob("ms_deform_attn_cuda_kernel.cuh")
    (header.parent / "pytorch_cuda_helper.hpp").write_text("")
    source, cubin = folder / "classic.cu", folder / "classic.cubin"
    source.write_text(CLASSIC.format(header=header))
    subprocess.run(["nvcc", f"-arch=sm_{TARGET}", "-O3", "-cubin", str(source), "-o", str(cubin)], check=True)
    forward = machine_code.read_cubin(str(cubin), 16, "_im2col_gpu_kernel")
    backward = machine_code.read_cubin(str(cubin), 1, "_col2im_gpu_kernel")
    return tuple(Kernel(code, 1, r"LDG\.E R", 7) for code in (forward, backward))


def figures(kernel: Kernel) -> dict[str, Any]:
    """Loops that read lie in one another: the innermost runs over points, the next, if there is one, over levels.

    Code in a loop counts in full, even if a branch may skip it; other code counts once.
    """
    code = kernel.code

    def reads(loop: tuple[int, int]) -> int:
        return sum(bool(re.search(kernel.read, i)) for i in code.instructions[loop[0] : loop[1] + 1])

    loops = sorted(filter(reads, code.loops), key=lambda loop: loop[1] - loop[0])
    assert all(a[0] >= b[0] and a[1] <= b[1] for a, b in itertools.pairwise(loops)), loops
    at_once, rest = divmod(reads(loops[0]), kernel.reads)
    assert rest == 0, f"{reads(loops[0])} reads in the innermost loop, and {kernel.reads} for a sample"
    body = code.instructions[loops[0][0] : loops[0][1] + 1]
    executed = len(code.instructions) + (SAMPLES // at_once - 1) * len(body)
    if len(loops) > 1:
        executed += (LEVELS - 1) * (loops[1][1] - loops[1][0] + 1 - len(body))
    each = SAMPLES * kernel.rows
    return {
        "instructions": f"{executed / each:.1f}",
        "registers": code.registers,
        "occupancy": f"{code.occupancy:.2f}",
        "bytes per lane": max(int(m[1] or 32) for i in body if (m := re.search(r"LDG\.E(?:\.(64|128))?", i))) // 8,
        "reductions": f"{sum('RED' in i for i in body) / at_once / kernel.rows:g}",
        "barriers": f"{sum('BAR.SYNC' in i for i in body) / at_once / kernel.rows:g}",
        "spills": code.count(r"\b(LDL|STL)\b"),
    }


def main(
    wheel: Annotated[pathlib.Path, typer.Argument(help="deformops' wheel.", exists=True)],
    sdist: Annotated[pathlib.Path, typer.Argument(help="mmcv's sdist.", exists=True)],
) -> None:
    """One warp's instructions for each row and sample, and what else its machine code tells."""
    if not shutil.which("nvcc"):
        raise Problem("nvcc, of the CUDA toolkit, must be on PATH; got none")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        found = {
            "mx_driving": ours(),
            wheel.name.split("-py3")[0].replace("-", " "): deformops(wheel, folder),
            f"classic CUDA kernel, of {sdist.name.removesuffix('.tar.gz').replace('-', ' ')}": classic(sdist, folder),
        }
    by = f"{datetime.date.today()}, Triton {triton.__version__}, nvcc {_nvcc()}, python benchmarks/gpu_peers.py"
    rows = [
        {"direction": direction, "kernel": name, **figures(kernel), "made by": by}
        for i, direction in enumerate(("forward", "backward"))
        for name, kernels in found.items()
        for kernel in [kernels[i]]
    ]
    writer = csv.DictWriter(sys.stdout, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def _nvcc() -> str:
    text = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    return re.findall(r"release (\S+),", text)[0]


if __name__ == "__main__":
    with in_a_sentence("gpu_peers.py"):
        typer.run(main)
