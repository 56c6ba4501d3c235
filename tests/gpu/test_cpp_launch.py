"""Launches from C++, with functions in Python that stand in for CUDA's driver and execute the kernels' PTX."""

import ctypes
import functools
import itertools

import cases
import logits_cases
import pytest
import torch
from cases import GEOMETRIC, GEOMETRIC_LOGITS, MULTI_SCALE, MULTI_SCALE_LOGITS
from small_cases import TINY
from torch._C import DispatchKey, DispatchKeySet
from values import misaligned

from mx_driving import _backends

pytest.importorskip("triton", "3.4")
pytestmark = [
    pytest.mark.skipif(cases.ON_GPU, reason="functions that stand in for the driver serve CPU tensors"),
    pytest.mark.skipif(_backends.triton.why_not() is not None, reason=str(_backends.triton.why_not())),
    pytest.mark.skipif(_backends.native.why_by_ctypes() is not None, reason=str(_backends.native.why_by_ctypes())),
]

import ptx  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402

from mx_driving._backends.triton import from_cpp, launch  # noqa: E402
from mx_driving._dispatch.registered import REGISTERED  # noqa: E402

_CUDA = DispatchKeySet(DispatchKey.CUDA)
_INT, _POINTER, _UNSIGNED = ctypes.c_int, ctypes.c_void_p, ctypes.c_uint
_HANDLES = itertools.count(0x1000, 0x10)  # Triton keeps kernels from test to test
_STREAM, _CONTEXT = 0x5EA, 0xC0


class Driver(ptx.Driver):
    """CUDA's driver and torch's functions. `launches` has the parameters of each launch; `outputs` is what a launch writes."""

    def __init__(self):
        super().__init__(90)
        self.get_current_device = lambda: 93  # for which no other test has compiled
        self.load_binary = lambda name, *_: (name, next(_HANDLES), 0, 0, 1024)
        self.launches, self.misses, self.outputs, self.zeroed = [], [], [], []
        self.device, self.deterministic, self.error = -1, False, 0
        self.functions = [
            ctypes.CFUNCTYPE(_INT, _POINTER, *[_UNSIGNED] * 7, _POINTER, _POINTER, _POINTER)(self.launch),
            ctypes.CFUNCTYPE(_INT, ctypes.POINTER(_INT))(self.current),
            ctypes.CFUNCTYPE(_INT, _POINTER, _UNSIGNED, ctypes.c_size_t, _POINTER)(self.zero),
            ctypes.CFUNCTYPE(_INT, _INT, ctypes.POINTER(_POINTER))(self.stream),
            ctypes.CFUNCTYPE(_POINTER)(lambda: _CONTEXT),
            ctypes.CFUNCTYPE(ctypes.c_bool, _POINTER)(lambda context: context == _CONTEXT and self.deterministic),
        ]

    def current(self, device):
        device[0] = self.device
        return 0

    def stream(self, device, stream):
        assert device == -1
        stream[0] = _STREAM
        return 0

    def zero(self, numbers, value, count, stream):
        assert (value, stream) == (0, _STREAM)
        ctypes.memset(numbers, 0, 4 * count)
        self.zeroed.append(count)
        return 0

    def launch(self, function, programs, y, z, threads, y_threads, z_threads, shared, stream, parameters, extra):
        compiled = next(c for c, _ in launch._compiled.values() if c.function == function)
        assert (y, z, y_threads, z_threads, stream, extra) == (1, 1, 1, 1, _STREAM, None)
        assert (threads, shared) == (32 * compiled.metadata.num_warps, compiled.metadata.shared)
        kinds = {name: kind for name, kind in compiled.src.signature.items() if kind != "constexpr"}
        addresses = (_POINTER * len(kinds)).from_address(parameters)
        arguments, known, outputs = {}, {t.data_ptr(): t for t in self.inputs}, list(self.outputs)
        for (name, kind), at in zip(kinds.items(), addresses, strict=True):
            if kind[0] != "*":
                arguments[name] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64}[kind].from_address(at).value
                continue
            address = _POINTER.from_address(at).value
            if address and address not in known:
                known[address] = tensor_at(address, outputs.pop(0))
            arguments[name] = known[address] if address else torch.empty(0)
        self.launches.append((compiled.metadata.name, programs))
        self.execute(ptx.Kernel(compiled.asm["ptx"]), programs, arguments, shared)
        return self.error


def tensor_at(address, like):
    memory = (ctypes.c_char * (like.numel() * like.element_size())).from_address(address)
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)


@pytest.fixture(scope="module")
def defined():
    """The operators as Python serves them, as at an import with MX_DRIVING_GPU_LAUNCH=1."""
    for name in from_cpp.OPERATORS:
        registered = REGISTERED[name]
        from_cpp.define(name, registered.schema, functools.partial(missed, name, functools.partial(registered.run, "cuda")))


def missed(name, run, *args):
    if isinstance(driver.active, Driver):  # other tests of this process call it, too
        driver.active.misses.append(name)
    return run(*args)


@pytest.fixture
def gpu(defined, monkeypatch):
    monkeypatch.setattr(launch, "_compiled", {})
    stand_in, before = Driver(), driver.active
    driver.set_active(stand_in)
    assert from_cpp.start([from_cpp.address_of(f) for f in stand_in.functions]) is None
    yield stand_in
    from_cpp.stop()
    driver.set_active(before)


def call(gpu, name, *args, outputs=()):
    """Call the kernel of CUDA. `outputs` are like the tensors that a launch may write."""
    gpu.inputs, gpu.outputs = [a for a in args if isinstance(a, torch.Tensor)], outputs
    gpu.launches.clear()
    gpu.misses.clear()
    return getattr(torch.ops.mx_driving, name).default.redispatch(_CUDA, *args)


FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MASKS = [[True, True, True], [True, False, False], [False, True, True], [False, False, True]]


def sums_of(value, gradients, mask):
    """What a backward's kernel writes: the gradient of value in float32."""
    return [g.float() if i == 0 else g for i, (g, needed) in enumerate(zip(gradients, mask, strict=True)) if needed]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", [name for name in from_cpp.OPERATORS if not name.endswith("_backward")])
def test_a_forward_is_launched_from_cpp_after_a_first_call(gpu, name, dtype):
    """Other sizes of batch and queries need no other kernel."""
    args = cases.cast(TINY[name.removesuffix("_autocast")](), FLOATS[dtype])
    fewer = [a[:, :1].contiguous() if i > 2 and torch.is_tensor(a) and a.dim() > 2 else a for i, a in enumerate(args)]
    for inputs in (args, fewer):
        expected = REGISTERED[name].run("cuda", *inputs)
        for launches, misses in ([], [name]), (["_forward"], []):
            output = call(gpu, name, *inputs, outputs=[expected])
            if inputs is args or launches:
                assert ([n for n, _ in gpu.launches], gpu.misses) == (launches, misses)
            assert output.dtype == expected.dtype
            assert torch.equal(output, expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("operator", [MULTI_SCALE, GEOMETRIC])
def test_a_backward_is_launched_from_cpp_after_a_first_call(gpu, operator, mask, dtype):
    args = cases.cast(TINY[operator](), FLOATS[dtype])
    grad = cases.grad_for(operator, args).to(FLOATS[dtype])
    name, mask = operator + "_backward", mask[-len(cases.DIFFERENTIABLE[operator]) :]
    expected = REGISTERED[name].run("cuda", grad, *args, mask)
    for launches, misses in ([], [name]), (["_backward"], []):
        gradients = call(gpu, name, grad, *args, mask, outputs=sums_of(args[0], expected, mask))
        assert ([n for n, _ in gpu.launches], gpu.misses) == (launches, misses)
        for gradient, like in zip(gradients, expected, strict=True):
            assert gradient.dtype == like.dtype
            torch.testing.assert_close(gradient, like, rtol=0, atol=0)


def small(dtype=torch.float32):
    args = cases.cast(TINY[MULTI_SCALE](), dtype)
    return args, cases.grad_for(MULTI_SCALE, args).to(dtype)


@pytest.mark.parametrize("change", [lambda t: t.transpose(0, 1).contiguous().transpose(0, 1), misaligned, torch.Tensor.double])
def test_what_cpp_does_not_launch_is_served_by_python(gpu, change):
    args, grad = small()
    *with_logits, axis = cases.cast(TINY[MULTI_SCALE_LOGITS](), torch.float32)
    calls = (MULTI_SCALE, args), (MULTI_SCALE + "_backward", (grad, *args), [True] * 3), (MULTI_SCALE_LOGITS, with_logits, axis)
    for name, inputs, *rest in calls:
        call(gpu, name, *inputs, *rest)
        for at in [i for i, a in enumerate(inputs) if a.is_floating_point()]:
            if change is torch.Tensor.double and not at:
                continue  # the kernel reads a grad_output in float64
            changed = [*inputs[:at], change(inputs[at]), *inputs[at + 1 :]]
            expected = REGISTERED[name].run("cuda", *changed, *rest)
            for _ in range(2):
                results = call(gpu, name, *changed, *rest)
                assert (gpu.launches, gpu.misses) == ([], [name])
                for result, like in zip(*((r,) if torch.is_tensor(r) else r for r in (results, expected)), strict=True):
                    assert torch.equal(result, like)


def test_a_layout_of_one_batch_is_contiguous_whatever_its_stride(gpu):
    args, _ = small()
    one = [a[:1].contiguous() if a.is_floating_point() else a for a in args]
    expected = call(gpu, MULTI_SCALE, *one)
    one[0] = one[0].as_strided(one[0].shape, (7, *one[0].stride()[1:]))
    assert torch.equal(call(gpu, MULTI_SCALE, *one, outputs=[expected]), expected)
    assert len(gpu.launches) == 1


def test_another_kernel_for_another_operator_mask_dtype_or_number_of_points(gpu):
    args, grad = small()
    backward = MULTI_SCALE + "_backward"
    others = [
        (backward, (grad, *args, [True, False, True])),
        (backward, (grad, *args[:4], args[4].half(), [True] * 3)),
        (backward, (grad.bfloat16(), *args, [True] * 3)),
        (MULTI_SCALE, (args[0].half(), *args[1:])),
        (MULTI_SCALE, (*args[:2], args[2].int(), *args[3:])),
        (MULTI_SCALE, (*args[:3], *(a[:, :, :, :, :1].contiguous() for a in args[3:]))),
        (GEOMETRIC, args),
        (GEOMETRIC, (*args[:3], args[3].int(), args[4])),
    ]
    call(gpu, MULTI_SCALE, *args)
    call(gpu, backward, grad, *args, [True] * 3)
    for name, inputs in others:
        call(gpu, name, *inputs)
        assert (gpu.launches, gpu.misses) == ([], [name])


def test_another_kernel_for_other_reference_points(gpu):
    sizes = 2, 4, 8, 2, [(3, 4), (2, 2)], 2
    others = [(), (1,), (2, "point"), (2, "level", True)]
    for rest in others:
        args = cases.cast(logits_cases.multi_scale(*sizes, *rest), torch.float32)
        expected = REGISTERED[MULTI_SCALE_LOGITS].run("cuda", *args)
        for misses in [MULTI_SCALE_LOGITS], []:
            assert torch.equal(call(gpu, MULTI_SCALE_LOGITS, *args, outputs=[expected]), expected)
            assert gpu.misses == misses


def test_python_serves_another_device_deterministic_sums_and_a_stop(gpu):
    args, grad = small()
    backward = MULTI_SCALE + "_backward"
    expected = call(gpu, MULTI_SCALE, *args)
    gradients = call(gpu, backward, grad, *args, [True] * 3)
    gpu.deterministic = True
    call(gpu, backward, grad, *args, [True] * 3)
    assert gpu.misses == [backward]
    call(gpu, MULTI_SCALE, *args, outputs=[expected])
    assert len(gpu.launches) == 1
    gpu.deterministic, gpu.device = False, 1
    call(gpu, MULTI_SCALE, *args)
    assert gpu.misses == [MULTI_SCALE]
    gpu.device = -1
    call(gpu, backward, grad, *args, [True] * 3, outputs=gradients)
    assert (len(gpu.launches), gpu.zeroed) == (1, [args[0].numel()])
    from_cpp.stop()
    for _ in range(2):
        assert torch.equal(call(gpu, MULTI_SCALE, *args), expected)
        assert gpu.misses == [MULTI_SCALE]


def test_a_kernel_with_other_arguments_is_not_handed_over(gpu, monkeypatch):
    monkeypatch.setattr(from_cpp, "_TENSORS", {"_forward": (8,)})
    args, _ = small()
    for _ in range(2):
        call(gpu, MULTI_SCALE, *args)
        assert gpu.misses == [MULTI_SCALE]


def test_errors_are_told(gpu):
    args, _ = small()
    expected = call(gpu, MULTI_SCALE, *args)
    with pytest.raises(RuntimeError, match="attention_weights must have shape"):
        call(gpu, MULTI_SCALE, *args[:4], args[4][:, :1])
    with pytest.raises(RuntimeError, match="sampling_locations must be on the device of value; got another"):
        call(gpu, MULTI_SCALE, *args[:3], args[3].to("meta"), args[4])
    gpu.error = 700
    with pytest.raises(RuntimeError, match="cuLaunchKernel failed with error 700"):
        call(gpu, MULTI_SCALE, *args, outputs=[expected])


def test_errors_of_python_are_told(gpu, monkeypatch):
    monkeypatch.setattr(launch, "run", lambda *args, **flags: 1 / 0)
    for name in MULTI_SCALE, MULTI_SCALE_LOGITS, GEOMETRIC_LOGITS:
        with pytest.raises(RuntimeError, match=rf"division by zero|mx_driving_triton::{name} failed"):
            call(gpu, name, *cases.cast(TINY[name](), torch.float32))


def test_the_switch_without_cuda(monkeypatch):
    monkeypatch.setattr(from_cpp, "_ON", True)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert from_cpp.why_not.__wrapped__() == "torch is not built for CUDA on Linux"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "libcuda.so.1" in from_cpp.why_not.__wrapped__()
