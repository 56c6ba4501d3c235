"""TensorRT's plugins in a file: their domain, and the shape of their output, which onnx cannot infer."""

from __future__ import annotations

import math

import onnx
import onnx_ir as ir

from ._forms import AGGREGATES, JOINED, NODES, TENSORRT, WITH_LOGITS, has_logits
from ._graph import SAID_DOMAIN, are_fixed, dims
from ._order import walk_nodes

# Name of a plugin -> the index of an input whose first two axes are batch and queries.
_SHAPED_PLUGINS = {**dict.fromkeys((NODES[TENSORRT], *JOINED, *AGGREGATES), 3), **dict.fromkeys(WITH_LOGITS, 2)}


def name_plugins(model: ir.Model) -> bool:
    """Move TensorRT's plugins from onnx's domain, in which exporters write them, to the domain of onnxruntime's provider."""
    plugins = [node for node in walk_nodes(model) if node.domain in ("", "ai.onnx") and not onnx.defs.has(node.op_type)]
    for node in plugins:
        node.metadata_props[SAID_DOMAIN] = node.domain
        node.domain = TENSORRT
    if plugins:
        for graph in (model.graph, *model.functions.values()):
            graph.opset_imports.setdefault(TENSORRT, 1)
    return bool(plugins)


def restore_plugins(model: ir.Model) -> bool:
    """Restore the plugins' domain as in the file. Return whether there are plugins."""
    plugins = [node for node in walk_nodes(model) if SAID_DOMAIN in node.metadata_props]
    for node in plugins:
        node.domain = node.metadata_props.pop(SAID_DOMAIN)
    for graph in (model.graph, *model.functions.values()):
        if not any(node.domain == TENSORRT for node in ir.traversal.RecursiveGraphIterator(graph)):
            graph.opset_imports.pop(TENSORRT, None)
    return bool(plugins)


def give_shape(node: ir.Node) -> bool:
    output, inputs = node.outputs[0], [v for v in node.inputs if v is not None]
    if output.shape is not None or len(inputs) != 5 or node.op_type not in _SHAPED_PLUGINS:
        return False
    if node.op_type in WITH_LOGITS and not has_logits(node):
        return False
    value, (batch, queries, *_) = dims(inputs[0]), (*dims(inputs[_SHAPED_PLUGINS[node.op_type]]), None, None)
    if len(value) != (3 if node.op_type in AGGREGATES else 4) or queries is None:
        return False
    blocks = value[2:]
    if node.op_type in JOINED:
        blocks = (math.prod(blocks) if are_fixed(blocks) else None,)
    output.shape = ir.Shape([value[0] if isinstance(value[0], int) else batch, queries, *blocks])
    output.type = inputs[0].type
    return True
