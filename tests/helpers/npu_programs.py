"""Programs for an Ascend device, which tests/vendor/test_npu.py runs in other processes with the stand-in for torch_npu."""

import copy
import functools
import io
import itertools
import pickle
import sys
import threading
import unittest
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

import mx_driving

mx_driving.compat.install("torch_npu")

import torch_npu  # noqa: E402  # pyright: ignore[reportMissingImports]

CPU = torch.device("cpu")
buffer = io.BytesIO()
torch.save(torch.rand(2), buffer)
FILE = buffer.getvalue()


def vendors_tests():
    import vendor_forms

    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromModule(vendor_forms).run(result)
    print(result.testsRun, len(result.failures), len(result.errors), len(result.skipped))


x = torch.rand(3, requires_grad=True)
WAYS = {
    "zeros": lambda d: torch.zeros(2, device=d),
    "rand": lambda d: torch.rand(2, device=d),
    "tensor": lambda d: torch.tensor([1.0], device=d),
    "as_tensor": lambda d: torch.as_tensor([1.0], device=d),
    "arange": lambda d: torch.arange(3, device=d),
    "full_like": lambda d: torch.full_like(x, 2, device=d),
    "new_tensor": lambda d: x.new_tensor([1.0], device=d),
    "new_zeros": lambda d: x.new_zeros(2, device=d),
    "fftfreq": lambda d: torch.fft.fftfreq(4, device=d),
    "to": lambda d: x.to(d),
    "to, dtype": lambda d: x.to(d, torch.float64, non_blocking=True),
    "to, by name": lambda d: x.to(device=d),
    "npu": lambda d: x.npu(d),
    "pin_memory": lambda d: x.pin_memory(d),
    "module": lambda d: torch.nn.Linear(2, 2).to(d).weight,
    "module, made there": lambda d: torch.nn.Linear(2, 2, device=d).weight,
    "module, npu": lambda d: torch.nn.Linear(2, 2).npu(d).weight,
    "module, to_empty": lambda d: torch.nn.Linear(2, 2, device="meta").to_empty(device=d).weight,
    "generator": lambda d: torch.rand(2, generator=torch.Generator(device=d)),
    "file": lambda d: torch.load(io.BytesIO(FILE), map_location=d),
    "file, by table": lambda d: torch.load(io.BytesIO(FILE), map_location={"cpu": str(d)}),
}


def names():
    """Every way to name the device means the CPU. torch handles other names."""
    for way, make in WAYS.items():
        for device in ("npu", "npu:0", torch.device("npu"), torch.device("npu", 3), torch.device("npu:1"), torch.device(0)):
            assert make(device).device == CPU, (way, device)
    for way in ("zeros", "to", "to, dtype", "to, by name", "module", "npu", "module, npu"):
        assert WAYS[way](0).device == CPU
    assert torch.empty(1, device="meta").device.type == torch.device("meta").type == "meta"
    with pytest.raises(RuntimeError, match="npux"):
        torch.zeros(1, device="npux")
    assert x.is_npu
    assert isinstance(x.device, torch.device)
    assert isinstance(torch.default_generator, torch.Generator)
    assert pickle.loads(pickle.dumps(x.device)) == copy.deepcopy(x.device) == CPU
    with torch.device("npu"):
        assert torch.zeros(2).device == CPU
    torch.set_default_device("npu:0")
    assert torch.zeros(2).device == CPU


def copies():
    """A move to the device makes a differentiable copy."""
    moves = (
        x.npu(),
        x.to("npu"),
        x.to("npu:0", torch.float32),
        torch.as_tensor(x, device="npu"),
        torch.asarray(x.detach(), device="npu"),  # asarray of torch 2.6 sets requires_grad of its argument to False
    )
    for copied in moves:
        assert copied.data_ptr() != x.data_ptr()
        assert torch.equal(copied, x)
    assert torch.as_tensor(x) is x
    assert x.to("cpu") is x
    array = torch.rand(3).numpy()
    shared = torch.as_tensor(array, device="npu")
    shared += 1
    assert not (shared.numpy() == array).any()
    (x.npu() * x.to("npu")).sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())
    layer = torch.nn.Linear(2, 2)
    weight = layer.weight
    for move in (lambda: layer.npu(), lambda: layer.to("npu"), lambda: layer.to(device="npu:0")):
        before = layer.state_dict()["weight"]
        assert move() is layer
        assert layer.weight is weight
        assert weight.is_leaf
        assert before.data_ptr() != weight.data_ptr()
        assert torch.equal(before, weight)


class Made(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.full((2,), i, device="npu").npu()


def scripted(a: torch.Tensor, d: torch.device):
    return a.to(d) + torch.zeros(3, device=a.device).to(torch.device("cpu"))


def elsewhere():
    """Check files that a device wrote, threads, workers and TorchScript."""
    registry, saved = torch.serialization._package_registry, io.BytesIO()
    registry.insert(0, (0, lambda storage: "npu:0", lambda storage, location: None))  # the tag that a device's storage gets
    torch.save(x.detach(), saved)
    registry.pop(0)
    assert b"npu:0" in saved.getvalue()
    assert torch.equal(torch.load(io.BytesIO(saved.getvalue())), x)
    tensors = []
    thread = threading.Thread(target=lambda: tensors.append(torch.zeros(2, device="npu").npu()))
    thread.start()
    thread.join()
    assert tensors[0].shape == (2,)
    for workers in (0, 2):
        generator = torch.Generator("npu")
        loader = torch.utils.data.DataLoader(Made(), 2, num_workers=workers, pin_memory=True, generator=generator, shuffle=True)
        assert sorted(int(i) for batch in loader for i in batch.npu()[:, 0]) == [0, 1, 2, 3]
    assert torch.equal(torch.jit.script(scripted)(x, torch.device("npu")), x)


def device_module():
    """Check torch.npu, which is torch_npu.npu: one device, streams and events, a seed."""
    npu = torch.npu
    assert npu is torch_npu.npu
    assert (npu.is_available(), npu.device_count(), npu.current_device(), npu.memory_allocated()) == (True, 1, 0, 0)
    assert npu.get_device_name(0)[:10] == "Ascend910B"
    npu.set_device("npu:0")
    npu.set_compile_mode(jit_compile=False)
    npu.config.allow_internal_format = False
    stream, begin, end = npu.Stream(), npu.Event(enable_timing=True), npu.Event(enable_timing=True)
    with npu.device(0), npu.stream(stream):
        begin.record()
        sum(range(100000))
        end.record()
    stream.wait_stream(npu.current_stream())
    for one in (npu, stream, end):
        one.synchronize()
    assert 0 < begin.elapsed_time(end) < 60000
    npu.manual_seed_all(3)
    state, numbers = npu.get_rng_state(0), torch.rand(2)
    for restore in (lambda: torch.manual_seed(3), lambda: npu.set_rng_state(state)):
        restore()
        with torch.random.fork_rng(device_type="npu"):
            assert torch.equal(numbers, torch.rand(2))


def product() -> torch.dtype:
    return (torch.rand(2, 2) @ torch.rand(2, 2)).dtype


def mixed_precision():
    """Check autocast, whose default is float16, scaled losses, and the vendor's optimizers."""
    from torch.npu.amp import GradScaler, autocast  # pyright: ignore[reportMissingImports]

    for context in (autocast(), torch.autocast("npu"), torch.autocast(device_type="npu", dtype=torch.float16)):
        with context:
            assert product() == torch.float16
    with torch.autocast("npu", torch.bfloat16):
        assert product() == torch.bfloat16
    with torch.autocast("cpu"):
        assert product() == torch.bfloat16
    for optimizer in (torch_npu.optim.NpuFusedSGD, torch_npu.optim.NpuFusedAdam, torch_npu.optim.NpuFusedAdamW):
        layer = torch.nn.Linear(2, 1).npu()
        step, scaler = optimizer(layer.parameters(), lr=0.1), GradScaler(init_scale=4.0)
        before = layer.weight.detach().clone()
        scaler.scale(layer(torch.ones(3, 2)).sum()).backward()
        scaler.unscale_(step)
        assert torch.allclose(step.clip_grad_norm_fused_(1.0), torch.tensor(27.0).sqrt())
        scaler.step(step)
        scaler.update()
        assert not torch.equal(before, layer.weight)


def uncompiled(a):
    made = torch.zeros(3, device=a.device) + torch.ones(3, device=torch.device("npu")) + a.to("npu") + a.npu()
    return made + torch.zeros(3, device="npu:0")


def compiled():
    """Compile a whole graph, with or without the names of CUDA. torch.compile reads torch.device and torch.cuda."""
    one = torch.ones(3)
    cuda = "torch_npu.contrib.transfer_to_npu" in sys.modules
    function = (lambda a: uncompiled(a).cuda() + torch.zeros(3, device="cuda")) if cuda else uncompiled
    assert torch.equal(torch.compile(function, backend="aot_eager", fullgraph=True)(one), 3 * one)


def transfer():
    early = torch.device("cuda:0")
    from mx_driving.patcher import PatcherBuilder

    with PatcherBuilder().build():  # it imports transfer_to_npu
        assert torch.cuda.is_available()
    assert x.cuda().data_ptr() != x.data_ptr()
    assert x.is_cuda
    assert torch.nn.Linear(1, 1).cuda().weight.is_cuda
    for device in ("cuda", "cuda:0", torch.device("cuda:0"), early, "npu"):
        assert torch.zeros(1, device=device).device == x.to(device).device == CPU
    assert (torch.cuda.device_count(), torch.cuda.current_device(), torch.cuda.max_memory_allocated()) == (1, 0, 0)
    assert torch.cuda.FloatTensor([1.0]).device == CPU
    for context in (torch.cuda.amp.autocast(), torch.autocast("cuda")):
        with context, torch.cuda.stream(torch.cuda.Stream()):
            assert product() == torch.float16
    leaf = torch.rand(2, requires_grad=True)
    torch.utils.checkpoint.checkpoint(lambda a: a.cuda() * a, leaf, use_reentrant=False).sum().backward()
    assert torch.equal(leaf.grad, 2 * leaf.detach())
    assert set(mx_driving.backends()["cpu"]) == set(mx_driving.backends()["cuda"])


class Product(torch.autograd.Function):
    """An autograd function as mmcv writes them: mixed precision by decorators."""

    dtype = None

    @staticmethod
    def forward(ctx, a):
        Product.dtype = a.dtype
        return a * 2

    @staticmethod
    def backward(ctx, grad):
        assert not torch.is_autocast_enabled("npu")
        return grad * 2


def decorated(custom_fwd, custom_bwd):
    return type("Product", (Product,), {"forward": staticmethod(custom_fwd(Product.forward)),
                                        "backward": staticmethod(custom_bwd(Product.backward))})  # fmt: skip


def check_idioms(device: str, module: Any):
    """Check idioms of training scripts: queries of autocast, storages, memory, lists of devices."""
    with torch.autocast(device, torch.float16):
        assert torch.is_autocast_enabled(device)
        assert torch.npu.is_autocast_enabled()
        assert torch.npu.get_autocast_dtype() == torch.float16
        assert torch.get_autocast_dtype(device) == torch.float16
    assert not torch.is_autocast_enabled(device)
    assert torch.amp.is_autocast_available(device)
    for forward, backward in (
        (functools.partial(torch.amp.custom_fwd, device_type=device, cast_inputs=torch.float32),
         functools.partial(torch.amp.custom_bwd, device_type=device)),
        (functools.partial(module.amp.custom_fwd, cast_inputs=torch.float32), module.amp.custom_bwd),
    ):  # fmt: skip
        leaf = torch.ones(2, dtype=torch.float16, requires_grad=True)
        with torch.autocast(device):
            decorated(forward, backward).apply(leaf).sum().backward()
        assert Product.dtype == torch.float32
        assert leaf.grad.tolist() == [2.0, 2.0]
    moved = torch.rand(3).to(device)
    assert not moved.is_pinned(device)
    moved.record_stream(module.current_stream())
    load = lambda place: torch.load(io.BytesIO(FILE), map_location=lambda storage, location: getattr(storage, device)(place))  # noqa: E731
    assert load(0).device == load(None).device == CPU
    free, total = module.mem_get_info()
    assert 0 < free <= total == module.get_device_properties(0).total_memory
    assert device in module.memory_summary()
    assert module.memory_stats()["allocated_bytes.all.peak"] == 0
    layer, inputs = torch.nn.Linear(2, 1).to(device), torch.ones(3, 2)
    for ids in ([0], [device], [torch.device(device, 0)], [torch.device(f"{device}:0")]):
        assert torch.nn.DataParallel(layer, device_ids=ids, output_device=ids[0])(inputs).shape == (3, 1)
        assert torch.nn.parallel.data_parallel(layer, inputs, ids).shape == (3, 1)


def check_distributed(device: str, *backends: str):
    """The device's backends mean gloo. DistributedDataParallel and barrier take indices of devices."""
    import torch.distributed as dist

    for backend, more in itertools.product(backends, ({}, {"device_id": torch.device(f"{device}:0")})):
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **more)
        group, total = dist.new_group([0], backend=backend), torch.ones(2, device=device)
        assert (dist.get_backend(), dist.get_backend(group)) == ("gloo", "gloo")
        dist.all_reduce(total, group=group)
        dist.barrier(device_ids=[0])
        for index in (0, f"{device}:0", torch.device(f"{device}:0"), torch.device(device, 3)):
            model = torch.nn.Linear(2, 1).to(device)
            wrapped = torch.nn.parallel.DistributedDataParallel(model, [index], index, find_unused_parameters=True)
            wrapped(torch.ones(3, 2)).sum().backward()
            assert model.weight.grad.tolist() == [[3.0, 3.0]]
        if device == "npu":  # nobody has asked for CUDA's names
            with pytest.raises(ValueError, match="device_ids"):
                torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1), device_ids=["cuda:0"])
        assert dist.init_device_mesh(device, (1,)).size() == 1
        dist.destroy_process_group()


def idioms():
    check_idioms("npu", torch.npu)
    check_distributed("npu", "hccl", "cpu:gloo,npu:hccl", "gloo")
    from torch_npu.contrib import transfer_to_npu  # noqa: F401  # pyright: ignore[reportMissingImports]

    check_idioms("npu", torch.npu)
    check_idioms("cuda", torch.cuda)
    check_distributed("cuda", "nccl")


def compiled_after_default_device():
    """Compile after set_default_device, which lets torch call constructors under a mode."""
    torch.set_default_device("npu")
    one = torch.ones(3)
    run = torch.compile(lambda a: a.to("npu") + a.to(device="npu:0", dtype=torch.float32), backend="aot_eager", fullgraph=True)
    assert torch.equal(run(one), 2 * one)


def refusals():
    for code in (
        "torch_npu.npu_fusion_attention()",
        "from torch_npu import npu_fusion_attention",
        "import torch_npu.profiler",
        "from torch_npu.testing import common_utils",
        "torch.npu.NPUGraph",
        "from torch.npu import NPUGraph",
        "mx_driving.compat.install('torch_mlu')",
    ):
        try:
            exec(code)
        except (AttributeError, ImportError, ValueError) as error:
            print(type(error).__name__, error)
    print(hasattr(torch_npu, "npu_format_cast"))


def mmengine():
    """mmengine moves models and optimizers to the device."""
    from mmengine.device import get_device, is_npu_available, is_npu_support_full_precision
    from mmengine.model import BaseModel
    from mmengine.optim import build_optim_wrapper

    assert (is_npu_available(), is_npu_support_full_precision(), get_device()) == (True, True, "npu")

    class Model(BaseModel):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def forward(self, inputs, data_samples=None, mode="loss"):
            return {"loss": self.layer(inputs[0]).sum()}

    model = Model().to(get_device()).npu()
    for kind, more in (("OptimWrapper", {}), ("AmpOptimWrapper", {"dtype": "float16", "loss_scale": 4.0})):
        wrapper = build_optim_wrapper(model, {"type": kind, "optimizer": {"type": "NpuFusedAdamW", "lr": 0.1}, **more})
        before = model.layer.weight.detach().clone()
        assert model.train_step({"inputs": [torch.rand(3, 2).npu()]}, wrapper)["loss"].isfinite()
        assert not torch.equal(before, model.layer.weight)


if __name__ == "__main__":
    for program in sys.argv[1:]:
        globals()[program]()
