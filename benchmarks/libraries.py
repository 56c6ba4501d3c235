"""Models of libraries before and after `mx_driving.patch`, with random weights, each on a photograph.

    python benchmarks/libraries.py rfdetr ultralytics --only '*-l' --onnx --csv benchmarks/results/libraries.csv

A line for each model: what is replaced, the largest difference of the outputs in float64 as a fraction of the largest
magnitude, the number of queries that exchanged their ranks because their scores nearly tie, and the median times of the whole
model before and after. Nothing is downloaded: if a library's builder would download a part, we make it with random weights.
`make time-libraries` measures all models but those of transformers, which time_models.py measures.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.metadata
import importlib.util
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import models
import torch
import torchvision_names
import typer
from models import Height, Subject, Width, make_sensitive, photograph
from torch import Tensor

import mx_driving.onnx
from mx_driving._agreement import difference_beside_ties
from mx_driving._operator.rules import first_line, need
from mx_driving.cli.start import Csv, Only, Seconds, matching, start
from mx_driving.onnx import _outputs

Build = Callable[[int, int], Subject]  # from the height and width of the photograph


@dataclass(frozen=True)
class Library:
    """A library: its name for pip, its package, its models, and the other packages that these need."""

    distribution: str
    package: str
    models: Callable[[], Mapping[str, Build]]
    needs: tuple[str, ...] = ()

    @property
    def version(self) -> str:
        return f"{self.distribution} {importlib.metadata.version(self.distribution)}"


def _side(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _ultralytics(configuration: str) -> Build:
    """Build RT-DETR from the configuration file that the package contains."""

    def build(height: int, width: int) -> Subject:
        tasks = importlib.import_module("ultralytics.nn.tasks")
        torch.manual_seed(0)
        model = tasks.RTDETRDetectionModel(configuration, nc=80, verbose=False).eval()
        picture = photograph(_side(height, 32), _side(width, 32))
        return _ready(Subject(configuration, model, {"x": picture}, _of_last_layer))

    return build


def _of_last_layer(outputs: Any) -> dict[str, Tensor]:
    """Return ultralytics' boxes and logits before the selection of the best."""
    _, (boxes, logits, *_) = outputs
    return {"boxes": boxes[-1], "logits": logits[-1]}


def _rfdetr(name: str) -> Build:
    """Build RF-DETR. The picture has the resolution of its position embeddings."""

    def build(height: int, width: int) -> Subject:
        config = getattr(importlib.import_module("rfdetr.config"), f"RFDETR{name}Config")(pretrain_weights="random")
        torch.manual_seed(0)
        model = importlib.import_module("rfdetr.models.lwdetr").build_model_from_config(config).eval()
        inputs = {"samples": photograph(config.resolution, config.resolution)}
        return _ready(Subject(name, model, inputs, _logits_and_boxes))

    return build


def _logits_and_boxes(outputs: Any) -> dict[str, Tensor]:
    return {name: outputs[name] for name in ("pred_logits", "pred_boxes")}


class _Words(torch.nn.Module):
    """BERT of transformers 5, in place of groundingdino's wrapper, which supports only the BERT of transformers 4."""

    def __init__(self, bert_model: Any) -> None:
        super().__init__()
        self.bert, self.config = bert_model, bert_model.config

    def forward(self, attention_mask: Tensor, **inputs: Tensor) -> Any:
        return self.bert(attention_mask=attention_mask[:, None], **inputs)


VOCABULARY = "[PAD] [UNK] [CLS] [SEP] [MASK] . ? a temple tree person"


def _grounding_dino(configuration: str) -> Build:
    """Build GroundingDINO from its own configuration, with a small vocabulary."""

    def build(height: int, width: int) -> Subject:
        package = importlib.import_module("groundingdino")
        whole = importlib.import_module("groundingdino.models.GroundingDINO.groundingdino")
        file = Path(str(package.__file__)).parent / "config" / f"{configuration}.py"
        args = importlib.import_module("groundingdino.util.slconfig").SLConfig.fromfile(str(file))
        args.device = "cpu"
        args.use_checkpoint = args.use_transformer_ckpt = False  # torch.autograd.grad cannot pass a checkpoint of this kind
        torch.manual_seed(0)
        with (
            mock.patch.object(whole, "BertModelWarper", _Words),
            mock.patch.object(whole.get_tokenlizer, "get_tokenlizer", return_value=_tokenizer()),
            mock.patch.object(whole.get_tokenlizer, "get_pretrained_language_model", return_value=_bert()),
        ):
            model = importlib.import_module("groundingdino.models").build_model(args).eval()
        inputs = {"samples": photograph(height, width), "captions": ["a temple . tree . person ."]}
        return _ready(Subject(configuration, model, inputs, _logits_and_boxes))

    return build


def _tokenizer() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "vocab.txt"
        file.write_text("\n".join(VOCABULARY.split()), encoding="utf-8")
        return importlib.import_module("transformers").BertTokenizer(str(file))


def _bert() -> Any:
    transformers = importlib.import_module("transformers")
    return transformers.BertModel(transformers.BertConfig())


def _ready(subject: Subject) -> Subject:
    make_sensitive(subject)
    return subject


CLOSE = 1e-3  # the allowed difference of float32 outputs of onnxruntime and torch, as a fraction of the largest magnitude
RT_DETR = ("rtdetr-l", "rtdetr-x", "rtdetr-resnet50", "rtdetr-resnet101")
RF_DETR = ("Nano", "Small", "Medium", "Base", "Large")
GROUNDING_DINO = ("GroundingDINO_SwinT_OGC", "GroundingDINO_SwinB_cfg")
LIBRARIES = {
    "groundingdino": Library(
        "groundingdino-py", "groundingdino", lambda: {name: _grounding_dino(name) for name in GROUNDING_DINO}, ("transformers",)
    ),
    "rfdetr": Library("rfdetr", "rfdetr", lambda: {name: _rfdetr(name) for name in RF_DETR}),
    "ultralytics": Library("ultralytics", "ultralytics", lambda: {name: _ultralytics(f"{name}.yaml") for name in RT_DETR}),
}


def need_library(name: str) -> Library:
    """Return the library. Raise a Problem unless it and scikit-learn, which has the photograph, are installed."""
    library = LIBRARIES[name]
    need("libraries.py", library.distribution, library.package, *library.needs)
    need("libraries.py", "[examples]", "sklearn")
    return library


def in_float64(subject: Subject) -> Subject:
    """Return a copy in float64, with the same weights and picture."""
    inputs = {name: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for name, t in subject.inputs.items()}
    return Subject(subject.name, copy.deepcopy(subject.model).double(), inputs, subject.read)


def difference(subject: Subject) -> tuple[float, int]:
    """Patch the model in float64. Return the largest difference, and the number of queries that exchanged their ranks."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # some models make positions of the default dtype
    try:
        return models.output_difference(in_float64(subject))
    finally:
        torch.set_default_dtype(before)


def replaced(subject: Subject) -> list[str]:
    """Return the names of the functions and classes that `patch` replaces in the model."""
    with mx_driving.patched(subject.model) as done:
        return [name.rpartition(".")[2] for name in done.replaced]


class _Tensors(torch.nn.Module):
    """The model as a function from a picture to a tuple of tensors, for export."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.model, self.read = subject.model, subject.read
        self.picture, *_ = [name for name, t in subject.inputs.items() if isinstance(t, Tensor) and t.dim() == 4]
        self.others = {name: tensor for name, tensor in subject.inputs.items() if name != self.picture}

    def forward(self, picture: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.read(self.model(**{self.picture: picture}, **self.others)).values())


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Silence exporters, which print whole graphs when they fail."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@torch.no_grad()
def exports(subject: Subject) -> str:
    """Return "yes" if the patched model's ONNX file gives torch's outputs in onnxruntime, beside near ties of the ranking.
    Otherwise return the reason, and the difference of the unpatched model."""
    whole = _Tensors(subject).eval()
    picture = subject.inputs[whole.picture]

    def compare() -> float:
        with silent():
            ours = _in_onnxruntime(whole, picture)
        named = [{str(index): out for index, out in enumerate(outputs)} for outputs in (ours, whole(picture))]
        return difference_beside_ties(*named)[0]

    try:
        with mx_driving.patched(subject.model):
            difference = compare()
        return "yes" if difference <= CLOSE else f"no: outputs differ by {difference:.0e}; not patched, by {compare():.0e}"
    except Exception as error:  # an exporter may raise anything, and that is the result
        return f"no: {_in_one_line(error)}"


def _in_onnxruntime(whole: torch.nn.Module, picture: Tensor) -> list[Tensor]:
    table = mx_driving.onnx.translations("onnxruntime")
    program = torch.onnx.export(whole, (picture,), dynamo=True, opset_version=20, custom_translation_table=table, verbose=False)
    assert program is not None
    with tempfile.TemporaryDirectory() as folder:
        program.save(f"{folder}/model.onnx")
        session = _outputs.open_with_library(Path(folder, "model.onnx"))
    return [torch.from_numpy(output) for output in session.run(None, {session.get_inputs()[0].name: picture.numpy()})]


def _in_one_line(error: BaseException) -> str:
    """Return the first sentence of the innermost error, which exporters wrap in their own."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error).split(". ")[0]


def row(library: Library, name: str, subject: Subject, seconds: float, onnx: bool) -> dict[str, Any]:
    """Return the row of one model."""
    changed = replaced(subject)
    largest, off = difference(subject)
    before, after, rounds = models.before_and_after(subject, seconds)
    return {
        "library": library.version,
        "model": name,
        "replaced": " ".join(changed),
        "difference": f"{largest:.0e}",
        "off": off,
        "before ms": round(1e3 * before, 1),
        "after ms": round(1e3 * after, 1),
        "speed-up": round(before / after, 3),
        "rounds": rounds,
        "onnx": exports(subject) if onnx else "",
    }


def main(
    library: Annotated[list[str], typer.Argument(help=f"Libraries: {', '.join(LIBRARIES)}.")],
    only: Only = None,
    height: Height = 480,
    width: Width = 640,
    seconds: Seconds = 4.0,
    onnx: Annotated[bool, typer.Option(help="Export each patched model and run it in onnxruntime.")] = False,
    csv: Csv = None,
) -> None:
    if importlib.util.find_spec("torchvision"):
        torchvision_names.declare()
    names = matching("library", library, LIBRARIES)
    builders = [(name, model, build) for name in names for model, build in need_library(name).models().items()]
    chosen = matching("--only", only, [model for _, model, _ in builders])
    rows = (
        row(LIBRARIES[name], model, build(height, width), seconds, onnx) for name, model, build in builders if model in chosen
    )
    models.print_rows(rows, csv)


if __name__ == "__main__":
    start("libraries.py", main)
