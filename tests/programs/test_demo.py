"""The demonstration: the view matches the map, the descent descends, a bad rig file is named, the geometry closes."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")

from pages import samples, written  # noqa: E402

from mx_driving._installing import pip_install  # noqa: E402
from mx_driving.cli import demo as demos  # noqa: E402
from mx_driving.demo import lift, scene  # noqa: E402
from mx_driving.demo.rig import Camera, Extent, RigError, load_rig, looking, project, surround  # noqa: E402

EXAMPLE = Path(__file__).parents[2] / "examples" / "rig.json"
INTRINSICS = [[20.0, 0, 15.5], [0, 20.0, 11.5], [0, 0, 1]]
POSE = looking(0, 0, 5, 0, 60).tolist()


def camera(**changes):
    return {"name": "front", "image": "a.png", "intrinsics": INTRINSICS, "camera_to_ego": POSE, **changes}


def without(key):
    return {k: v for k, v in camera().items() if k != key}


def rows(matrix, row, column, number):
    return [[number if (i, j) == (row, column) else v for j, v in enumerate(r)] for i, r in enumerate(matrix)]


@pytest.fixture
def folder(tmp_path):
    Image.new("RGB", (32, 24), (200, 80, 40)).save(tmp_path / "a.png")
    (tmp_path / "text.png").write_text("no picture")
    return tmp_path


def write(folder, data):
    path = folder / "rig.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


MIRROR = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, -1, 0], [0, 0, 0, 1]]
FRONT = "camera 'front': "
NAME = "cameras[0]: name must be a printable string that is not empty; got "
METRES = "bev: {} must be two rising numbers of metres, at most 1e6 from the car; got "
BAD = [
    ("{", "rig.json must be JSON; got Expecting property name"),
    ([1], "rig.json must hold an object with a list of cameras; got [1]"),
    ({}, "cameras must be a list of at least one camera; got null"),
    ({"cameras": []}, "cameras must be a list of at least one camera; got []"),
    ({"cameras": [3]}, "cameras[0] must be an object; got 3"),
    ({"cameras": [without("image")]}, FRONT[:-2] + " must have 'image'; got 'name', 'intrinsics', 'camera_to_ego'"),
    ({"cameras": [without("intrinsics")]}, FRONT[:-2] + " must have 'intrinsics'; got"),
    ({"cameras": [camera(image="b.png")]}, FRONT + "image must exist; got"),
    ({"cameras": [camera(image="b" * 300)]}, FRONT + "image must exist; got"),
    ({"cameras": [camera(image=7)]}, FRONT + "image must be a path; got 7"),
    ({"cameras": [camera(image="text.png")]}, FRONT + "image must be a picture; got"),
    ({"cameras": [camera(intrinsics=[[1, 2], [3, 4]])]}, FRONT + "intrinsics must have shape (3, 3); got (2, 2)"),
    ({"cameras": [camera(intrinsics=[[1, 2], [3]])]}, FRONT + "intrinsics must be 3 rows of 3 numbers; got [[1, 2], [3]]"),
    ({"cameras": [camera(intrinsics="eye")]}, FRONT + 'intrinsics must be 3 rows of 3 numbers; got "eye"'),
    ({"cameras": [camera(intrinsics=rows(INTRINSICS, 0, 0, 0))]}, FRONT + "intrinsics must be invertible; got a singular"),
    ({"cameras": [camera(intrinsics=rows(INTRINSICS, 0, 0, float("nan")))]}, FRONT + "intrinsics must hold finite numbers"),
    ({"cameras": [camera(intrinsics=rows(INTRINSICS, 2, 0, 1))]}, FRONT + "intrinsics must end in the row [0, 0, 1]; got"),
    ({"cameras": [camera(intrinsics=rows(INTRINSICS, 0, 0, -20))]}, FRONT + "intrinsics must have positive focal lengths"),
    ({"cameras": [camera(camera_to_ego=POSE[:3])]}, FRONT + "camera_to_ego must have shape (4, 4); got (3, 4)"),
    ({"cameras": [camera(camera_to_ego=[[0] * 4] * 4)]}, FRONT + "camera_to_ego must be invertible; got a singular matrix"),
    ({"cameras": [camera(camera_to_ego=rows(POSE, 3, 0, 1))]}, FRONT + "camera_to_ego must end in the row [0, 0, 0, 1]"),
    ({"cameras": [camera(camera_to_ego=rows(POSE, 1, 0, -2))]}, FRONT + "camera_to_ego must hold a rotation (orthogonal"),
    ({"cameras": [camera(camera_to_ego=MIRROR)]}, FRONT + "camera_to_ego must hold a rotation (determinant 1); got"),
    ({"cameras": [camera()], "bev": 3}, "bev must be an object; got 3"),
    ({"cameras": [camera()], "bev": {"x": [5, 5]}}, METRES.format("x") + "[5, 5]"),
    ({"cameras": [camera()], "bev": {"y": "wide"}}, METRES.format("y") + '"wide"'),
    ({"cameras": [camera()], "bev": {"y": [0, True]}}, METRES.format("y") + "[0, true]"),
    ({"cameras": [camera()], "bev": {"y": [0, float("inf")]}}, METRES.format("y") + "[0, Infinity]"),
    ({"cameras": [camera()], "bev": {"y": [float("nan"), 1]}}, METRES.format("y") + "[NaN, 1]"),
    ({"cameras": [camera()], "bev": {"x": [0, 10**400]}}, METRES.format("x") + "[0, 1000"),
    ({"cameras": [camera()], "bev": {"x": None}}, METRES.format("x") + "null"),
    ({"cameras": [camera()], "bev": None}, "bev must be an object; got null"),
    ({"cameras": [camera()], "bev": {"cells": True}}, "bev: cells must be a whole number from 8 to 800; got true"),
    ({"cameras": [camera(name=None)]}, NAME + "null"),
    ({"cameras": [camera(name=7)]}, NAME + "7"),
    ({"cameras": [camera(name="")]}, NAME + '""'),
    ({"cameras": [camera(name=" ")]}, NAME + '" "'),
    ({"cameras": [camera(name="a\nb")]}, NAME + '"a'),
    ({"cameras": [camera(name="\ud800")]}, NAME + '"'),
    ({"cameras": [camera(), camera()]}, 'cameras[1]: name must be its own; got "front", cameras[0]\'s'),
    ({"cameras": [camera(name="camera 1"), without("name")]}, 'cameras[1]: name must be its own; got "camera 1"'),
    ('{"bev": {}, "bev": {}}', "rig.json must have each key of an object once; got 'bev' 2 times"),
    ("[" * 100_000, "rig.json must be JSON; got"),
    ({"cameras": [camera(intrinsics=rows(INTRINSICS, 0, 1, True))]}, FRONT + "intrinsics must be 3 rows of 3 numbers; got"),
    ({"cameras": [camera(intrinsics=rows(INTRINSICS, 0, 1, None))]}, FRONT + "intrinsics must be 3 rows of 3 numbers; got"),
    ({"cameras": [camera(camera_to_ego=rows(POSE, 0, 3, 10**400))]}, FRONT + "camera_to_ego must be 4 rows of 4 numbers"),
    ({"cameras": [camera()], "bev": {"cells": 2.5}}, "bev: cells must be a whole number from 8 to 800; got 2.5"),
]


@pytest.mark.parametrize(("data", "message"), BAD, ids=[message[:60] for _, message in BAD])
def test_a_bad_rig_is_named(folder, data, message):
    with pytest.raises(RigError) as error:
        load_rig(write(folder, data))
    assert str(error.value).startswith(message)


def test_a_missing_rig_is_named(tmp_path):
    with pytest.raises(RigError, match=r"the rig file must exist; got .*none\.json"):
        load_rig(tmp_path / "none.json")
    with pytest.raises(RigError, match=r"the rig file must exist; got .*aaa"):
        load_rig(tmp_path / ("a" * 300))


def test_a_rig_that_sees_no_ground_is_named(folder):
    away = looking(0, 0, 5, 0, -60).tolist()
    with pytest.raises(RigError, match="the cameras must see some ground inside the bev extent; got none of"):
        demos.run_demo(folder / "x.png", write(folder, {"cameras": [camera(camera_to_ego=away)], "bev": {"cells": 16}}))


def test_the_street_is_lifted_and_recovered(tmp_path):
    result = demos.run_demo(tmp_path / "demo.png", width=480, cells=96, steps=60, page=tmp_path / "looks.html")
    assert result.ok
    assert result.psnr is not None
    assert result.psnr > demos.FLOOR
    assert result.seen > 0.7
    assert result.losses[-1] * 1000 < result.losses[0]
    assert 100_000 < result.out.stat().st_size < 1_000_000
    with Image.open(result.out) as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 800

    assert (tmp_path / "looks.html").stat().st_size < 5_000_000
    _, facts = written(tmp_path / "looks.html")
    assert [camera["name"] for camera in facts["cameras"]] == [camera.name for camera in surround()]
    assert len(samples(facts)) > 96 * 96 * 0.7  # a cell that is seen looks at one camera or more


def test_the_example_rig_runs(mx, tmp_path):
    pytest.importorskip("sklearn")
    out = tmp_path / "rig.png"
    code, shown, said = mx("demo", "--rig", EXAMPLE, "--out", out)
    assert (code, said) == (0, "")
    assert "all is well" in shown
    assert out.stat().st_size > 100_000


def test_the_page_is_written_and_its_place_looked_at_first(mx, folder, monkeypatch):
    rig = write(folder, {"cameras": [camera()], "bev": {"cells": 16}})
    _, shown, _ = mx("demo", "--rig", rig, "--out", folder / "x.png", "--page", folder / "looks.html")
    assert f"the page is in {folder / 'looks.html'}" in shown.replace("\n", "")
    assert written(folder / "looks.html")[1]["queries"]["total"] == 256
    monkeypatch.setattr(demos, "run_demo", None)
    code, _, said = mx("demo", "--out", folder / "y.png", "--page", folder / "none" / "looks.html")
    assert code == 1
    assert said.startswith("mx-driving: the folder of --page must exist; got ")


def test_a_failure_is_a_sentence_and_an_exit_status(mx, tmp_path):
    code, _, said = mx("demo", "--rig", tmp_path / "none.json", "--out", tmp_path / "x.png")
    assert (code, said) == (1, f"mx-driving: the rig file must exist; got {tmp_path / 'none.json'}\n")


@pytest.mark.parametrize(("ending", "kind"), [("jpg", "JPEG"), ("webp", "WEBP"), ("TIF", "TIFF")])
def test_the_ending_says_the_format(folder, ending, kind):
    """This holds with a camera's name that matplotlib would take for a wrong formula."""
    rig = write(folder, {"cameras": [camera(name=r"$\wrong$")], "bev": {"x": [0, 10], "y": [-5, 5], "cells": 16}})
    demos.run_demo(folder / f"x.{ending}", rig, steps=2)
    with Image.open(folder / f"x.{ending}") as picture:
        assert picture.format == kind
        assert min(picture.size) > 800


@pytest.mark.parametrize(
    ("psnr", "last", "ok"), [(30.0, 1e-6, True), (None, 1e-6, True), (10.0, 1e-6, False), (30.0, 0.1, False)]
)
def test_a_bad_view_is_not_ok(psnr, last, ok):
    assert demos.DemoResult(Path("x.png"), psnr, 60.0, [0.2, last], 0.9, 1.0).ok is ok


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=re.escape(f"must have matplotlib installed ({pip_install('[demo]')}); got")):
        demos.run_demo(tmp_path / "x.png")


def test_wide_photographs_are_scaled_with_their_intrinsics(folder):
    Image.new("RGB", (1600, 900)).save(folder / "a.png")
    loaded = load_rig(write(folder, {"cameras": [camera()]})).cameras[0]
    full = Camera("full", (900, 1600), torch.tensor(INTRINSICS, dtype=torch.float64), loaded.camera_to_ego)
    points = Extent().ground()
    assert loaded.size == (450, 800)
    torch.testing.assert_close(project(loaded, points), project(full, points), equal_nan=True)


@pytest.mark.parametrize("index", range(6))
def test_a_ground_point_has_its_colour_in_the_image(index):
    """Project points of the painted ground into a rendered image: the pixel shows the paint."""
    ground = scene.street()
    view = scene.photograph(surround(450, 800)[index], ground)
    assert view.image is not None
    points = Extent((-12, 12), (-12, 12), 120).ground()[:, 0]
    location, depth = project(view, points)
    inside = ((location > 0.01) & (location < 0.99)).all(-1) & (depth > 0) & ~scene.hidden(view.position, points)
    pixel = (location[inside] * torch.tensor([800, 450])).long()
    near = ground_colours(ground, points[inside])
    error = (view.image[pixel[:, 1], pixel[:, 0]] - near).abs().amax(-1)
    assert int(inside.sum()) > 500
    # edges of the paint fall inside a pixel; on the rest of the ground the colour is the paint's
    assert float((error < 0.06).float().mean()) > 0.8


def ground_colours(ground, points):
    scale = ground.shape[0] / (2 * scene.HALF)
    at = ((points[:, :2] + scene.HALF) * scale).long()
    return ground[at[:, 0], at[:, 1]].float() / 255


def test_the_view_sits_on_the_map():
    """Moved by a quarter of a cell in any direction, the true map fits worse: no half pixel is lost on the way."""
    ground = scene.street()
    cameras = tuple(scene.photograph(view, ground) for view in surround(450, 800))
    plan = lift.build(cameras, Extent(cells=100), scene.hidden)
    bev = plan(lift.pyramid(cameras))

    def fit(dx, dy):
        moved = Extent((-25 + dx, 25 + dx), (-25 + dy, 25 + dy), 100)
        return lift.psnr(bev, scene.true_map(ground, moved, 4), plan.seen)

    assert fit(0, 0) > max(fit(dx, dy) for dx, dy in ((0.125, 0), (-0.125, 0), (0, 0.125), (0, -0.125))) + 0.5


def test_weights_share_each_seen_point_out(folder):
    cameras = load_rig(write(folder, {"cameras": [camera(), camera(name="again")]})).cameras
    plan = lift.build(cameras, Extent((0, 10), (-5, 5), 20))
    total = plan.weight.sum((0, 2, 3, 4, 5))
    torch.testing.assert_close(total[plan.seen], torch.ones(int(plan.seen.sum())))
    assert int(plan.cameras.max()) == 2
    colour = plan(lift.pyramid(cameras))[plan.seen]
    torch.testing.assert_close(colour, torch.tensor([200, 80, 40]).div(255).expand_as(colour), atol=1e-5, rtol=0)


def test_a_box_hides_what_is_behind_it():
    box = scene.Box(10, 0, 90, (4, 2, 2), (0, 0, 0))
    eye = torch.tensor([0.0, 0.0, 1.5], dtype=torch.float64)
    points = torch.tensor([[8.0, 0, 0], [10, 0, 0], [15, 0, 0], [15, 8, 0], [-5, 0, 0]], dtype=torch.float64)
    assert box.hides(eye, points).tolist() == [False, True, True, False, False]
