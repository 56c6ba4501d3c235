"""A compiled kernel that is kept serves only calls that Triton would compile the same kernel for."""

import cases
import pytest
import torch
from cases import OPERATORS
from small_cases import TINY
from values import compare, misaligned

from mx_driving import _backends

pytest.importorskip("triton", "3.4")  # whose knobs and drivers these tests replace
pytestmark = [
    pytest.mark.skipif(cases.ON_GPU, reason="the driver that stands in for a GPU says which device is current"),
    pytest.mark.skipif(_backends.triton.why_not() is not None, reason=str(_backends.triton.why_not())),
]

from triton import knobs  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from mx_driving._backends.triton import launch  # noqa: E402


@pytest.fixture
def asked(monkeypatch):
    """The kernels that Triton is asked for. It neither compiles nor launches them."""
    names: list[str] = []
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **options: names.append(self.__name__))
    return names


@pytest.fixture(params=OPERATORS)
def call(request, monkeypatch):
    """A function that calls an operator forward and backward, after a first call. No kernel of another test is kept."""
    monkeypatch.setattr(launch, "_compiled", {})
    args = cases.cast(TINY[request.param](), torch.float32)
    grad = cases.grad_for(request.param, args).float()
    compare("triton", request.param, args, grad)
    forward, backward = (_backends.triton.kernel(request.param, backward) for backward in (False, True))

    def run(grad=grad, args=args, **others):
        forward(*args, **others)
        backward(grad, *args, [True] * len(cases.DIFFERENTIABLE[request.param]))

    run.args, run.grad = args, grad
    return run


def test_a_second_call_does_not_ask_triton(call, asked):
    call()
    queries = [a[:, :1] if i > 2 else a for i, a in enumerate(call.args)]  # other sizes need no other kernel
    call(call.grad[:, :1], queries)
    assert not asked


OTHER = {torch.float32: torch.bfloat16, torch.int64: torch.int32}


@pytest.mark.parametrize("change", [misaligned, lambda t: t.to(OTHER[t.dtype])], ids=["address", "dtype"])
def test_another_kernel_where_triton_would_make_one(call, asked, change):
    tensors = (call.grad, *call.args)
    for i, t in enumerate(tensors):
        grad, *args = (*tensors[:i], change(t), *tensors[i + 1 :])
        asked.clear()
        call(grad, args)
        assert asked == ["_forward", "_backward"][i == 0 :]


def test_another_kernel_for_another_output_device_or_profiler(call, asked, monkeypatch):
    call(dtype=torch.float16)
    assert asked == ["_forward"]
    asked.clear()
    with monkeypatch.context() as patch:
        patch.setattr(driver.active, "get_current_device", lambda: 91)
        call()
    assert asked == ["_forward", "_backward"]
    asked.clear()
    with monkeypatch.context() as patch:
        patch.setattr(knobs.runtime, "launch_exit_hook", print)
        call()
    assert asked == ["_forward", "_backward"]


@pytest.mark.parametrize("version", ["3.10.0", "4.0.0"])
def test_triton_launches_where_its_version_is_not_known(call, asked, monkeypatch, version):
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(launch.triton, "__version__", version)
    for _ in range(2):
        call()
    assert asked == ["_forward", "_backward"] * 2
    assert not launch._compiled


def test_multiplications_and_additions_are_fused_whatever_the_default(call, monkeypatch):
    """Triton 3.10 fuses none by default, and Triton 3.9 warns of it."""
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    monkeypatch.setattr(driver.active, "get_current_device", lambda: 92)  # for which nothing is compiled yet
    call()
    kernels = [compiled for compiled, _ in launch._compiled.values()]
    assert len(kernels) == 2
    assert all("fma.rn.f32" in kernel.asm["ptx"] for kernel in kernels)
