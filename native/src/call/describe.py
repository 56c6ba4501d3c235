"""Write description.cpp, the tables of the operators: `python describe.py DESCRIPTION OUTPUT`.

CMake runs this program while it builds. DESCRIPTION is src/mx_driving/_operator/description.py, which imports neither PyTorch
nor the package.
"""

import runpy
import sys

SIZES = {"2": "TWO", "3": "THREE", "4": "FOUR", "2 or 4": "TWO_OR_FOUR"}  # axes with another name in C++
KERNELS = {
    "multi_scale_deformable_attn": "MULTI_SCALE",
    "deformable_aggregation": "AGGREGATION",
    "geometric_kernel_attention": "GEOMETRIC",
    "bev_pool_v3": "POOLING",
}
# Input -> member of Call (call.h), if the names differ. members_of() finds other members by the input's index.
MEMBERS = {
    "sampling_locations": "locations",
    "sample_locations": "locations",
    "sampling_offsets": "locations",
    "key_points": "locations",
    "reference_points": "reference",
}


def members_of(op):
    """Return the member of Call for each input."""
    by_index = {0: "value"}
    if op.kind != "pooling":
        by_index |= {1: "shapes", 2: "starts", op.weights: "weights"}
    return [by_index.get(i, MEMBERS.get(name, name)) for i, name in enumerate(op.inputs)]


def layout_of(member, axes):
    """Return the index in `axes` of each axis of the member, in the order of `Axis` (call.h). The index is -1 if only other
    operators have this axis; the member then gets an axis of one element."""
    order = list(axes)
    if "pts" in order and "cam" in order:  # the points of an anchor come before its cameras
        order.remove("pts")
        order.insert(order.index("cam"), "pts")
    layout = [axes.index(axis) for axis in order] if len(set(axes)) == len(axes) else list(range(len(axes)))
    if member in ("shapes", "starts") and axes[0] != "cam":
        layout.insert(0, -1)  # MAP_CAMERA
    if member.removeprefix("grad_") in ("value", "output"):
        if len(layout) < 3:
            layout.insert(0, -1)  # BATCH
        if len(layout) < 4:
            layout.insert(2, -1)  # HEAD
    return layout


def in_braces(items):
    return "{" + ", ".join(map(str, items)) + "}"


def argument(name, member, axes, elements="FLOATING", required=True):
    products = [in_braces(axis.split(" * ")) if " * " in axis else SIZES.get(axis, axis) for axis in axes]
    factors = ", ".join(axes).replace(" * ", ", ").split(", ")
    split = [SIZES.get(axis, axis) for axis in factors]
    fields = (f'"{name}"', f"Elements::{elements}", str(required).lower(), f"&Call::{member}")
    return in_braces((*fields, *map(in_braces, (products, split, layout_of(member, factors)))))


def function(op, backward):
    members = members_of(op)
    grad_output = [argument("grad_output", "grad_output", op.output)] * backward
    inputs = [argument(t.name, members[i], t.axes, t.elements.upper(), not t.optional) for i, t in enumerate(op.tensors)]
    results = [argument("output", "output", op.output, "OF_VALUE")]
    if backward:
        learned = [(op.tensors[i], members[i]) for i in op.differentiable]
        results = [argument(f"grad_{t.name}", f"grad_{m}", t.axes, required=False) for t, m in learned]
    option, choices = next(iter(op.choices.items()), ("", ()))
    kernel, flags = KERNELS[op.bare or op.name], (str(flag).lower() for flag in (bool(op.bare), backward))
    arguments = "{\n    " + ",\n    ".join((*grad_output, *inputs, *results)) + "}"
    positions = (len(grad_output), len(inputs), len(grad_output) + len(inputs))
    names = (f'"{op.name}{"_backward" * backward}"', f'"{op.name}"')
    words = (f'"{option}"', in_braces(f'"{choice}"' for choice in choices))
    return in_braces((*names, kernel, *flags, arguments, *positions, in_braces(op.sizes), *words))


def main(description, output):
    operators = runpy.run_path(description)["OPERATORS"].values()
    functions = [function(op, backward) for op in operators for backward in (False, True)]
    with open(output, "w", encoding="utf-8") as file:
        file.write(f"""// Written by native/src/call/describe.py.
#include "call/description.h"

namespace mxd {{

using namespace sizes;

static_assert(FUNCTIONS == {len(functions)}, "FUNCTIONS in description.h must be the number of functions");
static constexpr std::array<Function, FUNCTIONS> ALL{{{{{", ".join(functions)}}}}};

const std::array<Function, FUNCTIONS> &functions() {{ return ALL; }}

}} // namespace mxd
""")


if __name__ == "__main__":
    main(*sys.argv[1:])
