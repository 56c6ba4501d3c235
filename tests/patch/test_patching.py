"""patch: the replaced code, the reasons for the other code, how the originals come back, and models between the two."""

import contextlib
import copy
import functools
import importlib
import importlib.util
import inspect
import pickle
import sys
import threading
import types
import warnings

import attention_modules as lib
import pytest
import torch
from attention_modules import WITH_LOGITS, HuggingFace, arguments_for, build, close, library, operators, patched, plain_core
from torch import nn
from torch.utils.checkpoint import checkpoint

import mx_driving


def module_of(source: str, known: str = "deformable", name: str = "a_library") -> types.ModuleType:
    """A Python module made of text that has a `plain_core` of its own. `known`: a function that is known, or nothing."""
    core = types.FunctionType(plain_core.__code__, plain_core.__globals__, "plain_core")
    core.__module__ = "elsewhere"
    return library(core, source=source, known=known, name=name)


GOOD = """
def deformable(value, value_spatial_shapes, sampling_locations, attention_weights):
    return plain_core(value, value_spatial_shapes, sampling_locations, attention_weights)
"""
CLOSURE = """
def decorated(function):
    def deformable(value, value_spatial_shapes, sampling_locations, attention_weights):
        return function(value, value_spatial_shapes, sampling_locations, attention_weights)
    return deformable
deformable = decorated(plain_core)
"""
RAISES = GOOD.replace("return", "raise RuntimeError('Not implemented on the CPU')\n    return")
OTHER_PARAMETERS = "def deformable(value, sampling_locations, attention_weights, sizes):\n    pass\n"
EXTENSION = """
class MSDeformAttnFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, value_spatial_shapes, value_level_start_index, sampling_locations, attention_weights, im2col_step):
        inputs = value, value_spatial_shapes, value_level_start_index, sampling_locations, attention_weights
        ctx.save_for_backward(*inputs)
        return EXT.ms_deform_attn_forward(*inputs, im2col_step)
    @staticmethod
    def backward(ctx, grad):
        inputs = ctx.saved_tensors
        grads = EXT.ms_deform_attn_backward(*inputs, grad.contiguous(), 64)
        return grads[0], None, None, grads[1], grads[2], None
"""


def inputs(dtype=torch.float32):
    return tuple(t.to(dtype) if isinstance(t, torch.Tensor) else t for t in lib.core_arguments((2, 2), dtype=torch.float32))


def calls(function) -> int:
    return len(operators(function, *inputs()))


def test_a_function_changes_in_place_and_back():
    module = module_of(GOOD)
    imported = module.deformable  # by another file, before
    before = imported.__code__
    done = mx_driving.patch(module)
    assert done.replaced == ("elsewhere.plain_core", "a_library.deformable")
    assert repr(done).splitlines() == ["replaced elsewhere.plain_core", "replaced a_library.deformable"]
    assert calls(imported) == 1
    torch.testing.assert_close(imported(*inputs()), plain_core(*inputs()))
    for _ in range(2):
        done.restore()
    assert imported.__code__ is before
    assert calls(imported) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sizes_may_be_a_tensor_and_arguments_have_names(dtype):
    """Older libraries give the sizes as a tensor. Results have the dtype of the values."""
    module = module_of(GOOD.replace(", attention_weights):", ", *, attention_weights):"))
    value, sizes, locations, weights = inputs(dtype)
    with mx_driving.patched(module):
        out = module.deformable(value, torch.tensor(sizes), locations, attention_weights=weights)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), plain_core(*inputs()), rtol=1e-5 if dtype == torch.float32 else 0.05, atol=0.05)


def test_an_exception_gives_the_original_back():
    module = module_of(GOOD)
    with pytest.raises(KeyError), mx_driving.patched(module):
        raise KeyError
    assert calls(module.deformable) == 0


def test_a_model_is_searched_by_its_classes_files():
    """The class's file imports its core from another file."""
    module = module_of(GOOD)
    layer = type("Layer", (torch.nn.Module,), {"__module__": "a_library_of_layers"})
    sys.modules["a_library_of_layers"] = module
    try:
        with mx_driving.patched(torch.nn.Sequential(layer())) as done:
            assert "a_library.deformable" in done.replaced
    finally:
        del sys.modules["a_library_of_layers"]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (GOOD + "    # unlike the known code\n    return None", r"its code is not known\. .* forms=\{deformable: \"core\"\}"),
        (CLOSURE, r"its code is not known, because .* closure\. .* forms=\{deformable: \"core\"\}"),
        (OTHER_PARAMETERS, "its code is not known$"),
        (EXTENSION, r"its code is not known\. .* forms=\{MSDeformAttnFunction: \"core\"\}"),
    ],
)
def test_unknown_code_stays_and_the_warning_has_the_line_to_paste(source, reason):
    module = module_of(source, known="")
    before = getattr(module, "deformable", None)
    with pytest.warns(UserWarning, match=f"mx_driving.patch left a_library.* alone: {reason}"):
        done = mx_driving.patch(module)
    done.restore()
    assert done.replaced == ("elsewhere.plain_core",)
    ((name, said),) = done.skipped.items()
    assert f"left alone {name}: {said}" in repr(done)
    assert getattr(module, "deformable", None) is before


EDITS_OF_A_FUNCTION = {  # of an autograd function over an extension -> why a trial refuses it
    ("return EXT.", "return 2 * EXT."): "differs from the operator's by",
    ("return EXT.", "return -EXT."): "differs from the operator's by",
    ("grads[0], None", "1.001 * grads[0], None"): "differs from the operator's by",
    ("grads[1], grads[2]", "None, grads[2]"): "differs from the operator's by",
    ("grads[1], grads[2]", "grads[1], grads[2].sign()"): "differs from the operator's by",
    ("grad.contiguous()", "grad.contiguous().clamp(-0.1, 0.1)"): "differs from the operator's by",
    ("return EXT.", "value = value * 1.01\n        return EXT."): "",  # `inputs` holds the older value
    ("        inputs = value,", "        value = value.relu()\n        inputs = value,"): "differs from the operator's by",
    ("im2col_step)\n    @", "im2col_step).unsqueeze(0)\n    @"): "its results have other shapes",
    ("im2col_step)\n    @", "im2col_step).float()\n    @"): "its results have another dtype",
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS_OF_A_FUNCTION)
def test_a_named_autograd_function_is_tried_over_compats_functions(edit):
    """Outputs and gradients count. The extension is not called, and is not replaced after the trial."""
    source, reason, extension = EXTENSION.replace(*edit), EDITS_OF_A_FUNCTION[edit], types.ModuleType("EXT")
    assert source != EXTENSION
    for text, word in ((EXTENSION, ""), (source, reason)):
        module = library(extension, source=text)
        function, before = module.MSDeformAttnFunction, dict(vars(module.MSDeformAttnFunction))
        value, sizes, locations, weights = inputs()
        arguments = value, torch.tensor(sizes), torch.tensor([0, 20]), locations, weights, 64
        if word:
            with pytest.raises(ValueError, match=f"^forms must name .*; got 'core' for MSDeformAttnFunction: .*{word}"):
                mx_driving.patch(module, forms={function: "core"})
        else:
            with mx_driving.patched(module, forms={function: "core"}):
                assert operators(function.apply, *arguments) == [lib.BARE]
                torch.testing.assert_close(function.apply(*arguments), plain_core(*inputs()))
        assert (dict(vars(function)), module.EXT) == (before, extension)
        with pytest.raises(AttributeError, match="has no attribute 'ms_deform_attn_forward'"):
            function.apply(*arguments)


def test_errors():
    with pytest.raises(TypeError, match=r"^target must be a library's name, a module or a torch.nn.Module; got int$"):
        mx_driving.patch(3)  # pyright: ignore
    for name in ("", ".models", "models..ops"):
        with pytest.raises(TypeError, match=rf"^target must be a library's name, .*; got '{name}'$"):
            mx_driving.patch(name)
    for name in ("no_such_library", "no_such_library.models.ops"):
        known = r" Libraries that are known by name: birder, dfine_seg, .*, transformers, ultralytics"
        sentence = f"^target must be installed; got '{name}', which is not{known}$"
        with pytest.raises(ModuleNotFoundError, match=sentence) as error:
            mx_driving.patch(name)
        assert error.value.name == "no_such_library"
    with pytest.raises(ModuleNotFoundError, match=r"got 'tranformers', which is not; is it 'transformers'\? Libraries"):
        mx_driving.patch("tranformers")
    with pytest.raises(ValueError, match=r"^target must have a deformable sampling core of a known form; got none in json$"):
        mx_driving.patch("json")
    alone = types.ModuleType("alone")
    exec(RAISES, vars(alone))
    with pytest.raises(ValueError, match=r"got none in alone; alone\.deformable: its code is not known, because the source"):
        mx_driving.patch(alone)


def test_a_known_library_that_is_not_installed_is_a_sentence(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"^target must be installed; got 'transformers', which is not$"):
        mx_driving.patch("transformers")


@pytest.mark.parametrize("kind", [ImportError, ModuleNotFoundError])
def test_a_library_that_is_installed_and_cannot_be_imported_is_said_to_be_so(kind, tmp_path, monkeypatch):
    (tmp_path / "a_broken_library.py").write_text(f"raise {kind.__name__}('libnothing.so is missing', name='nothing')\n")
    monkeypatch.syspath_prepend(tmp_path)
    sentence = r"^target must be imported without an error; got 'a_broken_library': libnothing\.so is missing$"
    with pytest.raises(kind, match=sentence) as error:
        mx_driving.patch("a_broken_library")
    assert (type(error.value), error.value.name) == (kind, "nothing")


def test_a_library_that_imports_late_says_what_to_import(tmp_path, monkeypatch):
    package = tmp_path / "a_late_library"
    (package / "models").mkdir(parents=True)
    for file in ("__init__.py", "models/__init__.py", "models/other.py"):
        (package / file).write_text("")
    (package / "models" / "attention.py").write_text("# grid_sample of sampling locations, attention_weights\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"import that of your model first, of a_late_library\.models\.attention$"):
        mx_driving.patch("a_late_library")
    monkeypatch.delitem(sys.modules, "a_late_library")


BLOCKS = {  # as in Sparse4D's repository
    "plugin/__init__.py": "",
    "plugin/ops/__init__.py": "from .function import DeformableAggregationFunction\n"
    "def deformable_aggregation_function(*args):\n    return DeformableAggregationFunction.apply(*args)\n",
    "plugin/ops/function.py": "import torch\nfrom . import deformable_aggregation_ext as extension\n"
    "class DeformableAggregationFunction(torch.autograd.Function):\n"
    "    @staticmethod\n    def forward(ctx, mc_ms_feat, spatial_shape, scale_start_index, sampling_location, weights):\n"
    "        return extension.deformable_aggregation_forward(mc_ms_feat)\n",
    "plugin/ops/deformable_aggregation_ext.py": "",
    "plugin/blocks.py": "import torch\nfrom .ops import deformable_aggregation_function as DAF\n"
    "class Block(torch.nn.Module):\n    def forward(self, *args):\n        return DAF(*args)\n",
}  # fmt: skip


def test_a_module_that_takes_its_core_from_elsewhere_is_pointed_there(tmp_path, monkeypatch):
    for name, text in BLOCKS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        blocks = importlib.import_module("plugin.blocks")
        for target, name in ((blocks, "plugin.blocks"), ("plugin.blocks", "plugin.blocks"), (blocks.Block(), "Block")):
            with pytest.raises(ValueError, match=f"got none in {name}; it takes its own from plugin.ops: patch that"):
                mx_driving.patch(target)
        with pytest.raises(ValueError, match=r'forms=\{DeformableAggregationFunction: "core"\}'):
            mx_driving.patch("plugin.ops")
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "plugin"]:
            del sys.modules[name]


class Sharper(HuggingFace):
    """Other arithmetic: the weights are the softmax of doubled logits."""

    def samples(self, reference, shapes, offsets, logits):
        return lib.sample(self.sides(), reference, shapes, offsets, 2 * logits)


class Unbuildable(HuggingFace):
    """Its constructor has a parameter of an unknown meaning."""

    def __init__(self, secret):
        super().__init__(secret, 2, 2)


class OtherNames(lib.Layers):
    """Parameters of no known form."""

    form = "transformers"

    def forward(self, queries, keys):
        return self.sampling_offsets(queries), self.attention_weights(keys)


class Counting(lib.Paper):
    def rows(self, value, mask=None):
        self.calls = 1
        return self.value_proj(value).unflatten(-1, (self.n_heads, -1))


class HandsOver(lib.Paper):
    def rows(self, value, mask=None):
        return len(self) and self.value_proj(value)


class OfATable(lib.Paper):
    form, table = lib.Paper.form, {"scale": 1.0}

    def rows(self, value, mask=None):
        return self.value_proj(value * self.table["scale"]).unflatten(-1, (self.n_heads, -1))


TwoMasks = lib.define(
    "TwoMasks", lib.Paper, lib.PAPERS + ", attention_mask=None", "deformable_detr", mask="attention_mask or input_padding_mask"
)
REFUSED = [
    (Sharper, "its result on a small example differs from the operator's by"),
    (Unbuildable, "it does not run on a small example: TypeError: .*missing 1 required positional argument: 'secret'"),
    (OtherNames, r"no known form has the parameters \(queries, keys\)"),
    (TwoMasks, "no known form has the parameters"),
    (Counting, "its code sets its attributes calls"),
    (HandsOver, "its code hands itself to other code"),
    (OfATable, "its code reads the attribute table, which no form has"),
]


@pytest.mark.parametrize(("kind", "reason"), REFUSED)
def test_a_form_that_a_module_does_not_have_is_refused(kind, reason):
    fact = f"got '{kind.form}' for {kind.__name__}: {reason}"
    with pytest.raises(ValueError, match=f"^forms must name the form that a class .*; {fact}"):
        mx_driving.patch(library(kind, plain_core), forms={kind: kind.form})
    with pytest.raises(ValueError, match=rf"^forms must name a form of .*transformers.*; got 'no form' for {kind.__name__}"):
        mx_driving.patch(library(kind, plain_core), forms={kind: "no form"})
    assert calls(plain_core) == 0


def test_an_unknown_module_keeps_its_code_over_a_replaced_core_and_is_told_its_form():
    module, own = build(HuggingFace), HuggingFace.forward
    arguments, name = arguments_for(module), "attention_modules.HuggingFace"
    with warnings.catch_warnings(), patched(HuggingFace, forms=None) as done:
        warnings.simplefilter("error")
        assert done.replaced == ("attention_modules.plain_core",)
        assert done.skipped[name].startswith("its code is not known; its core is replaced. To replace it, try: ")
        assert done.skipped[name].endswith('mx_driving.patch(..., forms={HuggingFace: "transformers"})')
        assert HuggingFace.forward is own
        assert operators(module, **arguments) == [lib.BARE]


LIMITS = {  # width, heads, points -> the limit that they pass
    (256, 8, 4): "",
    (256, 16, 4): "value must have num_heads <= 8 (Atlas A2 limit of 26.2); got 16",
    (256, 8, 40): "sampling_locations must have num_points * num_levels <= 64 (Atlas A2 limit of 26.2); got 80",
    (48, 4, 4): "value must have embed_dims a multiple of 8 (Atlas A2 limit of 26.2); got 12",
}


def test_a_model_that_the_vendors_device_would_refuse_is_remarked_on():
    model = nn.ModuleDict({"first": nn.Linear(2, 2)})
    for width, heads, points in LIMITS:
        config = types.SimpleNamespace(d_model=width, num_feature_levels=2)
        model[f"{width} {heads} {points}"] = HuggingFace(config, heads, points)
    with mx_driving.patched(model) as done:
        assert done.limits == {" ".join(map(str, sizes)): words for sizes, words in LIMITS.items() if words}
        for name, words in done.limits.items():
            assert f"the vendor's device would refuse {name}: {words}" in repr(done)
    with mx_driving.patched(model["256 16 4"]) as done:  # a layer has its class's name
        assert "the vendor's device would refuse HuggingFace: value must have num_heads <= 8" in repr(done)


class Layer(nn.Module):
    """A layer around an attention."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention


class ByAnAttribute(lib.Layers):
    """D-FINE's layers hold their core in an attribute; LibreYOLO's hold a functools.partial of it."""

    def __init__(self):
        super().__init__()
        self.held = functools.partial(plain_core)

    def forward(self, arguments):
        return self.held(*arguments)


class OfAnotherKind(lib.Layers):
    """Its linear layers have the names of an attention module's, and its code is unknown."""

    def forward(self, arguments):
        return arguments


@pytest.mark.filterwarnings("ignore:mx_driving.patch left")
@pytest.mark.parametrize(("modules", "operator"), [(True, WITH_LOGITS), (False, lib.BARE)])
def test_a_patch_names_the_layers_of_a_model_that_are_replaced(modules, operator):
    """A layer counts if its class or its core is replaced. Names have the model's order, without inner layers and repeats."""
    attention = build(HuggingFace)
    layers = {"zero": ByAnAttribute(), "other": OfAnotherKind(), "layer": Layer(attention), "again": build(HuggingFace)}
    model = nn.ModuleDict({**layers, "first": nn.Linear(2, 2), "same": attention})
    with mx_driving.patched(model, modules=modules, forms={HuggingFace: "transformers"} if modules else None) as done:
        assert done.layers == ("zero", "layer.attention", "again")
        assert repr(done).splitlines()[-5:] == [
            "3 of 4 layers of ModuleDict that sample are replaced",
            *(f"{name} is replaced" for name in done.layers),
            "other keeps its own code",
        ]
        assert operators(attention, **arguments_for(attention)) == [operator]
    with patched(HuggingFace) as done:
        assert done.layers == ()


@pytest.mark.parametrize("first", [0, 1])
def test_two_patches_share_a_module(first):
    """If one patch ends, the module and its core stay replaced for the other patch."""
    module, own = build(HuggingFace), HuggingFace.forward
    arguments, both = arguments_for(module), library(HuggingFace, plain_core)
    forms = ({HuggingFace: "transformers"}, None, {HuggingFace: "transformers"})
    patches = [mx_driving.patch(both, modules=form is not None, forms=form) for form in forms]
    assert patches[2].replaced == patches[0].replaced
    patches.pop(first).restore()
    assert operators(module, **arguments) == [WITH_LOGITS]
    for patch in patches:
        patch.restore()
    assert HuggingFace.forward is own
    assert operators(module, **arguments) == []


def test_classes_that_share_a_forward_are_both_served():
    shared = {"forward": lib.make_forward(lib.RT_DETR), "__module__": __name__}
    kinds = [type(name, (lib.RtDetr,), shared) for name in ("First", "Second")]
    modules = [build(kind) for kind in kinds]
    named = arguments_for(modules[0])
    expected = [module(**named) for module in modules]
    for order in (kinds, kinds[::-1], kinds[:1]):
        with patched(*order), patched(*kinds) as done:
            assert {f"{__name__}.{kind.__name__}" for kind in kinds} < set(done.replaced)
            assert [operators(module, **named) for module in modules] == [[WITH_LOGITS]] * 2
            close([module(**named) for module in modules], expected)
    assert [operators(module, **named) for module in modules] == [[], []]


def test_a_wrapper_that_others_put_over_a_replaced_forward_stays():
    """The wrapper calls the operator until the patch ends, and the original afterwards."""
    own, module, seen = lib.Paper.forward, build(lib.Paper), []
    arguments = arguments_for(module)
    expected = module(**arguments)
    done = mx_driving.patch(library(lib.Paper, plain_core), forms={lib.Paper: lib.Paper.form})
    lib.Paper.forward = functools.wraps(own)(lambda *args, **named: seen.append(1) or own(*args, **named))
    wrapper = lib.Paper.forward
    try:
        assert operators(module, **arguments) == [WITH_LOGITS]
        done.restore()
        assert lib.Paper.forward is wrapper
        assert operators(module, **arguments) == []
        close(module(**arguments), expected)
        assert len(seen) == 3
    finally:
        lib.Paper.forward = own


def casting(forward):
    """Like mmcv's auto_fp16: pass on the arguments that the decorated function has."""

    @functools.wraps(forward)
    def wrapper(*args, **kwargs):
        return forward(*(arg for _, arg in zip(inspect.getfullargspec(forward).args, args, strict=False)), **kwargs)

    return wrapper


def test_decorated_code_is_replaced_below_its_decorators():
    """Decorators still wrap the new code, and may read its parameters."""
    forward = casting(lib.make_forward(lib.MMCV + "*, unused=None, **kwargs"))
    module = build(type("Casting", (lib.Pillars,), {"forward": forward}))
    by_name, core = arguments_for(module), torch.no_grad()(plain_core)
    by_place = [by_name.pop(name, None) for name in [*inspect.signature(forward).parameters][1:10]]
    expected = module(*by_place)
    with patched(type(module)):
        assert operators(module, *by_place) == [WITH_LOGITS]
        close(module(*by_place), expected)
        assert calls(core) == 1
        assert not core(inputs()[0].requires_grad_(), *inputs()[1:]).requires_grad


BAD = [({"spatial_shape": 1}, "spatial_shape"), ({"query": None}, "multiple values"), ({}, "required positional argument")]


@pytest.mark.parametrize(("change", "words"), BAD)
def test_a_call_that_a_module_refuses_is_refused_by_the_module(change, words):
    module = build(lib.LwDetr)
    arguments = arguments_for(module, masked=False)
    query = arguments.pop("query")
    with patched(lib.LwDetr), pytest.raises(TypeError, match=words):
        module(*((query,) if change else ()), **{**arguments, **change})


@pytest.mark.parametrize("left_out", [(), ("spatial_shapes_list",)])
def test_levels_that_do_not_fill_the_keys_are_refused(left_out):
    module, sizes = build(HuggingFace), [(4, 5), (2, 2)]
    arguments = arguments_for(module) | {"spatial_shapes": torch.tensor(sizes), "spatial_shapes_list": sizes}
    rule = rf"^spatial_shapes must hold the num_keys={lib.KEYS} rows of value; got 24 in all levels$"
    with patched(HuggingFace), pytest.raises(ValueError, match=rule):
        module(**{n: a for n, a in arguments.items() if n not in left_out})


def test_the_output_has_a_gradient_for_returned_weights_where_modules_stay():
    """With replaced modules torch refuses this gradient: the operator with logits does not compute its output from weights."""
    module = build(HuggingFace)
    arguments = arguments_for(module)

    def gradient():
        out, weights = module(**arguments)
        return torch.autograd.grad(out.sum(), weights)

    expected = gradient()
    with patched(HuggingFace, modules=False, forms=None):
        assert lib.recorded(module, **arguments) == [lib.BARE]
        close(gradient(), expected)
    with patched(HuggingFace), pytest.raises(RuntimeError, match="not have been used in the graph"):
        gradient()


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning", "ignore:mx_driving")
def test_a_model_that_was_never_called_is_compiled_exported_and_traced_over_the_operator(tmp_path):
    """A graph that was compiled before `patch` is not used after it, and a patched graph is not used after restore()."""
    module, graphs = build(HuggingFace).requires_grad_(False), []
    arguments = arguments_for(module, masked=False)
    expected = lib.results(module, **arguments)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend=lambda graph, _: graphs.append(str(graph.code)) or graph)
    close(lib.results(compiled, **arguments), expected)
    with patched(HuggingFace):
        close(lib.results(compiled, **arguments), expected)
        texts = [str(torch.export.export(module, (), arguments, strict=strict).graph) for strict in (True, False)]
        with torch.no_grad():
            call = lambda hidden: module(**{**arguments, "hidden_states": hidden})  # noqa: E731
            texts.append(str(torch.jit.trace(call, arguments["hidden_states"]).graph))
        assert [WITH_LOGITS in text and "grid_sampl" not in text for text in (graphs[-1], *texts)] == [True] * 4
    close(lib.results(compiled, **arguments), expected)


def test_copies_threads_checkpoints_and_replicas_of_a_patched_layer(tmp_path):
    """deepcopy and pickle give a layer that calls the operator, and its own code after the patch."""
    module = build(lib.Paper)
    arguments = arguments_for(module)
    expected = lib.results(module, **arguments)
    replica = module._replicate_for_data_parallel()
    replica._modules = {name: copy.copy(part) for name, part in module._modules.items()}
    with patched(lib.Paper):
        for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert operators(twin, **arguments) == [WITH_LOGITS]
            close(lib.results(twin, **arguments), expected)
        outs = []
        threads = [threading.Thread(target=lambda: outs.append(module(**arguments))) for _ in range(4)]
        for step in (threading.Thread.start, threading.Thread.join):
            for thread in threads:
                step(thread)
        close([*outs, replica(**arguments)], [expected[0]] * 5)
        assert operators(replica, **arguments) == [WITH_LOGITS]
        for reentrant in (True, False):
            run = lambda **named: checkpoint(lambda: module(**named), use_reentrant=reentrant)  # noqa: B023, E731
            close(lib.results(run, **arguments)[0], expected[0]) if not reentrant else run(**arguments)
        masks = torch.stack([arguments["input_padding_mask"], ~arguments["input_padding_mask"]])
        rows = torch.vmap(lambda mask: module(**{**arguments, "input_padding_mask": mask}))(masks)
        close(rows[0], expected[0])
    close(lib.results(pickle.loads(pickle.dumps(module)), **arguments), expected)


def test_linear_layers_are_called_as_the_own_code_calls_them():
    """Once and in the same order, with hooks and with parameters that an offloader holds; dropout draws the same numbers."""
    module, names = build(lib.Mmcv).train(), []
    for name, part in module.named_children():
        part.register_forward_hook(lambda *_, name=name: names.append(name))
    for part in (module.value_proj, module.sampling_offsets):
        real, part.weight = part.weight, nn.Parameter(part.weight.to("meta"))
        part.register_forward_pre_hook(lambda part, _, real=real: part._parameters.update(weight=real))
        part.register_forward_hook(lambda part, *_, empty=part.weight: part._parameters.update(weight=empty))
    runs = []
    for wrap in (contextlib.nullcontext(), patched(lib.Mmcv)):
        with wrap, torch.no_grad():
            torch.manual_seed(3)
            runs.append([module(**arguments_for(module)), torch.rand(3)])
    close(runs[1], runs[0])
    assert sorted(names) == sorted(2 * [*dict(module.named_children())])


def test_a_caller_may_write_to_references_and_cache_tables():
    layer = build(lib.Paper)
    arguments = arguments_for(layer)
    with torch.inference_mode():
        tables = {name: arguments[name].clone() for name in ("input_spatial_shapes", "input_level_start_index")}
    with patched(lib.Paper):
        out = layer(**{**arguments, **tables})
        arguments["reference_points"].clamp_(0.2, 0.8)
        out.sum().backward()


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, functools.partial(torch.autocast, "cpu")])
def test_the_trial_leaves_no_trace(mode):
    """The trial has the same outcome in each mode, and changes no setting of the process."""
    kinds = HuggingFace, lib.Mmcv, lib.Temporal
    torch.set_num_threads(2)
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    torch.set_default_dtype(torch.float64)
    modes = torch.is_inference_mode_enabled, torch.is_grad_enabled, torch.is_autocast_cpu_enabled
    with torch.device("meta"), mode():
        before = [enabled() for enabled in modes]
        with patched(*kinds) as done:
            assert len(done.replaced) == 1 + len(kinds)
            assert [enabled() for enabled in modes] == before
    assert (torch.get_num_threads(), torch.get_default_dtype()) == (2, torch.float64)
    assert torch.equal(torch.random.get_rng_state(), state)
