"""examples/train_bev.py: geometry, resume, several processes. Tests run a few steps; docs/training.md has the results."""

import argparse
import contextlib
import csv
import functools
import os
import pathlib
import sys
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from PIL import Image

pytest.importorskip("matplotlib")

from pages import samples, written
from programs import example, python

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("train_bev")]  # so that scenes are rendered once
FILE = pathlib.Path(__file__).parents[2] / "examples" / "train_bev.py"


sys.path.insert(0, str(FILE.parent))
train_bev = example("train_bev")
TINY = {"steps": 4, "batch": 2, "scenes": 4, "held_out": 2, "cells": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of all tests, so that scenes are rendered once."""
    return tmp_path_factory.mktemp("runs")


def run(folder: pathlib.Path, name: str, transform: str = "aggregation", **more) -> list[float]:
    """Return the losses of some steps. Draw pictures, which take half of the time, only in a run named `whole...`."""
    defaults = {"resume": False, "stop": 0, "save": 2, "rate": 2e-3, "transform": transform, "out": folder / name, "page": None}
    with contextlib.ExitStack() as patches:
        for function in () if name.startswith("whole") else ("draw", "draw_looks"):
            patches.enter_context(mock.patch.object(train_bev, function))
        train_bev.train(argparse.Namespace(**{**TINY, **defaults, **more}))
    return curve(folder / name)


def curve(out: pathlib.Path) -> list[float]:
    with (out / "losses.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


@pytest.mark.parametrize("transform", ["aggregation", "multi_scale", "geometric"])
def test_learns_and_resumes_on_the_same_curve(folder, transform):
    page = folder / f"{transform}.html"
    whole = run(folder, f"whole-{transform}", transform, page=page)
    assert len(whole) == 4
    for picture in ("prediction.png", "looks.png"):
        with Image.open(folder / f"whole-{transform}" / picture) as shown:
            colours = shown.convert("RGB").getcolors(1 << 20)
        assert min(shown.size) > 100
        assert colours is not None
        assert len(colours) > 100  # not blank
    with Image.open(folder / f"whole-{transform}" / "prediction.png") as shown:
        assert shown.height == int(90 * 2.9) * TINY["held_out"]  # a row for each scene, and none that is empty
    looks = written(page)[1]
    assert len(looks["cameras"]) == 6
    assert {query for query, _ in samples(looks)} <= set(range(144))
    assert 50 < len(samples(looks)) < 144 * 3  # few cells are seen by three cameras
    assert run(folder, f"part-{transform}", transform, stop=2) == whole[:2]
    assert run(folder, f"part-{transform}", transform, resume=True) == whole


def test_lift_learns_depths_and_resumes_on_the_same_curve(folder):
    whole = run(folder, "whole-lift", "lift")
    assert run(folder, "part-lift", "lift", stop=2) == whole[:2]
    assert run(folder, "part-lift", "lift", resume=True) == whole
    assert not (folder / "whole-lift" / "looks.png").exists()
    model = train_bev.Network("lift", TINY["cells"])
    model(torch.rand(1, 6, 3, *train_bev.SIZE)).sum().backward()
    assert model.lift.likely.weight.grad.any()


def test_two_processes_follow_the_curve_of_one(folder):
    alone = run(folder, "alone", "multi_scale")
    sizes = [text for name, value in TINY.items() for text in ("--" + name.replace("_", "-"), str(value))]
    options = ["--transform", "multi_scale", "--out", folder / "two", "--save", "2", *sizes]
    # The variables that torchrun sets.
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29713"}

    def train(rank: int) -> None:
        python(FILE, *options, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})

    with ThreadPoolExecutor() as pool:
        list(pool.map(train, range(2)))
    torch.testing.assert_close(torch.tensor(curve(folder / "two")), torch.tensor(alone), rtol=1e-5, atol=0)


@pytest.fixture
def refused(refusal, monkeypatch, tmp_path):
    monkeypatch.setattr(train_bev, "render", lambda *args: pytest.fail("the work was begun"))
    return functools.partial(refusal, train_bev, "--out", tmp_path / "runs/bev")


def test_a_wrong_folder_or_count_is_refused_first(refused, tmp_path):
    (tmp_path / "file").write_text("")
    assert "--out must be a folder; got" in refused("--out", tmp_path / "file")
    assert "the folder of --page must exist; got none" in refused("--page", "none/looks.html")
    assert "--scenes must be at least --batch=4; got 2" in refused("--scenes", 2)
    page = ("--page", tmp_path / "looks.html", "--transform", "lift")
    assert "--transform must be one that looks at places of pictures, for --page; got lift" in refused(*page)
