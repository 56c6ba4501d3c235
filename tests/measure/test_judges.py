"""Planted faults, and the judges that must refuse them: `check` (and `bench`, which asks it: test_bench.py), `replay`, the
tests' own comparison with truth, and the differences of whole models. The output and all gradients have the fault."""

import cases
import pytest
import torch
from recorded_calls import call
from torch.utils._python_dispatch import TorchDispatchMode
from values import DTYPES

from mx_driving._agreement import difference_beside_ties, model_difference
from mx_driving._measure.accuracy import check_one
from mx_driving._measure.workloads import Workload
from mx_driving._replay.calls import RecordedCall
from mx_driving._replay.error_bound import ErrorBound
from mx_driving._replay.judge import judge

M = cases.MULTI_SCALE
NARROW = (torch.float16, torch.bfloat16)


def put(value, rows):
    """Return a fault: `value` in one row, or in every 50th row."""

    def plant(t):
        t = t.clone()
        t[:, rows] = value
        return t

    return plant


def exchanged(t):
    """Exchange the row of the largest entry with the third row after it."""
    order, i = list(range(t.shape[1])), int(t.abs().movedim(1, 0).flatten(1).amax(1).argmax())
    j = (i + 3) % len(order)
    order[i], order[j] = j, i
    return t[:, order]


def one_entry(t):
    """Move the largest entry by a hundredth."""
    t = t.clone()
    t.view(-1)[t.abs().argmax()] *= 1.01
    return t


def rounded(dtype):
    """Return a fault: round to another dtype first."""
    others = {torch.float64: torch.float32, torch.bfloat16: torch.float16}
    return lambda t: t.to(others.get(dtype, torch.bfloat16))


NUMBERS = {"NaN": torch.nan, "inf": torch.inf, "-inf": -torch.inf, "1e30": 1e30}
FAULTS = {
    **{f"{name} in a row": put(number, 7) for name, number in NUMBERS.items()},
    **{f"{name} in 2 % of rows": put(number, slice(3, None, 50)) for name, number in NUMBERS.items()},
    "one entry": one_entry,
    "two rows exchanged": exchanged,
    "transposed": lambda t: t.transpose(-1, -2),
    "transposed, in the same shape": lambda t: t.transpose(-1, -2).reshape(t.shape),
    "zero": torch.zeros_like,
    "None": lambda t: None,
    "rounded once too often": None,  # `rounded` of the dtype
    "of another dtype": None,  # it is not rounded to the dtype
    "in a tuple": lambda t: (t,),
}
FACTORS = (1.1, 1.01, 1.001, 1.0001, 1.00001)
# The least of these factors that a judge refuses in every result. A smaller factor is within the allowed error of sums and
# positions; in 16 bits, it moves too few entries over a rounding boundary. All other judges refuse all factors.
LEAST = {
    ("check", torch.bfloat16): 1.0001,
    ("replay", torch.float32): 1.0001,
    ("replay", torch.float16): 1.0001,
    ("replay", torch.bfloat16): 1.0001,
    ("compare", torch.float32): 1.0001,
    ("compare", torch.float16): 1.0001,
    ("compare", torch.bfloat16): 1.001,
}


def spoil(fault, t, dtype):
    """Return a result with a fault, rounded to its dtype. `fault` is a name or a factor."""
    if isinstance(fault, float):
        return (t.double() * fault).to(dtype)
    if fault == "of another dtype":
        return t.to(torch.float32 if dtype != torch.float32 else torch.float64)
    found = (FAULTS[fault] or rounded(dtype))(t)
    return found.to(dtype).contiguous() if isinstance(found, torch.Tensor) else found


class Planted(TorchDispatchMode):
    """Compute operators in float64, plant a fault in their results, and round these to the dtype of the inputs."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "mx_driving":
            return func(*args, **(kwargs or {}))
        found = func(*(a.double() if cases.is_floating(a) else a for a in args))
        dtype = args[func.name().endswith("_backward")].dtype
        if isinstance(found, torch.Tensor) and self.fault in ("None", "in a tuple", "transposed"):
            return found.to(dtype)  # torch lets no operator return such an output
        results = [spoil(self.fault, t, dtype) for t in ([found] if isinstance(found, torch.Tensor) else found)]
        return results[0] if isinstance(found, torch.Tensor) else tuple(results)


WORKLOAD = Workload("small", M, lambda generator: call(M)[0])
NAMES = ("output", "grad_value", "grad_locations", "grad_weights")


def check(dtype, fault):
    if fault == "in a tuple":
        return [True]  # torch lets no operator return it
    with Planted(fault):
        result = check_one(WORKLOAD, str(dtype).removeprefix("torch."), "cpu", quick=True, timed=False)
    assert len(result.failures) == sum(error > result.allowed[name] for name, error in result.errors.items())
    refused = [error > result.allowed[name] for name, error in result.errors.items()]
    return refused[fault in ("None", "transposed") :]


def recorded(dtype, fault):
    inputs, grad = call(M, dtype)
    true = cases.truth_of(M, inputs, grad)
    results = [spoil(fault, torch.from_numpy(t), dtype) for t in true.results]
    return RecordedCall("call", {"operator": M}, inputs, dict(zip(NAMES, results, strict=True)), (), grad)


def replay(dtype, fault):
    """`read` refuses other shapes and objects that are no tensors: tests/replay/test_replay_files.py. The dtype of a result may
    be another than that of the inputs, as under autocast."""
    if fault in ("None", "in a tuple", "transposed", "of another dtype"):
        return [True]
    return [bool(wrong.any()) for wrong in ErrorBound(recorded(dtype, fault)).wrong.values()]


def compare(dtype, fault):
    """Compare as the tests do."""
    inputs, grad = call(M, dtype)
    true = cases.truth_of(M, inputs, grad)
    results = [torch.from_numpy(t) for t in true.results]
    refused = []
    for i, result in enumerate(results):
        tensors = [t.to(dtype) for t in results]
        try:
            cases.assert_near(true, M, inputs, [*tensors[:i], spoil(fault, result, dtype), *tensors[i + 1 :]])
            refused.append(False)
        except (AssertionError, AttributeError):  # None and a tuple have no dtype
            refused.append(True)
    return refused


def differ(function, dtype, fault):
    """Return for each output whether two models' outputs differ by more than 16 ulps of float32 or float64."""
    random = torch.Generator().manual_seed(0)
    shapes = {"logits": (1, 900, 12), "boxes": (1, 900, 4)}
    exact = {name: torch.randn(shape, generator=random, dtype=torch.float64) for name, shape in shapes.items()}
    theirs = {name: t.to(dtype) for name, t in exact.items()}
    differences = [function({**theirs, name: spoil(fault, t, dtype)}, theirs) for name, t in exact.items()]
    eps = torch.finfo(dtype if dtype == torch.float64 else torch.float32).eps
    return [(found[0] if isinstance(found, tuple) else found) > 16 * eps for found in differences]


JUDGES = {
    "check": check,
    "replay": replay,
    "compare": compare,
    "beside ties": lambda *args: differ(difference_beside_ties, *args),
    "models": lambda *args: differ(model_difference, *args),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", JUDGES)
def test_planted_faults_are_refused(name, dtype):
    judge = JUDGES[name]
    assert not any(judge(dtype, 1.0))
    assert [fault for fault in FAULTS if not all(judge(dtype, fault))] == []
    assert min(factor for factor in FACTORS if all(judge(dtype, factor))) == LEAST.get((name, dtype), FACTORS[-1])


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("fault", [one_entry, lambda t: torch.cat([t[:, :1] * 1.02, t[:, 1:]], 1), lambda t: 1.05 * t])
def test_coarse_is_an_error_of_many_entries(dtype, fault):
    """Sums in 16 bits move more than a tenth of the entries. `replay` calls other errors of this size wrong."""
    call = recorded(dtype, 1.0)
    call.results["output"] = fault(call.results["output"].double()).to(dtype)
    assert judge(call).is_wrong


def tied(rows, scale=1.0):
    """Return outputs of 100 queries, and the same with these rows in another order or with another size."""
    theirs = torch.randn(1, 100, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ours = theirs.clone()
    ours[:, sorted(rows)] = ours[:, rows] * scale
    return {"boxes": ours}, {"boxes": theirs}


@pytest.mark.parametrize(
    ("rows", "scale"),
    [
        ([5, 4], 1.0),  # neighbours exchange their ranks
        ([5, 4], 1.1),  # and get embeddings of their ranks
        ([99], 1.1),  # a query without a rank takes the last rank
    ],
)
def test_near_ties_cannot_be_told_from_exchanged_neighbours(rows, scale):
    """The outputs have no scores of the ranking."""
    assert difference_beside_ties(*tied(rows, scale)) == (0.0, len(rows))


@pytest.mark.parametrize(
    ("rows", "scale"),
    [
        ([7, 4], 1.0),  # not neighbours
        ([7], 1.1),  # one query, not the last
        ([5, 4], 10.0),  # larger than any other
        ([4, 5, 6], 1.1),  # a run of three is no exchange
        ([5, 4, 11, 10], 1.0),  # two exchanges are more than 2 % of 100 queries
    ],
)
def test_what_no_near_tie_does_is_a_difference(rows, scale):
    found, left_out = difference_beside_ties(*tied(rows, scale))
    assert found > 0.01
    assert left_out == 0
