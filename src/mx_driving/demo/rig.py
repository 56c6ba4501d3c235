"""Pinhole cameras round a car: the calibration, a projection, and the rig file a person writes."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._cli_support.files import open_picture
from .._cli_support.problems import Problem, need

LARGEST = 1e6  # metres
WIDEST = 800  # pixels; larger photographs are scaled down together with their intrinsics
SKLEARN = "sklearn:"


class RigError(Problem):
    """A rig file that cannot be used; the message says which rule it broke."""


@dataclass(frozen=True)
class Camera:
    """A pinhole camera. x right, y down, z forward in the camera; x forward, y left, z up in the ego frame (metres)."""

    name: str
    size: tuple[int, int]  # (height, width) in pixels
    intrinsics: Tensor  # [3, 3], pixel centres at whole numbers
    camera_to_ego: Tensor  # [4, 4]
    image: Tensor | None = None  # [height, width, 3], 0..1

    @property
    def position(self) -> Tensor:
        """Where the camera is, in the ego frame: [3]."""
        return self.camera_to_ego[:3, 3]

    @property
    def matrix(self) -> Tensor:
        """Ego point (x, y, z, 1) to homogeneous pixel: intrinsics times the inverse of camera-to-ego, [3, 4]."""
        return self.intrinsics @ torch.linalg.inv(self.camera_to_ego)[:3]

    def scaled(self, height: int, width: int) -> Camera:
        """The same view on a sensor of another resolution."""
        sx, sy = width / self.size[1], height / self.size[0]
        shift = torch.tensor([[sx, 0, sx / 2 - 0.5], [0, sy, sy / 2 - 0.5], [0, 0, 1]], dtype=torch.float64)
        return replace(self, size=(height, width), intrinsics=shift @ self.intrinsics, image=None)


@dataclass(frozen=True)
class Extent:
    """The rectangle of ground the bird's-eye view covers: x and y ranges in metres, cells per side."""

    x: tuple[float, float] = (-25.0, 25.0)
    y: tuple[float, float] = (-25.0, 25.0)
    cells: int = 200

    def ground(self, points: int = 1) -> Tensor:
        """Ground points [cells * cells, points * points, 3]: an even lattice inside each cell; row 0 is the smallest x."""
        n = self.cells * points
        x, y = (low + (torch.arange(n, dtype=torch.float64) + 0.5) * (high - low) / n for low, high in (self.x, self.y))
        grid = torch.stack([*torch.meshgrid(x, y, indexing="ij"), torch.zeros(n, n, dtype=torch.float64)], -1)
        grid = grid.view(self.cells, points, self.cells, points, 3).transpose(1, 2)
        return grid.reshape(self.cells**2, points**2, 3)

    @property
    def cell(self) -> tuple[float, float]:
        """Size of a cell in metres."""
        return (self.x[1] - self.x[0]) / self.cells, (self.y[1] - self.y[0]) / self.cells


@dataclass(frozen=True)
class Rig:
    """Cameras with their images, and the ground to look at."""

    cameras: tuple[Camera, ...]
    extent: Extent


def project(camera: Camera, points: Tensor) -> tuple[Tensor, Tensor]:
    """Ego points [..., 3] to normalised image locations [..., 2] (x first; 0..1 is the image) and depths [...] in metres."""
    matrix = camera.matrix
    pixel = points @ matrix[:, :3].T + matrix[:, 3]
    depth = pixel[..., 2]
    safe = torch.where(depth > 1e-3, depth, math.nan)
    size = torch.tensor([camera.size[1], camera.size[0]], dtype=pixel.dtype)
    return (pixel[..., :2] / safe[..., None] + 0.5) / size, depth


def looking(x: float, y: float, z: float, yaw: float, pitch: float = 0.0) -> Tensor:
    """Camera-to-ego matrix of a camera at (x, y, z) that looks along yaw (degrees, left positive), pitch degrees down."""
    a, b = math.radians(yaw), math.radians(pitch)
    forward = [math.cos(a) * math.cos(b), math.sin(a) * math.cos(b), -math.sin(b)]
    right = [math.sin(a), -math.cos(a), 0.0]
    down = [-math.cos(a) * math.sin(b), -math.sin(a) * math.sin(b), -math.cos(b)]
    pose = torch.eye(4, dtype=torch.float64)
    pose[:3] = torch.tensor([right, down, forward, [x, y, z]], dtype=torch.float64).T
    return pose


def surround(height: int = 450, width: int = 800) -> tuple[Camera, ...]:
    """Six cameras placed and focused about like nuScenes' (whose sensor is 900 x 1600), on a sensor of the size given."""
    rows = (  # name, x, y, z, yaw, focal length in pixels of the full sensor
        ("front left", 1.52, 0.49, 1.51, 55, 1272.0),
        ("front", 1.70, 0.0, 1.51, 0, 1266.0),
        ("front right", 1.55, -0.49, 1.50, -55, 1260.0),
        ("back left", 1.03, 0.48, 1.57, 110, 1256.0),
        ("back", 0.03, 0.0, 1.57, 180, 809.0),
        ("back right", 1.01, -0.48, 1.56, -110, 1259.0),
    )
    cameras = []
    for name, x, y, z, yaw, focal in rows:
        matrix = torch.tensor([[focal, 0, 816.0], [0, focal, 491.0], [0, 0, 1]], dtype=torch.float64)
        cameras.append(Camera(name, (900, 1600), matrix, looking(x, y, z, yaw)).scaled(height, width))
    return tuple(cameras)


def load_rig(path: Path) -> Rig:
    """Read a rig file (JSON) and its photographs. Raises RigError, which names the rule and the fact."""
    data = _read_json(Path(path))
    rows = data.get("cameras")
    if not isinstance(rows, list) or not rows:
        raise RigError(f"cameras must be a list of at least one camera; got {_show(rows)}")
    cameras = tuple(_camera(row, name, Path(path).parent) for row, name in zip(rows, _names(rows), strict=True))
    return Rig(cameras, _extent(data.get("bev", {})))


def _read_json(path: Path) -> dict[str, Any]:
    if not os.path.isfile(path):
        raise RigError(f"the rig file must exist; got {path}")
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_object)
    except RigError as error:
        raise RigError(f"{path.name} must {error}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RigError(f"{path.name} must be JSON; got {error}") from None
    if not isinstance(data, dict):
        raise RigError(f"{path.name} must hold an object with a list of cameras; got {_show(data)}")
    return data


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a key that stands twice: json itself would silently keep the last value."""
    keys = [key for key, _ in pairs]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise RigError(f"have each key of an object once; got {twice!r} {keys.count(twice)} times")
    return dict(pairs)


def _names(rows: list[Any]) -> list[str]:
    names: list[str] = []
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise RigError(f"cameras[{index}] must be an object; got {_show(row)}")
        name = row.get("name", f"camera {index}")
        if not (isinstance(name, str) and name.strip() and name.isprintable()):
            raise RigError(f"cameras[{index}]: name must be a printable string that is not empty; got {_show(name)}")
        if name in names:
            raise RigError(f"cameras[{index}]: name must be its own; got {_show(name)}, cameras[{names.index(name)}]'s")
        names.append(name)
    return names


def _camera(row: dict[str, Any], name: str, folder: Path) -> Camera:
    for key in ("image", "intrinsics", "camera_to_ego"):
        if key not in row:
            raise RigError(f"camera {name!r} must have {key!r}; got {', '.join(map(repr, row)) or 'nothing'}")
    intrinsics = _intrinsics(f"camera {name!r}: intrinsics", row["intrinsics"])
    pose = _pose(f"camera {name!r}: camera_to_ego", row["camera_to_ego"])
    image = _photograph(f"camera {name!r}: image", row["image"], folder)
    camera = Camera(name, (image.height, image.width), intrinsics, pose)
    if image.width > WIDEST:
        height = max(1, round(image.height * WIDEST / image.width))
        image, camera = image.resize((WIDEST, height), resample=1), camera.scaled(height, WIDEST)
    return replace(camera, image=_tensor(image))


def _matrix(name: str, rows: Any, shape: tuple[int, int]) -> Tensor:
    """A finite, invertible float64 matrix of the given shape."""
    try:
        if not _numbers(rows):
            raise TypeError
        matrix = torch.tensor(rows, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise RigError(f"{name} must be {shape[0]} rows of {shape[1]} numbers; got {_show(rows)}") from None
    if tuple(matrix.shape) != shape:
        raise RigError(f"{name} must have shape {shape}; got {tuple(matrix.shape)}")
    if not bool(matrix.isfinite().all()):
        raise RigError(f"{name} must hold finite numbers; got {_show(rows)}")
    smallest, largest = (float(s) for s in torch.linalg.svdvals(matrix)[[-1, 0]])
    if smallest <= 1e-9 * largest:
        raise RigError(f"{name} must be invertible; got a singular matrix (determinant {float(torch.det(matrix)):.3g})")
    return matrix


def _numbers(rows: Any) -> bool:
    """Whether it is a list of lists of numbers; true and false are not numbers."""
    flat = isinstance(rows, list) and all(isinstance(row, list) for row in rows)
    return flat and all(type(number) in (int, float) for row in rows for number in row)


def _intrinsics(name: str, rows: Any) -> Tensor:
    matrix = _matrix(name, rows, (3, 3))
    if matrix[2].tolist() != [0, 0, 1]:
        raise RigError(f"{name} must end in the row [0, 0, 1]; got {matrix[2].tolist()}")
    if not (matrix[0, 0] > 0 and matrix[1, 1] > 0):
        raise RigError(f"{name} must have positive focal lengths; got {float(matrix[0, 0])} and {float(matrix[1, 1])}")
    return matrix


def _pose(name: str, rows: Any) -> Tensor:
    matrix = _matrix(name, rows, (4, 4))
    if matrix[3].tolist() != [0, 0, 0, 1]:
        raise RigError(f"{name} must end in the row [0, 0, 0, 1]; got {matrix[3].tolist()}")
    turn = matrix[:3, :3]
    off = float((turn @ turn.T - torch.eye(3, dtype=torch.float64)).abs().max())
    determinant = float(torch.det(turn))
    if off > 1e-3:
        raise RigError(f"{name} must hold a rotation (orthogonal rows of length 1); got rows that miss it by {off:.3g}")
    if determinant < 0:
        raise RigError(f"{name} must hold a rotation (determinant 1); got determinant {determinant:.3g}, a mirror image")
    return matrix


def _extent(row: Any) -> Extent:
    if not isinstance(row, dict):
        raise RigError(f"bev must be an object; got {_show(row)}")
    ranges = {}
    for axis in ("x", "y"):
        pair = row.get(axis, getattr(Extent, axis))
        numbers = isinstance(pair, (list, tuple)) and len(pair) == 2 and all(type(p) in (int, float) for p in pair)
        if not (numbers and -LARGEST <= pair[0] < pair[1] <= LARGEST):
            raise RigError(f"bev: {axis} must be two rising numbers of metres, at most 1e6 from the car; got {_show(pair)}")
        ranges[axis] = (float(pair[0]), float(pair[1]))
    cells = row.get("cells", Extent.cells)
    if type(cells) is not int or not 8 <= cells <= 800:
        raise RigError(f"bev: cells must be a whole number from 8 to 800; got {_show(cells)}")
    return Extent(cells=cells, **ranges)


def _photograph(name: str, source: Any, folder: Path) -> Any:
    """A PIL image in RGB: a file beside the rig file, or one of the photographs scikit-learn ships."""
    from PIL import Image

    if not isinstance(source, str):
        raise RigError(f"{name} must be a path; got {_show(source)}")
    if source.startswith(SKLEARN):
        return Image.fromarray(_sklearn(name, source[len(SKLEARN) :]))
    return open_picture(name, folder / source, RigError)


def _sklearn(name: str, sample: str) -> Any:
    need(name, "[examples]", "sklearn")
    from sklearn.datasets import load_sample_image

    if sample not in ("china.jpg", "flower.jpg"):
        raise RigError(f"{name} must be sklearn:china.jpg or sklearn:flower.jpg; got {SKLEARN}{sample}")
    return load_sample_image(sample)


def _tensor(image: Any) -> Tensor:
    raw = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return raw.view(image.height, image.width, 3).float() / 255


def _show(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
