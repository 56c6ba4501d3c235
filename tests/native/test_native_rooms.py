"""The rooms of native/src: none takes from one above it, and what is compiled once per instruction set stays by itself."""

from __future__ import annotations

import pathlib
import re
import shutil
from collections.abc import Iterator

import pytest

SOURCES = pathlib.Path(__file__).parents[2] / "native" / "src"
KERNELS = "kernels"
DOOR = "kernels/kernels.h"  # all that others see of the kernels
# Lowest first. A file takes from its own room and from those below; rooms of one floor know nothing of each other.
FLOORS = (
    ("threads", "call"),
    ("kernels/shared",),
    ("kernels/attention", "kernels/aggregation", "kernels/pooling"),
    ("kernels/heads_together",),
    (KERNELS,),
    (".",),
    ("cann", "onnxruntime", "torch"),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# of C, and of the compilers; containers and algorithms of the standard library would be merged between instruction sets
HEADERS_OF_KERNELS = {"stdint.h", "stdlib.h", "string.h", "immintrin.h", "arm_neon.h"}


def files(sources: pathlib.Path) -> list[str]:
    return sorted(f.relative_to(sources).as_posix() for f in sources.rglob("*") if f.suffix in (".h", ".cpp"))


def room_of(file: str) -> str:
    return pathlib.PurePosixPath(file).parent.as_posix()


def in_kernels(file: str) -> bool:
    return file.startswith(f"{KERNELS}/") and file != DOOR


def included(sources: pathlib.Path, file: str, form: str) -> list[str]:
    return re.findall(rf"^\s*#\s*include {form}", (sources / file).read_text(encoding="utf-8"), re.MULTILINE)


def ours(sources: pathlib.Path, file: str) -> list[str]:
    return [name for name in included(sources, file, '"([^"]+)"') if (sources / name).exists()]


def with_all_it_takes(sources: pathlib.Path, file: str) -> set[str]:
    found, left = set(), [file]
    while left:
        found.add(one := left.pop())
        left += [name for name in ours(sources, one) if name not in found]
    return found


def broken_rules(sources: pathlib.Path) -> Iterator[str]:
    for file in files(sources):
        for name in ours(sources, file):
            mine, other = room_of(file), room_of(name)
            if mine != other and FLOOR_OF[mine] <= FLOOR_OF[other]:
                yield f"{file} includes {name}, which is not below it"
            if in_kernels(name) and not in_kernels(file):
                yield f"{file} includes {name}, which is compiled once per instruction set"
    for file in filter(in_kernels, files(sources)):
        for one in with_all_it_takes(sources, file):
            if others := set(included(sources, one, "<([^>]+)>")) - HEADERS_OF_KERNELS:
                yield f"{file} takes {', '.join(sorted(others))} by way of {one}"
            # the linker keeps one copy of an inline function, perhaps that of an instruction set the machine lacks
            if not in_kernels(one) and re.search(r"\binline\b|\) (const )?\{", (sources / one).read_text(encoding="utf-8")):
                yield f"{file} takes a function's body from {one}"


def axes_by_number(sources: pathlib.Path) -> list[str]:
    by_number = re.compile(r"(?<![\w*])(?:shape|strides|value|samples|weights)\[\d\]")
    return [file for file in files(sources) if by_number.search((sources / file).read_text(encoding="utf-8"))]


def test_rooms_are_as_drawn():
    rooms = {room_of(file) for file in files(SOURCES)}
    assert rooms == set(FLOOR_OF)
    assert len(files(SOURCES)) > 70
    assert list(broken_rules(SOURCES)) == []


@pytest.mark.parametrize(
    ("file", "line", "broken"),
    [
        ("call/plan.h", '#include "run.h"', "not below it"),
        ("kernels/attention/worker.h", '#include "kernels/aggregation/anchors.h"', "not below it"),
        ("kernels/attention/worker.h", '#include "kernels/heads_together/queries.h"', "not below it"),
        ("call/make_plan.cpp", '#include "kernels/shared/rows.h"', "once per instruction set"),
        ("interface.cpp", '#include "kernels/shared/job.h"', "once per instruction set"),
        ("kernels/shared/rows.h", "#include <vector>", "takes vector"),
        ("call/plan.h", "#include <algorithm>", "takes algorithm"),
        ("call/call.h", "inline int twice(int x) { return 2 * x; }", "a function's body"),
    ],
)
def test_a_broken_rule_is_found(tmp_path, file, line, broken):
    shutil.copytree(SOURCES, tmp_path / "src")
    with (tmp_path / "src" / file).open("a", encoding="utf-8") as opened:
        opened.write(f"{line}\n")
    assert broken in "\n".join(broken_rules(tmp_path / "src"))


def test_axes_have_names(tmp_path):
    assert axes_by_number(SOURCES) == []
    shutil.copytree(SOURCES, tmp_path / "src")
    for file, function in (
        ("interface.cpp", "int64_t keys(const mxd::Call &call) { return call.value.shape[1]; }"),
        ("onnxruntime/operators.cpp", "int64_t heads(const std::vector<int64_t> &samples) { return samples[2]; }"),
    ):
        with (tmp_path / "src" / file).open("a", encoding="utf-8") as opened:
            opened.write(f"{function}\n")
    assert axes_by_number(tmp_path / "src") == ["interface.cpp", "onnxruntime/operators.cpp"]
