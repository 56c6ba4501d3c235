"""Each bare operator exported to ONNX in each form and run by onnxruntime on the CPU, beside our own kernel, in one run.

    python benchmarks/onnx_runtime.py ['Deformable-DETR decoder*' ...] [--seconds 2] [--opset 20] [--threads 1]

The default is one thread, because on a small machine the idle threads of one library slow the other down.
"difference" is the largest one from our kernel, over the largest absolute output.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import warnings
from fnmatch import fnmatch

import onnxruntime
import torch

import mx_driving
from mx_driving.measure.timing import interleaved
from mx_driving.measure.workloads import GEOMETRIC, WORKLOADS, Workload

DEFAULT = ("Deformable-DETR decoder*", "RT-DETR*", "Sparse4D*", "MapTR nano")


class Calls(torch.nn.Module):
    def __init__(self, operator: str):
        super().__init__()
        self.operator = operator

    def forward(self, value, shapes, starts, locations, weights):
        return getattr(mx_driving, self.operator)(value, shapes, starts, locations, weights)


def session(workload: Workload, args: tuple[torch.Tensor, ...], form: str, opset: int):
    """A function of no arguments that runs the exported operator."""
    table = mx_driving.onnx.translations(form)
    program = torch.onnx.export(
        Calls(workload.operator).eval(), args, dynamo=True, opset_version=opset, custom_translation_table=table, verbose=False
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    model = program.model_proto.SerializeToString()
    run = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    feed = {i.name: a.numpy() for i, a in zip(run.get_inputs(), args, strict=True)}
    return lambda: run.run(None, feed)[0]


def report(workload: Workload, seconds: float, opset: int) -> None:
    args = workload.make(torch.Generator().manual_seed(0))
    forms = ("gather",) if workload.operator == GEOMETRIC else ("gather", "grid_sample")
    calls = {"mx_driving": lambda: getattr(mx_driving, workload.operator)(*args)}
    calls |= {form: session(workload, args, form, opset) for form in forms}
    expected = calls["mx_driving"]()
    for form, times in interleaved(calls, seconds).items():
        difference = (torch.as_tensor(calls[form]()) - expected).abs().max() / expected.abs().max()
        milliseconds = statistics.median(times) * 1e3
        print(f"| {workload.name} | {form} | {milliseconds:.2f} ms | {difference:.1e} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workloads", nargs="*", default=DEFAULT)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--opset", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for workload in WORKLOADS:
        if not workload.row.bare and any(fnmatch(workload.name, pattern) for pattern in options.workloads):
            report(workload, options.seconds, options.opset)


if __name__ == "__main__":
    main()
