"""Sampling cores and attention modules in each form in which libraries write them, in few lines."""

import functools
import inspect
import itertools
import linecache
import re
import textwrap
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import mx_driving

SIZES = [(4, 5), (3, 2)]
KEYS = 26
POINTS = [2, 4]  # of each level, for modules whose levels have different numbers
WITH_LOGITS, BARE = "multi_scale_deformable_attn_with_logits", "multi_scale_deformable_attn"
# The names that libraries have for a parameter of a forward.
ROLES = {
    "query": ("query", "hidden_states"),
    "position": ("query_pos", "position_embeddings"),
    "identity": ("identity",),
    "value": ("value", "encoder_hidden_states", "input_flatten"),
    "reference": ("reference_points", "refer_bbox"),
    "mask": ("key_padding_mask", "attention_mask", "input_padding_mask", "value_mask"),
    "table": ("spatial_shapes", "input_spatial_shapes"),
    "sizes": ("value_spatial_shapes", "value_shapes", "spatial_shapes_list", "input_spatial_shapes_hw", "src_shapes"),
    "starts": ("level_start_index", "input_level_start_index"),
}
ROLE = {name: role for role, names in ROLES.items() for name in names}


def plain_core(value, value_spatial_shapes, sampling_locations, attention_weights):
    """The core of most libraries: grid_sample per level."""
    bs, _, heads, channels = value.shape
    queries = sampling_locations.shape[1]
    parts = value.split([h * w for h, w in value_spatial_shapes], 1)
    total = 0
    for l, (h, w) in enumerate(value_spatial_shapes):
        plane = parts[l].permute(0, 2, 3, 1).reshape(bs * heads, channels, h, w)
        grid = 2 * sampling_locations[:, :, :, l].transpose(1, 2).flatten(0, 1) - 1
        weight = attention_weights[:, :, :, l].transpose(1, 2).flatten(0, 1)[:, None]
        total = total + (F.grid_sample(plane, grid, align_corners=False) * weight).sum(-1)
    return total.view(bs, heads * channels, queries).transpose(1, 2)


def merged_core(value, value_spatial_shapes, sampling_locations, attention_weights):
    """ultralytics 8.4: levels and points share an axis."""
    sides = len(value_spatial_shapes), -1
    locations, weights = sampling_locations.unflatten(3, sides), attention_weights.unflatten(3, sides)
    return plain_core(value, value_spatial_shapes, locations, weights)


def keys_last_core(value, value_spatial_shapes, sampling_locations, attention_weights, value_spatial_shapes_hw=None):
    """RF-DETR 1.11: value [bs, heads, channels, keys]; levels and points share an axis or do not."""
    shapes = value_spatial_shapes if value_spatial_shapes_hw is None else value_spatial_shapes_hw
    locations = sampling_locations if sampling_locations.dim() == 5 else sampling_locations.flatten(3, 4)
    return merged_core(value.permute(0, 3, 1, 2), shapes, locations, attention_weights.flatten(3))


def by_level_core(value, value_spatial_shapes, sampling_locations, attention_weights, num_points_list, method="default"):
    """D-FINE: a value for each level, [bs, heads, channels, keys]; levels with different numbers of points."""
    bs, heads, channels, _ = value[0].shape
    queries = sampling_locations.shape[1]
    total = 0
    parts = zip(value, value_spatial_shapes, sampling_locations.split(num_points_list, 3), strict=True)
    for (plane, (h, w), at), weight in zip(parts, attention_weights.split(num_points_list, 3), strict=True):
        plane = plane.reshape(bs * heads, channels, h, w)
        at = at.permute(0, 2, 1, 3, 4).flatten(0, 1)
        if method != "default":
            most = h - 1 if method == "discrete" else h + w  # x is clamped by the height: the libraries' own mistake
            x, y = (at * torch.tensor([w, h]) + 0.5).long().clamp(0, most).unbind(-1)
            places = (y.clamp(max=h - 1) * w + x.clamp(max=w - 1)).flatten(1, 2)
            read = plane.flatten(2).gather(2, places[:, None].expand(-1, channels, -1)).unflatten(2, at.shape[1:3])
        else:
            read = F.grid_sample(plane, 2 * at - 1, align_corners=False)
        total = total + (read * weight.permute(0, 2, 1, 3).flatten(0, 1)[:, None]).sum(-1)
    return total.view(bs, heads * channels, queries).transpose(1, 2)


_NUMBERS = itertools.count()


def make_functions(source: str, space: dict[str, Any], name: str = "a_library") -> None:
    """Run a text as a file would be run: `patch` reads the source of its functions."""
    file = f"<{name} {next(_NUMBERS)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    exec(compile(source, file, "exec", dont_inherit=True), space)


def make_forward(parameters: str, **expressions: str) -> Any:
    """Return a forward that calls `attend` with its parameters by role. Expressions replace some of them."""
    words = re.findall(r"\w+", re.sub(r"=\w+", "", parameters))
    arguments = {ROLE[word]: word for word in words if word in ROLE and ROLE[word] != "starts"} | expressions
    call = ", ".join(f"{role}={expression}" for role, expression in arguments.items())
    space: dict[str, Any] = {"__name__": __name__}
    layers = "self.sampling_offsets, self.attention_weights"
    make_functions(f"def forward(self, {parameters}):\n    {layers}\n    return self.attend({call})\n", space, "forward")
    return space["forward"]


def define(name: str, base: type, takes: str, form: str, **more: Any) -> Any:
    """Return a class of a form, with expressions for roles, and attributes."""
    gives = {name: more.pop(name) for name in set(ROLES) & set(more)}
    return type(name, (base,), {"takes": takes, "gives": gives, "form": form, **more})


class Layers(nn.Module):
    """The linear layers of these modules, and how a module samples with their outputs.

    Each derived class has a forward of its own, with the parameters `takes`, because `patch` replaces only such classes.
    `gives` has expressions for roles. `form` is the name of the class's form.
    """

    form, takes, gives = "", "", {}
    names = ("num_heads", "num_levels", "num_points")
    reads, queue = 1, 1  # widths of a linear layer's input; maps in which a query samples
    keeps = returns_weights = False  # whether the mask is True for keys that count; whether forward returns its weights

    def __init_subclass__(cls):
        is_from_fully_shard = len(cls.__bases__) > 1
        if cls.takes and "forward" not in vars(cls) and not is_from_fully_shard:
            cls.forward = make_forward(cls.takes, **cls.gives)

    def __init__(self, embed_dims=12, num_heads=3, num_levels=2, num_points=4, batch_first=True):
        super().__init__()
        for name, side in zip(self.names, (num_heads, num_levels, num_points), strict=True):
            setattr(self, name, side)
        self.batch_first, self.dropout = batch_first, None
        samples = self.queue * num_heads * (sum(num_points) if isinstance(num_points, list) else num_levels * num_points)
        self.sampling_offsets = nn.Linear(embed_dims * self.reads, samples * 2)
        self.attention_weights = nn.Linear(embed_dims * self.reads, samples)
        self.value_proj, self.output_proj = nn.Linear(embed_dims, embed_dims), nn.Linear(embed_dims, embed_dims)

    def sides(self):
        return self.num_heads, self.num_levels, self.num_points

    def attend(self, query, reference, value=None, position=None, mask=None, table=None, sizes=None, identity=None):
        identity, value = query if identity is None else identity, query if value is None else value
        query = query if position is None else query + position
        if not self.batch_first:
            query, value = query.transpose(0, 1), value.transpose(0, 1)
        table = sizes if table is None else table
        samples = self.samples(reference, table, self.sampling_offsets(query), self.attention_weights(query))
        out = self.core(self.rows(value, mask), table if sizes is None else sizes, *samples)
        out = out if self.output_proj is None else self.output_proj(out)
        out = out if self.batch_first else out.transpose(0, 1)
        out = out if self.dropout is None else self.dropout(out) + identity
        return (out, samples[1]) if self.returns_weights else out

    def core(self, value, shapes, locations, weights):
        return plain_core(value, shapes, locations, weights)

    def rows(self, value, mask=None):
        value = self.value_proj(value)
        value = value if mask is None else value.masked_fill((mask != self.keeps)[..., None], 0.0)
        return value.unflatten(-1, (self.sides()[0], -1))

    def samples(self, reference, shapes, offsets, logits):
        """Locations and weights, [..., heads, levels, points]."""
        return sample(self.sides(), reference, shapes, offsets, logits)


def sample(sides, reference, shapes, offsets, logits):
    heads, levels, points = sides
    offsets, weights = offsets.unflatten(-1, (heads, levels, points, 2)), logits.unflatten(-1, (heads, -1)).softmax(-1)
    return locations_of(reference, offsets, torch.as_tensor(shapes)), weights.unflatten(-1, (levels, points))


def locations_of(reference, offsets, shapes):
    reference = reference[:, :, None, :, None]
    if reference.shape[-1] == 2:
        return reference + offsets / shapes.flip(-1)[:, None]
    return reference[..., :2] + offsets / offsets.shape[-2] * reference[..., 2:] * 0.5


class OfPaper(Layers):
    names = ("n_heads", "n_levels", "n_points")

    def __init__(self, d_model=256, n_levels=4, n_heads=8, n_points=4):
        super().__init__(d_model, n_heads, n_levels, n_points)

    def sides(self):
        return self.n_heads, self.n_levels, self.n_points


class OfConfiguration(OfPaper):
    def __init__(self, config, num_heads, n_points):
        super().__init__(config.d_model, config.num_feature_levels, num_heads, n_points)


HUGGING_FACE = (
    "hidden_states, attention_mask=None, encoder_hidden_states=None, encoder_attention_mask=None, position_embeddings=None, "
    "reference_points=None, spatial_shapes=None, spatial_shapes_list=None, level_start_index=None"
)
MMCV = "query, key=None, value=None, identity=None, query_pos=None, key_padding_mask=None, reference_points=None, "
MMCV += "spatial_shapes=None, level_start_index=None, "
PAPER = "query, reference_points, input_flatten, input_spatial_shapes"
PAPERS = PAPER + ", input_level_start_index, input_padding_mask=None"
LIBRE = "hidden_states, encoder_hidden_states, attention_mask, reference_points, spatial_shapes, spatial_shapes_list, "
LIBRE += "position_embeddings=None"
BIRDER = PAPER + ", input_level_start_index, src_shapes, input_padding_mask=None"
ULTRALYTICS = "query, refer_bbox, value, value_shapes, value_mask=None"
D_FINE = "query, reference_points, value, value_spatial_shapes"
RT_DETR = D_FINE + ", value_mask=None"


# transformers: masks are True for keys that count, or for padding.
HuggingFace = define("HuggingFace", OfConfiguration, HUGGING_FACE, "transformers", keeps=True, returns_weights=True)
Mask2Former = define("Mask2Former", OfConfiguration, HUGGING_FACE, "mask2former", returns_weights=True)
Libre = define("Libre", OfConfiguration, LIBRE, "rt_detr", keeps=True)
GroundingDino = define("GroundingDino", Layers, MMCV.replace("identity=None, ", "") + "**kwargs", "deformable_detr")
Paper = define("Paper", OfPaper, PAPERS, "deformable_detr")
LwDetr = define("LwDetr", OfPaper, PAPER, "deformable_detr")
Birder = define("Birder", OfPaper, BIRDER, "deformable_detr")


class Dropping(Layers):
    """With dropout, and batches second unless told otherwise."""

    def __init__(self, embed_dims=12, num_heads=3, num_levels=2, num_points=4, dropout=0.1, batch_first=False):
        super().__init__(embed_dims, num_heads, num_levels, num_points, batch_first)
        self.dropout = nn.Dropout(dropout)


Mmcv = define("Mmcv", Dropping, MMCV + "**kwargs", "mmcv")


class Pillars(Layers):
    """BEVFormer's MSDeformableAttention3D: point p belongs to reference p mod Z of a pillar."""

    form, takes = "bevformer_spatial", MMCV + "**kwargs"

    def __init__(self, embed_dims=12, num_heads=3, num_levels=2, num_points=8, batch_first=True):
        super().__init__(embed_dims, num_heads, num_levels, num_points, batch_first)
        self.output_proj = None

    def samples(self, reference, shapes, offsets, logits):
        steps, weights = sample(self.sides(), torch.zeros(1, 1, 1, 2), shapes, offsets, logits)
        steps = steps.unflatten(4, (-1, reference.shape[2]))
        return (reference[:, :, None, None, None] + steps).flatten(4, 5), weights


class Temporal(Dropping):
    """BEVFormer's TemporalSelfAttention: the mean of the samples in two maps."""

    form, takes = "bevformer_temporal", MMCV + "flag='decoder', **kwargs"
    reads = queue = num_bev_queue = 2

    def __init__(self, embed_dims=12, num_heads=3, num_levels=2, num_points=4, dropout=0.1, batch_first=True):
        super().__init__(embed_dims, num_heads, num_levels, num_points, dropout, batch_first)

    def attend(self, query, reference, value=None, position=None, mask=None, table=None, identity=None):
        identity = query if identity is None else identity
        if value is None:
            value = torch.stack([query, query], 1).flatten(0, 1)
        query = query if position is None else query + position
        both = torch.cat([value[: len(query)], query], -1)
        layers = self.sampling_offsets(both), self.attention_weights(both)
        by_map = (t.unflatten(-1, (self.sides()[0], 2, -1)).movedim(3, 1).flatten(0, 1).flatten(2) for t in layers)
        samples = self.samples(reference, table, *by_map)
        out = plain_core(self.rows(value, mask), table, *samples).unflatten(0, (-1, 2)).mean(1)
        return self.dropout(self.output_proj(out)) + identity


class RfDetr(OfPaper):
    form, takes, _export = "deformable_detr", PAPERS + ", input_spatial_shapes_hw=None", False

    def core(self, value, shapes, locations, weights):
        locations = locations.flatten(3, 4) if self._export else locations  # at most five axes
        return keys_last_core(value.permute(0, 2, 3, 1).contiguous(), shapes, locations, weights.flatten(3))


class Ultralytics(OfPaper):
    form, takes = "deformable_detr", ULTRALYTICS

    def core(self, value, shapes, locations, weights):
        return merged_core(value, shapes, locations.flatten(3, 4), weights.flatten(3, 4))


class RtDetr(Layers):
    """OTX's module: value_mask is True for hidden keys."""

    form, takes = "deformable_detr", RT_DETR

    def samples(self, reference, shapes, offsets, logits):
        if reference.shape[-1] == 6:  # a centre, and distances to four sides
            reference = torch.cat([reference[..., :2], reference[..., 2::2] + reference[..., 3::2]], -1)
        return sample(self.sides(), reference, shapes, offsets, logits)


class Multiplies(RtDetr):
    """RT-DETR's module: value is multiplied by the mask."""

    form = "rt_detr"

    def rows(self, value, mask=None):
        value = self.value_proj(value).unflatten(-1, (self.num_heads, -1))
        return value if mask is None else value * mask.to(value.dtype)[..., None, None]


class RtDetrV2(Multiplies):
    """RT-DETR v2's module, from which D-FINE's derives: each level has its own number of points."""

    form = "rt_detr_v2"

    def __init__(self, embed_dim=12, num_heads=3, num_levels=2, num_points=4, method="default", offset_scale=0.5):
        super().__init__(embed_dim, num_heads, num_levels, num_points)
        self.num_points_list = num_points if isinstance(num_points, list) else [num_points] * num_levels
        self.method, self.offset_scale = method, offset_scale
        del self.num_points  # DEIM and others keep the list alone

    def samples(self, reference, shapes, offsets, logits):
        sides = *reference.shape[:2], self.num_heads, sum(self.num_points_list)
        scales = torch.tensor([1 / n for n in self.num_points_list for _ in range(n)], dtype=offsets.dtype)[:, None]
        steps = offsets.reshape(*sides, 2) * scales * reference[:, :, None, :, 2:] * self.offset_scale
        return reference[:, :, None, :, :2] + steps, logits.reshape(sides).softmax(-1)

    def core(self, value, shapes, locations, weights):
        value = by_heads(value.flatten(2), self.num_heads, shapes)
        return by_level_core(value, shapes, locations, weights, self.num_points_list, self.method)


class ConfiguredV2(RtDetrV2):
    """transformers' RT-DETR v2."""

    form, takes, returns_weights = "rt_detr_v2_transformers", HUGGING_FACE, True

    def __init__(self, config):
        super().__init__(config.d_model, config.decoder_attention_heads, config.num_feature_levels, config.decoder_n_points)


class ConfiguredDFine(ConfiguredV2):
    """transformers' D-FINE, whose mask is True for hidden keys."""

    form, gives = "d_fine_transformers", {"mask": "None if attention_mask is None else ~attention_mask"}


class BirderV2(RtDetrV2):
    """birder's RT-DETR v2: points by level alone, and a mask that is True for hidden keys."""

    form, takes, gives = "birder", BIRDER, {"mask": "None if input_padding_mask is None else ~input_padding_mask"}

    def __init__(self, d_model, n_levels, n_heads, n_points):
        super().__init__(d_model, n_heads, n_levels, list(n_points))


class DFine(RtDetrV2):
    """Values of each level are given by heads, [bs, heads, channels, keys]."""

    form, takes = "d_fine", D_FINE

    def __init__(self, embed_dim=12, num_heads=3, num_levels=2, num_points=4, method="default", offset_scale=0.5):
        super().__init__(embed_dim, num_heads, num_levels, num_points, method, offset_scale)
        del self.value_proj, self.output_proj
        self.output_proj = None

    def rows(self, value, mask=None):
        return value

    def core(self, value, shapes, locations, weights):
        return by_level_core(value, shapes, locations, weights, self.num_points_list, self.method)


class Gtr(DFine):
    """LibreYOLO's GTR: values of each level are pictures, [bs * heads, channels, H, W]."""

    form = "libreyolo"

    def rows(self, value, mask=None):
        return [level.flatten(2).unflatten(0, (-1, self.num_heads)) for level in value]


class Motion(Dropping):
    """UniAD's MotionDeformableAttention: samples around each step of a trajectory, which starts at a box."""

    form = "uniad"

    def __init__(self, embed_dims=12, num_heads=3, num_levels=1, num_points=4, num_steps=12, sample_index=-1):
        super().__init__(embed_dims, num_heads, num_levels, num_points, batch_first=True)
        self.num_steps, self.sample_index, self.bev_range = num_steps, sample_index, [-20.0, -10.0, -5.0, 20.0, 30.0, 3.0]
        samples = num_heads * num_steps * num_levels * num_points
        self.sampling_offsets, self.attention_weights = (nn.Linear(embed_dims, n * samples) for n in (2, 1))
        self.output_proj = nn.Sequential(nn.Linear(num_steps * embed_dims, embed_dims), nn.LayerNorm(embed_dims))

    def agent_coords_to_ego_coords(self, trajectories, boxes):
        pairs = zip(trajectories, boxes, strict=True)
        return torch.stack([t + box[0].gravity_center[:, None, None, None, :2] for t, box in pairs])

    def forward(
        self, query, key=None, value=None, identity=None, query_pos=None, key_padding_mask=None, spatial_shapes=None,
        level_start_index=None, bbox_results=None, reference_trajs=None, flag="decoder", **kwargs,
    ):  # fmt: skip
        batches, agents, modes, width = query.shape
        identity = query if identity is None else identity
        queries = (query if query_pos is None else query + query_pos).reshape(batches, agents * modes, width)
        heads, levels, points = self.sides()
        sides = batches, agents * modes, heads, self.num_steps, levels * points
        steps = self.sampling_offsets(queries).view(*sides[:4], levels, points, 2)
        weights = self.attention_weights(queries).view(sides).softmax(-1).view(*sides[:4], levels, points)
        places = reference_trajs[:, :, :, [self.sample_index]].detach()
        places = self.agent_coords_to_ego_coords(places, bbox_results).flatten(1, 2)
        low, high = torch.tensor(self.bev_range[:2]), torch.tensor(self.bev_range[3:5])
        places = ((places - low) / (high - low))[:, :, None, :, :, None]  # [bs, queries, 1, 1, levels, 1, 2]
        locations = (places + steps / spatial_shapes.flip(-1)[:, None]).transpose(2, 3).flatten(1, 2)
        value = self.rows(value.permute(1, 0, 2), key_padding_mask)
        out = plain_core(value, spatial_shapes, locations, weights.transpose(2, 3).flatten(1, 2))
        out = self.output_proj(out.reshape(batches, agents * modes, -1)).view(query.shape)
        return self.dropout(out) + identity


def by_heads(memory, heads=2, sizes=SIZES):
    """Views [bs, heads, channels, keys] of each level of memory [bs, keys, width], as D-FINE and DEIM make them."""
    return memory.unflatten(-1, (heads, -1)).permute(0, 2, 3, 1).split([h * w for h, w in sizes], -1)


def as_copies(memory):
    return [level.clone() for level in by_heads(memory)]


def as_images(memory):
    return tuple(level.flatten(0, 1).unflatten(-1, size) for level, size in zip(by_heads(memory), SIZES, strict=True))


# other sizes than those of patch's own trial
CONSTRUCTED = {
    **dict.fromkeys(("d_model", "embed_dim", "embed_dims"), 16),
    **dict.fromkeys(("n_heads", "num_heads"), 2),
    **dict.fromkeys(("n_levels", "num_levels"), 2),
    **dict.fromkeys(("n_points", "num_points"), 6),
    "config": types.SimpleNamespace(d_model=16, num_feature_levels=2, decoder_attention_heads=2, decoder_n_points=6),
}


def build(kind: type, **more: Any) -> Any:
    """A module in float64."""
    admit_cores()
    torch.manual_seed(0)
    module = kind(**{n: a for n, a in {**CONSTRUCTED, **more}.items() if n in inspect.signature(kind).parameters})
    for p in module.parameters():
        nn.init.normal_(p, std=0.4)
    return module.double().eval()


def arguments_for(module: Any, references=(2, 2), masked=True, layout: Any = lambda rows: rows) -> Any:
    """Arguments by the names of forward's parameters: `references` are the last sides of the reference points, `layout` is that
    of value."""
    generator = torch.Generator().manual_seed(1)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    batches = 2 * getattr(module, "queue", 1)
    mask = rand(batches, KEYS) < 0.4 if masked else None
    rows = [rand(batches, KEYS, 16), *(rand(2, KEYS, 16) for _ in range(3))]
    memory, query, position, identity = rows if getattr(module, "batch_first", True) else (t.transpose(0, 1) for t in rows)
    arguments = {
        **{"query": query, "position": position, "identity": identity, "value": layout(memory), "mask": mask},
        **{"reference": rand(batches, KEYS, *references), "table": torch.tensor(SIZES), "sizes": SIZES},
        "starts": torch.tensor([0, 20]),
    }
    return {name: arguments[ROLE[name]] for name in inspect.signature(module.forward).parameters if name in ROLE}


def core_arguments(points=(2, 4), layout=torch.clone, shapes=SIZES, dtype=torch.float64, sides=(2, 7, 2, 8), sizes=SIZES):
    """Arguments of a core by position. `sides` are batches, queries, heads and channels; `shapes` are given for `sizes`."""
    generator, (bs, queries, heads, channels) = torch.Generator().manual_seed(3), sides
    samples, keys = (bs, queries, heads, *points), sum(h * w for h, w in sizes)
    rand = [torch.rand(s, generator=generator, dtype=dtype) for s in ((bs, keys, heads, channels), (*samples, 2), samples)]
    return layout(rand[0]), shapes, *rand[1:]


def admit(*originals: Any, form: str = "core") -> None:
    """Make code known, as `make known` does: a trial of the form admits its key to the table, for this process."""
    from mx_driving._patch._code import Reader
    from mx_driving._patch._search import describe, is_core
    from mx_driving._patch._trial import make_entry, recognize
    from mx_driving._patch.known import read_table

    for original in originals:
        candidate = describe(original)
        assert candidate is not None
        if Reader(is_core).read(original).key in read_table():
            continue
        finding = recognize(candidate, Reader(is_core), form)
        assert finding.fit, finding
        assert finding.key, finding
        read_table().update([make_entry(finding, "tests")])


@functools.cache
def admit_cores() -> None:
    """Make the cores of this file known."""
    admit(plain_core, merged_core, keys_last_core, by_level_core)


def library(*members: Any, source: str = "", name: str = "a_library", known: str = "") -> types.ModuleType:
    """A Python module that has these classes and functions, and the definitions of a text.

    `known`: names of the text's cores that are known. The cores of this file are always known.
    """
    admit_cores()
    module = types.ModuleType(name)
    vars(module).update({"torch": torch} | {member.__name__: member for member in members})
    make_functions(textwrap.dedent(source), vars(module), name)
    admit(*(vars(module)[word] for word in known.split()))
    return module


def patched(*kinds: Any, **options: Any) -> Any:
    """`mx_driving.patched` of a library of these classes and `plain_core`, with the forms that the classes name."""
    forms = {kind: kind.form for kind in kinds if getattr(kind, "form", "")}
    return mx_driving.patched(library(*kinds, plain_core), **{"forms": forms, **options})


def close(results: Any, expected: Any) -> None:
    """Of float64."""
    torch.testing.assert_close(results, expected, rtol=1e-10, atol=1e-10)


class Operators(TorchDispatchMode):
    """Names of our operators in the order of their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "mx_driving":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def floating(nested: Any) -> list[Tensor]:
    return [t for t in tree_leaves(nested) if isinstance(t, Tensor) and t.is_floating_point()]


def direction_of(out: Tensor) -> Tensor:
    return torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)


def results(run: Any, *args: Any, **named: Any) -> list[Tensor]:
    """Outputs, and gradients of all inputs and parameters."""
    args, named = tree_map(lambda t: t.detach().requires_grad_() if floating(t) else t, (args, named))
    outputs = floating(run(*args, **named))
    parameters = [p for p in run.parameters() if p.requires_grad] if isinstance(run, nn.Module) else []
    leaves = floating((args, named)) + parameters
    gradients = torch.autograd.grad(outputs, leaves, list(map(direction_of, outputs)), allow_unused=True)
    return outputs + [g for g in gradients if g is not None]


def recorded(run: Any, *args: Any, **named: Any) -> list[str]:
    """The operators of a call."""
    with Operators() as seen:
        run(*args, **named)
    return seen.names


def operators(run: Any, *args: Any, **named: Any) -> list[str]:
    """Those of a call without a gradient."""
    with torch.no_grad():
        return recorded(run, *args, **named)


def agrees(module: Any, *inputs: dict[str, Any], operator: str = WITH_LOGITS) -> None:
    """The patched module has its own outputs and gradients, by one call of this operator."""
    kind, expected = type(module), [results(module, **arguments) for arguments in inputs]
    with patched(kind) as done:
        assert done.replaced == (f"{__name__}.plain_core", f"{kind.__module__}.{kind.__name__}")
        for arguments, right in zip(inputs, expected, strict=True):
            assert operators(module, **arguments) == [operator]
            with torch.no_grad():
                outputs = floating(module(**arguments))
            close(outputs, right[: len(outputs)])
            close(results(module, **arguments), right)
    assert operators(module, **inputs[0]) == []
