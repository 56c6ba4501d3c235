"""Write a page that shows where queries look: one file that needs no server and fetches nothing."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import html
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._operator import rules
from .._operator.description import OPERATORS
from .._package_files import pip_install, read_text
from . import _pictures, _samples
from ._looks import Look
from ._samples import Plane, PlaneLayout, SampledCall, Samples

CallLooks = Look | Sequence[Look]  # the looks of one call: a single look, or a look for each camera
_NOTHING = 65535  # stands for the location of a sample that reads nothing; 0..65534 stand for -0.5..1.5
_LARGEST = 32767  # stands for the largest weight of a call. Other weights are scaled in proportion.


def page(
    looks: CallLooks | Sequence[CallLooks] | Mapping[str, CallLooks],
    pictures: Any,
    path: str | Path,
    *,
    plane: Plane | None = None,
    scene: int = 0,
    title: str = "Where the model looks",
    max_mb: float = 5.0,
) -> Path:
    """Write one HTML file that shows the samples of a query on all cameras and levels, while a person moves over the queries.

    A browser opens the file without a server or a network. Mouse, touch and arrow keys move the query; heads, levels and small
    weights can be filtered, and a click enlarges a picture.

    Args:
        looks: calls that `recording()` kept, or a mapping of names to calls. The page shows one call at a time. All calls must
            have the same queries; `looks.of("decoder")` selects layers. A call may be a sequence of looks, one for each camera.
            Successive looks of a layer that samples its cameras in turn, as `SpatialCrossAttention` does, become one call.
            A sequence of looks may have several scenes: the looks of all cameras in the first scene, then in the second.
        pictures: the pictures of a scene's cameras, in order, or a mapping of names to pictures: [H, W, 3], [3, H, W] or
            [H, W], 0..1 or bytes, as tensors or NumPy arrays in RGB (OpenCV's are BGR: `picture[..., ::-1]`), or Pillow
            images. A camera may have a list of pictures, one for each level.
        path: the file to write.
        plane: positions of the queries; None lays them out in rows.
        scene: index of the scene in the batch. The batch of an attention operator may consist of scenes, of cameras, or of
            both: all cameras of the first scene, then all cameras of the second.
        title: text above the page.
        max_mb: largest size of the file, in 10**6 bytes. If not all queries fit, the page shows evenly chosen queries, and
            says so.

    *Outside*: a sample that reads nothing is not drawn. The page counts such samples and their weight.

    Returns:
        The path.

    Raises:
        TypeError, ValueError: an argument is not as described above.
        RuntimeError: Pillow is not installed.

    >>> import tempfile, torch, mx_driving
    >>> attention = mx_driving.nn.MultiScaleDeformableAttention(16, num_levels=1)
    >>> levels = mx_driving.nn.flatten_levels([torch.rand(1, 16, 6, 8)])
    >>> with mx_driving.viz.recording() as looks:
    ...     out = attention(torch.rand(1, 12, 16), torch.rand(1, 12, 1, 2), *levels)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     mx_driving.viz.page(looks, torch.rand(48, 64, 3), f"{folder}/looks.html").name
    'looks.html'
    """
    if not isinstance(path, (str, Path)):
        rules.fail(TypeError, "path", "be a string or a Path", type(path).__name__)
    path = Path(path)
    with _writing(path):
        if not path.parent.is_dir():
            rules.fail(ValueError, "path", "be in a folder that exists", path)
        if path.is_dir():
            rules.fail(ValueError, "path", "be a file", f"{path}, a folder")
        if "\0" in str(path):
            raise OSError("a name with a zero byte")
    if type(scene) is not int:
        rules.fail(TypeError, "scene", "be an int", type(scene).__name__)
    if not isinstance(title, str):
        rules.fail(TypeError, "title", "be a string", type(title).__name__)
    if not (isinstance(max_mb, (int, float)) and 0 < max_mb < math.inf):
        rules.fail(ValueError, "max_mb", "be a positive number", repr(max_mb))
    try:
        import numpy  # noqa: F401
        import PIL  # noqa: F401
    except ImportError:
        raise RuntimeError(f"mx_driving.viz.page needs Pillow: {pip_install('[demo]')}") from None
    plane = Plane() if plane is None else plane
    if not isinstance(plane, Plane):
        rules.fail(TypeError, "plane", "be a viz.Plane", type(plane).__name__)
    cameras = _pictures.make_cameras(pictures)
    calls = _samples.make_calls(looks, len(cameras), scene)
    seen = _samples.check(calls, plane.seen)
    for camera, call in itertools.product(cameras, calls):
        if camera.apart and len(camera.pictures) != call.sizes[1]:
            rule = f"hold one picture, or one for each of the {call.sizes[1]} levels of {call.name}"
            rules.fail(ValueError, camera.argument, rule, len(camera.pictures))
    laid = _samples.lay_out(plane, calls[0].num_queries(seen))
    facts = _describe_pictures(title, cameras, plane)

    # Show as many queries as max_mb leaves room for.
    bare = len(_fill_template(facts))
    most = int((max_mb * 1e6 - bare) / _estimate_query_size(calls, laid, plane, seen))
    while most >= 1:
        kept, sentence = _samples.choose_queries(laid, most)
        facts["queries"] = {
            "total": len(laid.places),
            "numbers": _pack(kept, "<u4"),
            "places": _pack(laid.places[kept].float(), "<f4"),
            "boxes": laid.places.shape[1] == 4,
            "grid": None if laid.grid is None else _pack(laid.grid[kept], "<u2"),
            "labels": None if plane.labels is None else [plane.labels[i] for i in kept.tolist()],
            "sentence": sentence,
        }
        file_bytes = _fill_template({**facts, "looks": [_describe_call(call, seen, kept) for call in calls]})
        if len(file_bytes) <= max_mb * 1e6:
            with _writing(path):
                path.write_bytes(file_bytes)
            return path
        most = int(min(most, len(kept)) * 0.97 * (max_mb * 1e6 - bare) / (len(file_bytes) - bare))
    rules.fail(ValueError, "max_mb", f"leave room for a query beside {bare / 1e6:.2f} MB of page and pictures", max_mb)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Convert an error of the operating system to an error about `path`."""
    try:
        yield
    except OSError as error:
        rules.fail(ValueError, "path", "be a place to write to", f"{str(path)!r}: {error.strerror or error}")


def _describe_pictures(title: str, cameras: Sequence[_pictures.Camera], plane: Plane) -> dict[str, Any]:
    """Return the facts of the page that do not depend on its queries: cameras and the plane, with their pictures."""
    below: dict[str, Any] = {"picture": None, "extent": None}
    if plane.extent is not None:
        x0, x1, y0, y1 = map(float, plane.extent)
        below |= {"extent": [x0, x1, y0, y1], "width": y1 - y0, "height": x1 - x0}
    if plane.picture is not None:
        picture = _pictures.to_image("plane.picture", plane.picture)
        if plane.extent is not None:  # seen from above: the first axis is up, the second axis left
            picture = picture.rotate(180)
        below = {"width": picture.width, "height": picture.height, **below, "picture": _pictures.encode(picture)}
    described = []
    for camera in cameras:
        (width, height), uris = camera.pictures[0].size, [_pictures.encode(picture) for picture in camera.pictures]
        described.append({"name": camera.name, "width": width, "height": height, "pictures": uris, "apart": camera.apart})
    return {"title": title, "cameras": described, "plane": below}


def _estimate_query_size(calls: Sequence[SampledCall], laid: PlaneLayout, plane: Plane, seen: Tensor | None) -> float:
    """Return the mean number of bytes that a query takes on the page, in base64."""
    size = 4.0 * len(calls) + 4 + 4 * laid.places.shape[1] + (0 if laid.grid is None else 4)
    for call in calls:
        for samples in call.samples(seen):
            block_size = 2 + 2 * samples.locations.shape[1:].numel() + 2 * samples.weights.shape[1:].numel()
            size += len(samples.queries) * block_size / len(laid.places)
    labels = 0 if plane.labels is None else sum(map(len, plane.labels)) / len(plane.labels) + 3
    return size * 4 / 3 + labels


def _describe_call(call: SampledCall, seen: Tensor | None, kept: Tensor) -> dict[str, Any]:
    """Return a call as blocks of samples, sorted by query: a block for each pair of a query and a camera that it reads."""
    numbers, cameras, locations, weights = [], [], [], []
    for camera, samples in enumerate(call.samples(seen)):
        shown = torch.isin(samples.queries, kept)
        samples = Samples(*(t[shown] for t in samples))
        numbers.append(torch.searchsorted(kept, samples.queries))
        cameras.append(torch.full_like(samples.queries, camera))
        steps = ((samples.locations + 0.5) * 32767).round()
        locations.append(steps.masked_fill(samples.locations.isnan().any(-1, keepdim=True), _NOTHING).int())
        weights.append(samples.weights)
    number, camera, location, weight = (torch.cat(parts) for parts in (numbers, cameras, locations, weights))
    order = (number * call.cameras + camera).argsort()
    unknown = int((~weight.isfinite()).sum())
    weight = weight.nan_to_num(0, 0, 0)
    largest = float(weight.abs().max()) if weight.numel() else 0.0
    steps = (weight[order] / (largest or 1.0) * _LARGEST).round()
    is_aggregation = OPERATORS[call.operator].kind == "aggregation"
    shapes = call.looks[0].shapes.tolist() if is_aggregation else [look.shapes.tolist() for look, _ in call.entries]
    return {
        "name": call.name,
        "operator": call.operator,
        "grouped": is_aggregation,
        **dict(zip(("heads", "levels", "points"), call.sizes, strict=True)),
        "shared": list(location.shape[1:3]),
        "shapes": shapes,  # (H, W) of each camera's levels
        "largest": largest,
        "unknown": unknown,
        "ends": _pack(torch.bincount(number, minlength=len(kept)).cumsum(0), "<u4"),
        "camera": _pack(camera[order], "<u2"),
        "locations": _pack(location[order], "<u2"),
        "weights": _pack(steps, "<i2"),
    }


def _pack(numbers: Tensor, kind: str) -> str:
    return base64.b64encode(numbers.numpy().astype(kind).tobytes()).decode()


def _fill_template(facts: dict[str, Any]) -> bytes:
    """Return the template with these facts. Its security policy lets a browser run only our script, and fetch nothing."""
    frame, style, *scripts = (read_text(f"viz/_template/{name}") for name in ("page.html", "page.css", "samples.js", "page.js"))
    # Escape <, > and &: with them a text could end the script element of the data. JSON in ASCII is the same in every encoding.
    data = json.dumps(facts, separators=(",", ":")).replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    fills = {"title": html.escape(facts["title"]), "data": data, "style": style, "script": "".join(scripts)}
    for name in ("style", "script"):
        digest = hashlib.sha256(fills[name].encode()).digest()
        fills[f"{name} hash"] = "sha256-" + base64.b64encode(digest).decode()
    return re.sub(r"\{\{(.+?)\}\}", lambda match: fills[match[1]], frame).encode("utf-8", "xmlcharrefreplace")
