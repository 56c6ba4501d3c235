"""compat.install: code written against compiled extensions imports, runs and differentiates on a CPU."""

import contextlib
import importlib
import itertools
import re
import textwrap

import cases
import pytest
import torch
import truth
from attention_modules import direction_of, results
from programs import python

import mx_driving
from mx_driving import _foreign_functions, compat
from mx_driving._patch._code import Reader
from mx_driving._patch._search import is_core
from mx_driving._patch.known import Known, read_table


def test_stand_ins_are_those_that_record_and_replay_know():
    modules = {row.module for row in _foreign_functions.FUNCTIONS if row.module != "mx_driving"}
    assert modules == {*compat.NAMES} - {"deformable_aggregation_with_depth_ext"}


# The original repositories call their extensions like this: an autograd function for each operator, a submodule as extension.
ATTENTION = """
class {name}(Function):
    @staticmethod{forward}
    def forward(ctx, value, value_spatial_shapes, value_level_start_index, sampling_locations, attention_weights, im2col_step):
        inputs = value, value_spatial_shapes, value_level_start_index, sampling_locations, attention_weights
        ctx.save_for_backward(*inputs)
        return {function}_forward(*inputs, im2col_step)

    @staticmethod{backward}
    def backward(ctx, grad):
        value, *locations, weights = {function}_backward(*ctx.saved_tensors, grad, 64)
        return value, None, None, *(locations or [None]), weights, None
"""
PLAIN = {"forward": "", "backward": ""}
MSDA = ATTENTION.format(name="MSDeformAttnFunction", function="MSDA.ms_deform_attn", **PLAIN)
GKA = ATTENTION.format(name="GeometricKernelAttentionFunc", function="GKA.geometric_kernel_attn_cuda", **PLAIN)
FORWARD = "\n    @torch.amp.custom_fwd(device_type='cpu', cast_inputs=torch.float{})"
DECORATED = {"forward": FORWARD, "backward": "\n    @torch.amp.custom_bwd(device_type='cpu')"}
BEVFORMER = ATTENTION.format(name="MultiScaleDeformableAttnFunction_fp{}", function="MSDA.ms_deform_attn", **DECORATED)
BEVFORMER = BEVFORMER.format(16, 16) + BEVFORMER.format(32, 32)
PACKAGE = f"""
import torch
from torch.autograd import Function
import MultiScaleDeformableAttention as MSDA
import GeometricKernelAttention as GKA
from . import deformable_aggregation_ext as DAF

{MSDA}{GKA}class DeformableAggregationFunction(Function):  # Sparse4D, SparseDrive
    @staticmethod
    def forward(ctx, mc_ms_feat, spatial_shape, scale_start_index, sampling_location, weights):
        inputs = mc_ms_feat.contiguous().float(), spatial_shape.contiguous().int(), scale_start_index.contiguous().int()
        inputs += sampling_location.contiguous().float(), weights.contiguous().float()
        ctx.save_for_backward(*inputs)
        return DAF.deformable_aggregation_forward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        inputs = ctx.saved_tensors
        outputs = [torch.zeros_like(inputs[i]) for i in (0, 3, 4)]
        DAF.deformable_aggregation_backward(*inputs, grad.contiguous(), *outputs)
        return outputs[0], None, None, outputs[1], outputs[2]

class DoubleDeformableAggregationFunction(DeformableAggregationFunction):  # a descendant of Sparse4D
    @staticmethod
    def forward(ctx, mc_ms_feat, spatial_shape, scale_start_index, sampling_location, weights):
        inputs = mc_ms_feat.double(), spatial_shape, scale_start_index, sampling_location.double(), weights.double()
        ctx.save_for_backward(*inputs)
        return DAF.deformable_aggregation_forward(*inputs)

class MultiScaleDeformableAttnFunction(MSDeformAttnFunction):  # mmcv
    @staticmethod
    def forward(ctx, value, value_spatial_shapes, value_level_start_index, sampling_locations, attention_weights, im2col_step):
        sampling_locations, attention_weights = sampling_locations.type_as(value), attention_weights.type_as(value)
        inputs = value, value_spatial_shapes, value_level_start_index, sampling_locations, attention_weights
        ctx.save_for_backward(*inputs)
        return MSDA.ms_deform_attn_forward(*inputs, im2col_step)
{BEVFORMER}
"""


@pytest.fixture
def repository(unbuilt, monkeypatch):
    """Return a repository. The table of known code has its functions."""
    unbuilt("someones_ops", PACKAGE)
    module = importlib.import_module("someones_ops")
    for name, (form, casts) in CASTS.items():
        key = Reader(is_core).read(getattr(module, name)).key
        monkeypatch.setitem(read_table(), key, Known(form, "here 1 it", casts=casts))
    return module


BY_DTYPE = [f"MultiScaleDeformableAttnFunction_fp{bits}" for bits in (16, 32)]
CASTS = {
    **dict.fromkeys(("MSDeformAttnFunction", *BY_DTYPE), ("attention", "")),
    "GeometricKernelAttentionFunc": ("geometric", ""),
    "DeformableAggregationFunction": ("aggregation", "float32"),
    "DoubleDeformableAggregationFunction": ("aggregation", "float64"),
    "MultiScaleDeformableAttnFunction": ("attention", "value"),
}


CLASSES = "MSDeformAttnFunction", "DeformableAggregationFunction", "GeometricKernelAttentionFunc"
FUNCTIONS = dict(zip(cases.OPERATORS, CLASSES, strict=True))
INPUTS = {
    cases.MULTI_SCALE: cases.multi_scale(2, 5, 8, 3, [(4, 6), (2, 3)], 2),
    cases.AGGREGATION: cases.aggregation(2, 5, 3, 8, 2, [[(4, 6), (2, 3)], [(5, 4), (3, 2)]]),
    cases.GEOMETRIC: cases.geometric(2, 5, 8, 3, [(4, 6), (2, 3)], 2),
}


def extension_arguments(operator, dtypes=None):
    """Return the inputs; for attentions also im2col_step. dtypes: of value, and of locations and weights."""
    inputs = INPUTS[operator]
    if dtypes is not None:
        inputs = [i.to(dtypes[k > 0]) if i.is_floating_point() else i for k, i in enumerate(inputs)]
    return *inputs, *([] if operator == cases.AGGREGATION else [64])


def take_extensions_away(repository, monkeypatch):
    """Let the extensions fail, as a GPU's extensions fail on a CPU."""
    for extension in (repository.MSDA, repository.GKA, repository.DAF):
        for name in [n for n in vars(extension) if n.endswith("ward")]:
            monkeypatch.setattr(extension, name, None)


NAMES = [*((name, operator) for operator, name in FUNCTIONS.items())]
NAMES += [("DoubleDeformableAggregationFunction", cases.AGGREGATION), ("MultiScaleDeformableAttnFunction", cases.MULTI_SCALE)]
NAMES += [(name, cases.MULTI_SCALE) for name in BY_DTYPE]
MIXTURES = list(itertools.product([torch.float16, torch.bfloat16, torch.float32, torch.float64], repeat=2))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("name", "operator"), NAMES)
def test_patched_functions_keep_the_originals_dtypes(repository, monkeypatch, name, operator, autocast):
    """For every mixture of dtypes, the replacement has the results of the original over the stand-in. After the block the
    original is back."""
    function, arguments = getattr(repository, name), [extension_arguments(operator, two) for two in MIXTURES]

    def run():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return [results(function.apply, *some) for some in arguments]

    expected = run()
    take_extensions_away(repository, monkeypatch)
    with mx_driving.patched(repository) as done:
        assert name in {replaced.rpartition(".")[2] for replaced in done.replaced}
        patched = run()
    with pytest.raises(TypeError, match="not callable"):
        run()
    assert "apply" not in vars(function)
    assert [[t.dtype for t in tensors] for tensors in patched] == [[t.dtype for t in tensors] for tensors in expected]
    assert all(torch.equal(a, b) for row in zip(patched, expected, strict=True) for a, b in zip(*row, strict=True))


@pytest.mark.parametrize(("name", "operator"), NAMES)
def test_patched_functions_compile(repository, monkeypatch, name, operator):
    """torch.compile reads forward and backward, and ignores apply. The extension is not there."""
    function = getattr(repository, name)
    expected = results(function.apply, *extension_arguments(operator))
    take_extensions_away(repository, monkeypatch)
    with mx_driving.patched(repository):
        compiled = torch.compile(lambda *a: function.apply(*a), fullgraph=True, backend="aot_eager")
        outputs = results(compiled, *extension_arguments(operator))
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


OLDER = cases.aggregation(2, 6, 1, 8, 2, [[(4, 6), (2, 3)]] * 3)  # each point is an anchor; the cameras' maps are of one size


def maps_apart(features, shapes, starts, locations, weight):
    """Return inputs of the older interface of deformable_aggregation_ext: GaussianFormer, Far3D, Sparse4D v1 and v2."""
    rows = int(shapes[0].prod(-1).sum())
    return features.unflatten(1, (len(shapes), rows)), shapes[0], starts[0], locations[:, :, 0], weight[:, :, 0]


def truth_of_older(grad):
    """Return output and gradients in the shapes of the older interface."""
    results = truth.deformable_aggregation(*(i.numpy() for i in OLDER), grad.numpy())[0]
    shapes = [grad.shape, *(maps_apart(*OLDER)[i].shape for i in (0, 3, 4))]
    return [torch.as_tensor(t).reshape(shape) for t, shape in zip(results, shapes, strict=True)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_older_interface_of_aggregation_in_both_directions(repository, dtype):
    """Forward gives a row for each point; backward adds gradients in the caller's shapes."""
    features, *tables, locations, weight = maps_apart(*OLDER)
    inputs = features, *(t.to(dtype) for t in tables), locations, weight
    grad = direction_of(torch.zeros(2, 6, 8, dtype=torch.float64))
    outputs = [torch.ones_like(inputs[i]) for i in (0, 3, 4)]
    output = repository.DAF.deformable_aggregation_forward(*inputs)
    assert repository.DAF.deformable_aggregation_backward(*inputs, grad, *outputs) is None
    for ours, true in zip([output, *(out - 1 for out in outputs)], truth_of_older(grad), strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("name", ["DeformableAggregationFunction", "DoubleDeformableAggregationFunction"])
def test_original_code_over_the_older_interface(repository, name, patched):
    function = getattr(repository, name)
    with mx_driving.patched(repository) if patched else contextlib.nullcontext():
        outputs = results(function.apply, *maps_apart(*OLDER))
    close = 1e-11 if name.startswith("Double") else 2e-5
    for ours, true in zip(outputs, truth_of_older(direction_of(outputs[0].double())), strict=True):
        torch.testing.assert_close(ours.double(), true, rtol=close, atol=close)


def test_the_older_interface_compiles_and_has_second_derivatives(repository):
    inputs = [i.detach().requires_grad_(k in (0, 3, 4)) for k, i in enumerate(maps_apart(*OLDER))]
    apply = repository.DoubleDeformableAggregationFunction.apply
    expected = torch.autograd.grad(apply(*inputs).sin().sum(), inputs[0])
    with mx_driving.patched(repository):
        apply = repository.DoubleDeformableAggregationFunction.apply
        assert torch.autograd.gradgradcheck(apply, inputs, fast_mode=True)
        compiled = torch.compile(lambda *a: apply(*a), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(torch.autograd.grad(compiled(*inputs).sin().sum(), inputs[0]), expected)


REFUSED = [  # an index, a wrong argument, the sentence
    (1, torch.ones(3, 2, 2).long(), "feature_maps must have shape (bs, num_feat, c) where spatial_shape is [cam, scale, 2]; "
     "got (2, 3, 30, 8), as the older interface has them, beside spatial_shape (3, 2, 2)"),
    (1, torch.ones(2, 3).long(), "spatial_shape must have shape (scale, 2); got (2, 3)"),
    (2, torch.zeros(3).long(), "scale_start_index must have shape (scale=2,); got (3,)"),
    (3, torch.rand(2, 6, 1, 3, 2), "sample_locations must have shape (bs=2, pts, cam=3, 2); got (2, 6, 1, 3, 2)"),
    (4, torch.rand(2, 5, 3, 2, 2), "weights must have shape (bs=2, pts=6, cam=3, scale=2, group); got (2, 5, 3, 2, 2)"),
    (4, torch.rand(2, 6, 3, 2, 3), "weight must have a group count that divides c=8; got 3"),
    (2, torch.tensor([0, 25]), "scale_start_index[1] must leave room for 2 x 3 rows among 30; got 25 (needs 31 rows)"),
    (2, torch.tensor([0, -6]), "scale_start_index[1] must not be negative; got -6"),
    (2, torch.tensor([0.0, 24.0]), "scale_start_index must have dtype int32 or int64; got float32"),
]  # fmt: skip


@pytest.mark.parametrize(("index", "other", "sentence"), REFUSED)
def test_the_older_interface_refuses(repository, index, other, sentence):
    """A map may not reach into the next camera's rows."""
    inputs = list(maps_apart(*OLDER))
    inputs[index] = other
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(sentence)}$"):
        repository.DAF.deformable_aggregation_forward(*inputs)


def test_starts_of_cameras_that_are_no_integers_are_not_taken_for_locations(repository):
    inputs = list(INPUTS[cases.AGGREGATION])
    inputs[2] = inputs[2].float()
    with pytest.raises(TypeError, match=r"^scale_start_index must have dtype int32 or int64; got float32$"):
        repository.DAF.deformable_aggregation_forward(*inputs)


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("operator", [cases.MULTI_SCALE, cases.GEOMETRIC])
def test_weights_whose_levels_and_points_share_an_axis(repository, operator, patched):
    """Far3D has such weights."""
    function, (*inputs, weights) = getattr(repository, FUNCTIONS[operator]), INPUTS[operator]
    expected, merged = results(function.apply, *inputs, weights, 64), weights.flatten(3)
    with mx_driving.patched(repository) if patched else contextlib.nullcontext():
        outputs = results(function.apply, *inputs, merged, 64)
        assert outputs[-1].shape == merged.shape
        with pytest.raises(ValueError, match="attention_weights must have shape"):
            function.apply(*inputs, merged[..., :-1], 64)
    assert all(torch.equal(a.reshape(b.shape), b) for a, b in zip(outputs, expected, strict=True))


@pytest.mark.parametrize("patched", [False, True])
def test_tables_of_volumes_are_refused_as_such(repository, patched):
    """PanoOcc passes (H, W, Z) of its voxels."""
    value, _, _, *rest = cases.multi_scale(2, 5, 8, 3, [(4, 6)], 2)
    sentence = r"^value_spatial_shapes must have shape \(num_levels, 2\), .*; got \(1, 3\): three sizes, of volumes"
    context = mx_driving.patched(repository) if patched else contextlib.nullcontext()
    with context, pytest.raises(ValueError, match=sentence):
        repository.MSDeformAttnFunction.apply(value, torch.tensor([[4, 3, 2]]), torch.tensor([0]), *rest, 64)


def test_install_twice_and_undo():
    code = """
    import sys, mx_driving
    finders = list(sys.meta_path)
    assert mx_driving.compat.install() == mx_driving.compat.install()
    assert len(sys.meta_path) == len(finders) + 2
    import MultiScaleDeformableAttention
    mx_driving.compat.uninstall()
    assert sys.meta_path == finders
    try:
        import MultiScaleDeformableAttention
    except ModuleNotFoundError:
        print("gone")
    sys.modules["GeometricKernelAttention"] = sys
    try:
        mx_driving.compat.install()
    except RuntimeError as error:
        print(error)
    """
    said = "gone\nmx_driving.compat.install must come before the first import of GeometricKernelAttention\n"
    assert python("-c", textwrap.dedent(code)).stdout == said


def test_a_library_file_that_torch_loads(tmp_path):
    """A constructor of NVIDIA TAO loads such a file, and its code calls torch.ops.nvidia."""
    path = tmp_path / "MultiScaleDeformableAttention.cpython-311-x86_64-linux-gnu.so"
    inputs = INPUTS[cases.MULTI_SCALE]
    expected, *gradients = results(mx_driving.multi_scale_deformable_attn, *inputs)
    original = torch.ops.load_library
    for _ in range(2):  # it can be installed again after it was uninstalled
        with pytest.raises(OSError):
            torch.ops.load_library(path)
        compat.install()
        for _ in range(2):
            torch.ops.load_library(str(path))
        forward, backward = torch.ops.nvidia.MultiscaleDeformableAttnPlugin_TRT, torch.ops.nvidia.DMHA_backward
        found = results(forward, *inputs)[1:], backward(*inputs, direction_of(expected), 64)
        assert all(torch.equal(a, b) for each in found for a, b in zip(each, gradients, strict=True))
        (node,) = torch.jit.trace(lambda *args, op=forward: op(*args), inputs).graph.nodes()
        assert node.kind() == "nvidia::MultiscaleDeformableAttnPlugin_TRT"  # the node that TAO's exporter reads
        with pytest.raises(OSError):
            torch.ops.load_library(tmp_path / "other.so")
        compat.uninstall()
        assert torch.ops.load_library == original


def test_a_library_file_that_was_loaded_before(tmp_path, monkeypatch):
    path = str(tmp_path / "MultiScaleDeformableAttention.so")
    monkeypatch.setattr(torch.ops, "loaded_libraries", {path})
    with pytest.raises(RuntimeError, match=r"install must come before torch.ops.load_library loads .*Attention\.so"):
        compat.install()


@pytest.mark.parametrize("name", ["detrex", "adet", "groundingdino"])
def test_an_uncompiled_part_of_a_package(unbuilt, name):
    unbuilt(name)
    extension = importlib.import_module(f"{name}._C")
    inputs = INPUTS[cases.MULTI_SCALE]
    out, *expected = results(mx_driving.multi_scale_deformable_attn, *inputs)
    assert torch.equal(extension.ms_deform_attn_forward(*inputs, 64), out)
    gradients = extension.ms_deform_attn_backward(*inputs, direction_of(out), 64)
    assert len(gradients) == 3
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


@pytest.mark.parametrize("name", ["deformable_aggregation_with_depth_ext", "sparse.deformable_aggregation_with_depth_ext"])
def test_aggregation_by_depth_is_imported_and_says_that_it_is_missing(unbuilt, name):
    unbuilt("sparse")
    extension = importlib.import_module(name)
    with pytest.raises(NotImplementedError, match=r"_with_depth_forward is not compiled; .* which has no depth, only$"):
        extension.deformable_aggregation_with_depth_forward(torch.rand(1))


def test_a_compiled_part_of_a_package_comes_first(unbuilt):
    (unbuilt("detrex") / "_C.py").write_text("here = True")
    assert importlib.import_module("detrex._C").here


MMCV = """
import torch, warnings, mx_driving
mx_driving.compat.install()
import mmcv
from mmcv.ops import MultiScaleDeformableAttention, multi_scale_deform_attn as module, nms
from mmcv.ops.multi_scale_deform_attn import MultiScaleDeformableAttnFunction as Function
from mmcv.ops.multi_scale_deform_attn import multi_scale_deformable_attn_pytorch as plain
from mx_driving.patcher import default_patcher_builder
torch.manual_seed(0)
value, shapes, starts = mx_driving.nn.flatten_levels([torch.rand(2, 32, 5, 4), torch.rand(2, 32, 3, 2)])
layer = MultiScaleDeformableAttention(32, 4, 2, 3, dropout=0.0, batch_first=True)
for p in layer.parameters():
    torch.nn.init.normal_(p, std=0.2)
query, reference, padding = torch.rand(2, 6, 32), torch.rand(2, 6, 2, 2), torch.rand(2, 26) < 0.2
ours = mx_driving.nn.MultiScaleDeformableAttention(32, 4, 2, 3)
ours.load_state_dict(layer.state_dict(), strict=True)

def theirs():
    return layer(query, value=value, key_padding_mask=padding, reference_points=reference,
                 spatial_shapes=shapes, level_start_index=starts)

def counted(call):
    with mx_driving.viz.recording() as looks:
        out = call()
    return out, len(looks)

before, count = counted(theirs)
assert count == 0
torch.testing.assert_close(ours(query, reference, value, shapes, starts, padding) + query, before, rtol=1e-5, atol=1e-6)
heads = (value.view(2, 26, 4, 8), *ours.sampling(query, reference, shapes))
expected = plain(heads[0], shapes, *heads[1:])
with mx_driving.patched("mmcv-full") as done, mx_driving.patched("mmcv") as again:
    assert again.replaced == done.replaced
    print(*done.replaced, sep="\\n")
    after, count = counted(theirs)
    assert count == 1
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)
    out, count = counted(lambda: plain(heads[0], shapes, *heads[1:]))
    assert count == 1
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    out, count = counted(lambda: Function.apply(heads[0], shapes, starts, *heads[1:], 64))
    assert count == 1
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
assert counted(theirs)[1] == 0
leaf = heads[0].detach().requires_grad_()
gradient = torch.autograd.grad(Function.apply(leaf, shapes, starts, *heads[1:], 64).sum(), leaf)[0]  # through mmcv._ext
torch.testing.assert_close(gradient, torch.autograd.grad(plain(leaf, shapes, *heads[1:]).sum(), leaf)[0])
mixed = (heads[0].half(), shapes, starts, *heads[1:], 64)  # mmcv's code casts locations and weights to value's dtype
for enabled in (False, True):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        expected = Function.apply(*mixed)
        with mx_driving.patched("mmcv"):
            output = Function.apply(*mixed)
    assert output.dtype == expected.dtype == torch.float16
    assert torch.equal(output, expected)
with warnings.catch_warnings(), default_patcher_builder.build():  # the vendor's shortest program
    warnings.filterwarnings("error", "mx_driving")
    assert counted(lambda: plain(heads[0], shapes, *heads[1:]))[1] == 1
try:
    nms(torch.rand(2, 4), torch.rand(2), 0.5)
except NotImplementedError as error:
    print(error)
"""


@pytest.mark.long
def test_mmcv():
    """mmcv-lite has no compiled extension. With the stand-in, its ops can be imported, and patch replaces its two cores and its
    attention module."""
    pytest.importorskip("mmcv")
    done = python("-W", "ignore", "-c", MMCV)
    assert done.stdout.splitlines() == [
        "mmcv.ops.multi_scale_deform_attn.MultiScaleDeformableAttnFunction",
        "mmcv.ops.multi_scale_deform_attn.multi_scale_deformable_attn_pytorch",
        "mmcv.ops.multi_scale_deform_attn.MultiScaleDeformableAttention",
        "mmcv._ext.nms is not compiled; mx_driving.compat stands in for ms_deform_attn_forward, ms_deform_attn_backward only",
    ]


def test_patch_beside_a_missing_extension_says_what_helps(tmp_path, monkeypatch):
    """patch advises compat.install() for mmcv-lite, and for a repository whose extensions are not built."""
    pytest.importorskip("mmcv")
    (tmp_path / "unbuilt").mkdir()
    (tmp_path / "unbuilt" / "__init__.py").write_text("from . import deformable_aggregation_ext")
    monkeypatch.syspath_prepend(tmp_path)
    helps = r"; call mx_driving\.compat\.install\(\) first, which stands in for it$"
    with pytest.raises(ValueError, match=r"got none in mmcv; .*No module named 'mmcv\._ext'" + helps):
        mx_driving.patch("mmcv")
    with pytest.raises(ImportError, match="deformable_aggregation_ext.*" + helps):
        mx_driving.patch("unbuilt")
