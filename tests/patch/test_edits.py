"""patch: an edit of whatever known code reaches, before patch, after it and after restore(), has its own effect."""

import ast
import contextlib
import functools
import importlib
import inspect
import sys
import textwrap
import types

import pytest
import test_patching_pools as pools
import torch
import torch.nn.functional as F
from attention_modules import arguments_for, build, make_functions, operators, results

import mx_driving
from mx_driving._patch._parameters import find_source, unwrap

pytestmark = pytest.mark.filterwarnings("ignore")
MODELS = "transformers.models.{0}.modeling_{0}"
CONFIG = types.SimpleNamespace(
    **{"d_model": 16, "num_feature_levels": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2},
    **{"decoder_n_levels": 2, "decoder_n_points": 4, "decoder_offset_scale": 0.5, "decoder_method": "default"},
    disable_custom_kernels=True,
)
# Known code, the width of reference points, and what it reaches: a holder and a name. `own` is the Python module.
ROWS = {
    (MODELS.format("deformable_detr"), "DeformableDetrMultiscaleDeformableAttention", 2):
        ("kind forward", "own.MultiScaleDeformableAttention forward", "F grid_sample", "F softmax"),
    (MODELS.format("rt_detr"), "RTDetrMultiscaleDeformableAttention", 4):
        ("kind forward", "own.MultiScaleDeformableAttention forward", "F grid_sample"),
    (MODELS.format("d_fine"), "DFineMultiscaleDeformableAttention", 4):
        ("kind forward", "layer ms_deformable_attn_core", "F grid_sample", "F softmax"),
    (MODELS.format("mask2former"), "Mask2FormerPixelDecoderEncoderMultiscaleDeformableAttention", 2):
        ("kind forward", "kind with_pos_embed", "own multi_scale_deformable_attention", "F grid_sample"),
    ("mmcv.ops.multi_scale_deform_attn", "MultiScaleDeformableAttention", 2):
        ("kind forward", "own multi_scale_deformable_attn_pytorch", "F grid_sample", "torch.Tensor softmax"),
    ("pools", "bev_pool", 0): ("own bev_pool", "torch.Tensor index_put", "torch.Tensor permute"),
    ("pools", "QuickCumsum", 0): ("own cumsum_trick", "kind forward", "kind backward", "torch.Tensor cumsum"),
}  # fmt: skip


def scaled(out):
    return (scaled(out[0]), *out[1:]) if isinstance(out, tuple) else 1.5 * out if isinstance(out, torch.Tensor) else out


def decorate(function):
    return functools.wraps(function)(lambda *args, **kwargs: scaled(function(*args, **kwargs)))


def rebind(function):
    return lambda *args, **kwargs: scaled(function(*args, **kwargs))


def call_partial(function):
    return functools.partial(lambda own, *args, **kwargs: scaled(own(*args, **kwargs)), function)


class Called:
    def __init__(self, function):
        self.function = function

    def __call__(self, *args, **kwargs):
        return scaled(self.function(*args, **kwargs))


class _Scales(ast.NodeTransformer):
    def visit_Return(self, node):
        return ast.Return(ast.Call(ast.Name("scaled", ast.Load()), [node.value], []))


def edit_text(function):
    """The code of an edited file, as an editor's reload puts it into the function."""
    function = find_source(function)
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    tree.body[0].decorator_list = []
    space = {**function.__globals__}
    make_functions(ast.unparse(ast.fix_missing_locations(_Scales().visit(tree))), space, "edited")
    function.__globals__["scaled"] = scaled
    return space[function.__name__].__code__


def put(change, holder, name, layer, monkeypatch):
    """Replace the attribute by a changed one. A method of an autograd function stays static."""
    own = inspect.getattr_static(holder, name)
    function = own.__func__ if isinstance(own, staticmethod) else own
    changed = change(function)
    is_static = isinstance(own, staticmethod) or (isinstance(holder, type) and not isinstance(changed, types.FunctionType))
    if is_static and not isinstance(own, staticmethod):
        changed = functools.partialmethod(lambda self, own, *args, **kwargs: scaled(own(self, *args, **kwargs)), function)
    monkeypatch.setattr(holder, name, staticmethod(changed) if isinstance(own, staticmethod) else changed)


PRISTINE = {}  # function -> its code


def take_reloads_back():
    for function, code in PRISTINE.items():
        function.__code__ = code


def reload(change, holder, name, layer, monkeypatch):
    function = inspect.getattr_static(holder, name)
    function = unwrap(function)  # the object that `patch` changes in place
    changed = change(function)
    PRISTINE.setdefault(function, find_source(function).__code__)
    function.__code__ = changed


def derive(change, holder, name, layer, monkeypatch):
    """Override in a subclass, which calls the own method."""
    kind, own = type(layer), inspect.getattr_static(holder, name)
    monkeypatch.setattr(layer, "__class__", type("Derived", (kind,), {name: change(own), "__module__": __name__}))


def mix(change, holder, name, layer, monkeypatch):
    mixin = type("Mixin", (), {name: change(inspect.getattr_static(holder, name))})
    monkeypatch.setattr(layer, "__class__", type("Mixed", (mixin, type(layer)), {}))


def put_on_the_instance(change, holder, name, layer, monkeypatch):
    monkeypatch.setitem(vars(layer), name, change(getattr(layer, name)))


EDITS = {
    "decorate": (put, decorate),
    "rebind": (put, rebind),
    "partial": (put, call_partial),
    "object": (put, Called),
    "reload": (reload, edit_text),
    "subclass": (derive, rebind),
    "mixin": (mix, decorate),
    "instance": (put_on_the_instance, rebind),
    "partial of the instance": (put_on_the_instance, call_partial),
}


def list_cases():
    for row, targets in ROWS.items():
        for target in targets:
            of_layer, is_own = target.startswith("kind ") and row[2], target.startswith(("own", "layer"))
            for edit, (way, _) in EDITS.items():
                if way in (derive, mix, put_on_the_instance) and not of_layer:
                    continue
                if edit == "object" and not target.startswith(("own ", "F ")):
                    continue  # An object is no method: it does not get the layer.
                if edit == "reload" and not (is_own or target.startswith("kind ")):
                    continue  # Nobody reloads torch.
                if edit == "partial" and target.startswith("torch.Tensor"):
                    continue
                yield pytest.param(row, target, edit, id=f"{row[1]}, {target}, {edit}")


@functools.cache
def pool_library():
    return pools.library(pools.PLAIN + pools.LIFT_SPLAT.replace("{places}", "geom_feats"))


@functools.cache
def import_library(name):
    """Import a library's file, mmcv's over compat's stand-ins, and forget mmcv: other tests import it without them."""
    pytest.importorskip(name.partition(".")[0])
    before = set(sys.modules)
    if name.startswith("mmcv"):
        mx_driving.compat.install()
    try:
        return importlib.import_module(name)
    finally:
        if name.startswith("mmcv"):
            mx_driving.compat.uninstall()
            for other in [other for other in set(sys.modules) - before if other.partition(".")[0] == "mmcv"]:
                del sys.modules[other]


def load(row):
    """A row's Python module, its class or function, the layer or None, and a function that returns results."""
    name, member, width = row
    if name == "pools":
        own = pool_library()
        inputs = pools.rows() if member == "bev_pool" else pools.sorted_rows()[:3]
        inputs = [t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in inputs]
        call = lambda *args: getattr(own, member)(*args) if member == "bev_pool" else own.QuickCumsum.apply(*args)[0]  # noqa: E731
        return own, getattr(own, member), None, call, inputs, {}
    own = import_library(name)
    layer = build(getattr(own, member), config=CONFIG, num_heads=2, n_points=4)
    is_d_fine = "DFine" in member  # whose own code refuses masks
    named = arguments_for(layer, (2, 2) if width == 2 else (1, 4) if is_d_fine else (2, 4), masked=not is_d_fine)
    return own, type(layer), layer, layer, (), named


@pytest.fixture(autouse=True)
def reloads():
    yield
    take_reloads_back()


@pytest.mark.parametrize(("row", "target", "edit"), [*list_cases()])
def test_an_edit_has_its_own_effect(row, target, edit, monkeypatch):
    own, kind, layer, call, args, named = load(row)
    monkeypatch.setitem(sys.modules, own.__name__, own)
    place, name = target.split()
    holder = eval(place, {"own": own, "kind": kind, "layer": layer, "F": F, "torch": torch})
    way, change = EDITS[edit]
    run = functools.partial(results, call, *args, **named)
    unedited = run()
    model = own if layer is None else layer

    def close(ours, theirs):
        return len(ours) == len(theirs) and all(map(functools.partial(torch.allclose, rtol=1e-9, atol=1e-9), ours, theirs))

    def says_what_it_does(done):
        if layer is not None:
            calls = bool(operators(call, *args, **named))
            # A replaced core below a function of other names is not looked for.
            assert bool(done.layers) == calls or (calls and change is not decorate)

    with monkeypatch.context() as edits:
        way(change, holder, name, layer, edits)
        expected = run()
        assert not close(expected, unedited)
        with contextlib.suppress(ValueError), mx_driving.patched(model) as done:  # ValueError: all code is left alone
            assert close(run(), expected), "an edit before patch"
            says_what_it_does(done)
    take_reloads_back()
    with mx_driving.patched(model), monkeypatch.context() as edits:
        assert operators(call, *args, **named)
        way(change, holder, name, layer, edits)
        if holder is not torch.Tensor:  # A call does not look at the methods of tensors.
            assert close(run(), expected), "an edit after patch"
            with contextlib.suppress(ValueError), mx_driving.patched(model) as again:
                assert close(run(), expected), "a patch of edited code"
                says_what_it_does(again)
    take_reloads_back()
    assert close(run(), unedited)
    with monkeypatch.context() as pristine, monkeypatch.context() as edits:
        if isinstance(holder, type):  # The edit is undone to what it found, which is ours; a later test finds the library's.
            pristine.setattr(holder, name, inspect.getattr_static(holder, name))
        done = mx_driving.patch(model)
        way(change, holder, name, layer, edits)
        done.restore()
        assert close(run(), expected), "an edit before restore"
    take_reloads_back()
    assert close(run(), unedited)
