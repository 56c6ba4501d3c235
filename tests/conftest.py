"""Fixtures of all tests. MX_DRIVING_TEST_BACKENDS names the implementations to test; by default all on this machine are tested.
A test fails if a named implementation is missing.

Without a GPU the PTX of the Triton kernels is executed on the CPU by gpu/ptx.py, on small inputs unless "triton" is named.
"""

import atexit
import collections
import ctypes
import gc
import importlib
import importlib.util
import os
import pathlib
import re
import shutil
import sys
import tempfile

import attention_modules
import cases
import outcomes
import pytest
import torch

from mx_driving import _backends, _needs, compat

if not cases.ON_GPU and importlib.util.find_spec("triton"):
    import ptx
    from triton.runtime.driver import driver

    os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")  # compilation takes a tenth less time
    driver.set_active(ptx.Driver(int(os.environ.get("MX_DRIVING_TEST_PTX", "90"))))

for name in ("FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS"):  # with these, typer would colour the output that tests read
    os.environ.pop(name, None)

collect_ignore = ["libraries"]  # `make test-libraries` runs these in an environment of its own

if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    # torch's own cache outlives the tests and ignores the instruction set. A loop that was compiled for another instruction set
    # skips half of the numbers.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="inductor-")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)
# The tests compile a few small loops. Precompiled headers, compiling processes and trials of the compiler's instruction sets
# would take longer than they save.
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

# Use ccache, if it is installed, for the programs that tests compile in temporary folders.
if os.path.isdir(ccache := "/usr/lib/ccache") and ccache not in os.environ["PATH"].split(os.pathsep):
    os.environ |= {"PATH": os.pathsep.join([ccache, os.environ["PATH"]]), "CCACHE_NOHASHDIR": "1"}
    os.environ.setdefault("CCACHE_BASEDIR", tempfile.gettempdir())

# torch's tracing makes many objects. Python's garbage collection after each 700 of them took 8 % of the time of tests/dispatch.
gc.set_threshold(50_000, 20, 50)

# Test processes and the programs that they start share the cores, so waiting threads must not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# glibc returns large freed blocks to the system, which clears new ones for the next test: a third of the time of test_values.
# Only processes that start later, such as workers, read these variables.
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**32))
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**36))


@pytest.fixture(params=cases.wanted_implementations())
def implementation(request):
    """Run the test once for each implementation, inside its context."""
    known = cases.implementations()
    if request.param not in known:
        pytest.fail(f"implementation {request.param} is not on this machine; there are {sorted(known)}")
    with known[request.param]():
        yield request.param


@pytest.fixture
def every_thread():
    """Use as many threads as torch may use, even for small calls."""
    _backends.native.loaded().mxd_set_work_of_a_thread(ctypes.c_int64(1))
    yield
    _backends.native.loaded().mxd_set_work_of_a_thread(ctypes.c_int64(0))


@pytest.fixture
def same_bits():
    """Make a GPU compute the same bits on every call. A CPU, which also executes the kernels' PTX, always does."""
    torch.use_deterministic_algorithms(cases.ON_GPU)


@pytest.fixture
def poisoned_allocations():
    """Fill the tensors of torch.empty with NaN, so that an element that is never written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = before


@pytest.fixture
def kernel_calls():
    """Return the list of the operators whose kernels are called."""
    with attention_modules.Operators() as calls:
        yield calls.names


@pytest.fixture
def mx(monkeypatch, capsys):
    """Run `mx-driving` like a shell. Return exit status, standard output, standard error."""
    from mx_driving_portable.command import main

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["mx-driving", *map(str, args)])
        with pytest.raises(SystemExit) as stop:
            sys.exit(main())
        said = capsys.readouterr()
        return stop.value.code or 0, said.out, said.err

    return run


@pytest.fixture
def refusal(monkeypatch, capsys, tmp_path):
    """Run an example that refuses its options. It must print one sentence, exit with status 1 and write nothing."""

    def run(program, *options):
        before = sorted(tmp_path.rglob("*"))
        monkeypatch.setattr(sys, "argv", [f"{program.__name__}.py", *map(str, options)])
        with pytest.raises(SystemExit) as stop:
            program.main()
        said = capsys.readouterr().err
        assert stop.value.code == 1
        assert re.fullmatch(f"{program.__name__}.py: .*\n", said), said
        assert sorted(tmp_path.rglob("*")) == before
        return said

    return run


@pytest.fixture
def unbuilt(tmp_path, monkeypatch):
    """Write a package of a repository whose extensions are not built; return its folder."""
    names = []

    def write(name, text=""):
        names.append(name)
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
        return tmp_path / name

    monkeypatch.syspath_prepend(tmp_path)
    compat.install()
    yield write
    compat.uninstall()
    for name in [n for n in sys.modules if n.partition(".")[0] in names]:
        del sys.modules[name]


@pytest.fixture
def extension(unbuilt):
    """Import an extension by its name, as a submodule of an unbuilt package."""
    unbuilt("someones")
    return lambda name: importlib.import_module(f"someones.{name}")


@pytest.fixture
def wide_terminal(monkeypatch):
    """Make the terminal so wide that tables do not wrap."""
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(autouse=True)
def _settings_of_torch():
    """Use one thread, because pytest-xdist runs two workers on two cores. Undo the settings that a test makes for itself, and
    forget what it compiled: torch.compile gives up after a few graphs of one function."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float32)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def pytest_addoption(parser):
    parser.addoption("--record", type=pathlib.Path, help="write the counts of every test file to this CSV file")
    parser.addoption("--packages", default="newest", help="what --record says of the other packages' versions")


def pytest_configure(config):
    if config.pluginmanager.hasplugin("xdist"):
        config.option.loadscopereorder = False  # xdist would start the largest groups first, even if their tests are short


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(config, items):
    """Run all implementations of the same inputs in one process, which computes their truth once. Start long tests first, so
    that no process still runs one at the end."""
    for item in items:
        if item.path.parent.name == "onnx" and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.long)
            item.add_marker(pytest.mark.xdist_group("onnx"))  # so that each file is exported once
        if "implementation" in getattr(item, "fixturenames", ()):
            inputs = item.callspec.id.replace(str(item.callspec.params["implementation"]), "", 1)
            item.add_marker(pytest.mark.xdist_group(f"{item.originalname} {inputs}"))
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_runtest_setup(item):
    """Skip a test with the mark `needs(feature)` if the package's own table says that this torch lacks the feature."""
    for marker in item.iter_markers("needs"):
        if sentence := _needs.lacks(*marker.args):
            pytest.skip(sentence)


def pytest_terminal_summary(terminalreporter, config):
    """Print what skipped tests need, so that nobody mistakes them for passed."""
    reasons = collections.Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", []))
    if reasons:
        terminalreporter.section("skipped tests, and what they need")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:4} {reason.removeprefix('Skipped: ')}")
    if path := config.getoption("--record"):
        outcomes.write(path, outcomes.here(config.getoption("--packages")), outcomes.counts(terminalreporter.stats))
