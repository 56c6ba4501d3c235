"""What only a GPU can show: streams, devices, graphs, sizes beyond 65,535, no waiting. `make check-gpu` runs it."""

import cases
import pytest
import torch
from cases import AGGREGATION, GEOMETRIC, MULTI_SCALE, OPERATORS

import mx_driving
from mx_driving import reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="need an NVIDIA GPU: make check-gpu where there is one")

MAKE = {
    MULTI_SCALE: lambda q=300: cases.multi_scale(2, q, 32, 8, [(20, 30), (10, 15)], 4),
    AGGREGATION: lambda q=100: cases.aggregation(2, q, 13, 256, 8, [[(16, 44), (8, 22)]] * 3),
    GEOMETRIC: lambda q=300: cases.geometric(2, q, 32, 8, [(20, 30), (10, 15)], 8),
}


def on(device: str, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(a.to(device) for a in cases.cast(args, torch.float32))


def forward(operator: str):
    return getattr(torch.ops.mx_driving, operator).default


def backward(operator: str):
    wanted = [True] * len(cases.DIFFERENTIABLE[operator])
    run = getattr(torch.ops.mx_driving, operator + "_backward").default
    return lambda grad, *args: run(grad, *args, wanted)


@pytest.mark.parametrize("operator", OPERATORS)
def test_triton_serves(operator):
    assert mx_driving.backends()["cuda"][operator].startswith("Triton")


@pytest.mark.parametrize("operator", OPERATORS)
def test_no_waiting_and_no_reading(operator):
    args = on("cuda", MAKE[operator]())
    grad = torch.ones_like(forward(operator)(*args))
    backward(operator)(grad, *args)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward(operator)(*args)
        backward(operator)(grad, *args)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("operator", OPERATORS)
def test_in_a_cuda_graph(operator):
    args = on("cuda", MAKE[operator]())
    expected = forward(operator)(*args)
    grad = torch.ones_like(expected)
    expected_gradients = backward(operator)(grad, *args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = forward(operator)(*args)
        gradients = backward(operator)(grad, *args)
    output.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(output, expected)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("operator", OPERATORS)
def test_on_a_stream_of_its_own(operator):
    args = on("cuda", MAKE[operator]())
    expected = forward(operator)(*args)
    stream = torch.cuda.Stream()
    big = torch.zeros(1 << 28, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(20):
            big.add_(1)
        late = args[0] * big[0] / 20  # only right for a kernel that runs after the additions, on this stream
        output = forward(operator)(late, *args[1:])
    stream.synchronize()
    torch.testing.assert_close(output, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="need two NVIDIA GPUs")
@pytest.mark.parametrize("operator", OPERATORS)
def test_on_a_device_that_is_not_current(operator):
    args = on("cuda:1", MAKE[operator]())
    output = forward(operator)(*args)
    assert output.device == args[0].device
    torch.testing.assert_close(output.cpu(), forward(operator)(*on("cpu", MAKE[operator]())), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("operator", OPERATORS)
def test_more_than_65535_of_everything(operator):
    """70,000 batches of one query, and 140,000 queries of one batch."""
    one = on("cuda", MAKE[operator](1))
    expected = forward(operator)(*one)[:1]
    tables = 1, 2
    batches = tuple(a if i in tables else a[:1].expand(70_000, *a.shape[1:]) for i, a in enumerate(one))
    assert torch.equal(forward(operator)(*batches), expected.expand(70_000, -1, -1))
    queries = tuple(a[:1].expand(-1, 140_000, *a.shape[2:]) if i > 2 else a[:1] if i == 0 else a for i, a in enumerate(one))
    assert torch.equal(forward(operator)(*queries), expected.expand(-1, 140_000, -1))
    gradients = backward(operator)(torch.ones((), device="cuda").expand(1, 140_000, expected.shape[-1]), *queries)
    assert torch.equal(gradients[-1], gradients[-1][:, :1].expand_as(gradients[-1]))


@pytest.mark.parametrize("operator", OPERATORS)
def test_value_beyond_32_bits(operator):
    """The last of value's rows lies more than 2**31 elements (and 2**32 bytes) after the first."""
    rows = (1 << 31) // 256 + 1024
    if torch.cuda.mem_get_info()[0] < 3 * rows * 256 * 4:
        pytest.skip("needs 26 GB of free device memory")
    args = list(on("cuda", MAKE[operator](5)))
    args = [a[:1] if i not in (1, 2) else a for i, a in enumerate(args)]
    far = torch.zeros(1, rows, *args[0].shape[2:], device="cuda")
    count = args[0].shape[1]
    far[:, -count:] = args[0]
    expected = forward(operator)(*args)
    assert torch.equal(forward(operator)(far, args[1], args[2] + rows - count, *args[3:]), expected)
    grad = torch.ones_like(expected)
    near = backward(operator)(grad, *args)
    found = backward(operator)(grad, far, args[1], args[2] + rows - count, *args[3:])
    torch.testing.assert_close(found[0][:, -count:], near[0], rtol=1e-4, atol=1e-4)
    assert not found[0][:, :-count].any()


@pytest.mark.parametrize("operator", OPERATORS)
def test_deterministic_mode_repeats_bitwise(operator):
    """Every query looks at the same few pixels, so that the order of additions matters."""
    args = list(on("cuda", MAKE[operator](700 if operator != AGGREGATION else 100)))
    args[3] = args[3][:, :1].expand_as(args[3]).contiguous()
    grad = torch.randn_like(forward(operator)(*args))
    torch.use_deterministic_algorithms(True)
    first, *others = (backward(operator)(grad, *args) for _ in range(5))
    torch.use_deterministic_algorithms(False)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    torch.testing.assert_close(first, backward(operator)(grad, *args), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("operator", OPERATORS)
def test_autocast_and_autograd(operator):
    args = on("cuda", MAKE[operator](9))
    leaves = [a.half().requires_grad_() if i in cases.DIFFERENTIABLE[operator] else a for i, a in enumerate(args)]
    with torch.autocast("cuda", torch.float16):
        output = getattr(mx_driving, operator)(*leaves)
    assert output.dtype == torch.float32
    output.sum().backward()
    for i in cases.DIFFERENTIABLE[operator]:
        assert leaves[i].grad is not None
        assert leaves[i].grad.dtype == torch.float16


FULL_SIZE = [
    (MULTI_SCALE, lambda: cases.multi_scale(2, 2000, 32, 8, [(100, 167), (50, 84), (25, 42), (13, 21)], 4)),
    (MULTI_SCALE, lambda: cases.multi_scale(6, 1000, 32, 8, [(60, 40)] * 4, 8)),
    (AGGREGATION, lambda: cases.aggregation(1, 900, 13, 256, 8, [[(64, 176), (32, 88), (16, 44), (8, 22)]] * 6)),
    (GEOMETRIC, lambda: cases.geometric(6, 2000, 32, 8, [(15, 25)], 8)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("operator", "make"), FULL_SIZE)
def test_full_size_against_float64(operator, make, dtype):
    """The reference in float64 on the same device; an error is measured by the largest true entry."""
    args = tuple(a.cuda() for a in cases.cast(make(), dtype))
    wide = cases.cast(args, torch.float64)
    output = forward(operator)(*args)
    grad = torch.randn_like(output)
    found = [output, *backward(operator)(grad, *args)]
    true = [cases.forward_of("reference", operator)(*wide)]
    true += cases.gradients_of("reference", operator, grad.double(), wide)
    for place, (a, b) in enumerate(zip(found, true, strict=True)):
        error = ((a.double() - b).abs().max() / b.abs().max()).item()
        # float32: positions on a map of 176 pixels lose 2 * 176 ulps at most; 16 bits: one rounding of the result besides
        allowed = 512 * torch.finfo(torch.float32).eps + (torch.finfo(dtype).eps if dtype != torch.float32 else 0)
        assert error <= allowed, f"result {place}: {error:.2g} > {allowed:.2g}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", ["sorted", "any"])
def test_full_size_of_bev_pool_v3(order, dtype):
    """BEVDet's size against float64, without waiting, and from a CUDA graph, of which zeroing must be a part."""
    random = torch.Generator().manual_seed(0)
    sizes = (4224, 498_432, 128 * 128)  # rows of feat, elements of depth, cells
    ranks = [torch.randint(size, (300_000,), generator=random, dtype=torch.int32) for size in sizes]
    ranks[2] = ranks[2].sort().values if order == "sorted" else ranks[2]
    floating = (torch.randn(sizes[0], 64, generator=random).to(dtype), torch.rand(sizes[1], generator=random).to(dtype))
    args = (*(t.cuda() for t in (*floating, *ranks)), 1, 1, 128, 128)
    grad = torch.randn(1, 64, 1, 128, 128, generator=random).cuda().to(dtype)

    def results():
        return [forward("bev_pool_v3")(*args), *torch.ops.mx_driving.bev_pool_v3_backward(grad, *args, [True, True])]

    wide = cases.cast(args, torch.float64)
    true = [reference.bev_pool_v3(*wide), *reference.bev_pool_v3_backward(grad.double(), *wide, [True, True])]
    found = [results()]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found.append(results())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found.append(results())
    graph.replay()
    graph.replay()
    for a, b in ((a, b) for tensors in found for a, b in zip(tensors, true, strict=True)):
        error = ((a.double() - b).abs().max() / b.abs().max()).item()
        assert error <= 16 * torch.finfo(torch.float32).eps + (torch.finfo(dtype).eps if dtype != torch.float32 else 0)
