"""Plants the faults of faults.toml one by one, and fails if its tests do not notice one: python tests/mutants/run.py [PART]

Native faults are compiled into one library, each behind a switch, because kernels take minutes to compile. The tests run once
without a fault, which says which faults each of them reaches: lines of Python by coverage.py, switches by a mark that they
leave. Then each fault meets the tests that reach it, the one that noticed it before and then the quickest first. A stopped run
goes on where it was; a noticed fault is tried again when its file has changed. PART of a line, as sampling.h, chooses some.
"""

from __future__ import annotations

import ast
import csv
import ctypes
import dataclasses
import hashlib
import importlib
import itertools
import json
import multiprocessing
import os
import pathlib
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build/mutants"
LIST, HEADER = pathlib.Path(__file__).with_name("faults.toml"), pathlib.Path(__file__).with_name("switch.h")
RESULTS = FOLDER / "results.jsonl"
TESTS, SLOW, FILES = tomllib.loads(LIST.read_text()).values()
Results = dict[str, tuple[str, float]]  # fault -> who noticed it, or nothing, and how long that took
MOST = 1024  # switches in switch.h
BUDGET = 30.0  # seconds that the tests of one fault may take: what only slower ones notice counts as survived
LEAST, SLOWER = 30, 3  # CPU seconds that a trial may take: LEAST, and SLOWER times what its tests take without a fault


@dataclasses.dataclass(frozen=True)
class Fault:
    number: int  # of its switch, from 1
    path: str
    old: str
    new: str
    begin: int  # in the text of its file
    reason: str  # why no result can differ, or nothing

    def __str__(self) -> str:
        return f"{self.path}, {self.old}  ->  {self.new}"

    @property
    def is_native(self) -> bool:
        return self.path.startswith("native/")

    def planted(self, text: str) -> str:
        new = f"(mxd_planted({self.number}) ? ({self.new}) : ({self.old}))" if self.is_native else self.new
        return text[: self.begin] + new + text[self.begin + len(self.old) :]

    def lines(self, text: str) -> range:
        """Those of the statement that has it, or of its head: Python reports a statement by some of its lines."""
        line, heads = text.count("\n", 0, self.begin) + 1, []
        for node in (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.stmt)):
            body = getattr(node, "body", None)
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
            heads.append(range(first, max(first + 1, body[0].lineno if body else (node.end_lineno or first) + 1)))
        return min((head for head in heads if line in head), key=len)


def faults() -> list[Fault]:
    """The list. A quote that its file does not have exactly once stops the program, which names all of them."""
    found, lost = [], []
    for path, rows in FILES.items():
        text = (ROOT / path).read_text() if (ROOT / path).exists() else ""
        for row in rows:
            at = row.get("at", row["old"])
            begin = text.find(row["old"], text.find(at))
            if text.count(at) != 1 or begin < 0:
                lost.append(f"{path} must have once: {at!r}; it has it {text.count(at)} times")
            found.append(Fault(len(found) + 1, path, row["old"], row["new"], begin, row.get("reason", "")))
    if lost:
        raise SystemExit("\n".join([f"{LIST.name} must quote files as they are; got", *lost]))
    assert len(found) < MOST
    return found


def build(every: list[Fault]) -> pathlib.Path:
    """Compile a copy of the sources with all switches."""
    copy, out = FOLDER / "native/source", FOLDER / "native/out"
    sources = [f for folder in ("native", "tests/native") for f in (ROOT / folder).rglob("*.*") if "py" not in f.suffix]
    sources += [ROOT / name for name in ("CMakeLists.txt", "pyproject.toml", "src/mx_driving/_descriptions.py")]
    for source in filter(pathlib.Path.is_file, sources):
        name, text = str(source.relative_to(ROOT)), source.read_text()
        for fault in sorted((f for f in every if f.path == name), key=lambda f: -f.begin):  # so that places before it stay
            text = fault.planted(text)
        if not (copy / name).exists() or (copy / name).read_text() != text:  # only what changed is compiled again
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_text(text)
    cmake = pathlib.Path(sys.executable).parent / "cmake"
    options = "MXD_BASELINE_ONLY=ON MXD_NATIVE_TESTS=ON MXD_KERNEL_OPTIMISATION=-O1 CMAKE_CXX_FLAGS_DEBUG=-O1"
    flags = [f"-D{option}" for option in (*options.split(), "CMAKE_BUILD_TYPE=Debug", f"CMAKE_CXX_FLAGS=-include {HEADER}")]
    targets = ["--parallel", "2", "--target", "mx_driving", "compare"]
    for command in ([cmake, "-S", copy, "-B", out, *flags], [cmake, "--build", out, *targets]):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return out


def copy_tree(library: pathlib.Path) -> pathlib.Path:
    """A copy of the package with `library` in it, and of its tests."""
    tree = FOLDER / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    for name in ("src", "tests", "native"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.so", "cmake"))
    shutil.copytree(ROOT / "native/include", tree / "src/mx_driving/include", dirs_exist_ok=True)
    shutil.copy2(ROOT / "pyproject.toml", tree)
    shutil.copy2(library, tree / "src/mx_driving")
    return tree


def in_fork(work: Callable[[], int], log: pathlib.Path, seconds: float = resource.RLIM_INFINITY) -> bool:
    """Whether `work`, in a process of its own, returned 0 within that CPU time, which other programs do not take."""

    def child() -> None:
        with log.open("w") as output:
            os.dup2(output.fileno(), 1), os.dup2(output.fileno(), 2)
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), resource.RLIM_INFINITY))
        sys.exit(work())

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    return process.exitcode == 0


def run_pytest(tree: pathlib.Path, files: Iterable[str], plugin: object) -> int:
    os.chdir(tree)
    sys.meta_path[:] = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]  # they find an editable installation
    sys.path.insert(0, str(tree / "src"))
    without = [f"-pno:{name}" for name in ("cacheprovider", "randomly", "faulthandler")]
    return int(pytest.main(["-x", "-s", *without, *(f"tests/{file}" for file in files)], plugins=[plugin]))


class Noted:
    """Notes which faults each test reaches, and how long it takes."""

    def __init__(self, tree: pathlib.Path, every: list[Fault], to: pathlib.Path) -> None:
        import coverage

        self.tree, self.every, self.to, self.seen = tree, every, to, {}
        files = [str(tree / path) for path in {f.path for f in every if not f.is_native}]
        self.coverage = coverage.Coverage(data_file=None, include=files, config_file=False)
        self.coverage.start()  # before the package is imported: what runs then has no test's name

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        import mx_driving

        assert pathlib.Path(mx_driving.__file__).is_relative_to(self.tree), mx_driving.__file__
        items[:] = [item for item in items if not any(name in item.nodeid for name in SLOW)]
        library = ctypes.CDLL(str(self.tree / "src/mx_driving/libmx_driving.so"))
        self.reached = (ctypes.c_ubyte * MOST).in_dll(library, "mxd_reached")

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.coverage.switch_context(item.nodeid)
        ctypes.memset(self.reached, 0, MOST)
        began = time.process_time()
        yield
        numbers = [number for number, was in enumerate(self.reached) if was]
        self.seen[item.nodeid] = (time.process_time() - began, numbers)

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        for fault in (f for f in self.every if not f.is_native):
            path = self.tree / fault.path
            contexts = self.coverage.get_data().contexts_by_lineno(str(path))
            tests = {test for line in fault.lines(path.read_text()) for test in contexts.get(line, ())}
            for test in self.seen if "" in tests else tests:
                self.seen[test][1].append(fault.number)
        self.to.write_text(json.dumps(self.seen))


@dataclasses.dataclass
class Ordered:
    """Runs the tests of a list, in its order, and leaves the name of the one that runs in a file."""

    tests: list[str]
    name: pathlib.Path

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self.tests), key=lambda i: self.tests.index(i.nodeid))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        self.name.write_text(item.nodeid)


def note(tree: pathlib.Path, every: list[Fault]) -> dict[str, Any]:
    """What `Noted` finds, of these sources."""
    files = sorted(file for name in ("src", "native", "tests") for file in (ROOT / name).rglob("*"))
    to = FOLDER / f"seen-{digest(LIST, *(f for f in files if f.suffix in ('.py', '.cpp', '.h')))}.json"
    if not to.exists() and not in_fork(lambda: run_pytest(tree, TESTS, Noted(tree, every, to)), tree / "log"):
        to.unlink(missing_ok=True)
        raise SystemExit(f"without a fault a test fails; {tree / 'log'} says which")
    return json.loads(to.read_text())


def by_tests(tree: pathlib.Path, fault: Fault, seen: dict[str, Any], likely: str) -> str:
    """The test that notices the fault, or nothing."""
    tests = sorted((t for t in seen if fault.number in seen[t][1]), key=lambda t: (t != likely, seen[t][0]))
    if not tests:
        return ""
    totals = itertools.accumulate(seen[t][0] for t in tests)
    tests = [t for t, total in zip(tests, totals, strict=True) if t == tests[0] or total <= BUDGET]
    path, name = tree / fault.path, tree / "test"
    source = path.read_text()
    name.write_text("import")
    os.environ["MXD_MUTANT"] = str(fault.number)
    if not fault.is_native:
        path.write_text(fault.planted(source))
    files = dict.fromkeys(test.partition("::")[0].removeprefix("tests/") for test in tests)
    seconds = LEAST + SLOWER * sum(seen[t][0] for t in tests)
    passed = in_fork(lambda: run_pytest(tree, files, Ordered(tests, name)), tree / "log", seconds)
    path.write_text(source)
    return "" if passed else name.read_text()


def by_compare(out: pathlib.Path, fault: Fault) -> str:
    """The first of 400 random calls between guarded pages that touches memory which no tensor has."""

    def run(number: int, *how: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        os.environ["MXD_MUTANT"] = str(number)
        return subprocess.run([out / "tests/native/compare", *how], input=given, capture_output=True)

    done = run(fault.number, "read", given=run(0, "write", "0", "400").stdout)
    findings = re.findall(".*(?:signal|a byte beside).*", (done.stdout + done.stderr).decode())
    return f"compare: {findings[0]}" if findings else ""


def digest(*paths: pathlib.Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:12]


def key(fault: Fault) -> str:
    """Of its result, which counts while its file stays as it is."""
    return f"{digest(ROOT / fault.path)} {fault}"


def try_some(chosen: list[Fault], every: list[Fault], found: Results) -> None:
    out = build(every)
    tree = copy_tree(out / "libmx_driving.so")
    seen = note(tree, every)
    likely = {known.partition(" ")[2]: killer for known, (killer, _) in found.items()}
    for name in ("torch._dynamo", "onnxscript", "onnxruntime", "triton"):  # so that no fork has to
        importlib.import_module(name)
    for fault in chosen:
        began = sum(os.times()[:4])
        killer = by_tests(tree, fault, seen, likely.get(str(fault), "")) or (by_compare(out, fault) if fault.is_native else "")
        found[key(fault)] = killer, seconds = killer, sum(os.times()[:4]) - began
        with RESULTS.open("a") as file:
            print(json.dumps([key(fault), found[key(fault)]]), file=file)
        print(f"{'killed' if killer else 'SURVIVED'} {seconds:6.1f} s  {fault}  {killer and 'by ' + killer}", flush=True)


def write_tables(every: list[Fault], found: Results) -> None:
    lines = [("file", "planted", "killed", "survived", "equivalent", "seconds")]
    for path in sorted(FILES):
        of_file = [f for f in every if f.path == path]
        rows = [found[key(f)] for f in of_file if not f.reason]
        killed, seconds = sum(bool(killer) for killer, _ in rows), sum(seconds for _, seconds in rows)
        lines.append((path, len(of_file), killed, len(rows) - killed, len(of_file) - len(rows), round(seconds)))
    reasons = [("file", "fault", "reason"), *sorted((*str(f).split(", ", 1), f.reason) for f in every if f.reason)]
    for name, table in (("mutants", lines), ("mutants_equivalent", reasons)):
        with (ROOT / f"docs/support/{name}.csv").open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(table)


def main() -> None:
    only, every = "".join(sys.argv[1:]), faults()
    os.environ.update(OMP_NUM_THREADS="1", MX_DRIVING_TEST_BACKENDS="native-baseline", TRITON_INTERPRET="1")
    sys.path.append(str(ROOT / "build/coverage"))  # last, so that what the tests need comes from their own environment
    sys.dont_write_bytecode = True  # two faults in one second would have one cached file
    found: Results = dict(map(json.loads, RESULTS.read_text().splitlines() if RESULTS.exists() else []))
    real = [f for f in every if not f.reason]
    try_some([f for f in real if only in str(f) and not found.get(key(f), [""])[0]], every, found)
    untried = [f for f in real if key(f) not in found]
    survivors = [f for f in real if found.get(key(f)) and not found[key(f)][0]]
    if not untried:
        write_tables(every, found)
    print(f"{len(survivors)} survived, {len(untried)} of {len(every)} not tried", *survivors, sep="\n")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
