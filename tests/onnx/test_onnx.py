"""torch.onnx.export(dynamo=True): the nodes of each form, and onnxruntime's numbers with batch and queries of any size."""

import functools

import cases
import onnx
import onnx_nodes
import pytest
import quick_exports  # noqa: F401
import torch
from cases import AGGREGATION, MULTI_SCALE
from onnx_stand_ins import beside_the_nodes
from small_cases import GROWING, One

import mx_driving
from mx_driving._operator.description import OPERATORS

pytestmark = pytest.mark.needs("An ONNX file of opset 20")

BATCH, QUERIES = torch.export.Dim("batch"), torch.export.Dim("queries")
DYNAMIC = ({0: BATCH}, None, None, {0: BATCH, 1: QUERIES}, {0: BATCH, 1: QUERIES})
PLUGIN = "MultiscaleDeformableAttnPlugin_TRT"
BILINEAR = [op for op in cases.OPERATORS if OPERATORS[op].rows == 4]  # the others have no grid_sample
FORMS = [(op, "gather") for op in cases.OPERATORS] + [(op, "grid_sample") for op in BILINEAR]


def in_onnx(module, args, form=None, opset=20, **options):
    """Export a module with the nodes of a form, or without a table."""
    table = mx_driving.onnx.translations(form) if form else None
    options |= {"opset_version": opset, "custom_translation_table": table}
    return torch.onnx.export(module.eval(), args, dynamo=True, verbose=False, **options).model_proto


@functools.cache
def exported(operator, form, opset=20):
    args = cases.cast(GROWING[operator](3, 5), torch.float32)
    return in_onnx(One(operator, args), args, form, opset, dynamic_shapes=(DYNAMIC,))


def run(model, *args):
    return torch.from_numpy(onnx_nodes.run(onnx_nodes.session(model), [a.numpy() for a in args]))


def check(model, operator, args):
    expected = getattr(mx_driving, operator)(*args)
    torch.testing.assert_close(run(model, *args), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("operator", "form"), FORMS)
def test_standard_operators_give_the_same_numbers_for_any_batch_and_queries(operator, form):
    model = exported(operator, form)
    onnx.checker.check_model(model, full_check=True)
    assert {(o.domain, o.version) for o in model.opset_import} == {("", 20)}
    assert not model.functions
    kinds = {node.op_type for node in model.graph.node}
    assert ("GridSample" in kinds) == (form == "grid_sample")
    assert "GridSample" in kinds or "Gather" in kinds
    for bs, queries in ((3, 5), (1, 7), (4, 1)):
        check(model, operator, cases.cast(GROWING[operator](bs, queries), torch.float32))


@pytest.mark.parametrize(("operator", "form"), [f for f in FORMS if f[0] in BILINEAR])
def test_what_is_not_on_the_map_contributes_zero(operator, form):
    args = list(cases.cast(GROWING[operator](3, 5), torch.float32))
    outside = torch.tensor([float("nan"), float("inf"), -float("inf"), 7.0, -7.0])
    args[3][0] = outside.view(5, *[1] * (args[3].dim() - 2))
    args[4][0] = float("nan")
    got = run(exported(operator, form), *args)
    assert torch.equal(got[0], torch.zeros_like(got[0]))
    assert got[1:].isfinite().all()
    check(exported(operator, form), operator, args)
    args[0] = torch.full_like(args[0], float("nan"))
    got = run(exported(operator, form), *args)
    assert torch.equal(got[0], torch.zeros_like(got[0]))
    assert got[1:].isnan().any()


@pytest.mark.parametrize("form", ["gather", "grid_sample"])
def test_border_of_the_map(form):
    """Aggregation takes samples strictly inside the map: locations of exactly 0 and 1 contribute nothing."""
    for case in cases.LATTICE:
        if (case.operator, form) in FORMS:
            args = cases.cast(case.make(), torch.float32)
            check(in_onnx(One(case.operator, args), args, form), case.operator, args)


OLDER = pytest.mark.needs("An ONNX file of opset 16 or 17")
OTHER_OPSETS = [(AGGREGATION, 18), (MULTI_SCALE, 19), (MULTI_SCALE, 23)]
OTHER_OPSETS += [pytest.param(MULTI_SCALE, opset, marks=OLDER) for opset in (16, 17)]


@pytest.mark.parametrize(("operator", "opset"), OTHER_OPSETS)
def test_other_opsets(operator, opset):
    """Before opset 20 GridSample's mode was called "bilinear"."""
    model = exported(operator, "gather" if opset == 23 else "grid_sample", opset=opset)
    assert [o.version for o in model.opset_import] == [opset]
    onnx.checker.check_model(model, full_check=True)
    check(model, operator, cases.cast(GROWING[operator](2, 6), torch.float32))


@pytest.mark.parametrize("form", ["gather", "grid_sample"])
def test_sixteen_bit_values_with_float32_locations(form):
    def mixed(bs, queries):
        value, shapes, starts, *rest = GROWING[MULTI_SCALE](bs, queries)
        return value.half(), shapes.int(), starts.int(), *(t.float() for t in rest)

    model = in_onnx(One(MULTI_SCALE, ()), mixed(3, 5), form)
    got, expected = run(model, *mixed(3, 5)), mx_driving.multi_scale_deformable_attn(*mixed(3, 5))
    assert got.dtype == torch.float16
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)  # one ulp of the last rounding


@pytest.mark.parametrize(
    ("form", "node", "others"), [("npu", "MultiScaleDeformableAttn", []), ("tensorrt", PLUGIN, ["Reshape"])]
)
def test_nodes_of_others_for_any_batch_and_queries(form, node, others):
    """Beside the node are only casts of the two index tables, and for TensorRT the Reshape of the output."""
    model = exported(MULTI_SCALE, form)
    (own,) = (n for n in model.graph.node if n.domain)
    assert (own.op_type, len(own.attribute)) == (node, 0)
    assert sorted(n.op_type for n in model.graph.node if not n.domain) == ["Cast", "Cast", *others]
    shape = model.graph.output[0].type.tensor_type.shape.dim
    assert [d.dim_param or d.dim_value for d in shape] == ["batch", "queries", 8]
    for bs, queries in ((3, 5), (1, 7), (4, 1)):
        args = cases.cast(GROWING[MULTI_SCALE](bs, queries), torch.float32)
        expected = mx_driving.multi_scale_deformable_attn(*args)
        torch.testing.assert_close(beside_the_nodes(model, *args), expected, rtol=1e-5, atol=1e-5)


F16, F32, F64 = torch.float16, torch.float32, torch.float64
# casts of the two index tables, and of floating inputs and the output
CASTS = [("tensorrt", (F16, F16), 2), ("npu", (F16, F16), 6), ("tensorrt", (F16, F32), 4), ("npu", (F16, F32), 4)]


@pytest.mark.parametrize(("form", "dtypes", "casts"), [*CASTS, ("tensorrt", (F64, F64), 6), ("npu", (F64, F64), 6)])
def test_nodes_of_others_with_other_dtypes(form, dtypes, casts):
    """All floating inputs of a node have one dtype. It is float16 in the plugin if all tensors have it, else float32."""
    value, shapes, starts, *rest = cases.cast(GROWING[MULTI_SCALE](3, 5), torch.float32)
    args = value.to(dtypes[0]), shapes, starts, *(t.to(dtypes[1]) for t in rest)
    model = in_onnx(One(MULTI_SCALE, args), args, form)
    assert [n.op_type for n in model.graph.node].count("Cast") == casts
    output, expected = beside_the_nodes(model, *args), mx_driving.multi_scale_deformable_attn(*args)
    assert output.dtype == dtypes[0]
    tolerance = 2e-3 if torch.float16 in dtypes else 1e-5
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("form", ["npu", "tensorrt"])
def test_operators_without_a_node_are_not_in_the_table(form):
    """torch.onnx.export writes operators that are not in the table as gathers."""
    assert set(mx_driving.onnx.translations(form)) == {getattr(torch.ops.mx_driving, MULTI_SCALE).default}


BARE_NODES = {"grid_sample": "GridSample", "npu": "MultiScaleDeformableAttn", "tensorrt": PLUGIN}


@pytest.mark.parametrize(("form", "node"), BARE_NODES.items())
def test_with_logits_the_bare_operators_node(form, node):
    """Standard operators compute locations and weights; patched models need it."""
    args = cases.cast(GROWING[MULTI_SCALE + "_with_logits"](3, 5), torch.float32)
    tensors = tuple(a for a in args if isinstance(a, torch.Tensor))
    model = in_onnx(One(MULTI_SCALE + "_with_logits", args), tensors, form)
    kinds = [n.op_type for n in model.graph.node]
    assert node in kinds
    assert "Softmax" in kinds
    assert form == "grid_sample" or not {"Gather", "GridSample"} & set(kinds)
    expected = mx_driving.multi_scale_deformable_attn_with_logits(*args)
    if form == "grid_sample":
        torch.testing.assert_close(run(model, *tensors), expected, rtol=1e-5, atol=1e-5)
    if form == "tensorrt":
        torch.testing.assert_close(beside_the_nodes(model, *tensors), expected, rtol=1e-5, atol=1e-5)


def test_unknown_form_is_refused():
    with pytest.raises(ValueError, match=r"form must be one of gather, grid_sample, npu, onnxruntime, tensorrt; got 'plugin'"):
        mx_driving.onnx.translations("plugin")


def any_sizes(operator):
    """Return small arguments of an operator, the tensors among them, and dynamic shapes for any batch and queries."""
    row, args = OPERATORS[operator], cases.cast(GROWING[operator](3, 5), torch.float32)
    axes = zip(row.axes["bs"], row.axes[row.queries], strict=True)
    free = [{at: dim for at, dim in zip(pair, (BATCH, QUERIES), strict=True) if at is not None} or None for pair in axes]
    return args, tuple(a for a in args if isinstance(a, torch.Tensor)), (tuple(free[:-1]),)


@pytest.mark.parametrize("operator", cases.WITH_LOGITS)
def test_operators_with_logits_for_any_batch_and_queries(operator):
    args, tensors, dynamic_shapes = any_sizes(operator)
    model = in_onnx(One(operator, args), tensors, dynamic_shapes=dynamic_shapes)
    assert not {"GridSample", "Loop"} & {node.op_type for node in model.graph.node}
    for bs, queries in ((3, 5), (1, 7), (4, 1)):
        args = cases.cast(GROWING[operator](bs, queries), torch.float32)
        output = run(model, *(a for a in args if isinstance(a, torch.Tensor)))
        torch.testing.assert_close(output, getattr(mx_driving, operator)(*args), rtol=1e-5, atol=1e-5)
