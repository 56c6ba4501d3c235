"""Write recordings of calls whose results are right or have a fault, and run `mx-driving replay` on them."""

import json

import cases
import torch
from typer.testing import CliRunner

from mx_driving.cli.app import app
from mx_driving_portable import record

A, G, M = cases.AGGREGATION, cases.GEOMETRIC, cases.MULTI_SCALE
NAMES = ("value", "shapes", "starts", "locations", "weights")


def replay(*args):
    return CliRunner().invoke(app, ["replay", *map(str, args)])


def call(operator, dtype=torch.float32):
    """Return the inputs and grad_output of a call in a dtype."""
    maps = [(14, 26), (8, 13)]
    inputs = {
        M: lambda: cases.multi_scale(2, 30, 8, 3, maps, 3),
        A: lambda: cases.aggregation(2, 30, 3, 8, 2, [maps, [(15, 24), (3, 12)]]),
        G: lambda: cases.geometric(2, 30, 8, 3, maps, 3, integral=False),
    }[operator]
    inputs = cases.cast(inputs(), dtype)
    return inputs, cases.grad_for(operator, inputs).to(dtype)


def computed(operator, inputs, grad):
    """Return the results of a device: numpy's truth in the value's dtype."""
    results = [torch.from_numpy(t).to(inputs[0].dtype) for t in cases.truth_of(operator, inputs, grad).results]
    names = ["grad_" + NAMES[i] for i in cases.DIFFERENTIABLE[operator]]
    return dict(zip(("output", *names), results, strict=True))


def save(folder, operator, inputs, grad, results, name="call-000000", form=record.FORMAT, **more):
    folder.mkdir(parents=True, exist_ok=True)
    about = {"function": "device.function", "operator": operator, "index": 0, "device": "npu:0", "caller": "/a/train.py:7"}
    tensors = {**dict(zip(NAMES, inputs, strict=True)), "output": results["output"]}
    gradients = {"grad_output": grad, **{key: t for key, t in results.items() if key != "output"}}
    metadata = {"format": str(form), "call": json.dumps(about | more)}
    for ending, some in (("", tensors), ("-gradients", gradients)):
        torch.save({"metadata": metadata, "tensors": some}, folder / f"{name}{ending}.pt")
