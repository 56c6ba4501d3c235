"""Faults in native/src: all of them in one library, each behind a switch, because kernels take minutes to compile."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import resource
import subprocess

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

FAULTS = pathlib.Path(__file__).with_name("native_faults.toml")
SWITCH = "MXD_MUTANT"  # in the environment: the fault of a program; mxd_mutant is the same for a library that is loaded
REACHED = "MXD_REACHED"  # a file: the program leaves there which switches it came by
MOST = 1024

# mxd_* is what the library exports.
HEADER = f"""#pragma once
#ifdef __cplusplus
#include <cstdio>
#include <cstdlib>
static inline int mxd_chosen() {{
    const char *number = std::getenv("{SWITCH}");
    return number ? std::atoi(number) : 0;
}}
extern "C" {{
inline __attribute__((visibility("default"))) volatile int mxd_mutant = mxd_chosen();
inline __attribute__((visibility("default"))) unsigned char mxd_reached[{MOST}] = {{}};
}}
struct MxdReached {{
    ~MxdReached() {{
        const char *name = std::getenv("{REACHED}");
        std::FILE *file = name ? std::fopen(name, "a") : nullptr;
        for (int i = 0; file && i < {MOST}; ++i)
            if (mxd_reached[i]) std::fprintf(file, "%d\\n", i);
        if (file) std::fclose(file);
    }}
}};
inline MxdReached mxd_tells_reached;
static inline bool mxd_planted(int number) {{
    mxd_reached[number] = 1;
    return mxd_mutant == number;
}}
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
    reason: str = ""  # why it is none

    def __str__(self) -> str:
        return f"{self.file}, {self.kind}: {self.change}"

    @property
    def change(self) -> str:
        return f"{self.old}  ->  {self.new}"

    @property
    def path(self) -> str:
        return f"native/src/{self.file}"


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
        for kind, around, old, new, *reason in entry["faults"]:
            found.append(Fault(len(found) + 1, file, kind, old, new, _place(file, text, around, old), *reason))
    assert len(found) < MOST
    return found


def _with_switches(text: str, planted: list[Fault]) -> str:
    """From the last fault to the first, so that places before them stay."""
    end = len(text) + 1
    for fault in sorted(planted, key=lambda f: -f.begin):
        if fault.begin + len(fault.old) > end:
            raise SystemExit(f"{FAULTS.name}: {fault} overlaps another fault")
        switched = f"(mxd_planted({fault.number}) ? ({fault.new}) : ({fault.old}))"
        text = text[: fault.begin] + switched + text[fault.begin + len(fault.old) :]
        end = fault.begin
    return text


def _write(path: pathlib.Path, text: str) -> None:
    """If it is other than what is there, so that only that is compiled again."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def build(root: pathlib.Path, folder: pathlib.Path, planted: list[Fault], cmake: str) -> pathlib.Path:
    """Compile a copy of the sources with all switches. Returns the build folder: the library, native_tests, compare."""
    copy, out = folder / "source", folder / "out"
    of_file: dict[str, list[Fault]] = {}
    for fault in planted:
        of_file.setdefault(fault.path, []).append(fault)
    others = [root / name for name in ("CMakeLists.txt", "pyproject.toml", "src/mx_driving/_descriptions.py")]
    sources = [*others, *root.glob("native/**/*.*"), *root.glob("tests/native/**/*.*")]
    for source in sources:
        name = str(source.relative_to(root))
        if source.is_file() and (source in others or source.suffix not in (".py", ".pyc", ".md")):
            _write(copy / name, _with_switches(source.read_text(), of_file.get(name, [])))
    _write(copy / "switch.h", HEADER)
    options = ["-DMXD_BASELINE_ONLY=ON", "-DMXD_NATIVE_TESTS=ON", "-DMXD_KERNEL_OPTIMISATION=-O1", "-DCMAKE_BUILD_TYPE=Debug"]
    flags = [f"-DCMAKE_CXX_FLAGS=-include {copy / 'switch.h'}", "-DCMAKE_CXX_FLAGS_DEBUG=-O1"]
    subprocess.run([cmake, "-S", copy, "-B", out, *options, *flags], check=True, stdout=subprocess.DEVNULL)
    targets = ["mx_driving", "native_tests", "compare"]
    subprocess.run([cmake, "--build", out, "--parallel", "2", "--target", *targets], check=True, stdout=subprocess.DEVNULL)
    return out


# Those about threads and streams are left out, because the faults are not about them.
NATIVE_TESTS = ("known_answer", "levels", "cameras", "attention", "layouts", "any_number")
CALLS = 400  # random calls of `make compare` that a survivor is tried in


def _environment(number: int) -> dict[str, str]:
    return {**os.environ, SWITCH: str(number), "OMP_NUM_THREADS": "1"}


def native_test_fails(out: pathlib.Path, name: str, number: int, seconds: int, reached: pathlib.Path | None = None) -> bool:
    environment = _environment(number) | ({REACHED: str(reached)} if reached else {})
    command = [out / "tests/native/native_tests", name]

    def limited() -> None:  # CPU time, because other programs may stop this one for a while
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))

    return subprocess.run(command, env=environment, capture_output=True, preexec_fn=limited).returncode != 0


def compared(out: pathlib.Path, number: int) -> tuple[str, str]:
    """Random calls between guarded pages: what touches memory that no tensor has, and the first result that a fault changes.

    The second helps to judge a survivor, and is no test: nobody has the library without the fault.
    """
    program, results = out / "tests/native/compare", out / "results"
    if not results.exists() or results.stat().st_mtime < program.stat().st_mtime:
        with results.open("wb") as file:
            subprocess.run([program, "write", "0", str(CALLS)], env=_environment(0), stdout=file, check=True)
    with results.open("rb") as file:
        done = subprocess.run([program, "read"], env=_environment(number), stdin=file, capture_output=True, text=True)
    findings = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("FINDING")]
    touched = next((line for line in findings if "signal" in line or "a byte beside" in line), "")
    return touched, findings[0] if findings else ""
