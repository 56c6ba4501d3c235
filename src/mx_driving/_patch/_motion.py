"""UniAD's MotionDeformableAttention: each query follows its trajectory, and samples around every step of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ._attention import (
    ATTENTION_FORMS,
    Arguments,
    Attention,
    Inputs,
    are_whole,
    by_role,
    heads_in,
    is_mask,
    levels_and_points,
    project_rows,
    read_tables,
    refusal,
    sample_with_logits,
)
from ._forms import levels
from ._parameters import Parameters


@dataclass(frozen=True)
class Motion(Attention):
    """Queries are [bs, agents, modes, channels], values [keys, bs, channels], trajectories [bs, agents, modes, T, levels, 2] in
    metres from their agent. A step of a query is a query of the operator."""

    sample: Any = None
    needs: frozenset[str] = frozenset(("query", "memory", "trajectories", "boxes"))

    def attend(self, module: Any, arguments: Arguments) -> Tensor:
        """Return what the module's forward returns."""
        query: Any = arguments.get("query")
        position, identity = (arguments.get(role) for role in ("position", "identity"))
        queries = (query if position is None else query + position).flatten(1, 2)
        memory, steps = arguments["memory"].transpose(0, 1), module.num_steps
        inputs = Inputs(queries, memory, arguments.get("mask"), self._reference(module, arguments), arguments)
        value = project_rows(module, inputs)
        sides = heads_in(module), steps, *levels_and_points(module)
        offsets = module.sampling_offsets(queries).unflatten(-1, (*sides, 2)).transpose(2, 3).flatten(1, 2)
        logits = module.attention_weights(queries).unflatten(-1, (*sides[:2], -1)).transpose(2, 3).flatten(1, 2)
        tables = read_tables(arguments, value.shape[1], value.device)
        out = sample_with_logits(value, tables, inputs.reference, offsets, logits)
        out = module.output_proj(out.unflatten(1, (-1, steps)).flatten(2)).view(query.shape)
        return module.dropout(out) + (query if identity is None else identity)

    def _reference(self, module: Any, arguments: Arguments) -> Tensor:
        """Return the reference of each step on each level, as shares of the view from above."""
        chosen = arguments["trajectories"][:, :, :, [module.sample_index]].detach().clone()
        metres = module.agent_coords_to_ego_coords(chosen, arguments["boxes"]).detach()
        low, high = (metres.new_tensor(module.bev_range[k : k + 2]) for k in (0, 3))
        return ((metres - low) / (high - low)).flatten(1, 2).expand(-1, -1, module.num_steps, -1, -1).flatten(1, 2)

    def can_attend(self, module: Any, arguments: Arguments) -> bool:
        """Return whether the form was tried on such arguments."""
        usual = isinstance(arguments["memory"], Tensor) and is_mask(arguments.get("mask")) and are_whole(arguments)
        return usual and self.has_options(module)

    def examples(self, module: Any, sizes: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        """Return arguments for the trial, by role: all of them, and what is needed."""
        generator, width = torch.Generator().manual_seed(0), module.sampling_offsets.in_features

        def random(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=generator, dtype=torch.float64) - 0.5

        shapes, starts = levels(sizes, torch.device("cpu"))
        keys = int(shapes.prod(-1).sum())
        boxes = [(SimpleNamespace(gravity_center=20 * random(2, 3)),) + 4 * (None,) for _ in range(2)]
        needed = {
            **{"query": random(2, 2, 3, width), "memory": random(keys, 2, width), "shapes": shapes, "starts": starts},
            **{"trajectories": 20 * random(2, 2, 3, 2, len(sizes), 2), "boxes": boxes},
        }
        optional = {"identity": random(2, 2, 3, width), "position": random(2, 2, 3, width), "mask": random(2, keys) < -0.2}
        return [{**needed, **optional}, {**dict.fromkeys(optional), **needed}]


def forms_of_module(parameters: Parameters) -> tuple[list[Attention], str]:
    """Return the forms that a forward of these parameters may have, or none and the reason."""
    roles = set(by_role(dict.fromkeys(parameters.all)))
    forms = [form for form in (*ATTENTION_FORMS, Motion()) if form.needs <= roles]
    if not forms:
        return [], f"no known form of an attention module has the parameters {parameters}"
    reason = refusal(parameters)
    return ([] if reason else forms), reason
