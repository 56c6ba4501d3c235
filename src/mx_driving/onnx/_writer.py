"""Write new nodes and tables into a graph, under unused names."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ._graph import dims


def list_names(model: ir.Model) -> set[str]:
    """Return all names of tensors and nodes, also of subgraphs: names in a subgraph must not hide outer names."""
    names = {str(node.name) for graph in model.graphs() for node in graph}
    return names.union(*(ir.convenience.create_value_mapping(graph) for graph in model.graphs()))


def make_tables(maps: Sequence[tuple[int, int]]) -> tuple[list[tuple[int, int]], list[int]]:
    """Return spatial_shapes and level_start_index."""
    return [*maps], [0, *itertools.accumulate(height * width for height, width in maps)][:-1]


class Writer:
    """Writes nodes that compute a replacement of the tensor `old`. Their names begin with the name of this tensor.

    As a context manager, it detaches the new nodes after an exception, so that the graph is unchanged.
    """

    def __init__(self, model: ir.Model, old: ir.Value) -> None:
        self.model, self.old, self.used, self.tape = model, old, list_names(model), ir.tape.Tape()

    def make_name(self, suffix: str) -> str:
        free = (f"{self.old.name}/{suffix}{number or ''}" for number in itertools.count())
        name = next(name for name in free if name not in self.used)
        self.used.add(name)
        return name

    def table(self, suffix: str, numbers: Any, dtype: Any = np.int64) -> ir.Value:
        name = self.make_name(suffix)
        return self.tape.initializer(ir.tensor(np.array(numbers, dtype), name=name), name=name)

    def tables(self, maps: Sequence[tuple[int, int]]) -> tuple[ir.Value, ir.Value]:
        shapes, starts = make_tables(maps)
        return self.table("spatial_shapes", shapes), self.table("level_start_index", starts)

    def copy(self, value: ir.Value, dtype: ir.DataType | None = None) -> ir.Value:
        """Write a constant from outside the graph as a table, in its dtype or in `dtype`."""
        assert value.const_value is not None
        numbers, dtype = value.const_value.numpy(), dtype or value.const_value.dtype
        return self.table(str(value.name).rpartition("/")[2], numbers, dtype.numpy())

    def op(self, kind: str, *inputs: ir.Value, domain: str = "", **attributes: Any) -> ir.Value:
        name = self.make_name(kind)
        return self.tape.op(kind, inputs, attributes or None, domain=domain, name=name, output=ir.Value(name=name))

    def like(self, value: ir.Value, kind: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        """Write a node with inputs `value, *inputs`. Its output has the dtype of `value`."""
        new = self.op(kind, value, *inputs, **attributes)
        new.type = value.type
        return new

    def reshape(self, value: ir.Value, *sizes: int) -> ir.Value:
        """Reshape the value: keep the first two axes, then these sizes."""
        if dims(value)[2:] == sizes:
            return value
        new = self.like(value, "Reshape", self.table("shape", [0, 0, *sizes]))
        new.shape = ir.Shape([*(*dims(value), None, None)[:2], *sizes])
        return new

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Cast a value. If it is a table that we wrote, write a table in the dtype instead of a Cast."""
        if value.dtype == dtype:
            return value
        if value in self.tape.initializers:
            return self.copy(value, dtype)
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
        """Replace the old tensor: `new` gets the old tensor's readers, name, sizes and dtype."""
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
