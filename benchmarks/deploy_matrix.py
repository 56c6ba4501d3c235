"""Export each operator to each runtime, run it there, and compare its output and its times.

    python benchmarks/deploy_matrix.py --runtime 'OpenVINO*' --seconds 1 --csv mine.csv

"exports" and "runs" are "yes", "no" or "not here"; "message" has the error of a "no". "difference" is the largest difference
from the reference in float64, divided by the largest absolute output. Times are medians, as multiples of our operator in torch
("times ours") and of the operator's decomposition in torch ("times gathers"). A runtime that is not installed is left out.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import re
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import onnxruntime
import torch
import typer
from rich.console import Console

import mx_driving
from mx_driving._io import grid, say, show
from mx_driving._measure.report import OURS, Row, write_rows
from mx_driving._measure.speed import interleaved
from mx_driving._measure.workloads import GEOMETRIC, WORKLOADS, Workload, cast
from mx_driving._operator.description import OPERATORS
from mx_driving._operator.rules import first_line
from mx_driving.cli.start import Csv, Only, Seconds, Threads, matching, start, use_threads

Tensors = tuple[torch.Tensor, ...]
SIZES = ("Deformable-DETR decoder, 300 queries", "Sparse4D v3", "MapTR nano")
ROWS = [w for end in ("", ", with logits") for name in SIZES for w in WORKLOADS if w.name == name + end]
GATHERS = "gathers in torch"
FIGURES = ("difference", "milliseconds", "times ours", "times gathers")


class Runtime(NamedTuple):
    """A way to deploy an operator. `load` returns a function without arguments, and `read` converts its result to a tensor. A
    runtime without `load` is only exported to, because it runs on other machines."""

    name: str
    package: str
    export: Callable[[torch.nn.Module, Tensors], Any]
    load: Callable[[Any, Tensors], Callable[[], Any]] | None
    read: Callable[[Any], torch.Tensor] = torch.as_tensor

    @property
    def missing(self) -> str:
        """Return a sentence if the runtime is not installed, else an empty string."""
        there = importlib.util.find_spec(self.package) is not None
        return "" if there else f"{self.name} is left out: {self.package} is not installed"

    @property
    def version(self) -> str:
        return f"{self.package} {importlib.metadata.version(self.package)}"


class Calls(torch.nn.Module):
    """A module that calls the operator. Its inputs are the tensors; all other arguments are constants."""

    def __init__(self, operator: str, args: tuple):
        super().__init__()
        self.operator, self.args = operator, [None if isinstance(a, torch.Tensor) else a for a in args]
        self.is_tensor = [isinstance(a, torch.Tensor) for a in args]

    def forward(self, *tensors):
        rest = iter(tensors)
        args = (next(rest) if is_tensor else a for is_tensor, a in zip(self.is_tensor, self.args, strict=True))
        return getattr(mx_driving, self.operator)(*args)


def exported(module: torch.nn.Module, tensors: tuple[torch.Tensor, ...], form: str, opset: int = 20) -> bytes:
    table = mx_driving.onnx.translations(form)
    program = torch.onnx.export(
        module.eval(), tensors, dynamo=True, opset_version=opset, custom_translation_table=table, verbose=False
    )
    assert program is not None
    return program.model_proto.SerializeToString()


def loaded(model: bytes, tensors: tuple[torch.Tensor, ...]) -> Callable[[], Any]:
    """Return a function that runs the exported operator. Each call gets new memory for its output."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.register_custom_ops_library(mx_driving.onnx.library())
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for name, tensor in zip((i.name for i in session.get_inputs()), tensors, strict=True):
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(tensor.numpy()))

    def run() -> Any:
        binding.clear_binding_outputs()  # otherwise the call would write to the memory of the last output
        binding.bind_output(session.get_outputs()[0].name)
        session.run_with_iobinding(binding)
        return binding.get_outputs()[0]

    return run


def program_of(module: torch.nn.Module, tensors: Tensors) -> torch.export.ExportedProgram:
    """Return the exported program, in which the operator is one node."""
    return torch.export.export(module.eval(), tensors)


def in_torch(program: torch.export.ExportedProgram, tensors: Tensors) -> Callable[[], Any]:
    module = program.module()
    return lambda: module(*tensors)


def standard(module: torch.nn.Module, tensors: Tensors, **more: Callable) -> torch.export.ExportedProgram:
    """Return a program of standard operators (gathers) for runtimes without our operator. `more` adds decompositions."""
    ours = torch._decomp.get_decompositions([getattr(torch.ops.mx_driving, name).default for name in OPERATORS])
    others = {getattr(torch.ops.aten, name).default: function for name, function in more.items()}
    return program_of(module, tensors).run_decompositions({**torch.export.default_decompositions(), **ours, **others})


def to_inductor(module: torch.nn.Module, tensors: Tensors) -> str:
    file = Path(tempfile.mkdtemp()) / "operator.pt2"
    return torch._inductor.aoti_compile_and_package(program_of(module, tensors), package_path=str(file))


def in_inductor(package: str, tensors: Tensors) -> Callable[[], Any]:
    function = torch._inductor.aoti_load_package(package)
    return lambda: function(*tensors)


def in_openvino(model: Any, tensors: Tensors) -> Callable[[], Any]:
    import openvino

    config = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(model, "CPU", config)
    arrays = [t.numpy() for t in tensors]
    return lambda: compiled(arrays, share_inputs=True, share_outputs=True)


def openvino_of_onnx(form: str) -> Callable[[torch.nn.Module, Tensors], Any]:
    def export(module: torch.nn.Module, tensors: Tensors) -> Any:
        import openvino

        return openvino.Core().read_model(exported(module, tensors, form), b"")

    return export


def openvino_of_program(module: torch.nn.Module, tensors: Tensors) -> Any:
    import openvino

    return openvino.convert_model(standard(module, tensors))


def to_executorch(*partitioners: str) -> Callable[[torch.nn.Module, Tensors], bytes]:
    """Return a function that makes a .pte file. ExecuTorch's portable kernels run the nodes that no partitioner takes."""

    def export(module: torch.nn.Module, tensors: Tensors) -> bytes:
        exir = importlib.import_module("executorch.exir")
        parts = [getattr(importlib.import_module(path), name)() for path, _, name in (p.rpartition(".") for p in partitioners)]
        return exir.to_edge_transform_and_lower(standard(module, tensors), partitioner=parts).to_executorch().buffer

    return export


def in_executorch(program: bytes, tensors: Tensors) -> Callable[[], Any]:
    runtime = importlib.import_module("executorch.runtime").Runtime.get()
    pool = importlib.import_module("executorch.extension.pybindings.portable_lib")
    pool._unsafe_reset_threadpool(torch.get_num_threads())
    whole = runtime.load_program(program)
    method = whole.load_method("forward")

    def run(held: object = whole) -> torch.Tensor:  # keeps the program: the method reads its memory but holds no reference
        return method.execute(tensors)[0]

    return run


def clamped(t: torch.Tensor, low: Any = None, high: Any = None) -> torch.Tensor:
    t = t if low is None else torch.where(t < low, low, t)
    return t if high is None else torch.where(t > high, high, t)


def to_core_ml(module: torch.nn.Module, tensors: Tensors) -> Any:
    """Convert with two workarounds for coremltools 9.0: it lacks aten.alias, and converts a half-clamped integer to float32."""
    import coremltools

    program = standard(module, tensors, alias=lambda t: t, clamp=clamped)
    return coremltools.convert(program, convert_to="mlprogram", skip_model_load=True)


def onnx_form(form: str) -> Callable[[torch.nn.Module, Tensors], bytes]:
    return lambda module, tensors: exported(module, tensors, form)


XNNPACK = "executorch.backends.xnnpack.partition.xnnpack_partitioner.XnnpackPartitioner"
RUNTIMES = (
    Runtime("torch.export", "torch", program_of, in_torch),
    Runtime("AOTInductor", "torch", to_inductor, in_inductor),
    *(
        Runtime(f"onnxruntime, {form}", "onnxruntime", onnx_form(form), loaded, lambda output: torch.from_numpy(output.numpy()))
        for form in ("onnxruntime", "gather", "grid_sample")
    ),
    *(
        Runtime(f"OpenVINO, {name}", "openvino", export, in_openvino, lambda output: torch.from_numpy(output[0]))
        for name, export in {
            "gather": openvino_of_onnx("gather"),
            "grid_sample": openvino_of_onnx("grid_sample"),
            "torch.export": openvino_of_program,
        }.items()
    ),
    Runtime("ExecuTorch, portable", "executorch", to_executorch(), in_executorch),
    Runtime("ExecuTorch, XNNPACK", "executorch", to_executorch(XNNPACK), in_executorch),
    Runtime("Core ML", "coremltools", to_core_ml, None),
    Runtime("TensorRT, tensorrt", "onnx", onnx_form("tensorrt"), None),
    Runtime("CANN, npu", "onnx", onnx_form("npu"), None),
)


def in_one_line(error: Exception) -> str:
    """Return the first sentence of an error's message, without the paths of this machine."""
    return re.sub(r"/\S*/", "", first_line(error).split(". ")[0])


def has_no_such_form(runtime: Runtime, workload: Workload) -> bool:
    """Return True for geometric_kernel_attention and GridSample: without interpolation this form equals the gather form."""
    return runtime.name.endswith("grid_sample") and GEOMETRIC in (workload.operator, workload.description.bare)


class Attempt(NamedTuple):
    exports: str
    runs: str
    message: str = ""
    call: Callable[[], Any] | None = None


def attempted(runtime: Runtime, workload: Workload, args: tuple) -> Attempt:
    """Export and run the workload once. An error of any class is a result, because each runtime has its own classes."""
    tensors = tuple(a for a in args if isinstance(a, torch.Tensor))
    try:
        program = runtime.export(Calls(workload.operator, args).eval(), tensors)
    except Exception as error:
        return Attempt("no", "no", in_one_line(error))
    if runtime.load is None:
        return Attempt("yes", "not here")
    try:
        call = runtime.load(program, tensors)
        call()
    except Exception as error:
        return Attempt("yes", "no", in_one_line(error))
    return Attempt("yes", "yes", call=call)


def measured(workload: Workload, runtimes: list[Runtime], seconds: float) -> Iterator[Row]:
    """Yield a row for the operator in torch, for its decomposition in torch, and for each runtime."""
    args = workload.inputs()
    tensors = tuple(a for a in args if isinstance(a, torch.Tensor))
    truth = getattr(mx_driving.reference, workload.operator)(*cast(args, torch.float64))
    module = Calls(workload.operator, args).eval()
    gathers = standard(module, tensors).module()
    of_torch = {
        OURS: Attempt("", "yes", call=lambda: module(*tensors)),
        GATHERS: Attempt("", "yes", call=lambda: gathers(*tensors)),
    }
    tried = {r.name: attempted(r, workload, args) for r in runtimes if not has_no_such_form(r, workload)}
    by_name = {runtime.name: runtime for runtime in runtimes}
    attempts = of_torch | tried
    times = interleaved({name: a.call for name, a in attempts.items() if a.call}, seconds)
    medians = {name: statistics.median(some) for name, some in times.items()}
    for name, attempt in attempts.items():
        row = {"operator": workload.operator, "workload": workload.name, "runtime": name}
        row |= {"version": by_name[name].version if name in by_name else "", "exports": attempt.exports, "runs": attempt.runs}
        row |= dict.fromkeys(FIGURES, "") | {"message": attempt.message}
        if attempt.call:
            output = by_name[name].read(attempt.call()) if name in by_name else attempt.call()
            row["difference"] = f"{(output - truth).abs().max() / truth.abs().max():.1e}"
            row["milliseconds"] = round(medians[name] * 1e3, 3)
            row["times ours"] = round(medians[name] / medians[OURS], 2)
            row["times gathers"] = round(medians[name] / medians[GATHERS], 2)
        yield row


def main(
    only: Only = None,
    runtime: Annotated[list[str] | None, typer.Option(help="Only runtimes whose name matches; may be repeated.")] = None,
    seconds: Seconds = 12.0,
    threads: Threads = 1,  # idle threads of one library slow down the others
    csv: Csv = None,
) -> None:
    workloads = matching("--only", only, [w.name for w in ROWS])
    names = matching("--runtime", runtime, [r.name for r in RUNTIMES])
    use_threads(threads)
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    console = Console()
    for sentence in (r.missing for r in RUNTIMES if r.name in names and r.missing):
        console.print(sentence)
    there = [r for r in RUNTIMES if r.name in names and not r.missing]
    rows = []
    for workload in (w for w in ROWS if w.name in workloads):
        table = grid(workload.name, {"runtime": 24, "exports": 7, "runs": 8}, dict.fromkeys(FIGURES, 10))
        for row in measured(workload, there, seconds):
            rows.append(row)
            table.add_row(row["runtime"], row["exports"], row["runs"], *(str(row[name]) for name in FIGURES))
        show(console, table)
    for message in dict.fromkeys(row["message"] for row in rows if row["message"]):
        say(console, message)
    if csv:
        write_rows(rows, csv)


if __name__ == "__main__":
    start("deploy_matrix.py", main)
