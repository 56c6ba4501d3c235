"""Pictures of a page: tensors and Pillow images as data URIs."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _checks

LONGEST = 960  # pixels of a side: more is not seen on a page, and costs bytes
EXACT = 256  # up to this side every pixel is kept, because pictures of feature maps are small
_RULE = "be a torch.Tensor [H, W, 3], [3, H, W] or [H, W], or a Pillow image"


class Camera(NamedTuple):
    """A camera's name and its picture, or a picture for each level."""

    name: str
    pictures: tuple[Any, ...]
    apart: bool  # a picture for each level


def cameras(pictures: Any) -> tuple[Camera, ...]:
    """The cameras that a caller's pictures are of."""
    if isinstance(pictures, Mapping):
        named = [(str(name), picture) for name, picture in pictures.items()]
    elif _is_one(pictures):
        named = [("picture", pictures)]
    elif isinstance(pictures, (Sequence, Tensor)) and not isinstance(pictures, str):
        named = [(f"camera {i}" if len(pictures) > 1 else "picture", picture) for i, picture in enumerate(pictures)]
    else:
        _checks.rules.fail(TypeError, "pictures", "be pictures, one for each camera", type(pictures).__name__)
    if not named:
        _checks.rules.fail(ValueError, "pictures", "hold a picture for each camera", "none")
    return tuple(_camera(name, picture) for name, picture in named)


def _camera(name: str, picture: Any) -> Camera:
    apart = isinstance(picture, (list, tuple))
    parts = tuple(picture) if apart else (picture,)
    where = f"pictures, {name},"
    if not parts:
        _checks.rules.fail(ValueError, where, "hold a picture for each level", "none")
    return Camera(name, tuple(image(where, part) for part in parts), apart)


def _is_one(picture: Any) -> bool:
    return (isinstance(picture, Tensor) and picture.dim() < 4) or hasattr(picture, "convert")


def image(name: str, picture: Any) -> Any:
    """A Pillow image in RGB, not larger than a page shows it."""
    from PIL import Image

    if isinstance(picture, Image.Image):
        _need_pixels(name, picture.height, picture.width)
        found = picture.convert("RGB")
    elif isinstance(picture, Tensor):
        pixels = _pixels(name, picture)
        height, width, _ = pixels.shape
        _need_pixels(name, height, width)
        found = Image.frombytes("RGB", (width, height), pixels.numpy().tobytes())
    else:
        _checks.rules.fail(TypeError, name, _RULE, type(picture).__name__)
    found.thumbnail((LONGEST, LONGEST))
    return found


def _need_pixels(name: str, height: int, width: int) -> None:
    """Before Pillow sees them: an older one stops at an empty image."""
    if not (height and width):
        _checks.rules.fail(ValueError, name, "have pixels", f"{height} x {width}")


def _pixels(name: str, picture: Tensor) -> Tensor:
    """[H, W, 3] bytes."""
    picture = picture.detach().cpu()
    if picture.dim() == 3 and picture.shape[-1] not in (1, 3):
        picture = picture.permute(1, 2, 0)
    if picture.dim() == 2:
        picture = picture[..., None]
    if picture.dim() != 3 or picture.shape[-1] not in (1, 3):
        _checks.rules.fail(ValueError, name, "have shape (H, W, 3), (3, H, W) or (H, W)", tuple(picture.shape))
    if picture.dtype != torch.uint8:
        _checks.rules.need_dtype(name, picture, _checks.rules.FLOATING | {torch.bool}, "hold bytes, or floats from 0 to 1")
        picture = (picture.float().nan_to_num(0).clamp(0, 1) * 255).round().byte()
    return picture.expand(-1, -1, 3).contiguous()


def data_uri(picture: Any) -> str:
    """The smaller of PNG and JPEG; PNG if every pixel is to be kept."""
    files = {"png": io.BytesIO(), "jpeg": io.BytesIO()}
    picture.save(files["png"], "PNG", optimize=True)
    picture.save(files["jpeg"], "JPEG", quality=85)
    sizes = {kind: len(file.getvalue()) for kind, file in files.items()}
    kind = "png" if max(picture.size) <= EXACT or sizes["png"] <= sizes["jpeg"] else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(files[kind].getvalue()).decode()}"
