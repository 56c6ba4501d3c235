"""`mx-driving bench` and benchmarks/bench.py: workloads make sense, rivals compute the same, wrong kernels are not timed."""

import csv
import statistics

import bench
import floor
import module_workloads
import modules
import pytest
import torch
from floor import add_rows, corner_rows, pooling_floor
from PIL import Image
from traits import extra_memory
from typer.testing import CliRunner

from mx_driving._measure import accuracy
from mx_driving._measure.accuracy import WorkloadErrors, check_one
from mx_driving._measure.plain import Rival, make_ours, make_plain
from mx_driving._measure.workloads import AGGREGATION, CHECKED, EXAMPLES, WORKLOADS, take_queries
from mx_driving._operator.description import OPERATORS
from mx_driving.cli.app import app

SMALL = EXAMPLES[0].name
needs_the_floor = pytest.mark.skipif(floor.why_not() is not None, reason="the gather loop's library (make native)")


def test_names_are_unique_and_every_operator_is_there():
    assert len({w.name for w in (*WORKLOADS, *module_workloads.MODULES)}) == len(WORKLOADS) + len(module_workloads.MODULES)
    assert {w.operator for w in WORKLOADS} == {w.operator for w in CHECKED} == set(OPERATORS)


def named(name):
    return next(w for w in (*WORKLOADS, *CHECKED) if w.name == name)


LOGITS = ["Deformable-DETR decoder, 300 queries, with logits", "Sparse4D 2 scales, with logits", "MapTR nano, with logits"]
PILLARS = "BEVFormer spatial cross-attention, 6 x 2500, with logits"
BARE = ["RT-DETR decoder", "Sparse4D v3", "MapTR nano", "Vendor example small [1, 16, 32, 4, 1, 8]", "FlashOcc"]
LIFTED = ["BEVDet-R50, 80 channels", "BEVFusion 8 x 22, without depth"]


@pytest.mark.parametrize("name", [*BARE, *LOGITS, PILLARS, *LIFTED])
def test_rivals_compute_the_same(name):
    """On some queries of a workload, plain torch and the bare operator on computed samples have the operator's output."""
    workload = named(name)
    args = take_queries(workload.operator, workload.inputs(), 0, 40)
    output = getattr(torch.ops.mx_driving, workload.operator)(*args)
    assert output.abs().max() > 1e-3
    for function, inputs, _ in (Rival(make_plain(workload.operator), args, ()), *make_ours(workload, args).values()):
        torch.testing.assert_close(function(*inputs), output, rtol=1e-4, atol=1e-5)
    assert len(make_ours(workload, args)) == (2 if workload.description.bare else 1)


IN_EACH_DTYPE = [*((name, "float32") for name in (*LOGITS[1:], *LIFTED)), (LOGITS[0], "bfloat16"), (LIFTED[0], "bfloat16")]


@pytest.mark.parametrize(("name", "dtype"), IN_EACH_DTYPE)
def test_errors(name, dtype):
    """The output and every gradient have allowed errors."""
    workload = named(name)
    result = check_one(workload, dtype, "cpu", quick=True, timed=False)
    assert result.failures == []
    assert list(result.errors) == ["output", *workload.differentiable_names]


@pytest.mark.parametrize("name", [*LOGITS[1:], *LIFTED])
def test_the_reference_may_do_some_queries_at_a_time(name, monkeypatch):
    """Gradients of inputs that queries share, such as a projection, are summed; other results are concatenated."""
    workload = named(name)
    args = take_queries(workload.operator, workload.inputs(), 0, 30)
    op = getattr(torch.ops.mx_driving, workload.operator)
    grad = torch.randn(op(*args).shape, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(accuracy, "CHANNELS", 30)
    whole = accuracy._compute_in_float64(workload, args, grad)
    monkeypatch.setattr(accuracy, "CHUNK", 12)
    monkeypatch.setattr(accuracy, "CHANNELS", 12)
    torch.testing.assert_close(accuracy._compute_in_float64(workload, args, grad), whole, rtol=1e-12, atol=1e-12)


@needs_the_floor
@pytest.mark.filterwarnings("error:constrained_layout")  # no room for the bars of one workload
def test_rows_csv_and_bars(tmp_path, monkeypatch):
    """`mx-driving bench` has our operator and plain torch; benchmarks/bench.py also has what only reads the rows."""
    monkeypatch.setenv("COLUMNS", "200")
    bars, found = tmp_path / "rows.png", []
    for program, more in ((app, []), (bench.app, ["--plot", str(bars)])):
        out = tmp_path / f"{len(found)}.csv"
        command = ["bench"] * (program is app)
        result = CliRunner().invoke(program, [*command, "--workload", SMALL, "--seconds", "0.05", "--csv", str(out), *more])
        assert result.exit_code == 0, result.output
        found.append(list(csv.DictReader(out.open())))
    plain, rows = found
    public = {(d, i) for d in ("forward", "forward + backward") for i in ("mx_driving", "plain torch")}
    public.add(("backward", "mx_driving"))
    assert {(r["direction"], r["implementation"]) for r in plain} == public
    floors = {(d, i) for d in ("forward", "backward") for i in ("gather loop", "gather loop, head-major")}
    assert {(r["direction"], r["implementation"]) for r in rows} == public | floors
    assert all(float(r["milliseconds"]) > 0 and int(r["rounds"]) >= 3 for r in rows)
    assert "torch " + torch.__version__ in rows[0]["machine"]
    with Image.open(bars) as picture:
        assert min(picture.size) > 100
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 10


@needs_the_floor
@pytest.mark.parametrize("name", BARE[:3])
def test_the_gather_floor_reads_and_adds_the_rows(name):
    """Plain indexing has the same sums, forward and backward."""
    workload = named(name)
    args = take_queries(workload.operator, workload.inputs(), 0, 30)
    value = args[0].unsqueeze(2) if workload.operator == AGGREGATION else args[0]
    rows = corner_rows(workload.operator, args)
    if workload.operator == AGGREGATION:  # the operator's gradient of value is nonzero exactly in the rows that are read
        grad, backward = torch.ones(1, 30, args[0].shape[2]), torch.ops.mx_driving.deformable_aggregation_backward.default
        read = backward(grad, *args, [True, False, False])[0].abs().sum(-1)[0].nonzero().flatten()
        assert torch.equal(read, rows[(rows >= 0) & (rows < value.shape[1])].unique())
    bs, heads, queries, _ = rows.shape
    padded = torch.nn.functional.pad(value, (0, 0, 0, 0, 0, 1)).double()  # rows num_keys and -1 are zeros
    sums = torch.stack([padded[b, rows[b, h].long(), h].sum(-2) for b in range(bs) for h in range(heads)])
    expected = sums.view(bs, heads, queries, -1).transpose(1, 2)
    output = torch.empty(expected.shape)
    add_rows(value, rows, output)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-4)
    head_major = torch.empty(expected.shape)
    add_rows(value.transpose(1, 2).contiguous().transpose(1, 2), rows, head_major)
    assert torch.equal(head_major, output)
    grad_value, one = torch.zeros_like(value), torch.ones_like(output)
    add_rows(value, rows, one, grad_value)
    keys = value.shape[1]
    real = torch.where(rows < 0, keys, rows)
    counts = torch.stack([real[b, h].flatten().bincount(minlength=keys + 1) for b in range(bs) for h in range(heads)])
    expected = counts[:, :keys].view(bs, heads, keys).transpose(1, 2)[..., None].expand_as(value)
    assert torch.equal(grad_value, expected.float())


@needs_the_floor
def test_the_gather_floor_of_pooling_reads_the_rows_of_each_cell():
    random = torch.Generator().manual_seed(0)
    feat, n = torch.randn(9, 20, generator=random), 400
    ranks_feat, ranks_bev = (torch.randint(most, (n,), generator=random, dtype=torch.int32) for most in (9, 12))
    sums = pooling_floor((feat, torch.ones(5), ranks_feat, ranks_feat % 5, ranks_bev, 1, 2, 2, 4))()
    expected = torch.zeros(16, 20, dtype=torch.float64).index_add_(0, ranks_bev, feat[ranks_feat].double())
    torch.testing.assert_close(sums.double(), expected, rtol=1e-5, atol=1e-4)


def test_memory_beside_inputs_and_outputs():
    """The kernels need less than 16 MB: a copy of a head, or of a head for each thread; in 16 bits the copy is float32. Take
    the median of three, because Linux counts a thread's pages in batches: 256 KB, 1.4 % of this value, for each of two
    threads."""
    encoder = named("Deformable-DETR encoder")
    *runs, narrow = extra_memory(encoder, ["float32"] * 3 + ["bfloat16"])
    forward, backward, _ = (statistics.median(shares) for shares in zip(*(r.values() for r in runs), strict=True))
    value = encoder.inputs()[0]
    head, limit = 1 / value.shape[2], (16 << 20) / value.nbytes
    assert head - 2 * 0.014 < forward < limit
    assert head - 2 * 0.014 < backward < limit
    assert narrow["forward"] == pytest.approx(head, abs=0.05)
    assert narrow["backward"] == pytest.approx(2 * torch.get_num_threads() * head, abs=0.05)


def test_training_with_logits_keeps_no_locations_or_weights():
    """Forward and backward together need less than value's size beside inputs, outputs and gradients. Locations and weights
    would be 1.5 times value's size here."""
    (memory,) = extra_memory(named("Deformable-DETR encoder, with logits"), ["float32"])
    assert memory["forward + backward"] < 1
    assert memory["forward + backward"] == pytest.approx(max(memory["forward"], memory["backward"]), abs=0.05)


def test_an_aggregation_with_logits_writes_nothing_of_the_size_of_locations():
    """A composition of softmax and the bare operator needs 0.11 and 0.42 of value's size here."""
    (memory,) = extra_memory(named("Sparse4D v3, with logits"), ["float32"])
    assert max(memory.values()) < 0.012


def test_a_wrong_kernel_is_not_timed(monkeypatch):
    row = WorkloadErrors(EXAMPLES[0], "float32", "cpu: native", {"output": 1.0}, {"output": 1e-6}, 0, 0)
    monkeypatch.setattr("mx_driving._measure.speed.check_one", lambda *a, **k: row)
    result = CliRunner().invoke(app, ["bench", "--workload", SMALL])
    assert result.exit_code != 0
    assert "output of multi_scale_deformable_attn is off" in str(result.exception)


def test_a_module_that_computes_something_else_is_not_timed():
    """The output of this module in plain torch is off by a thousandth."""

    def make(generator):
        subject = module_workloads._geometric(generator, (5, 6), (3, 4))
        return subject._replace(plainly=lambda *inputs: subject.plainly(*inputs) * 1.001)

    with pytest.raises(ValueError, match="output of plain torch must be those of mx_driving"):
        modules.measure_module(module_workloads.ModuleWorkload("m", make), False, 0)
