"""The layer for Hugging Face's `kernels`, without that package: tests/libraries/test_huggingface_kernels.py has it."""

import importlib
import importlib.util
import inspect
import json
import pathlib
import re
import sys
import types

import pytest
import torch
from attention_modules import results
from programs import load_file, python

import mx_driving

transformers = pytest.importorskip("transformers")

FOLDER = pathlib.Path(transformers.__file__).parent / "models"
MARK = '@use_kernel_forward_from_hub("MultiScaleDeformableAttention")'
MODELS = sorted(f.parent.name for f in FOLDER.glob("*/modeling_*.py") if MARK in f.read_text(encoding="utf-8"))
SIZES = [(4, 5), (2, 3), (1, 3)]


def theirs(name: str) -> type[torch.nn.Module]:
    """The layer that a model of transformers marks."""
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    (found,) = re.findall(re.escape(MARK) + r"\n(?:#.*\n)*class (\w+)\(", inspect.getsource(module))
    return getattr(module, found)


def inputs() -> tuple[list[torch.Tensor], tuple[torch.Tensor, list[tuple[int, int]], torch.Tensor]]:
    """value, locations and weights, some of the locations off the map; and the levels."""
    generator = torch.Generator().manual_seed(0)
    sides = (2, 29, 2, 4), (2, 7, 2, 3, 4, 2), (2, 7, 2, 3, 4)
    leaves = [torch.rand(s, generator=generator).double().mul(1.2).sub(0.1).requires_grad_() for s in sides]
    return leaves, (torch.tensor(SIZES), SIZES, torch.tensor([0, 20, 26]))


def test_models_that_mark_their_layer():
    """The docstring of mx_driving.kernels names them; the oldest transformers has fewer."""
    known = {"deformable_detr", "grounding_dino", "lw_detr", "mm_grounding_dino", "omdet_turbo", "pp_doclayout_v3", "rt_detr"}
    if transformers.__version__ != "5.1.0":
        known |= {"pp_doclayout_v2", "pp_doclayout_v4", "rf_detr"}
    assert set(MODELS) == known


@pytest.mark.parametrize("name", MODELS)
def test_the_layer_is_theirs(name):
    """Outputs, gradients and, if theirs has them, second gradients in float64; and all that `kernels` asks of a layer."""
    layer, original = mx_driving.kernels.MultiScaleDeformableAttention, theirs(name)
    assert parameters_of(layer) == parameters_of(original)
    members = {name for name, _ in inspect.getmembers(layer)} - {name for name, _ in inspect.getmembers(torch.nn.Module)}
    assert members == {"has_backward", "can_torch_compile"}
    assert layer.__init__ is torch.nn.Module.__init__
    second = torch.__version__ >= "2.9"  # before, grid_sample, by which their layers sample, has first ones only
    found, expected = derivatives(layer(), second), derivatives(original(), second)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def parameters_of(kind):
    return [(p.name, p.kind) for p in inspect.signature(kind.forward).parameters.values()]


def derivatives(layer, second: bool) -> list[torch.Tensor]:
    (value, locations, weights), levels = inputs()
    out = layer(value, *levels, locations, weights, 64)
    first = torch.autograd.grad(out.pow(3).sum(), (value, locations, weights), create_graph=second)
    if not second:
        return [out, *first]
    return [out, *first, *torch.autograd.grad(sum(g.pow(2).sum() for g in first), (value, locations, weights))]


def test_compiled_in_one_graph():
    (value, locations, weights), levels = inputs()
    layer = mx_driving.kernels.MultiScaleDeformableAttention()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found, expected = (results(kind, value, *levels, locations, weights, 64) for kind in (compiled, layer))
    assert len(found) == 4
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_mapping_loads_the_layer():
    """`kernels` keeps layers in a dictionary by what loads them, so equal ones must be one key."""
    devices = mx_driving.kernels.mapping()["MultiScaleDeformableAttention"]
    assert set(devices) == {"cpu", "cuda"}
    assert len(set(devices.values()) | set(mx_driving.kernels.mapping()["MultiScaleDeformableAttention"].values())) == 1
    for repository in devices.values():
        assert repository.layer_name == "MultiScaleDeformableAttention"
        assert repository.load() is mx_driving.kernels.MultiScaleDeformableAttention
        assert "mx_driving" in str(repository)


def test_register(monkeypatch):
    given = []
    monkeypatch.setitem(sys.modules, "kernels", types.SimpleNamespace(register_kernel_mapping=given.append))
    mx_driving.kernels.register()
    assert given == [mx_driving.kernels.mapping()]


def test_without_kernels(monkeypatch):
    monkeypatch.setitem(sys.modules, "kernels", None)
    with pytest.raises(RuntimeError) as refused:
        mx_driving.kernels.register()
    sentence = 'mx_driving.kernels.register needs the package kernels: pip install "kernels>=0.17"'
    assert str(refused.value) == sentence


def test_a_broken_kernels_speaks_for_itself(monkeypatch, tmp_path):
    (tmp_path / "kernels.py").write_text("import package_that_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "kernels", raising=False)
    with pytest.raises(ModuleNotFoundError, match="package_that_is_not_there"):
        mx_driving.kernels.register()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_written_repository(device, tmp_path, monkeypatch):
    """It is imported by its file under a name of its own, as `kernels` does. Writing again gives the same."""
    monkeypatch.chdir(tmp_path)
    folder = mx_driving.kernels.write("repository")
    assert folder == tmp_path / "repository"
    files = {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    names = {"__init__.py", "layers.py", "metadata.json"}
    assert {str(file) for file in files} == {f"build/torch-{d}/{name}" for d in ("cpu", "cuda") for name in names}
    mx_driving.kernels.write(folder)
    assert {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()} == files
    variant = folder / "build" / f"torch-{device}"
    metadata = json.loads((variant / "metadata.json").read_text())
    assert metadata["backend"] == {"type": device}
    monkeypatch.setitem(sys.modules, metadata["id"], None)  # so that the name is gone after the test
    module = load_file(metadata["id"], variant / "__init__.py")
    assert module.layers.MultiScaleDeformableAttention is mx_driving.kernels.MultiScaleDeformableAttention
    assert module.multi_scale_deformable_attn is mx_driving.multi_scale_deformable_attn


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("mine")
    facts = {"loop": "Too many levels", "file": "Not a directory", "": "no name", "a\0b": "embedded null byte"}
    for folder, fact in facts.items():
        rule = f"folder must be a folder that can be made and written to; got {folder!r}: {fact}"
        with pytest.raises(ValueError, match=re.escape(rule)):
            mx_driving.kernels.write(folder)
    with pytest.raises(TypeError, match="folder must be a path; got NoneType"):
        mx_driving.kernels.write(None)
    assert {path.name for path in tmp_path.iterdir()} == {"loop", "file"}


def test_a_repository_without_the_package(tmp_path):
    folder = mx_driving.kernels.write(tmp_path) / "build" / "torch-cpu"
    program = "import sys; sys.modules['mx_driving'] = None; import layers"
    done = python("-c", program, cwd=folder, check=False)
    assert done.stderr.splitlines()[-1] == "ImportError: This kernel needs mx_driving's operators: install mx-driving-portable"
