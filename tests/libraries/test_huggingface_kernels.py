"""The real package `kernels`, and transformers of a version that takes it: `kernelize` puts our layer into models."""

import copy

import kernels
import models
import pytest
import torch

import mx_driving

MODELS = ("deformable_detr", "lw_detr", "rt_detr")
LAYER = "MultiScaleDeformableAttention"
STRICT = kernels.KernelizeFallback.NO_LAYER  # models mark other layers, too, which no mapping has here


def tried(*what: str):
    """RT-DETR, and words for the record."""
    return pytest.mark.parametrize(("library", "model"), [("kernels", f"rt_detr, {words}") for words in what])


def subject(name: str = "rt_detr") -> models.Subject:
    changes = {"encoder_layers": 1, "decoder_layers": 2} if name != "lw_detr" else {"decoder_layers": 2}
    return models.build(name, 96, 128, torch.float64, num_queries=50, **changes)


def looks_of(subject: models.Subject) -> int:
    with mx_driving.viz.recording() as looks:
        subject.forward()
    return len(looks)


def layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [part for part in model.modules() if getattr(part, "kernel_layer_name", None) == LAYER]


@pytest.fixture(autouse=True)
def no_mapping_before():
    with kernels.use_kernel_mapping({}, inherit_mapping=False):
        yield


@pytest.mark.parametrize(("library", "model"), [("kernels", name) for name in MODELS])
def test_a_kernelized_model_gives_its_own_numbers(library, model):
    """Outputs and the gradients of all parameters in float64; every layer calls the operator."""
    own = subject(model)
    ours = models.Subject(model, copy.deepcopy(own.model), own.inputs)
    assert layers_of(own.model), "transformers must be a version that takes the installed kernels; it marks no layer"
    with kernels.use_kernel_mapping(mx_driving.kernels.mapping()):
        kernels.kernelize(ours.model, mode=kernels.Mode.TRAINING, device="cpu", use_fallback=STRICT)
    assert looks_of(own) == 0
    assert looks_of(ours) == len(layers_of(ours.model))
    found, expected = ours.backward(), own.backward()
    assert models.model_difference(found[0], expected[0]) < 1e-12
    assert models.model_difference(found[1], expected[1]) < 1e-9


@tried("use_kernels=True of transformers")
def test_use_kernels_of_transformers(library, model):
    """After `register`, transformers' own switch takes the layer on a CPU."""
    found = subject()
    mx_driving.kernels.register()
    found.model.use_kernels = True
    assert looks_of(found) == len(layers_of(found.model)) > 0


@tried("a written repository")
def test_a_written_repository(library, model, tmp_path):
    folder = mx_driving.kernels.write(tmp_path)
    assert kernels.get_local_kernel(folder).multi_scale_deformable_attn is mx_driving.multi_scale_deformable_attn
    repository = kernels.LocalLayerRepository(folder, layer_name=LAYER)
    assert repository.load() is mx_driving.kernels.MultiScaleDeformableAttention
    found = subject()
    with kernels.use_kernel_mapping({LAYER: {"cpu": repository}}):
        mode = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE
        kernels.kernelize(found.model, mode=mode, device="cpu", use_fallback=STRICT)
    assert looks_of(found) == len(layers_of(found.model)) > 0
