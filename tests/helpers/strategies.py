"""Hypothesis strategies for what users hand over as files: nodes of ONNX, and ONNX files for `fuse`.

FUZZ_EXAMPLES=1000 tries so many of each, and the same each time. FUZZ_RANDOM=1 tries others each time.
"""

import copy
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_nodes
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

Model, Dice = onnx.ModelProto, random.Random


def fuzz(few: int) -> settings:
    """Return settings for FUZZ_EXAMPLES examples, or for `few`: the same in each run unless FUZZ_RANDOM is 1."""
    slow = [getattr(HealthCheck, c) for c in ["too_slow", "data_too_large", "function_scoped_fixture", "large_base_example"]]
    count, is_same = int(os.environ.get("FUZZ_EXAMPLES") or few), os.environ.get("FUZZ_RANDOM") != "1"
    return settings(max_examples=count, derandomize=is_same, deadline=None, database=None, suppress_health_check=slow)


SEEDS = st.integers(0, 2**32)


def dice() -> st.SearchStrategy:
    """A generator of random numbers: its seed is what Hypothesis draws, and prints."""
    return SEEDS.map(Dice)


def node_calls() -> st.SearchStrategy:
    """(graph of one node, number of threads, the arrays of 25 calls)."""

    def draw(dice: Dice) -> tuple[onnx_nodes.Graph, int, list[list[np.ndarray]]]:
        graph = onnx_nodes.random_graph(dice)
        return graph, dice.choice([1, 1, 2]), [onnx_nodes.random_arrays(dice, graph) for _ in range(25)]

    return dice().map(draw)


# ---- ONNX files: nodes, attributes, numbers, sizes and opsets of others' writings are changed

INTEGERS = [0, 1, -1, 2, 3, 5, 6, 7, 8, 30, 40, 100, -100, 2**31 - 1, 2**31, 2**63 - 1, -(2**63), 2**14, 2**28]
FLOATS = [0.0, 1.0, -1.0, 2.0, 0.5, 1e-6, 1e6, 1e30, float("nan"), float("inf")]
WORDS = [b"zeros", b"border", b"nearest", b"linear", b"bilinear", b"constant", b"edge", b"", b"\xff"]
KINDS = ["Identity", "Neg", "Abs", "Relu", "Floor", "Sigmoid", "Softmax", "Flatten", "Shape", "Size", "Clip", "Transpose"]
TYPES = [TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL]


def a_node(model: Model, dice: Dice) -> Any:
    """Any node; those that compute more often than constants."""
    return dice.choice([node for node in model.graph.node if node.op_type != "Constant" or dice.random() < 0.1])


def position(model: Model, node: Any) -> int:
    return next(index for index, other in enumerate(model.graph.node) if other is node)


def names(model: Model) -> list[str]:
    made = [name for node in model.graph.node for name in node.output]
    return [*made, *(i.name for i in model.graph.input), *(i.name for i in model.graph.initializer)]


def read_instead(model: Model, old: str, new: str, but: Any = None) -> None:
    """Let all nodes and outputs read another tensor."""
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            if name == old and node is not but:
                node.input[index] = new
    for output in model.graph.output:
        output.name = new if output.name == old else output.name


def delete(model: Model, dice: Dice) -> None:
    node = a_node(model, dice)
    if node.input and dice.random() < 0.8:
        read_instead(model, node.output[0], dice.choice([name for name in node.input if name]), node)
    del model.graph.node[position(model, node)]


def duplicate(model: Model, dice: Dice) -> None:
    node = a_node(model, dice)
    again = copy.deepcopy(node)
    again.output[0] = f"{node.output[0]}{dice.choice(['/again', '/before', '/spatial_shapes', ''])}"
    if dice.random() < 0.5 and again.output[0] != node.output[0]:
        again.input[0] = node.output[0]
        read_instead(model, node.output[0], again.output[0], again)
    model.graph.node.insert(position(model, node) + 1, again)


def rewire(model: Model, dice: Dice) -> None:
    node = a_node(model, dice)
    earlier = [name for other in list(model.graph.node)[: position(model, node)] for name in other.output]
    others = [*(earlier if dice.random() < 0.8 else names(model)), *(i.name for i in model.graph.input), ""]
    node.input[dice.randrange(len(node.input))] = dice.choice(others)


def change_inputs(model: Model, dice: Dice) -> None:
    node = dice.choice([node for node in model.graph.node if len(node.input) > 1])
    if dice.random() < 0.5:
        node.input.pop()
    else:
        node.input[0], node.input[1] = node.input[1], node.input[0]


def change_kind(model: Model, dice: Dice) -> None:
    node, other = a_node(model, dice), a_node(model, dice)
    node.op_type = dice.choice([*KINDS, other.op_type, other.op_type, "multi_scale_deformable_attn"])
    if dice.random() < 0.2:
        node.domain = dice.choice(["mx_driving", "ai.onnx", "com.microsoft", "trt.plugins", "somebody"])
        model.opset_import.append(helper.make_opsetid(node.domain, dice.choice([1, 7, 0])))


def change_attribute(model: Model, dice: Dice) -> None:
    node = dice.choice([node for node in model.graph.node if node.attribute and node.op_type != "Constant"])
    chosen = dice.choice(node.attribute)
    if dice.random() < 0.15:
        node.attribute.remove(chosen)
    elif chosen.type == onnx.AttributeProto.INT:
        chosen.i = dice.choice([chosen.i + 1, chosen.i - 1, 1 - chosen.i, *INTEGERS])
    elif chosen.type == onnx.AttributeProto.FLOAT:
        chosen.f = dice.choice(FLOATS)
    elif chosen.type == onnx.AttributeProto.STRING:
        chosen.s = dice.choice(WORDS)
    elif chosen.type == onnx.AttributeProto.INTS and len(chosen.ints):
        chosen.ints[dice.randrange(len(chosen.ints))] = dice.choice([*chosen.ints, *INTEGERS])


def change_constant(model: Model, dice: Dice) -> None:
    of_nodes = [a.t for node in model.graph.node if node.op_type == "Constant" for a in node.attribute if a.name == "value"]
    tensor = dice.choice([*of_nodes, *model.graph.initializer])
    array = numpy_helper.to_array(tensor)
    changed = array.reshape(-1).copy()
    index = dice.randrange(len(changed))
    with np.errstate(all="ignore"):
        near = [changed[index] + 1, changed[index] - 1, -changed[index], changed[index] * 2]
        changed[index] = np.array(dice.choice([*near, *(FLOATS if array.dtype.kind == "f" else INTEGERS)])).astype(array.dtype)
    longer, shorter = np.append(changed, changed[-1]), changed[:-1]
    changed = dice.choice([*[changed.reshape(array.shape)] * 8, longer, shorter])
    if dice.random() < 0.05:
        changed = changed.astype(dice.choice([np.float32, np.float64, np.float16, np.int64, np.int32]))
    tensor.CopyFrom(numpy_helper.from_array(changed, tensor.name))


def change_shape(model: Model, dice: Dice) -> None:
    value = dice.choice([*model.graph.input, *model.graph.output, *model.graph.value_info[:3]])
    choice = dice.choice(["bs", "q", "n", "", 0, 1, 2, 4, 7, 42, -1, 2**40, "no shape", "dtype"])
    if choice == "no shape":
        return value.type.tensor_type.ClearField("shape")
    if choice == "dtype":
        value.type.tensor_type.elem_type = dice.choice(TYPES)
        return None
    dimension = dice.choice(value.type.tensor_type.shape.dim)
    dimension.Clear()
    setattr(dimension, "dim_value" if isinstance(choice, int) else "dim_param", choice)
    return None


def change_version(model: Model, dice: Dice) -> None:
    if dice.random() < 0.5:
        model.opset_import[0].version = dice.choice([*range(-1, 27), 2**40])
    else:
        model.ir_version = dice.choice(range(20))


def insert(model: Model, dice: Dice) -> None:
    """A step behind a tensor, before some of what reads it or all: a Slice, arithmetic, anything else."""
    made = [name for node in model.graph.node if node.op_type != "Constant" for name in node.output]
    name, new = dice.choice([*made, *made, *(i.name for i in model.graph.input)]), f"new{dice.randrange(10**6)}"
    kind = dice.choice(["Slice"] * 8 + [*KINDS, "Mul", "Add", "Min", "Max", "Where", "Cast", "Gather", "Expand", "Pad"])
    numbers = [np.array(dice.choice([[0], [1], [2], [-1], [0, 1], [1, 1, 1], [2, 1, 1]]))]
    if kind == "Slice":
        ends = dice.choice([1, 2, 4, 7, 8, 40, 100, 2**31 - 1, 2**63 - 1, 2**63 - 1, -1])
        starts = dice.choice([0, 0, 0, 1, -1, -5, -100, -(2**63)])
        numbers = [np.array([n]) for n in (starts, ends, dice.choice([0, 1, 2, -1, -2]), dice.choice([1, 1, 1, 1, 2, -1]))]
    if kind in ("Mul", "Add", "Min", "Max"):
        numbers = [np.array(dice.choice(FLOATS), np.float32)]
    values = enumerate(map(numpy_helper.from_array, numbers))
    nodes = [helper.make_node("Constant", [], [f"{new}/{i}"], value=value) for i, value in values]
    inputs = [] if kind in KINDS or kind in ("Where", "Cast") else [node.output[0] for node in nodes]
    nodes.append(helper.make_node(kind, [name, *inputs], [new], **({"to": dice.choice(TYPES)} if kind == "Cast" else {})))
    index = next((i + 1 for i, node in enumerate(model.graph.node) if name in node.output), 0)
    readers = [node for node in model.graph.node if name in node.input]
    for node in readers if dice.random() < 0.7 else dice.sample(readers, 1):
        node.input[list(node.input).index(name)] = new
    for node in reversed(nodes):
        model.graph.node.insert(index, node)


def add_output(model: Model, dice: Dice) -> None:
    name = dice.choice([name for node in model.graph.node for name in node.output])
    model.graph.output.append(helper.make_tensor_value_info(name, dice.choice(TYPES[:1] * 3 + TYPES), None))


def make_default(model: Model, dice: Dice) -> None:
    """Turn a constant into one that a caller may override, or into weights outside the file."""
    node = dice.choice([node for node in model.graph.node if node.op_type == "Constant"])
    tensor = next(a.t for a in node.attribute if a.name == "value")
    tensor.name = node.output[0]
    model.graph.initializer.append(tensor)
    if dice.random() < 0.6:
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    elif dice.random() < 0.3:
        outside = model.graph.initializer[-1]
        outside.data_location = TensorProto.EXTERNAL
        outside.ClearField("raw_data")
        entry = outside.external_data.add()
        entry.key, entry.value = "location", dice.choice(["before.onnx", "none", "../x", "/etc/passwd", ""])
    model.graph.node.remove(node)


def rename(model: Model, dice: Dice) -> None:
    node = a_node(model, dice)
    old, new = node.output[0], dice.choice([dice.choice(names(model)), "", "ä b/\n", "val_0", "y/before"])
    node.output[0] = new
    if dice.random() < 0.7:
        read_instead(model, old, new)


MUTATIONS: list[Callable[[Model, Dice], None]] = [
    *[insert, insert, change_constant, change_attribute, rewire] * 3,
    *[delete, duplicate, change_shape, add_output, make_default, change_kind] * 2,
    *[change_inputs, change_version, rename],
]


def change_model(model: Model, dice: Dice) -> tuple[bytes, int]:
    """The model's file after some changes, and a number for what else is drawn."""
    model = copy.deepcopy(model)
    for _ in range(dice.choice([1, 1, 1, 2, 2, 3, 5])):
        try:
            dice.choice(MUTATIONS)(model, dice)
        except (IndexError, StopIteration, TypeError, ValueError):  # there is nothing of the kind to change
            continue
    data = bytearray(model.SerializeToString())
    for _ in range(dice.choice([1, 3]) if dice.random() < 0.05 else 0):
        data[dice.randrange(len(data))] = dice.randrange(256)
    return bytes(data), dice.randrange(2**16)
