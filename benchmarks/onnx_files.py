"""Compare and time the ONNX files that libraries export, before and after `mx_driving.onnx.fuse`.

    python benchmarks/onnx_files.py --only '*rt_detr*' --seconds 30 --csv benchmarks/results/onnx-files.csv

    python benchmarks/onnx_files.py --forms --side 320 --csv docs/support/onnx-forms.csv

Models have random weights; nothing is downloaded. `make time-onnx-files` and `make onnx-forms` run all.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import models
import onnx_ir
import torch
import torchvision_names
import typer
from libraries import silent

import mx_driving.onnx
from mx_driving.cli.start import Csv, Only, Seconds, Threads, matching, start, use_threads
from mx_driving.onnx import _outputs
from mx_driving.onnx._forms import NODES
from mx_driving.onnx._fuse import with_ours

Export = Callable[[Path, int], Path]  # from a folder and the picture's side to the file


@dataclass(frozen=True)
class Exporter:
    """A library's own export of a model: the nodes in its file (`writing`) and the number of matches (`places`)."""

    distribution: str
    model: str
    writing: str
    places: int
    export: Export


def make_sensitive(model: torch.nn.Module, picture: str, side: int) -> None:
    """Make the model's weights sensitive to wrong samples, like `models.build`. `picture` names the argument of forward."""
    models.make_sensitive(models.Subject("", model.eval(), {picture: models.photograph(side, side)}))


def of_transformers(name: str, free: bool = False) -> Export:
    """Export by transformers' OnnxExporter."""

    def export(folder: Path, side: int) -> Path:
        exporter = importlib.import_module("transformers.exporters.exporter_onnx")
        subject = models.build(name, side, side)
        exported = exporter.OnnxExporter().export(subject.model, dict(subject.inputs), config=exporter.OnnxConfig(dynamic=free))
        program = exported.model if isinstance(exported, torch.onnx.ONNXProgram) else exported.program  # before 5.23
        onnx_ir.save(program, folder / "model.onnx")
        return folder / "model.onnx"

    return export


def of_ultralytics(folder: Path, side: int) -> Path:
    """Export by `RTDETR.export`, which writes to the working folder."""
    model = importlib.import_module("ultralytics").RTDETR("rtdetr-l.yaml")
    make_sensitive(model.model, "x", side)
    before = Path.cwd()
    os.chdir(folder)
    try:
        return folder / model.export(format="onnx", imgsz=side)
    finally:
        os.chdir(before)


def of_rfdetr(name: str) -> Export:
    """Export by `RFDETR.export`, at the resolution of the model's position embeddings."""

    def export(folder: Path, side: int) -> Path:
        model = getattr(importlib.import_module("rfdetr"), name)(pretrain_weights=None, device="cpu")
        make_sensitive(model.model.model, "samples", model.model_config.resolution)
        model.export(output_dir=str(folder), verbose=False)
        return next(folder.glob("*.onnx"))

    return export


def of_libreyolo(name: str, size: str) -> Export:
    """Export by LibreYOLO's `export`, with a dynamic batch. Do not download the weights of the backbone."""

    def export(folder: Path, side: int) -> Path:
        load = torch.nn.Module.load_state_dict
        fetched: dict[str, Any] = {}
        with (
            mock.patch("torch.hub.load_state_dict_from_url", return_value=fetched),
            mock.patch.object(
                torch.nn.Module, "load_state_dict", lambda self, state, *a, **k: state is fetched or load(self, state, *a, **k)
            ),
        ):
            model = getattr(importlib.import_module("libreyolo"), name)(None, size=size)
        make_sensitive(model.model, "x", side)
        return Path(model.export(format="onnx", imgsz=side, output_path=str(folder / "model.onnx"), simplify=False))

    return export


def of_dfine_seg(folder: Path, side: int) -> Path:
    """Export by D-FINE-seg's `export_to_onnx`. Replace the training helpers that its module imports."""
    training: Any = types.ModuleType("dfine_seg.dl.utils")
    training.get_latest_experiment_name = None
    with mock.patch.dict(sys.modules, {training.__name__: training}):
        exporter = importlib.import_module("dfine_seg.dl.export")
    build = importlib.import_module("dfine_seg.model.dfine").build_model
    model = build("s", 80, False, "cpu", img_size=[side, side])
    make_sensitive(model, "x", side)
    whole = exporter.ExportWrapper(model, exporter.DFINEPostProcessor(80, 300)).eval()
    picture, outputs = torch.rand(1, 3, side, side), ["labels", "boxes", "scores"]
    return exporter.export_to_onnx(whole, folder / "model.onnx", picture, 1, False, False, "input", outputs)


EXPORTERS = (
    Exporter("ultralytics", "rtdetr-l", "GridSample", 6, of_ultralytics),
    Exporter("rfdetr", "RFDETRNano", "GridSample", 2, of_rfdetr("RFDETRNano")),
    Exporter("libreyolo", "LibreRTDETR r18", "GridSample", 3, of_libreyolo("LibreRTDETR", "r18")),
    Exporter("libreyolo", "LibreDFINE s", "gathers", 3, of_libreyolo("LibreDFINE", "s")),
    Exporter("libreyolo", "LibreEC s", "gathers", 4, of_libreyolo("LibreEC", "s")),
    Exporter("dfine-seg", "D-FINE s", "GridSample", 3, of_dfine_seg),
    Exporter("transformers", "rt_detr", "GridSample", 6, of_transformers("rt_detr")),
    Exporter("transformers", "rt_detr_v2", "GridSample", 6, of_transformers("rt_detr_v2")),
    Exporter("transformers", "d_fine", "GridSample", 6, of_transformers("d_fine")),
    Exporter("transformers", "deformable_detr", "GridSample", 12, of_transformers("deformable_detr")),
)


def fused(exporter: Exporter, folder: Path, side: int) -> tuple[Path, mx_driving.onnx.Fused]:
    """Return the library's file, and the report of `fuse`."""
    torch.manual_seed(0)
    with silent():
        before = exporter.export(folder, side)
    return before, mx_driving.onnx.fuse(before, folder / "fused.onnx")


def compare(before: Path, after: Path, seconds: float) -> _outputs.Compared:
    """Run both files on a photograph of the file's size. In noise, without objects, the scores of queries would nearly tie."""
    inputs = onnx_ir.load(before).graph.inputs
    sides = {str(one.name): one.shape[2:] for one in inputs if one.shape is not None and len(one.shape) == 4}
    pictures = {name: models.photograph(*map(int, two)).numpy() for name, two in sides.items()}
    return _outputs.compare(before, after, seconds, pictures)


def row_of(exporter: Exporter, side: int, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        before, report = fused(exporter, Path(folder), side)
        compared = compare(before, report.path, seconds)
    return {
        "library": f"{exporter.distribution} {importlib.metadata.version(exporter.distribution)}",
        "model": exporter.model,
        "writing": exporter.writing,
        "replaced": len(report.replaced),
        "left": len(report.left),
        "difference": f"{compared.difference:.0e}",
        "off": compared.off,
        "before ms": round(compared.before, 1),
        "after ms": round(compared.after, 1),
        "speed-up": round(compared.before / compared.after, 3),
        "rounds": compared.rounds,
    }


def rows_of_forms(exporter: Exporter, side: int) -> Iterator[dict[str, Any]]:
    """Yield the nodes and the difference of each form in onnxruntime, with our node in place of NVIDIA's and the vendor's."""
    with tempfile.TemporaryDirectory() as folder:
        before, _ = fused(exporter, Path(folder), side)
        for form in mx_driving.onnx.FUSED_FORMS:
            report = mx_driving.onnx.fuse(before, Path(folder, f"{form}.onnx"), form)
            nodes = [f"{node.domain}::{node.op_type}" for node in onnx_ir.load(report.path).graph if node.domain in NODES]
            compared = compare(before, with_ours(report.path) if nodes else report.path, 0)
            yield {
                "library": f"{exporter.distribution} {importlib.metadata.version(exporter.distribution)}",
                "model": exporter.model,
                "form": form,
                "replaced": len(report.replaced),
                "left": len(report.left),
                "written": f"{len(nodes)} of {nodes[0]}" if nodes else "standard operators",
                "difference": f"{compared.difference:.0e}",
                "off": compared.off,
            }


def main(
    only: Only = None,
    side: Annotated[int, typer.Option(help="Height and width of the picture.")] = 640,
    seconds: Seconds = 30.0,
    threads: Threads = 1,
    forms: Annotated[bool, typer.Option("--forms", help="Compare what each form writes; measure no times.")] = False,
    csv: Csv = None,
) -> None:
    use_threads(threads)
    torchvision_names.declare()
    names = matching("--only", only, [exporter.model for exporter in EXPORTERS])
    chosen = [exporter for exporter in EXPORTERS if exporter.model in names]
    rows = (row for one in chosen for row in (rows_of_forms(one, side) if forms else [row_of(one, side, seconds)]))
    models.print_rows(rows, csv)


if __name__ == "__main__":
    start("onnx_files.py", main)
