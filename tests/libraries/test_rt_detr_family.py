"""The real code of the RT-DETR family and of LibreYOLO: its attention modules before and after `patch`, in float64.

Whole models of these libraries want their training frameworks. Their attention modules do not, so each file is imported without
what its packages import beside it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import inspect
import sys
import types
from types import SimpleNamespace

import pytest
import torch

import mx_driving

SIZES = [(4, 5), (3, 2)]
KEYS = 26
LIBRE = "libreyolo.models."
OTX = "otx.backend.native.models.common.layers.transformer_layers"
# Points of 2 and 4: these modules keep 1 / points in float32, which is exact there.
# distribution, class, how its values are given, and constructor arguments beside the common ones
ROWS = (
    ("d-fine-project", "zoo.dfine.dfine_decoder.MSDeformableAttention", "levels", {"num_points": [2, 4]}),
    ("dfine-seg", "dfine_seg.model.arch.dfine_decoder.MSDeformableAttention", "levels", {"num_points": [2, 4]}),
    ("groundingdino-py", "groundingdino.models.GroundingDINO.ms_deform_attn.MultiScaleDeformableAttention", "rows", {}),
    ("libreyolo", LIBRE + "deim.decoder.MSDeformableAttention", "levels", {"num_points": [2, 4]}),
    ("libreyolo", LIBRE + "deformable_detr.ms_deform_attn.MSDeformAttn", "rows", {}),
    ("libreyolo", LIBRE + "dfine.decoder.MSDeformableAttention", "levels", {"num_points": [2, 4]}),
    ("libreyolo", LIBRE + "ec.decoder.MSDeformableAttention", "levels", {"num_points": [2, 4]}),
    ("libreyolo", LIBRE + "grounding_dino.nn.GDMSDeformAttn", "rows", {}),
    ("libreyolo", LIBRE + "gtr.decoder.MSDeformableAttention", "images", {"num_points": [2, 4]}),
    ("libreyolo", LIBRE + "lwdetr.nn.MSDeformAttn", "rows", {}),
    ("libreyolo", LIBRE + "openvocab.ovdeim.decoder.MSDeformableAttention", "rows", {"num_points": [2, 4]}),
    ("libreyolo", LIBRE + "rfdetr.transformer.MSDeformAttn", "rows", {}),
    ("libreyolo", LIBRE + "rtdetr.nn.MSDeformableAttention", "rows", {}),
    ("libreyolo", LIBRE + "rtdetrv2.decoder.MSDeformableAttention", "rows", {"num_points": [2, 4]}),
    ("otx", f"{OTX}.MSDeformableAttention", "rows", {}),
    ("otx", f"{OTX}.MSDeformableAttentionV2", "levels", {"num_points_list": [2, 4]}),
)
# layers whose published configurations may ask for another sampling, which is no operator's
DISCRETE = ("d-fine-project", "dfine-seg", "deim.", "models.dfine.", "ec.", "rtdetrv2.")
COMMON = {
    **dict.fromkeys(("embed_dim", "d_model"), 12),
    **dict.fromkeys(("num_heads", "n_heads"), 3),
    **dict.fromkeys(("num_levels", "n_levels"), 2),
    **dict.fromkeys(("num_points", "n_points"), 4),
    "batch_first": True,
    "config": SimpleNamespace(d_model=12, num_feature_levels=2),
}


class _Anything(types.ModuleType):
    """A module of a package that these files import and their attention modules do not call."""

    __path__ = ()

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (torch.nn.Module,), {"__module__": "torch.of_another_library"})
        setattr(self, name, made)
        return made


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages that are not installed, after all other finders."""

    names = ("timm", "loguru", "cv2", "lightning", "datumaro", "supervision", "torchmetrics", "jsonargparse", "omegaconf")

    def find_spec(self, fullname, path, target=None):
        return importlib.machinery.ModuleSpec(fullname, self) if fullname.partition(".")[0] in self.names else None

    def create_module(self, spec):
        return _Anything(spec.name)

    def exec_module(self, module):
        pass


@pytest.fixture
def alone(monkeypatch):
    """Imports a module of a distribution; the `__init__` of its packages is not run."""
    finder, before = _Absent(), set(sys.modules)
    sys.meta_path.append(finder)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", _Anything("torch.utils.tensorboard"))

    def load(distribution: str, name: str) -> types.ModuleType:
        try:
            found = importlib.metadata.distribution(distribution)
        except importlib.metadata.PackageNotFoundError:
            pytest.fail(f"{distribution} must be installed, as tests/libraries/requirements.txt says; got no such package")
        root, parts = found.locate_file(""), name.split(".")
        prefix = "distribution_of_files." if distribution == "d-fine-project" else ""  # its files import from one level above
        if prefix:
            sys.modules[prefix[:-1]] = types.ModuleType(prefix[:-1])
            sys.modules[prefix[:-1]].__path__ = [str(root)]
        for depth in range(1, len(parts)):
            package = types.ModuleType(prefix + ".".join(parts[:depth]))
            package.__path__ = [str(root.joinpath(*parts[:depth]))]
            package.__getattr__ = _Anything(package.__name__).__getattr__
            monkeypatch.setitem(sys.modules, package.__name__, package)
        return importlib.import_module(prefix + name)

    yield load
    sys.meta_path.remove(finder)
    for name in set(sys.modules) - before:
        del sys.modules[name]


def split(memory, how):
    """Values [bs, keys, channels] as a module wants them."""
    if how == "rows":
        return memory
    levels = memory.unflatten(-1, (3, -1)).permute(0, 2, 3, 1).split([h * w for h, w in SIZES], -1)
    if how == "levels":
        return levels
    return tuple(level.flatten(0, 1).unflatten(-1, size) for level, size in zip(levels, SIZES, strict=True))


def arguments(names, how, leaves):
    query, memory, reference = leaves
    table, starts = torch.tensor(SIZES), torch.tensor([0, 20])
    known = {
        **dict.fromkeys(("query", "hidden_states"), query),
        **dict.fromkeys(("value", "encoder_hidden_states", "input_flatten"), split(memory, how)),
        "reference_points": reference,
        **dict.fromkeys(("spatial_shapes", "input_spatial_shapes"), table),
        **dict.fromkeys(("value_spatial_shapes", "spatial_shapes_list", "input_spatial_shapes_hw"), SIZES),
        **dict.fromkeys(("level_start_index", "input_level_start_index"), starts),
        "attention_mask": None,
    }
    return {name: known[name] for name in names if name in known}


def run_of(module, how):
    """A function that returns the output and the gradients of an attention module with random weights."""
    generator = torch.Generator().manual_seed(0)
    for p in module.parameters():
        p.data = torch.rand(p.shape, generator=generator, dtype=p.dtype) - 0.5
    sides = (2, 7, 12), (2, KEYS, 12), (2, 7, 1, 4)
    leaves = [torch.rand(s, generator=generator, dtype=torch.float64).requires_grad_() for s in sides]
    names = list(inspect.signature(module.forward).parameters)

    def run():
        out = module(**arguments(names, how, leaves))
        moving = [*leaves, *(p for p in module.parameters() if p.requires_grad)]
        return [out, *torch.autograd.grad(out.square().sum(), moving, allow_unused=True)]

    return run


def build(python, kind, **more):
    thing, known = getattr(python, kind), {**COMMON, **more}
    return thing(**{name: known[name] for name in inspect.signature(thing).parameters if name in known}).double()


@pytest.mark.parametrize(("library", "model", "how", "more"), ROWS)
def test_an_attention_module(library, model, how, more, alone):
    """One operator with logits, and the module's own output and gradients."""
    name, _, kind = model.rpartition(".")
    python = alone(library, name)
    run = run_of(build(python, kind, **more), how)
    expected = run()
    with mx_driving.patched(python) as done:
        run()  # proves the layer
        with mx_driving.viz.recording() as looks:
            found = run()
    replaced = {name.rpartition(".")[2] for name in done.replaced}
    assert kind in replaced, f"patch must replace {kind}; left alone: {done.skipped}"
    assert [look.operator for look in looks] == ["multi_scale_deformable_attn"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("library", "model", "how", "more"), [r for r in ROWS if any(d in f"{r[0]} {r[1]}" for d in DISCRETE)])
@pytest.mark.filterwarnings("ignore:mx_driving.patch")
def test_a_layer_that_samples_discretely_keeps_its_own_code(library, model, how, more, alone, monkeypatch):
    """These libraries clamp x by the height, and read beyond a map that is higher than wide."""
    monkeypatch.setattr(sys.modules[__name__], "SIZES", [(4, 5), (2, 3)])
    name, _, kind = model.rpartition(".")
    python = alone(library, name)
    run = run_of(build(python, kind, method="discrete", **more), how)
    expected = run()
    with mx_driving.patched(python) as done:
        for _ in range(2):
            torch.testing.assert_close(run(), expected, rtol=0, atol=0)
        assert done.kept
        assert not done.proven
