"""Random changes of an ONNX graph, each a function of the model and the dice. It returns what it changed."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

INTEGERS = [0, 1, -1, 2, 3, 5, 6, 7, 8, 30, 40, 100, -100, 2**31 - 1, 2**31, 2**63 - 1, -(2**63), 2**14, 2**28]
FLOATS = [0.0, 1.0, -1.0, 2.0, 0.5, 1e-6, 1e6, 1e30, float("nan"), float("inf")]
WORDS = [b"zeros", b"border", b"reflection", b"nearest", b"linear", b"bilinear", b"constant", b"edge", b"", b"\xff"]
KINDS = ["Identity", "Neg", "Abs", "Relu", "Floor", "Sigmoid", "Softmax", "Flatten", "Shape", "Size", "Clip", "Transpose"]
TYPES = [TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL]

Model, Dice = onnx.ModelProto, random.Random


def _node(model: Model, dice: Dice) -> Any:
    """Any node; those that compute more often than constants."""
    nodes = [node for node in model.graph.node if node.op_type != "Constant" or dice.random() < 0.1]
    return dice.choice(nodes)


def _names(model: Model) -> list[str]:
    made = [name for node in model.graph.node for name in node.output]
    return [*made, *(i.name for i in model.graph.input), *(i.name for i in model.graph.initializer)]


def _replace(model: Model, old: str, new: str, but: Any = None) -> None:
    """Let all nodes and outputs read another tensor."""
    for node in model.graph.node:
        if node is not but:
            for place, name in enumerate(node.input):
                if name == old:
                    node.input[place] = new
    for output in model.graph.output:
        if output.name == old:
            output.name = new


def _place(model: Model, node: Any) -> int:
    return next(place for place, other in enumerate(model.graph.node) if other is node)


def delete(model: Model, dice: Dice) -> str:
    node = _node(model, dice)
    if node.input and dice.random() < 0.8:
        _replace(model, node.output[0], dice.choice([name for name in node.input if name]), node)
    words = f"{node.op_type} {node.output[0]}"
    del model.graph.node[_place(model, node)]
    return words


def duplicate(model: Model, dice: Dice) -> str:
    node = _node(model, dice)
    again = copy.deepcopy(node)
    again.name += dice.choice(["/again", "/again", ""])
    for place, name in enumerate(node.output):
        again.output[place] = f"{name}{dice.choice(['/again', '/before', '/spatial_shapes', ''])}"
    if dice.random() < 0.5 and again.output[0] != node.output[0]:
        again.input[0] = node.output[0]
        _replace(model, node.output[0], again.output[0], again)
    model.graph.node.insert(_place(model, node) + 1, again)
    return f"{node.op_type} {node.output[0]}"


def rewire(model: Model, dice: Dice) -> str:
    node = _node(model, dice)
    place = dice.randrange(len(node.input))
    earlier = [name for other in list(model.graph.node)[: _place(model, node)] for name in other.output]
    before, names = node.input[place], earlier if dice.random() < 0.8 else _names(model)
    node.input[place] = dice.choice([*names, *(i.name for i in model.graph.input), ""])
    return f"{node.op_type} {node.output[0]} reads {node.input[place]} instead of {before}"


def swap(model: Model, dice: Dice) -> str:
    node = dice.choice([node for node in model.graph.node if len(node.input) > 1])
    node.input[0], node.input[1] = node.input[1], node.input[0]
    return f"{node.op_type} {node.output[0]}"


def fewer_inputs(model: Model, dice: Dice) -> str:
    node = _node(model, dice)
    node.input.pop()
    return f"{node.op_type} {node.output[0]}"


def kind(model: Model, dice: Dice) -> str:
    node, other = _node(model, dice), _node(model, dice)
    node.op_type = dice.choice([*KINDS, other.op_type, other.op_type])
    return f"{node.output[0]} becomes {node.op_type}"


def domain(model: Model, dice: Dice) -> str:
    node = _node(model, dice)
    node.domain = dice.choice(["mx_driving", "ai.onnx", "ai.onnx.ml", "com.microsoft", "trt.plugins", "somebody"])
    if dice.random() < 0.5:
        node.op_type = dice.choice(["multi_scale_deformable_attn", "MultiscaleDeformableAttnPlugin_TRT", node.op_type])
    if dice.random() < 0.5:
        model.opset_import.append(helper.make_opsetid(node.domain, dice.choice([1, 7, 0])))
    return f"{node.output[0]} becomes {node.domain}::{node.op_type}"


def attribute(model: Model, dice: Dice) -> str:
    node = dice.choice([node for node in model.graph.node if node.attribute and node.op_type != "Constant"])
    chosen = dice.choice(node.attribute)
    if dice.random() < 0.15:
        node.attribute.remove(chosen)
        return f"{node.op_type} {node.output[0]} without {chosen.name}"
    if chosen.type == onnx.AttributeProto.INT:
        chosen.i = dice.choice([chosen.i + 1, chosen.i - 1, 1 - chosen.i, *INTEGERS])
    elif chosen.type == onnx.AttributeProto.FLOAT:
        chosen.f = dice.choice(FLOATS)
    elif chosen.type == onnx.AttributeProto.STRING:
        chosen.s = dice.choice(WORDS)
    elif chosen.type == onnx.AttributeProto.INTS and len(chosen.ints):
        place = dice.randrange(len(chosen.ints))
        chosen.ints[place] = dice.choice([chosen.ints[dice.randrange(len(chosen.ints))], *INTEGERS])
    return f"{chosen.name} of {node.op_type} {node.output[0]}"


def _constants(model: Model) -> list[Any]:
    held = [a.t for node in model.graph.node if node.op_type == "Constant" for a in node.attribute if a.name == "value"]
    return [*held, *model.graph.initializer]


def _change(array: Any, dice: Dice) -> Any:
    changed = array.reshape(-1).copy()
    place = dice.randrange(len(changed))
    near = [changed[place] + 1, changed[place] - 1, -changed[place], changed[place] * 2]
    with np.errstate(all="ignore"):
        changed[place] = np.array(dice.choice([*near, *(FLOATS if array.dtype.kind == "f" else INTEGERS)])).astype(array.dtype)
    if dice.random() < 0.1:
        return np.append(changed, changed[-1])
    if dice.random() < 0.1:
        return changed[:-1]
    return changed.reshape(array.shape)


def constant(model: Model, dice: Dice) -> str:
    tensor = dice.choice(_constants(model))
    array = numpy_helper.to_array(tensor)
    changed = _change(array, dice)
    if dice.random() < 0.05:
        changed = changed.astype(dice.choice([np.float32, np.float64, np.float16, np.int64, np.int32]))
    name = tensor.name
    tensor.CopyFrom(numpy_helper.from_array(changed, name))
    return f"{name} from {array.reshape(-1)[:8].tolist()} to {changed.reshape(-1)[:8].tolist()}"


def sizes(model: Model, dice: Dice) -> str:
    value = dice.choice([*model.graph.input, *model.graph.output, *model.graph.value_info[:3]])
    dimension = dice.choice(value.type.tensor_type.shape.dim)
    dimension.Clear()
    choice = dice.choice(["bs", "q", "n", "", 0, 1, 2, 4, 7, 42, -1, 2**40])
    if isinstance(choice, int):
        dimension.dim_value = choice
    elif choice:
        dimension.dim_param = choice
    return f"{value.name}: {choice!r}"


def unshaped(model: Model, dice: Dice) -> str:
    value = dice.choice([*model.graph.input, *model.graph.output])
    value.type.tensor_type.ClearField("shape")
    return value.name


def dtype(model: Model, dice: Dice) -> str:
    value = dice.choice([*model.graph.input, *model.graph.output])
    value.type.tensor_type.elem_type = dice.choice(TYPES)
    return value.name


def opset(model: Model, dice: Dice) -> str:
    model.opset_import[0].version = dice.choice([*range(-1, 27), 2**40])
    return str(model.opset_import[0].version)


def ir_version(model: Model, dice: Dice) -> str:
    model.ir_version = dice.choice(range(20))
    return str(model.ir_version)


def _insert(model: Model, dice: Dice, name: str, nodes: list[Any]) -> None:
    """Nodes behind a tensor, before some of what reads it or all."""
    place = next((p + 1 for p, node in enumerate(model.graph.node) if name in node.output), 0)
    readers = [node for node in model.graph.node if name in node.input]
    for node in readers if dice.random() < 0.7 else dice.sample(readers, 1):
        for i, read in enumerate(node.input):
            if read == name:
                node.input[i] = nodes[-1].output[0]
    for node in reversed(nodes):
        model.graph.node.insert(place, node)


def _tensor(model: Model, dice: Dice) -> str:
    """A tensor that is no constant, and a name for what is computed from it."""
    made = [name for node in model.graph.node if node.op_type != "Constant" for name in node.output]
    return dice.choice([*made, *made, *(i.name for i in model.graph.input)])


def insert_slice(model: Model, dice: Dice) -> str:
    name, new = _tensor(model, dice), f"sliced{dice.randrange(10**6)}"
    start = dice.choice([0, 0, 0, 1, -1, -5, -100, -(2**63)])
    end = dice.choice([1, 2, 4, 7, 8, 40, 100, 2**31 - 1, 2**63 - 1, 2**63 - 1, -1])
    axis, step = dice.choice([0, 1, 2, -1, -2]), dice.choice([1, 1, 1, 1, 2, -1])
    numbers = {"start": start, "end": end, "axis": axis, "step": step}
    nodes = [
        helper.make_node("Constant", [], [f"{new}/{key}"], value=numpy_helper.from_array(np.array([number])))
        for key, number in numbers.items()
    ]
    nodes.append(helper.make_node("Slice", [name, *(node.output[0] for node in nodes)], [new]))
    _insert(model, dice, name, nodes)
    return f"{name} [{start}:{end}:{step}] along {axis}"


def insert_step(model: Model, dice: Dice) -> str:
    name, new = _tensor(model, dice), f"step{dice.randrange(10**6)}"
    which = dice.choice([*KINDS, "Mul", "Add", "Min", "Max", "Where", "Cast", "Gather", "Expand", "Pad"])
    table = dice.choice([[0], [1], [2], [-1], [0, 1], [1, 1, 1], [2, 1, 1]])
    number = np.array(dice.choice(FLOATS), np.float32) if which in ("Mul", "Add", "Min", "Max") else np.array(table)
    nodes = [helper.make_node("Constant", [], [f"{new}/number"], value=numpy_helper.from_array(number))]
    inputs = [name, nodes[0].output[0]] if which in ("Mul", "Add", "Min", "Max", "Gather", "Expand", "Pad") else [name]
    nodes.append(helper.make_node(which, inputs, [new], **({"to": dice.choice(TYPES)} if which == "Cast" else {})))
    _insert(model, dice, name, nodes)
    return f"{which} {number.reshape(-1).tolist()} behind {name}"


def another_output(model: Model, dice: Dice) -> str:
    name = _tensor(model, dice)
    model.graph.output.append(helper.make_tensor_value_info(name, dice.choice(TYPES[:1] * 3 + TYPES), None))
    return name


def default(model: Model, dice: Dice) -> str:
    """A constant that a caller may override."""
    node = dice.choice([node for node in model.graph.node if node.op_type == "Constant"])
    tensor = next(a.t for a in node.attribute if a.name == "value")
    tensor.name = node.output[0]
    model.graph.initializer.append(tensor)
    if dice.random() < 0.8:
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    model.graph.node.remove(node)
    return tensor.name


def name(model: Model, dice: Dice) -> str:
    node = _node(model, dice)
    old, new = node.output[0], dice.choice([dice.choice(_names(model)), "", "ä b/\n", "val_0", "y/before"])
    node.output[0] = new
    if dice.random() < 0.7:
        _replace(model, old, new)
    return f"{old} becomes {new!r}"


def weights_outside(model: Model, dice: Dice) -> str:
    tensor = dice.choice(_constants(model))
    tensor.data_location = TensorProto.EXTERNAL
    tensor.ClearField("raw_data")
    for key, value in {"location": dice.choice(["before.onnx", "none", "../x", "/etc/passwd", ""]), "offset": "0"}.items():
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
    return tensor.name


MUTATIONS = [
    *[insert_slice, insert_step, constant, attribute, rewire] * 3,
    *[delete, duplicate, sizes, another_output, default, kind] * 2,
    *[swap, fewer_inputs, domain, unshaped, dtype, opset, ir_version, name, weights_outside],
]
