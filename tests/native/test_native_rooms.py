"""The rooms of native/src: no file includes a file of a higher room. Files that are compiled once per instruction set include
only such files."""

import functools
import pathlib
import re
from collections.abc import Iterator

SOURCES = pathlib.Path(__file__).parents[2] / "native" / "src"
KERNELS = "kernels"
DOOR = "kernels/kernels.h"  # the only header of the kernels that other rooms include
# Lowest first. A file includes files of its own room and of lower floors. Rooms of one floor do not include each other.
EACH = ("kernels/attention", "kernels/aggregation", "kernels/pooling")
FLOORS = (("threads", "call"), ("kernels/shared",), EACH, (KERNELS,), (".",), ("cann", "onnxruntime", "torch"))
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# Headers of C and of compilers. The linker would merge the standard library's templates of all instruction sets.
HEADERS_OF_KERNELS = {"stdint.h", "stdlib.h", "string.h", "immintrin.h", "arm_neon.h"}


@functools.cache
def files() -> list[str]:
    return sorted(f.relative_to(SOURCES).as_posix() for f in SOURCES.rglob("*") if f.suffix in (".h", ".cpp"))


@functools.cache
def text_of(file: str) -> str:
    return (SOURCES / file).read_text(encoding="utf-8")


def room_of(file: str) -> str:
    return pathlib.PurePosixPath(file).parent.as_posix()


def in_kernels(file: str) -> bool:
    return file.startswith(f"{KERNELS}/") and file != DOOR


def included(file: str, form: str) -> list[str]:
    return re.findall(rf"^\s*#\s*include {form}", text_of(file), re.MULTILINE)


def ours(file: str) -> list[str]:
    return [name for name in included(file, '"([^"]+)"') if name in files()]


def with_all_it_takes(file: str) -> set[str]:
    found, left = set(), [file]
    while left:
        found.add(one := left.pop())
        left += [name for name in ours(one) if name not in found]
    return found


def broken_rules() -> Iterator[str]:
    for file in files():
        for name in ours(file):
            mine, other = room_of(file), room_of(name)
            if mine != other and FLOOR_OF[mine] <= FLOOR_OF[other]:
                yield f"{file} includes {name}, which is not below it"
            if in_kernels(name) and not in_kernels(file):
                yield f"{file} includes {name}, which is compiled once per instruction set"
    for file in filter(in_kernels, files()):
        for one in with_all_it_takes(file):
            if others := set(included(one, "<([^>]+)>")) - HEADERS_OF_KERNELS:
                yield f"{file} takes {', '.join(sorted(others))} by way of {one}"
            # the linker keeps one copy of an inline function, perhaps that of an instruction set the machine lacks
            if not in_kernels(one) and re.search(r"\binline\b|\) (const )?\{", text_of(one)):
                yield f"{file} takes a function's body from {one}"


def test_rooms_are_as_drawn():
    rooms = {room_of(file) for file in files()}
    assert rooms == set(FLOOR_OF)
    assert len(files()) > 50
    assert list(broken_rules()) == []


def test_axes_have_names():
    """No file writes the axis of a tensor as a number."""
    by_number = re.compile(r"(?<![\w*])(?:shape|strides|value|samples|weights)\[\d\]")
    assert [file for file in files() if by_number.search(text_of(file))] == []
