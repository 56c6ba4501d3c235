"""The table of ONNX graphs that `fuse` replaces: exported modules, and changes that converters and runtimes make."""

import copy
import functools
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir
import onnx_writings as writings
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx_ir.passes.common import LiftConstantsToInitializersPass
from onnx_writings import WRITINGS, Calls, Joined, Stacked, masked
from onnxruntime.transformers.float16 import convert_float_to_float16

_NEVER_NARROW = ("Shape", "Constant", "ConstantOfShape", "Range", "Cast")


def replace_nodes(model, nodes):
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def reverse(graph):
    """Write the nodes in the reverse order."""
    nodes = [*graph.node][::-1]
    del graph.node[:]
    graph.node.extend(nodes)


def compute_in(model, ops, dtype):
    """Let float32 nodes of these types, or of all types for None, compute in another dtype, between casts."""
    model.CopyFrom(onnx.shape_inference.infer_shapes(model))
    values = (*model.graph.value_info, *model.graph.input, *model.graph.output)
    floats = {v.name for v in values if v.type.tensor_type.elem_type == TensorProto.FLOAT}
    floats |= {t.name for t in model.graph.initializer if t.data_type == TensorProto.FLOAT}
    floats |= {node.output[0] for node in model.graph.node if node.op_type == "Constant" and node.attribute[0].t.data_type == 1}
    nodes, outputs = [], {v.name for v in model.graph.output}
    for node in model.graph.node:
        chosen = (node.op_type not in _NEVER_NARROW) if ops is None else node.op_type in ops
        if not chosen or node.output[0] not in floats:
            nodes.append(node)
            continue
        for index, name in enumerate(node.input):
            if name in floats:
                node.input[index] = f"{name}/{len(nodes)}"
                nodes.append(helper.make_node("Cast", [name], [node.input[index]], to=dtype))
        name = node.output[0]
        node.output[0] = f"{name}/narrow"
        nodes += [node, helper.make_node("Cast", [node.output[0]], [name], to=TensorProto.FLOAT)]
    assert len(nodes) > len(model.graph.node)
    replace_nodes(model, nodes)
    del model.graph.value_info[:]
    assert outputs <= {name for node in nodes for name in node.output}


# Name -> kind of a node, and its inputs: x, or a number of x's dtype.
NOTHING = {
    "Identity": ("Identity", "x"),
    "product by 1": ("Mul", 1, "x"),
    "sum with 0": ("Add", "x", 0),
    "difference to 0": ("Sub", "x", 0),
    "quotient by 1": ("Div", "x", 1),
    "Cast": ("Cast", "x"),
    "Dropout": ("Dropout", "x"),
    "Concat": ("Concat", "x"),
}
_NUMERIC = {TensorProto.FLOAT: np.float32, TensorProto.INT64: np.int64}


def write_nothing(model, names=tuple(NOTHING)):
    """Write nodes of these kinds in turn, which change nothing, behind each node of floats or integers, as paddle2onnx does."""
    model.CopyFrom(onnx.shape_inference.infer_shapes(model))
    dtypes = {v.name: v.type.tensor_type.elem_type for v in (*model.graph.value_info, *model.graph.output)}
    scalars = {v.name for v in model.graph.value_info if not v.type.tensor_type.shape.dim}
    nodes, names = [], itertools.cycle(names)
    for node in model.graph.node:
        nodes.append(node)
        dtype, old = dtypes.get(node.output[0]), node.output[0]
        if dtype not in _NUMERIC:
            continue
        kind, *operands = NOTHING[next(names)]
        while (kind == "Dropout" and dtype != TensorProto.FLOAT) or (kind == "Concat" and old in scalars):
            kind, *operands = NOTHING[next(names)]
        node.output[0] = f"{old}/raw"
        numbers = {str(x): numpy_helper.from_array(np.array(x, _NUMERIC[dtype]), f"{old}/{x}") for x in operands if x != "x"}
        model.graph.initializer.extend(numbers.values())
        read = [node.output[0] if x == "x" else numbers[str(x)].name for x in operands]
        attributes = {"Cast": {"to": dtype}, "Concat": {"axis": 0}}.get(kind, {})
        nodes.append(helper.make_node(kind, read, [old], name=f"nothing/{old}", **attributes))
    replace_nodes(model, nodes)
    del model.graph.value_info[:]


def size_as_paddle(model):
    """Compute bs * heads as int(float(bs) * 4.0 + 0), as a scalar, and record a size that contradicts the nodes."""
    scale, zero = (numpy_helper.from_array(np.array([x], np.float32), f"scale/{x}") for x in (4, 0))
    model.graph.initializer.extend([scale, zero, numpy_helper.from_array(np.empty(0, np.int64), "scalar")])
    nodes = []
    for node in model.graph.node:
        if node.op_type != "Mul" or node.input[0] != "/Gather_output_0":  # bs * heads
            nodes.append(node)
            continue
        names = [f"{node.output[0]}/{number}" for number in range(4)]
        nodes += [
            helper.make_node("Cast", node.input[:1], names[:1], to=TensorProto.FLOAT),
            helper.make_node("Mul", [names[0], "scale/4"], names[1:2]),
            helper.make_node("Add", [names[1], "scale/0"], names[2:3]),
            helper.make_node("Cast", [names[2]], names[3:], to=TensorProto.INT64),
            helper.make_node("Reshape", [names[3], "scalar"], node.output),
        ]
    assert len(nodes) > len(model.graph.node)
    replace_nodes(model, nodes)
    del model.graph.value_info[:]
    write_nothing(model, ["Identity"])
    false = helper.make_tensor_value_info("/Reshape_output_0", TensorProto.FLOAT, ["a", "b", 9, "c", "d"])
    model.graph.value_info.append(false)


def lift_constants(model, *, chosen=lambda tensor: True, ir_version=8):
    """Make every constant an initializer, and the chosen constants inputs, too. Return their names."""
    graph = onnx_ir.from_proto(model)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(graph)
    names = [name for name, value in graph.graph.initializers.items() if chosen(value.const_value.numpy())]
    graph.graph.inputs.extend(graph.graph.initializers[name] for name in names)
    graph.ir_version = ir_version
    model.CopyFrom(onnx_ir.to_proto(graph))
    assert names
    return names


def optimise(model, level):
    """Let onnxruntime optimise the file. Such files record no shapes, and onnx infers none behind a node of onnxruntime."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = str(Path(folder) / "optimised.onnx")
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        model.CopyFrom(onnx.load(options.optimized_model_filepath))
    del model.graph.value_info[:]
    assert any(node.domain.startswith("com.microsoft") for node in model.graph.node) == (level != "BASIC")


def convert_to_float16(model):
    """Use onnxruntime's converter, which writes the casts of inputs and outputs at the graph's end."""
    half = convert_float_to_float16(model, keep_io_types=True)
    made = {name: index for index, node in enumerate(half.graph.node) for name in node.output}
    assert any(made.get(name, 0) > index for index, node in enumerate(half.graph.node) for name in node.input)
    model.CopyFrom(half)


def sample_in_onnxruntime_s_domain(model):
    """Before opset 16 GridSample was a node of onnxruntime."""
    for node in model.graph.node:
        node.domain = "com.microsoft" * (node.op_type == "GridSample")
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))


class Chosen(torch.nn.Module):
    """The older exporter lets the file compute the paddings of Pad, so onnx infers no size behind Pad. onnxruntime's inference
    stops at ReduceMax and TopK."""

    def forward(self, value, locations, weights):
        value = torch.nn.functional.pad(value[:, :-2], (0, 0, 0, 0, 0, 2))
        best = weights.amax((2, 3)).topk(3).indices
        return Stacked()(value, locations, weights)[:, best[0]]


class Convolved(Stacked):
    """A convolution with an activation before attention: onnxruntime fuses them to a node of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = torch.nn.Conv1d(32, 32, 1)

    def forward(self, value, locations, weights):
        rows = self.conv(value.flatten(2).transpose(1, 2)).relu().transpose(1, 2).unflatten(2, (4, 8))
        return super().forward(rows, locations, weights * torch.sigmoid(1.702 * weights))


class Ours(Calls):
    """Our operator with weights that sum up to 1."""

    def forward(self, value, locations, weights):
        return super().forward(value, locations, weights.softmax(-1))


class Fixed(torch.nn.Module):
    """A module whose inputs are buffers in part. Exporters fold what depends on no input."""

    def __init__(self, writing, names, batch=1):
        super().__init__()
        self.writing, self.names = writing, names
        for name, tensor in zip("vlw", writings.inputs(batch), strict=True):
            self.register_buffer(f"fixed_{name}", tensor)

    def forward(self, value, locations, weights):
        tensors = zip("vlw", (value, locations, weights), strict=True)
        return self.writing(*(getattr(self, f"fixed_{name}") if name in self.names else tensor for name, tensor in tensors))


class Graph(NamedTuple):
    """A module, its export, a change of the file, and nodes that the file must have.

    `atol` is the allowed error of the fused file; None stands for the bound of rounding, which the file itself must meet, too.
    """

    module: torch.nn.Module
    exporter: str = "older"
    opset: int = 17
    nodes: tuple[str, ...] = ("GridSample",)  # opset 20 renamed GridSample's mode "bilinear"
    dtype: torch.dtype = torch.float32
    sizes: tuple[int, int] = (2, 7)  # batch and queries of the export
    change: Callable[[onnx.ModelProto], object] = lambda model: None
    atol: float | None = None

    def save(self, path):
        arguments = tuple(t.to(self.dtype) for t in writings.inputs(*self.sizes))
        writings.export(self.module, path, self.exporter, self.opset, arguments)
        with writings.edit(path) as model:
            self.change(model)

    def compute(self, arguments):
        return copy.deepcopy(self.module).double()(*(t.double() for t in arguments)).detach().numpy()


FLOOR = ("Floor",)
PARTS = {
    "sums": ("ReduceSum",),
    "weighted samples": ("Mul",),
    "samples": ("GridSample",),
    "grids": ("Sub",),
    "sides": ("Concat",),
    "views": ("Reshape", "Transpose", "Slice", "Gather"),
    "sums and products": ("ReduceSum", "Mul", "Add"),
    "all": None,
}
NO_SUCH_NODES = {("summed", "sides"), ("gathers", "samples"), ("one table", "samples")}
WRITTEN = {name: Graph(module) for name, module in WRITINGS.items()}
WRITTEN |= {"gathers": Graph(Stacked(masked), nodes=FLOOR), "one table": Graph(Calls(), "fixed sizes", nodes=FLOOR)}
FIXED = [("summed", "vw", 1), ("summed", "vl", 2), ("stacked", "lw", 1), ("stacked", "w", 2), ("unequal points", "l", 2)]
CONSTANTS = {}
for name, names, batch in [*FIXED, ("our samples", "lw", 1), ("our samples", "l", 2)]:
    exporter = "our samples, fixed sizes" if name == "our samples" else "fixed sizes"
    module = Fixed(WRITINGS.get(name, Ours()), names, batch)
    CONSTANTS[f"{name}, constant {names}"] = Graph(module, exporter, sizes=(batch, 7), atol=3e-6)
EASED = {  # files that onnxruntime runs, although onnx's checker refuses them
    "in reverse": lambda model: reverse(model.graph),
    "an output without a shape": lambda model: model.graph.output[0].type.tensor_type.ClearField("shape"),
    "an output without a type": lambda model: model.graph.output[0].ClearField("type"),
    "a graph without a name": lambda model: model.graph.ClearField("name"),
}
CHANGED = {
    **{name: Graph(Stacked(), change=change, atol=2e-6) for name, change in EASED.items()},
    "GridSample of onnxruntime's domain": Graph(Stacked(), change=sample_in_onnxruntime_s_domain, atol=2e-6),
}
GRAPHS = {
    **{f"{name}, dynamo": Graph(module, "free sizes") for name, module in WRITINGS.items()},
    "fixed sizes": Graph(Stacked(), "fixed sizes"),
    "opset 16": Graph(Stacked(), opset=16),
    "our samples": Graph(Calls(), "our samples"),
    "sizes that the file computes": Graph(Chosen(), "older, fixed sizes", 18, ("GridSample", "Pad", "ReduceMax", "TopK")),
    "as many queries as heads": Graph(Stacked(), "fixed sizes", sizes=(1, 4)),  # shapes do not tell which axis is which
    **{f"{f.__name__}, dynamo": Graph(Stacked(f), "fixed sizes", nodes=FLOOR) for f in writings.GATHERS},
    # Opsets 11 to 15 have no GridSample.
    **{f.__name__: Graph(Stacked(f), "older", n, FLOOR) for f, n in zip(writings.GATHERS, (11, 13, 15, 11), strict=True)},
    "gathers, unequal points": Graph(Joined([2, 4], masked), "older", 13, FLOOR),
    "gathers, float64": Graph(Stacked(masked), "older, fixed sizes", 20, FLOOR, torch.float64),
    **{f"torch's default, {sizes}": Graph(Calls(), sizes, nodes=FLOOR) for sizes in ("fixed sizes", "free sizes")},
    "torch's default, float16": Graph(Calls(), "fixed sizes", nodes=FLOOR, dtype=torch.float16),
    "torch's default, logits": Graph(writings.Logits(), "free sizes", nodes=FLOOR),
    **CONSTANTS,
    **CHANGED,
    **{
        f"{name}, {part} in float16": graph._replace(
            change=functools.partial(compute_in, ops=ops, dtype=TensorProto.FLOAT16), atol=2e-2
        )
        for (name, graph), (part, ops) in itertools.product(WRITTEN.items(), PARTS.items())
        if (name, part) not in NO_SUCH_NODES
    },
    **{
        f"{name}, nodes that change nothing": graph._replace(change=write_nothing, atol=2e-6)
        for name, graph in (WRITTEN | {"gathers": WRITTEN["gathers"]._replace(exporter="older, fixed sizes")}).items()
    },
    "sizes of paddle2onnx": Graph(Stacked(), change=size_as_paddle, atol=2e-6),
    "converted to float16": Graph(Stacked(), change=convert_to_float16, atol=1e-2),
    "gathers, converted to float16": Graph(Stacked(masked), nodes=FLOOR, change=convert_to_float16, atol=1e-2),
    **{
        f"optimised by onnxruntime, {level}": Graph(
            Convolved(), "older, fixed sizes", change=functools.partial(optimise, level=level), atol=1e-5
        )
        for level in ("BASIC", "EXTENDED", "ALL")
    },
    # Before IR version 4 every initializer had to be an input, and onnxruntime treats them as constants.
    "IR version 3": Graph(
        Stacked(masked), opset=11, nodes=FLOOR, change=functools.partial(lift_constants, ir_version=3), atol=1e-5
    ),
}
