"""For C and C++ programs: headers, the library, the CMake package, and examples, which are built with all warnings."""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from programs import python

import mx_driving
from mx_driving import config

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "c"
INCLUDE = pathlib.Path(config.includedir())
HEADERS = sorted(header.relative_to(INCLUDE).as_posix() for header in INCLUDE.rglob("*.h"))
STRICT = ["-Wall", "-Wextra", "-Werror", "-pedantic"]
C, CPP = ["gcc", "-std=c11", *STRICT], ["g++", "-std=c++17", *STRICT]


def run(*command, cwd=None):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, cwd=cwd)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def build_and_run(compiler, source, folder):
    """Compile and link in two commands, because ccache serves no command that does both. The folder makes paths relative."""
    object_file, program = folder / "program.o", folder / "program"
    run(*compiler, "-c", source, *shlex.split(config.cflags()), "-o", object_file, cwd=folder)
    run(*compiler, object_file, *shlex.split(config.libs()), "-pthread", "-o", program)
    return run(program)


def check_training(printed):
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 11
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] / 10


def check_known_answer(printed):
    assert re.findall(r"= (\d+), as expected", printed) == ["8", "4", "2"]


@pytest.mark.parametrize("compiler", [C, CPP], ids=["C11", "C++17"])
@pytest.mark.parametrize("header", HEADERS)
def test_a_header_stands_alone(header, compiler, tmp_path):
    source = tmp_path / ("alone.c" if compiler is C else "alone.cpp")
    source.write_text(f'#include "{header}"\n#include "{header}"\nint main(void) {{ return 0; }}\n')
    run(*compiler, "-fsyntax-only", *shlex.split(config.cflags()), source)


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("nm"), reason="needs binutils")
def test_headers_declare_every_symbol_of_the_library():
    """No C++ symbol leaks, so no other library in the process can replace a function of this one."""
    listing = run("nm", "-D", "--defined-only", config.library_path())
    exported = {line.split()[2] for line in listing.splitlines()} - {"RegisterCustomOps"}
    headers = "".join((INCLUDE / header).read_text() for header in HEADERS)
    assert len(exported) > 30
    assert exported <= set(re.findall(r"\w+(?=\()", headers))


def test_the_enumerations_are_canns(tmp_path):
    values = {"ACL_FLOAT": 0, "ACL_FLOAT16": 1, "ACL_INT32": 3, "ACL_INT64": 9, "ACL_BF16": 27, "ACL_FORMAT_ND": 2}
    values |= {"ACL_SUCCESS": 0, "ACLNN_ERR_PARAM_NULLPTR": 161001, "ACLNN_ERR_PARAM_INVALID": 161002}
    values |= {"ACL_MEM_MALLOC_HUGE_FIRST": 0, "ACL_MEMCPY_HOST_TO_DEVICE": 1, "ACL_MEMCPY_DEVICE_TO_HOST": 2}
    source = tmp_path / "values.c"
    prints = "".join(f'printf("{name} %d\\n", (int){name});' for name in values)
    source.write_text(f'#include <stdio.h>\n#include "acl/acl.h"\nint main(void) {{ {prints} return 0; }}\n')
    printed = dict(line.split() for line in build_and_run(C, source, tmp_path).splitlines())
    assert {name: int(value) for name, value in printed.items()} == values


def test_the_c_example_trains(tmp_path):
    check_training(build_and_run(C, EXAMPLES / "train.c", tmp_path))


def test_the_cpp_example_gives_the_known_answer(tmp_path):
    check_known_answer(build_and_run(CPP, EXAMPLES / "known_answer.cpp", tmp_path))


@pytest.mark.long
def test_the_native_tests(tmp_path):
    """The tests are compiled as one source, because headers take most of the time. CMakeLists.txt compiles each file alone.
    With -O1 they run seven times faster."""
    native, whole = ROOT / "tests" / "native", tmp_path / "whole.cpp"
    whole.write_text("".join(f'#include "{source}"\n' for source in sorted(native.glob("[!f]*.cpp"))))
    printed = build_and_run([*CPP, "-O1", "-ffp-contract=off"], whole, tmp_path)
    assert printed.count("passed") == 10


def test_the_documented_lines(tmp_path):
    """The shell commands of docs/c.md, as they stand, in a clone."""
    shutil.copytree(EXAMPLES, tmp_path / "examples" / "c")
    (lines,) = re.findall(r"^```shell\n(.*?)^```$", (ROOT / "docs" / "c.md").read_text(encoding="utf-8"), re.M | re.S)
    environment = os.environ | {"PATH": os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])}
    done = subprocess.run(["bash", "-ec", lines], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    check_training(done.stdout)
    check_known_answer(done.stdout)
    version = (pathlib.Path(config.cmakedir()) / "mx_driving-config-version.cmake").read_text()
    assert f'"{mx_driving.__version__}"' in version


def test_config_prints_its_answers_in_one_order():
    printed = run(sys.executable, "-m", "mx_driving.config", "--libs", "--cflags")
    assert printed == f"{config.cflags()} {config.libs()}\n"
    assert run(sys.executable, "-m", "mx_driving.config", "--cmakedir") == config.cmakedir() + "\n"


@pytest.mark.parametrize("start", [("-m", "mx_driving.config"), ("-mmx_driving.config",)])
def test_config_does_not_import_torch(start, tmp_path):
    """A torch that cannot be imported comes first on the path."""
    (tmp_path / "torch.py").write_text("raise AssertionError('torch is imported')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-W", "error", *start, "--cflags"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, config.cflags() + "\n", "")
    assert subprocess.run(command[:-1], capture_output=True, env=environment).returncode == 2


def test_config_runs_where_the_package_is_imported():
    """Coverage runs a module that is imported already. Python must not warn of it."""
    code = "import runpy, sys, warnings, mx_driving; warnings.simplefilter('error', RuntimeWarning); "
    code += "sys.argv[1:] = ['--cflags']; runpy.run_module('mx_driving.config', None, '__main__')"
    assert python("-c", code).stdout == config.cflags() + "\n"


@pytest.mark.parametrize(("words", "fact"), [([], "none"), (["--libs", "--lib", "x"], "--lib x"), (["--libs=1"], "--libs=1")])
def test_config_refuses_other_questions(words, fact, capsys):
    with pytest.raises(SystemExit) as caught:
        config.main(words)
    rule = "arguments must be some of --cflags, --libs, --cmakedir, --torch-library"
    assert (caught.value.code, capsys.readouterr().err) == (2, f"mx_driving.config: {rule}; got {fact}\n")


def test_config_quotes_a_folder_with_a_space(monkeypatch, tmp_path):
    monkeypatch.setattr(config, "_folder", lambda: tmp_path / "my machine")
    assert shlex.split(config.cflags()) == [f"-I{tmp_path}/my machine/include"]
    assert shlex.split(config.libs())[1] == f"-Wl,-rpath,{tmp_path}/my machine"


def test_config_says_when_there_is_no_library(monkeypatch):
    monkeypatch.setattr(config, "library_path", lambda: pathlib.Path("/nowhere/libmx_driving.so"))
    with pytest.raises(SystemExit) as caught:
        config.main(["--cflags"])
    assert caught.value.code == ("mx_driving.config: libmx_driving.so is not in the package: it was not built or not installed")
