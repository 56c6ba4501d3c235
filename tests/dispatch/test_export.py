"""torch.export: a program is saved, and run in another process with mx_driving; Inductor. AOTInductor: test_from_cpp.py."""

import cases
import pytest
import torch
from attention_modules import results
from programs import python
from small_cases import GROWING, One
from torch._dynamo.testing import CompileCounterWithBackend
from values import Through

import mx_driving

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("inductor")]  # so that a program is exported once
SIZES = ((3, 5), (1, 7), (4, 2))
RUN = """
import sys, torch, mx_driving
program, inputs, outputs = sys.argv[1:]
run = torch.export.load(program).module()
torch.save([run(*args) for args in torch.load(inputs)], outputs)
"""


class Three(torch.nn.Module):
    """All bare operators; the first follows a parameter. Outputs are joined, so that there is less to compile."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, *inputs):
        (value, *rest), *others = inputs
        calls = zip(cases.OPERATORS, [(value * self.scale, *rest), *others], strict=True)
        return (torch.cat([getattr(mx_driving, operator)(*args) for operator, args in calls], -1).relu(),)


def inputs_of(bs, queries):
    return tuple(cases.cast(GROWING[operator](bs, queries), torch.float32) for operator in cases.OPERATORS)


@pytest.fixture(scope="module")
def program():
    batch, queries = torch.export.Dim("batch"), torch.export.Dim("queries")
    each = ({0: batch}, None, None, {0: batch, 1: queries}, {0: batch, 1: queries})
    return torch.export.export(Three(), inputs_of(3, 5), dynamic_shapes=((each,) * 3,))


def test_export_saved_loaded_and_run_elsewhere(program, tmp_path):
    files = [tmp_path / name for name in ("program.pt2", "inputs.pt", "outputs.pt")]
    torch.export.save(program, files[0])
    torch.save([inputs_of(*size) for size in SIZES], files[1])
    python("-c", RUN, *files)
    for size, outputs in zip(SIZES, torch.load(files[2]), strict=True):
        assert all(torch.equal(got, expected) for got, expected in zip(outputs, Three()(*inputs_of(*size)), strict=True))


def test_exported_module_trains(program):
    module, original = program.module(), Three()
    for size in SIZES:
        pairs = zip(results(module, *inputs_of(*size)), results(original, *inputs_of(*size)), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("operator", cases.EVERY)
def test_export_keeps_the_operator_whole(operator):
    args = cases.cast(GROWING[operator](3, 5), torch.float32)
    tensors = tuple(a for a in args if isinstance(a, torch.Tensor))
    program = torch.export.export(One(operator, args), tensors)
    op = getattr(torch.ops.mx_driving, operator).default
    for graph in (program.graph, program.run_decompositions().graph):
        assert [node.target for node in graph.nodes if node.op == "call_function"] == [op]
    assert torch.equal(program.module()(*tensors), getattr(mx_driving, operator)(*args))


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_autograd_function_trains(strict):
    inputs = cases.cast(GROWING[cases.MULTI_SCALE](3, 5), torch.float32)
    vendors = Through(lambda *args: mx_driving.MultiScaleDeformableAttnFunction.apply(*args))
    exported = torch.export.export(vendors, inputs, strict=strict).module()
    torch.testing.assert_close(results(exported, *inputs), results(vendors, *inputs))


def test_training_under_inductor_never_recompiles(monkeypatch):
    """One graph, forward and backward, for every batch and number of queries. Inductor is stricter if CI is set."""
    monkeypatch.setenv("CI", "true")
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(Three(), fullgraph=True, dynamic=True, backend=counter)
    for size in ((6, 5), (8, 7), (9, 11)):
        expected = results(Three(), *inputs_of(*size))
        assert len(expected) == 10  # the output, and gradients of inputs and of the parameter
        torch.testing.assert_close(results(compiled, *inputs_of(*size)), expected)
    assert counter.frame_count == 1


@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_compiled_function_transforms(operator):
    """Gradients of each sample, or a directional derivative."""
    args = GROWING[operator](3, 5)

    def run(weights):
        call = lambda w: getattr(mx_driving, operator)(*args[:4], w)  # noqa: E731
        if operator == cases.GEOMETRIC:
            return torch.func.jvp(torch.vmap(call), (weights,), (weights.sin(),))[1]
        return torch.vmap(torch.func.grad(lambda w: call(w).square().sum()))(weights)

    weights = torch.stack([args[4], 2 * args[4]])
    got = torch.compile(run, fullgraph=True, backend="aot_eager")(weights)
    assert got.abs().sum() > 0
    torch.testing.assert_close(got, run(weights))
