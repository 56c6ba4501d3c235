"""Build, compare and time the deformable models of transformers before and after `mx_driving.patch`."""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import statistics
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

import mx_driving
from mx_driving._agreement import difference_beside_ties, model_difference
from mx_driving._measure import plain, report
from mx_driving._measure.report import Row
from mx_driving._measure.speed import interleaved
from mx_driving._operator.rules import Problem, need

# The outputs of detectors and segmenters that are continuous in the inputs; a reading order is not.
OUTPUTS = (
    "logits", "pred_boxes", "class_queries_logits", "masks_queries_logits", "decoder_class_logits", "decoder_coord_logits",
)  # fmt: skip
TASKS = ("ForObjectDetection", "ForUniversalSegmentation")
# The names on the pages, by folder of transformers/models.
TITLES = {
    "d_fine": "D-FINE", "deformable_detr": "Deformable DETR", "deimv2": "DEIMv2", "grounding_dino": "Grounding DINO",
    "lw_detr": "LW-DETR", "mask2former": "Mask2Former", "mm_grounding_dino": "MM Grounding DINO", "omdet_turbo": "OmDet-Turbo",
    "oneformer": "OneFormer", "pp_doclayout_v2": "PP-DocLayout v2", "pp_doclayout_v3": "PP-DocLayout v3",
    "pp_doclayout_v4": "PP-DocLayout v4", "rf_detr": "RF-DETR", "rt_detr": "RT-DETR", "rt_detr_v2": "RT-DETR v2",
}  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """How to build and run a model: the differences from its default configuration, and the reason."""

    changes: Callable[[type], dict[str, Any]] = lambda config: {}
    inputs: Callable[[], dict[str, Tensor]] = dict
    multiple: int = 32  # the sides of the picture must be a multiple of this number of pixels
    smallest: int = 0  # the least size of the shorter side in pixels
    why: str = ""


def _swin(*stages: int) -> Any:
    from transformers import SwinConfig  # pyright: ignore

    return SwinConfig(out_indices=list(stages))  # pyright: ignore


def _resnet() -> Any:
    from transformers import ResNetConfig  # pyright: ignore

    return ResNetConfig(out_features=["stage2", "stage3", "stage4"])  # pyright: ignore


def _words(*ids: int) -> dict[str, Tensor]:
    return {"input_ids": torch.tensor([list(ids)])}


def _classes() -> dict[str, Tensor]:
    """Return three class names and a task as CLIP's tokens. Each ends with 49407."""
    names, task = (
        torch.tensor([[49406, 2368, 49407], [49406, 1929, 49407], [49406, 1615, 49407]]),
        torch.tensor([[49406, 4, 49407]]),
    )
    masks = {"classes_attention_mask": torch.ones_like(names), "tasks_attention_mask": torch.ones_like(task)}
    return {"classes_input_ids": names, "tasks_input_ids": task, "classes_structure": torch.tensor([3]), **masks}


_PROMPT = Recipe(inputs=lambda: _words(101, 4937, 1012, 3899, 1012, 102))
_OWN_BACKBONE = "a backbone of transformers' own instead of timm's"
RECIPES = {
    "deformable_detr": Recipe(lambda c: {"backbone_config": _resnet(), "use_timm_backbone": False}, why=_OWN_BACKBONE),
    "grounding_dino": _PROMPT,
    "lw_detr": Recipe(
        lambda c: {"projector_scale_factors": [1.0]},
        multiple=64,
        smallest=320,
        why="one level, as published; by default there is none",
    ),
    "mm_grounding_dino": _PROMPT,
    "omdet_turbo": Recipe(
        lambda c: {
            "backbone_config": _swin(2, 3, 4),
            "use_timm_backbone": False,
            "apply_layernorm_after_vision_backbone": False,
        },
        _classes,
        smallest=256,
        why=_OWN_BACKBONE,
    ),
    "oneformer": Recipe(inputs=lambda: {"task_inputs": torch.arange(1, 78)[None]}),
    "pp_doclayout_v2": Recipe(
        lambda c: {"class_thresholds": [0.5] * c().num_labels, "class_order": list(range(c().num_labels))},
        why="class thresholds and order, which have no defaults",
    ),
    "rf_detr": Recipe(multiple=56, smallest=280),
}


def of_transformers(outputs: Any) -> dict[str, Tensor]:
    """Return the output tensors of a transformers model by name."""
    return {name: outputs[name] for name in OUTPUTS if name in outputs and outputs[name] is not None}


@dataclass
class Subject:
    """A model with random weights, its inputs, and how to run it."""

    name: str
    model: torch.nn.Module
    inputs: dict[str, Any]
    read: Callable[[Any], dict[str, Tensor]] = of_transformers

    def forward(self) -> dict[str, Tensor]:
        return self.read(self.model(**self.inputs))

    def backward(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the outputs, and the gradients of a fixed weighted sum of the outputs for the parameters that have one."""
        forget(self.model)
        outputs = self.forward()
        mixtures = [_mixture(out) for out in outputs.values()]
        parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(list(outputs.values()), list(parameters.values()), mixtures, allow_unused=True)
        return outputs, {name: g for name, g in zip(parameters, gradients, strict=True) if g is not None}


def forget(model: torch.nn.Module) -> None:
    """Empty OmDet-Turbo's cache, which keeps features of texts with their graph from call to call."""
    for name in ("language_cache_class", "language_cache_prompt"):
        if hasattr(model, name):
            kept: Any = getattr(model, name)
            kept.cache.clear()
            kept.current_load = 0


def _mixture(out: Tensor) -> Tensor:
    mixture = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return torch.where(out.isfinite(), mixture, 0)  # logits of absent words are -inf


def photograph(height: int, width: int) -> Tensor:
    """Return scikit-learn's photograph of a temple, [1, 3, height, width], normalised. Do not import scikit-learn."""
    from PIL import Image

    package = importlib.util.find_spec("sklearn")
    assert package is not None
    file = pathlib.Path(str(package.origin)).with_name("datasets") / "images" / "china.jpg"
    picture = torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1)[None] / 255
    return normalised(torch.nn.functional.interpolate(picture, (height, width), mode="bilinear", antialias=True))


def normalised(picture: Tensor) -> Tensor:
    """Normalise a picture of 0..1, [..., 3, H, W], by the mean and deviation of ImageNet."""
    mean, spread = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return (picture - mean[:, None, None]) / spread[:, None, None]


def build(name: str, height: int, width: int, dtype: torch.dtype = torch.float32, **changes: Any) -> Subject:
    """Return the model of transformers/models/<name> with random weights of seed 0, and a photograph as its input. The
    configuration is the default with the changes of the model's recipe and `changes`."""
    recipe = RECIPES.get(name, Recipe())
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    kind = next(getattr(module, n) for n in module.__all__ for task in TASKS if n.endswith(task))
    sides = (max(n, recipe.smallest) for n in (height, width))
    sides = (-(-n // recipe.multiple) * recipe.multiple for n in sides)
    torch.manual_seed(0)
    model = kind(kind.config_class(**{**recipe.changes(kind.config_class), **changes})).eval()
    subject = Subject(name, model.to(dtype), {"pixel_values": photograph(*sides).to(dtype), **recipe.inputs()})
    make_sensitive(subject)
    return subject


def make_sensitive(subject: Subject) -> None:
    """Change the model so that a wrong sample shows in its outputs.

    Offsets get random weights. An untrained model samples at pixel centres, where a rounding error decides the gradient of a
    location. Normalisations get the statistics of this picture. With their initial statistics some models damp features to
    1e-10.
    """
    hooks = []
    for name, p in subject.model.named_parameters():
        if "sampling_offsets" in name or "attention_weights" in name:
            torch.nn.init.normal_(p, std=0.3 if name.endswith("bias") else 0.05)
    for part in subject.model.modules():
        if hasattr(part, "running_var"):
            hooks.append(part.register_forward_pre_hook(_take_statistics))
    with torch.no_grad():
        subject.model(**subject.inputs)
    for hook in hooks:
        hook.remove()


def _take_statistics(norm: Any, inputs: tuple[Tensor, ...]) -> None:
    axes = [axis for axis in range(inputs[0].dim()) if axis != 1]
    norm.running_mean.copy_(inputs[0].mean(axes))
    norm.running_var.copy_(inputs[0].var(axes).clamp_min(1e-6))


def carriers() -> list[str]:
    """Return the names of the transformers models that have a core."""
    try:
        with mx_driving.patched("transformers", modules=False) as done:
            return sorted({name.split(".")[2] for name in done.replaced})
    except ValueError:
        rule = "have models that sample deformably (version 5 has)"
        raise Problem(f"the installed transformers must {rule}; got no core to patch") from None


def compare(subject: Subject) -> tuple[float, float]:
    """Return the largest differences of outputs and gradients after patching, over patched cores and patched modules."""
    theirs = subject.backward()
    differences = []
    for modules in (False, True):
        with mx_driving.patched(subject.model, modules=modules):
            ours = subject.backward()
        differences.append([model_difference(mine, original) for mine, original in zip(ours, theirs, strict=True)])
    outputs, gradients = map(max, zip(*differences, strict=True))
    return outputs, gradients


Run = Callable[[], Any]
Height = Annotated[int, typer.Option(min=1, help="Height of the photograph in pixels.")]
Width = Annotated[int, typer.Option(min=1, help="Width of the photograph in pixels.")]


@torch.no_grad()
def before_and_after(subject: Subject, seconds: float) -> tuple[float, float, int]:
    """Return medians in seconds of the whole model, timed in turn, and the number of rounds."""
    ways = {"before": nullcontext, "after": lambda: mx_driving.patched(subject.model)}
    times = interleaved(dict.fromkeys(ways, subject.forward), seconds, lambda name: ways[name]())
    before, after = map(statistics.median, times.values())
    return before, after, min(map(len, times.values()))


@torch.no_grad()
def time_parts(subject: Subject, seconds: float) -> Row:
    """Return lower quartiles of interleaved times in milliseconds, as columns: of the whole model, of its attention modules
    alone, and of its sampling alone, in plain torch and by the operator. Modules and sampling get the model's own inputs."""
    with mx_driving.patched(subject.model, modules=False), mx_driving.viz.recording() as looks:
        subject.forward()
    cores = {
        name: lambda where=where: [
            getattr(where, k.operator)(k.table, k.shapes, k.starts, k.locations, k.weights) for k in looks
        ]
        for name, where in (("before", plain), ("after", mx_driving))
    }
    before, after = _quartiles(interleaved(cores, seconds))
    calls = _calls_of_modules(subject)
    of_modules = _three_ways("modules", subject, lambda: [module(*args, **kwargs) for module, args, kwargs in calls], seconds)
    columns = {"core before ms": f"{before:.4g}", "core after ms": f"{after:.4g}", "core speed-up": f"{before / after:.3g}"}
    return {**_three_ways("whole", subject, subject.forward, seconds), **of_modules, **columns}


def _three_ways(what: str, subject: Subject, run: Run, seconds: float) -> Row:
    """Return columns: before, with patched cores, and with patched modules."""
    ways = {
        "before": nullcontext,
        "cores": lambda: mx_driving.patched(subject.model, modules=False),
        "modules": lambda: mx_driving.patched(subject.model),
    }
    times = _quartiles(interleaved(dict.fromkeys(ways, run), seconds, lambda name: ways[name]()))
    columns = {f"{what} {way} ms": f"{time:.4g}" for way, time in zip(ways, times, strict=True)}
    return {**columns, f"{what} speed-up": f"{times[0] / times[2]:.2f}", f"{what} gain": f"{times[1] / times[2]:.3f}"}


def _quartiles(times: dict[str, list[float]]) -> list[float]:
    """Return lower quartiles in milliseconds: other programs disturb them less than medians, chance less than minima."""
    return [1e3 * statistics.quantiles(of_way, n=4)[0] for of_way in times.values()]


def print_rows(rows: Iterable[Row], csv: Path | None, *facts: str) -> None:
    """Print each row at once, and rewrite the file with all rows so far. `facts` are written beside the machine."""
    done = []
    for row in rows:
        done.append(row)
        print(*(f"{column} {cell}" for column, cell in row.items()), sep=", ", flush=True)
        if csv:
            report.write_rows(done, csv, *facts)


def _calls_of_modules(subject: Subject) -> list[tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """Return the calls of attention modules in a run of the model: module, arguments."""
    with mx_driving.patched(subject.model, modules=False) as done:
        cores = set(done.replaced)
    with mx_driving.patched(subject.model) as done:
        kinds = set(done.replaced) - cores
    calls, hooks = [], []
    for part in subject.model.modules():
        if f"{type(part).__module__}.{type(part).__qualname__}" in kinds:
            hooks.append(part.register_forward_pre_hook(lambda *call: calls.append(call), with_kwargs=True))
    try:
        subject.forward()
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def need_transformers(what: str) -> None:
    """Raise a Problem unless transformers is installed, and scikit-learn, which has the photograph."""
    need(what, "transformers>=5", "transformers")
    need(what, "[examples]", "sklearn")


@torch.no_grad()
def output_difference(subject: Subject) -> tuple[float, int]:
    """Return the largest difference over queries that kept their ranks, and the number of the other queries."""
    theirs = subject.forward()
    with mx_driving.patched(subject.model):
        ours = subject.forward()
    return difference_beside_ties(ours, theirs)
