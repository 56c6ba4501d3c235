"""The operator as a layer for Hugging Face's `kernels`. That package puts layers from a mapping into models of transformers.

    mx_driving.kernels.register()
    kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device="cpu")

Ten models of transformers 5 name their sampling layer "MultiScaleDeformableAttention": Deformable DETR, Grounding DINO,
LW-DETR, MM Grounding DINO, OmDet-Turbo, PP-DocLayout v2 to v4, RF-DETR and RT-DETR. `mx_driving.patch` does more: it also
replaces the sampling layers of other models, and whole attention modules.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._operator.rules import fail
from .._package_files import read_text
from ..ops.multi_scale_deformable_attn import multi_scale_deformable_attn
from . import libreyolo

__all__ = ["MultiScaleDeformableAttention", "libreyolo", "mapping", "register", "write"]

NAME = "MultiScaleDeformableAttention"  # transformers' name of the layer
DEVICES = ("cpu", "cuda")
_NEEDED = 'mx_driving.kernels.register needs the package kernels: pip install "kernels>=0.17"'


class MultiScaleDeformableAttention(torch.nn.Module):
    """The sampling layer of transformers, by our operator. It has no state, because `kernels` copies only `forward`."""

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        value: Tensor,
        value_spatial_shapes: Tensor,
        value_spatial_shapes_list: Sequence[Sequence[int]],
        level_start_index: Tensor,
        sampling_locations: Tensor,
        attention_weights: Tensor,
        im2col_step: int,
    ) -> Tensor:
        """Return `mx_driving.multi_scale_deformable_attn` of the inputs.

        Transformers passes the shapes twice: as a tensor, and as a list for its plain torch. The list and im2col_step are
        ignored.
        """
        levels = value_spatial_shapes, level_start_index
        return multi_scale_deformable_attn(value, *levels, sampling_locations, attention_weights)


@dataclass(frozen=True)
class _Repository:
    """An entry of a mapping of `kernels`: it loads the layer. It is a dataclass, so that entries of a layer compare equal."""

    layer_name: str = NAME

    def load(self) -> type[torch.nn.Module]:
        return MultiScaleDeformableAttention

    def __str__(self) -> str:
        return f"mx_driving, layer {self.layer_name}"


def mapping() -> dict[str, dict[Any, Any]]:
    """Return a mapping for `kernels.use_kernel_mapping`: layer name -> device -> entry that loads the layer, for all modes."""
    return {NAME: {device: _Repository() for device in DEVICES}}


def register() -> None:
    """Let `kernels.kernelize` use the layer from now on, on CPUs and CUDA GPUs.

    After this, transformers' `use_kernels=True` uses the layer on a CPU. On a GPU transformers registers its own choice each
    time: call `kernels.kernelize` yourself, or give a folder that `write` made to `transformers.KernelConfig`.

    Raises:
        RuntimeError: `kernels` is not installed.
    """
    try:
        from kernels import register_kernel_mapping  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as missing:
        if missing.name != "kernels":
            raise
        raise RuntimeError(_NEEDED) from None
    register_kernel_mapping(mapping())


def write(folder: str | os.PathLike[str]) -> pathlib.Path:
    """Write the layer as a kernel repository, for `kernels.LocalLayerRepository`, transformers' `KernelConfig`, or the hub.

    The repository's code imports this package. So `kernels` and this package must be installed where the repository is loaded.
    Writing does not need `kernels`.

    Args:
        folder: the repository. It is made if it does not exist; files of the same names are replaced.

    Returns:
        The folder's absolute path.

    Raises:
        TypeError, ValueError: folder is no path, or nothing can be written there.

    >>> import tempfile, mx_driving
    >>> folder = mx_driving.kernels.write(tempfile.mkdtemp())
    >>> sorted(path.name for path in (folder / "build").iterdir())
    ['torch-cpu', 'torch-cuda']
    """
    if not isinstance(folder, (str, os.PathLike)):
        fail(TypeError, "folder", "be a path", type(folder).__name__)
    sources = {name: read_text(f"kernels/_hub/{name}") for name in ("__init__.py", "layers.py")}  # the repository's code
    try:
        if not os.fspath(folder):
            raise ValueError("no name")
        root = pathlib.Path(os.path.realpath(folder))
        for device in DEVICES:
            variant = root / "build" / f"torch-{device}"
            variant.mkdir(parents=True, exist_ok=True)
            # The entries are those of kernels 0.17. python-depends takes names of a fixed list, and our package is not in it.
            metadata = {"id": f"_mx_driving_{device}", "name": "mx-driving", "version": 1, "license": "Apache-2.0"}
            metadata |= {"python-depends": [], "backend": {"type": device}}
            for name, text in {**sources, "metadata.json": json.dumps(metadata, indent=2) + "\n"}.items():
                (variant / name).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:  # a zero byte in the path raises ValueError
        fact = f"{os.fspath(folder)!r}: {getattr(error, 'strerror', None) or error}"
        fail(ValueError, "folder", "be a folder that can be made and written to", fact)
    return root
