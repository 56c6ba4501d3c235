"""Functions of compiled extensions: the number of their arguments, and the outputs that they write to."""

import inspect

import cases
import pytest
import torch

from mx_driving import _C
from mx_driving._foreign import stand_ins
from mx_driving._foreign.stand_ins import stand_in, sum_runs
from mx_driving._foreign_functions import FUNCTIONS

B, D, H, W, C = 2, 1, 2, 3, 8
RANKS = [torch.arange(4, dtype=torch.int32)] * 3
STARTS, LENGTHS = torch.tensor([0, 2]), torch.tensor([2, 2])
GRID = torch.zeros(B, 4, 3, dtype=torch.int32)
PLACES = torch.zeros(4, 4, dtype=torch.int32)
ATTENTION, AGGREGATION = cases.multi_scale(2, 5, 8, 3, [(4, 6)], 2), cases.aggregation(2, 5, 3, 8, 2, [[(4, 6)]] * 2)


def backward(inputs, grad, *written):
    """Return the arguments of a backward that writes gradients to outputs."""
    return [*inputs, grad, *(torch.zeros_like(inputs[i]) for i in written)]


MAP, ROWS = torch.zeros(B, D, H, W, C), torch.rand(4, C)
GRID_SIZES = (W, H, 1)
_OF_POOL = [torch.rand(4), ROWS, *RANKS]
_AGGREGATED, _ATTENDED = torch.rand(2, 5, 8), torch.rand(2, 5, 24)
# name of a function -> its arguments, and the indices of the arguments that it writes
CALLS = {
    "deformable_aggregation_forward": (AGGREGATION, ()),
    "deformable_aggregation_backward": (backward(AGGREGATION, _AGGREGATED, 0, 3, 4), (6, 7, 8)),
    "ms_deform_attn_forward": (ATTENTION, ()),
    "ms_deform_attn_backward": ([*ATTENTION, _ATTENDED], ()),
    "bev_pool_v2_forward": ([*_OF_POOL[:2], MAP, *RANKS, LENGTHS, STARTS], (2,)),
    "bev_pool_v2_backward": ([MAP, torch.zeros(4), torch.zeros(4, C), *_OF_POOL, LENGTHS, STARTS], (1, 2)),
    "bev_pool_forward": ([ROWS, PLACES, LENGTHS, STARTS, B, D, H, W], ()),
    "voxel_pooling_train_forward_wrapper": (
        [B, 4, C, *GRID_SIZES, GRID, torch.rand(B, 4, C), torch.zeros(B, H, W, C), torch.zeros(B, 4, 3).int()], (8, 9)),
    "voxel_pooling_inference_forward_wrapper": (
        [B, 1, 4, 1, 1, C, *GRID_SIZES, GRID, torch.rand(B, 4, 1, 1), torch.rand(B, C, 1, 1), torch.zeros(B, H, W, C)], (12,)),
}  # fmt: skip
ENTRIES = {entry.name: entry for entry in FUNCTIONS if entry.module != "mmcv._ext"}
MMCV = next(entry for entry in FUNCTIONS if (entry.module, entry.name) == ("mmcv._ext", "ms_deform_attn_backward"))
CALLS = {name: (stand_in(ENTRIES[name]), *call) for name, call in CALLS.items()}
CALLS |= {
    "mmcv": (stand_in(MMCV), backward(ATTENTION, _ATTENDED, 0, 3, 4), (6, 7, 8)),
    "_C": (_C.geometric_kernel_attention_forward,
        [*cases.geometric(2, 5, 8, 3, [(4, 6)], 2), torch.zeros(2, 5, 24, dtype=torch.float64)], (5,)),
    "_C backward": (_C.npu_deformable_aggregation_backward, backward(AGGREGATION, _AGGREGATED), ()),
    "_C pool": (_C.npu_bev_pool_v3, [*_OF_POOL, B, D, H, W], ()),
}  # fmt: skip
WRITTEN = [(name, index) for name, (_, _, written) in CALLS.items() for index in written]


def copies(arguments):
    return [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]


@pytest.mark.parametrize("name", CALLS)
def test_the_number_of_arguments(name):
    function, arguments, _ = CALLS[name]
    function(*copies(arguments))
    for few in (arguments[:1], arguments[:4]):
        missing = rf"^\w+ must be given as argument {len(few) + 1} of [a-z]\w+; got {len(few)} arguments$"
        with pytest.raises(TypeError, match=missing):
            function(*few)
    parameters = inspect.signature(function).parameters.values()
    if not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        most = len(parameters)
        with pytest.raises(TypeError, match=rf"^[a-z]\w+ must be called with {most} arguments; got {most + 1}"):
            function(*arguments, *[None] * (most + 1 - len(arguments)))


@pytest.mark.parametrize(
    "change", [lambda out: None, lambda out: out[None], lambda out: out[..., :1].clone(), lambda out: out.clone().unsqueeze(-1)]
)
@pytest.mark.parametrize(("name", "index"), WRITTEN)
def test_an_output_of_another_shape_is_refused_and_none_is_written(name, index, change):
    function, arguments, written = CALLS[name]
    arguments = copies(arguments)
    arguments[index] = change(arguments[index])
    before = copies(arguments)
    with pytest.raises((TypeError, ValueError), match=r"^[a-z_]\w+ must (be a torch.Tensor|have (a )?shape|hold)\b.*; got "):
        function(*arguments)
    assert all(before[i] is None or torch.equal(before[i], arguments[i]) for i in written)


@pytest.mark.parametrize(("name", "index"), WRITTEN)
def test_an_output_on_the_device_meta_is_refused(name, index):
    """A copy to the device meta does nothing."""
    function, arguments, _ = CALLS[name]
    arguments = copies(arguments)
    arguments[index] = arguments[index].to("meta")
    with pytest.raises(ValueError, match=r"^[a-z_]\w+ must be on [a-z_ ]+'s? device \(cpu\); got meta$"):
        function(*arguments)


@pytest.mark.parametrize(
    ("name", "index", "wrong", "sentence"),
    [
        ("voxel_pooling_train_forward_wrapper", 2, C + 1, rf"input_features must have shape \(B, n, C={C + 1}\); got .*"),
        ("voxel_pooling_train_forward_wrapper", 3, "3", r"sizes must be six ints, \(B, n, C, X, Y, Z\); got .*"),
        ("voxel_pooling_train_forward_wrapper", 9, torch.zeros(B, 4, 3), "memo must have dtype int32 or int64; got float32"),
        ("voxel_pooling_inference_forward_wrapper", 5, None, r"sizes must be nine ints, .*; got .*"),
        ("bev_pool_backward", 0, torch.zeros(()), r"grad_out must have shape \(B, D, H, W, C\); got \(\)"),
        ("bev_pool_backward", 1, torch.zeros(()).int(), r"geom_feat must have shape \(n, 4\); got \(\)"),
    ],
)
def test_an_argument_of_another_kind_is_named(name, index, wrong, sentence):
    calls = CALLS | {"bev_pool_backward": (stand_ins.bev_pool_backward, [MAP, PLACES, LENGTHS, STARTS, B, D, H, W], ())}
    function, arguments, _ = calls[name]
    with pytest.raises((TypeError, ValueError), match=f"^{sentence}$"):
        function(*arguments[:index], wrong, *arguments[index + 1 :])


def test_functions_of_the_compiled_module_take_names():
    with torch.autocast("cpu"):
        named = _C.npu_deformable_aggregation(*AGGREGATION[:4], weight=AGGREGATION[4])
    assert torch.equal(named, _C.npu_deformable_aggregation(*AGGREGATION))
    with pytest.raises(TypeError, match=r"^weight must be given by this name; got the name weigth$"):
        _C.npu_deformable_aggregation(*AGGREGATION[:4], weigth=AGGREGATION[4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sorted_ranks", [[], [4], [0, 0, 2, 2, 2, 7], [3, 1, 1, 3]])
def test_runs_of_equal_ranks_are_summed(sorted_ranks, dtype):
    """Lift-Splat's cumsum_trick sums runs: a rank that comes again begins another run."""
    ranks, places = torch.tensor(sorted_ranks, dtype=torch.int64), torch.randint(9, (len(sorted_ranks), 4))
    x = torch.rand(len(sorted_ranks), 3, dtype=dtype, requires_grad=True)
    run, counts = torch.unique_consecutive(ranks, return_inverse=True, return_counts=True)[1:]
    expected = torch.zeros(len(counts), 3, dtype=torch.float64).index_add(0, run, x.double())
    sums, last = sum_runs(x, places, ranks)
    assert sums.dtype == dtype
    assert torch.equal(last, places[counts.cumsum(0) - 1])
    torch.testing.assert_close(sums, expected.to(dtype))
    grad = torch.rand(len(counts), 3, dtype=dtype)
    assert torch.equal(torch.autograd.grad(sums, x, grad)[0], grad[run])
