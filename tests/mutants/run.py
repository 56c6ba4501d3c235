"""Plants faults and counts those that no test notices: python tests/mutants/run.py --help

Faults in Python and in native code are tried one after the other, each in a process that is forked from one that has
imported torch. Sources are copied before; the working tree stays as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import pathlib
import shutil
import sys
import time

import python

import native

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build/mutants"
sys.path.append(str(FOLDER / "tools"))  # cosmic-ray; last, so that what the tests need comes from their own environment

TABLE = ROOT / "docs/support/mutants.csv"
COLUMNS = ("file", "planted", "killed", "survived", "seconds")
SECONDS = 600.0  # more is a fault that was noticed

# Of native code, after native_tests.
PYTHON_TESTS = (
    "native/test_plan.py",
    "operators/test_values.py",
    "native/test_logits_native.py",
    "native/test_aggregation_native.py",
)
CHECK_TESTS = ("native/test_aclnn_refusals.py", "native/test_plan.py", "native/test_logits_native.py")


def set_up() -> None:
    """Of this process and its forks. One instruction set is enough, because all are compiled from one source."""
    os.environ.update(OMP_NUM_THREADS="1", MX_DRIVING_TEST_BACKENDS="reference,native-baseline")
    sys.dont_write_bytecode = True  # two faults in one second would share a cached file


def copy_tree(folder: pathlib.Path, library: pathlib.Path) -> pathlib.Path:
    """A copy of the package with `library` in it, and of its tests."""
    shutil.rmtree(folder, ignore_errors=True)
    leave = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("src", "tests", "native/include"):
        shutil.copytree(ROOT / name, folder / name, ignore=leave)
    shutil.copytree(ROOT / "native/include", folder / "src/mx_driving/include", dirs_exist_ok=True)
    shutil.copy2(ROOT / "pyproject.toml", folder)
    shutil.copy2(library, folder / "src/mx_driving")
    return folder


def _be_tested(tree: pathlib.Path, files: tuple[str, ...], log: pathlib.Path) -> int:
    """In the forked process."""
    import pytest

    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(tree)
    # an editable installation finds the package before sys.path does
    sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
    sys.path.insert(0, str(tree / "src"))
    with contextlib.suppress(Exception):  # a fault may break the import; then pytest says so
        import mx_driving

        assert pathlib.Path(mx_driving.__file__).is_relative_to(tree), mx_driving.__file__
    return int(pytest.main(["-x", "-p", "no:cacheprovider", "-p", "no:randomly", *(f"tests/{file}" for file in files)]))


def noticed_by(tree: pathlib.Path, files: tuple[str, ...], environment: dict[str, str] | None = None) -> bool:
    """Whether a test notices, in a process of its own."""
    child = os.fork()
    if child == 0:
        os.environ.update(environment or {})
        status = 70
        try:
            status = _be_tested(tree, files, tree / "log")
        finally:
            os._exit(status)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status != 0
        time.sleep(0.05)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return True


def need_passing(tree: pathlib.Path, files: tuple[str, ...]) -> None:
    if noticed_by(tree, files):
        raise SystemExit(f"without a fault these tests fail: {', '.join(files)}; {tree / 'log'} says why")


class Results:
    """What came of each fault. Files that were not tried keep their row of an earlier run."""

    def __init__(self) -> None:
        self.rows: dict[str, list[float]] = {}
        self.survivors: list[str] = []

    def add(self, name: str, fault: object, killed: bool, seconds: float) -> None:
        row = self.rows.setdefault(name, [0, 0, 0, 0.0])
        for column, more in enumerate((1, killed, not killed, seconds)):
            row[column] += more
        print(f"{'killed  ' if killed else 'SURVIVED'} {seconds:6.1f} s  {fault}", flush=True)
        if not killed:
            self.survivors.append(str(fault))
        self.write()

    def write(self) -> None:
        rows: dict[str, list[object]] = {}
        if TABLE.exists():
            with TABLE.open(newline="") as file:
                rows = {row[0]: list(row[1:]) for row in list(csv.reader(file))[1:]}
        for name, (planted, killed, survived, seconds) in self.rows.items():
            rows[name] = [int(planted), int(killed), int(survived), round(seconds)]
        with TABLE.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            writer.writerows([name, *rows[name]] for name in sorted(rows))


def try_python(tree: pathlib.Path, chosen: list[python.Fault], results: Results) -> None:
    passing = set()
    for fault in sorted(chosen, key=lambda f: (list(python.PROTECTED_BY).index(f.file), f.line)):
        files = python.PROTECTED_BY[fault.file]
        if files not in passing:
            need_passing(tree, files)
            passing.add(files)
        path = tree / "src/mx_driving" / fault.file
        source = path.read_text()
        path.write_text(fault.text(source))
        began = time.monotonic()
        killed = noticed_by(tree, files)
        results.add(f"src/mx_driving/{fault.file}", fault, killed, time.monotonic() - began)
        path.write_text(source)


def try_native(tree: pathlib.Path, out: pathlib.Path, chosen: list[native.Fault], results: Results, quick: bool) -> None:
    if native.native_tests_fail(out, 0, SECONDS):
        raise SystemExit("without a fault native_tests fail")
    for fault in chosen:
        began = time.monotonic()
        files = CHECK_TESTS if fault.file.startswith("call/") else PYTHON_TESTS
        killed = native.native_tests_fail(out, fault.number, SECONDS)
        if not killed and not quick:
            killed = noticed_by(tree, files, {native.SWITCH: str(fault.number)})
        results.add(f"native/src/{fault.file}", fault, killed, time.monotonic() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description="Plants faults and counts those that no test notices.")
    parser.add_argument("--half", choices=("python", "native"), help="one half alone")
    parser.add_argument("--count", type=int, default=80, help="faults in Python")
    parser.add_argument("--seed", type=int, default=1, help="which of all faults in Python")
    parser.add_argument("--only", default="", help="files whose name holds this")
    parser.add_argument("--number", type=int, action="append", help="this fault in native code alone")
    parser.add_argument("--native-tests-alone", action="store_true", help="without the Python tests of native faults")
    given = parser.parse_args()
    set_up()
    planted = native.faults(ROOT)
    out = native.build(ROOT, FOLDER / "native", planted, str(pathlib.Path(sys.executable).parent / "cmake"))
    tree = copy_tree(FOLDER / f"tree-{given.half or 'both'}", out / "libmx_driving.so")
    import numpy
    import torch

    print(f"torch {torch.__version__}, numpy {numpy.__version__}")  # imported once, before the forks
    results = Results()
    if given.half != "native":
        chosen = [f for f in python.faults(ROOT, given.count, given.seed) if given.only in f.file]
        try_python(tree, chosen, results)
    if given.half != "python":
        wanted = [f for f in planted if given.only in f.file and (not given.number or f.number in given.number)]
        try_native(tree, out, wanted, results, given.native_tests_alone)
    print(f"{len(results.survivors)} survived", *results.survivors, sep="\n")
    sys.exit(1 if results.survivors else 0)


if __name__ == "__main__":
    main()
