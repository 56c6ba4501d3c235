"""DTensor, DDP and FSDP on two CPU processes (gloo). The processes start once, and run distributed_worker.py."""

import distributed_worker
import pytest
import torch
import torch.multiprocessing as mp
from cases import EVERY
from distributed_worker import KINDS, MESH, SHARDED, WORLD

from mx_driving import _needs
from mx_driving._operator.description import OPERATORS

# One worker runs all tests of this file, so that the processes start once.
pytestmark = [pytest.mark.long, pytest.mark.xdist_group("distributed")]

AXES = [(operator, axis) for operator in EVERY for axis in SHARDED[operator]]
SUMMED = [each for each in AXES if SHARDED[each[0]][each[1]][-1] is None]  # the output is a sum over the axis

# Processes that are forked from a server with torch do not import torch again.
METHOD = "forkserver" if "forkserver" in mp.get_all_start_methods() else "spawn"
mp.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo"])


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    mp.start_processes(distributed_worker.run, args=(str(folder),), nprocs=WORLD, start_method=METHOD)
    return torch.load(folder / "found.pt")


def assert_same_numbers(result):
    """Check numbers up to the rounding of sums over processes, whose order differs."""
    allowed = 1e-14 * result["scale"]
    assert result["scale"] > 1
    assert result["output"] <= allowed
    assert result["gradients"] <= allowed


def assert_silent(result):
    assert (result["forward"], result["backward"]) == (0, 0)


@pytest.mark.parametrize(("operator", "axis"), AXES)
def test_sharded_without_communication(found, operator, axis):
    result = found[operator, axis]
    assert_same_numbers(result)
    assert_silent(result)
    place = SHARDED[operator][axis][-1]
    assert result["placements"] == ["P(sum)" if place is None else f"S({place})"]


@pytest.mark.parametrize(("operator", "axis"), [each for each in AXES if each not in SUMMED])
def test_uneven_shards(found, operator, axis):
    """Batch and queries may have uneven shards. Uneven heads and groups are gathered: shards of the output would not fit."""
    result = found[operator, axis, "uneven"]
    assert_same_numbers(result)
    if axis == OPERATORS[operator].blocks:
        assert result["forward"] > 0
    else:
        assert_silent(result)


@pytest.mark.parametrize("operator", EVERY)
def test_other_output_masks(found, operator):
    """A cached sharding serves only calls with the same output mask."""
    result = found[operator, "weights only"]
    assert_same_numbers(result)
    assert_silent(result)
    assert result["unwanted"] == []


@pytest.mark.needs(MESH)
@pytest.mark.parametrize("sides", [(2, 1), (1, 2)])
@pytest.mark.parametrize("layout", ["batch x blocks", "blocks x queries"])
@pytest.mark.parametrize("operator", EVERY)
def test_two_dimensional_mesh(found, operator, layout, sides):
    """Each dimension of the mesh shards another axis. One dimension has both processes."""
    assert_same_numbers(found[operator, layout, sides])
    assert_silent(found[operator, layout, sides])


@pytest.mark.needs("DTensor under torch.compile")
@pytest.mark.parametrize("operator", KINDS)
def test_compiled(found, operator):
    assert found[operator, "compiled"] == 0


@pytest.mark.parametrize(("axis", "placement"), [("c", "S(1)"), ("n", "P(sum)")])
def test_lifting_by_depth(found, axis, placement):
    """The output has shards of channels. Shards of points give partial sums."""
    result = found["bev_pool_v3", axis]
    assert result["placements"] == [placement]
    assert result["output"] < 1e-13
    assert result["gradients"] < 1e-13
    # Partial sums of gradients are below 16, and are rounded to bfloat16 before they are added.
    result = found["bev_pool_v3", axis, "autocast"]
    assert result["dtypes"] == [torch.float32, torch.bfloat16, torch.bfloat16]
    assert result["placements"] == [placement]
    assert result["output"] < 1e-5
    assert result["gradients"] < 3 * 2**-4


def test_inference_mode(found):
    assert found["inference"] == 0


FULLY_SHARD = pytest.param("fully_shard", marks=pytest.mark.needs("fully_shard on a CPU"))


@pytest.mark.parametrize("kind", ["DistributedDataParallel", "FullyShardedDataParallel", FULLY_SHARD])
def test_training(found, kind):
    losses = found[kind]
    assert losses["together"] == pytest.approx(losses["alone"], rel=1e-12)
    assert losses["together"] < 0.99 * losses["before"]
    patched = found[kind, "patched"]
    assert patched["together"] == pytest.approx(patched["alone"], rel=1e-12)
    assert patched["together"] < 0.99 * patched["before"]
    assert patched["calls"] == 12  # two models of two layers, three steps


@pytest.mark.needs("fully_shard on a CPU")
def test_modules_that_are_sharded_before_they_are_initialised(found):
    assert found["initialised"] == [0, 0]


@pytest.mark.parametrize(
    ("feature", "key"), [("DTensor under torch.compile", ("compiled",)), (MESH, ("batch x blocks", (2, 1)))]
)
@pytest.mark.parametrize("operator", KINDS)
def test_an_older_torch_is_refused_in_a_sentence(found, operator, feature, key):
    """Calls are refused, because DTensor would fail with an unrelated error."""
    if _needs.lacks(feature) is None:
        pytest.skip(f"an older torch than {_needs.NEEDS[feature].torch}, to be refused")
    assert _needs.lacks(feature) in found[(operator, *key)]
