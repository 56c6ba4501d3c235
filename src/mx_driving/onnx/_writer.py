"""New nodes and tables of a graph, under names that are free."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx_ir as ir

from ._graph import dims


def list_names(model: ir.Model) -> set[str]:
    """All names of tensors and nodes: a subgraph must not hide one of the graph around it."""
    graphs = list(model.graphs())
    nodes = [node for graph in graphs for node in graph]
    values = [*(v for g in graphs for v in (*g.inputs, *g.initializers.values())), *(v for n in nodes for v in n.outputs)]
    return {str(named.name) for named in (*values, *nodes)}


class Writer:
    """Nodes in place of an old tensor, whose names begin with its name.

    As a context it leaves the graph as it is where a form does not fit: nothing reads for nodes that are not put in place.
    """

    def __init__(self, model: ir.Model, old: ir.Value) -> None:
        self.model, self.old, self.used, self.tape = model, old, list_names(model), ir.tape.Tape()

    def make_name(self, what: str) -> str:
        free = (f"{self.old.name}/{what}{number or ''}" for number in itertools.count())
        name = next(name for name in free if name not in self.used)
        self.used.add(name)
        return name

    def table(self, what: str, numbers: Any, dtype: Any = np.int64) -> ir.Value:
        name = self.make_name(what)
        return self.tape.initializer(ir.tensor(np.array(numbers, dtype), name=name), name=name)

    def copy(self, value: ir.Value) -> ir.Value:
        """Return a constant that is not in the graph as a table."""
        assert value.const_value is not None
        return self.table(str(value.name).rpartition("/")[2], value.const_value.numpy(), value.const_value.dtype.numpy())

    def op(self, kind: str, *inputs: ir.Value, domain: str = "", **attributes: Any) -> ir.Value:
        name = self.make_name(kind)
        return self.tape.op(kind, inputs, attributes or None, domain=domain, name=name, output=ir.Value(name=name))

    def like(self, value: ir.Value, kind: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        """A node of the value and the inputs, whose output has the value's dtype."""
        new = self.op(kind, value, *inputs, **attributes)
        new.type = value.type
        return new

    def reshape(self, value: ir.Value, *sizes: int) -> ir.Value:
        """Return the value with its first two axes, and then these sizes."""
        if dims(value)[2:] == sizes:
            return value
        new = self.like(value, "Reshape", self.table("shape", [0, 0, *sizes]))
        new.shape = ir.Shape([*(*dims(value), None, None)[:2], *sizes])
        return new

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """A tensor of another dtype; the numbers of a table are cast here."""
        if value.dtype == dtype:
            return value
        if value in self.tape.initializers and value.const_value is not None:
            return self.table(str(value.name).rpartition("/")[2], value.const_value.numpy(), dtype.numpy())
        cast = self.op("Cast", value, to=dtype.value)
        cast.dtype = dtype
        return cast

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for node in self.tape.nodes if kind else ():
            for index in range(len(node.inputs)):
                node.replace_input_with(index, None)

    def put_in_place(self, new: ir.Value) -> None:
        """`new` takes the old tensor's readers, name, sizes and dtype."""
        old, producer = self.old, self.old.producer()
        assert producer is not None
        graph = producer.graph
        assert graph is not None
        new.shape, new.type = old.shape, old.type
        for table in self.tape.initializers:
            if list(table.uses()):
                graph.register_initializer(table)
        graph.insert_after(producer, self.tape.nodes)
        name, old.name = old.name, self.make_name("before")
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        new.name = name
