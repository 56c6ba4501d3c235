"""examples/surround_view: the view matches the map, the descent descends, a bad rig file is named, the geometry closes."""

import json
import sys
from pathlib import Path

import pytest
import torch

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("matplotlib")
FOLDER = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(FOLDER))

from pages import samples, written  # noqa: E402
from surround_view import lift, main, scene  # noqa: E402
from surround_view.rig import Extent, looking, surround  # noqa: E402

INTRINSICS = [[20.0, 0, 15.5], [0, 20.0, 11.5], [0, 0, 1]]
POSE = looking(0, 0, 5, 0, 60).tolist()
MIRROR = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, -1, 0], [0, 0, 0, 1]]


def camera(**changes):
    return {"name": "front", "image": "a.png", "intrinsics": INTRINSICS, "camera_to_ego": POSE, **changes}


@pytest.fixture
def folder(tmp_path):
    Image.new("RGB", (32, 24), (200, 80, 40)).save(tmp_path / "a.png")
    return tmp_path


def write(folder, data):
    path = folder / "rig.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


BAD = [
    ("{", "rig.json must be a rig file"),
    ([1], "rig.json must be a rig file"),
    ({"cameras": [3]}, "rig.json must be a rig file"),
    ({"cameras": []}, "cameras must be a list of at least one camera; got none"),
    ({"cameras": [{"name": "front"}]}, "rig.json must be a rig file"),
    ({"cameras": [camera(image="b.png")]}, "rig.json must be a rig file"),
    ({"cameras": [camera(intrinsics=[[1, 2], [3, 4]])]}, "'front': intrinsics must be 3 rows of 3 finite numbers"),
    ({"cameras": [camera(camera_to_ego=POSE[:3])]}, "'front': camera_to_ego must be 4 rows of 4 finite numbers"),
    ({"cameras": [camera(camera_to_ego=MIRROR)]}, "'front': camera_to_ego must hold a rotation"),
    ({"cameras": [camera()], "bev": {"cells": 2}}, "bev: cells must be a whole number from 8 to 800; got 2"),
]


@pytest.mark.parametrize(("data", "message"), BAD)
def test_a_bad_rig_is_named(folder, capsys, data, message):
    with pytest.raises(SystemExit) as stop:
        main.main(["--rig", str(write(folder, data)), "--out", str(folder / "x.png")])
    said = capsys.readouterr().err
    assert (stop.value.code, said.startswith("surround_view: "), said.count("\n")) == (1, True, 1)
    assert message in said


def test_a_rig_that_sees_no_ground_is_named(folder):
    away = looking(0, 0, 5, 0, -60).tolist()
    with pytest.raises(ValueError, match="the cameras must see some ground inside the bev extent; got none of"):
        main.run(folder / "x.png", write(folder, {"cameras": [camera(camera_to_ego=away)], "bev": {"cells": 16}}))


def test_the_street_is_lifted_and_recovered(tmp_path):
    out = tmp_path / "demo.png"
    result = main.run(out, page=tmp_path / "looks.html", width=400, cells=64)
    assert result.ok
    assert result.psnr is not None
    assert result.psnr > main.FLOOR
    assert result.seen > 0.7
    assert 100_000 < out.stat().st_size < 1_000_000
    with Image.open(out) as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 800

    assert (tmp_path / "looks.html").stat().st_size < 5_000_000
    _, facts = written(tmp_path / "looks.html")
    assert [camera["name"] for camera in facts["cameras"]] == [camera.name for camera in surround()]
    assert len(samples(facts)) > 64 * 64 * 0.7  # a visible cell reads at least one camera


def test_the_example_rig_runs(capsys, tmp_path):
    """Use larger cells, which take less time."""
    pytest.importorskip("sklearn")
    rig = json.loads((FOLDER / "surround_view" / "rig.json").read_text())
    rig["bev"]["cells"] = 60
    with pytest.raises(SystemExit) as stop:
        main.main(["--rig", str(write(tmp_path, rig)), "--out", str(tmp_path / "rig.jpg")])
    assert stop.value.code == 0
    assert f"the picture is in {tmp_path / 'rig.jpg'}" in capsys.readouterr().out
    with Image.open(tmp_path / "rig.jpg") as picture:
        assert picture.format == "JPEG"


@pytest.fixture(scope="module")
def ground():
    return scene.street()


def test_the_view_sits_on_the_map(ground):
    """The true map fits worse if it is moved by a quarter of a cell: no step of the way shifts by half a pixel."""
    cameras = tuple(scene.photograph(view, ground) for view in surround(450, 800))
    plan = lift.build(cameras, Extent(cells=100), scene.hidden)
    bev = plan(lift.pyramid(cameras))

    def fit(dx, dy):
        moved = Extent((-25 + dx, 25 + dx), (-25 + dy, 25 + dy), 100)
        return lift.psnr(bev, scene.true_map(ground, moved, 4), plan.seen)

    assert fit(0, 0) > max(fit(dx, dy) for dx, dy in ((0.125, 0), (-0.125, 0), (0, 0.125), (0, -0.125))) + 0.5


def test_a_camera_in_a_box_sees_none_of_its_sides(ground):
    """Without a side to draw, the picture is that of the street without the box."""
    camera = surround(18, 32)[0]
    box = scene.Box(*camera.position[:2].tolist(), 0, (1.0, 1.0, 9.0), (255, 0, 0))
    pictures = [scene.photograph(camera, ground, boxes).image for boxes in ([box], [])]
    assert torch.equal(*pictures)
