"""Compile the GPU kernels for other GPUs, through the operators' own launches, and read the machine code.

    python benchmarks/machine_code.py > figures.json     every figure; the exit status says whether all gates are met

A stand-in for the driver reports the GPU, and `JITFunction.run` stops after compilation. A target is a number (NVIDIA's
sm_<n>) or AMD's name. The figures depend on the compiler, so constraints.txt pins Triton.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "tests" / "helpers"))

import cases
import logits_cases
import torch
import triton
from cases import (
    AGGREGATION,
    AGGREGATION_LOGITS,
    DIFFERENTIABLE,
    GEOMETRIC,
    GEOMETRIC_LOGITS,
    MULTI_SCALE,
    MULTI_SCALE_LOGITS,
    WITH_LOGITS,
)
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import get_cache_manager
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from mx_driving import _backends

TARGETS = (80, 86, 90, 100, 120)
# The most warps and programs that a multiprocessor holds: NVIDIA's table of compute capabilities.
RESIDENT = {80: (64, 32), 86: (48, 16), 90: (64, 32), 100: (64, 32), 120: (48, 24)}
AMD = ("gfx942", "gfx950", "gfx1100")
Target = int | str
_TOOLS = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class _Driver:
    """The part of Triton's driver that compilation needs."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        if isinstance(self.target, int):
            return GPUTarget("cuda", self.target, 32)
        return GPUTarget("hip", self.target, 64 if self.target.startswith("gfx9") else 32)

    def get_current_device(self) -> Target:
        return self.target

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def compiling(target: Target) -> Iterator[list[Any]]:
    """Make launches inside the block only compile. Yield a list that gets the kernels in the order of the launches."""
    kernels: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernels.append(run(self, *args, grid=grid, warmup=True, **options))

    driver.set_active(_Driver(target))  # pyright: ignore[reportArgumentType]
    JITFunction.run = compile_only
    torch.version.hip = None if isinstance(target, int) else "compiling"
    try:
        yield kernels
    finally:
        JITFunction.run, torch.version.hip = run, None


def call(operator: str, args: tuple[torch.Tensor, ...], backward: bool, mask: list[bool] | None = None) -> None:
    if backward:
        grad = cases.grad_for(operator, args).to(args[0].dtype)
        _backends.triton.kernel(operator, True)(grad, *args, mask or [True] * len(DIFFERENTIABLE[operator]))
    else:
        _backends.triton.kernel(operator, False)(*args)


class Code(NamedTuple):
    """Figures of the machine code of one kernel."""

    registers: int
    stack: int
    warps: int
    shared: int
    instructions: list[str]
    loops: list[tuple[int, int]]  # first and last instruction
    target: int

    def count(self, pattern: str) -> int:
        return sum(bool(re.search(pattern, i)) for i in self.instructions)

    @property
    def occupancy(self) -> float:
        """Return the share of a multiprocessor's warps that can be resident, given registers and the limit of programs."""
        per_warp = 32 * (-(-self.registers // 8) * 8)
        most_warps, most_programs = RESIDENT[self.target]
        programs = min(most_programs, 65536 // (per_warp * self.warps))
        return min(1.0, programs * self.warps / most_warps)

    def executed(self, reads: int) -> int:
        """Return the instructions that a warp executes if its only loop makes `reads` reads of value rows.

        Code outside the loop counts in full, even if a branch may skip it.
        """
        ((first, last),) = self.loops
        body = self.instructions[first : last + 1]
        inside = sum(bool(re.match(r"@!?U?P\d LDG\.E\.", i)) for i in body)  # only reads of value rows have a mask
        rounds, rest = divmod(reads, inside)
        assert rest == 0, f"{reads} reads do not come in rounds of {inside}"
        return len(self.instructions) + (rounds - 1) * len(body)


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run([str(_TOOLS / name), *arguments], capture_output=True, text=True, check=True).stdout


def _disassembled(path: str) -> str:
    """Return the listing of a kernel. Cache it with Triton's own files, because it takes as long as the compilation. Skip the
    analysis of data flow, which takes a third of the time and changes no line."""
    kept = get_cache_manager(hashlib.sha256(triton.__version__.encode() + pathlib.Path(path).read_bytes()).hexdigest())
    file = kept.get_file("listing.sass") or kept.put(_tool("nvdisasm", "-c", "-ndf", path), "listing.sass", binary=False)
    return pathlib.Path(file).read_text()


def read_code(kernel: Any) -> Code:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return read_cubin(file.name, kernel.metadata.num_warps, target=kernel.metadata.target.arch)


def read_cubin(path: str, warps: int, function: str = "", target: int = 90) -> Code:
    """Read the only kernel of a file whose name contains `function`."""
    usage, listing = _tool("cuobjdump", "-res-usage", path), _disassembled(path)
    registers, stack, shared = map(
        int, re.search(rf"Function \S*{function}\S*:\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", usage).groups()
    )  # pyright: ignore
    (listing,) = re.findall(rf"\n\.text\.\S*{function}\S*:\n(.*?)(?=\n//-|\Z)", listing, re.DOTALL)
    instructions, labels = [], {}
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            instructions.append(instruction[1].strip())
    jumps = [(labels.get(m[1], len(instructions)), i) for i, text in enumerate(instructions) if (m := _jump(text))]
    end = min(target for target, i in jumps if target == i)  # after the last EXIT: a jump to itself, and padding
    loops = [(target, i) for target, i in jumps if target < i < end]
    return Code(registers, stack, warps, shared, instructions[:end], loops, target)


def _jump(instruction: str) -> re.Match[str] | None:
    return re.search(r"\bBRA\b.*?`\((\.L_x_\d+)\)", instruction)


# Sizes of models: heads, channels, levels and points; for Sparse4D cameras, scales and groups; for MapTR its points.
SIZES = {
    MULTI_SCALE: lambda: cases.multi_scale(2, 40, 32, 8, [(4, 4)] * 4, 4),
    AGGREGATION: lambda: cases.aggregation(1, 3, 13, 256, 8, [[(4, 4)] * 4] * 6),
    GEOMETRIC: lambda: cases.geometric(2, 40, 32, 8, [(4, 4)], 8),
    MULTI_SCALE_LOGITS: lambda: logits_cases.multi_scale(2, 40, 32, 8, [(5, 5)] * 4, 4),
    GEOMETRIC_LOGITS: lambda: logits_cases.geometric(2, 40, 32, 8, [(5, 5)], (2, 4)),
    AGGREGATION_LOGITS: lambda: logits_cases.aggregation(1, 3, 13, 256, 8, [[(4, 4)] * 4] * 6),
}
_POINTS = {MULTI_SCALE: 16, MULTI_SCALE_LOGITS: 16, GEOMETRIC: 8, GEOMETRIC_LOGITS: 8}  # points of each output row
_PER_ROW, _PER_POINT = "instructions per row", "instructions per row and point"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def compile_one(operator: str, make: Callable[[], tuple], dtype: torch.dtype, target: Target, backward: bool) -> Any:
    """Return the kernel that reads value. Linear layers give offsets and logits in the dtype of value."""
    args = cases.cast(make(), dtype if operator in WITH_LOGITS else torch.float32)
    with compiling(target) as kernels:
        call(operator, (args[0].to(dtype), *args[1:]), backward)
    return kernels[operator == AGGREGATION_LOGITS]


def figures(code: Code) -> dict[str, Any]:
    return {
        "registers": code.registers,
        "stack": code.stack,
        "spills": code.count(r"\b(LDL|STL)\b"),
        "occupancy": code.occupancy,
        "warps": code.warps,
        "instructions": len(code.instructions),
        "reads of 16 bytes": code.count(r"LDG\.E\.128"),
        "reads of 8 bytes": code.count(r"LDG\.E\.64"),
        "single reads of rows": code.count(r"^@!?U?P\d LDG\.E R|^@!?U?P\d LDG\.E\.U16"),
        "vector reductions": code.count(r"REDG.*F32x4"),
        "reductions": code.count(r"\bREDG?\b"),
        "atomics that return": code.count(r"\bATOMG?\b"),
        "fences": code.count(r"MEMBAR|CCTL|ERRBAR"),
        "barriers": code.count(r"BAR\.SYNC"),
    }


def _rows_per_warp(dtype: torch.dtype, backward: bool) -> int:
    from mx_driving._backends.triton import launch

    lane = 16 // dtype.itemsize
    tile = launch.tile(32, min(lane, launch.MOST_HELD), 1, 32) if backward else launch.tile(32, lane, 4, 32)
    return tile.rows // tile.warps


def rows() -> Iterator[dict[str, Any]]:
    """Yield the figures of all sampling operators. float16 has rows for one target only: its code is like bfloat16's."""
    for target in TARGETS:
        for operator, make in SIZES.items():
            for dtype in DTYPES if target == 90 else (torch.float32, torch.bfloat16):
                for backward in (False, True):
                    code = read_code(compile_one(operator, make, dtype, target, backward))
                    row = {"operator": operator, "target": target, "dtype": str(dtype).removeprefix("torch.")}
                    row |= {"direction": "backward" if backward else "forward", **figures(code)}
                    if points := _POINTS.get(operator):
                        # a thread reads a piece of a row at each corner; a geometric sample has one corner
                        corners = 1 if operator in (GEOMETRIC, GEOMETRIC_LOGITS) else 4
                        each = code.executed(points * corners) / _rows_per_warp(dtype, backward)
                        row[_PER_POINT if backward else _PER_ROW] = each / points if backward else each
                    yield row


def amd_figures(kernel: Any) -> dict[str, Any]:
    """Return figures of an AMD kernel's assembly. CDNA's dwordx4 is RDNA's b128."""
    text = kernel.asm["amdgcn"]
    instructions = re.findall(r"^\t([a-z]\w+)", text, re.MULTILINE)

    def fact(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", text)[1])  # pyright: ignore[reportOptionalSubscript]

    def count(pattern: str) -> int:
        return sum(bool(re.fullmatch(pattern, i)) for i in instructions)

    return {
        "registers": fact("vgpr_count"),
        "scratch": fact("private_segment_fixed_size"),
        "spills": fact("vgpr_spill_count") + fact("sgpr_spill_count"),
        "warps": kernel.metadata.num_warps,
        "lanes": kernel.metadata.warp_size,
        "instructions": len(instructions),
        "reads of 16 bytes": count(r"(buffer|global)_load_(dwordx4|b128)"),
        "reads of 8 bytes": count(r"(buffer|global)_load_(dwordx2|b64)"),
        "additions": count(r"(buffer|global)_atomic_add_f32"),
        "compare and swap": count(r"\w+_atomic_cmpswap\w*"),
    }


def amd_rows() -> Iterator[dict[str, Any]]:
    """Yield the figures of every operator in float32 for AMD's targets, and in bfloat16 for the first target."""
    for target in AMD:
        for operator, make in SIZES.items():
            for dtype in (torch.float32, torch.bfloat16)[: 2 if target == AMD[0] else 1]:
                for backward in (False, True):
                    row = {"operator": operator, "target": target, "dtype": str(dtype).removeprefix("torch.")}
                    row |= {"direction": "backward" if backward else "forward"}
                    yield row | amd_figures(compile_one(operator, make, dtype, target, backward))


def odd_rows() -> Iterator[dict[str, Any]]:
    """Yield the figures for other channel counts, for which only stack and spills matter."""
    for channels in (5, 37, 64, 128, 256):
        makes = {
            MULTI_SCALE: lambda c=channels: cases.multi_scale(1, 40, c, 2, [(4, 4)] * 2, 3),
            GEOMETRIC: lambda c=channels: cases.geometric(1, 40, c, 2, [(4, 4)] * 2, 3),
            AGGREGATION: lambda c=channels: cases.aggregation(1, 3, 2, c, 1 if c % 2 else 4, [[(4, 4)] * 2] * 2),
        }
        for operator, make in makes.items():
            for backward in (False, True):
                code = read_code(compile_one(operator, make, torch.float32, 90, backward))
                yield {"operator": operator, "target": 90, "channels": channels, "backward": backward, **figures(code)}


def sample_rows() -> Iterator[dict[str, Any]]:
    """Yield the figures of the first and the last kernel of deformable_aggregation_with_logits."""
    for target in (*TARGETS, *AMD):
        for dtype in (torch.float32, torch.bfloat16):
            args = cases.cast(SIZES[AGGREGATION_LOGITS](), dtype)
            with compiling(target) as kernels:
                call(AGGREGATION_LOGITS, args, True)
            for kernel, direction in ((kernels[0], "before"), (kernels[2], "after")):
                row = {"operator": AGGREGATION_LOGITS, "target": target, "dtype": str(dtype).removeprefix("torch.")}
                code = amd_figures(kernel) if target in AMD else figures(read_code(kernel))
                yield row | {"direction": direction} | code


def pool(n: int, rows: int, depths: int, cells: int, channels: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the arguments of a call of bev_pool_v3."""
    ranks = (torch.zeros(n, dtype=torch.int32) for _ in range(3))
    return torch.ones(rows, channels, dtype=dtype), torch.ones(depths, dtype=dtype), *ranks, 1, 1, 1, cells


def pool_kernels(args: tuple[Any, ...], target: Target) -> dict[str, Any]:
    """Return the kernels of bev_pool_v3, forward and backward: the walks, and the sorted ones of deterministic mode."""
    backward, cotangent = _backends.triton.kernel("bev_pool_v3", True), torch.ones(1, args[0].shape[1], 1, 1, args[-1])
    found: dict[str, Any] = {}
    for way in ("walk", "sorted"):
        torch.use_deterministic_algorithms(way == "sorted")
        with compiling(target) as kernels:
            _backends.triton.kernel("bev_pool_v3", False)(*args)
            backward(cotangent.to(args[0].dtype), *args, [True, True])
        found |= dict(zip((f"output, {way}", "transposed", "transposed", f"gradients, {way}"), kernels, strict=True))
    torch.use_deterministic_algorithms(False)
    return found


def pool_rows() -> Iterator[dict[str, Any]]:
    """Yield the figures of bev_pool_v3: BEVDet's channels for all targets, other counts for one target."""
    from mx_driving._backends.triton import bev_pool_v3

    for target in (*TARGETS, *AMD):
        for dtype in DTYPES if target == 90 else (torch.float32, torch.bfloat16):
            for channels in (64, 80, 5, 37, 256) if target == 90 and dtype == torch.float32 else (80,):
                for name, kernel in pool_kernels(pool(40, 6, 30, 12, channels, dtype), target).items():
                    row = {"target": target, "dtype": str(dtype).removeprefix("torch."), "channels": channels, "of": name}
                    code = None if target in AMD else read_code(kernel)
                    row |= figures(code) if code else amd_figures(kernel)
                    if code and name.endswith("walk"):
                        ((first, last),) = code.loops
                        rows = bev_pool_v3._options(channels, dtype.itemsize, 32, True)["ROWS"]
                        row["instructions per point"] = (last + 1 - first) / rows
                    yield row


def missed_gates(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return a sentence for each figure that misses its gate."""
    gates = [gate for row in found["models"] + found["odd"] for gate in _nvidia_gates(row)]
    gates += [gate for row in found["models"] for gate in _model_gates(row)]
    gates += _logits_gates(found["models"])
    gates += [gate for row in found["amd"] for gate in _amd_gates(row)]
    gates += [gate for row in found["samples"] for gate in _sample_gates(row)]
    gates += [gate for row in found["pool"] for gate in _pool_gates(row)]
    return [f"{sentence}: {row}" for met, sentence, row in gates if not met]


Gate = tuple[bool, str, dict[str, Any]]


def _nvidia_gates(row: dict[str, Any]) -> Iterator[Gate]:
    yield row["spills"] == row["stack"] == 0, "stack and spills must be 0", row
    most_warps, most_programs = RESIDENT[row["target"]]
    # A backward program has one warp, and a multiprocessor of sm_86 holds 16 programs.
    least = min(0.5, most_programs * row["warps"] / most_warps)
    yield row["occupancy"] >= least, "registers must allow half of the occupancy", row


def _model_gates(row: dict[str, Any]) -> Iterator[Gate]:
    """Yield the gates of the sampling operators at the models' sizes.

    Kernels read rows 16 bytes at once, except 16-bit rows in the backward: see launch.MOST_HELD. The classic CUDA kernel
    executes about 1,490 instructions a row forward, and 272 a row and point backward.
    """
    backward = row["direction"] == "backward"
    narrow = backward and row["dtype"] != "float32"
    yield row["reads of 8 bytes" if narrow else "reads of 16 bytes"] >= 4, "rows must be read 16 bytes at once", row
    yield narrow or row["single reads of rows"] == 0, "no element of a row may be read alone", row
    yield row["fences"] == row["atomics that return"] == 0, "reductions must need no fence", row
    yield bool(row["reductions"]) == backward, "reductions must add the gradient of value", row
    yield row["target"] < 90 or row["vector reductions"] == row["reductions"], "reductions must be vectors", row
    if row["operator"] == MULTI_SCALE and row["dtype"] == "float32":
        count, most = (_PER_POINT, 60) if backward else (_PER_ROW, 400)
        yield row[count] <= most, f"{count} must be at most {most}", row


def _logits_gates(rows: list[dict[str, Any]]) -> Iterator[Gate]:
    """Compare instructions with those of the operator without logits. A geometric sample has one corner, so the work for its
    weight is a larger share, above all on sm_120, where the operator without logits needs the fewest instructions."""
    keys = "operator", "target", "dtype", "direction"
    bare = {tuple(r[key] for key in keys): r for r in rows}
    for row in (row for row in rows if row["operator"] in WITH_LOGITS):
        operator, target, dtype, direction = (row[key] for key in keys)
        count = _PER_POINT if direction == "backward" else _PER_ROW
        if operator == MULTI_SCALE_LOGITS:
            most = 1.1 if direction == "backward" or (target, dtype) == (90, "float32") else 1.15
        elif operator == AGGREGATION_LOGITS:
            count, most = "instructions", 1.15
        else:
            most = 1.55 if target == 120 else 1.2 if direction == "backward" or dtype == "float32" else 1.3
        least = bare[operator.removesuffix("_with_logits"), target, dtype, direction][count]
        yield row[count] <= most * least, f"{count} must be at most {most} of {least}", row


def _amd_gates(row: dict[str, Any]) -> Iterator[Gate]:
    """Yield AMD's gates. 256 channels are four per lane, 8 bytes in 16 bits. Triton 3.6 adds by compare-and-swap on RDNA."""
    backward, swaps = row["direction"] == "backward", not row["target"].startswith("gfx9")
    narrow = row["dtype"] != "float32" and (backward or row["operator"] == AGGREGATION)
    yield row["scratch"] == row["spills"] == 0, "scratch and spills must be 0", row
    yield row["registers"] <= 128, "registers must allow half of the occupancy", row
    yield row["reads of 8 bytes" if narrow else "reads of 16 bytes"] >= 4, "rows must be read 16 bytes at once", row
    yield bool(row["additions"]) == (backward and not swaps), "the memory must add gradients", row
    yield bool(row["compare and swap"]) == (backward and swaps), "only RDNA may compare and swap", row


def _sample_gates(row: dict[str, Any]) -> Iterator[Gate]:
    yield row.get("stack", row.get("scratch")) == row["spills"] == 0, "stack and spills must be 0", row
    yield row["registers"] <= (128 if row["target"] in AMD else 64), "registers must allow half of the occupancy", row
    yield row["reads of 16 bytes"] + row["reads of 8 bytes"] >= 2, "logits must be read many at once", row


def _pool_gates(row: dict[str, Any]) -> Iterator[Gate]:
    """Yield the gates of bev_pool_v3. Only walks add to addresses that other programs write."""
    adds, swaps = row["of"].endswith("walk"), str(row["target"]).startswith("gfx1")
    yield row.get("stack", row.get("scratch")) == row["spills"] == 0, "stack and spills must be 0", row
    yield row["registers"] <= 128, "registers must be at most 128", row
    yield row.get("occupancy", 1) >= 0.25, "registers must allow a quarter of the occupancy", row
    if row["target"] in AMD:
        yield bool(row["additions"]) == (adds and not swaps), "only a walk may add", row
        yield bool(row["compare and swap"]) == (adds and swaps), "only RDNA may compare and swap", row
    else:
        yield bool(row["reductions"]) == adds, "only a walk may add", row
        yield row["fences"] == row["atomics that return"] == 0, "reductions must need no fence", row
        if adds and row["target"] >= 90 and row["channels"] % 4 == 0:
            yield row["vector reductions"] == row["reductions"] - row["of"].startswith("gradients"), "sums must be vectors", row
    if row["channels"] % 8 == 0 and row["of"] != "transposed":
        yield row["reads of 16 bytes" if row["dtype"] == "float32" else "reads of 8 bytes"] >= 1, "rows must be read whole", row


def main() -> None:
    found = {"models": list(rows()), "odd": list(odd_rows()), "amd": list(amd_rows())}
    found |= {"samples": list(sample_rows()), "pool": list(pool_rows())}
    json.dump(found, sys.stdout, indent=1)
    missed = missed_gates(found)
    print("\n".join(missed) or "every gate is met", file=sys.stderr)
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
