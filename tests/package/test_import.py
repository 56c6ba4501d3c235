"""Importing only registers the operators. backends() names the kernels and the reasons."""

import importlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import types

import cases
import pytest
import torch
from programs import python

import mx_driving
import mx_driving_portable
from mx_driving import _backends, _needs, config
from mx_driving._backends import choose
from mx_driving._foreign import absent
from mx_driving._operator.description import OPERATORS

WATCH = """
import json, sys, torch
WATCHED = ("open", "ctypes.dlopen", "subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "socket.connect")
before, seen = set(sys.modules), []
sys.addaudithook(lambda event, args: seen.append((event, str(args[0]))) if event in WATCHED else None)
import mx_driving
done = list(seen)
new = sorted(set(sys.modules) - before)
print(json.dumps({"events": done, "new": new, "folders": list(mx_driving.__path__)}))
"""


def test_import_only_registers():
    """After torch, the import loads only the package, Python's own modules, and the native library where torch calls it from
    C++. It opens no other file and starts no process. `bench.py --traits` measures its time."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", WATCH], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    facts = json.loads(done.stdout)  # fails if anything else was printed
    others = {name.partition(".")[0] for name in facts["new"]} - {"mx_driving", "mx_driving_portable"}
    assert others <= sys.stdlib_module_names
    assert not [name for name in facts["new"] if name.startswith(PROGRAMS)]
    events = [(event, name) for event, name in facts["events"] if event != "open"]
    assert events == [("ctypes.dlopen", str(LIBRARY))] * (_backends.native.why_by_ctypes() is None)
    folders = (*facts["folders"], str(pathlib.Path(mx_driving_portable.__file__).parent), sysconfig.get_path("stdlib"))
    opened = [name for event, name in facts["events"] if event == "open"]
    assert opened  # the watch works
    assert all(name.startswith(folders) for name in opened), opened


PROGRAMS = tuple(f"mx_driving.{room}" for room in ("_io", "_measure", "_replay", "cli"))


def test_backends_names_kernel_and_instruction_set(implementation):
    sentences = mx_driving.backends()
    assert set(sentences) == {"cpu", "cuda", "other"}
    for device in sentences.values():
        assert tuple(device) == (*cases.EVERY, "bev_pool_v3")
    isa = _backends.native.isa()
    assert all(f"native C++, {isa}," in sentence for sentence in sentences["cpu"].values())
    assert all(sentence.startswith("reference: ") for sentence in sentences["other"].values())


@pytest.fixture
def gpu_of(monkeypatch):
    """Return a function that lets torch report GPUs, and returns the sentence of backends() about them."""

    def say(capabilities=((9, 0),), hip=None, arch="", **have):
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: capabilities[i])
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: types.SimpleNamespace(gcnArchName=arch))
        monkeypatch.setattr("importlib.util.find_spec", lambda name: have.get("triton", True) or None)
        monkeypatch.setattr("shutil.which", lambda name: have.get("compiler", True) or None)
        monkeypatch.delenv("CC", raising=False)
        _backends.triton.why_not.cache_clear()
        return mx_driving.backends()["cuda"][cases.MULTI_SCALE]

    yield say
    monkeypatch.undo()
    _backends.triton.why_not.cache_clear()


COMPILER = "reference: Triton finds no C compiler; install gcc or clang, or name one in CC"
GPUS = [
    ({}, "Triton; float32, float16, bfloat16; float64: reference"),
    ({"hip": "6.4", "arch": "gfx942:sramecc+:xnack-"},
     "Triton, compiled but never run on AMD; float32, float16, bfloat16; float64: reference"),
    ({"capabilities": ((7, 5),)}, "reference: compute capability 7.5, and the GPU kernels need 8.0"),
    ({"hip": "6.4", "arch": "gfx1030"}, "reference: the GPU is a gfx1030, and the GPU kernels are compiled for gfx"),
    ({"triton": False}, "reference: Triton is not installed; pip install triton brings it"),
    ({"compiler": False}, COMPILER),
    ({"compiler": False, "hip": "6.4", "arch": "gfx1100"}, COMPILER),
]  # fmt: skip


@pytest.mark.needs("Sampling by Triton")
@pytest.mark.parametrize(("gpu", "sentence"), GPUS)
def test_backends_say_which_gpu_is_served_and_why_another_is_not(gpu_of, gpu, sentence):
    assert gpu_of(**gpu).startswith(sentence)


@pytest.mark.needs("Sampling by Triton")
def test_an_old_gpu_does_not_switch_a_new_one_off(gpu_of):
    assert gpu_of(((7, 5), (9, 0))).startswith("Triton; ")
    operator = OPERATORS[cases.MULTI_SCALE]
    for index, backend in ((0, "reference"), (1, "triton")):
        inputs = [types.SimpleNamespace(device=torch.device("cuda", index), dtype=torch.float32, shape=(1, 1))] * 5
        assert choose(operator, "cuda", inputs)[0] == backend


def test_intel_gpus_need_a_triton_of_their_own(monkeypatch):
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    _backends.triton.why_not.cache_clear()
    assert mx_driving.backends()["xpu"][cases.MULTI_SCALE].startswith("reference: ")
    monkeypatch.undo()
    _backends.triton.why_not.cache_clear()
    assert "xpu" not in mx_driving.backends()
    for name in (cases.MULTI_SCALE, cases.MULTI_SCALE_LOGITS, "bev_pool_v3_backward"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"mx_driving::{name}", "XPU")


def test_environment_switches_the_gpu_kernels_off():
    code = "import mx_driving; print(*set(mx_driving.backends()['cuda'].values()), sep='\\n')"
    for word, begin in (("0", "reference: MX_DRIVING_TRITON=0 is set; unset it"), ("", "")):
        env = {**os.environ, "MX_DRIVING_TRITON": word}
        said = python("-c", code, env=env).stdout
        assert said.startswith(begin)
        assert ("MX_DRIVING_TRITON" in said) == bool(begin)
        assert len(said.splitlines()) == 1 or not begin


LIBRARY = config.library_path()
SAYS = """
import pathlib, sys, torch, mx_driving
from mx_driving import _backends
args = (torch.ones(1, 1, 1, 1), torch.tensor([[1, 1]]), torch.tensor([0]))
args += (torch.zeros(1, 1, 1, 1, 1, 2), torch.ones(1, 1, 1, 1, 1))
for path in map(pathlib.Path, sys.argv[1:]):
    _backends.native.library_path = lambda: path
    _backends.native._load.cache_clear()
    print(mx_driving.backends()["cpu"]["geometric_kernel_attention"])
    assert mx_driving.geometric_kernel_attention(*args).item() == 1
    try:
        mx_driving.geometric_kernel_attention(*args[:2], args[2] + 1, *args[3:])
    except ValueError as error:
        assert str(error).startswith("level_start_index[0] must leave room")
    else:
        sys.exit("must be refused")
"""


def served_beside(*libraries):
    """Return the sentences of backends() for libraries, from a process that also calls an operator."""
    return python("-c", SAYS, *libraries, env={**os.environ, "MX_DRIVING_CTYPES": "1"}).stdout.splitlines()


def test_without_the_library_the_reference_serves_and_says_why():
    why = "it was not built or not installed"
    assert served_beside("/no/libmx_driving.so") == [f"reference: libmx_driving.so is not in the package: {why}"]


@pytest.mark.skipif(sys.platform != "linux", reason="cuts an ELF file")
def test_libraries_that_are_damaged_none_or_sound(tmp_path):
    """A library that is cut anywhere lacks bytes that the loader would map, or the loader refuses it. A copy works, also a
    stripped copy, as packagers make it."""
    whole, this = LIBRARY.read_bytes(), f"reference: {LIBRARY.name}"
    cuts = (64, 100, 5000, len(whole) // 4, len(whole) // 2, len(whole) * 3 // 4)
    rows = [(whole[:size], f"{this} is damaged: it ends before what its header promises") for size in cuts]
    rows += [(whole[:size], f"{this} cannot be loaded: ") for size in (0, 40)]
    texts = (b"a text", b"\x7fELF" + bytes(60), b"\x7fELF\2\1" + bytes(range(200)) * 20)
    rows += [*((content, f"{this} ") for content in texts), (whole, "native C++"), (whole, "native C++")]
    files = [tmp_path / str(number) / LIBRARY.name for number in range(len(rows))]
    for file, (content, _) in zip(files, rows, strict=True):
        file.parent.mkdir()
        file.write_bytes(content)
    if shutil.which("strip"):
        subprocess.run(["strip", "--strip-unneeded", files[-1]], check=True)
    for said, (_, begin) in zip(served_beside(*files), rows, strict=True):
        assert said.startswith(begin)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_a_library_of_somebody_else_or_of_another_version_is_not_used(tmp_path):
    def built(source):
        (tmp_path / "library.c").write_text(source)
        library = tmp_path / LIBRARY.name
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "library.c"], check=True)
        return library

    missing = f"reference: {LIBRARY.name} is not this package's, or older: it has no function "
    assert served_beside(built("int other(void) { return 0; }")) == [missing + "mxd_version"]
    stub = 'const char *mxd_version(void) { return "0.0.1"; }\n'
    assert served_beside(built(stub)) == [missing + "mxd_run"]
    stub += "".join(f"int {function}(void) {{ return 0; }}\n" for function in _backends.native._FUNCTIONS[1:])
    version = f"was built for version 0.0.1 of the package, which is {mx_driving.__version__}"
    assert served_beside(built(stub)) == [f"reference: {LIBRARY.name} {version}"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("module", ["mx_driving", "mx_driving.ops", "mx_driving._C", "mx_driving.point", "mx_driving.fused"])
def test_a_name_that_is_not_there_lists_the_operators(module):
    there = importlib.import_module(module)
    with pytest.raises(AttributeError) as missing:
        there.multi_scale_deformable_attention  # noqa: B018
    start = f"module '{module}' has no attribute 'multi_scale_deformable_attention'; the operators here are multi_scale_"
    assert str(missing.value).startswith(start)
    assert all(name in str(missing.value) for name in (*cases.EVERY, "bev_pool_v3", "npu_voxel_pooling_train"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("module", ["mx_driving", "mx_driving.ops", "mx_driving._C", "mx_driving.point", "mx_driving.common"])
def test_the_vendors_other_operators_can_be_imported_and_not_called(module):
    names = {}
    exec(f"from {module} import furthest_point_sampling, SparseModule, DeformConv2dFunction", names)
    exec(f"from {module} import *", everything := {})
    assert not absent.OTHERS & {*everything, *dir(sys.modules[module])}
    assert names["furthest_point_sampling"] is sys.modules[module].furthest_point_sampling
    derived = type("Derived", (names["SparseModule"],), {})
    for call in (names["furthest_point_sampling"], derived, names["DeformConv2dFunction"].apply):
        with pytest.raises(NotImplementedError, match=f"^{module}.* is an operator of the vendor's alone; the operators here"):
            call(1, num=2)


def test_no_name_of_ours_is_one_of_the_vendors_other_operators():
    assert not absent.OTHERS & {*mx_driving.__all__, *mx_driving.ops.__all__, *mx_driving._C.__all__}


def test_an_import_for_the_command_config_goes_on():
    """`python -m mx_driving.config` imports the package first. That imports no torch, and does not end the program."""
    code = "import sys; sys.argv[0], sys.orig_argv = '-m', ['-mmx_driving.config']; "
    code += "import mx_driving; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "False")


@pytest.mark.parametrize("feature", _needs.NEEDS)
def test_an_older_torch_lacks_a_feature(feature, monkeypatch):
    oldest = _needs.NEEDS[feature].torch
    for version, lacking in (("2.6.0+cu124", True), (f"{oldest}.0", False), ("2.13.0+cpu", False), ("3.0.0a0", False)):
        monkeypatch.setattr(torch, "__version__", version)
        assert (_needs.lacks(feature) is not None) == lacking, version
    monkeypatch.setattr(torch, "__version__", "2.6.0")
    with pytest.raises(NotImplementedError, match=f"needs torch {oldest} or later; got 2.6.0: older ones fail, since "):
        _needs.check(feature)


LAUNCHED = """
import ctypes, json, torch
real = ctypes.CDLL
class Functions:
    def __getattr__(self, name): return real(None).abs
ctypes.CDLL = lambda name, *args: Functions() if "cuda" in str(name) else real(name, *args)
torch.version.cuda = "13.0"
import mx_driving
from mx_driving._backends.triton import from_cpp
from mx_driving._dispatch.registered import REGISTERED
say = lambda *facts: print(json.dumps(facts))
say(from_cpp.why_not(), mx_driving.backends()["cuda"]["multi_scale_deformable_attn"])
for name in from_cpp.OPERATORS:
    kernels = torch._C._dispatch_dump("mx_driving::" + name).splitlines()
    by_key = {line.split(":")[0]: line for line in kernels}
    by_python = hasattr(torch.ops.mx_driving_triton, name), torch._C.DispatchKey.CUDA in REGISTERED[name].gpu_kernels
    say("registered at mx_driving:0" in by_key["CUDA"], *by_python)
say(from_cpp.keep_kernel is not None)
with mx_driving.data_checks():
    say(from_cpp.keep_kernel is not None)
"""


@pytest.mark.skipif(_backends.native.why_by_ctypes() is not None, reason=str(_backends.native.why_by_ctypes()))
@pytest.mark.skipif(sys.platform != "linux", reason="launches from C++ are for Linux")
def test_the_switch_of_launches_from_cpp():
    """C++ registers the kernels of CUDA, and Python has the same operators, until data_checks() is on."""
    done = python("-c", LAUNCHED, env={**os.environ, "MX_DRIVING_GPU_LAUNCH": "1"})
    (reason, sentence), *kernels, before, after = map(json.loads, done.stdout.splitlines())
    assert reason is None
    assert "attention launched from C++, never run on a GPU" in sentence
    assert kernels == [[True, True, False]] * 10
    assert (before, after) == ([True], [False])
