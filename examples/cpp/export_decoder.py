"""Export a detector's decoder for a C++ program that has no Python: `python examples/cpp/export_decoder.py FOLDER`.

Makes the folder and writes decoder.pt2, a package of AOTInductor; decoder.pt, the traced module; and example.pt with the inputs
`queries` and `memory` and the outputs of both in Python, `of_package` and `of_trace`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from mx_driving.nn import MultiScaleDeformableAttention

SIZES = [(32, 48), (16, 24), (8, 12), (4, 6)]  # (H, W) of the levels
EMBED_DIMS, QUERIES, LAYERS = 64, 100, 2


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = MultiScaleDeformableAttention(EMBED_DIMS, num_levels=len(SIZES))
        wide = 2 * EMBED_DIMS
        linear = torch.nn.Linear(EMBED_DIMS, wide), torch.nn.Linear(wide, EMBED_DIMS)
        self.feedforward = torch.nn.Sequential(linear[0], torch.nn.ReLU(), linear[1])
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(EMBED_DIMS) for _ in range(2))

    def forward(self, queries: Tensor, points: Tensor, memory: Tensor, shapes: Tensor, starts: Tensor) -> Tensor:
        queries = self.norms[0](queries + self.attention(queries, points, memory, shapes, starts))
        return self.norms[1](queries + self.feedforward(queries))


class Decoder(torch.nn.Module):
    """Queries [bs, num_queries, embed_dims] and the pixels of all levels -> boxes [bs, num_queries, 4], 0..1."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
        self.points, self.boxes = torch.nn.Linear(EMBED_DIMS, 2), torch.nn.Linear(EMBED_DIMS, 4)
        shapes = torch.tensor(SIZES)
        areas = shapes.prod(1)
        self.register_buffer("shapes", shapes)
        self.register_buffer("starts", areas.cumsum(0) - areas)

    def forward(self, queries: Tensor, memory: Tensor) -> Tensor:
        points = self.points(queries).sigmoid()[:, :, None].expand(-1, -1, len(SIZES), -1)
        for layer in self.layers:
            queries = layer(queries, points, memory, self.shapes, self.starts)
        return self.boxes(queries).sigmoid()


class Example(torch.nn.Module):
    """A module whose buffers are the tensors of the example, because C++ can read its file."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in zip(("queries", "memory", "of_package", "of_trace"), tensors, strict=True):
            self.register_buffer(name, tensor)


def export(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    decoder = Decoder().eval()
    inputs = torch.randn(1, QUERIES, EMBED_DIMS), torch.randn(1, sum(h * w for h, w in SIZES), EMBED_DIMS)
    with torch.no_grad():
        package = torch._inductor.aoti_compile_and_package(
            torch.export.export(decoder, inputs), package_path=str(folder / "decoder.pt2")
        )
        traced = torch.jit.trace(decoder, inputs)
        torch.jit.save(traced, folder / "decoder.pt")
        outputs = torch._inductor.aoti_load_package(package)(*inputs), traced(*inputs)
        torch.jit.save(torch.jit.script(Example(*inputs, *outputs)), folder / "example.pt")


if __name__ == "__main__":
    export(Path(sys.argv[1]))
