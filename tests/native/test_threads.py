"""The threads of a call: those of torch, and our own in a forked child. Each program of these tests is a process of its own.

The process is forked from a server with torch and without threads, or started if OpenMP's runtime must read the environment."""

import os
import pathlib
import subprocess
import sys

import cases
import pytest
import torch
from cases import LARGE
from programs import python

from mx_driving import _backends, config

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

# bits() runs a forward and a backward. Each of them waits for all its threads.
START = """
import hashlib, os, re, signal, torch
import mx_driving
from mx_driving import _backends, config

torch.set_num_threads(4)
torch.manual_seed(0)
shapes, starts = torch.tensor([[20, 30], [10, 15]]), torch.tensor([0, 600])
value, grad = torch.randn(1, 750, 4, 32), torch.randn(1, 2100, 128)
places, weights = torch.rand(1, 2100, 4, 2, 4, 2), torch.rand(1, 2100, 4, 2, 4)
inputs = value, shapes, starts, places, weights

def bits():
    output = mx_driving.multi_scale_deformable_attn(*inputs)
    grads = torch.ops.mx_driving.multi_scale_deformable_attn_backward(grad, *inputs, [True, True, True])
    return [t.numpy().tobytes() for t in (output, *grads)]

def digest():
    return hashlib.sha256(b"".join(bits())).hexdigest()

def number_of_threads():
    return len(os.listdir("/proc/self/task"))

def of_parallel_torch():
    before = number_of_threads()
    torch.ones(1 << 20).sin()
    return number_of_threads() - before
"""


def printed(program: str, **environment: str) -> list[str]:
    """Return the lines that a program prints. A program that hangs is ended after two minutes, and fails."""
    code = f"{START}\nsignal.alarm(120)\n{program}"
    if not environment:
        return python("-c", code).stdout.splitlines()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@ON_LINUX
def test_threads_are_torchs():
    """One runtime is loaded, backends() names its file, and a call after an operator of torch's starts no thread."""
    sentence, started, more, *files = printed("""
print(mx_driving.backends()["cpu"]["multi_scale_deformable_attn"])
print(of_parallel_torch())
before = number_of_threads()
bits()
print(number_of_threads() - before)
runtime = re.compile(r"/(lib(?:gomp|omp|iomp5)[^/]*)$", re.M)
print(*sorted(set(runtime.findall(open("/proc/self/maps").read()))), sep="\\n")
""")
    assert (started, more) == ("3", "0")
    assert len(files) == 1
    assert sentence.startswith(f"native C++, {_backends.native.isa()}, threads of {files[0]}")


@ON_LINUX
def test_fewer_threads_than_asked_for():
    """The runtime may give fewer threads. These threads wait for each other alone."""
    program = """
before = number_of_threads()
found = bits()
print(number_of_threads() - before)
torch.set_num_threads(1)
print(found == bits())
"""
    assert printed(program, OMP_THREAD_LIMIT="2") == ["1", "True"]


FORK = """
def in_a_child(run):
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends one that hangs
        run()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

def tell():
    before = number_of_threads()
    found = digest()
    print(_backends.native.threads(), number_of_threads() - before, found, flush=True)

def tell_and_fork():
    tell()
    in_a_child(tell)

def tell_with_one_thread():  # as a worker of a DataLoader
    torch.set_num_threads(1)
    tell()

in_a_child(tell_and_fork)
in_a_child(tell_with_one_thread)
print(digest())
"""


@ON_LINUX
@pytest.mark.parametrize("before", ["bits()", "of_parallel_torch()"], ids=["our call", "torch's own"])
def test_forked_children_do_not_hang(before):
    """libgomp would wait forever for its parent's threads, whoever had started them."""
    *children, parent = printed(before + FORK)
    assert children == [f"threads of its own {threads} {parent}" for threads in (3, 3, 0)]


@pytest.fixture
def own_threads():
    _backends.native.loaded().mxd_use_own_threads(1)
    yield
    _backends.native.loaded().mxd_use_own_threads(0)


@pytest.mark.parametrize("case", LARGE, ids=cases.case_id)
def test_own_threads_give_the_same_bits(every_thread, own_threads, case):
    args = cases.cast(case.make(), torch.float32)
    grad = cases.grad_for(case.operator, args).float()
    forward, backward = (_backends.native.Kernel(case.operator, is_backward) for is_backward in (False, True))
    results = []
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        results.append([forward(*args), *backward(grad, *args, [True] * len(cases.DIFFERENTIABLE[case.operator]))])
    assert _backends.native.threads() == "threads of its own"
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


# Without torch, as in a program in C: a runtime that is loaded after the first call serves the next call.
LATER = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
library.mxd_threads.restype = ctypes.c_char_p
print(library.mxd_threads().decode())
runtime = ctypes.CDLL(sys.argv[2])
print(library.mxd_threads().decode())
"""


@ON_LINUX
def test_a_runtime_that_is_loaded_later_is_found():
    runtime = next(pathlib.Path(torch.__file__).parent.glob("lib/lib*omp*.so*"), None)
    if runtime is None:
        pytest.skip("this torch brings no runtime")
    command = [sys.executable, "-c", LATER, str(config.library_path()), str(runtime)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["threads of its own", f"threads of {runtime.name}"]


# The first call makes objects whose destructors run as the process ends. So the library must stay loaded.
CLOSED = """
import _ctypes, ctypes, sys
library = ctypes.CDLL(sys.argv[1])
assert library.aclrtSynchronizeStream(None) == 0
_ctypes.dlclose(library._handle)
print(sys.argv[1] in open("/proc/self/maps").read())
"""


@ON_LINUX
def test_a_closed_library_stays_loaded():
    command = [sys.executable, "-c", CLOSED, str(config.library_path())]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "True\n"
