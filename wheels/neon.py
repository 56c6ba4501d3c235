"""The row loops in the machine code of an aarch64 library: `python wheels/neon.py libmx_driving.so` prints them.

A row loop reads four rows of 32 float32 channels: 8 vectors each. Best is what the arithmetic needs: every vector is read once,
every product is a fused multiply-add (or the first product of a sum), and nothing goes to the stack.
"""

from __future__ import annotations

import pathlib
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

import capstone
from elftools.elf.elffile import ELFFile


class Loop(NamedTuple):
    """Counts of one round of an innermost loop, in vectors of 16 bytes."""

    fused: int
    loads: int
    stores: int
    stack: int
    instructions: int


# Of four rows: fused multiply-adds, loads, stores.
BEST = {
    "weighted_sum": (32, 32, 0),
    "dots": (28, 32, 1),  # a store of four dots
    "dots_and_scatter_add": (60, 64, 33),  # rows of value and of its gradient
}
_JUMP = re.compile(r"#(0x[0-9a-f]+)$")


def _instructions(library: pathlib.Path) -> list[tuple[int, str, str]]:
    with library.open("rb") as file:
        text = ELFFile(file).get_section_by_name(".text")
        code, start = text.data(), text["sh_addr"]
    reader = capstone.Cs(capstone.CS_ARCH_ARM64, capstone.CS_MODE_ARM)
    reader.skipdata = True
    return [(address, name, operands) for address, _, name, operands in reader.disasm_lite(code, start)]


def _innermost(code: list[tuple[int, str, str]]) -> Iterator[list[tuple[int, str, str]]]:
    place = {address: i for i, (address, _, _) in enumerate(code)}
    first = -1  # a loop that begins before the last one's end was not innermost
    for i, (address, name, operands) in enumerate(code):
        jump = _JUMP.search(operands) if re.fullmatch(r"b(\..*)?|cbn?z|tbn?z", name) else None
        if jump and int(jump[1], 16) <= address and int(jump[1], 16) in place:
            begin = place[int(jump[1], 16)]
            if begin > first:
                yield code[begin : i + 1]
            first = i


def _vectors(body: list[tuple[int, str, str]], single: str, pair: str) -> int:
    names = {single: 1, single[:2] + "ur": 1, pair: 2}
    return sum(names.get(name, 0) for _, name, operands in body if operands.startswith("q") and "[sp" not in operands)


def loops(library: pathlib.Path) -> list[Loop]:
    return [
        Loop(
            sum(name == "fmla" and ".4s" in operands for _, name, operands in body),
            _vectors(body, "ldr", "ldp"),
            _vectors(body, "str", "stp"),
            sum("[sp" in operands for _, _, operands in body),
            len(body),
        )
        for body in _innermost(_instructions(library))
    ]


def check(library: pathlib.Path) -> str:
    """The shortest loop of each kind, or SystemExit where one is not as good as it can be."""
    found, facts = loops(library), []
    for name, best in BEST.items():
        alike = [loop for loop in found if loop[:3] == best and not loop.stack]
        if not alike:
            raise SystemExit(f"neon.py: no loop of {name} has (fmla, loads, stores) {best} and leaves the stack alone")
        facts.append(f"{name} {min(loop.instructions for loop in alike)}")
    spilt = [loop for loop in found if loop.fused in (32, 60) and loop.stack]
    if spilt:
        raise SystemExit(f"neon.py: row loops that use the stack: {spilt}")
    return "NEON, instructions for four rows of 32 channels: " + ", ".join(facts)


if __name__ == "__main__":
    library = pathlib.Path(sys.argv[1])
    print(*sorted(loop for loop in loops(library) if loop.fused >= 8), check(library), sep="\n")
