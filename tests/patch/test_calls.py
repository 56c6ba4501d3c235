"""patch: transforms of torch.func over known code, and tables that the code ignores, or that a caller writes."""

import functools
import sys

import pytest
import torch
from attention_modules import BARE, WITH_LOGITS, arguments_for, build, close, operators, recorded, results
from test_edits import CONFIG, MODELS, import_library
from torch.func import functional_call, grad, jacrev, vjp, vmap

import mx_driving
from mx_driving._needs import is_older_than

pytestmark = pytest.mark.filterwarnings("ignore")
DEFORMABLE = (MODELS.format("deformable_detr"), "DeformableDetrMultiscaleDeformableAttention")
RT_DETR_V2 = (MODELS.format("rt_detr_v2"), "RTDetrV2MultiscaleDeformableAttention")
D_FINE = (MODELS.format("d_fine"), "DFineMultiscaleDeformableAttention")
MMCV = ("mmcv.ops.multi_scale_deform_attn", "MultiScaleDeformableAttention")
POINTS, BOX = (2, 2), (1, 4)


@pytest.fixture
def make_layer(monkeypatch):
    """A layer of a library. patch looks for the file of its class in sys.modules, which other tests have without mmcv."""

    def make_layer(row):
        name, member = row
        monkeypatch.setitem(sys.modules, name, import_library(name))
        return build(getattr(sys.modules[name], member), config=CONFIG, num_heads=2, n_points=4)

    return make_layer


def compare_calls(run, layer, **options):
    """`run` has the same results when the layer is patched."""
    expected = run()
    with mx_driving.patched(layer, **options) as done:
        assert done.layers == ("",)
        close(run(), expected)


def call_in_batches_of_one(layer, named):
    """The layer as a function of its parameters, a query and a memory of one picture."""
    names = [name for name in ("query", "hidden_states", "value", "encoder_hidden_states") if name in named][:2]
    own = {name: p.detach() for name, p in layer.named_parameters()}
    rest = {name: t[:1] if torch.is_tensor(t) and len(t) == 2 and t.is_floating_point() else t for name, t in named.items()}

    def call(parameters, *rows):
        return functional_call(layer, parameters, (), {**rest, **{n: r[None] for n, r in zip(names, rows, strict=True)}})[0]

    return call, own, [named[name] for name in names]


def gradients_of(call):
    return grad(lambda *arguments: call(*arguments).square().sum(), (0, 1, 2))


TRANSFORMS = {
    "grad": lambda call, own, rows: gradients_of(call)(own, *(row[0] for row in rows)),
    "gradients of each sample": lambda call, own, rows: vmap(gradients_of(call), (None, *[0] * len(rows)))(own, *rows),
    "vmap": lambda call, own, rows: vmap(functools.partial(call, own))(*rows),
    "vjp": lambda call, own, rows: vjp(lambda row: call(own, rows[0][0], row), rows[1][0])[1](torch.ones_like(rows[0][:1])),
    "jacrev": lambda call, own, rows: jacrev(lambda *row: call(own, *row)[0, 0], (0, 1))(*(row[0] for row in rows)),
    "jacrev of queries": lambda call, own, rows: jacrev(lambda row: call(own, row, rows[1][0])[0, 0])(rows[0][0]),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("row", [DEFORMABLE, RT_DETR_V2, D_FINE])
def test_transforms_of_torch_func_over_a_batch_of_one(row, transform, make_layer):
    """For a batch of one D-FINE's value goes through an autograd function of `patch`, which has a setup_context."""
    if transform == "jacrev of queries" and is_older_than("2.13"):
        pytest.skip("torch 2.6 and 2.8 fail without patch, too: their vmap wants both gradients of grid_sample")
    layer = make_layer(row)
    named = arguments_for(layer, POINTS if row is DEFORMABLE else BOX, masked=False)
    run = functools.partial(TRANSFORMS[transform], *call_in_batches_of_one(layer, named))
    compare_calls(run, layer)
    with mx_driving.patched(layer):
        assert {name.removesuffix("_backward") for name in recorded(run)} == {WITH_LOGITS}


@pytest.mark.parametrize("modules", [True, False])
@pytest.mark.parametrize("starts", [torch.zeros(2, dtype=torch.long), torch.zeros(1, dtype=torch.long), torch.tensor([0, 6])])
def test_mmcv_on_a_cpu_ignores_level_start_index(starts, modules, make_layer):
    """There it calls a core in plain torch, which takes the levels one after the other."""
    layer = make_layer(MMCV)
    named = {**arguments_for(layer, POINTS), "level_start_index": starts}
    compare_calls(lambda: results(layer, **named), layer, modules=modules)
    with mx_driving.patched(layer, modules=modules):
        assert operators(layer, **named) == [WITH_LOGITS if modules else BARE]


@pytest.mark.parametrize(("row", "references"), [(DEFORMABLE, POINTS), (DEFORMABLE, BOX), (D_FINE, BOX), (MMCV, POINTS)])
def test_a_table_may_be_written_between_forward_and_backward(row, references, make_layer):
    """Two pictures of one shape each, and one backward. Their table of shapes is a buffer."""
    layer = make_layer(row)
    named = arguments_for(layer, references, masked=False)
    tables = {name: named[name].clone() for name in ("spatial_shapes", "level_start_index") if name in named}

    def run():
        losses = []
        for sizes in ([(4, 5), (3, 2)], [(5, 4), (2, 3)]):
            tables["spatial_shapes"].copy_(torch.tensor(sizes))
            lists = {"spatial_shapes_list": sizes} if "spatial_shapes_list" in named else {}
            out = layer(**{**named, **tables, **lists})
            losses.append((out[0] if isinstance(out, tuple) else out).square().sum())
        for table in tables.values():
            table.zero_()
        return torch.autograd.grad(sum(losses), [*layer.parameters()])

    compare_calls(run, layer)
    with mx_driving.patched(layer):
        assert {name.removesuffix("_backward") for name in recorded(run)} == {WITH_LOGITS}


TABLES = {  # of sizes [(4, 5), (3, 2)], which the list has
    "ones": torch.ones(2, 2, dtype=torch.long),
    "of the picture": torch.tensor([[8, 10], [6, 4]]),
    "width first": torch.tensor([[5, 4], [2, 3]]),
}


@pytest.mark.parametrize("references", [POINTS, (2, 4)])
@pytest.mark.parametrize("table", TABLES)
def test_where_list_and_table_differ_each_serves_what_the_own_code_reads_it_for(table, references, make_layer):
    """The list splits value. The table scales offsets around points, and is not read for boxes."""
    layer = make_layer(DEFORMABLE)
    named = {**arguments_for(layer, references), "spatial_shapes": TABLES[table]}
    compare_calls(lambda: results(layer, **named), layer)
    if references == POINTS:
        other = {**named, "spatial_shapes": torch.tensor([(4, 5), (3, 2)])}
        assert not torch.allclose(layer(**named)[0], layer(**other)[0])


@pytest.mark.parametrize("edit", [False, True])
def test_a_forward_that_is_a_partialmethod_calls_the_operator_and_says_so(edit, make_layer):
    own = type(make_layer(DEFORMABLE))
    doubled = functools.partialmethod(lambda self, times, **named: (times * own.forward(self, **named)[0],), 2)
    forward = doubled if edit else functools.partialmethod(own.forward, output_attentions=False)
    layer = build(type("ByPartial", (own,), {"forward": forward}), config=CONFIG, num_heads=2, n_points=4)
    named = arguments_for(make_layer(DEFORMABLE), POINTS)
    expected = results(layer, **named)
    with mx_driving.patched(layer) as done:
        assert operators(layer, **named) == [WITH_LOGITS]
        close(results(layer, **named), expected)
        assert done.layers == ("",)
