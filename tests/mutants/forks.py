"""Processes that fork from one which has imported torch, and what pytest does in them."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import pathlib
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator

import pytest

import native

LEAST = 60  # seconds of CPU time that a trial may take, however quick its tests are
SLOWER = 5  # with a fault than without

# Test -> how long it takes, and what it comes by: numbers of switches, or file -> lines.
Seen = dict[str, tuple[float, dict[str, list[int]]]]


def in_fork(work: Callable[[], int], log: pathlib.Path | None, seconds: float = 0) -> bool:
    """Whether `work`, in a process of its own, returned 0 and took no more CPU time than that. 0: however long it takes.

    CPU time, because other programs may stop this one for a while.
    """
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 70
        try:
            if log:
                output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(output, 1)
                os.dup2(output, 2)
            if seconds:
                resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 5))
            status = work()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


def run_pytest(tree: pathlib.Path, files: Iterable[str], plugin: object) -> int:
    os.chdir(tree)
    # an editable installation finds the package before sys.path does
    sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
    sys.path.insert(0, str(tree / "src"))
    arguments = [
        "-x",
        "-s",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        "-p",
        "no:faulthandler",
        *(f"tests/{file}" for file in files),
    ]
    return int(pytest.main(arguments, plugins=[plugin]))


def _ours(tree: pathlib.Path) -> None:
    import mx_driving

    assert pathlib.Path(mx_driving.__file__).is_relative_to(tree), mx_driving.__file__


class Imports:
    """Collects, and leaves the names of all modules that were imported from elsewhere."""

    def __init__(self, tree: pathlib.Path, to: pathlib.Path) -> None:
        self.tree, self.to = tree, to

    def pytest_runtestloop(self) -> bool:
        of_others = [
            name
            for name, module in list(sys.modules.items())
            if getattr(module, "__file__", None) and not pathlib.Path(str(module.__file__)).is_relative_to(self.tree)
        ]
        self.to.write_text("\n".join(of_others))
        return True


def import_what_tests_do(tree: pathlib.Path, files: Iterable[str]) -> None:
    """All but the package and the tests themselves, so that no fork has to."""
    names = tree / "imports"
    if in_fork(lambda: run_pytest(tree, files, Imports(tree, names)), tree / "log"):
        for name in names.read_text().split():
            with contextlib.suppress(Exception):
                importlib.import_module(name)


class Ordered:
    """Runs the tests of a list, in its order, and leaves the name of the one that runs in a file."""

    def __init__(self, tests: list[str], name: pathlib.Path) -> None:
        self.place = {test: place for place, test in enumerate(tests)}
        self.name = name

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self.place), key=lambda i: self.place[i.nodeid])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        self.name.write_text(item.nodeid)


class Lines:
    """Notes which lines of the package each test comes by, and how long it takes."""

    def __init__(self, tree: pathlib.Path, files: Iterable[str], to: pathlib.Path) -> None:
        import coverage

        self.tree, self.to, self.seconds = tree, to, {}
        self.files = [str(tree / "src/mx_driving" / file) for file in files]
        self.coverage = coverage.Coverage(data_file=None, include=self.files, config_file=False)
        self.coverage.start()  # before the package is imported: what runs then has no test's name

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.coverage.switch_context(item.nodeid)
        began = time.process_time()
        yield
        self.seconds[item.nodeid] = time.process_time() - began

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        _ours(self.tree)
        data = self.coverage.get_data()
        seen: Seen = {test: (seconds, {}) for test, seconds in self.seconds.items()}
        for file in self.files:
            name = str(pathlib.Path(file).relative_to(self.tree / "src/mx_driving"))
            for line, tests in data.contexts_by_lineno(file).items():
                for test in seen if "" in tests else tests:
                    seen[test][1].setdefault(name, []).append(line)
        self.to.write_text(json.dumps(seen))


class Switches:
    """Notes which switches of the library each test comes by, then tries faults; all in forks of what was imported once."""

    def __init__(self, tree: pathlib.Path, left_out: tuple[str, ...], try_faults: Callable[[Switches], None]) -> None:
        self.tree, self.left_out, self.try_faults = tree, left_out, try_faults

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if not any(name in item.nodeid for name in self.left_out)]

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        _ours(self.tree)
        from mx_driving._backends import native as kernels

        library = kernels._load()
        assert isinstance(library, ctypes.CDLL), library
        self.chosen = ctypes.c_int.in_dll(library, "mxd_mutant")
        self.reached = (ctypes.c_ubyte * native.MOST).in_dll(library, "mxd_reached")
        self.session = session
        self.by_name = {item.nodeid: item for item in session.items}
        self.try_faults(self)
        return True

    def note(self, file: str, to: pathlib.Path) -> bool:
        """Whether all tests of a file pass."""
        return in_fork(lambda: self._note(file, to), self.tree / "log")

    def _note(self, file: str, to: pathlib.Path) -> int:
        seen: Seen = {}
        for item in [item for item in self.session.items if item.nodeid.startswith(f"tests/{file}::")]:
            ctypes.memset(self.reached, 0, native.MOST)
            began = time.process_time()
            self._run(item, None)
            numbers = [number for number, was in enumerate(self.reached) if was]
            seen[item.nodeid] = (time.process_time() - began, {"switches": numbers})
        to.write_text(json.dumps(seen))
        return int(self.session.testsfailed > 0)

    def _run(self, item: pytest.Item, following: pytest.Item | None) -> None:
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)

    def killer(self, number: int, tests: list[str], seconds: float) -> str:
        """The test that notices, or nothing."""
        name = self.tree / "test"
        items = [self.by_name[test] for test in tests]

        def trial() -> int:
            self.chosen.value = number
            for item, following in zip(items, [*items[1:], None], strict=True):
                name.write_text(item.nodeid)
                self._run(item, following)
                if self.session.testsfailed:
                    return 1
            return 0

        return "" if in_fork(trial, self.tree / "log", seconds) else name.read_text()
