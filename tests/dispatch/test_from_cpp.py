"""Operators registered from C++: with the Python package and without it, in either order."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import cases
import pytest
import torch
from programs import python
from small_cases import GROWING

from mx_driving import _backends, config
from mx_driving._operator import description

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "cpp"
BY_CTYPES = _backends.native.why_by_ctypes()
pytestmark = pytest.mark.skipif(BY_CTYPES is not None, reason=str(BY_CTYPES))


def printed(code, *arguments, **environment):
    return python("-c", code, *arguments, env={**os.environ, **environment}).stdout


SCHEMAS = """
import sys, torch
for action in sys.argv[1:]:
    if action == "python":
        import mx_driving
    elif action != "ask":
        torch.ops.load_library(action)
    else:
        tags = lambda s: [t.name for t in getattr(torch.ops.mx_driving, s.name.partition("::")[2]).default.tags]
        ours = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("mx_driving::")]
        print(*sorted(f"{s} {tags(s)}" for s in ours), sep=chr(10))
"""


def test_schemas_are_those_of_python():
    """C++ and Python define the same schemas, and the second of them changes nothing."""
    library = config.torch_library()
    of_python = printed(SCHEMAS, "python", "ask").splitlines()
    assert len(of_python) == 3 * len(description.OPERATORS)
    of_cpp = printed(SCHEMAS, library, "ask").splitlines()
    if torch.torch_version.TorchVersion(torch.__version__) < "2.12":  # whose C++ interface has no tags
        of_cpp = [line.replace("[]", "['pt2_compliant_tag']") for line in of_cpp]
    assert of_cpp == of_python
    assert printed(SCHEMAS, library, library, "python", "python", "ask").splitlines() == of_python
    assert printed(SCHEMAS, "python", library, "ask").splitlines() == of_python


CALLS = """
import sys, torch
library, file = sys.argv[1:]
if library:
    torch.ops.load_library(library)
else:
    import mx_driving
    assert "MX_DRIVING_CTYPES is on" in mx_driving.backends()["cpu"]["deformable_aggregation"]
calls, found, said = torch.load(file), [], []
for name, args, mask in calls:
    op, backward = (getattr(torch.ops.mx_driving, name + end).default for end in ("", "_backward"))

    class Module(torch.nn.Module):
        def forward(self, *args):
            return op(*args)

    output = op(*args)
    found += [output, *backward(torch.ones_like(output), *args, mask)]
    assert torch.equal(torch.export.export(Module(), args).module()(*args), output)
    for place, wrong in ((1, args[1].to(torch.float32)), (0, args[0][..., None]), (1, args[1] * 9)):
        try:
            op(*args[:place], wrong, *args[place + 1:])
        except Exception as error:
            said.append((type(error).__name__, str(error)))
assert bool(library) == ("mx_driving" not in sys.modules)
torch.save((found, said), file)
"""


def called(folder, library, **environment):
    """Run all operators in another program. Return the calls, their results and their errors."""
    calls = []
    for name in cases.EVERY:
        mask = [i != 1 for i in range(len(cases.DIFFERENTIABLE[name]))]
        calls.append((name, cases.cast(GROWING[name](2, 3), torch.float32), mask))
    torch.save(calls, folder / "calls.pt")
    printed(CALLS, library, str(folder / "calls.pt"), **environment)
    return calls, *torch.load(folder / "calls.pt")


def expected_of(calls):
    for name, args, mask in calls:
        op, backward = (getattr(torch.ops.mx_driving, name + end).default for end in ("", "_backward"))
        output = op(*args)
        yield from (output, *backward(torch.ones_like(output), *args, mask))


def sentences(calls):
    for name, _, _ in calls:
        value, table, starts, *_ = description.OPERATORS[name].inputs
        yield f"{table} must have dtype int32 or int64; got "
        yield f"{value} must have shape ("
        yield f"{starts}[0"


@pytest.mark.parametrize("by_ctypes", [False, True])
def test_numbers_are_the_same_and_faults_are_sentences(tmp_path, by_ctypes):
    """In C++ without the package, and by ctypes, whose errors are those of Python's checks."""
    library, environment = ("", {"MX_DRIVING_CTYPES": "1"}) if by_ctypes else (config.torch_library(), {})
    calls, found, said = called(tmp_path, library, **environment)
    assert all(torch.equal(a, b) for a, b in zip(found, expected_of(calls), strict=True))
    for (kind, line), begin in zip(said, sentences(calls), strict=True):
        assert kind in (("ValueError", "TypeError") if by_ctypes else ("RuntimeError",))
        assert line.startswith(begin)


@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_integer_locations_of_other_dtypes_are_converted(operator):
    args = cases.cast(GROWING[operator](2, 3), torch.float32)
    op = getattr(torch.ops.mx_driving, operator).default
    for dtype in (torch.int8, torch.uint8, torch.int16):
        whole = args[3].abs().to(dtype)
        with torch.inference_mode():  # no Python before C++
            if operator == cases.GEOMETRIC:
                assert torch.equal(op(*args[:3], whole, args[4]), op(*args[:3], whole.long(), args[4]))
            else:
                sentence = f"must have dtype float32, float64, float16 or bfloat16; got {str(dtype)[6:]}"
                with pytest.raises((RuntimeError, TypeError), match=sentence):  # Python's own, where data were looked at before
                    op(*args[:3], whole, args[4])


RANKS = torch.tensor([0, 1, 2])
POOLED = (torch.rand(4, 2), torch.rand(5), RANKS, RANKS, RANKS, 1, 1, 2, 2)


@pytest.mark.parametrize("operator", description.OPERATORS)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("wrong", [None, torch.float8_e4m3fn, torch.uint7])
def test_an_argument_that_is_no_tensor_or_has_a_dtype_of_no_operator_is_named(operator, grad, wrong):
    row, forward = description.OPERATORS[operator], getattr(torch.ops.mx_driving, operator)
    args = cases.cast(GROWING[operator](2, 3), torch.float32) if operator in GROWING else POOLED
    args = (torch.ones_like(forward(*args)), *args)
    backward = lambda *args: getattr(torch.ops.mx_driving, operator + "_backward")(*args, [True] * len(row.differentiable))  # noqa: E731
    fact = "(an undefined tensor|NoneType)" if wrong is None else str(wrong)[6:]
    optional = [t.name for t in row.tensors if t.optional and wrong is None]
    for i, name in enumerate(["grad_output", *row.inputs]):
        replaced = [*args[:i], None if wrong is None else torch.empty(args[i].shape, dtype=wrong), *args[i + 1 :]]
        for op, given in ((backward, replaced), (forward, replaced[1:]))[: (name not in optional) * (1 + (i > 0))]:
            with torch.set_grad_enabled(grad), pytest.raises((RuntimeError, TypeError), match=f"^{name} must .*; got {fact}$"):
                op(*given)


ASK = """
import ctypes, sys
{}
register = ctypes.CDLL(sys.argv[1]).mxd_register_with_torch
register.restype = ctypes.c_char_p
print(register(0).decode())
"""


def answer_without_torch(first="pass"):
    command = [sys.executable, "-c", ASK.format(first), str(config.library_path())]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="the names of Linux's libraries")
def test_where_torch_is_missing_or_older_the_answer_is_a_sentence(tmp_path):
    assert answer_without_torch() == "torch must be loaded before the operators are registered; got no libtorch_cpu.so"
    older = tmp_path / "libtorch_cpu.so"
    source = 'extern "C" int aoti_torch_get_dim(void *, long *) { return 0; }'
    build = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(older), "-Wl,-soname,libtorch_cpu.so"]
    subprocess.run(build, input=source, text=True, check=True)
    said = "torch must be 2.10 or later, with the stable C interface; got one without aoti_torch_get_sizes"
    assert answer_without_torch(f"ctypes.CDLL({str(older)!r})") == said


PACKAGE = """
import sys, torch
torch.ops.load_library(sys.argv[1])
folder = sys.argv[2]
example = torch.jit.load(folder + "/example.pt")
found = torch._inductor.aoti_load_package(folder + "/decoder.pt2")(example.queries, example.memory)
print(torch.equal(found, example.of_package), "mx_driving" in sys.modules)
"""


# AOTInductor compiles packages in less time, in the Python that the documented lines start.
QUICK_PACKAGES = """
import sys
if "examples/cpp/export_decoder.py" in sys.orig_argv:
    from torch._inductor.config import aot_inductor
    aot_inductor.precompile_headers = False
    aot_inductor.compile_wrapper_opt_level = "O0"
    aot_inductor.enable_line_tables = False
"""


def documented_lines():
    """The shell commands of docs/export.md that build and run examples/cpp."""
    page = (EXAMPLE.parents[1] / "docs" / "export.md").read_text(encoding="utf-8")
    (lines,) = [block for block in re.findall(r"^```shell\n(.*?)^```$", page, re.MULTILINE | re.DOTALL) if "cmake -S" in block]
    return lines


@pytest.mark.long
@pytest.mark.skipif(torch.version.cuda is not None, reason="torch's CMake files want the CUDA toolkit")
@pytest.mark.skipif(sys.platform != "linux", reason="built with this system's compiler")
def test_the_documented_lines_run_a_decoder_in_cpp_with_the_bits_of_python(tmp_path):
    """A program in C++ runs a package of AOTInductor and a traced module. Python runs the package, too, without mx_driving."""
    shutil.copytree(EXAMPLE, tmp_path / "examples" / "cpp", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "sitecustomize.py").write_text(QUICK_PACKAGES)
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(tmp_path),
        # Fewer of torch's headers, and a compiler that takes memory instead of looking for garbage: a third less time.
        "CXXFLAGS": "-DAT_PER_OPERATOR_HEADERS --param ggc-min-expand=1000 --param ggc-min-heapsize=2000000",
    }
    done = subprocess.run(["bash", "-ec", documented_lines()], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    said = ["AOTInductor: 100 boxes, the bits of Python", "traced: 100 boxes, the bits of Python"]
    assert done.stdout.splitlines()[-2:] == said
    assert printed(PACKAGE, config.torch_library(), str(tmp_path / "exported")) == "True False\n"
    done = subprocess.run([tmp_path / "build" / "decoder", "nowhere"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "nowhere/example.pt" in done.stderr
    assert "frame #" not in done.stderr
