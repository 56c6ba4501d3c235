"""viz.page: what the file holds, and that its texts are harmless. test_page_in_a_browser.py moves over it."""

from __future__ import annotations

import base64
import hashlib
import io
import re
import sys

import cases
import pytest
import torch

import mx_driving
from mx_driving import viz
from mx_driving._installing import pip_install

numpy = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")

from pages import PICTURE, aggregation, attention, numbers, samples, written  # noqa: E402


@pytest.fixture
def path(tmp_path):
    return tmp_path / "looks.html"


def test_one_file_that_loads_nothing_and_runs_our_script_alone(path):
    assert viz.page([attention()], PICTURE, path) == path
    parsed, facts = written(path)
    assert parsed.loads == ["data:,"]
    for kind, element in (("script", "script"), ("style", "style")):
        digest = base64.b64encode(hashlib.sha256(parsed.texts[element].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in parsed.texts["policy"]
    assert parsed.texts["policy"].startswith("default-src 'none'; img-src data:;")
    for address in ("http:", "https:", "//fonts", "@import", "url("):
        assert address not in parsed.texts["style"]
        assert address not in parsed.texts["script"].replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    assert set(parsed.labelled) <= set(parsed.ids)
    assert len(set(parsed.ids)) == len(parsed.ids)
    assert all(uri.startswith("data:image/") for camera in facts["cameras"] for uri in camera["pictures"])


HOSTILE = "</script><script>alert(1)</script><!-- & \u2028 \ud800 {{data}} 漢"


def test_texts_of_the_caller_are_harmless(path):
    look = attention()
    viz.page({HOSTILE: look}, {HOSTILE: PICTURE}, path, title=HOSTILE, plane=viz.Plane(labels=[HOSTILE] * 4))
    parsed, facts = written(path)
    seen = HOSTILE.replace("\ud800", "\ufffd")  # half a character is none
    assert parsed.texts["title"] == parsed.texts["h1"] == seen
    assert [facts["title"], facts["cameras"][0]["name"], facts["looks"][0]["name"]] == [HOSTILE] * 3
    assert facts["queries"]["labels"] == [HOSTILE] * 4
    assert "alert" not in parsed.texts["script"]
    assert not {"<", ">", "&", "\u2028"} & set(parsed.texts["data"])


def test_attention_keeps_every_sample(path):
    """x, y to 2e-5 of the picture and weights to 2e-5 of the largest; what is farther than half a pixel outside is left out."""
    look = attention(bs=2)
    look.locations[1, 2, 0, 1, 1] = torch.tensor([1.12, 0.5])  # x = 3.98 of a level 4 wide: its last half pixel
    look.locations[1, 2, 1, 1, 0] = torch.tensor([1.13, 0.5])  # x = 4.02
    look.locations[1, 3, 0, 0, 0] = torch.tensor([0.5, float("nan")])
    look.locations[1, 3, 0, 0, 1] = torch.tensor([-0.06, 0.5])  # x = -0.98 of a level 8 wide: its first half pixel
    look.locations[1, 3, 1, 0, 1] = torch.tensor([0.5, -0.1])  # y = -1.1 of a level 6 high
    viz.page(look, [PICTURE, PICTURE], path)
    found = samples(written(path)[1])
    assert len(found) == 8
    sizes = look.shapes.double()
    for (query, camera), rows in found.items():
        pixels = look.locations[camera, query].double() * sizes.flip(-1)[:, None] - 0.5
        wanted = ((pixels > -1) & (pixels < sizes.flip(-1)[:, None])).all(-1)
        assert [row[:3] for row in rows] == [tuple(i) for i in wanted.nonzero().tolist()]
        for h, l, p, x, y, weight in rows:
            assert (x, y) == pytest.approx(look.locations[camera, query, h, l, p].tolist(), abs=2e-5)
            assert weight == pytest.approx(float(look.weights[camera, query, h, l, p]), abs=2e-5)
    assert [len(found[key]) for key in ((2, 1), (3, 1), (0, 0))] == [7, 6, 8]


def test_aggregation_shares_locations(path):
    """Groups and scales of a point have one location; points count strictly inside; cameras that are not read are left out."""
    look = aggregation()
    look.locations[0, 0, :, 1] = 1.0
    look.weights[0, 1, :, 2] = 0
    look.locations[0, 2, 0, 0] = torch.tensor([0.0, 0.5])
    viz.page(look, [PICTURE] * 3, path)
    _, facts = written(path)
    assert facts["looks"][0]["shared"] == [1, 1]
    found = samples(facts)
    assert (0, 1) not in found
    assert (1, 2) not in found
    for query in range(4):
        for camera in range(3):
            where = look.locations[0, query, :, camera]
            inside = ((where > 0) & (where < 1)).all(-1)
            expected = {
                (group, scale, p): (*where[p].tolist(), float(look.weights[0, query, p, camera, scale, group]))
                for group in range(4) for scale in range(2) for p in inside.nonzero()[:, 0].tolist()
                if look.weights[0, query, p, camera, scale, group]
            }  # fmt: skip
            rows = {row[:3]: row[3:] for row in found.get((query, camera), [])}
            assert rows.keys() == expected.keys()
            assert all(rows[key] == pytest.approx(expected[key], abs=2e-5) for key in rows)


def test_geometric_kernel_attention_reads_whole_pixels(path):
    """Truncated and clamped, as the operator does; marks lie on the pixels' centres."""
    shapes, starts = cases.levels_of((4, 10))
    pixels = torch.tensor([[2.9, 1.2], [-7.0, 3.0], [50.0, float("inf")], [float("nan"), 0.4]]).view(1, 1, 1, 1, 4, 2)
    with viz.recording() as looks:
        mx_driving.geometric_kernel_attention(torch.rand(1, 40, 1, 4), shapes, starts, pixels, torch.ones(1, 1, 1, 1, 4))
    viz.page(looks, PICTURE, path)
    (rows,) = samples(written(path)[1]).values()
    centres = [((column + 0.5) / 10, (row + 0.5) / 4) for column, row in ((2, 1), (0, 3), (9, 3), (0, 0))]
    assert [place for row in rows for place in row[3:5]] == pytest.approx([n for c in centres for n in c], abs=2e-5)


def test_scenes_of_a_batch(path):
    look = attention(bs=6)
    viz.page(look, [PICTURE] * 3, path, scene=1)
    rows = samples(written(path)[1])[2, 1]
    assert rows[0][3:5] == pytest.approx(look.locations[4, 2, 0, 0, 0].tolist(), abs=2e-5)
    looks = aggregation(bs=2)
    viz.page(looks, [PICTURE] * 3, path, scene=1)
    weight = numbers(written(path)[1]["looks"][0]["weights"], "<i2").abs().max()
    assert weight == 32767
    assert written(path)[1]["looks"][0]["largest"] == pytest.approx(float(looks.weights[1][_within(looks.locations[1])].max()))


def _within(places):
    return ((places > 0) & (places < 1)).all(-1).amax(1, keepdim=True).expand(places.shape[:-1])


SEEN = torch.tensor([[1, 0], [1, 1], [0, 0], [0, 1], [1, 1]]).bool()


@pytest.mark.parametrize("rows", ["all", "padded", "one look each"])
def test_cameras_are_asked_by_the_queries_that_they_see(path, rows):
    """Three ways to call: every camera is asked by all; padded to the longest; a call for each camera."""
    if rows == "one look each":
        looks = [attention(queries=3), attention(queries=3)]
        places = [look.locations[0] for look in looks]
    else:
        look = attention(bs=2, queries=5 if rows == "all" else 3)
        looks, places = look, look.locations
    viz.page([looks], [PICTURE] * 2, path, plane=viz.Plane(seen=SEEN))
    found = samples(written(path)[1])
    assert sorted(found) == [(q, c) for q, c in SEEN.nonzero().tolist()]
    for camera in range(2):
        for rank, query in enumerate(SEEN[:, camera].nonzero()[:, 0].tolist()):
            row = query if rows == "all" else rank
            assert found[query, camera][0][3:5] == pytest.approx(places[camera][row, 0, 0, 0].tolist(), abs=2e-5)


def test_spatial_cross_attention_as_it_is_recorded(path):
    """Each camera of mx_driving.nn.SpatialCrossAttention is a call of its own."""
    attend = mx_driving.nn.SpatialCrossAttention(16, num_heads=2, num_levels=1, num_points=4).eval()
    value, shapes, starts = mx_driving.nn.flatten_levels([torch.rand(3, 16, 5, 8)])
    pillars = torch.rand(1, 3, 12, 4, 2) * 2 - 0.5
    mask = ((pillars > 0) & (pillars < 1)).all(-1)
    with viz.recording() as looks:
        attend(torch.rand(1, 12, 16), pillars, value[None], shapes, starts, mask)
    plane = viz.Plane((3, 4), seen=mask[0].any(-1).T)
    viz.page([looks], [PICTURE] * 3, path, plane=plane)
    assert set(samples(written(path)[1])) <= {(q, c) for q, c in mask[0].any(-1).T.nonzero().tolist()}
    assert len(samples(written(path)[1])) > 6


def test_places(path):
    look = attention(queries=6)

    def placed(plane):
        viz.page(look, PICTURE, path, plane=plane)
        queries = written(path)[1]["queries"]
        return numbers(queries["places"], "<f4"), queries

    rows, _ = placed(viz.Plane((2, 3)))
    assert rows.view(6, 2)[4].tolist() == pytest.approx([0.5, 0.75])
    metres, _ = placed(viz.Plane((2, 3), extent=(-4, 4, -3, 3)))  # the first axis ahead, drawn up; the second left
    assert metres.view(6, 2)[0].tolist() == pytest.approx([5 / 6, 0.75])
    anchors, _ = placed(viz.Plane(torch.tensor([[4.0, 3.0]] * 6), extent=(-4, 4, -3, 3)))
    assert anchors.view(6, 2)[0].tolist() == [0, 0]  # far ahead on the left: the upper left corner
    boxes = torch.rand(6, 4)
    shares, queries = placed(viz.Plane(boxes, labels=list("abcdef")))
    assert torch.equal(shares.view(6, 4).float(), boxes)
    assert (queries["boxes"], queries["labels"]) == (True, list("abcdef"))


def picture_of(uri: str):
    return Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1])))


RAMP = torch.linspace(0, 1, 24).view(4, 6)
BYTES = (RAMP * 255).round().byte().numpy()
SIXTEEN = (RAMP * 65535).round().numpy().astype("u2")
KINDS = {
    "Pillow, 16 bits": lambda: Image.fromarray(SIXTEEN),
    "Pillow, floats": lambda: Image.fromarray(RAMP.numpy()),
    "Pillow, bytes": lambda: Image.fromarray(BYTES),
    "NumPy, bytes": lambda: BYTES,
    "NumPy, floats": lambda: RAMP.numpy(),
    "NumPy, double": lambda: RAMP.double().numpy().astype(">f8"),
    "NumPy, OpenCV's": lambda: numpy.stack([BYTES, BYTES, BYTES], -1)[..., ::-1],
    "NumPy, a batch": lambda: numpy.stack([BYTES, BYTES, BYTES], -1)[None],
    "NumPy, channels first": lambda: numpy.stack([BYTES, BYTES, BYTES]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_pictures_of_every_kind_have_the_same_pixels(path, kind):
    """Pillow would clip 16 bits and floats at 255."""
    viz.page(attention(), KINDS[kind](), path)
    shown = numpy.array(picture_of(written(path)[1]["cameras"][0]["pictures"][0]))
    assert numpy.abs(shown.astype(int) - BYTES[..., None]).max() <= 1


def test_pictures_keep_their_pixels_and_large_ones_shrink(path):
    grey, colours = torch.rand(5, 7), torch.randint(0, 256, (3, 5, 7), dtype=torch.uint8)
    viz.page(attention(), [[grey, colours]], path)  # one for each level
    camera = written(path)[1]["cameras"][0]
    first, second = (torch.from_numpy(numpy.array(picture_of(uri))) for uri in camera["pictures"])
    assert torch.equal(first[..., 0], (grey * 255).round().byte())
    assert torch.equal(second.permute(2, 0, 1), colours)
    viz.page(attention(), Image.radial_gradient("L").resize((3000, 1500)), path)
    assert picture_of(written(path)[1]["cameras"][0]["pictures"][0]).size == (960, 480)
    view = torch.zeros(4, 6, 3)
    view[3, 5] = 1  # far ahead, far left
    viz.page(attention(queries=24), PICTURE, path, plane=viz.Plane((4, 6), view, (-2, 2, -3, 3)))
    assert picture_of(written(path)[1]["plane"]["picture"]).getpixel((0, 0)) == (255, 255, 255)


def test_a_file_that_would_be_too_large_shows_fewer_queries(path):
    look = attention(queries=2500, heads=8)
    viz.page(look, PICTURE, path, max_mb=0.2)
    _, facts = written(path)
    assert path.stat().st_size <= 200_000
    kept = numbers(facts["queries"]["numbers"], "<u4").long()
    rows = (kept // 50).unique()
    assert len(kept) == len(rows) ** 2 > 100
    assert len((rows[1:] - rows[:-1]).unique()) == 1
    step = int(rows[1] - rows[0])
    which = {2: "second", 3: "third"}.get(step, f"{step}th")
    assert facts["queries"]["sentence"] == f"{len(kept)} of 2,500 queries are shown: those of every {which} row and column."
    rows = samples(facts)[int(kept[7]), 0]
    assert rows[0][3:5] == pytest.approx(look.locations[0, kept[7], 0, 0, 0].tolist(), abs=2e-5)
    viz.page(look, PICTURE, path, max_mb=0.2, plane=viz.Plane(torch.rand(2500, 2)))
    assert "evenly spread over their numbers" in written(path)[1]["queries"]["sentence"]
    viz.page(look, PICTURE, path)
    assert written(path)[1]["queries"]["sentence"] == ""


def test_weights_that_are_no_numbers_are_counted(path):
    look = attention()
    look.weights[0, 0, 0, 0] = torch.tensor([float("nan"), float("inf")])
    viz.page(look, PICTURE, path)
    _, facts = written(path)
    assert facts["looks"][0]["unknown"] == 2
    assert len(samples(facts)[0, 0]) == 6


def test_a_missing_package_is_named(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(RuntimeError, match=re.escape(f"mx_driving.viz.page needs Pillow: {pip_install('[demo]')}")):
        viz.page(attention(), PICTURE, path)
