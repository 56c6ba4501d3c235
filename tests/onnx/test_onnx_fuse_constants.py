"""`fuse` and `verify` on files whose value, locations or weights depend on no input, so that exporters fold them."""

import numpy as np
import onnx
import pytest
import torch
from onnx_writings import Calls, Joined, Stacked, Summed, export, inputs, kinds, run, verified

import mx_driving.onnx

pytestmark = pytest.mark.needs("An ONNX file of opset 20")


class Ours(Calls):
    """Our operator, exported in the form "grid_sample"."""

    def forward(self, value, locations, weights):
        return super().forward(value, locations, weights.softmax(-1))


class Fixed(torch.nn.Module):
    """A module whose inputs are buffers in part."""

    def __init__(self, writing, names, batch=1):
        super().__init__()
        self.writing, self.names = writing, names
        for name, tensor in zip("vlw", inputs(batch), strict=True):
            self.register_buffer(f"fixed_{name}", tensor)

    def forward(self, value, locations, weights):
        tensors = zip("vlw", (value, locations, weights), strict=True)
        return self.writing(*(getattr(self, f"fixed_{name}") if name in self.names else tensor for name, tensor in tensors))


WRITINGS = {"stacked": Stacked(), "summed": Summed(), "unequal points": Joined([2, 4]), "ours": Ours()}


FIXED = [("ours", "lw", 1), ("ours", "l", 2), ("stacked", "lw", 1), ("stacked", "w", 2), ("unequal points", "l", 2)]


@pytest.mark.parametrize(("writing", "fixed", "batch"), [*FIXED, ("summed", "vw", 1), ("summed", "vl", 2)])
def test_constants_of_levels_are_found(writing, fixed, batch, before, after):
    module, arguments = Fixed(WRITINGS[writing], fixed, batch), inputs(batch)
    export(module, before, "our samples, fixed sizes" if writing == "ours" else "fixed sizes", arguments=arguments)
    report = mx_driving.onnx.fuse(before, after)
    assert (len(report.replaced), report.left) == (1, {})
    assert "GridSample" not in kinds(after)
    assert {name for names in report.nodes.values() for name in names} <= {node.name for node in onnx.load(before).graph.node}
    true = module.double()(*(tensor.double() for tensor in arguments))
    np.testing.assert_allclose(run(after, arguments), true.numpy(), rtol=0, atol=3e-6)
    report = verified(before, arguments)
    assert report.right
    assert len(report.comparisons) == 2


class Twice(torch.nn.Module):
    """Two attentions of unequal constants."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Fixed(Stacked(), "l", 2), Fixed(Summed(), "lw", 2)
        self.second.fixed_l += 0.1

    def forward(self, value, locations, weights):
        return self.first(value, locations, weights) + self.second(value, locations, weights)


def test_constants_of_two_attentions(before, after):
    arguments = inputs()
    export(Twice(), before, "fixed sizes")
    assert len(mx_driving.onnx.fuse(before, after).replaced) == 2
    np.testing.assert_allclose(run(after, arguments), run(before, arguments), rtol=0, atol=1e-5)
    report = verified(before, arguments)
    assert (report.right, len(report.comparisons)) == (True, 4)


class Both(Fixed):
    """The first is deformable attention, the second is not, because its corners are aligned."""

    def forward(self, value, locations, weights):
        other = Stacked(align_corners=True)
        return super().forward(value, locations, weights) + other(value, self.fixed_l, weights)


def test_constants_of_what_stays_are_untouched(before, after):
    module, arguments = Both(Summed(), "l"), inputs(1)
    export(module, before, "fixed sizes", arguments=arguments)
    report = mx_driving.onnx.fuse(before, after)
    assert len(report.replaced) == 1
    assert ["align_corners is 1" in why for why in report.left.values()] == [True]
    assert "align_corners is 1" in str(report)
    samplers = [node for node in onnx.load(after).graph.node if node.op_type == "GridSample"]
    old, new = ({t.name: t.SerializeToString() for t in onnx.load(path).graph.initializer} for path in (before, after))
    assert len(samplers) == 2
    assert all(new[node.input[1]] == old[node.input[1]] for node in samplers)
    np.testing.assert_allclose(run(after, arguments), run(before, arguments), rtol=0, atol=1e-5)
