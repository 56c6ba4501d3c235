"""viz.page without a browser: a page is one file that fetches nothing, escapes texts and has every sample."""

import base64
import functools
import hashlib

import pytest
import torch
from refusals import said

from mx_driving import nn, viz
from mx_driving.nn import spatial_cross_attention

pytest.importorskip("numpy")
pytest.importorskip("PIL.Image")

from pages import PICTURE, BirdsEyeLayer, aggregation, attention, geometric, samples, written

HOSTILE = "</script><script>alert(1)</script><!-- & \u2028 \ud800 {{data}} 漢"


def counted(look, camera):
    """Return locations, weights and the mask of samples that count, [query, head, level, point], of a camera."""
    if look.operator == "deformable_aggregation":
        at, weights = look.locations[0, :, :, camera], look.weights[0, :, :, camera]
        weights = weights.permute(0, 3, 2, 1)  # group, scale, point
        at = at[:, None, None].expand(*weights.shape, 2)
        return at, weights, ((at > 0) & (at < 1)).all(-1)
    size, at = look.shapes.flip(-1)[:, None].double(), look.locations[camera].double()
    if look.operator == "geometric_kernel_attention":
        at = (torch.minimum(at.nan_to_num(0).trunc().clamp_min(0), size - 1) + 0.5) / size
        return at, look.weights[camera], torch.ones(at.shape[:-1]).bool()
    pixels = at * size - 0.5
    return at, look.weights[camera], ((pixels > -1) & (pixels < size)).all(-1)


@pytest.mark.parametrize("make", [attention, aggregation, geometric])
def test_the_page(make, tmp_path):
    look = make()
    cameras = 3 if make is aggregation else 2
    plane = viz.Plane(labels=[HOSTILE] * 4)
    pictures = {f"{HOSTILE}{i}": PICTURE for i in range(cameras)}
    parsed, facts = written(viz.page({HOSTILE: look}, pictures, tmp_path / "x.html", title=HOSTILE, plane=plane))
    assert [parsed.attributes.get(name, []) for name in ("src", "href", "srcset", "action")] == [[], ["data:,"], [], []]
    (policy,) = [value for value in parsed.attributes["content"] if "default-src" in value]
    for kind in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(parsed.texts[kind].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert parsed.texts["title"] == parsed.texts["h1"] == HOSTILE.replace("\ud800", "\ufffd")  # no lone surrogate
    assert [facts["title"], facts["looks"][0]["name"], *facts["queries"]["labels"]] == [HOSTILE] * 6
    assert "alert" not in parsed.texts["script"]
    assert not {"<", ">", "&", "\u2028"} & set(parsed.texts["data"])
    ids = parsed.attributes["id"]
    assert set(parsed.attributes["for"]) <= set(ids)
    assert len(set(ids)) == len(ids)
    rows = samples(facts)
    for camera in range(cameras):
        at, weights, counts = counted(look, camera)
        for query in range(4):
            expected = counts[query].nonzero().tolist()
            assert [list(row[:3]) for row in rows.get((query, camera), [])] == expected
            for (h, l, p), row in zip(expected, rows.get((query, camera), []), strict=True):
                assert row[3:5] == pytest.approx(at[query, h, l, p].tolist(), abs=2e-5)
                assert row[5] == pytest.approx(float(weights[query, h, l, p]), abs=2e-5)


def birds_eye_looks(mask):
    with viz.recording() as looks:
        BirdsEyeLayer()(mask)
    return looks


@pytest.mark.parametrize("unseen", [(), (2,)])
def test_a_layer_that_samples_its_cameras_in_turn_is_a_call(unseen, tmp_path):
    """A camera may see no cell."""
    mask = torch.arange(36).view(3, 12) % 5 < 2
    mask[list(unseen)] = False
    looks, plane = birds_eye_looks(mask), viz.Plane((3, 4), seen=mask.T)
    calls = looks.of("spatial"), [looks[1:4]]
    facts = [written(viz.page(call, [PICTURE] * 3, tmp_path / "x.html", plane=plane))[1] for call in calls]
    assert facts[0] == facts[1]
    assert facts[0]["looks"][0]["name"] == "call 1 (spatial.deformable_attention)"
    assert {(query, camera) for query, camera in samples(facts[0])} <= {tuple(pair) for pair in mask.T.nonzero().tolist()}


def two_scenes(kind, cameras):
    """Return a module of nn, its inputs for two scenes, and the mask `seen` of each scene."""
    cells, grid = torch.rand(2, 12, 16), {"spatial_shapes": torch.tensor([[3, 4]]), "level_start_index": torch.tensor([0])}
    if kind is nn.SpatialCrossAttention:
        seen = torch.arange(24 * cameras).view(2, cameras, 12) % 5 < torch.tensor([2, 3]).view(2, 1, 1)
        value, points = torch.rand(2, cameras, 12, 16), torch.rand(2, cameras, 12, 4, 2)
        inputs = {"query": cells, "reference_points": points, "value": value} | grid
        return kind(16, num_levels=1), inputs | {"bev_mask": seen[..., None].expand_as(points[..., 0])}, [m.T for m in seen]
    if kind is nn.DeformableFeatureAggregation:
        maps = nn.flatten_cameras([torch.rand(2, cameras, 16, 3, 4)])
        maps = dict(zip(("feature_maps", "spatial_shape", "scale_start_index"), maps, strict=True))
        matrices = torch.eye(4) + torch.rand(2, cameras, 4, 4)
        inputs = {"instance_feature": cells, "anchor": torch.rand(2, 12, 8), "anchor_embed": cells, "projection_mat": matrices}
        return kind(16, 8, 1, cameras).eval(), inputs | maps, [None, None]
    rows = (2, 2, 12) if kind is nn.TemporalSelfAttention else (2, 12)
    places = torch.rand(*rows, 4 if kind is nn.GeometricKernelAttention else 1, 2)
    inputs = {"query": cells, "reference_points": places, "value": torch.rand(*rows, 16), **grid}
    return kind(16, num_levels=1), inputs, [None] * 2


SCENES = [
    (nn.SpatialCrossAttention, 3),
    (nn.SpatialCrossAttention, 1),
    (nn.TemporalSelfAttention, 2),
    (nn.MultiScaleDeformableAttention, 1),
    (nn.GeometricKernelAttention, 1),
    (nn.DeformableFeatureAggregation, 3),
]


@pytest.mark.parametrize(("kind", "cameras"), SCENES)
def test_a_scene_of_a_batch_looks_as_it_does_alone(kind, cameras, tmp_path):
    module, inputs, seen = two_scenes(kind, cameras)
    for name, parameter in module.named_parameters():  # at first all weights are equal
        if "weights" in name:
            torch.nn.init.normal_(parameter)
    with viz.recording() as looks:
        module(**inputs)

    def shown(looks, scene, mask):
        path = viz.page(looks, [PICTURE] * cameras, tmp_path / "x.html", plane=viz.Plane((3, 4), seen=mask), scene=scene)
        facts = written(path)[1]
        assert len(facts["looks"]) == 1
        return samples(facts)

    for scene, mask in enumerate(seen):
        tables = ("spatial_shapes", "level_start_index", "spatial_shape", "scale_start_index")
        with viz.recording() as alone:
            module(**{name: t if name in tables else t[scene : scene + 1] for name, t in inputs.items()})
        found, expected = shown(looks, scene, mask), shown(alone, 0, mask)
        assert found.keys() == expected.keys()
        assert any(expected.values())
        for block, rows in expected.items():
            assert found[block] == [pytest.approx(row, abs=1e-4) for row in rows]
    with pytest.raises(ValueError, match=r"^scene must be a number from 0 to 1 for call 1"):
        shown(looks, 2, seen[1])


def test_calls_of_a_layer_and_scenes_of_a_call(tmp_path, monkeypatch):
    """Two calls of a layer that samples its cameras in turn are two calls on the page, also if cameras pass its layers one by
    one. A sequence of looks has scenes."""
    monkeypatch.setattr(spatial_cross_attention, "_TOGETHER", 1)
    module, inputs, (seen, _) = two_scenes(nn.SpatialCrossAttention, 3)
    one = {name: t if t.dim() < 3 else t[:1] for name, t in inputs.items()}
    with viz.recording() as looks:
        module(**one)
        module(**one)
    plane = viz.Plane((3, 4), seen=seen)
    facts = written(viz.page(looks, [PICTURE] * 3, tmp_path / "x.html", plane=plane))[1]
    assert samples(facts, 0) == samples(facts, 1)
    apart = written(viz.page([looks[:3], looks[3:]], [PICTURE] * 3, tmp_path / "x.html", plane=plane))[1]
    assert [samples(apart, call) for call in (0, 1)] == [samples(facts)] * 2
    for scene in (0, 1):
        path = viz.page({"both": [*looks]}, [PICTURE] * 3, tmp_path / "x.html", plane=plane, scene=scene)
        assert samples(written(path)[1]) == samples(facts)
    counts = seen.sum(0).tolist()
    rows = torch.rand(1, sum(counts), 16), torch.rand(1, sum(counts), 4, 2)
    with viz.recording() as looks:  # the outermost module has no name
        module.deformable_attention(*rows, torch.rand(3, 12, 16), one["spatial_shapes"], one["level_start_index"], counts)
    assert len(written(viz.page(looks, [PICTURE] * 3, tmp_path / "x.html", plane=plane))[1]["looks"]) == 1


def test_a_padded_batch_of_scenes(tmp_path):
    """BEVFormer pads all cameras of all scenes to the most queries that a camera sees."""
    seen = torch.tensor([[1, 1, 0, 0], [0, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 0]]).bool().view(2, 2, 4).transpose(1, 2)
    levels = torch.tensor([[3, 4]]), torch.tensor([0])
    look = viz.Look(
        "multi_scale_deformable_attn", torch.rand(4, 12, 1, 2), *levels, torch.rand(4, 3, 1, 1, 1, 2), torch.rand(4, 3, 1, 1, 1)
    )
    for scene, mask in enumerate(seen):
        facts = written(viz.page(look, [PICTURE] * 2, tmp_path / "x.html", plane=viz.Plane((2, 2), seen=mask), scene=scene))[1]
        assert {block for block, rows in samples(facts).items() if rows} == {tuple(pair) for pair in mask.nonzero().tolist()}
        for (query, camera), ((*_, weight),) in samples(facts).items():
            row = mask[:, camera].nonzero().flatten().tolist().index(query)
            assert weight == pytest.approx(float(look.weights[2 * scene + camera, row]), abs=1e-4)


def test_looks_that_do_not_fit_are_named(tmp_path):
    looks = birds_eye_looks(torch.ones(3, 12).bool())
    for chosen, pictures, plane, sentence in (
        (looks, 3, None, "pictures must be one for each camera of a scene, a number that divides bs=2 of call 1 (temporal); "
         "got 3, which fits looks.of('spatial.deformable_attention')"),
        (looks.of("decoder"), 3, None,
         "pictures must be one for each camera of a scene, a number that divides bs=1 of call 1 (decoder.0); got 3"),
        (looks, 1, None, "looks must have the same queries on one page; got 12 queries in call 1 (temporal) and 4 in "
         "call 5 (decoder.0); looks.of(layer) selects the looks of a layer"),
    ):  # fmt: skip
        call = functools.partial(viz.page, chosen, [PICTURE] * pictures, tmp_path / "x.html", plane=plane)
        assert said(call) == sentence
    looks = birds_eye_looks(torch.arange(36).view(3, 12) % 5 < 2)
    with pytest.raises(ValueError, match=r"^plane.seen must be a mask .* have different queries; got None for 6 and 4 and 5 "):
        viz.page(looks.of("spatial"), [PICTURE] * 3, tmp_path / "x.html")
