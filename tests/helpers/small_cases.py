"""Small inputs of each operator: a dictionary for each use."""

from typing import Any

import cases
import logits_cases
import torch
from cases import AGGREGATION, AGGREGATION_LOGITS, GEOMETRIC, GEOMETRIC_LOGITS, MULTI_SCALE, MULTI_SCALE_LOGITS, POOL

import mx_driving
from mx_driving._operator.description import OPERATORS

# Legal inputs. Tests of refusals change one of them.
GOOD = {
    MULTI_SCALE: lambda: cases.cast(cases.multi_scale(2, 3, 4, 2, [(3, 4), (2, 2)], 2), torch.float32),
    AGGREGATION: lambda: cases.cast(cases.aggregation(2, 3, 2, 4, 2, [[(3, 4)], [(2, 2)]]), torch.float32),
    GEOMETRIC: lambda: cases.cast(cases.geometric(2, 3, 4, 2, [(3, 4), (2, 2)], 2), torch.float32),
    MULTI_SCALE_LOGITS: lambda: cases.cast(logits_cases.multi_scale(2, 3, 4, 2, [(3, 4), (2, 2)], 2), torch.float32),
    AGGREGATION_LOGITS: lambda: cases.cast(logits_cases.aggregation(2, 3, 2, 4, 2, [[(3, 4)], [(2, 2)]]), torch.float32),
    GEOMETRIC_LOGITS: lambda: cases.cast(logits_cases.geometric(2, 3, 4, 2, [(3, 4), (2, 2)], (1, 2)), torch.float32),
}

# Inputs by (batch, queries), for graphs that must serve all sizes.
GROWING = {
    MULTI_SCALE: lambda bs, queries: cases.multi_scale(bs, queries, 4, 2, [(3, 4), (2, 2)], 2),
    AGGREGATION: lambda bs, queries: cases.aggregation(bs, queries, 3, 4, 2, [[(3, 4)], [(2, 2)]]),
    GEOMETRIC: lambda bs, queries: cases.geometric(bs, queries, 4, 2, [(3, 4), (2, 2)], 2),
    MULTI_SCALE_LOGITS: lambda bs, queries: logits_cases.multi_scale(bs, queries, 4, 2, [(3, 4), (2, 2)], 4, 2, "point"),
    AGGREGATION_LOGITS: lambda bs, queries: logits_cases.aggregation(bs, queries, 3, 4, 2, [[(3, 4)], [(2, 2)]]),
    GEOMETRIC_LOGITS: lambda bs, queries: logits_cases.geometric(bs, queries, 4, 2, [(3, 4), (2, 2)], (1, 4)),
}

# Inputs of which the executed PTX takes less than a second.
TINY = GOOD | {
    MULTI_SCALE: lambda: cases.multi_scale(2, 4, 8, 2, [(3, 4), (2, 2)], 2, margin=0.5),
    AGGREGATION: lambda: cases.aggregation(2, 2, 2, 8, 2, [[(3, 4), (2, 2)], [(4, 2), (1, 1)]]),
    GEOMETRIC: lambda: cases.geometric(2, 4, 8, 2, [(3, 4), (2, 2)], 2),
    # These calls are composed of the calls above, so that no other kernel is compiled.
    MULTI_SCALE_LOGITS: lambda: logits_cases.multi_scale(2, 4, 8, 2, [(3, 4), (2, 2)], 2),
    AGGREGATION_LOGITS: lambda: logits_cases.aggregation(2, 2, 2, 8, 2, [[(3, 4), (2, 2)], [(4, 2), (1, 1)]]),
    GEOMETRIC_LOGITS: lambda: logits_cases.geometric(2, 4, 8, 2, [(3, 4), (2, 2)], (1, 2)),
    POOL: lambda: cases.pooling(90, 8),
}


TWO_PIXELS = {
    MULTI_SCALE: lambda: cases.multi_scale(1, 9, 8, 2, [(1, 2)], 5),
    AGGREGATION: lambda: cases.aggregation(1, 9, 5, 8, 2, [[(1, 2)]]),
    GEOMETRIC: lambda: cases.geometric(1, 9, 8, 2, [(1, 2)], 5),
}

# In float64, which finite differences need.
SMALL = {
    MULTI_SCALE: lambda: cases.multi_scale(2, 2, 3, 2, [(3, 4), (2, 1)], 2),
    AGGREGATION: lambda: cases.aggregation(2, 2, 2, 4, 2, [[(3, 4), (1, 1)], [(2, 2), (1, 3)]]),
    GEOMETRIC: lambda: cases.geometric(2, 2, 3, 2, [(3, 4), (2, 1)], 2),
    MULTI_SCALE_LOGITS: lambda: logits_cases.multi_scale(2, 2, 3, 2, [(3, 4), (2, 1)], 2),
    AGGREGATION_LOGITS: lambda: logits_cases.aggregation(2, 2, 3, 4, 2, [[(3, 4), (1, 1)], [(2, 2), (1, 3)]]),
    GEOMETRIC_LOGITS: lambda: logits_cases.geometric(2, 2, 3, 2, [(3, 4), (2, 1)], (1, 2)),
    POOL: lambda: cases.pooling(30, 3, (1, 2, 2, 3)),
}


class One(torch.nn.Module):
    """A module of one operator, for exporters. Its arguments other than tensors are fixed."""

    def __init__(self, operator: str, args: tuple[Any, ...]) -> None:
        super().__init__()
        self.operator, self.rest = operator, [a for a in args if not isinstance(a, torch.Tensor)]

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return getattr(mx_driving, self.operator)(*tensors, *self.rest)


def inputs_of(operator, wanted=None):
    wanted = cases.DIFFERENTIABLE[operator] if wanted is None else wanted
    return tuple(a.requires_grad_(i in wanted) if cases.is_floating(a) else a for i, a in enumerate(SMALL[operator]()))


def loss_of(function):
    return lambda *chosen: function(*chosen).square().sum()


def chosen(args, in_dims, k):
    return tuple(a if d is None else a.select(d, k) for a, d in zip(args, in_dims, strict=True))


def comparisons_of_int64(program):
    """Return the nodes of a decomposed program that compare int64 tensors."""
    table = torch.export.default_decompositions()
    for operator in OPERATORS:
        op = getattr(torch.ops.mx_driving, operator).default
        table[op] = torch._decomp.decomposition_table[op]
    graph = program.run_decompositions(table).graph
    assert not [node for node in graph.nodes if "mx_driving" in str(node.target)]
    compared = [node for node in graph.nodes if getattr(node.target, "overloadpacket", None) in COMPARISONS]
    return [str(node) for node in compared if any(t.meta["val"].dtype == torch.int64 for t in node.all_input_nodes)]


COMPARISONS = {getattr(torch.ops.aten, name) for name in ("ge", "gt", "le", "lt", "eq", "ne", "logical_not")}
