"""patch: what it replaces, what it leaves alone and why, and that the originals come back. Libraries have their own tests."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types

import pytest
import torch
from attention_modules import library, operators, plain_core

import mx_driving


def module_of(source: str, name: str = "a_library") -> types.ModuleType:
    """A Python module made of text, which can call a `plain_core` of its own."""
    core = types.FunctionType(plain_core.__code__, plain_core.__globals__, "plain_core")
    core.__module__ = "elsewhere"
    return library(core, source=source, name=name)


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


def inputs():
    generator = torch.Generator().manual_seed(0)
    value = torch.rand(1, 26, 2, 4, generator=generator)
    locations, weights = (torch.rand(1, 3, 2, 2, 2, *last, generator=generator) for last in ((2,), ()))
    return value, [(5, 4), (3, 2)], locations, weights


def calls(function) -> int:
    return len(operators(function, *inputs()))


@pytest.mark.parametrize(("source", "name"), [(GOOD, "deformable"), (CLOSURE, "decorated.<locals>.deformable")])
def test_a_function_changes_in_place_and_back(source, name):
    module = module_of(source)
    imported = module.deformable  # by another file, before
    before = imported.__code__
    done = mx_driving.patch(module)
    assert done.replaced == ("elsewhere.plain_core", f"a_library.{name}")
    assert repr(done).splitlines() == [
        "replaced elsewhere.plain_core",
        f"replaced a_library.{name}",
        f"not called yet: elsewhere.plain_core, a_library.{name}",
    ]
    assert calls(imported) == 1
    torch.testing.assert_close(imported(*inputs()), plain_core(*inputs()))
    done.restore()
    done.restore()
    assert imported.__code__ is before
    assert calls(imported) == 0


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


OTHER_NUMBERS = GOOD.replace("plain_core(", "2 * plain_core(")
OTHER_GRADIENT = GOOD.replace("sampling_locations, attention_weights)\n", "sampling_locations.detach(), attention_weights)\n")
OTHER_LAYOUT = GOOD.replace("attention_weights)\n", "attention_weights).transpose(0, 1)\n")
RAISES = GOOD.replace("return", "raise RuntimeError('Not implemented on the CPU')\n    return")
BY_NAME_ONLY = GOOD.replace("attention_weights):", "*, attention_weights):")
OTHER_PARAMETERS = """
def deformable(value, sampling_locations, attention_weights, sizes):
    pass
"""
UNKNOWN_FUNCTION = """
import torch
class deformable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, value_spatial_shapes, value_level_start_index, sampling_locations, attention_weights, im2col_step):
        pass
"""


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (OTHER_NUMBERS, "its result on a small example differs from the operator's by"),
        (OTHER_GRADIENT, "its result on a small example differs from the operator's by"),
        (OTHER_LAYOUT, "its result on a small example differs from the operator's by inf"),
        (RAISES, "it does not run on a small example: RuntimeError: Not implemented on the CPU"),
        (OTHER_PARAMETERS, "no known form of a core has the parameters (value, sampling_locations, attention_weights, sizes)"),
        (UNKNOWN_FUNCTION, "no known form of a core has the parameters (value, value_spatial_shapes, "),
    ],
)
def test_what_is_not_known_is_left_alone_and_said(source, reason):
    module = module_of(source)
    before = module.deformable
    with pytest.warns(UserWarning, match="mx_driving.patch left a_library.*alone"):
        done = mx_driving.patch(module)
    try:
        assert done.replaced == ("elsewhere.plain_core",)
        ((name, said),) = done.skipped.items()
        assert name.startswith("a_library.")
        assert said.startswith(reason)
        assert f"left alone {name}: {said}" in repr(done)
        assert module.deformable is before
    finally:
        done.restore()


def test_parameters_by_name_only():
    module, (*others, weights) = module_of(BY_NAME_ONLY), inputs()
    with mx_driving.patched(module, modules=False) as done:
        assert done.replaced == ("elsewhere.plain_core", "a_library.deformable")
        output = module.deformable(*others, attention_weights=weights)
    torch.testing.assert_close(output, plain_core(*inputs()))


def test_errors():
    with pytest.raises(TypeError, match=r"^target must be a library's name, a module or a torch.nn.Module; got int$"):
        mx_driving.patch(3)  # pyright: ignore
    for name in ("", ".models", "models..ops"):
        with pytest.raises(TypeError, match=rf"^target must be a library's name, .*; got '{name}'$"):
            mx_driving.patch(name)
    for name in ("no_such_library", "no_such_library.models.ops"):
        known = r" Libraries that are known by name: birder, dfine_seg, .*, transformers, ultralytics"
        with pytest.raises(
            ModuleNotFoundError, match=f"^target must be installed; got '{name}', which is not{known}$"
        ) as error:
            mx_driving.patch(name)
        assert error.value.name == "no_such_library"
    with pytest.raises(ModuleNotFoundError, match=r"got 'tranformers', which is not; is it 'transformers'\? Libraries"):
        mx_driving.patch("tranformers")
    with pytest.raises(ValueError, match=r"^target must have a deformable sampling core of a known form; got none in json$"):
        mx_driving.patch("json")
    alone = types.ModuleType("alone")
    exec(RAISES, vars(alone))
    with pytest.raises(ValueError, match=r"got none in alone; alone\.deformable: it does not run"):
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
    "plugin/ops/function.py": "import torch\nclass DeformableAggregationFunction(torch.autograd.Function):\n"
    "    @staticmethod\n    def forward(ctx, mc_ms_feat, spatial_shape, scale_start_index, sampling_location, weights):\n"
    "        raise NotImplementedError\n",
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
        mx_driving.patch("plugin.ops").restore()
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "plugin"]:
            del sys.modules[name]


def test_tensor_sizes_and_half_precision():
    """Older libraries give the sizes as a tensor; a half-precision model gets half precision back."""
    module = module_of(GOOD)
    value, sizes, locations, weights = inputs()
    expected = plain_core(value, sizes, locations, weights)
    with mx_driving.patched(module):
        torch.testing.assert_close(module.deformable(value, torch.tensor(sizes), locations, weights), expected)
        half = module.deformable(value.bfloat16(), sizes, locations.bfloat16(), weights.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, rtol=0.05, atol=0.05)
