"""The program of each process of test_distributed.py. The first process writes the results."""

import pathlib
from typing import Any

import attention_modules
import cases
import logits_cases
import torch
import torch.distributed as dist
from cases import AGGREGATION, AGGREGATION_LOGITS, GEOMETRIC, GEOMETRIC_LOGITS, MULTI_SCALE, MULTI_SCALE_LOGITS
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import mx_driving
from mx_driving import _needs
from mx_driving._operator.description import OPERATORS

FLOATING = {name: [i for i, t in enumerate(row.tensors) if t.elements != "index"] for name, row in OPERATORS.items()}
# The sharded dimension of floating inputs and of the output. None: a whole input, or a partial sum.
SHARDED = {
    name: {axis: tuple(row.axes[axis][i] for i in (*FLOATING[name], -1)) for axis in row.sharded}
    for name, row in OPERATORS.items()
}
# Rules are the same for traced calls, so that compiled calls try one operator of each kind of input.
KINDS = (MULTI_SCALE, AGGREGATION_LOGITS)
WORLD = 2
LEVELS = [(3, 4), (2, 2), (2, 3), (1, 2)]


def louder(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Multiply value by 4. Softmax over many samples makes gradients small, and errors are relative to the largest gradient."""
    return 4 * args[0], *args[1:]


def inputs_of(bs: int, queries: int, channels: int, blocks: int, cams: int, window: tuple[int, int], box: bool = False):
    """Return functions that make the inputs of each operator. There are as many points as heads or groups."""
    of_heads = bs, queries, channels, blocks, LEVELS
    of_groups = bs, queries, blocks, 2 * blocks, blocks, [[(3, 4)]] * cams
    return {
        MULTI_SCALE: lambda: cases.multi_scale(*of_heads, blocks),
        AGGREGATION: lambda: cases.aggregation(*of_groups),
        GEOMETRIC: lambda: cases.geometric(*of_heads, blocks),
        MULTI_SCALE_LOGITS: lambda: logits_cases.multi_scale(*of_heads, blocks, box=box),
        AGGREGATION_LOGITS: lambda: louder(logits_cases.aggregation(*of_groups)),
        GEOMETRIC_LOGITS: lambda: logits_cases.geometric(*of_heads, window),
    }


INPUTS, UNEVEN = inputs_of(4, 8, 3, 4, 4, (2, 2)), inputs_of(5, 7, 2, 3, 2, (3, 1), box=True)


def placed(tensor: torch.Tensor, mesh: Any, dims: tuple[int | None, ...]) -> DTensor:
    return distribute_tensor(tensor, mesh, [Replicate() if d is None else Shard(d) for d in dims])


def largest(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    return max((a - b).abs().max().item() for a, b in pairs)


def measure(operator: str, args: tuple[torch.Tensor, ...], mesh: Any, layouts: list[tuple[int | None, ...]], wanted=None):
    """Compare forward and backward in shards with one process. A layout is for one dimension of the mesh."""
    function = getattr(mx_driving, operator)
    wanted = cases.DIFFERENTIABLE[operator] if wanted is None else wanted
    alone = [t.clone().requires_grad_(i in wanted) if isinstance(t, torch.Tensor) else t for i, t in enumerate(args)]
    expected = function(*alone)
    grad = cases.grad_for(operator, args)
    expected.backward(grad)

    shards: list[torch.Tensor] = list(args)  # index tables stay plain tensors
    for at, i in enumerate(FLOATING[operator]):
        shards[i] = placed(args[i], mesh, tuple(layout[at] for layout in layouts)).requires_grad_(i in wanted)
    with CommDebugMode() as forward:
        output = function(*shards)
    whole = output.redistribute(mesh, [Replicate() if p == Partial() else p for p in output.placements])
    grads = placed(grad, mesh, tuple(layout[-1] for layout in layouts))
    with CommDebugMode() as backward:
        whole.backward(grads)
    found = [(shards[i].grad.full_tensor(), alone[i].grad) for i in wanted]
    return {
        "output": largest([(output.full_tensor(), expected)]),
        "gradients": largest(found),
        "scale": max(expected.abs().max().item(), *(g.abs().max().item() for _, g in found)),
        "forward": forward.get_total_counts(),
        "backward": backward.get_total_counts(),
        "placements": ["P(sum)" if p == Partial() else str(p) for p in output.placements],
        "unwanted": [i for i in FLOATING[operator] if i not in wanted and shards[i].grad is not None],
    }


class Layer(torch.nn.Module):
    """The operator between two linear maps, on a share of the batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.before, self.after = torch.nn.Linear(3, 3).double(), torch.nn.Linear(12, 5).double()

    def forward(self, rank, parts):
        value, *rest = (t.chunk(parts)[rank] if i in (0, 3, 4) else t for i, t in enumerate(INPUTS[MULTI_SCALE]()))
        return self.after(mx_driving.multi_scale_deformable_attn(self.before(value), *rest)).square().mean()


class TwoLayers(torch.nn.Module):
    """Two layers of a library. The output of the first layer is the query of the second layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (attention_modules.build(attention_modules.Paper) for _ in range(2))

    def forward(self, rank, parts):
        query, *rest = attention_modules.arguments_for(self.first).values()
        query, *rest = (t.chunk(parts)[rank] if t.is_floating_point() or t.dtype == torch.bool else t for t in (query, *rest))
        return self.second(self.first(query, *rest), *rest).square().mean()


def wrapped(kind: str, mesh: Any, module: torch.nn.Module) -> torch.nn.Module:
    if kind == "DistributedDataParallel":
        return DistributedDataParallel(module)
    if kind == "FullyShardedDataParallel":
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)
    for part in module.children():
        fully_shard(part, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def patched(kind: str, mesh: Any, rank: int) -> dict[str, Any]:
    """Train a patched model, and count the calls of operators."""
    with attention_modules.patched(attention_modules.Paper), attention_modules.Operators() as calls:
        return trained(kind, mesh, rank, TwoLayers) | {"calls": calls.names.count(attention_modules.WITH_LOGITS)}


def trained(kind: str, mesh: Any, rank: int, build: Any = Layer) -> dict[str, Any]:
    """Three steps of SGD on a share of the batch each, against the same steps of one process on all of it."""
    alone, module = build(), wrapped(kind, mesh, build())
    losses, first = [], None
    for model, share in ((alone, (0, 1)), (module, (rank, WORLD))):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(*share)
            first = loss.item() if first is None else first
            loss.backward()
            optimizer.step()
        loss = loss.detach() / share[1]
        if model is module:
            dist.all_reduce(loss)
        losses.append(loss.item())
    return {"before": first, "alone": losses[0], "together": losses[1]}


def initialised(kind: type[torch.nn.Module], mesh: Any) -> float:
    """A module that was built on the device meta and sharded before it had numbers -> the largest error of those not random."""
    with torch.device("meta"):
        module = kind(24)
    fully_shard(module, mesh=mesh)
    module.to_empty(device="cpu")
    module.apply(lambda each: each.reset_parameters() if hasattr(each, "reset_parameters") else None)
    found, expected = (dict(m.named_parameters()) for m in (module, kind(24)))
    return largest([(found[n].full_tensor(), p) for n, p in expected.items() if "offsets" in n or "fix_scale" in n])


def compiled(operator: str, mesh: Any) -> float:
    """Compile a function that calls the operator with DTensors -> its largest error."""
    args = list(INPUTS[operator]())
    layout = SHARDED[operator]["bs"]
    expected = getattr(mx_driving, operator)(*args)
    for at, i in enumerate(FLOATING[operator]):
        args[i] = placed(args[i], mesh, (layout[at],))
    function = torch.compile(lambda *a: getattr(mx_driving, operator)(*a) * 2, fullgraph=True, backend="aot_eager")
    return largest([(function(*args).full_tensor(), expected * 2)])


def lifted(axis: str, mesh: Any, autocast: bool = False) -> dict[str, Any]:
    """bev_pool_v3 in shards of channels or of points against one process. Ranks of whole channels stay plain tensors."""
    random, dtype = torch.Generator().manual_seed(0), torch.bfloat16 if autocast else torch.float64
    floating = [torch.randn(*shape, generator=random).to(dtype) for shape in ((9, 6), (40,))]
    ranks = [torch.randint(most, (31,), generator=random) for most in (9, 40, 30)]
    grad = torch.randn(1, 6, 1, 5, 6, generator=random).to(torch.float32 if autocast else dtype)
    row = OPERATORS["bev_pool_v3"]

    def operator(*args: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return torch.ops.mx_driving.bev_pool_v3(*args)

    alone = [t.clone().requires_grad_() for t in floating]
    expected = operator(*alone, *ranks, 1, 1, 5, 6)
    expected.backward(grad)
    layout = row.axes[axis]
    shards = [placed(t, mesh, (at,)).requires_grad_() for t, at in zip(floating, layout, strict=False)]
    split = [placed(t, mesh, (at,)) if axis == "n" else t for t, at in zip(ranks, layout[2:], strict=False)]
    output = operator(*shards, *split, 1, 1, 5, 6)
    output.redistribute(mesh, [Replicate()]).backward(placed(grad, mesh, (None,)))
    gradients = [(a.grad.full_tensor(), b.grad) for a, b in zip(shards, alone, strict=True)]
    placements = ["P(sum)" if p == Partial() else str(p) for p in output.placements]
    errors = {"output": largest([(output.full_tensor(), expected)]), "gradients": largest(gradients)}
    return errors | {"placements": placements, "dtypes": [output.dtype, *(a.dtype for a, _ in gradients)]}


MESH = "DTensor on a mesh of several dimensions"


def tried(feature: str, function: Any, *args: Any) -> Any:
    """The result, or what is said by a torch that lacks the feature."""
    if _needs.lacks(feature) is None:
        return function(*args)
    try:
        function(*args)
    except Exception as error:  # torch.compile wraps ours in its own
        return str(error)
    return "nothing was said"


def run(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = pathlib.Path(folder, "store")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    found: dict[Any, Any] = {}
    with torch.inference_mode():  # first, before any rule is registered
        args = INPUTS[MULTI_SCALE]()
        shards = [placed(t, mesh, (0,)) if i in FLOATING[MULTI_SCALE] else t for i, t in enumerate(args)]
        output = mx_driving.multi_scale_deformable_attn(*shards).full_tensor()
        found["inference"] = largest([(output, mx_driving.multi_scale_deformable_attn(*args))])
    for operator in cases.EVERY:
        for axis, layout in SHARDED[operator].items():
            found[operator, axis] = measure(operator, INPUTS[operator](), mesh, [layout])
            if layout[-1] is not None:
                found[operator, axis, "uneven"] = measure(operator, UNEVEN[operator](), mesh, [layout])
        batch, wanted = SHARDED[operator]["bs"], (cases.WEIGHTS[operator],)
        found[operator, "weights only"] = measure(operator, INPUTS[operator](), mesh, [batch], wanted)
        blocks, queries = (SHARDED[operator][k] for k in (OPERATORS[operator].blocks, OPERATORS[operator].queries))
        for sides in ((WORLD, 1), (1, WORLD)):
            grid = init_device_mesh("cpu", sides)
            for name, layouts in {"batch x blocks": [batch, blocks], "blocks x queries": [blocks, queries]}.items():
                found[operator, name, sides] = tried(MESH, measure, operator, INPUTS[operator](), grid, layouts)
    for operator in KINDS:
        found[operator, "compiled"] = tried("DTensor under torch.compile", compiled, operator, mesh)
    for axis in OPERATORS["bev_pool_v3"].sharded:
        found["bev_pool_v3", axis] = lifted(axis, mesh)
        found["bev_pool_v3", axis, "autocast"] = lifted(axis, mesh, autocast=True)
    for kind in ("DistributedDataParallel", "FullyShardedDataParallel", "fully_shard"):
        if kind != "fully_shard" or not _needs.lacks("fully_shard on a CPU"):
            found[kind], found[kind, "patched"] = trained(kind, mesh, rank), patched(kind, mesh, rank)
    if not _needs.lacks("fully_shard on a CPU"):
        kinds = mx_driving.nn.TemporalSelfAttention, mx_driving.nn.DeformableFeatureAggregation
        found["initialised"] = [initialised(kind, mesh) for kind in kinds]
    if rank == 0:
        torch.save(found, pathlib.Path(folder, "found.pt"))
    # Gloo's threads let go of tensors meanwhile. torch 2.6 waits for them in the next line and keeps the lock they need.
    dist.barrier()
    dist.destroy_process_group()
