"""A runtime with a fault: onnxruntime on a file with changed GridSample nodes. `mx-driving verify --runtime` calls it:

python tests/helpers/wrong_runtime.py FAULT model.onnx inputs.npz outputs.npz
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper, shape_inference

Model = Any


def samplers(model: Model) -> list[Any]:
    return [node for node in model.graph.node if node.op_type == "GridSample"]


def with_attribute(name: str, value: Any) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        for node in samplers(model):
            kept = [a for a in node.attribute if a.name != name]
            del node.attribute[:]
            node.attribute.extend([*kept, helper.make_attribute(name, value)])

    return change


def before_each(model: Model, make: Callable[[Any, str, str], Any]) -> None:
    """Insert a node with a constant between each GridSample and its grid."""
    for number, node in enumerate(samplers(model)):
        grid, new = node.input[1], f"changed_grid{number}"
        kind, array, attributes = make(node, grid, new)
        model.graph.initializer.append(numpy_helper.from_array(array, f"{new}/by"))
        changed = helper.make_node(kind, [grid, f"{new}/by"], [new], **attributes)
        model.graph.node.insert(list(model.graph.node).index(node), changed)
        node.input[1] = new


def swap_axes(model: Model) -> None:
    before_each(model, lambda node, grid, new: ("Gather", np.array([1, 0]), {"axis": -1}))


def shift_by_half_a_pixel(model: Model) -> None:
    known = shape_inference.infer_shapes(model).graph.value_info
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in known}

    def shift(node: Any, grid: str, new: str) -> Any:
        height, width = shapes[node.input[0]][2:]
        return "Add", np.array([1 / width, 1 / height], np.float32), {}

    before_each(model, shift)


def exchange_levels(model: Model) -> None:
    """Exchange the first two levels where the samples of levels are concatenated."""
    made = {name: node for node in model.graph.node for name in node.output}

    def is_sampled(name: str) -> bool:
        while name in made and made[name].op_type in ("Unsqueeze", "Reshape"):
            name = made[name].input[0]
        return name in made and made[name].op_type == "GridSample"

    for node in model.graph.node:
        if node.op_type == "Concat" and all(map(is_sampled, node.input)):
            node.input[0], node.input[1] = node.input[1], node.input[0]


FAULTS = {
    "none": lambda model: None,
    "align_corners": with_attribute("align_corners", 1),
    "border padding": with_attribute("padding_mode", "border"),
    "swapped axes": swap_axes,
    "half a pixel": shift_by_half_a_pixel,
    "a level out of order": exchange_levels,
}


def run(fault: str, path: str, arrays: dict[str, Any]) -> dict[str, Any]:
    model = onnx.load(path)
    FAULTS[fault](model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return {one.name: found for one, found in zip(session.get_outputs(), session.run(None, arrays), strict=True)}


if __name__ == "__main__":
    which, file, given, made = sys.argv[1:]
    np.savez(made, **run(which, file, dict(np.load(given))))
