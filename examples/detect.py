"""Detect objects on a photograph with a transformers model, before and after `mx_driving.patch`, and draw where it looks.

    python examples/detect.py --checkpoint path/to/a/saved/detector --photo street.jpg --out detected.png
    python examples/detect.py --model rt_detr_v2                    # random weights: boxes mean nothing, times and looks do
    python examples/detect.py --page looks.html                     # and a page with the looks of every box in every layer

A checkpoint is a folder that `save_pretrained` wrote or that was downloaded before; nothing is fetched. Without --photo
the picture is scikit-learn's, of a temple. Needs `pip install '.[examples]' 'transformers>=5'`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from sentences import at_least_one, check_place, in_a_sentence
from torch import Tensor

import mx_driving

AT_RANDOM = ("d_fine", "deformable_detr", "rt_detr", "rt_detr_v2")


def load_photo(path: Path | None) -> Any:
    """Return a Pillow image."""
    from PIL import Image

    if path is not None:
        return Image.open(path).convert("RGB")
    from sklearn.datasets import load_sample_image

    return Image.fromarray(load_sample_image("china.jpg"))


def from_checkpoint(folder: Path, photo: Any) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return a trained model and its inputs, from local files."""
    from transformers import AutoImageProcessor, AutoModelForObjectDetection

    rule = f"--checkpoint={folder} must be the folder of a saved detector"
    if not os.path.isdir(folder):
        raise ValueError(f"{rule}; got no folder")
    try:
        processor = AutoImageProcessor.from_pretrained(folder, local_files_only=True)
        model = AutoModelForObjectDetection.from_pretrained(folder, local_files_only=True).eval()
    except Exception as error:  # transformers raises many classes
        raise ValueError(f"{rule}; got {error}") from None
    return model, dict(processor(images=photo, return_tensors="pt"))


def at_random(name: str, photo: Any) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return a detector in its default configuration with random weights, and the photograph with sides divisible by 32."""
    if name not in AT_RANDOM:
        raise ValueError(f"--model must be one of {', '.join(AT_RANDOM)}; got {name}")
    from transformers import AutoConfig, AutoModelForObjectDetection, ResNetConfig

    torch.manual_seed(0)
    backbone = ResNetConfig(out_features=["stage2", "stage3", "stage4"])  # instead of timm's
    changes = {"backbone_config": backbone, "use_timm_backbone": False} if name == "deformable_detr" else {}
    model = AutoModelForObjectDetection.from_config(AutoConfig.for_model(name, **changes)).eval()
    pixels = torch.frombuffer(bytearray(photo.tobytes()), dtype=torch.uint8).view(photo.height, photo.width, 3)
    size = [-(-side // 32) * 32 for side in (photo.height, photo.width)]
    picture = torch.nn.functional.interpolate(pixels.permute(2, 0, 1)[None] / 255, size, mode="bilinear", antialias=True)
    mean, spread = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])[..., None, None]
    return model, {"pixel_values": (picture - mean) / spread}


def median_ms(run: Any, rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def of_decoder(looks: list[mx_driving.viz.Look], queries: int) -> list[mx_driving.viz.Look]:
    """Return the looks of the decoder's layers, which have a query for each box."""
    fitting = [look for look in looks if look.locations.shape[1] == queries]
    if not fitting:
        raise ValueError(f"the model's decoder must sample deformably for its {queries} boxes; got {len(looks)} other layers")
    return fitting


def best(logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries with the highest scores, their scores and classes."""
    scores, classes = logits.sigmoid().max(-1)
    order = scores.argsort(descending=True)[:count]
    return order, scores[order], classes[order]


def draw(photo: Any, outputs: Any, look: mx_driving.viz.Look, names: dict[int, str], count: int, path: Path) -> None:
    """Draw the boxes on the photograph, and the points that the query of each box read in the last layer."""
    from matplotlib.figure import Figure

    width, height = photo.size
    image = torch.frombuffer(bytearray(photo.tobytes()), dtype=torch.uint8).view(height, width, 3)
    queries, scores, classes = best(outputs.logits[0].float(), count)
    boxes = outputs.pred_boxes[0].detach().float()
    columns = 3
    rows = -(-(count + 1) // columns)
    figure = Figure(figsize=(4.4 * columns, 4.6 * rows * height / width), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    none = torch.zeros(1, 1, 2), torch.zeros(1, 1)
    mx_driving.viz.sampling_points(image, *none, reference=boxes[queries], labels=False, ax=axes[0])
    axes[0].set_title(f"{count} best boxes", fontsize=9)
    for ax, query, score, kind in zip(axes[1:], queries.tolist(), scores.tolist(), classes.tolist(), strict=False):
        mx_driving.viz.sampling_points(
            image, look.locations[0, query], look.weights[0, query], reference=boxes[query][None], ax=ax
        )
        ax.set_title(f"query {query}: {names.get(kind, kind)}, {score:.2f}", fontsize=9)
    for ax in axes[count + 1 :]:
        ax.set_axis_off()
    figure.savefig(path, dpi=80)


def write_page(photo: Any, outputs: Any, looks: list[mx_driving.viz.Look], names: dict[int, str], path: Path) -> None:
    """Write a page of every box, and the points that its query read in each layer of the decoder."""
    scores, classes = outputs.logits[0].float().sigmoid().max(-1)
    found = zip(classes.tolist(), scores.tolist(), strict=True)
    labels = [f"{names.get(kind, f'class {kind}')}, {score:.2f}" for kind, score in found]
    layers = {f"decoder layer {number}": look for number, look in enumerate(looks, 1)}
    plane = mx_driving.viz.Plane(outputs.pred_boxes[0], photo, labels=labels)
    mx_driving.viz.page(layers, {"photograph": photo}, path, plane=plane, title="Where the boxes' queries look")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photo", type=Path)
    parser.add_argument("--checkpoint", type=Path, help="folder of a saved detector")
    parser.add_argument("--model", default="rt_detr_v2", help="without a checkpoint: the name of a model of transformers")
    parser.add_argument("--count", type=at_least_one, default=5, help="boxes to draw")
    parser.add_argument("--rounds", type=at_least_one, default=5, help="runs to time, before and after")
    parser.add_argument("--out", type=Path, default=Path("detected.png"))
    parser.add_argument("--page", type=Path, help="page (HTML) to write as well")
    return parser.parse_args()


@torch.no_grad()
def run(options: argparse.Namespace) -> None:
    check_place("--out", options.out)
    if options.page is not None:
        check_place("--page", options.page)
    photo = load_photo(options.photo)
    print(f"a photograph of {photo.width} x {photo.height} pixels", flush=True)
    if options.checkpoint:
        model, inputs = from_checkpoint(options.checkpoint, photo)
    else:
        model, inputs = at_random(options.model, photo)
    before = model(**inputs)
    if "pred_boxes" not in before:
        raise ValueError(f"the model must be a detector, whose outputs hold pred_boxes; got {type(model).__name__}")
    ms_before = median_ms(lambda: model(**inputs), options.rounds)
    try:
        done = mx_driving.patch(model)
    except ValueError:
        raise ValueError(f"the model must sample deformably; got {type(model).__name__}, without a core to patch") from None
    print(done)
    with mx_driving.viz.recording() as looks:
        after = model(**inputs)
    ms_after = median_ms(lambda: model(**inputs), options.rounds)
    difference = max(float((after[name] - before[name]).abs().max()) for name in ("logits", "pred_boxes"))
    height, width = inputs["pixel_values"].shape[-2:]
    print(f"{type(model).__name__}, {height} x {width}: {ms_before:.0f} ms before, {ms_after:.0f} ms after")
    print(f"largest difference of logits and boxes: {difference:.1e}; {len(looks)} layers sample deformably")
    names = getattr(model.config, "id2label", {}) if options.checkpoint else {}
    decoder = of_decoder(looks, after.logits.shape[1])
    draw(photo, after, decoder[-1], names, options.count, options.out)
    print(f"the picture is in {options.out}")
    if options.page is not None:
        write_page(photo, after, decoder, names, options.page)
        print(f"the page is in {options.page}")


def main() -> None:
    with in_a_sentence("detect.py"):
        run(read_options())


if __name__ == "__main__":
    main()
