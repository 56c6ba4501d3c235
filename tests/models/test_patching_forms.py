"""patch: the forms in which ultralytics, RF-DETR and D-FINE write a core and an attention module, each by its own code."""

from __future__ import annotations

import sys
import types

import pytest
import torch
import torch.nn.functional as F
from test_patching import module_of, plain_core
from test_patching_attention import Layers, locations_of
from torch import nn

import mx_driving

SIZES = [(4, 5), (3, 2)]
KEYS = 26


def merged_core(value, value_spatial_shapes, sampling_locations, attention_weights):
    """ultralytics 8.4: levels and points share an axis."""
    bs, _, heads, channels = value.shape
    queries, samples = sampling_locations.shape[1], sampling_locations.shape[3]
    points = samples // len(value_spatial_shapes)
    planes = value.permute(0, 2, 3, 1).flatten(0, 1).split([h * w for h, w in value_spatial_shapes], -1)
    grids = (2 * sampling_locations - 1).permute(0, 2, 1, 3, 4).flatten(0, 1).split(points, -2)
    read = [
        F.grid_sample(planes[l].reshape(bs * heads, channels, h, w), grids[l], align_corners=False)
        for l, (h, w) in enumerate(value_spatial_shapes)
    ]
    weights = attention_weights.permute(0, 2, 1, 3).reshape(bs * heads, 1, queries, samples)
    return (torch.cat(read, -1) * weights).sum(-1).view(bs, heads * channels, queries).transpose(1, 2)


def keys_last_core(value, value_spatial_shapes, sampling_locations, attention_weights, value_spatial_shapes_hw=None):
    """RF-DETR 1.11: value [bs, heads, channels, keys]; locations of either kind, weights with one axis of samples."""
    bs, heads, channels, _ = value.shape
    shapes = value_spatial_shapes if value_spatial_shapes_hw is None else value_spatial_shapes_hw
    merged = sampling_locations.dim() == 5
    points = sampling_locations.shape[3] // len(shapes) if merged else sampling_locations.shape[4]
    read = []
    for l, (h, w) in enumerate(shapes):
        start = sum(a * b for a, b in shapes[:l])
        plane = value[..., start : start + h * w].reshape(bs * heads, channels, h, w)
        at = sampling_locations[:, :, :, l * points : (l + 1) * points] if merged else sampling_locations[:, :, :, l]
        read.append(F.grid_sample(plane, 2 * at.transpose(1, 2).flatten(0, 1) - 1, align_corners=False))
    weights = attention_weights.transpose(1, 2).flatten(3).flatten(0, 1)[:, None]
    return (torch.cat(read, -1) * weights).sum(-1).view(bs, heads * channels, -1).transpose(1, 2)


def by_level_core(value, value_spatial_shapes, sampling_locations, attention_weights, num_points_list, method="default"):
    """D-FINE: a value for each level, [bs, heads, channels, keys]; levels with different numbers of points."""
    bs, heads, channels, _ = value[0].shape
    queries = sampling_locations.shape[1]
    total = 0
    parts = zip(value, value_spatial_shapes, sampling_locations.split(num_points_list, 3), strict=True)
    for (plane, (h, w), at), weight in zip(parts, attention_weights.split(num_points_list, 3), strict=True):
        plane = plane.reshape(bs * heads, channels, h, w)
        at = at.permute(0, 2, 1, 3, 4).flatten(0, 1)
        if method == "discrete":
            x, y = (at * torch.tensor([w, h]) + 0.5).long().clamp(0, h - 1).unbind(-1)  # x too: the libraries' own mistake
            read = plane.flatten(2).gather(2, (y * w + x.clamp(max=w - 1)).flatten(1)[:, None].expand(-1, channels, -1))
            read = read.unflatten(2, at.shape[1:3])
        else:
            read = F.grid_sample(plane, 2 * at - 1, align_corners=False)
        total = total + (read * weight.permute(0, 2, 1, 3).flatten(0, 1)[:, None]).sum(-1)
    return total.view(bs, heads * channels, queries).transpose(1, 2)


def inputs(points, value=None):
    generator = torch.Generator().manual_seed(1)

    def rand(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    return rand(2, KEYS, 3, 4) - 0.5, rand(2, 7, 3, *points, 2) * 1.4 - 0.2, rand(2, 7, 3, *points)


def library(*things):
    """A Python module that has the things."""
    module = types.ModuleType("a_library")
    vars(module).update({thing.__name__: thing for thing in things})
    return module


def agrees_with_its_own_code(core, *given):
    """Numbers and gradients of a core before and after `patch`, which must serve the call by one operator."""
    plain = _outputs(core, *given)
    with mx_driving.patched(library(core)), mx_driving.viz.recording() as looks:
        ours = _outputs(core, *given)
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-12)
    assert len(looks) == 1


def _outputs(core, value, *rest, **options):
    leaves = [t.clone().requires_grad_() for t in (value, *(t for t in rest if isinstance(t, torch.Tensor)))]
    given = iter(leaves[1:])
    out = core(leaves[0], *(next(given) if isinstance(t, torch.Tensor) else t for t in rest), **options)
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


def test_levels_and_points_in_one_axis():
    value, locations, weights = inputs((8,))
    agrees_with_its_own_code(merged_core, value, SIZES, locations, weights)


@pytest.mark.parametrize("points", [(2, 4), (8,)])
def test_keys_last(points):
    value, locations, weights = inputs(points)
    value = value.permute(0, 2, 3, 1).contiguous()
    agrees_with_its_own_code(keys_last_core, value, SIZES, locations, weights.flatten(3))


def test_shapes_as_a_list_come_before_the_tensor():
    """RF-DETR gives both; the list is the one that an exporter can read."""
    value, locations, weights = inputs((8,))
    value = value.permute(0, 2, 3, 1).contiguous()
    module = library(keys_last_core)
    wrong = torch.tensor(SIZES).flip(0)
    plain = keys_last_core(value, wrong, locations, weights, value_spatial_shapes_hw=SIZES)
    with mx_driving.patched(module):
        ours = keys_last_core(value, wrong, locations, weights, value_spatial_shapes_hw=SIZES)
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-12)


def of_levels(value):
    return [part.contiguous() for part in value.permute(0, 2, 3, 1).split([h * w for h, w in SIZES], -1)]


def test_a_value_for_each_level():
    value, locations, weights = inputs((6,))
    module = library(by_level_core)
    plain = by_level_core(of_levels(value), SIZES, locations, weights, [2, 4])
    with mx_driving.patched(module) as done, mx_driving.viz.recording() as looks:
        assert done.replaced == (f"{__name__}.by_level_core",)
        torch.testing.assert_close(by_level_core(of_levels(value), SIZES, locations, weights, [2, 4]), plain)
    assert len(looks) == 1


def test_a_method_with_other_numbers_runs_the_cores_own_code():
    """Most libraries clamp x of "discrete" by the height. Their "default" is served all the same."""
    value, locations, weights = inputs((6,))
    module = library(by_level_core)
    plain = by_level_core(of_levels(value), SIZES, locations, weights, [2, 4], "discrete")
    with mx_driving.patched(module), mx_driving.viz.recording() as looks:
        ours = by_level_core(of_levels(value), SIZES, locations, weights, [2, 4], method="discrete")
    assert torch.equal(ours, plain)
    assert not looks


def test_axes_that_the_core_cannot_take_are_its_own_matter():
    """What was not tried runs the core's own code, and fails as it does."""
    value, locations, weights = inputs((2, 4))
    module = library(merged_core)
    with mx_driving.patched(module), pytest.raises(RuntimeError, match="permute"):
        merged_core(value, SIZES, locations, weights)


class Ultralytics(Layers):
    def __init__(self, d_model=12, n_levels=2, n_heads=3, n_points=4):
        super().__init__(d_model, n_heads, n_levels, n_points)
        self.n_heads, self.n_levels, self.n_points = self.sides

    def forward(self, query, refer_bbox, value, value_shapes, value_mask=None):
        value = self.rows(value, value_mask)
        offsets, weights = self.split(self.sampling_offsets(query), self.attention_weights(query))
        locations = locations_of(refer_bbox, offsets, torch.as_tensor(value_shapes, dtype=query.dtype), self.n_points)
        return self.output_proj(merged_core(value, value_shapes, locations.flatten(3, 4), weights.flatten(3)))


class RfDetr(Layers):
    _export = False

    def __init__(self, d_model=12, n_levels=2, n_heads=3, n_points=4):
        super().__init__(d_model, n_heads, n_levels, n_points)
        self.n_heads, self.n_levels, self.n_points = self.sides

    def forward(
        self, query, reference_points, input_flatten, input_spatial_shapes, input_level_start_index, input_padding_mask=None,
        input_spatial_shapes_hw=None,
    ):  # fmt: skip
        value = self.rows(input_flatten, input_padding_mask).permute(0, 2, 3, 1).contiguous()
        offsets, weights = self.split(self.sampling_offsets(query), self.attention_weights(query))
        locations = locations_of(reference_points, offsets, input_spatial_shapes, self.n_points)
        locations = locations.flatten(3, 4) if self._export else locations  # at most five axes
        given = value, input_spatial_shapes.tolist(), locations, weights.flatten(3)
        return self.output_proj(keys_last_core(*given, value_spatial_shapes_hw=input_spatial_shapes_hw))


class GroundingDino(Layers):
    """mmcv's module without dropout and identity."""

    def __init__(self, embed_dim=12, num_heads=3, num_levels=2, num_points=4, batch_first=False):
        super().__init__(embed_dim, num_heads, num_levels, num_points)
        self.num_heads, self.num_levels, self.num_points = self.sides
        self.batch_first = batch_first

    def forward(
        self, query, key=None, value=None, query_pos=None, key_padding_mask=None, reference_points=None, spatial_shapes=None,
        level_start_index=None, **kwargs,
    ):  # fmt: skip
        value = query if value is None else value
        query = query if query_pos is None else query + query_pos
        if not self.batch_first:
            query, value = query.transpose(0, 1), value.transpose(0, 1)
        value = self.rows(value, key_padding_mask)
        offsets, weights = self.split(self.sampling_offsets(query), self.attention_weights(query))
        locations = locations_of(reference_points, offsets, spatial_shapes, self.num_points)
        out = self.output_proj(plain_core(value, spatial_shapes.tolist(), locations, weights))
        return out if self.batch_first else out.transpose(0, 1)


def attention_inputs(sides, masked):
    generator = torch.Generator().manual_seed(2)
    query, memory = (torch.rand(2, n, 12, generator=generator, dtype=torch.float64) - 0.5 for n in (7, KEYS))
    reference = torch.rand(2, 7, *sides, generator=generator, dtype=torch.float64)
    return query, reference, memory, torch.rand(2, KEYS, generator=generator) < 0.3 if masked else None


def run(module, given):
    out = module(**given)
    return [out, *torch.autograd.grad(out.square().sum(), list(module.parameters()))]


def agrees(module, given):
    """The module's numbers before and after `patch`, which must serve it by the operator with logits."""
    torch.manual_seed(0)
    for p in module.parameters():
        nn.init.normal_(p, std=0.5)
    plain = run(module, given)
    with mx_driving.patched(library(type(module))) as done, mx_driving.viz.recording() as looks:
        assert done.replaced == (f"{type(module).__module__}.{type(module).__name__}",)
        ours = run(module, given)
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-11)
    assert len(looks) == 1


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sides", [(1, 2), (1, 4)])
def test_ultralytics(sides, masked):
    query, reference, memory, mask = attention_inputs(sides, masked)
    given = {"query": query, "refer_bbox": reference, "value": memory, "value_shapes": SIZES, "value_mask": mask}
    agrees(Ultralytics().double(), given)


@pytest.mark.parametrize("export", [False, True])
@pytest.mark.parametrize("sides", [(1, 2), (2, 2), (1, 4), (2, 4)])
def test_rf_detr(sides, export):
    query, reference, memory, mask = attention_inputs(sides, True)
    shapes = torch.tensor(SIZES)
    given = {
        **{"query": query, "reference_points": reference, "input_flatten": memory, "input_padding_mask": mask},
        **{"input_spatial_shapes": shapes, "input_level_start_index": torch.tensor([0, 20])},
        "input_spatial_shapes_hw": SIZES,
    }
    module = RfDetr().double()
    module._export = export
    agrees(module, given)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("sides", [(2, 2), (2, 4)])
def test_grounding_dino(sides, batch_first):
    query, reference, memory, mask = attention_inputs(sides, True)
    rows = {"query": query, "value": memory, "query_pos": query.flip(1)}
    given = {
        **{name: t if batch_first else t.transpose(0, 1) for name, t in rows.items()},
        **{"reference_points": reference, "key_padding_mask": mask, "spatial_shapes": torch.tensor(SIZES)},
        "level_start_index": torch.tensor([0, 20]),
    }
    agrees(GroundingDino(batch_first=batch_first).double(), given)


def test_a_library_that_imports_late_says_what_to_import(tmp_path, monkeypatch):
    package = tmp_path / "a_late_library"
    (package / "models").mkdir(parents=True)
    for file in ("__init__.py", "models/__init__.py", "models/other.py"):
        (package / file).write_text("")
    (package / "models" / "attention.py").write_text("# grid_sample of sampling locations, attention_weights\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"import that of your model first, of a_late_library\.models\.attention$"):
        mx_driving.patch("a_late_library")
    monkeypatch.delitem(sys.modules, "a_late_library")


def test_the_reason_is_the_numbers_where_some_form_runs():
    module = module_of(
        """
        def twice(value, value_spatial_shapes, sampling_locations, attention_weights):
            return 2 * plain_core(value, value_spatial_shapes, sampling_locations, attention_weights)
        """
    )
    assert plain_core is not None
    with pytest.warns(UserWarning, match="twice alone: its result on a small example differs"):
        mx_driving.patch(module).restore()
