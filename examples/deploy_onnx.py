"""Export a transformers detector to ONNX in several forms, run them in onnxruntime, and compare boxes and times with torch.

    python examples/deploy_onnx.py --checkpoint path/to/a/saved/detector --photo street.jpg --folder exported
    python examples/deploy_onnx.py --model rt_detr                  # random weights: boxes mean nothing, times do

Forms: "grid_sample" exports the unpatched model with its own GridSample. "gather" and "onnxruntime" export the patched model,
with gathers or with our operators (`mx_driving.onnx.translations`). All run in turn, so that their times can be compared.
Without --photo the picture is scikit-learn's photograph of a temple. Needs
`pip install '.[examples]' 'transformers>=5' onnx onnxscript onnxruntime`.

A two-stage detector selects the queries with the best scores. If scores are nearly equal, as with random weights, rounding may
select other queries. Therefore each box of torch is compared with the nearest box of onnxruntime.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from detect import at_random, from_checkpoint, load_photo
from sentences import at_least_one, in_a_sentence
from torch import Tensor

import mx_driving
import mx_driving.onnx

FORMS = ("grid_sample", "gather", "onnxruntime")
OF_PATCHED = FORMS[1:]
PATCHED = "torch, patched"


class Detector(torch.nn.Module):
    """The model as a function from a picture to two tensors, logits and boxes, for export."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        found = self.model(pixel_values=pixel_values)
        return found["logits"], found["pred_boxes"]


def every_element(condition: Any) -> Any:
    """Translate aten._is_all_true, which torch 2.13 cannot. Unpatched D-FINE and RT-DETR v2 contain it."""
    import onnx
    import onnxscript

    op: Any = onnxscript.opset20
    smallest = op.ReduceMin(op.Cast(condition, to=onnx.TensorProto.INT32), keepdims=0)
    return op.Cast(smallest, to=onnx.TensorProto.BOOL)


def export(detector: Detector, pixels: Tensor, form: str, path: Path) -> None:
    table = mx_driving.onnx.translations(form) | {torch.ops.aten._is_all_true.default: every_element}
    program = torch.onnx.export(
        detector.eval(), (pixels,), dynamo=True, opset_version=20, custom_translation_table=table, verbose=False
    )
    assert program is not None
    program.save(path)


def in_onnxruntime(path: Path) -> Callable[[Tensor], list[Tensor]]:
    """Return a function that runs the exported detector on as many threads as torch."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.register_custom_ops_library(mx_driving.onnx.library())
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda pixels: [torch.from_numpy(array) for array in session.run(None, {name: pixels.numpy()})]


@contextmanager
def patched(detector: Detector, pixels: Tensor) -> Iterator[None]:
    """Patch the model inside a block only, because a patch changes all models of the same source file."""
    try:
        patch = mx_driving.patch(detector.model)
    except ValueError:
        name = type(detector.model).__name__
        raise ValueError(f"the model must sample deformably; got {name}, without a core to patch") from None
    try:
        yield
    finally:
        patch.restore()


def farthest(boxes: Tensor, expected: Tensor) -> float:
    """Return the largest distance of an expected box to the nearest of `boxes`, both [1, num_queries, 4]."""
    return float(torch.cdist(expected, boxes, p=torch.inf).min(-1).values.max())


def time_in_turn(
    calls: dict[str, Callable[[], Any]], seconds: float, within: Callable[[str], AbstractContextManager[None]]
) -> dict[str, list[float]]:
    """Return the times of each call in seconds. Calls run in turn, so that other programs disturb all calls alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.monotonic() + seconds
    while len(times[PATCHED]) < 3 or time.monotonic() < end:
        for name, call in calls.items():
            with within(name):
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
    return times


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photo", type=Path)
    parser.add_argument("--checkpoint", type=Path, help="folder of a saved detector")
    parser.add_argument("--model", default="rt_detr", help="without a checkpoint: the name of a model of transformers")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--seconds", type=at_least_one, default=60, help="of timing; all run in turn, three times at least")
    parser.add_argument("--folder", type=Path, default=Path("exported"), help="where the ONNX files are written")
    return parser.parse_args()


@torch.no_grad()
def run(options: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # torch.onnx warns about torchvision
    photo = load_photo(options.photo)
    model, inputs = from_checkpoint(options.checkpoint, photo) if options.checkpoint else at_random(options.model, photo)
    pixels, detector = inputs["pixel_values"], Detector(model)
    if "pred_boxes" not in model(pixel_values=pixels):
        raise ValueError(f"the model must be a detector, whose outputs hold pred_boxes; got {type(model).__name__}")
    options.folder.mkdir(parents=True, exist_ok=True)
    height, width = pixels.shape[-2:]
    print(f"{type(model).__name__}, {height} x {width}, {torch.get_num_threads()} threads", flush=True)
    with patched(detector, pixels):  # raises an error now and not after the first export
        pass
    expected = detector(pixels)[1]

    calls: dict[str, Callable[[Tensor], Any]] = {"torch": detector, PATCHED: detector}
    for form in options.forms:
        path = options.folder / f"{form}.onnx"
        print(f"writing {path}", flush=True)
        with patched(detector, pixels) if form in OF_PATCHED else nullcontext():
            export(detector, pixels, form, path)
        calls[f"onnxruntime, {form}"] = in_onnxruntime(path)

    def within(name: str) -> AbstractContextManager[None]:
        return patched(detector, pixels) if name == PATCHED else nullcontext()

    distances = {}
    for name, call in calls.items():
        with within(name):
            distances[name] = farthest(call(pixels)[1], expected)
    times = time_in_turn({name: partial(call, pixels) for name, call in calls.items()}, options.seconds, within)
    for name, distance in distances.items():
        print(f"{name:>28}: {1e3 * statistics.median(times[name]):8.1f} ms, boxes {distance:.1e}")
    print(f"the files are in {options.folder}")


def main() -> None:
    with in_a_sentence("deploy_onnx.py"):
        run(read_options())


if __name__ == "__main__":
    main()
