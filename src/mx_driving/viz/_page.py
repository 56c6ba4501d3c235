"""A page that shows where queries look: one file, without a server and without anything to fetch."""

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
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._installing import pip_install
from .._operator import rules
from .._operator.description import OPERATORS
from . import _pictures, _plane, _samples
from ._looks import Look
from ._plane import Plane, PlaneLayout
from ._samples import SampledCall, Samples

CallLooks = Look | Sequence[Look]  # a call, or a call for each camera
_NOTHING = 65535  # a location that reads nothing; others are -0.5 to 1.5 in 65534 steps
_LARGEST = 32767  # stands for the largest weight of a call; other weights are scaled in proportion


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
        looks: calls that `recording()` kept, or a mapping of names to calls: the page shows one at a time. All have the same
            queries: `looks.of("decoder")` selects layers. A call may be a sequence of looks, one for each camera; successive
            looks of a layer that samples its cameras in turn, as `SpatialCrossAttention` does, become such a call.
        pictures: one for each camera of a scene, in order, or a mapping of names to pictures: [H, W, 3], [3, H, W] or [H, W],
            0..1 or bytes, as tensors or NumPy arrays in RGB (OpenCV's are BGR: `picture[..., ::-1]`), or Pillow images.
            Instead of a picture, a camera may have a list of pictures, one for each level.
        path: the file to write.
        plane: where the queries lie; None lays them out in rows.
        scene: which scene of a batch is shown. The batch of an attention operator may be scenes, cameras, or both, the
            cameras of the first scene first.
        title: above the page.
        max_mb: how large the file may become, in 10**6 bytes. Where queries do not fit, evenly chosen ones are shown, and the
            page says so.

    *Outside*: a sample that reads nothing is not drawn; the page counts such samples and their weight.

    Returns:
        The path.

    Raises:
        TypeError, ValueError: an argument is not as above; the sentence says which one and what it must be.
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
    path = _checked(path, scene, title, max_mb)
    _need_pillow()
    plane = Plane() if plane is None else plane
    if not isinstance(plane, Plane):
        rules.fail(TypeError, "plane", "be a viz.Plane", type(plane).__name__)
    seen, cameras = _plane.check_seen(plane.seen), _pictures.cameras(pictures)
    calls = _calls(looks, len(cameras), scene)
    _samples.check(calls, seen)
    _check_levels(calls, cameras)
    laid = _plane.layout(plane, calls[0].num_queries(seen))
    facts = {"title": title, "cameras": [_camera(c) for c in cameras], "plane": _picture_of(plane)}
    with _writing(path):
        path.write_bytes(_fitting(facts, calls, laid, plane, seen, max_mb))
    return path


def _checked(path: Any, scene: Any, title: Any, max_mb: Any) -> Path:
    """Check the simple arguments. Return the path."""
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
    return path


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Word an error of the operating system as an error of `path`."""
    try:
        yield
    except OSError as error:
        rules.fail(ValueError, "path", "be a place to write to", f"{str(path)!r}: {error.strerror or error}")


def _need_pillow() -> None:
    try:
        import numpy  # noqa: F401
        import PIL  # noqa: F401
    except ImportError:
        raise RuntimeError(f"mx_driving.viz.page needs Pillow: {pip_install('[demo]')}") from None


def _calls(looks: Any, cameras: int, scene: int) -> list[SampledCall]:
    if isinstance(looks, Look):
        looks = [looks]
    if not isinstance(looks, (Mapping, Sequence)) or isinstance(looks, str):
        rules.fail(TypeError, "looks", "be what recording() gives", type(looks).__name__)
    if isinstance(looks, Mapping):
        calls = [SampledCall(str(name), _looks_of(str(name), entry), cameras, scene) for name, entry in looks.items()]
    else:
        calls = [SampledCall(f"call {i}", _looks_of(f"call {i}", entry), cameras, scene) for i, entry in enumerate(looks, 1)]
        calls = [call._replace(name=_with_layer(call)) for call in _join_cameras(calls, cameras)]
    if not calls:
        rules.fail(ValueError, "looks", "hold a call", "none")
    return calls


def _join_cameras(calls: Sequence[SampledCall], cameras: int) -> Iterator[SampledCall]:
    """Join calls that a layer made one after the other, one for each camera, where no call alone fits the cameras."""

    def alike(call: SampledCall) -> Any:
        look = call.looks[0]
        return call.num_scenes is None and look.layer, look.operator, len(look.weights), look.weights.shape[2:]

    for (layer, operator, *_), group in itertools.groupby(calls, alike):
        run = list(group)
        in_turn = layer and OPERATORS[operator].kind == "attention" and len(run) % cameras == 0
        size = cameras if in_turn else 1
        for i in range(0, len(run), size):
            yield run[i]._replace(looks=tuple(look for call in run[i : i + size] for look in call.looks))


def _with_layer(call: SampledCall) -> str:
    layers = dict.fromkeys(look.layer for look in call.looks if look.layer)
    return f"{call.name} ({', '.join(layers)})" if layers else call.name


def _looks_of(name: str, entry: Any) -> tuple[Look, ...]:
    looks = (entry,) if isinstance(entry, Look) else tuple(entry) if isinstance(entry, (list, tuple)) else ()
    wrong = [type(look).__name__ for look in looks if not isinstance(look, Look)]
    if wrong or not looks:
        kind = wrong[0] if wrong else "an empty list" if isinstance(entry, (list, tuple)) else type(entry).__name__
        rules.fail(TypeError, "looks", "hold viz.Look, as recording() gives them", f"{kind} in {name}")
    return looks


def _check_levels(calls: Sequence[SampledCall], cameras: Sequence[_pictures.Camera]) -> None:
    """Check that every call has as many levels as a camera has pictures of levels."""
    for camera in cameras:
        for call in calls:
            if camera.apart and len(camera.pictures) != call.sizes[1]:
                rule = f"hold one picture, or one for each of the {call.sizes[1]} levels of {call.name}"
                rules.fail(ValueError, f"pictures, {camera.name},", rule, len(camera.pictures))


def _camera(camera: _pictures.Camera) -> dict[str, Any]:
    width, height = camera.pictures[0].size
    uris = [_pictures.data_uri(picture) for picture in camera.pictures]
    return {"name": camera.name, "width": width, "height": height, "pictures": uris, "apart": camera.apart}


def _picture_of(plane: Plane) -> dict[str, Any]:
    facts: dict[str, Any] = {"picture": None, "extent": None if plane.extent is None else [float(n) for n in plane.extent]}
    if plane.extent is not None:
        x0, x1, y0, y1 = plane.extent
        facts |= {"width": y1 - y0, "height": x1 - x0}
    if plane.picture is not None:
        picture = _pictures.image("plane.picture", plane.picture)
        if plane.extent is not None:  # from above: the first axis up, the second one left
            picture = picture.rotate(180)
        facts["picture"] = _pictures.data_uri(picture)
        facts = {"width": picture.width, "height": picture.height, **facts}
    return facts


def _fitting(
    facts: dict[str, Any], calls: Sequence[SampledCall], laid: PlaneLayout, plane: Plane, seen: Tensor | None, max_mb: float
) -> bytes:
    """Return the page with as many queries as max_mb leaves room for."""
    room, bare = max_mb * 1e6, len(_filled(facts))
    most = int((room - bare) / _bytes_of_a_query(calls, laid, plane, seen))
    while most >= 1:
        kept, sentence = _plane.chosen(laid, most)
        queries = _queries(laid, plane, kept, sentence)
        done = _filled({**facts, "queries": queries, "looks": [_look(call, seen, kept) for call in calls]})
        if len(done) <= room:
            return done
        most = int(min(most, len(kept)) * 0.97 * (room - bare) / (len(done) - bare))
    rules.fail(ValueError, "max_mb", f"leave room for a query beside {bare / 1e6:.2f} MB of page and pictures", max_mb)


def _bytes_of_a_query(calls: Sequence[SampledCall], laid: PlaneLayout, plane: Plane, seen: Tensor | None) -> float:
    """Return the mean size of a query in base64."""
    total = 0.0
    for call in calls:
        for samples in call.samples(seen):
            locations, weights = samples.locations.shape[1:], samples.weights.shape[1:]
            size = 2 + 2 * locations.numel() + 2 * weights.numel()
            total += _kept(call, samples).sum().item() * size / len(laid.places)
    own = 4 * len(calls) + 4 + 4 * laid.places.shape[1] + (0 if laid.grid is None else 4)
    labels = 0 if plane.labels is None else sum(map(len, plane.labels)) / len(plane.labels) + 3
    return (total + own) * 4 / 3 + labels


def _kept(call: SampledCall, samples: Samples) -> Tensor:
    """Return the mask of the queries whose samples are written: those that read the camera, or all if there is one camera."""
    return samples.read if call.cameras > 1 else torch.ones_like(samples.read)


def _queries(laid: PlaneLayout, plane: Plane, kept: Tensor, sentence: str) -> dict[str, Any]:
    grid = None if laid.grid is None else _packed(laid.grid[kept], "<u2")
    labels = None if plane.labels is None else [plane.labels[i] for i in kept.tolist()]
    places = _packed(laid.places[kept].float(), "<f4")
    facts = {"total": len(laid.places), "numbers": _packed(kept, "<u4"), "places": places, "boxes": laid.places.shape[1] == 4}
    return {**facts, "grid": grid, "labels": labels, "sentence": sentence}


def _look(call: SampledCall, seen: Tensor | None, kept: Tensor) -> dict[str, Any]:
    """Return a call as blocks of samples, one for each query and camera that it reads, sorted by query."""
    numbers, cameras, locations, weights = [], [], [], []
    for camera, samples in enumerate(call.samples(seen)):
        samples = Samples(*(t[_kept(call, samples)] for t in samples)).select(kept)
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
    return {
        "name": call.name,
        "operator": call.operator,
        "grouped": OPERATORS[call.operator].kind == "aggregation",
        **dict(zip(("heads", "levels", "points"), call.sizes, strict=True)),
        "shared": list(location.shape[1:3]),
        "shapes": call.shapes.tolist(),
        "largest": largest,
        "unknown": unknown,
        "ends": _packed(torch.bincount(number, minlength=len(kept)).cumsum(0), "<u4"),
        "camera": _packed(camera[order], "<u2"),
        "locations": _packed(location[order], "<u2"),
        "weights": _packed(steps, "<i2"),
    }


def _packed(numbers: Tensor, kind: str) -> str:
    return base64.b64encode(numbers.numpy().astype(kind).tobytes()).decode()


def _filled(facts: dict[str, Any]) -> bytes:
    """Return the template with these facts. Its policy lets a browser run our script and nothing else, and fetch nothing."""
    parts = {name: _template(name) for name in ("page.html", "page.css", "samples.js", "page.js")}
    script = parts["samples.js"] + parts["page.js"]
    # Escaped, no text can end the element early. JSON in ASCII is the same in every encoding.
    data = json.dumps(facts, separators=(",", ":")).replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    fills = {
        "title": html.escape(facts["title"]),
        "style": parts["page.css"],
        "style hash": _hash(parts["page.css"]),
        "script": script,
        "script hash": _hash(script),
        "data": data,
    }
    return re.sub(r"\{\{(.+?)\}\}", lambda match: fills[match[1]], parts["page.html"]).encode("utf-8", "xmlcharrefreplace")


def _template(name: str) -> str:
    return (resources.files(__package__ or "") / "_template" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
