"""Each operator exported to ONNX in each form and run by onnxruntime on the CPU, beside our operator in torch, in one run.

    python benchmarks/onnx_runtime.py --only 'Deformable-DETR decoder*' --form onnxruntime --csv mine.csv

The forms are those of `mx_driving.onnx.translations`; onnxruntime allocates the output, as torch does. The ratio is of medians,
to our operator in torch; "CPU" is the same of the processor time of all threads. "difference" is the largest one from our
operator in torch, over the largest absolute output.
"""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import onnxruntime
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import mx_driving
from mx_driving._cli_support.problems import in_a_sentence, matching
from mx_driving._measure.report import OURS, Row, write
from mx_driving._measure.timing import interleaved
from mx_driving._measure.workloads import GEOMETRIC, WORKLOADS, Workload

DEFAULT = ("Deformable-DETR*", "RT-DETR*", "Sparse4D*", "MapTR nano*")
RUN = ("gather", "grid_sample", "onnxruntime")  # the forms that this runtime can run


class Calls(torch.nn.Module):
    """The operator; what is no tensor is fixed."""

    def __init__(self, operator: str, args: tuple):
        super().__init__()
        self.operator, self.args = operator, [None if isinstance(a, torch.Tensor) else a for a in args]
        self.given = [isinstance(a, torch.Tensor) for a in args]

    def forward(self, *tensors):
        rest = iter(tensors)
        args = (next(rest) if given else a for given, a in zip(self.given, self.args, strict=True))
        return getattr(mx_driving, self.operator)(*args)


def exported(module: torch.nn.Module, tensors: tuple[torch.Tensor, ...], form: str, opset: int = 20) -> bytes:
    table = mx_driving.onnx.translations(form)
    program = torch.onnx.export(
        module.eval(), tensors, dynamo=True, opset_version=opset, custom_translation_table=table, verbose=False
    )
    assert program is not None
    return program.model_proto.SerializeToString()


def loaded(model: bytes, tensors: tuple[torch.Tensor, ...]) -> Callable[[], onnxruntime.OrtValue]:
    """A function of no arguments that runs the exported operator, which is given new memory for its output each time."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.register_custom_ops_library(mx_driving.onnx.library())
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for name, tensor in zip((i.name for i in session.get_inputs()), tensors, strict=True):
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(tensor.numpy()))

    def run() -> onnxruntime.OrtValue:
        binding.clear_binding_outputs()  # or the memory of the last call would be used again
        binding.bind_output(session.get_outputs()[0].name)
        session.run_with_iobinding(binding)
        return binding.get_outputs()[0]

    return run


def with_processor_time(call: Callable[[], object], times: list[float]) -> Callable[[], None]:
    def timed() -> None:
        began = time.process_time()
        call()
        times.append(time.process_time() - began)

    return timed


def measured(workload: Workload, forms: list[str], seconds: float, opset: int) -> list[Row]:
    args = workload.make(torch.Generator().manual_seed(0))
    calls: dict[str, Callable] = {OURS: lambda: getattr(mx_driving, workload.operator)(*args)}
    for form in forms:
        if (workload.operator, form) != (GEOMETRIC, "grid_sample") and not (workload.row.bare and form == "grid_sample"):
            tensors = tuple(a for a in args if isinstance(a, torch.Tensor))
            calls[form] = loaded(exported(Calls(workload.operator, args), tensors, form, opset), tensors)
    expected = calls[OURS]()
    processor: dict[str, list[float]] = {name: [] for name in calls}
    timed = {name: with_processor_time(call, processor[name]) for name, call in calls.items()}
    medians = {name: statistics.median(times) for name, times in interleaved(timed, seconds).items()}
    rows = []
    for form, median in medians.items():
        found = calls[form]() if form == OURS else torch.from_numpy(calls[form]().numpy())
        difference = (found - expected).abs().max() / expected.abs().max()
        rows.append(
            {
                "workload": workload.name,
                "dtype": "float32",
                "implementation": form,
                "milliseconds": round(median * 1e3, 3),
                "ratio": round(median / medians[OURS], 2),
                "CPU": round(statistics.median(processor[form]) / statistics.median(processor[OURS]), 2),
                "difference": f"{difference:.1e}",
                "runtime": f"onnxruntime {onnxruntime.__version__}",
            }
        )
    return rows


def main(
    only: Annotated[list[str] | None, typer.Option(help="Only rows whose name matches; may be repeated.")] = None,
    form: Annotated[list[str] | None, typer.Option(help="Only this form; may be repeated.")] = None,
    seconds: Annotated[float, typer.Option(help="Measure each workload about this long.")] = 2.0,
    opset: Annotated[int, typer.Option(help="Opset of the exported file.")] = 20,
    threads: Annotated[int, typer.Option(help="Where there are few, idle threads of one library slow the other.")] = 1,
    csv: Annotated[Path | None, typer.Option(help="Write the rows to this file.")] = None,
) -> None:
    names = matching("--only", only or DEFAULT, [w.name for w in WORKLOADS])
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    shown = ("workload", "implementation", "milliseconds", "ratio", "CPU", "difference")
    table, rows = Table(*shown), []
    for workload in track([w for w in WORKLOADS if w.name in names], console=Console(stderr=True), transient=True):
        for row in measured(workload, form or list(RUN), seconds, opset):
            rows.append(row)
            table.add_row(*(str(row[column]) for column in shown))
    console = Console()
    console.print(table, width=max(console.width, 120))
    if csv:
        write(rows, csv)


if __name__ == "__main__":
    with in_a_sentence("onnx_runtime.py"):
        typer.run(main)
