"""Faults in native/src: all of them in one library, each behind a switch, because kernels take minutes to compile."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
import subprocess

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

FAULTS = pathlib.Path(__file__).with_name("native_faults.toml")
SWITCH = "MXD_MUTANT"
HEADER = f"""#pragma once
#ifdef __cplusplus
#include <cstdlib>
static inline int which_mutant() {{
    const char *number = std::getenv("{SWITCH}");
    return number ? std::atoi(number) : 0;
}}
inline const volatile int mxd_mutant = which_mutant();
#endif
"""


@dataclasses.dataclass(frozen=True)
class Fault:
    number: int  # 0: no fault
    file: str
    kind: str
    old: str
    new: str
    begin: int

    def __str__(self) -> str:
        return f"{self.number} {self.file}, {self.kind}: {self.old}  ->  {self.new}"


def _place(file: str, text: str, around: str, old: str) -> int:
    """Where `old` begins in `text`. A fault whose text has changed must be looked at again, so that is an error."""
    around = around.replace("\\n", "\n")
    if text.count(around) != 1 or around.count(old) < 1:
        raise SystemExit(f"{FAULTS.name}: {file} must have once: {around!r}; it has it {text.count(around)} times")
    return text.index(around) + around.index(old)


def faults(root: pathlib.Path) -> list[Fault]:
    """All faults of the list, numbered from 1."""
    found: list[Fault] = []
    for file, entry in tomllib.loads(FAULTS.read_text()).items():
        text = (root / "native/src" / file).read_text()
        for kind, around, old, new in entry["faults"]:
            found.append(Fault(len(found) + 1, file, kind, old, new, _place(file, text, around, old)))
    return found


def _with_switches(text: str, planted: list[Fault]) -> str:
    """From the last fault to the first, so that places before them stay."""
    end = len(text) + 1
    for fault in sorted(planted, key=lambda f: -f.begin):
        if fault.begin + len(fault.old) > end:
            raise SystemExit(f"{FAULTS.name}: {fault} overlaps another fault")
        switched = f"(mxd_mutant == {fault.number} ? ({fault.new}) : ({fault.old}))"
        text = text[: fault.begin] + switched + text[fault.begin + len(fault.old) :]
        end = fault.begin
    return text


def build(root: pathlib.Path, folder: pathlib.Path, planted: list[Fault], cmake: str) -> pathlib.Path:
    """Compile a copy of the sources with all switches. Returns the build folder: the library and native_tests."""
    copy, out = folder / "source", folder / "out"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir(parents=True)
    for name in ("native", "tests/native"):
        shutil.copytree(root / name, copy / name)
    for name in ("CMakeLists.txt", "pyproject.toml"):
        shutil.copy2(root / name, copy / name)
    for file in {fault.file for fault in planted}:
        source = copy / "native/src" / file
        source.write_text(_with_switches(source.read_text(), [f for f in planted if f.file == file]))
    (copy / "switch.h").write_text(HEADER)
    options = ["-DMXD_BASELINE_ONLY=ON", "-DMXD_NATIVE_TESTS=ON", "-DMXD_KERNEL_OPTIMISATION=-O1", "-DCMAKE_BUILD_TYPE=Debug"]
    flags = f"-DCMAKE_CXX_FLAGS=-include {copy / 'switch.h'}"
    subprocess.run([cmake, "-S", copy, "-B", out, *options, flags], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([cmake, "--build", out, "--parallel", "2", "--target", "mx_driving", "native_tests"], check=True)
    return out


# Quick ones first; those about threads and streams are left out, because the faults are not about them.
NATIVE_TESTS = ("known_answer", "levels", "cameras", "attention", "layouts", "any_number")


def native_tests_fail(out: pathlib.Path, number: int, seconds: float) -> bool:
    environment = {**os.environ, SWITCH: str(number), "OMP_NUM_THREADS": "1"}
    for name in NATIVE_TESTS:
        try:
            done = subprocess.run(
                [out / "tests/native/native_tests", name], env=environment, capture_output=True, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return True
        if done.returncode != 0:
            return True
    return False
