"""Plants faults and counts those that no test notices: python tests/mutants/run.py --help

First every test runs once without a fault, which tells what it comes by. Then each fault is tried with the tests that come by
it: first the one that noticed it in an earlier run, then the quickest. Sources are copied before; the working tree stays as
it is. Results are in build/mutants/results.csv, fault by fault. A run goes on where one was stopped, and a fault whose file is
the same as in an earlier run is not tried again.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import json
import os
import pathlib
import shutil
import sys
import time
from typing import NoReturn

import forks
import python
import results

import native

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build/mutants"
sys.path.append(
    str(FOLDER / "tools")
)  # cosmic-ray and coverage; last, so that what the tests need comes from their own environment

SUPPORT = ROOT / "docs/support"
COUNT, SEED = 100, 1  # of the faults in Python
BUDGET = 30.0  # seconds that the tests of one fault may take: what only slower ones notice counts as survived

PYTHON_TESTS = (
    "operators/test_checks.py",
    "operators/test_errors.py",
    "operators/test_limits.py",
    "operators/test_data_checks.py",
    "operators/test_autograd.py",
    "native/test_aclnn_refusals.py",
    "torch/test_transforms.py",
    "torch/test_compile.py",
    "torch/test_decompositions.py",
    "deploy/test_beside.py",
    "models/test_nn_errors.py",
    "models/test_patching.py",
)
NATIVE_TESTS = (
    "native/test_refusals.py",
    "native/test_plan.py",
    "native/test_logits_native.py",
    "native/test_aggregation_native.py",
    "native/test_aclnn_refusals.py",
    "native/test_plan_bounds.py",
    "operators/test_values.py",
    "operators/test_with_logits.py",
    "operators/test_nonfinite.py",
)
# They take a minute each, and what they are about is elsewhere, too.
LEFT_OUT = ("test_vendor_full_size_multi_scale", "test_sums_of_more_than_2_to_the_24_ones")
PROGRAM = "native_tests "  # begins the name of a test that is in C++


def set_up() -> None:
    """Of this process and its forks. One instruction set is enough, because all are compiled from one source."""
    os.environ.update(OMP_NUM_THREADS="1", MX_DRIVING_TEST_BACKENDS="native-baseline")
    import torch  # once, before the forks, and after OMP_NUM_THREADS is set

    print(f"torch {torch.__version__}")
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # as the tests do, which import Triton later
    sys.dont_write_bytecode = True  # two faults in one second would share a cached file


def copy_tree(folder: pathlib.Path, library: pathlib.Path) -> pathlib.Path:
    """A copy of the package with `library` in it, and of its tests."""
    shutil.rmtree(folder, ignore_errors=True)
    leave = shutil.ignore_patterns("__pycache__", "*.so", "cmake", "include")
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=leave)
    shutil.copytree(ROOT / "native", folder / "native")
    shutil.copytree(ROOT / "native/include", folder / "src/mx_driving/include")
    shutil.copy2(ROOT / "pyproject.toml", folder)
    shutil.copy2(library, folder / "src/mx_driving")
    return folder


def _digest(*paths: pathlib.Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in (".py", ".cpp", ".h", ".toml"):
                digest.update(str(file).encode() + file.read_bytes())
    return digest.hexdigest()[:12]


@functools.cache
def noted(file: str, what: str) -> pathlib.Path:
    """Where it stands what the tests of a file come by, in these sources."""
    tests = ROOT / "tests"
    sources = (ROOT / "src", ROOT / "native", native.FAULTS) if what == "switches" else (ROOT / "src",)
    digest = _digest(*sources, tests / "conftest.py", tests / "helpers", tests / file)
    return FOLDER / f"seen/{pathlib.Path(file).stem}-{what}-{digest}.json"


def read(files: tuple[str, ...], what: str) -> forks.Seen:
    return {test: seen for file in files for test, seen in json.loads(noted(file, what).read_text()).items()}


def in_order(seen: forks.Seen, reaching: list[str], likely: str) -> list[str]:
    """The likeliest first, then the quickest, as many as BUDGET allows."""
    chosen, seconds = [], 0.0
    for test in sorted(reaching, key=lambda test: (test != likely, seen[test][0])):
        seconds += seen[test][0]
        if chosen and seconds > BUDGET:
            break
        chosen.append(test)
    return chosen


def limit(seen: forks.Seen, tests: list[str]) -> float:
    return forks.LEAST + forks.SLOWER * sum(seen[test][0] for test in tests)


def stop(tree: pathlib.Path) -> NoReturn:
    print(f"without a fault a test fails; {tree / 'log'} says which", flush=True)
    sys.exit(2)


# Python


def note_lines(tree: pathlib.Path) -> forks.Seen:
    for file in PYTHON_TESTS:
        to = noted(file, "lines")
        if to.exists():
            continue

        def work(file: str = file, to: pathlib.Path = to) -> int:
            return forks.run_pytest(tree, [file], forks.Lines(tree, python.FILES, to))

        if not forks.in_fork(work, tree / "log"):
            to.unlink(missing_ok=True)
            stop(tree)
    return read(PYTHON_TESTS, "lines")


def try_one(tree: pathlib.Path, fault: python.Fault, seen: forks.Seen, likely: str) -> str:
    """The test that notices a fault in Python, or nothing."""
    path = tree / fault.path
    source = path.read_text()
    lines = set(python.lines_of_statement(source, fault.line))
    tests = in_order(seen, [test for test in seen if lines & set(seen[test][1].get(fault.file, ()))], likely)
    if not tests:
        return ""
    files = dict.fromkeys(test.partition("::")[0].removeprefix("tests/") for test in tests)
    name = tree / "test"
    name.write_text("import")

    def work() -> int:
        return forks.run_pytest(tree, files, forks.Ordered(tests, name))

    path.write_text(fault.text(source))
    passed = forks.in_fork(work, tree / "log", limit(seen, tests))
    path.write_text(source)
    return "" if passed else name.read_text()


def try_python(tree: pathlib.Path, chosen: list[python.Fault], found: results.Results) -> None:
    seen = note_lines(tree)
    forks.import_what_tests_do(tree, PYTHON_TESTS)
    for fault in chosen:
        began = time.process_time() + _of_children()
        killer = try_one(tree, fault, seen, found.killer(fault))
        found.add(fault, killer, time.process_time() + _of_children() - began)


def _of_children() -> float:
    return sum(os.times()[2:4])


# Native code


def note_programs(out: pathlib.Path) -> forks.Seen:
    """As `note_lines`, for the tests in C++."""
    seen: forks.Seen = {}
    for name in native.NATIVE_TESTS:
        reached, began = out / f"reached-{name}", _of_children()
        reached.unlink(missing_ok=True)
        if native.native_test_fails(out, name, 0, 600, reached):
            raise SystemExit(f"without a fault native_tests {name} fails")
        numbers = sorted({int(line) for line in reached.read_text().split()})
        seen[PROGRAM + name] = (_of_children() - began, {"switches": numbers})
    return seen


def try_native(tree: pathlib.Path, out: pathlib.Path, chosen: list[native.Fault], found: results.Results) -> int:
    """In a fork: the package is imported once, and each fault has a fork of that."""
    programs = note_programs(out)

    def try_faults(switches: forks.Switches) -> None:
        for file in NATIVE_TESTS:
            to = noted(file, "switches")
            if not to.exists() and not switches.note(file, to):
                to.unlink(missing_ok=True)
                stop(tree)
        seen: forks.Seen = programs | read(NATIVE_TESTS, "switches")
        for fault in chosen:
            began = time.process_time() + _of_children()
            killer = first_to_notice(switches, seen, fault)
            note = ""
            if not killer:
                touched, note = native.compared(out, fault.number)
                killer = f"compare: {touched}" if touched else ""
            found.add(fault, killer, time.process_time() + _of_children() - began, note)

    def first_to_notice(switches: forks.Switches, seen: forks.Seen, fault: native.Fault) -> str:
        reaching = [test for test in seen if fault.number in seen[test][1]["switches"]]
        ordered = in_order(seen, reaching, found.killer(fault))
        for is_program, tests in itertools.groupby(ordered, lambda test: test.startswith(PROGRAM)):
            group = list(tests)
            if is_program:
                fails = (t for t in group if native.native_test_fails(out, t.removeprefix(PROGRAM), fault.number, 600))
                killer = next(fails, "")
            else:
                killer = switches.killer(fault.number, group, limit(seen, group))
            if killer:
                return killer
        return ""

    return forks.run_pytest(tree, NATIVE_TESTS, forks.Switches(tree, LEFT_OUT, try_faults))


def main() -> None:
    parser = argparse.ArgumentParser(description="Plants faults and counts those that no test notices.")
    (FOLDER / "seen").mkdir(parents=True, exist_ok=True)
    parser.add_argument("--half", choices=("python", "native"), help="one half alone")
    parser.add_argument("--count", type=int, default=COUNT, help="faults in Python")
    parser.add_argument("--seed", type=int, default=SEED, help="which of all faults in Python")
    parser.add_argument("--only", default="", help="faults whose text, which begins with the file, holds this")
    parser.add_argument("--survivors", action="store_true", help="try those again that survived")
    parser.add_argument("--again", action="store_true", help="try those again that were tried")
    given = parser.parse_args()
    set_up()
    in_native = native.faults(ROOT)
    planned = [*python.faults(ROOT, given.count, given.seed), *in_native]
    found = results.Results(ROOT, FOLDER / "results.csv")

    def is_wanted(fault: results.Fault) -> bool:
        known = found.known(fault)
        again = given.again or not known or (given.survivors and not known.killer)
        return again and not fault.reason and given.only in str(fault)

    out = native.build(ROOT, FOLDER / "native", in_native, str(pathlib.Path(sys.executable).parent / "cmake"))
    tree = copy_tree(FOLDER / f"tree-{given.half or 'both'}", out / "libmx_driving.so")
    if given.half != "native":
        try_python(tree, [f for f in planned if isinstance(f, python.Fault) and is_wanted(f)], found)
    if given.half != "python":
        chosen = [f for f in planned if isinstance(f, native.Fault) and is_wanted(f)]
        if not forks.in_fork(lambda: try_native(tree, out, chosen, found), None):
            sys.exit(2)
    found.read()
    sys.exit(report(found, planned))


def report(found: results.Results, planned: list[results.Fault]) -> int:
    found.write_table(SUPPORT / "mutants.csv", planned)
    results.write_reasons(SUPPORT / "mutants_equivalent.csv", planned)
    survivors = [f for f in planned if not f.reason and (known := found.known(f)) and not known.killer]
    untried = [f for f in planned if not f.reason and not found.known(f)]
    print(f"{len(survivors)} survived, {len(untried)} of {len(planned)} not tried", *survivors, sep="\n")
    return int(bool(survivors))


if __name__ == "__main__":
    main()
