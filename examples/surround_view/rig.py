"""Pinhole cameras around a car: their calibration, and rig files."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mx_driving import geometry

WIDEST = 800  # pixels; larger photographs are scaled down together with their intrinsics
SKLEARN = "sklearn:"


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
        """Return the position of the camera in the ego frame: [3]."""
        return self.camera_to_ego[:3, 3]

    @cached_property
    def projection(self) -> Tensor:
        """Return the matrix from ego points to pixels, [4, 4]."""
        ego_to_camera = torch.linalg.inv(self.camera_to_ego)
        return geometry.projection_matrix(self.intrinsics, ego_to_camera[:3, :3], ego_to_camera[:3, 3])

    def scaled(self, height: int, width: int) -> Camera:
        """Return the same view on a sensor of another resolution."""
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
        """Return ground points [cells * cells, points * points, 3]: a lattice in each cell; row 0 is the smallest x."""
        n = self.cells * points
        x, y = (low + (torch.arange(n, dtype=torch.float64) + 0.5) * (high - low) / n for low, high in (self.x, self.y))
        grid = torch.stack([*torch.meshgrid(x, y, indexing="ij"), torch.zeros(n, n, dtype=torch.float64)], -1)
        grid = grid.view(self.cells, points, self.cells, points, 3).transpose(1, 2)
        return grid.reshape(self.cells**2, points**2, 3)

    @property
    def cell(self) -> tuple[float, float]:
        """Return the size of a cell in metres."""
        return (self.x[1] - self.x[0]) / self.cells, (self.y[1] - self.y[0]) / self.cells


def project(camera: Camera, points: Tensor) -> tuple[Tensor, Tensor]:
    """Return normalised image locations [..., 2] (x first; 0..1) and depths [...] in metres of ego points [..., 3]."""
    size = torch.tensor([camera.size[1], camera.size[0]], dtype=points.dtype)
    locations, depths = geometry.image_locations(points, camera.projection[None], size)
    return locations[..., 0, :], depths[..., 0]


def looking(x: float, y: float, z: float, yaw: float, pitch: float = 0.0) -> Tensor:
    """Return the camera-to-ego matrix of a camera at (x, y, z) with yaw (degrees, left positive) and pitch (degrees down)."""
    a, b = math.radians(yaw), math.radians(pitch)
    forward = [math.cos(a) * math.cos(b), math.sin(a) * math.cos(b), -math.sin(b)]
    right = [math.sin(a), -math.cos(a), 0.0]
    down = [-math.cos(a) * math.sin(b), -math.sin(a) * math.sin(b), -math.cos(b)]
    pose = torch.eye(4, dtype=torch.float64)
    pose[:3] = torch.tensor([right, down, forward, [x, y, z]], dtype=torch.float64).T
    return pose


def surround(height: int = 450, width: int = 800) -> tuple[Camera, ...]:
    """Return six cameras with about the poses and focal lengths of nuScenes, on a sensor of this size."""
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


def load_rig(path: Path) -> tuple[tuple[Camera, ...], Extent]:
    """Read a rig file (JSON) and its photographs. Raise ValueError if the file is wrong."""
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
        rows, bev = data["cameras"], data.get("bev", {})
        cameras = tuple(_camera(row, path.parent) for row in rows)
        extent = Extent(tuple(bev.get("x", Extent.x)), tuple(bev.get("y", Extent.y)), bev.get("cells", Extent.cells))
    except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} must be a rig file, such as examples/surround_view/rig.json; got {error!r}") from None
    if not cameras:
        raise ValueError("cameras must be a list of at least one camera; got none")
    if not 8 <= extent.cells <= 800:
        raise ValueError(f"bev: cells must be a whole number from 8 to 800; got {extent.cells}")
    return cameras, extent


def _camera(row: dict[str, Any], folder: Path) -> Camera:
    name = str(row["name"])
    intrinsics = _matrix(f"camera {name!r}: intrinsics", row["intrinsics"], (3, 3))
    pose = _matrix(f"camera {name!r}: camera_to_ego", row["camera_to_ego"], (4, 4))
    turn = pose[:3, :3]
    if float((turn @ turn.T - torch.eye(3, dtype=torch.float64)).abs().max()) > 1e-3 or torch.det(turn) < 0:
        raise ValueError(f"camera {name!r}: camera_to_ego must hold a rotation; got {turn.tolist()}")
    image = _photograph(row["image"], folder)
    camera = Camera(name, (image.height, image.width), intrinsics, pose)
    if image.width > WIDEST:
        height = max(1, round(image.height * WIDEST / image.width))
        image, camera = image.resize((WIDEST, height), resample=1), camera.scaled(height, WIDEST)
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return replace(camera, image=pixels.view(image.height, image.width, 3).float() / 255)


def _matrix(name: str, rows: Any, shape: tuple[int, int]) -> Tensor:
    matrix = torch.tensor(rows, dtype=torch.float64)
    last = [0.0] * (shape[1] - 1) + [1.0]
    if tuple(matrix.shape) != shape or not matrix.isfinite().all() or matrix[-1].tolist() != last:
        raise ValueError(f"{name} must be {shape[0]} rows of {shape[1]} finite numbers, the last {last}; got {rows}")
    return matrix


def _photograph(source: str, folder: Path) -> Any:
    """Return a Pillow image in RGB: a file relative to the rig file, or a photograph of scikit-learn."""
    from PIL import Image

    if source.startswith(SKLEARN):
        from sklearn.datasets import load_sample_image

        return Image.fromarray(load_sample_image(source[len(SKLEARN) :]))
    return Image.open(folder / source).convert("RGB")
