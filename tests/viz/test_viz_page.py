"""viz.page without a browser: a page is one file that fetches nothing, escapes texts and has every sample."""

import base64
import hashlib

import pytest
import torch

from mx_driving import viz

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
    path = viz.page(
        {HOSTILE: look}, {f"{HOSTILE}{i}": PICTURE for i in range(cameras)}, tmp_path / "x.html", title=HOSTILE, plane=plane
    )
    parsed, facts = written(path)
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
    facts = [
        written(viz.page(call, [PICTURE] * 3, tmp_path / "x.html", plane=plane))[1]
        for call in (looks.of("spatial"), [looks[1:4]])
    ]
    assert facts[0] == facts[1]
    assert facts[0]["looks"][0]["name"] == "call 1 (spatial.deformable_attention)"
    assert {(query, camera) for query, camera in samples(facts[0])} <= {tuple(pair) for pair in mask.T.nonzero().tolist()}


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
        with pytest.raises(ValueError) as refused:
            viz.page(chosen, [PICTURE] * pictures, tmp_path / "x.html", plane=plane)
        assert str(refused.value) == sentence
    looks = birds_eye_looks(torch.arange(36).view(3, 12) % 5 < 2)
    with pytest.raises(ValueError, match=r"^plane.seen must be a mask .* have different queries; got None for 6 and 4 and 5 "):
        viz.page(looks.of("spatial"), [PICTURE] * 3, tmp_path / "x.html")
