"""The library's tables of operators are those of _operator/description.py. A program without the package asks the library for a
sentence about each argument."""

from __future__ import annotations

import json
import re

import cases
import pytest
import torch
from programs import python
from small_cases import GROWING

from mx_driving import _backends, config
from mx_driving._operator.description import OPERATORS

BY_CTYPES = _backends.native.why_by_ctypes()
pytestmark = pytest.mark.skipif(BY_CTYPES is not None, reason=str(BY_CTYPES))
DTYPES = {
    "floating": "dtype float32, float64, float16 or bfloat16",
    "index": "dtype int32 or int64",
    "number": "a floating dtype, int32 or int64",
}
# Each input as a scalar and of dtype bool; grad_output as a scalar. torch/test_from_cpp.py has the schemas.
ASK = """
import json, sys, torch
torch.ops.load_library(sys.argv[1])
said = {}
for name, args in torch.load(sys.argv[2]).items():
    op, backward = (getattr(torch.ops.mx_driving, name + end).default for end in ("", "_backward"))
    said[name] = []

    def ask(call, *arguments):
        try:
            call(*arguments)
        except RuntimeError as error:
            said[name].append(str(error))
        else:
            said[name].append("")

    for i, a in enumerate(args):
        if isinstance(a, torch.Tensor):
            for other in (torch.zeros(()), a.bool()):
                ask(op, *args[:i], other, *args[i + 1:])
    mask = [True] * str(backward._schema).partition("-> ")[2].count("Tensor")
    ask(backward, torch.zeros(()), *args, mask)
assert "mx_driving" not in sys.modules
print(json.dumps(said))
"""


def unnumbered(sentence: str) -> str:
    """A sentence without the sizes behind the names of axes."""
    return re.sub(r"=\d+", "", sentence)


def expected_of(name: str, args: tuple) -> list[str]:
    op = OPERATORS[name]
    references = "a divisor of num_points" if args[-1:] == ("point",) else "num_levels or 1"

    def shape_of(axes):
        axes = [axis.replace("R", references) for axis in axes]
        return f"must have shape ({', '.join(axes)}{',' * (len(axes) == 1)})"

    sentences = []
    for t, a in zip(op.tensors, args, strict=False):
        if isinstance(a, torch.Tensor):
            sentences += [f"{t.name} {shape_of(t.axes)}; got ()", f"{t.name} must have {DTYPES[t.elements]}; got bool"]
    return [*sentences, f"grad_output {shape_of(op.output)}; got ()"]


def test_the_tables_are_those_of_the_text(tmp_path):
    calls = {name: tuple(cases.cast(GROWING[name](2, 3), torch.float32)) for name in cases.EVERY}
    calls["bev_pool_v3"] = (torch.zeros(4, 3), torch.zeros(5), *torch.zeros(3, 2).long(), 1, 1, 2, 2)
    assert set(calls) == set(OPERATORS)
    torch.save(calls, tmp_path / "calls.pt")
    said = json.loads(python("-c", ASK, config.torch_library(), tmp_path / "calls.pt").stdout)
    for name, op in OPERATORS.items():
        assert [unnumbered(sentence) for sentence in said[name]] == expected_of(name, calls[name])
        for option, choices in op.choices.items():
            with pytest.raises(
                (ValueError, RuntimeError), match=f"{option} must be {' or '.join(map(repr, choices))}; got 'x'"
            ):
                getattr(torch.ops.mx_driving, name).default(*calls[name][: len(op.tensors)], "x")
