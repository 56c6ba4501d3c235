"""Convert the pictures of a page, which are tensors, NumPy arrays or Pillow images, to data URIs."""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._operator import rules

LONGEST = 960  # the longest side of a picture, in pixels; a page shows no more
EXACT = 256  # a picture whose sides are at most this long is taken for a feature map, and keeps every pixel
_RULE = "be a torch.Tensor [H, W, 3], [3, H, W] or [H, W], or a Pillow image"
_BYTES = "hold bytes, or floats from 0 to 1"


class Camera(NamedTuple):
    """A camera's name and its picture, or a picture for each level."""

    argument: str  # the argument that holds the picture, for errors
    name: str
    pictures: tuple[Any, ...]
    apart: bool  # whether there is a picture for each level


def make_cameras(pictures: Any) -> tuple[Camera, ...]:
    """Check the argument `pictures`. Return its cameras."""
    pictures = from_numpy("pictures", pictures)
    if isinstance(pictures, Mapping):
        named = [(f"pictures[{name!r}]", str(name), picture) for name, picture in pictures.items()]
    elif (isinstance(pictures, Tensor) and pictures.dim() < 4) or hasattr(pictures, "convert"):  # a Pillow image
        named = [("pictures", "picture", pictures)]
    elif isinstance(pictures, (Sequence, Tensor)) and not isinstance(pictures, str):
        names = [f"camera {i}" for i in range(len(pictures))] if len(pictures) > 1 else ["picture"]
        named = [(f"pictures[{i}]", name, picture) for i, (name, picture) in enumerate(zip(names, pictures, strict=False))]
    else:
        rules.fail(TypeError, "pictures", "be pictures, one for each camera", type(pictures).__name__)
    if not named:
        rules.fail(ValueError, "pictures", "hold a picture for each camera", "none")
    return tuple(_make_camera(*camera) for camera in named)


def _make_camera(argument: str, name: str, picture: Any) -> Camera:
    if not isinstance(picture, (list, tuple)):
        return Camera(argument, name, (to_image(argument, picture),), False)
    if not picture:
        rules.fail(ValueError, argument, "hold a picture for each level", "none")
    return Camera(argument, name, tuple(to_image(f"{argument}[{i}]", part) for i, part in enumerate(picture)), True)


def from_numpy(name: str, picture: Any) -> Any:
    """Convert a NumPy array to a tensor. Return other objects unchanged."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(picture, numpy.ndarray):
        return picture
    if picture.dtype.kind not in "biufc":
        rules.fail(TypeError, name, _BYTES, picture.dtype)
    dtype = "f8" if picture.dtype.kind == "f" and picture.dtype.itemsize > 8 else picture.dtype.newbyteorder("=")
    return torch.from_numpy(numpy.require(picture, dtype, "CW"))


def to_image(name: str, picture: Any) -> Any:
    """Convert a picture to a Pillow image in RGB of at most LONGEST pixels a side."""
    from PIL import Image

    picture = from_numpy(name, picture)
    if isinstance(picture, Image.Image):
        check_pixels(name, picture.height, picture.width)
        rgb = _to_rgb(name, picture)
    elif isinstance(picture, Tensor):
        rgb = _from_tensor(name, picture)
    else:
        rules.fail(TypeError, name, _RULE, type(picture).__name__)
    rgb.thumbnail((LONGEST, LONGEST))
    return rgb


def _to_rgb(name: str, picture: Any) -> Any:
    """Convert a Pillow image to RGB. Convert floats and 16 bits without Pillow, which clips them at 255."""
    import numpy

    if picture.mode == "F":
        return _from_tensor(name, torch.from_numpy(numpy.array(picture)))
    if picture.mode.startswith("I;16"):
        return _from_tensor(name, torch.from_numpy(numpy.array(picture).astype("f4") / 65535))
    if picture.mode == "I":
        rules.fail(TypeError, name, "have a mode of 8 or 16 bits, or floats from 0 to 1", "mode I, of 32 bits")
    return picture.convert("RGB")


def _from_tensor(name: str, picture: Tensor) -> Any:
    from PIL import Image

    rows = to_pixels(name, picture)
    height, width, _ = rows.shape
    return Image.frombytes("RGB", (width, height), rows.numpy().tobytes())


def need_numbers(*named: tuple[str, Any]) -> None:
    """Check that arguments are tensors of real numbers that can be read."""
    rules.need_tensors(*named)
    for name, t in named:
        if t.is_meta or type(t).__name__ == "FakeTensor":
            rules.fail(ValueError, name, "hold numbers", "a tensor on the device meta" if t.is_meta else "a fake tensor")
        if t.is_complex():
            rules.fail(TypeError, name, "have a dtype of real numbers", str(t.dtype).removeprefix("torch."))


def check_pixels(name: str, height: int, width: int) -> None:
    """Check that a picture has pixels. Older versions of Pillow fail on an empty picture."""
    if not (height and width):
        rules.fail(ValueError, name, "have pixels", f"{height} x {width}")


def to_pixels(name: str, picture: Tensor) -> Tensor:
    """Convert a picture to bytes [H, W, 3] on the CPU."""
    need_numbers((name, picture))
    picture, shape = picture.detach().cpu(), tuple(picture.shape)
    if picture.dim() == 3 and picture.shape[-1] not in (1, 3):
        picture = picture.permute(1, 2, 0)
    if picture.dim() == 2:
        picture = picture[..., None]
    if picture.dim() != 3 or picture.shape[-1] not in (1, 3):
        rules.fail(ValueError, name, "have shape (H, W, 3), (3, H, W) or (H, W)", shape)
    check_pixels(name, *picture.shape[:2])
    if picture.dtype != torch.uint8:
        rules.need_dtype(name, picture, rules.FLOATING | {torch.bool}, _BYTES)
        picture = (picture.float().nan_to_num(0).clamp(0, 1) * 255).round().byte()
    return picture.expand(-1, -1, 3).contiguous()


def encode(picture: Any) -> str:
    """Return a picture as a data URI: PNG for pictures that keep every pixel, else the smaller of PNG and JPEG."""
    files = {"png": io.BytesIO(), "jpeg": io.BytesIO()}
    picture.save(files["png"], "PNG", optimize=True)
    picture.save(files["jpeg"], "JPEG", quality=85)
    sizes = {kind: len(file.getvalue()) for kind, file in files.items()}
    kind = "png" if max(picture.size) <= EXACT or sizes["png"] <= sizes["jpeg"] else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(files[kind].getvalue()).decode()}"
