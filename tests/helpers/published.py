"""The published modules once more, in plain torch, from their papers' equations: truth for test_nn.py. attention_modules.py has
the attentions as libraries write them.

Each takes a module's state_dict and the inputs of its forward. Nothing of mx_driving is used.
"""

import math

import attention_modules
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call


def _linear(state: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ state[name + ".weight"].T + state[name + ".bias"]


def _maps(rows: Tensor, shapes: Tensor, starts: Tensor) -> list[Tensor]:
    """The rows [n, c] as maps [c, H, W]."""
    levels = zip(shapes.view(-1, 2).tolist(), starts.flatten().tolist(), strict=True)
    return [rows[s : s + h * w].T.reshape(-1, h, w) for (h, w), s in levels]


def _sample(plane: Tensor, points: Tensor) -> Tensor:
    """plane [c, H, W] at points [n, 2] in 0..1 -> [n, c]"""
    found = F.grid_sample(plane[None], points[None, None] * 2 - 1, padding_mode="zeros", align_corners=False)
    return found[0, :, 0].T


def multi_scale(state, sizes, query, reference, value, shapes, starts, padding=None) -> Tensor:
    """Deformable-DETR, equation 3, its appendix for boxes; sizes = (heads, levels, points)."""
    heads, levels, points = sizes
    module = attention_modules.Paper(query.shape[-1], levels, heads, points)
    return functional_call(module, state, (query, reference, value, shapes, starts, padding))


def temporal(state, sizes, query, reference, value, shapes, starts, pos=None) -> Tensor:
    """BEVFormer, equation 5, scene by scene: {previous map, current map}, each read with offsets and weights of its own."""
    heads, levels, points = sizes
    module, scenes = attention_modules.Temporal(query.shape[-1], heads, levels, points).eval(), []
    for b in range(len(query)):
        position, maps = None if pos is None else pos[b : b + 1], None if value is None else value[b]
        inputs = {"value": maps, "query_pos": position, "reference_points": reference[b], "spatial_shapes": shapes}
        scenes.append(functional_call(module, state, (query[b : b + 1],), inputs))
    return torch.cat(scenes)


def spatial(state, sizes, query, reference, value, shapes, starts, mask, pos=None) -> Tensor:
    """BEVFormer, equation 3, scene by scene. A camera's queries are padded to the camera with most, as published."""
    heads, levels, points = sizes
    module, heights = attention_modules.Pillars(query.shape[-1], heads, levels, points), reference.shape[3]
    inner = {name.partition(".")[2]: t for name, t in state.items() if name.startswith("deformable_attention.")}
    outputs = []
    for b, cells in enumerate(query):
        asked = cells if pos is None else cells + pos[b]
        visible = [[q for q in range(len(cells)) if bool(camera[q].sum() > 0)] for camera in mask[b]]
        longest = max(map(len, visible))
        slots = torch.zeros_like(cells)
        for c, chosen in enumerate(visible):
            padded = torch.cat([asked[chosen], asked.new_zeros(longest - len(chosen), asked.shape[1])])
            pillars = torch.cat([reference[b, c][chosen], reference.new_zeros(longest - len(chosen), heights, 2)])
            inputs = {"value": value[b, c, None], "reference_points": pillars[None], "spatial_shapes": shapes}
            found = functional_call(module, inner, (padded[None],), inputs)[0, : len(chosen)]
            slots = slots + torch.zeros_like(cells).index_put((torch.tensor(chosen, dtype=torch.long),), found)
        count = (mask[b].sum(-1) > 0).sum(0).clamp(min=1)
        outputs.append(_linear(state, "output_proj", slots / count[:, None]) + cells)
    return torch.stack(outputs)


def geometric(state, sizes, query, reference, value, shapes, starts, padding=None) -> Tensor:
    """MapTR's kernel: rounded projections plus a window, clamped to the map; sizes = (heads, levels, kernel size, dilation)."""
    heads, levels, (tall, wide), dilation = sizes
    bs, queries, _ = query.shape
    rows = _linear(state, "value_proj", value)
    if padding is not None:
        rows = torch.where(padding[..., None], torch.zeros_like(rows), rows)
    window = [((i - wide // 2) * dilation, (j - tall // 2) * dilation) for i in range(wide) for j in range(tall)]
    logits = _linear(state, "attention_weights", query).view(bs, queries, heads, -1)
    weights = torch.exp(logits - logits.logsumexp(-1, keepdim=True)).view(bs, queries, heads, levels, len(window))
    batches = []
    for b in range(bs):
        by_head = []
        for h, rows_of_head in enumerate(rows[b].chunk(heads, -1)):
            total = 0
            for l, plane in enumerate(_maps(rows_of_head, shapes, starts)):
                height, width = plane.shape[1:]
                for k, (dx, dy) in enumerate(window):
                    x = (reference[b, :, h, 0] * width + dx).round().long().clamp(0, width - 1)
                    y = (reference[b, :, h, 1] * height + dy).round().long().clamp(0, height - 1)
                    total = total + weights[b, :, h, l, k, None] * plane[:, y, x].T
            by_head.append(total)
        batches.append(torch.cat(by_head, -1))
    return torch.stack(batches)


def aggregation(state, sizes, feature, anchor, embed, maps, shapes, starts, projection, image_wh=None, mode="cat") -> Tensor:
    """Sparse4D v3's blocks; sizes = (groups, levels)."""
    groups, levels = sizes
    bs, anchors, channels = feature.shape
    cams = projection.shape[1]
    scales = state["kps_generator.fix_scale"]
    learned = 0
    if "kps_generator.learnable_fc.weight" in state:
        moved = torch.sigmoid(_linear(state, "kps_generator.learnable_fc", feature)) - 0.5
        learned = moved.shape[-1] // 3
    points = len(scales) + learned
    batches = []
    for b in range(bs):
        per_anchor = []
        for a in range(anchors):
            x, y, z, log_w, log_l, log_h, sin, cos = anchor[b, a, :8]
            size = torch.stack([log_w, log_l, log_h]).exp()
            turn = torch.tensor([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]], dtype=feature.dtype)
            local = [*scales, *(moved[b, a].view(-1, 3) if learned else [])]
            places = [turn @ (s * size) + torch.stack([x, y, z]) for s in local]
            logits = _aggregation_logits(state, feature[b, a] + embed[b, a], projection[b])
            shares = logits.view(-1, groups).softmax(0).view(cams, levels, points, groups)
            total = torch.zeros(channels, dtype=feature.dtype)
            for c in range(cams):
                planes = _maps(maps[b], shapes[c], starts[c])
                for p, place in enumerate(places):
                    u, v, depth, _ = projection[b, c] @ torch.cat([place, torch.ones(1, dtype=place.dtype)])
                    seen = torch.stack([u, v]) / max(float(depth), 1e-5)
                    seen = seen if image_wh is None else seen / image_wh[b, c]
                    if not all(0 < float(s) < 1 for s in seen):
                        continue
                    for l, plane in enumerate(planes):
                        share = shares[c, l, p].repeat_interleave(channels // groups)
                        total = total + share * _sample(plane, seen[None])[0]
            per_anchor.append(total)
        batches.append(torch.stack(per_anchor))
    output = _linear(state, "output_proj", torch.stack(batches))
    return torch.cat([output, feature], -1) if mode == "cat" else output + feature


def _aggregation_logits(state: dict[str, Tensor], feature: Tensor, projection: Tensor) -> Tensor:
    if "camera_encoder.0.weight" not in state:
        return _linear(state, "weights_fc", feature)
    x = projection[:, :3].reshape(len(projection), 12)
    for linear, norm in ((0, 2), (3, 5)):
        x = _linear(state, f"camera_encoder.{linear}", x).clamp(min=0)
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
        x = (x - mean) / torch.sqrt(variance + 1e-5)
        x = x * state[f"camera_encoder.{norm}.weight"] + state[f"camera_encoder.{norm}.bias"]
    return _linear(state, "weights_fc", feature + x)


def grid_bias(heads: int, levels: int, points: int) -> Tensor:
    """Deformable-DETR's first offsets: head h looks along angle 2 pi h / heads, scaled to the unit square, 1..points pixels."""
    bias = []
    for h in range(heads):
        x, y = math.cos(2 * math.pi * h / heads), math.sin(2 * math.pi * h / heads)
        far = max(abs(x), abs(y))
        for _ in range(levels):
            for p in range(points):
                bias += [x / far * (p + 1), y / far * (p + 1)]
    return torch.tensor(bias)
