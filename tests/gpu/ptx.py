"""Execute the PTX of Triton's kernels in numpy, every lane of every program, where there is no GPU.

`triton.runtime.driver.set_active(Driver(90))` compiles kernels for sm_90 and runs their launches here, on tensors of
the CPU. A launch fails with a Fault if an access is misaligned or lies outside every tensor, if two threads store to one
address, if a kernel reads what it has written, if a warp reaches a shuffle in part, or if a program waits at a barrier for
ever. Registers that no instruction has written hold NaN. ptxas and its contraction of multiplications and additions, caches,
time and races in shared memory are not modelled.
"""

from __future__ import annotations

import ctypes
import functools
import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from ptx_operations import UNSIGNED, Array, Fault, decode, dtype_of, encode, operation
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import get_cache_manager

WARP = 32
_MOST_THREADS = 1 << 19  # of programs that run together
_EVERY_LANE = slice(None)
_REGISTERS = {"p": np.bool_, "rs": np.uint16, "r": np.uint32, "rd": np.uint64}
_STORED, _ADDED = 1, 2  # marks of a byte


# Parsing


class Instruction(NamedTuple):
    predicate: str  # a register, or ""
    negated: bool
    name: str  # the opcode up to the first dot
    opcode: str
    operands: tuple[str, ...]


class Kernel(NamedTuple):
    threads: int
    parameters: list[tuple[str, str]]  # type and name
    instructions: list[Instruction]
    labels: dict[str, int]


@functools.lru_cache(maxsize=256)
def parse(ptx: str) -> Kernel:
    head, body = re.sub(r"//[^\n]*", "", ptx[ptx.index(".visible .entry") :]).split("{", 1)
    instructions, labels = [], {}
    for line in map(str.strip, body.split(".section")[0].split("\n")):
        if label := re.fullmatch(r"(\$\w+):", line):
            labels[label[1]] = len(instructions)
        elif not line.startswith("."):
            instructions += [_parse_instruction(s) for s in map(str.strip, line.split(";")) if s not in ("", "{", "}")]
    parameters = re.findall(r"\.param \.(\w+)(?: [^,)]*?)? (\w+_param_\d+)", head)
    return Kernel(int(re.findall(r"\.(?:req|max)ntid (\d+)", head)[0]), parameters, instructions, labels)


def _parse_instruction(text: str) -> Instruction:
    if not (parts := re.fullmatch(r"(?:@(!?)(%p\d+)\s+)?(([a-z]\w*)[\w.:]*)\s*(.*)", text)):
        raise Fault(f"{text!r} is no instruction")
    operands = re.findall(r"[\[{][^\]}]*[\]}]|[^,\s]+", parts[5])
    return Instruction(parts[2] or "", parts[1] == "!", parts[4], parts[3], tuple(operands))


@functools.cache
def _literal(text: str, size: int) -> Any:
    """The bits of a constant, in an unsigned integer of `size` bytes."""
    number = int(text[2:], 16) if text[:2] in ("0f", "0d") else 0 if text == "global_smem" else int(text, 0)
    return UNSIGNED[size](number & ((1 << 8 * size) - 1))


def _names(operand: str) -> list[str]:
    return [name.strip() for name in operand.strip("{} ").split(",")]


# Memory


class Buffer:
    """A tensor from its first to its last element, and for each byte whether the kernel stored it or added to it."""

    def __init__(self, name: str, t: torch.Tensor) -> None:
        extent = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) + 1
        self.name, self.first, self.end = name, t.data_ptr(), t.data_ptr() + extent * t.element_size()
        self.base = self.first // 16 * 16  # views of every width begin at a multiple of it
        padded = -(-(self.end - self.base) // 16) * 16
        self.content = np.frombuffer((ctypes.c_uint8 * padded).from_address(self.base), np.uint8)
        self.marks = np.zeros(padded, np.uint8)


class Memory:
    def __init__(self, arguments: dict[str, Any]) -> None:
        tensors = [(name, a) for name, a in arguments.items() if isinstance(a, torch.Tensor)]
        self.buffers = [Buffer(name, t) for name, t in tensors if t.numel()]

    def find(self, addresses: Array, width: int, count: int) -> tuple[str, Array, Array, Array]:
        """The name of the tensor that all addresses lie in, views of its content and marks, and indices [threads, count]."""
        first, last, size = int(addresses.min()), int(addresses.max()), width * count
        if (addresses % size).any():
            raise Fault(f"an access to {size} bytes is misaligned")
        for buffer in self.buffers:
            if buffer.first <= first and last + size <= buffer.end:
                index = ((addresses - buffer.base) // width)[:, None] + np.arange(count)
                return buffer.name, buffer.content.view(UNSIGNED[width]), buffer.marks.view(UNSIGNED[width]), index
        tensors = ", ".join(f"{b.name} {b.first:#x}..{b.end:#x}" for b in self.buffers)
        raise Fault(f"an access to {size} bytes at {first:#x} to {last:#x} lies in no tensor: {tensors}")

    def load(self, addresses: Array, width: int, count: int) -> Array:
        name, content, marks, index = self.find(addresses, width, count)
        if marks[index].any():
            raise Fault(f"reads what it has written in {name}")
        return content[index]

    def store(self, addresses: Array, values: Array) -> None:
        name, content, marks, index = self.find(addresses, values.itemsize, values.shape[1])
        if marks[index].any() or len(np.unique(index)) != index.size:
            raise Fault(f"stores twice to one address of {name}")
        marks[index] = _STORED
        content[index] = values

    def add(self, addresses: Array, values: Array) -> None:
        name, content, marks, index = self.find(addresses, 4, values.shape[1])
        if (marks[index] == _STORED).any():
            raise Fault(f"adds to what it has stored in {name}")
        marks[index] = _ADDED
        np.add.at(content.view(np.float32), index, values)


class Machine:
    """Programs `first` to `last` of a launch. Threads at the lowest instruction run first, so that branches meet again."""

    def __init__(self, kernel: Kernel, first: int, last: int, values: dict[str, Any], memory: Memory, shared: int) -> None:
        self.kernel, self.values, self.memory, self.shared_size = kernel, values, memory, -(-shared // 16) * 16
        self.count = (last - first) * kernel.threads
        self.program = np.repeat(np.arange(last - first), kernel.threads)
        self.registers = {"%tid.x": np.tile(np.arange(kernel.threads, dtype=np.uint32), last - first)}
        self.registers["%ctaid.x"] = (self.program + first).astype(np.uint32)
        self.shared = np.zeros((last - first) * self.shared_size, np.uint8)
        self.position, self.end = np.zeros(self.count, np.int32), len(kernel.instructions)
        self.blocked = np.zeros(self.count, np.bool_)
        self.lane_instructions = 0

    def run(self) -> None:
        while (ready := (self.position < self.end) & ~self.blocked).any():
            at = self.position[ready].min()
            active = ready & (self.position == at)
            stop = self.position[ready & ~active].min(initial=self.end)
            self.run_until(int(at), int(stop), _EVERY_LANE if active.all() else np.flatnonzero(active))
        if self.blocked.any():
            raise Fault("waits at a barrier that not all threads of a program reach")

    def run_until(self, at: int, stop: int, lanes: Any) -> None:
        """Run `lanes` from `at` to a jump, or to the instruction where other threads wait."""
        while at < stop:
            instruction = self.kernel.instructions[at]
            self.lane_instructions += len(self.program[lanes])
            chosen = lanes
            if instruction.predicate:
                condition = self.read(instruction.predicate, "pred", lanes) ^ instruction.negated
                chosen = lanes if condition.all() else np.arange(self.count)[lanes][condition]
            at += 1
            if instruction.name in ("bra", "ret", "bar"):
                self.position[lanes] = at
                return self.jump(instruction, at, chosen)
            if chosen is _EVERY_LANE or len(chosen):
                getattr(self, f"run_{instruction.name}", self.run_operation)(instruction, chosen)
        self.position[lanes] = at

    def jump(self, instruction: Instruction, after: int, lanes: Any) -> None:
        if instruction.opcode == "bar.sync":
            self.blocked[lanes] = True
            at_barrier = self.blocked & (self.position == after)
            missing = np.bincount(self.program[(self.position < self.end) & ~at_barrier], minlength=self.program[-1] + 1)
            self.blocked &= ~(at_barrier & (missing == 0)[self.program])
        elif instruction.name != "bar":
            self.position[lanes] = self.kernel.labels[instruction.operands[0]] if instruction.name == "bra" else self.end

    def register(self, name: str) -> Array:
        if name not in self.registers:
            dtype = np.dtype(_REGISTERS[name.strip("%0123456789")])
            self.registers[name] = np.full(self.count, (1 << 8 * dtype.itemsize) - 1, dtype)  # a NaN
        return self.registers[name]

    def read(self, operand: str, kind: str, lanes: Any) -> Any:
        dtype = dtype_of(kind)
        bits = self.register(operand)[lanes] if operand[0] == "%" else _literal(operand, dtype.itemsize)
        if kind == "pred":
            return bits.astype(dtype)
        return decode(bits.astype(UNSIGNED[dtype.itemsize], copy=False), kind)

    def read_all(self, operand: str, kind: str, lanes: Any) -> Array:
        """The values of one or several registers or constants: [threads, count]."""
        values = [np.broadcast_to(self.read(name, kind, lanes), self.program[lanes].shape) for name in _names(operand)]
        return np.stack(values, -1)

    def write(self, name: str, values: Any, kind: str, lanes: Any) -> None:
        if name != "_":
            register, values = self.register(name), encode(np.asarray(values), kind)
            same = values.itemsize == register.itemsize and register.dtype != np.bool_
            register[lanes] = values.view(register.dtype) if same else values.astype(register.dtype)

    def run_operation(self, instruction: Instruction, lanes: Any) -> None:
        kind, kinds, compute = operation(instruction.opcode)
        target, *sources = instruction.operands
        self.write(target, compute(*(self.read(s, k, lanes) for s, k in zip(sources, kinds, strict=True))), kind, lanes)

    def run_mov(self, instruction: Instruction, lanes: Any) -> None:
        """Also between a register and its two halves."""
        target, source = instruction.operands
        kind = instruction.opcode.split(".")[-1]
        if "{" not in target + source:
            return self.run_operation(instruction, lanes)
        wide, half = dtype_of(kind), f"b{4 * dtype_of(kind).itemsize}"
        parts = self.read_all(source, half if source[0] == "{" else kind, lanes).view(
            dtype_of(half) if target[0] == "{" else wide
        )
        for i, name in enumerate(_names(target)):
            self.write(name, parts[:, i], half if target[0] == "{" else kind, lanes)

    def addresses(self, operand: str, kind: str, lanes: Any) -> Array:
        base, offset = re.findall(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\d+))?\s*\]", operand)[0]
        return self.read_all(base, kind, lanes)[:, 0].astype(np.int64) + int(offset or 0)

    def shared_index(self, operand: str, width: int, count: int, lanes: Any) -> Array:
        addresses, size = self.addresses(operand, "u32", lanes), width * count
        if (addresses % size).any() or (addresses < 0).any() or (addresses + size > self.shared_size).any():
            raise Fault(f"an access to {size} bytes of shared memory is misaligned or outside")
        return ((self.program[lanes] * self.shared_size + addresses) // width)[:, None] + np.arange(count)

    def run_ld(self, instruction: Instruction, lanes: Any) -> None:
        (_, space, *_, kind), (target, source) = instruction.opcode.split("."), instruction.operands
        if space == "param":
            return self.write(target, self.values[source.strip("[]")], kind, lanes)
        names, width = _names(target), dtype_of(kind).itemsize
        if space == "shared":
            values = self.shared.view(UNSIGNED[width])[self.shared_index(source, width, len(names), lanes)]
        else:
            values = self.memory.load(self.addresses(source, "u64", lanes), width, len(names))
        for i, name in enumerate(names):
            self.write(name, values[:, i].view(dtype_of(kind)), "bits", lanes)

    def run_st(self, instruction: Instruction, lanes: Any) -> None:
        (_, space, *_, kind), (target, source) = instruction.opcode.split("."), instruction.operands
        values = self.read_all(source, f"b{8 * dtype_of(kind).itemsize}", lanes)
        if space == "shared":
            self.shared.view(values.dtype)[self.shared_index(target, values.itemsize, values.shape[1], lanes)] = values
        else:
            self.memory.store(self.addresses(target, "u64", lanes), values)

    def run_atom(self, instruction: Instruction, lanes: Any) -> None:
        if not re.fullmatch(r"(atom|red)\.global\.gpu\.relaxed\.add(\.v\d)?\.f32", instruction.opcode):
            raise Fault(f"{instruction.opcode} is not known")
        address, source = instruction.operands[-2:]
        self.memory.add(self.addresses(address, "u64", lanes), self.read_all(source, "f32", lanes))

    run_red = run_atom

    def by_warp(self, values: Array, lanes: Any) -> Array:
        """[threads, ...] -> [warps, 32, ...]."""
        lane = (np.arange(self.count)[lanes] % WARP).reshape(-1, WARP) if len(values) % WARP == 0 else np.full(1, -1)
        if (lane != np.arange(WARP)).any():
            raise Fault("a warp reaches a shuffle or another exchange in part")
        return values.reshape(-1, WARP, *values.shape[1:])

    def run_shfl(self, instruction: Instruction, lanes: Any) -> None:
        target, source, other = instruction.operands[:3]
        bits = self.by_warp(self.read_all(source, "b32", lanes)[:, 0], lanes)
        lane = self.by_warp(self.read_all(other, "u32", lanes)[:, 0], lanes).astype(np.int64)
        from_lane = {"bfly": lane ^ np.arange(WARP), "idx": lane}[instruction.opcode.split(".")[2]] % WARP
        self.write(target, np.take_along_axis(bits, from_lane, 1).ravel(), "b32", lanes)

    def run_redux(self, instruction: Instruction, lanes: Any) -> None:
        if instruction.opcode != "redux.sync.add.s32":
            raise Fault(f"{instruction.opcode} is not known")
        values = self.by_warp(self.read_all(instruction.operands[1], "s32", lanes)[:, 0], lanes)
        self.write(instruction.operands[0], np.repeat(values.sum(1, dtype=np.int32), WARP), "s32", lanes)

    def matrix_words(self, instruction: Instruction, address: str, lanes: Any) -> Array:
        """Indices [matrix, thread] of words: lane 8 * m + r has the address of row r of matrix m, lane l a word of row l//4."""
        if not re.fullmatch(r"(ld|st)matrix\.sync\.aligned\.m8n8\.x[124]\.shared\.b16", instruction.opcode):
            raise Fault(f"{instruction.opcode} is not known")
        words = self.by_warp(self.shared_index(address, 4, 4, lanes), lanes)
        return words.reshape(-1, 4, WARP).swapaxes(0, 1).reshape(4, -1)

    def run_ldmatrix(self, instruction: Instruction, lanes: Any) -> None:
        words = self.matrix_words(instruction, instruction.operands[1], lanes)
        for name, index in zip(_names(instruction.operands[0]), words, strict=False):
            self.write(name, self.shared.view(np.uint32)[index], "b32", lanes)

    def run_stmatrix(self, instruction: Instruction, lanes: Any) -> None:
        words = self.matrix_words(instruction, instruction.operands[0], lanes)
        for values, index in zip(self.read_all(instruction.operands[1], "b32", lanes).T, words, strict=False):
            self.shared.view(np.uint32)[index] = values


class Driver:
    """What Triton asks of the driver of a GPU of compute capability `capability` / 10."""

    def __init__(self, capability: int) -> None:
        self.capability, self.utils = capability, self
        self.launches = self.lane_instructions = 0
        self.compiled: list[pathlib.Path] = []  # the machine code of kernels, in the order of their first launches

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, WARP)

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 99 << 10}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return name, name, 0, 0, 1024  # module, function, registers, spills, most threads

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """A function of the grid, a stream, hooks, and the kernel's arguments."""
        file = pathlib.Path(get_cache_manager(metadata.hash).get_file(f"{metadata.name}.ptx") or "")
        kernel = parse(file.read_text())
        self.compiled.append(file.with_suffix(".cubin"))

        def launch(programs: int, *others: Any) -> None:
            arguments = dict(zip(source.signature, others[-len(source.signature) :], strict=True))
            arguments = {name: a for name, a in arguments.items() if source.signature[name] != "constexpr"}
            self.execute(kernel, programs, arguments, metadata.shared)

        return launch

    def execute(self, kernel: Kernel, programs: int, arguments: dict[str, Any], shared: int) -> None:
        memory, self.launches = Memory(arguments), self.launches + 1
        numbers = [a.data_ptr() if isinstance(a, torch.Tensor) else int(a) for a in arguments.values()]
        numbers += [0] * (
            len(kernel.parameters) - len(numbers)
        )  # addresses of scratch memory, of which these kernels have none
        values = {
            name: _literal(str(n), dtype_of(kind).itemsize) for n, (kind, name) in zip(numbers, kernel.parameters, strict=True)
        }
        for first in range(0, programs, step := max(1, _MOST_THREADS // kernel.threads)):
            machine = Machine(kernel, first, min(first + step, programs), values, memory, shared)
            with np.errstate(all="ignore"):
                machine.run()
            self.lane_instructions += machine.lane_instructions
