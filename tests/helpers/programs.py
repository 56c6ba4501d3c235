"""Programs in Python that tests start: `python("-c", code)` is `python -c code`, in a fork of a process that has torch already.

To import torch takes a second and a half, in every program. A program that is about imports, about what torch reads when it is
loaded or about the interpreter's own options needs a process of its own: subprocess.
"""

import atexit
import gc
import importlib.util
import multiprocessing
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile
import traceback
import types
import warnings

_TESTS = pathlib.Path(__file__).parents[1]  # pytest finds helpers there, and programs do not
if "forkserver" in multiprocessing.get_all_start_methods():
    _FORKS = multiprocessing.get_context("forkserver")
    _FORKS.set_forkserver_preload(["torch"])
else:  # Windows
    _FORKS = multiprocessing.get_context("spawn")


def example(name: str) -> types.ModuleType:
    """Return a program of examples/ as a module."""
    folder = _TESTS.parent / "examples"
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return load_file(name, folder / f"{name}.py")


def load_file(name: str, file: pathlib.Path) -> types.ModuleType:
    """Import a file under a name of its own."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


Done = subprocess.CompletedProcess[str]


def python(*command: object, cwd: object = None, env: dict[str, str] | None = None, check: bool = True) -> Done:
    """Run a program as subprocess.run does. If it fails, raise an error with its standard error. The interpreter's options
    `-W ignore`, -c and -m are supported."""
    words = [str(word) for word in command]
    with tempfile.TemporaryDirectory() as folder:
        printed, errors = pathlib.Path(folder, "printed"), pathlib.Path(folder, "errors")
        arguments = (words, str(cwd or pathlib.Path.cwd()), dict(os.environ if env is None else env), printed, errors)
        program = _FORKS.Process(target=_run, args=arguments)
        program.start()
        program.join()
        assert program.exitcode is not None
        done = Done(words, program.exitcode, printed.read_text(), errors.read_text())
    assert done.returncode == 0 or not check, done.stderr
    return done


def _run(words: list[str], cwd: str, environment: dict[str, str], printed: pathlib.Path, errors: pathlib.Path) -> None:
    for stream, path in ((1, printed), (2, errors)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, stream)
        os.close(file)
    gc.set_threshold(50_000, 20, 50)  # as in conftest.py
    multiprocessing.process._parent_process = None  # pyright: ignore[reportAttributeAccessIssue]
    os.chdir(cwd)
    sys.path[:] = [folder for folder in sys.path if not pathlib.Path(folder).is_relative_to(_TESTS)]
    os.environ.clear()
    os.environ.update(environment)
    if words[:2] == ["-W", "ignore"]:
        warnings.simplefilter("ignore")
        del words[:2]
    try:
        _main(words)
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves without them


def _main(words: list[str]) -> None:
    """Run the command as the interpreter does."""
    if words[0] == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *words[2:]]
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    elif words[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        assert not words[0].startswith("-"), f"{words[0]} needs an interpreter of its own"
        sys.path.insert(0, str(pathlib.Path(words[0]).parent))
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
