"""Our nodes for onnxruntime in graphs of one node, and random inputs for them."""

import functools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import onnxruntime.capi.onnxruntime_pybind11_state
from onnx import TensorProto, helper

from mx_driving._operator.description import OPERATORS

FLOATS = ("float32", "float16", "bfloat16", "double")
INTEGERS = ("int64", "int32")
OTHER_NAMES = {"R": "num_levels", "2 or 4": "box", "num_feat": "num_keys"}


# Operator -> (elements, axes) of each input; a number among the axes is a size. Operators whose sizes are attributes are left
# out: tests/ops/test_bev_pool_v3.py tests their node.
INPUTS = {
    name: [(t.elements, [OTHER_NAMES.get(axis, axis) for axis in t.factors]) for t in row.tensors]
    for name, row in OPERATORS.items()
    if not row.sizes
}


class Graph(NamedTuple):
    """A graph of one node. The type of an input that is left out is ""."""

    operator: str
    types: tuple[str, ...]
    axis: str | None = None


def model(graph: Graph) -> onnx.ModelProto:
    """Return the model of a graph. Tensors of bfloat16, which numpy lacks, go in and out as float32."""
    nodes, inputs, names = [], [], []
    for place, kind in enumerate(graph.types):
        name = f"x{place}" if kind else ""
        if kind == "bfloat16":
            nodes.append(helper.make_node("Cast", [f"{name}_in"], [name], to=TensorProto.BFLOAT16))
        if kind:
            fed = name + "_in" * (kind == "bfloat16")
            inputs.append(helper.make_tensor_value_info(fed, _fed(kind), None))
        names.append(name)
    attributes = {} if graph.axis is None else {"reference_axis": graph.axis}
    nodes.append(helper.make_node(graph.operator, names, ["y"], domain="mx_driving", **attributes))
    if graph.types[0] == "bfloat16":
        nodes.append(helper.make_node("Cast", ["y"], ["out"], to=TensorProto.FLOAT))
    output = helper.make_tensor_value_info(nodes[-1].output[0], _fed(graph.types[0]), None)
    written = helper.make_tensor_value_info("y", getattr(TensorProto, graph.types[0].upper().replace("FLOAT32", "FLOAT")), None)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("mx_driving", 1)]
    # An exporter says this type, too. onnxruntime before 1.18 does not infer it where an optional input is left out.
    one = helper.make_graph(nodes, "one", inputs, [output], value_info=[written] if written.name != output.name else [])
    return helper.make_model(one, opset_imports=opsets, ir_version=9)


def _fed(kind: str) -> int:
    return TensorProto.FLOAT if kind == "bfloat16" else getattr(TensorProto, kind.upper().replace("FLOAT32", "FLOAT"))


def session(model: Any, library: str = "", threads: int = 1) -> onnxruntime.InferenceSession:
    """Open a model or a file, with our library or without it."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # what is refused is raised, too
    if library:
        options.register_custom_ops_library(library)
    data = model.SerializeToString() if isinstance(model, onnx.ModelProto) else model
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def run(session: onnxruntime.InferenceSession, arrays: list[np.ndarray]) -> Any:
    names = [i.name for i in session.get_inputs()]
    return session.run(None, dict(zip(names, arrays, strict=True)))[0]


@functools.lru_cache(maxsize=256)
def session_of(graph: Graph, library: str, threads: int) -> onnxruntime.InferenceSession:
    return session(model(graph), library, threads)


def random_graph(dice: random.Random) -> Graph:
    operator = dice.choice(list(INPUTS))
    types = []
    for place, (elements, _) in enumerate(INPUTS[operator]):
        types.append(dice.choice({"floating": FLOATS, "index": INTEGERS, "number": FLOATS + INTEGERS}[elements]))
        if dice.random() < 0.02:
            types[-1] = dice.choice(["uint8", "int16", "bool"]) if place else types[-1]
        if place >= 6 and dice.random() < 0.3:
            types[-1] = ""
    axis = dice.choice(["level", "point", None]) if operator.startswith("multi") and "logits" in operator else None
    return Graph(operator, tuple(types), axis)


def random_sizes(dice: random.Random, graph: Graph) -> dict[str, int]:
    sizes = {name: dice.choice([1, 1, 2, 3, 0]) for name in ("bs", "num_levels", "cam", "scale", "group")}
    sizes |= {name: dice.choice([1, 2, 3, 5, 8, 0]) for name in ("num_points", "pts", "num_heads")}
    sizes |= {name: dice.choice([1, 3, 17, 40, 0]) for name in ("num_queries", "anchor")}
    return sizes | {
        "num_keys": dice.choice([1, 9, 60, 200, 0]),
        "embed_dims": dice.choice([1, 4, 7, 32, 0]),
        "c": sizes["group"] * dice.choice([1, 2, 8]) or dice.choice([0, 3]),
        "box": dice.choice([2, 4]),
        **{str(n): n for n in (2, 3, 4)},
    }


def random_tables(dice: random.Random, maps: tuple[int, ...], num_keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw sizes and starts of levels; a fifth of the tables has a number that does not fit."""
    count = int(np.prod(maps))
    shapes, starts = np.zeros((count, 2), np.int64), np.zeros(count, np.int64)
    for i in range(count):
        height = dice.randint(1, max(1, min(num_keys, 9)))
        width = dice.randint(1, max(1, num_keys // height))
        shapes[i] = height, width
        starts[i] = dice.randint(0, max(0, num_keys - height * width))
    if count and dice.random() < 0.2:
        where = shapes.reshape(-1) if dice.random() < 0.5 else starts
        where[dice.randrange(len(where))] = dice.choice([-1, 0, num_keys, num_keys + 1, 2**31 - 1, -(2**31), 2**31 - 9])
    return shapes.reshape(*maps, 2), starts.reshape(maps)


def random_arrays(dice: random.Random, graph: Graph) -> list[np.ndarray]:
    sizes = random_sizes(dice, graph)
    numbers = np.random.default_rng(dice.randrange(2**32))
    shapes = [[sizes[axis] for axis in axes] for _, axes in INPUTS[graph.operator]]
    if dice.random() < 0.2:  # shapes that do not agree
        wrong = dice.choice(shapes)
        change = dice.random()
        if change < 0.6 and wrong:
            wrong[dice.randrange(len(wrong))] = dice.choice([0, 1, 2, 6])
        elif change < 0.8:
            wrong.append(dice.choice([1, 2]))
        elif wrong:
            wrong.pop()
    if "attn_with_logits" in graph.operator and graph.axis == "point" and dice.random() < 0.9:
        shapes[3][2:3] = [dice.choice([1, sizes["num_points"]])]
    if graph.operator.endswith("with_logits") and len(shapes[5]) == 5 and dice.random() < 0.5:
        shapes[5][3:] = [shapes[5][3] * shapes[5][4]]
    tables = random_tables(dice, tuple(shapes[2]), sizes["num_keys"])
    arrays = []
    for place, (shape, kind) in enumerate(zip(shapes, graph.types, strict=True)):
        array = numbers.standard_normal(shape) * dice.choice([0.5, 1, 1, 30])
        if place == 3 and dice.random() < 0.1:
            array = np.where(numbers.random(shape) < 0.2, dice.choice([np.nan, np.inf, -np.inf, 1e30]), array)
        if place in (1, 2) and list(tables[place - 1].shape) == shape:
            array = tables[place - 1]
        if kind:
            with np.errstate(all="ignore"):
                arrays.append(array.astype({"bfloat16": "float32", "double": "float64"}.get(kind, kind)))
    return arrays


def outcome(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or the sentence of its refusal."""
    try:
        return call()
    except onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument as error:
        return str(error)
