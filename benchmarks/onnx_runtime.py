"""Each operator exported to ONNX in each form and run by onnxruntime on the CPU, beside our operator in torch, in one run.

    python benchmarks/onnx_runtime.py ['Deformable-DETR decoder*' ...] [--forms onnxruntime] [--seconds 2] [--threads 1]

The default is one thread, because on a small machine the idle threads of one library slow the other down. The forms are those
of `mx_driving.onnx.translations`; onnxruntime allocates the output, as torch does. The ratio is of medians, to our operator in
torch; "CPU" is the same of the processor time of all threads. "difference" is the largest one from our operator in torch,
over the largest absolute output.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from fnmatch import fnmatch

import onnxruntime
import torch

import mx_driving
from mx_driving.measure.timing import interleaved
from mx_driving.measure.workloads import GEOMETRIC, WORKLOADS, Workload

DEFAULT = ("Deformable-DETR*", "RT-DETR*", "Sparse4D*", "MapTR nano*")


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


def exported_call(workload: Workload, args: tuple, form: str, opset: int) -> Callable[[], onnxruntime.OrtValue]:
    """A function of no arguments that runs the exported operator, which is given new memory for its output each time."""
    tensors = tuple(a for a in args if isinstance(a, torch.Tensor))
    table = mx_driving.onnx.translations(form)
    program = torch.onnx.export(
        Calls(workload.operator, args).eval(),
        tensors,
        dynamo=True,
        opset_version=opset,
        custom_translation_table=table,
        verbose=False,
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.register_custom_ops_library(mx_driving.onnx.library())
    assert program is not None
    model = program.model_proto.SerializeToString()
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


def report(workload: Workload, forms: list[str], seconds: float, opset: int) -> None:
    args = workload.make(torch.Generator().manual_seed(0))
    calls: dict[str, Callable] = {"torch": lambda: getattr(mx_driving, workload.operator)(*args)}
    for form in forms:
        if (workload.operator, form) != (GEOMETRIC, "grid_sample") and not (workload.row.bare and form == "grid_sample"):
            calls[form] = exported_call(workload, args, form, opset)
    expected = calls["torch"]()
    processor: dict[str, list[float]] = {name: [] for name in calls}
    timed = {name: with_processor_time(call, processor[name]) for name, call in calls.items()}
    medians = {name: statistics.median(times) for name, times in interleaved(timed, seconds).items()}
    for form in medians:
        found = calls[form]() if form == "torch" else torch.from_numpy(calls[form]().numpy())
        difference = (found - expected).abs().max() / expected.abs().max()
        milliseconds, ratio = medians[form] * 1e3, medians[form] / medians["torch"]
        cpu = statistics.median(processor[form]) / statistics.median(processor["torch"])
        print(f"| {workload.name} | {form} | {milliseconds:.2f} ms | {ratio:.2f} | {cpu:.2f} | {difference:.1e} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workloads", nargs="*", default=DEFAULT)
    parser.add_argument("--forms", nargs="+", default=["gather", "grid_sample", "onnxruntime"])
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--opset", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print("| workload | form | time | ratio | CPU | difference |")
    for workload in WORKLOADS:
        if any(fnmatch(workload.name, pattern) for pattern in options.workloads):
            report(workload, options.forms, options.seconds, options.opset)


if __name__ == "__main__":
    main()
