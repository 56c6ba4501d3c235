"""The real code of the RT-DETR family and of LibreYOLO: its attention modules before and after `patch`, in float64.

Whole models of these libraries want their training frameworks. Their attention modules do not, so each file is imported without
what its packages import beside it.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
import types

import attention_modules
import pytest
import torch
from attention_modules import ROLE, WITH_LOGITS, arguments_for, as_images, build, by_heads, close, recorded, results

import mx_driving

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
LAYOUTS = {"rows": lambda rows: rows, "levels": by_heads, "images": as_images}


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


def inputs_for(module, how):
    """Seven queries with a box each, and no mask."""
    arguments = arguments_for(module, (1, 4), masked=False, layout=LAYOUTS[how])
    of_queries = "query", "position", "identity", "reference"
    return {name: a[:, :7] if ROLE[name] in of_queries else a for name, a in arguments.items()}


@pytest.mark.parametrize(("library", "model", "how", "more"), ROWS)
def test_an_attention_module(library, model, how, more, alone):
    """One operator with logits, and the module's own output and gradients."""
    name, _, kind = model.rpartition(".")
    python = alone(library, name)
    module = build(getattr(python, kind), batch_first=True, **more)
    arguments = inputs_for(module, how)
    expected = results(module, **arguments)
    with mx_driving.patched(python) as done:
        replaced = {name.rpartition(".")[2] for name in done.replaced}
        assert kind in replaced, f"patch must replace {kind}; left alone: {done.skipped}"
        assert recorded(module, **arguments) == [WITH_LOGITS]
        close(results(module, **arguments), expected)


@pytest.mark.parametrize(("library", "model", "how", "more"), [r for r in ROWS if any(d in f"{r[0]} {r[1]}" for d in DISCRETE)])
@pytest.mark.filterwarnings("ignore:mx_driving.patch")
def test_a_layer_that_samples_discretely_keeps_its_own_code(library, model, how, more, alone, monkeypatch):
    """These libraries clamp x by the height, and read beyond a map that is higher than wide."""
    monkeypatch.setattr(attention_modules, "SIZES", [(4, 5), (2, 3)])
    name, _, kind = model.rpartition(".")
    python = alone(library, name)
    module = build(getattr(python, kind), batch_first=True, method="discrete", **more)
    arguments = inputs_for(module, how)
    expected = results(module, **arguments)
    with mx_driving.patched(python):
        assert WITH_LOGITS not in recorded(module, **arguments)
        torch.testing.assert_close(results(module, **arguments), expected, rtol=0, atol=0)
