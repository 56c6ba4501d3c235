"""viz.page refuses in one sentence, and writes nothing."""

from __future__ import annotations

import os

import pytest
import torch

from mx_driving import viz

pytest.importorskip("numpy")
pytest.importorskip("PIL")

import numpy as np
from pages import PICTURE, aggregation, attention
from PIL import Image

LOOK, ANCHORS = attention(), aggregation()
NAN = torch.full((4, 2), float("nan"))
REFUSED = [
    ({"looks": 3}, TypeError, "looks must be what recording() gives; got int"),
    ({"looks": []}, ValueError, "looks must hold a call; got none"),
    ({"looks": ["x"]}, TypeError, "looks must hold viz.Look, as recording() gives them; got str in call 1"),
    ({"looks": [[]]}, TypeError, "looks must hold viz.Look, as recording() gives them; got an empty list in call 1"),
    ({"looks": {"a": [LOOK, 3]}}, TypeError, "looks must hold viz.Look, as recording() gives them; got int in a"),
    ({"looks": [LOOK, attention(queries=5)]}, ValueError, "looks must have the same queries on one page; got 4 queries and 5"),
    ({"looks": attention(queries=0)}, ValueError, "looks must have queries and samples; got weights (1, 0, 2, 2, 2) in call"),
    ({"looks": [[LOOK, LOOK]]}, ValueError, "looks must be alike and of attention, one for each of the 1 cameras, where cal"),
    ({"looks": [[LOOK, ANCHORS]], "pictures": [PICTURE] * 2}, ValueError, "looks must be alike and of attention, one for ea"),
    ({"looks": ANCHORS}, ValueError, "pictures must be one for each of the cam=3 cameras of call 1; got 1"),
    ({"pictures": [PICTURE] * 2}, ValueError, "pictures must be one for each camera of a scene, a number that divides bs=1"),
    ({"pictures": []}, ValueError, "pictures must hold a picture for each camera; got none"),
    ({"pictures": None}, TypeError, "pictures must be pictures, one for each camera; got NoneType"),
    ({"pictures": "a.png"}, TypeError, "pictures must be pictures, one for each camera; got str"),
    ({"pictures": {"a": 3}}, TypeError, "pictures, a, must be a torch.Tensor [H, W, 3], [3, H, W] or [H, W], or a Pillow"),
    ({"pictures": {"a": [PICTURE] * 3}}, ValueError, "pictures, a, must hold one picture, or one for each of the 2 levels o"),
    ({"pictures": {"a": []}}, ValueError, "pictures, a, must hold a picture for each level; got none"),
    ({"pictures": torch.rand(4, 5, 6)}, ValueError, "pictures, picture, must have shape (H, W, 3), (3, H, W) or (H, W); got"),
    ({"pictures": torch.rand(0, 6, 3)}, ValueError, "pictures, picture, must have pixels; got 0 x 6"),
    ({"pictures": torch.rand(4, 6, device="meta")}, ValueError, "pictures, picture, must have pixels; got a tensor on"),
    ({"pictures": torch.rand(4, 6).to_sparse()}, ValueError, "pictures, picture, must have the layout torch.strided; got tor"),
    ({"pictures": np.ones((4, 6), "u2")}, TypeError, "pictures, picture, must hold bytes, or floats from 0 to 1; got uint16"),
    ({"pictures": np.array([["a"]])}, TypeError, "pictures must hold bytes, or floats from 0 to 1; got <U1"),
    ({"pictures": Image.new("I", (6, 4))}, TypeError, "pictures, picture, must have a mode of 8 or 16 bits, or floats"),
    ({"plane": viz.Plane(picture=torch.rand(4, 6, device="meta"))}, ValueError, "plane.picture must have pixels; got a tens"),
    ({"pictures": torch.ones(4, 6).long()}, TypeError, "pictures, picture, must hold bytes, or floats from 0 to 1; got int64"),
    ({"path": 3}, TypeError, "path must be a string or a Path; got int"),
    ({"path": "nowhere/looks.html"}, ValueError, "path must be in a folder that exists; got nowhere"),
    ({"path": "."}, ValueError, "path must be a file; got ., a folder"),
    ({"path": "a" * 300}, ValueError, f"path must be a place to write to; got '{'a' * 300}': "),
    ({"path": "a\0b"}, ValueError, r"path must be a place to write to; got 'a\x00b': a name with a zero byte"),
    ({"scene": 1}, ValueError, "scene must be a number from 0 to 0 for call 1; got 1"),
    ({"scene": -1}, ValueError, "scene must be a number from 0 to 0 for call 1; got -1"),
    ({"scene": True}, TypeError, "scene must be an int; got bool"),
    ({"title": None}, TypeError, "title must be a string; got NoneType"),
    ({"max_mb": 0}, ValueError, "max_mb must be a positive number; got 0"),
    ({"max_mb": 0.01}, ValueError, "max_mb must leave room for a query beside 0.0"),
    ({"plane": (2, 2)}, TypeError, "plane must be a viz.Plane; got tuple"),
    ({"plane": viz.Plane((2, 3))}, ValueError, "plane.places must be rows and columns of 4 queries; got (2, 3)"),
    ({"plane": viz.Plane((-2, -2))}, ValueError, "plane.places must be rows and columns of 4 queries; got (-2, -2)"),
    ({"plane": viz.Plane("ab")}, TypeError, "plane.places must be (rows, columns) or a torch.Tensor; got 'ab'"),
    ({"plane": viz.Plane(torch.rand(4, 3))}, ValueError, "plane.places must have shape (num_queries=4, 2) or (num_queries=4"),
    ({"plane": viz.Plane(NAN)}, ValueError, "plane.places must be finite; got [nan, nan] for query 0"),
    ({"plane": viz.Plane(torch.rand(4, 4), extent=(0, 1, 0, 1))}, ValueError, "plane.places must have shape (num_queries=4,"),
    ({"plane": viz.Plane(extent=(1, 0, 0, 1))}, ValueError, "plane.extent must be (x0, x1, y0, y1) in metres, rising; got ("),
    ({"plane": viz.Plane(extent=3)}, ValueError, "plane.extent must be (x0, x1, y0, y1) in metres, rising; got 3"),
    ({"plane": viz.Plane(labels="abcd")}, TypeError, "plane.labels must be strings, one for each query; got 'abcd'"),
    ({"plane": viz.Plane(labels=["a"])}, ValueError, "plane.labels must have 4 entries, one for each query; got 1"),
    ({"plane": viz.Plane(picture=3)}, TypeError, "plane.picture must be a torch.Tensor [H, W, 3]"),
    ({"plane": viz.Plane(seen=[1])}, TypeError, "plane.seen must be a torch.Tensor"),
    ({"plane": viz.Plane(seen=torch.ones(4, 1))}, TypeError, "plane.seen must have dtype bool; got float32"),
    ({"plane": viz.Plane(seen=torch.ones(4).bool())}, ValueError, "plane.seen must have shape (num_queries, cameras); got ("),
    ({"plane": viz.Plane(seen=torch.ones(4, 2).bool())}, ValueError, "plane.seen must have shape (num_queries, cameras=1); "),
    ({"plane": viz.Plane(seen=torch.ones(5, 1).bool())}, ValueError, "plane.seen must have as many rows as call 1 has queri"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "kind", "sentence"), REFUSED, ids=[sentence[:50] for *_, sentence in REFUSED])
def test_refused(tmp_path, monkeypatch, change, kind, sentence):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind) as error:
        viz.page(**{"looks": LOOK, "pictures": PICTURE, "path": "looks.html", **change})
    assert str(error.value).startswith(sentence)
    assert "; got " in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is Linux's")
def test_a_full_disk_is_a_sentence():
    with pytest.raises(ValueError, match="path must be a place to write to; got '/dev/full': No space left on device"):
        viz.page(LOOK, PICTURE, "/dev/full")
