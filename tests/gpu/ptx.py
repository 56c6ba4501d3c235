"""Execute the PTX of Triton's kernels in numpy, every lane of every program, where there is no GPU.

`triton.runtime.driver.set_active(Driver(90))` compiles kernels for sm_90 and runs their launches here, on tensors of the CPU.
A launch fails with a Fault if an access is misaligned or outside of every tensor, if two threads store to one address, if a
kernel reads what it has written, if a warp reaches a shuffle in part, if a program waits at a barrier for ever, or if an
instruction is not known. Unwritten registers hold NaN. ptxas, its contraction of multiplications and additions, caches, time
and races in shared memory are not modelled.
"""

import ctypes
import functools
import operator
import pathlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import get_cache_manager

Array = np.ndarray
WARP = 32
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_REGISTERS = {"p": np.bool_, "rs": np.uint16, "r": np.uint32, "rd": np.uint64}
_MOST_THREADS = 1 << 19  # of programs that run together
_EVERY_LANE = slice(None)
_STORED, _ADDED = 1, 2  # marks of a byte
_FAULTS = "reads what it has written", "stores twice to one address", "adds to what it has stored"


class Fault(AssertionError):
    """A kernel did what hardware does not allow, or what this interpreter does not know."""


@functools.cache
def dtype_of(kind: str) -> np.dtype:
    """Return the dtype of a PTX type's numbers, or of its bits: numpy has no bf16, and no two numbers of f32x2."""
    letter = "f" if kind in ("f16", "f32", "f64") else "i" if kind[0] == "s" else "u"
    size = int(kind.removesuffix("x2").lstrip("bfsu")) * (1 + kind.endswith("x2")) // 8 if kind != "pred" else 0
    return np.dtype(f"{letter}{size}" if size else np.bool_)


def decode(bits: Array, kind: str) -> Array:
    """Return the numbers that bits of a type stand for."""
    if kind.endswith("x2"):
        return decode(np.atleast_1d(bits).view(UNSIGNED[bits.itemsize // 2]).reshape(-1, 2), kind.removesuffix("x2"))
    return (bits.astype(np.uint32) << 16).view(np.float32) if kind == "bf16" else bits.view(dtype_of(kind))


def encode(numbers: Array, kind: str) -> Array:
    """Return the bits of numbers, rounded to a type: to the nearest and to even."""
    if kind.endswith("x2"):
        halves = np.ascontiguousarray(encode(numbers, kind.removesuffix("x2")))
        return halves.view(UNSIGNED[2 * halves.itemsize])[..., 0]
    if kind == "bf16":
        bits = numbers.astype(np.float32).view(np.uint32)
        return np.where(np.isnan(numbers), 0x7FFF, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.asarray(numbers, dtype_of(kind)).view(UNSIGNED[dtype_of(kind).itemsize])


def _compare(name: str, a: Array, b: Array) -> Array:
    """With a NaN, names of three letters are true and the others false."""
    unordered = (a != a) | (b != b)
    return getattr(operator, name[:2])(a, b) & ~unordered | (unordered & (len(name) == 3))


def _convert(modes: list[str], target: str, source: str, a: Array, *lower: Array) -> Array:
    """A float becomes an integer by saturation, and a NaN 0."""
    if lower:
        return np.stack(np.broadcast_arrays(*lower, a), -1)
    for mode in (mode for mode in _ROUND if mode in modes):
        a = _ROUND[mode](a)
    if source[0] in "fb" and target[0] in "su":
        limits = np.iinfo(dtype_of(target))
        a = np.clip(np.where(np.isnan(a), 0, a).astype(np.float64), limits.min, limits.max)
    return a if target[0] in "fb" else a.astype(dtype_of(target))


def _permute(a: Array, b: Array, selector: Array) -> Array:
    """Return four of the eight bytes of a and b, which the four digits of the selector number."""
    whole, total = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32), np.uint64(0)
    for i in np.arange(0, 32, 8, dtype=np.uint64):
        digit = selector.astype(np.uint64) >> i // np.uint64(2) & np.uint64(7)  # no kernel asks for copies of a sign
        total = total | (whole >> np.uint64(8) * digit & np.uint64(255)) << i
    return total


_ROUND: dict[str, Callable[[Array], Array]] = {
    "ftz": lambda a: np.where(np.abs(a) < np.finfo(np.float32).tiny, a * np.float32(0), a),
    **{"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil},
}
_COMPUTE: dict[str, Callable[..., Array]] = {
    "mov": lambda a: a, "add": np.add, "sub": np.subtract, "neg": np.negative, "rem": np.fmod,
    "min": lambda *a: functools.reduce(np.fmin, a), "max": lambda *a: functools.reduce(np.fmax, a),  # of two or three
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    "div": lambda a, b: a / b if a.dtype.kind == "f" else (a - np.fmod(a, b)) // b,
    "ex2": np.exp2, "fma": lambda a, b, c: a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64),
    "hi": lambda a, b: (a.astype(object) * b.astype(object) >> 8 * a.itemsize).astype(a.dtype),
    "shl": lambda a, count: a << count.astype(a.dtype), "shr": lambda a, count: a >> count.astype(a.dtype),
    "bfe": lambda a, first, length: a << (32 - first - length).astype(a.dtype) >> (32 - length).astype(a.dtype),
    "prmt": _permute, "selp": lambda a, b, condition: np.where(condition, a, b),
}  # fmt: skip
_LAST = {"selp": ["pred"], "shl": ["u32"], "shr": ["u32"], "bfe": ["u32", "u32"]}  # types of the last operands
_KNOWN = re.compile(
    r"(mov|add|sub|neg|min|max|and|or|xor|not|shl|shr|selp|rem)\.\w+|div\.[su]\d+|(add|sub|mul|fma|div)\.rn\.(ftz\.f32|\w+)|(add|sub|fma)\.rn\.f32\.b?f16|mul\.f\w+"
    r"|(mul|mad)\.(lo|wide|hi)\.[su]\d+|setp\.(eq|ne|lt|le|gt|ge)u?\.\w+|cvt\.(rn\.|r[nzmp]i\.)?(ftz\.)?([su]\d+|b?f(16|32)(x2)?)\.\w+"
    r"|prmt\.b32|bfe\.[su]32|ex2\.approx(\.ftz)?\.f32|div\.(full|approx)\.f32|bra(\.uni)?|ret|bar(\.warp)?\.sync|shfl\.sync\.(bfly|idx)\.b32|redux\.sync\.(add\.s32|max\.f32)"
    r"|(atom|red)\.global\.gpu\.relaxed\.add(\.v\d)?\.f32|ld\.param\.\w+|(ld|st)\.(global|shared)(\.v\d)?\.b\d+"
    r"|(ld|st)matrix\.sync\.aligned\.m8n8\.x\d(\.trans)?\.shared\.b16"
)
Opcode = tuple[str, ...]  # its parts between dots
Instruction = tuple[bool, str, Opcode, list[str]]  # whether the predicate is negated, predicate or "", operands


@functools.cache
def operation(opcode: Opcode, count: int) -> tuple[str, list[str], Callable[..., Array]]:
    """Return the type of the result, the types of the `count` sources, and what an instruction computes."""
    name, *modes, kind = opcode
    if name == "cvt":
        return modes[-1], [kind] * count, functools.partial(_convert, modes[:-1], modes[-1], kind)
    if name == "setp":
        return "pred", [kind] * count, functools.partial(_compare, modes[0])
    if name in ("mul", "mad") and kind[0] != "f":
        result = f"{kind[0]}{2 * int(kind[1:])}" if "wide" in modes else kind
        dtype = dtype_of(result)
        product = _COMPUTE["hi"] if "hi" in modes else lambda a, b: a.astype(dtype, copy=False) * b.astype(dtype, copy=False)
        return result, [kind, kind, result][:count], lambda a, b, *c: functools.reduce(np.add, c, product(a, b))
    if "f32" in modes:  # of 16-bit numbers and, last, one of 32 bits
        return "f32", [kind] * (count - 1) + ["f32"], _COMPUTE[name]
    last, compute = _LAST.get(name, []), _COMPUTE.get(name, np.multiply)
    if "ftz" in modes:  # subnormal sources and results become zero
        flush = _ROUND["ftz"]
        return kind, [kind] * count, lambda *sources: flush(compute(*map(flush, sources)))
    return kind, [kind] * (count - len(last)) + last, compute


class Kernel:
    def __init__(self, ptx: str) -> None:
        head, body = re.sub(r"//[^\n]*", "", ptx[ptx.index(".visible .entry") :]).split("{", 1)
        self.threads = int(re.findall(r"\.(?:req|max)ntid (\d+)", head)[0])
        self.parameters = re.findall(r"\.param \.(\w+)(?: [^,)]*?)? (\w+_param_\d+)", head)  # type and name
        self.instructions, self.labels = list[Instruction](), dict[str, int]()
        for text in map(str.strip, re.split(r"[;\n]", body.split(".section")[0])):
            if text.endswith(":"):
                self.labels[text[:-1]] = len(self.instructions)
            elif text not in ("", "{", "}") and text[0] != ".":
                self.instructions.append(_parse(text))


def _parse(text: str) -> Instruction:
    parts = re.fullmatch(r"(?:@(!?)(%p\d+)\s+)?([a-z]\w*[\w.:]*)\s*(.*)", text.replace("::cta", ""))
    if not parts or not _KNOWN.fullmatch(parts[3]):
        raise Fault(f"{text} is not known")
    negated, predicate, opcode, operands = parts.groups(default="")
    return bool(negated), predicate, tuple(opcode.split(".")), re.findall(r"[\[{][^\]}]*[\]}]|[^,\s]+", operands)


@functools.cache
def _literal(text: str, size: int) -> Any:
    """Return the bits of a constant, in an unsigned integer of `size` bytes."""
    number = int(text[2:], 16) if text[:2] in ("0f", "0d") else 0 if text == "global_smem" else int(text.rstrip("U"), 0)
    return UNSIGNED[size](number & ((1 << 8 * size) - 1))


def _names(operand: str) -> list[str]:
    return [name.strip() for name in operand.strip("{} ").split(",")]


class Buffer:
    """A tensor from its first to its last element, and for each byte whether the kernel stored it or added to it."""

    def __init__(self, name: str, t: torch.Tensor) -> None:
        extent = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) + 1
        self.name, self.first, self.end = name, t.data_ptr(), t.data_ptr() + extent * t.element_size()
        self.base = self.first // 16 * 16  # views of every width begin at a multiple of it
        size = -(-(self.end - self.base) // 16) * 16
        self.content = np.frombuffer((ctypes.c_uint8 * size).from_address(self.base), np.uint8)
        self.marks = np.zeros(size, np.uint8)


class Machine:
    """Programs `first` to `last` of a launch. Threads at the lowest instruction run first, so that branches meet again."""

    def __init__(self, kernel: Kernel, first: int, last: int, parameters: dict[str, Any], buffers: list[Buffer], shared: int):
        self.kernel, self.parameters, self.buffers = kernel, parameters, buffers
        self.count, self.shared_size = (last - first) * kernel.threads, -(-shared // 16) * 16
        self.program = np.repeat(np.arange(last - first), kernel.threads)
        self.registers = {"%tid.x": np.tile(np.arange(kernel.threads, dtype=np.uint32), last - first)}
        self.registers["%ctaid.x"] = (self.program + first).astype(np.uint32)
        self.shared = np.zeros((last - first) * self.shared_size, np.uint8)
        self.position, self.end = np.zeros(self.count, np.int32), len(kernel.instructions)
        self.blocked = np.zeros(self.count, np.bool_)

    @np.errstate(all="ignore")
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
            (negated, predicate, opcode, operands), chosen = self.kernel.instructions[at], lanes
            if predicate:
                condition = self.read(predicate, "pred", lanes) ^ negated
                chosen = lanes if condition.all() else np.arange(self.count)[lanes][condition]
            at += 1
            if opcode[0] in ("bra", "ret", "bar"):
                self.position[lanes] = at
                return self.jump(opcode, operands, at, chosen)
            if chosen is _EVERY_LANE or len(chosen):
                getattr(self, f"run_{opcode[0]}", self.compute)(opcode, *operands, lanes=chosen)
        self.position[lanes] = at

    def jump(self, opcode: Opcode, operands: list[str], after: int, lanes: Any) -> None:
        if opcode == ("bar", "sync"):
            self.blocked[lanes] = True
            at_barrier = self.blocked & (self.position == after)
            missing = np.bincount(self.program[(self.position < self.end) & ~at_barrier], minlength=self.program[-1] + 1)
            self.blocked &= ~(at_barrier & (missing == 0)[self.program])
        elif opcode[0] != "bar":
            self.position[lanes] = self.kernel.labels[operands[0]] if opcode[0] == "bra" else self.end

    def register(self, name: str) -> Array:
        if name not in self.registers:
            dtype = np.dtype(_REGISTERS[name.strip("%0123456789")])
            self.registers[name] = np.full(self.count, (1 << 8 * dtype.itemsize) - 1, dtype)  # a NaN
        return self.registers[name]

    def read(self, operand: str, kind: str, lanes: Any) -> Any:
        width = dtype_of(kind).itemsize
        bits = self.register(operand)[lanes] if operand[0] == "%" else _literal(operand, width)
        return decode(bits.astype(UNSIGNED[width], copy=False), kind)

    def read_bits(self, operand: str, width: int, lanes: Any) -> Array:
        """Return the bits of one or several registers or constants: [threads, count]."""
        columns = [self.read(name, f"b{8 * width}", lanes) for name in _names(operand)]
        return np.stack(np.broadcast_arrays(self.program[lanes], *columns)[1:], -1)

    def write_bits(self, operand: str, bits: Array, lanes: Any) -> None:
        for name, column in zip(_names(operand), np.atleast_2d(bits.T), strict=False):
            if name != "_":
                self.register(name)[lanes] = column

    def compute(self, opcode: Opcode, target: str, *sources: str, lanes: Any) -> None:
        kind, kinds, function = operation(opcode, len(sources))
        values = function(*(self.read(s, k, lanes) for s, k in zip(sources, kinds, strict=True)))
        if "|" not in target:
            self.register(target)[lanes] = encode(values, kind)
            return
        for name, half in zip(target.split("|"), values.T, strict=True):  # setp of pairs
            self.register(name)[lanes] = half

    def run_mov(self, opcode: Opcode, target: str, source: str, lanes: Any) -> None:
        """Also between a register and its two halves."""
        if "{" not in target + source:
            return self.compute(opcode, target, source, lanes=lanes)
        size = dtype_of(opcode[1]).itemsize
        bits = self.read_bits(source, size // len(_names(source)), lanes)
        self.write_bits(target, bits.view(UNSIGNED[size // len(_names(target))]), lanes)

    def access(self, operand: str, space: str, width: int, count: int, lanes: Any, mark: int = 0) -> tuple[Array, Array]:
        """Return the memory that all addresses lie in and indices [threads, count], after a note of what is done there."""
        base, offset = re.findall(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\d+))?\s*\]", operand)[0]
        addresses = self.read_bits(base, 4 if space == "shared" else 8, lanes)[:, 0].astype(np.int64) + int(offset or 0)
        first, last, size = int(addresses.min()), int(addresses.max()) + width * count, width * count
        if (addresses % size).any():
            raise Fault(f"an access to {size} bytes is misaligned")
        if space == "shared":
            if first < 0 or last > self.shared_size:
                raise Fault(f"an access to {size} bytes lies outside of shared memory")
            index = (self.program[lanes] * self.shared_size + addresses) // width
            return self.shared.view(UNSIGNED[width]), index[:, None] + np.arange(count)
        buffer = next((b for b in self.buffers if b.first <= first and last <= b.end), None)
        if not buffer:
            tensors = ", ".join(f"{b.name} {b.first:#x}..{b.end:#x}" for b in self.buffers)
            raise Fault(f"an access to {size} bytes at {first:#x} to {last:#x} lies in no tensor: {tensors}")
        index = ((addresses - buffer.base) // width)[:, None] + np.arange(count)
        marks, pattern = buffer.marks.view(UNSIGNED[width]), np.frombuffer(bytes([mark]) * width, UNSIGNED[width])
        seen = marks[index] & (pattern >> 1) if mark == _ADDED else marks[index]
        if seen.any() or (mark == _STORED and len(np.unique(index)) < index.size):
            raise Fault(f"{_FAULTS[mark]} in {buffer.name}")
        marks[index] |= pattern
        return buffer.content.view(UNSIGNED[width]), index

    def run_ld(self, opcode: Opcode, target: str, source: str, lanes: Any) -> None:
        if opcode[1] == "param":
            self.register(target)[lanes] = self.parameters[source.strip("[]")]
        else:
            memory, index = self.access(source, opcode[1], dtype_of(opcode[-1]).itemsize, len(_names(target)), lanes)
            self.write_bits(target, memory[index], lanes)

    def run_st(self, opcode: Opcode, target: str, source: str, lanes: Any) -> None:
        bits = self.read_bits(source, dtype_of(opcode[-1]).itemsize, lanes)
        memory, index = self.access(target, opcode[1], bits.itemsize, bits.shape[1], lanes, _STORED)
        memory[index] = bits

    def run_atom(self, opcode: Opcode, *operands: str, lanes: Any) -> None:
        values = self.read_bits(operands[-1], 4, lanes).view(np.float32)
        memory, index = self.access(operands[-2], "global", 4, values.shape[1], lanes, _ADDED)
        np.add.at(memory.view(np.float32), index, values)

    run_red = run_atom

    def by_warp(self, values: Array, lanes: Any) -> Array:
        """[threads, ...] -> [warps, 32, ...]."""
        lane = np.arange(self.count)[lanes] % WARP
        if len(lane) % WARP or (lane.reshape(-1, WARP) != np.arange(WARP)).any():
            raise Fault("a warp reaches a shuffle or another exchange in part")
        return values.reshape(-1, WARP, *values.shape[1:])

    def run_shfl(self, opcode: Opcode, target: str, source: str, other: str, *_: str, lanes: Any) -> None:
        bits, lane = (self.by_warp(self.read_bits(operand, 4, lanes)[:, 0], lanes) for operand in (source, other))
        from_lane = lane.astype(np.int64) ^ (np.arange(WARP) if "bfly" in opcode else 0)
        self.write_bits(target, np.take_along_axis(bits, from_lane % WARP, 1).ravel(), lanes)

    def run_redux(self, opcode: Opcode, target: str, source: str, mask: str, lanes: Any) -> None:
        if (self.read(mask, "s32", lanes) != -1).any():
            raise Fault("a reduction of a part of a warp is not known")
        values, add = self.by_warp(self.read_bits(source, 4, lanes)[:, 0], lanes), opcode[2] == "add"
        result = values.sum(1, dtype=np.uint32) if add else np.fmax.reduce(values.view(np.float32), 1).view(np.uint32)
        self.write_bits(target, np.repeat(result, WARP), lanes)

    def run_ldmatrix(self, opcode: Opcode, target: str, source: str, lanes: Any) -> None:
        """Also a store: of 8 x 8 halves. Lane 8 * m + r has the address of row r of matrix m, and lane l its pair l."""
        address, registers = (source, target) if opcode[0] == "ldmatrix" else (target, source)
        memory, index = self.access(address, "shared", 2, 8, lanes)
        matrices = self.by_warp(index, lanes).reshape(-1, 4, 8, 8).swapaxes(*((2, 3) if "trans" in opcode else (2, 2)))
        halves = matrices.reshape(-1, 4, WARP, 2).swapaxes(1, 2).reshape(-1, 4, 2)[:, : len(_names(registers))]
        if address == source:
            self.write_bits(target, memory[halves].copy().view(np.uint32)[..., 0], lanes)
        else:
            memory[halves] = self.read_bits(source, 4, lanes)[..., None].copy().view(np.uint16)

    run_stmatrix = run_ldmatrix


class Driver:
    """What Triton asks of the driver of a GPU of compute capability `capability` / 10."""

    def __init__(self, capability: int) -> None:
        self.utils = self
        self.compiled: list[pathlib.Path] = []  # the machine code of kernels, in the order of their first launches
        self.get_current_target = lambda: GPUTarget("cuda", capability, WARP)
        self.get_current_device = lambda: capability  # Triton keeps kernels by device
        self.get_current_stream = lambda device: 0
        self.get_device_properties = lambda device: {"max_shared_mem": 99 << 10}
        self.load_binary = lambda name, *_: (name, name, 0, 0, 1024)  # module, function, registers, spills, most threads

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """Return a function of the grid, a stream, hooks, and the kernel's arguments."""
        file = pathlib.Path(get_cache_manager(metadata.hash).get_file(f"{metadata.name}.ptx") or "")
        kernel = Kernel(file.read_text())
        self.compiled.append(file.with_suffix(".cubin"))
        places = {name: i - len(source.signature) for i, (name, k) in enumerate(source.signature.items()) if k != "constexpr"}
        return lambda count, *a: self.execute(kernel, count, {name: a[i] for name, i in places.items()}, metadata.shared)

    def execute(self, kernel: Kernel, programs: int, arguments: dict[str, Any], shared: int) -> None:
        tensors = {name: a for name, a in arguments.items() if isinstance(a, torch.Tensor)}
        numbers = [tensors[name].data_ptr() if name in tensors else int(a) for name, a in arguments.items()]
        # Triton adds addresses of scratch memory, of which these kernels have none.
        numbers += [0] * (len(kernel.parameters) - len(numbers))
        values = {name: _literal(str(n), dtype_of(k).itemsize) for n, (k, name) in zip(numbers, kernel.parameters, strict=True)}
        buffers = [Buffer(name, t) for name, t in tensors.items() if t.numel()]
        for first in range(0, programs, step := max(1, _MOST_THREADS // kernel.threads)):
            Machine(kernel, first, min(first + step, programs), values, buffers, shared).run()
