"""DTensor, DDP and FSDP on two and four CPU processes (gloo), which start once each; what they do: distributed_worker.py."""

from __future__ import annotations

import distributed_worker
import pytest
import torch
import torch.multiprocessing as mp
from cases import EVERY
from distributed_worker import KINDS, MEASURED, MESH, SHARDED

from mx_driving import _needs
from mx_driving._operator.description import OPERATORS

# The processes of each world start once, not once per worker.
pytestmark = [pytest.mark.long, pytest.mark.xdist_group("distributed")]

AXES = [(operator, axis) for operator in EVERY for axis in SHARDED[operator]]
SUMMED = [(operator, axis) for operator, axis in AXES if SHARDED[operator][axis][-1] is None]  # the output is a sum over it


def on_one_dimension(names, rows):
    """Marks a test of rows (operator, ...), with as many processes as measure the operator on a mesh of one dimension."""
    rows = [(n, *row) for n in (2, 4) for row in rows if row[0] in MEASURED[n]]
    return pytest.mark.parametrize(("world", *names), rows, indirect=["world"])


two, four = (pytest.mark.parametrize("world", [n], ids=[f"{n} processes"], indirect=True) for n in (2, 4))


@pytest.fixture(scope="module", params=[2, 4], ids=lambda n: f"{n} processes")
def world(request):
    return request.param


@pytest.fixture(scope="module")
def worlds():
    """What each world found, by its number of processes. pytest makes a fixture with parameters anew when they come back."""
    return {}


# Where processes can be forked from one that has imported torch, six need not import it.
METHOD = "forkserver" if "forkserver" in mp.get_all_start_methods() else "spawn"
mp.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo"])


@pytest.fixture
def found(world, worlds, tmp_path):
    if world not in worlds:
        mp.start_processes(distributed_worker.run, args=(world, str(tmp_path)), nprocs=world, start_method=METHOD)
        worlds[world] = torch.load(tmp_path / "found.pt")
    return worlds[world]


def assert_same_numbers(result):
    """Sums over processes come in another order; all else is the same to the last bit."""
    allowed = 1e-14 * result["scale"]
    assert result["scale"] > 1
    assert result["output"] <= allowed
    assert result["gradients"] <= allowed


def assert_silent(result):
    assert (result["forward"], result["backward"]) == (0, 0)


@on_one_dimension(("operator", "axis"), AXES)
def test_sharded_without_communication(found, operator, axis):
    result = found[operator, axis]
    assert_same_numbers(result)
    assert_silent(result)
    place = SHARDED[operator][axis][-1]
    assert result["placements"] == ["P(sum)" if place is None else f"S({place})"]


@on_one_dimension(("operator", "axis"), [each for each in AXES if each not in SUMMED])
def test_uneven_shards(found, operator, axis):
    """Batch and queries may have uneven shards. Uneven heads and groups are gathered, since the output's would not fit."""
    result = found[operator, axis, "uneven"]
    assert_same_numbers(result)
    if axis == OPERATORS[operator].blocks:
        assert result["forward"] > 0
    else:
        assert_silent(result)


@on_one_dimension(("operator",), [(operator,) for operator in EVERY])
def test_other_gradients_wanted(found, operator):
    """A cached sharding serves only calls that want the same gradients."""
    result = found[operator, "weights only"]
    assert_same_numbers(result)
    assert_silent(result)
    assert result["unwanted"] == []


@four
@pytest.mark.needs(MESH)
@pytest.mark.parametrize("layout", ["batch x blocks", "blocks x places", "blocks x blocks"])
@pytest.mark.parametrize("operator", EVERY)
def test_two_dimensional_mesh(found, operator, layout):
    assert_same_numbers(found[operator, layout])
    assert_silent(found[operator, layout])


@two
@pytest.mark.needs("DTensor under torch.compile")
@pytest.mark.parametrize("operator", KINDS)
def test_compiled(found, operator):
    assert found[operator, "compiled"] == 0


@two
@pytest.mark.parametrize(("axis", "placement"), [("c", "S(1)"), ("n", "P(sum)")])
def test_lifting_by_depth(found, axis, placement):
    """Channels stay apart; points that are split make sums in part."""
    result = found["bev_pool_v3", axis]
    assert result["placements"] == [placement]
    assert result["output"] < 1e-13
    assert result["gradients"] < 1e-13
    # parts of gradients, which are below 16, are rounded to bfloat16 before they are summed
    result = found["bev_pool_v3", axis, "autocast"]
    assert result["dtypes"] == [torch.float32, torch.bfloat16, torch.bfloat16]
    assert result["placements"] == [placement]
    assert result["output"] < 1e-5
    assert result["gradients"] < 3 * 2**-4


def test_inference_mode(found):
    assert found["inference"] == 0


@two
@pytest.mark.parametrize(
    "kind",
    [
        *("DistributedDataParallel", "FullyShardedDataParallel"),
        pytest.param("fully_shard", marks=pytest.mark.needs("fully_shard on a CPU")),
    ],
)
def test_training(found, kind):
    losses = found[kind]
    assert losses["together"] == pytest.approx(losses["alone"], rel=1e-12)
    assert losses["together"] < 0.99 * losses["before"]


@two
@pytest.mark.needs("fully_shard on a CPU")
def test_modules_that_are_sharded_before_they_are_initialised(found):
    assert found["initialised"] == [0, 0]


@pytest.mark.parametrize("operator", KINDS)
def test_an_older_torch_is_refused_in_a_sentence(found, world, operator):
    """At use, where DTensor itself would fail without saying why."""
    feature, key = ("DTensor under torch.compile", "compiled") if world == 2 else (MESH, "refused")
    if _needs.lacks(feature) is None:
        pytest.skip(f"an older torch than {_needs.NEEDS[feature].torch}, to be refused")
    assert _needs.lacks(feature) in found[operator, key]
