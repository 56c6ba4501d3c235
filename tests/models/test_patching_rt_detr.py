"""patch: the forms of the RT-DETR family (RT-DETR, v2, D-FINE, DEIM, OTX) and of LibreYOLO, each by its own code."""

from __future__ import annotations

import pytest
import torch
from test_patching import plain_core
from test_patching_attention import Layers, locations_of
from test_patching_forms import KEYS, SIZES, agrees, agrees_with_its_own_code, attention_inputs, by_level_core, library
from torch import nn

import mx_driving

COUNTS = [2, 4]


def split(rows, sizes=SIZES):
    """Levels [bs, heads, channels, keys] of rows [bs, keys, heads, channels], where they lie: so D-FINE and DEIM make them."""
    return rows.permute(0, 2, 3, 1).split([h * w for h, w in sizes], -1)


class RtDetr(Layers):
    """OTX's: value_mask is True where a key is hidden."""

    def __init__(self, embed_dim=12, num_heads=3, num_levels=2, num_points=4):
        super().__init__(embed_dim, num_heads, num_levels, num_points)
        self.num_heads, self.num_levels, self.num_points = self.sides

    def forward(self, query, reference_points, value, value_spatial_shapes, value_mask=None):
        value = self.rows(value, value_mask)
        offsets, weights = self.split(self.sampling_offsets(query), self.attention_weights(query))
        if reference_points.shape[-1] == 6:  # a centre, and distances to four sides
            box = reference_points[..., None, :]
            reach = box[..., 2::2] + box[..., 3::2]
            locations = (box[..., :2] + 0 * reach)[:, :, None] + offsets / self.num_points * reach[:, :, None] * 0.5
        else:
            locations = locations_of(reference_points, offsets, torch.as_tensor(value_spatial_shapes), self.num_points)
        return self.output_proj(plain_core(value, value_spatial_shapes, locations, weights))


class Multiplies(RtDetr):
    """RT-DETR's: value is multiplied by the mask."""

    def rows(self, value, mask=None):
        value = self.value_proj(value)
        value = value if mask is None else value * mask.to(value.dtype).unsqueeze(-1)
        return value.unflatten(-1, (self.num_heads, -1))

    def forward(self, query, reference_points, value, value_spatial_shapes, value_mask=None):
        weights = self.sampling_offsets, self.attention_weights  # a form is known by the layers that its code names
        assert len(weights) == 2
        return RtDetr.forward(self, query, reference_points, value, value_spatial_shapes, value_mask)


class Uneven(Layers):
    """What RT-DETR v2 and D-FINE share: each level has its own number of points."""

    def __init__(self, embed_dim=12, num_heads=3, num_levels=2, num_points=4, method="default", offset_scale=0.5):
        nn.Module.__init__(self)
        counts = num_points if isinstance(num_points, list) else [num_points] * num_levels
        self.num_heads, self.num_levels, self.num_points_list = num_heads, num_levels, counts
        self.method, self.offset_scale = method, offset_scale
        self.sampling_offsets = nn.Linear(embed_dim, num_heads * sum(counts) * 2)
        self.attention_weights = nn.Linear(embed_dim, num_heads * sum(counts))

    def samples(self, query, reference_points, offsets, weights):
        sides = *query.shape[:2], self.num_heads, sum(self.num_points_list)
        scales = torch.tensor([1 / n for n in self.num_points_list for _ in range(n)], dtype=query.dtype)[:, None]
        steps = offsets.reshape(*sides, 2) * scales * reference_points[:, :, None, :, 2:] * self.offset_scale
        return reference_points[:, :, None, :, :2] + steps, weights.reshape(sides).softmax(-1)


class RtDetrV2(Uneven):
    def __init__(self, embed_dim=12, num_heads=3, num_levels=2, num_points=4, method="default", offset_scale=0.5):
        super().__init__(embed_dim, num_heads, num_levels, num_points, method, offset_scale)
        self.value_proj, self.output_proj = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)

    def forward(self, query, reference_points, value, value_spatial_shapes, value_mask=None):
        value = self.value_proj(value)
        if value_mask is not None:
            value = value * value_mask.to(value.dtype).unsqueeze(-1)
        heads = split(value.unflatten(-1, (self.num_heads, -1)), value_spatial_shapes)
        given = self.samples(query, reference_points, self.sampling_offsets(query), self.attention_weights(query))
        return self.output_proj(by_level_core(heads, value_spatial_shapes, *given, self.num_points_list, self.method))


class DFine(Uneven):
    """Values of each level are given by heads, [bs, heads, channels, keys]."""

    def forward(self, query, reference_points, value, value_spatial_shapes):
        given = self.samples(query, reference_points, self.sampling_offsets(query), self.attention_weights(query))
        return by_level_core(value, value_spatial_shapes, *given, self.num_points_list, self.method)


class Gtr(Uneven):
    """LibreYOLO's GTR: values of each level are pictures, [bs * heads, channels, H, W]."""

    def forward(self, query, reference_points, value, value_spatial_shapes):
        given = self.samples(query, reference_points, self.sampling_offsets(query), self.attention_weights(query))
        value = [level.flatten(2).unflatten(0, (-1, self.num_heads)) for level in value]
        return by_level_core(value, value_spatial_shapes, *given, self.num_points_list, self.method)


class Libre(Layers):
    """LibreYOLO's Grounding DINO: transformers' parameters, but the weights are not returned."""

    def __init__(self, config, num_heads, n_points):
        super().__init__(config.d_model, num_heads, config.num_feature_levels, n_points)
        self.n_heads, self.n_levels, self.n_points = self.sides

    def forward(
        self, hidden_states, encoder_hidden_states, attention_mask, reference_points, spatial_shapes, spatial_shapes_list,
        position_embeddings=None,
    ):  # fmt: skip
        query = hidden_states if position_embeddings is None else hidden_states + position_embeddings
        value = self.rows(encoder_hidden_states, None if attention_mask is None else ~attention_mask)
        offsets, weights = self.split(self.sampling_offsets(query), self.attention_weights(query))
        locations = locations_of(reference_points, offsets, spatial_shapes, self.n_points)
        return self.output_proj(plain_core(value, spatial_shapes_list, locations, weights))


class LwDetr(Layers):
    """LibreYOLO's LW-DETR: no level_start_index, and the shapes are a list."""

    def __init__(self, d_model=12, n_levels=2, n_heads=3, n_points=4):
        super().__init__(d_model, n_heads, n_levels, n_points)
        self.n_heads, self.n_levels, self.n_points = self.sides

    def forward(self, query, reference_points, input_flatten, input_spatial_shapes):
        value = self.rows(input_flatten)
        offsets, weights = self.split(self.sampling_offsets(query), self.attention_weights(query))
        sizes = torch.as_tensor([[int(h), int(w)] for h, w in input_spatial_shapes])
        locations = locations_of(reference_points, offsets, sizes, self.n_points)
        return self.output_proj(plain_core(value, input_spatial_shapes, locations, weights))


NAMES = "query", "reference_points", "value"


def given_to(sides, value=lambda memory: memory):
    query, reference, memory, mask = attention_inputs(sides, True)
    given = dict(zip(NAMES, (query, reference, value(memory)), strict=True))
    return {**given, "value_spatial_shapes": SIZES}, mask


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sides", [(2, 2), (1, 4), (2, 4)])
@pytest.mark.parametrize("kind", [RtDetr, Multiplies])
def test_rt_detr(kind, sides, masked):
    given, mask = given_to(sides)
    agrees(kind().double(), {**given, "value_mask": mask if masked else None})


@pytest.mark.parametrize("counts", [4, COUNTS, [3, 1]])
@pytest.mark.parametrize("masked", [False, True])
def test_rt_detr_v2(counts, masked):
    given, mask = given_to((1, 4))
    agrees(RtDetrV2(num_points=counts, offset_scale=0.6).double(), {**given, "value_mask": mask if masked else None})


def by_heads(memory):
    return split(memory.unflatten(-1, (3, -1)))


def as_images(memory):
    return tuple(level.flatten(0, 1).unflatten(-1, size) for level, size in zip(by_heads(memory), SIZES, strict=True))


LAYOUTS = [(DFine, by_heads), (Gtr, as_images)]


@pytest.mark.parametrize("counts", [4, COUNTS])
@pytest.mark.parametrize(("kind", "layout"), LAYOUTS)
def test_values_of_each_level(kind, layout, counts):
    given, _ = given_to((1, 4), layout)
    agrees(kind(num_points=counts).double(), given)


@pytest.mark.parametrize("copied", [False, True])
def test_levels_that_were_split_from_one_tensor_are_read_where_they_lie(copied):
    given, _ = given_to((1, 4), by_heads)
    if copied:
        given["value"] = [level.clone() for level in given["value"]]
    module = DFine(num_points=COUNTS).double()
    with torch.no_grad():
        expected = module(**given)
        with mx_driving.patched(library(DFine)), mx_driving.viz.recording() as looks:
            torch.testing.assert_close(module(**given), expected, rtol=0, atol=1e-12)
    assert len(looks) == 1


def test_gradients_of_values_of_each_level():
    given, _ = given_to((1, 4), by_heads)
    given["value"] = [level.clone().requires_grad_() for level in given["value"]]
    module = DFine(num_points=COUNTS).double()

    def gradients():
        return torch.autograd.grad(module(**given).square().sum(), given["value"])

    expected = gradients()
    with mx_driving.patched(library(DFine)):
        torch.testing.assert_close(gradients(), expected, rtol=0, atol=1e-12)


def same_and_its_own(module, given):
    """The patched class leaves this call to its own code."""
    nn.init.normal_(module.sampling_offsets.weight)
    expected = module(**given)
    with mx_driving.patched(library(type(module))), mx_driving.viz.recording() as looks:
        torch.testing.assert_close(module(**given), expected, rtol=0, atol=0)
    assert len(looks) == 0


def test_what_a_form_cannot_take_is_left_to_the_modules_own_code():
    given, mask = given_to((2, 6))
    same_and_its_own(RtDetr().double(), given)  # OTX's third shape of references
    given, mask = given_to((2, 4))
    same_and_its_own(Multiplies().double(), {**given, "value_mask": mask * 0.5})  # half a key
    given, _ = given_to((1, 4), by_heads)
    same_and_its_own(DFine(method="discrete").double(), given)
    module = DFine().double()
    module._fused_offset_weight = True  # GTR's, merged for deployment
    same_and_its_own(module, given)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("numbers", [2, 4])
def test_libreyolo_grounding_dino(numbers, masked):
    query, reference, memory, mask = attention_inputs((2, numbers), masked)
    config = type("Config", (), {"d_model": 12, "num_feature_levels": 2})
    given = {"hidden_states": query, "encoder_hidden_states": memory, "attention_mask": mask, "reference_points": reference}
    tables = {"spatial_shapes": torch.tensor(SIZES), "spatial_shapes_list": SIZES}
    agrees(Libre(config, 3, 4).double(), {**given, **tables, "position_embeddings": query.flip(1)})


@pytest.mark.parametrize("sides", [(2, 2), (1, 4)])
def test_libreyolo_lw_detr(sides):
    query, reference, memory, _ = attention_inputs(sides, False)
    given = {"query": query, "reference_points": reference, "input_flatten": memory, "input_spatial_shapes": SIZES}
    agrees(LwDetr().double(), given)


def listed_core(value, shapes_list, sampling_locations, attention_weights):
    return plain_core(value, shapes_list, sampling_locations, attention_weights)


def optional_core(
    value,
    value_spatial_shapes,
    sampling_locations,
    attention_weights,
    num_points_list,
    method="default",
    value_shape="default",
    allow_acceleration=True,
):
    if value_shape == "reshape":
        value = split(value, value_spatial_shapes)
    return by_level_core(value, value_spatial_shapes, sampling_locations, attention_weights, num_points_list, method)


def core_inputs(*points):
    generator = torch.Generator().manual_seed(3)
    shapes = (2, KEYS, 3, 4), (2, 7, 3, *points, 2), (2, 7, 3, *points)
    return [torch.rand(s, generator=generator, dtype=torch.float64) for s in shapes]


def test_another_name_of_the_shapes():
    value, locations, weights = core_inputs(2, 4)
    agrees_with_its_own_code(listed_core, value, SIZES, locations, weights)


def test_options_that_a_core_was_not_tried_with_run_its_own_code():
    value, *given = core_inputs(6)
    arguments = SIZES, *given, COUNTS, "default"
    levels = split(value)
    expected = optional_core(levels, *arguments)
    with mx_driving.patched(library(optional_core)), mx_driving.viz.recording() as looks:
        for more in ((), ("default", False)):
            torch.testing.assert_close(optional_core(levels, *arguments, *more), expected, rtol=0, atol=1e-12)
        assert len(looks) == 2
        torch.testing.assert_close(optional_core(value, *arguments, "reshape"), expected, rtol=0, atol=0)
        assert len(looks) == 2
