"""A street to look at: a painted ground, boxes that stand on it, and the picture a camera takes of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .rig import Camera, Extent, project

HALF = 48.0  # metres of painted ground to each side of the car
SKY, HAZE = (126, 168, 214), (206, 219, 232)
ASPHALT, WHITE, YELLOW = (66, 69, 77), (238, 238, 232), (242, 190, 42)
GRASS, PAVING, KERB, CYCLE = (84, 126, 74), (150, 144, 136), (186, 182, 174), (150, 66, 58)

Colour = tuple[int, int, int]


@dataclass(frozen=True)
class Box:
    """A box on the ground: centre, heading in degrees, length, width and height in metres, colour."""

    x: float
    y: float
    yaw: float
    size: tuple[float, float, float]
    colour: Colour

    def corners(self) -> Tensor:
        """Return the corners of the footprint, anticlockwise: [4, 2]."""
        length, width = self.size[0] / 2, self.size[1] / 2
        local = torch.tensor([[length, width], [-length, width], [-length, -width], [length, -width]], dtype=torch.float64)
        return local @ self.turn().T + torch.tensor([self.x, self.y], dtype=torch.float64)

    def turn(self) -> Tensor:
        """Return the rotation from the box's frame to the ego frame: [2, 2]."""
        c, s = math.cos(math.radians(self.yaw)), math.sin(math.radians(self.yaw))
        return torch.tensor([[c, -s], [s, c]], dtype=torch.float64)

    def hides(self, eye: Tensor, points: Tensor, swell: float = 0.1) -> Tensor:
        """Return whether the line from the eye [3] to each point [..., 3] meets the box, enlarged by `swell`: [...]."""
        centre = torch.tensor([self.x, self.y], dtype=torch.float64)
        start = torch.cat([(eye[:2] - centre) @ self.turn(), eye[2:]])
        end = torch.cat([(points[..., :2] - centre) @ self.turn(), points[..., 2:]], -1)
        half = torch.tensor([self.size[0] / 2 + swell, self.size[1] / 2 + swell, self.size[2] + swell], dtype=torch.float64)
        along = end - start
        along = torch.where(along.abs() < 1e-12, 1e-12, along)
        a, b = (-half - start) / along, (half - start) / along
        enter, leave = torch.minimum(a, b).amax(-1), torch.maximum(a, b).amin(-1)
        return (enter < leave) & (leave > 0) & (enter < 1)


CAR, VAN, TRUCK = (4.4, 1.8, 1.5), (5.2, 2.0, 2.2), (8.0, 2.5, 3.2)
TRAFFIC = (
    Box(16.4, -14.5, 90, CAR, (222, 72, 60)),
    Box(19.8, 17.0, -90, VAN, (240, 240, 244)),
    Box(21.5, 3.4, 180, CAR, (246, 166, 35)),
    Box(-21.5, 7.0, 180, TRUCK, (58, 160, 120)),
    Box(-18.5, -0.1, 0, CAR, (150, 92, 196)),
    Box(-22.0, -3.6, 0, CAR, (52, 118, 205)),
)
BUILDINGS = tuple(
    Box(x, y, 0, (13.0, 12.0, height), colour)
    for x, y, height, colour in (
        (34, 26, 14, (176, 122, 98)), (34, -26, 10, (148, 156, 170)), (-14, 36, 12, (196, 176, 148)),
        (3, 37, 17, (140, 118, 126)), (-4, -36, 13, (170, 140, 110)), (-22, -36, 9, (128, 140, 150)),
        (-38, 22, 15, (186, 150, 120)), (-38, -22, 11, (150, 130, 140)),
    )
)  # fmt: skip


def hidden(eye: Tensor, points: Tensor) -> Tensor:
    """Return whether a vehicle is between the eye and each point, or on the point."""
    return torch.stack([box.hides(eye, points) for box in TRAFFIC]).any(0)


class Painter:
    """Draws on the ground in metres; a point (x, y) of the ego frame lands at row (x + half), column (y + half)."""

    def __init__(self, per_metre: int) -> None:
        from PIL import Image, ImageDraw

        self.per_metre = per_metre
        side = round(2 * HALF * per_metre)
        self.image = Image.new("RGB", (side, side), GRASS)
        self.draw = ImageDraw.Draw(self.image)

    def polygon(self, points: Any, colour: Colour) -> None:
        """Fill a polygon of (x, y) corners."""
        self.draw.polygon([((y + HALF) * self.per_metre, (x + HALF) * self.per_metre) for x, y in points], fill=colour)

    def rectangle(self, x0: float, x1: float, y0: float, y1: float, colour: Colour) -> None:
        """Fill an upright rectangle."""
        self.polygon([(x0, y0), (x1, y0), (x1, y1), (x0, y1)], colour)

    def line(self, start: tuple[float, float], end: tuple[float, float], width: float, colour: Colour) -> None:
        """Draw a straight stroke of this width."""
        length = math.dist(start, end)
        dx, dy = ((end[i] - start[i]) / length * width / 2 for i in (0, 1))
        sides = (start, 1), (end, 1), (end, -1), (start, -1)
        self.polygon([(x - side * dy, y + side * dx) for (x, y), side in sides], colour)

    def dashes(self, x0: float, x1: float, y: float) -> None:
        """Draw a dashed lane line along x."""
        for i in range(int((x1 - x0) // 4.5)):
            self.rectangle(x0 + 4.5 * i, x0 + 4.5 * i + 2.4, y - 0.1, y + 0.1, WHITE)

    def arrow(self, x: float, y: float, heading: int, bend: int = 0) -> None:
        """Draw a lane arrow. Heading +1 is forward, -1 backward; bend +1 or -1 turns its tip to a side."""
        place = lambda points: [(x + heading * a, y + heading * b) for a, b in points]  # noqa: E731
        if bend == 0:
            self.polygon(place([(-2, 0.16), (0.6, 0.16), (0.6, -0.16), (-2, -0.16)]), WHITE)
            self.polygon(place([(2.1, 0), (0.5, 0.62), (0.5, -0.62)]), WHITE)
            return
        b = bend
        self.polygon(place([(-2, 0.16), (0.9, 0.16), (0.9, -0.16), (-2, -0.16)]), WHITE)
        self.polygon(place([(0.5, 0), (0.9, 0), (1.2, 0.6 * b), (0.8, 0.6 * b)]), WHITE)
        self.polygon(place([(0.3, 0.5 * b), (1.7, 0.5 * b), (1.0, 1.5 * b)]), WHITE)

    def zebra(self, x0: float, x1: float, y0: float, y1: float, along_x: bool = True) -> None:
        """Draw a crossing: bars along x, one every metre of y, or with x and y exchanged."""
        low, high = (y0, y1) if along_x else (x0, x1)
        for i in range(int(high - low)):
            a, b = low + i + 0.22, low + i + 0.78
            self.rectangle(*((x0, x1, a, b) if along_x else (a, b, y0, y1)), WHITE)


def street(per_metre: int = 32, traffic: Sequence[Box] = TRAFFIC) -> Tensor:
    """Return the painted ground with the traffic's shadows, [rows, columns, 3] bytes over -HALF..HALF metres in x and in y."""
    painter = Painter(per_metre)
    _surfaces(painter)
    _lines(painter)
    _signs(painter)
    for box in traffic:
        shade = replace(box, x=box.x - 0.25, y=box.y - 0.3, size=(box.size[0] + 0.3, box.size[1] + 0.3, 0))
        painter.polygon(shade.corners().tolist(), (38, 40, 46))
    return _bytes(painter.image)


def _surfaces(painter: Painter) -> None:
    """Draw roads, pavements, cycle lane and parking strip. The main road runs along x, the side road along y."""
    far = HALF
    for x0, x1, y0, y1 in ((-far, far, -10.6, 15.4), (9.6, 26.4, -far, far)):
        painter.rectangle(x0, x1, y0, y1, KERB)
        painter.rectangle(x0 + 0.3, x1 - 0.3, y0 + 0.3, y1 - 0.3, PAVING)
    for x in range(-int(far), int(far)):  # joints of the paving stones
        for y in (-10.2, -8.9, 11.9, 13.4):
            painter.rectangle(x, x + 0.92, y + 0.05, y + 1.25, (158, 152, 143) if x % 2 else (143, 137, 129))
    painter.rectangle(-far, far, -7.4, 11.6, ASPHALT)
    painter.rectangle(12.0, 24.0, -far, far, ASPHALT)
    painter.rectangle(-far, 10.0, -7.4, -5.4, CYCLE)
    painter.rectangle(26.0, far, -7.4, -5.4, CYCLE)
    bays = ((44, 98, 168), (60, 136, 92), (196, 120, 40), (128, 70, 140))
    for i in range(5):
        x = -30 + 5.6 * i
        painter.rectangle(x, x + 5.4, 9.0, 11.4, WHITE)
        painter.rectangle(x + 0.16, x + 5.24, 9.16, 11.4, bays[i % 4])


def _lines(painter: Painter) -> None:
    """Draw lane lines, stop lines, crossings and the hatched junction."""
    for x0, x1 in ((-HALF, 8.0), (26.5, HALF)):
        for y in (1.55, 1.95):
            painter.rectangle(x0, x1, y - 0.08, y + 0.08, YELLOW)
        for y in (-1.75, 5.25):
            painter.dashes(x0, x1, y)
        for y in (-5.3, 8.85):
            painter.rectangle(x0, x1, y - 0.09, y + 0.09, WHITE)
    for y0, y1 in ((-HALF, -12.5), (15.5, HALF)):
        painter.rectangle(17.92, 18.08, y0, y1, YELLOW)
    painter.rectangle(7.2, 7.7, -5.2, 1.4, WHITE)
    painter.rectangle(26.8, 27.3, 2.1, 8.7, WHITE)
    painter.zebra(8.2, 11.2, -5, 9)
    painter.zebra(24.6, 26.4, -5, 9)
    painter.zebra(12.2, 23.8, -10.6, -8.0, along_x=False)
    painter.zebra(12.2, 23.8, 12.2, 14.8, along_x=False)
    for i in range(-6, 7):  # yellow hatching of the junction
        for rise in (1, -1):
            _hatch(painter, 12.6 + 1.8 * i, rise)


def _hatch(painter: Painter, x: float, rise: int) -> None:
    """Draw a stroke at 45 degrees that crosses y = 2 at x + 6, cut to 12.6 <= x <= 23.4 and |y - 2| <= 6."""
    a, b = max(x, 12.6), min(x + 12, 23.4)
    if b - a > 0.5:
        painter.line((a, 2 + rise * (a - x - 6)), (b, 2 + rise * (b - x - 6)), 0.18, YELLOW)


def _signs(painter: Painter) -> None:
    """Draw arrows in the lanes, and coloured squares on the grass as on a test card."""
    for x, y, heading, bend in (
        (4.8, 0.0, 1, 0), (4.8, -3.5, 1, -1), (-9, -3.5, 1, -1), (-9, 0.0, 1, 0), (-13, 3.5, -1, 0), (-13, 7.0, -1, 0),
        (-22, 3.5, -1, 0), (31, 3.5, -1, 0), (-16.5, -3.5, 1, 0), (4.5, 7.0, -1, 0),
    ):  # fmt: skip
        painter.arrow(x, y, heading, bend)
    colours = ((214, 84, 72), (242, 190, 42), (64, 132, 200), (238, 238, 232))
    for i in range(4):
        for j in range(2):
            x, y = -22 + 6 * i, -14.5 - 4.6 * j
            painter.rectangle(x, x + 3, y, y + 3, colours[(i + 2 * j) % 4])
            painter.rectangle(x + 0.8, x + 2.2, y + 0.8, y + 2.2, colours[(i + 2 * j + 1) % 4])


def true_map(ground: Tensor, extent: Extent, points: int = 8) -> Tensor:
    """Return the ground from above with the vehicles' footprints, averaged over each cell: [cells * cells, 3]."""
    from PIL import Image, ImageDraw

    image = Image.frombytes("RGB", (ground.shape[1], ground.shape[0]), ground.numpy().tobytes())
    draw, scale = ImageDraw.Draw(image), ground.shape[0] / (2 * HALF)
    for box in TRAFFIC:
        draw.polygon([((y + HALF) * scale, (x + HALF) * scale) for x, y in box.corners().tolist()], fill=box.colour)
    return _look(_bytes(image), extent.ground(points)[..., :2]).float().mean(1) / 255


def _look(ground: Tensor, points: Tensor) -> Tensor:
    """Return the ground's colour at points [..., 2]. Beyond the painted part, the colour of its edge continues."""
    scale = ground.shape[0] / (2 * HALF)
    at = ((points + HALF) * scale).long().clamp_(0, ground.shape[0] - 1)
    return ground.view(-1, 3)[at[..., 0] * ground.shape[1] + at[..., 1]]


def photograph(camera: Camera, ground: Tensor, boxes: Sequence[Box] = TRAFFIC + BUILDINGS) -> Camera:
    """Return the camera with its image: ground and sky by rays at twice the resolution, then boxes back to front."""
    from PIL import Image, ImageDraw

    height, width = camera.size
    fine = camera.scaled(2 * height, 2 * width)
    image = Image.fromarray(_background(fine, ground).numpy())
    draw = ImageDraw.Draw(image)
    boxes = sorted(boxes, key=lambda box: -math.dist((box.x, box.y), camera.position[:2].tolist()))
    for box in boxes:
        for polygon, colour in _faces(box, fine):
            draw.polygon(polygon, fill=colour)
    small = image.resize((width, height), resample=4)
    return replace(camera, image=_bytes(small).float() / 255)


def _background(camera: Camera, ground: Tensor) -> Tensor:
    """Return ground and sky: [height, width, 3] bytes, from two rays a pixel, one above the other."""
    height, width = camera.size
    picture = torch.zeros(height, width, 3)
    ray = camera.camera_to_ego[:3, :3] @ torch.linalg.inv(camera.intrinsics)
    across = torch.arange(width, dtype=torch.float32)
    for offset in (-0.25, 0.25):
        down = torch.arange(height, dtype=torch.float32) + offset
        v, u = torch.meshgrid(down, across, indexing="ij")
        x, y, z = (float(r[0]) * u + float(r[1]) * v + float(r[2]) for r in ray)
        horizon = int((z[:, 0] >= -1e-4).sum())  # the cameras are level, so all rows above this row see the sky
        distance = float(camera.position[2]) / -z[horizon:]
        hit = torch.stack([float(camera.position[i]) + distance * d[horizon:] for i, d in enumerate((x, y))], -1)
        fade = ((hit.norm(dim=-1) - 40) / 160).clamp(0, 1)[..., None]
        picture[horizon:] += _look(ground, hit) * (1 - fade) + fade * torch.tensor(HAZE)
        blend = torch.linspace(0, 1, max(horizon, 1))[:horizon, None, None].square()
        picture[:horizon] += torch.tensor(SKY) * (1 - blend) + torch.tensor(HAZE) * blend
    return (picture / 2).round().clamp(0, 255).byte()


def _faces(box: Box, camera: Camera) -> list[tuple[list[tuple[float, float]], Colour]]:
    """Return the sides and the top that face the camera, as polygons in pixels with colours."""
    base = box.corners()
    low = torch.cat([base, torch.zeros(4, 1, dtype=torch.float64)], 1)
    high = low + torch.tensor([0, 0, box.size[2]], dtype=torch.float64)
    faces = [(high, 1.0)] if camera.position[2] > box.size[2] else []
    for i in range(4):
        edge = base[(i + 1) % 4] - base[i]
        normal = torch.stack([edge[1], -edge[0]])
        if float(normal @ (camera.position[:2] - base[i])) > 0:
            shade = 0.72 + 0.22 * float(normal[0] / normal.norm()) * 0.6 + 0.14 * float(normal[1] / normal.norm())
            quad = torch.stack([low[i], low[(i + 1) % 4], high[(i + 1) % 4], high[i]])
            faces += [(quad, shade), *_panes(quad, box)]
    if not faces:  # the camera is in the box
        return []
    quads, shades = zip(*faces, strict=True)
    depths = project(camera, torch.stack(quads))[1].tolist()
    outlines = [_outline(quad, depth, camera) for quad, depth in zip(quads, depths, strict=True)]
    return [(outline, _shade(box.colour, shade)) for outline, shade in zip(outlines, shades, strict=True) if len(outline) > 2]


def _panes(quad: Tensor, box: Box) -> list[tuple[Tensor, float]]:
    """Return the dark windows of a side: one band on a vehicle, rows of windows on a building."""
    tall = box.size[2] > 6
    columns, rows = (6, int(box.size[2] // 3)) if tall else (1, 1)
    origin, across, up = quad[0], quad[1] - quad[0], quad[3] - quad[0]
    panes = []
    for i in range(columns):
        for j in range(rows):
            a, b = (i + (0.25 if tall else 0.08)) / columns, (i + (0.75 if tall else 0.92)) / columns
            c, d = (j + (0.35 if tall else 0.55)) / rows, (j + (0.8 if tall else 0.88)) / rows
            panes.append((torch.stack([origin + s * across + t * up for s, t in ((a, c), (b, c), (b, d), (a, d))]), 0.38))
    return panes


def _outline(quad: Tensor, depth: list[float], camera: Camera) -> list[tuple[float, float]]:
    """Return a polygon's corners in pixels, clipped 0.1 m in front of the camera. depth: the corners' depths."""
    points = []
    for i in range(len(quad)):
        j = (i + 1) % len(quad)
        if depth[i] >= 0.1:
            points.append(quad[i])
        if (depth[i] >= 0.1) != (depth[j] >= 0.1):
            points.append(quad[i] + (quad[j] - quad[i]) * ((0.1 - depth[i]) / (depth[j] - depth[i])))
    if not points:
        return []
    location = project(camera, torch.stack(points))[0] * torch.tensor([camera.size[1], camera.size[0]]) - 0.5
    return [(float(u), float(v)) for u, v in location]


def _shade(colour: Colour, shade: float) -> Colour:
    return tuple(min(255, round(c * shade)) for c in colour)  # type: ignore[return-value]


def _bytes(image: Any) -> Tensor:
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, 3)
