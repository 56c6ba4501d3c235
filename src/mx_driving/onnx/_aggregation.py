"""Write deformable_aggregation as multi_scale_deformable_attn, for forms without a node of aggregation.

A map of a camera becomes a level, a group of channels becomes a head. Aggregation drops a sample if its centre is off the
image. Attention drops a sample only if all four pixels around it are off the map. So move the locations that aggregation drops
far off the map.
"""

from __future__ import annotations

import onnx_ir as ir

from ._forms import Call
from ._graph import Unfit, are_fixed, dims, read_constant
from ._writer import Writer

_FAR = -10.0


def write_as_attention(write: Writer, inputs: list[ir.Value]) -> Call:
    """Return the inputs with which attention has the same result as aggregation has with `inputs`."""
    features, shapes, starts, locations, weights = inputs
    sizes = (*dims(weights)[2:], *dims(features)[2:])
    if len(sizes) != 5 or not are_fixed(sizes) or locations.dtype is None:
        raise Unfit("the file does not fix the sizes and dtypes of its tensors, which other forms need")
    points, cams, scales, groups, channels = sizes
    return Call(
        write.reshape(features, groups, channels // groups),
        _flatten(write, "spatial_shapes", shapes, -1, 2),
        _flatten(write, "level_start_index", starts, -1),
        _write_locations(write, locations, (groups, cams, scales, points, 2)),
        write.reshape(write.like(weights, "Transpose", perm=[0, 1, 5, 3, 4, 2]), groups, cams * scales, points),
    )


def _flatten(write: Writer, name: str, table: ir.Value, *shape: int) -> ir.Value:
    """Return a table, spatial_shapes or level_start_index, with one axis for the maps of all cameras."""
    numbers = read_constant(table)
    if numbers is None:
        return write.like(table, "Reshape", write.table("shape", shape))
    return write.table(name, numbers.reshape(shape), numbers.dtype)


def _write_locations(write: Writer, locations: ir.Value, axes: tuple[int, ...]) -> ir.Value:
    """Return locations [bs, anchor, group, cam * scale, pts, 2], made of locations [bs, anchor, pts, cam, 2]."""
    groups, cams, scales, points, _ = axes
    assert locations.dtype is not None
    zero, one, far = (write.table("number", x, locations.dtype.numpy()) for x in (0.0, 1.0, _FAR))
    inside = write.op("And", write.op("Greater", locations, zero), write.op("Less", locations, one))
    x, y = (write.op("Gather", inside, write.table("axis", [axis]), axis=-1) for axis in (0, 1))
    moved = write.op("Transpose", write.op("Where", write.op("And", x, y), locations, far), perm=[0, 1, 3, 2, 4])
    moved = write.op("Reshape", moved, write.table("shape", [0, 0, 1, cams, 1, points, 2]))
    moved = write.op("Expand", moved, write.table("shape", [1, 1, *axes]))
    moved.type, moved.shape = locations.type, ir.Shape([*dims(locations)[:2], *axes])
    return write.reshape(moved, groups, cams * scales, points, 2)
