"""The real packages: what `patch` replaces in each, and that patched models give their own numbers. `make test-libraries`.

A library that is missing fails, and so does one whose form changed: its sentence says which thing was left alone, and why.
"""

import importlib.metadata
import warnings

import libraries
import models
import pytest
import torch

import mx_driving

# distribution -> what `patch` of the library by its name must replace, of cores and of attention modules
EXPECTED = {
    "groundingdino-py": {"multi_scale_deformable_attn_pytorch", "MultiScaleDeformableAttention"},
    "rfdetr": {"ms_deform_attn_core_pytorch", "MSDeformAttn"},
    "ultralytics": {"multi_scale_deformable_attn_pytorch", "MSDeformAttn"},
}
# one model of each kind of encoder and decoder: the others differ in the number and width of layers
MODELS = [("groundingdino-py", "GroundingDINO_SwinT_OGC"), ("rfdetr", "Nano"), ("rfdetr", "Base")]
MODELS += [("ultralytics", "rtdetr-resnet50"), ("ultralytics", "rtdetr-l")]
BY_DISTRIBUTION = {library.distribution: library for library in libraries.LIBRARIES.values()}


def installed(distribution: str) -> libraries.Library:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        pytest.fail(f"{distribution} must be installed, as tests/libraries/requirements.txt says; got no such package")
    return BY_DISTRIBUTION[distribution]


@pytest.mark.parametrize("library", EXPECTED)
def test_patch_by_name(library):
    """A library imports its models late; nothing of it is imported here but by `patch`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        done = mx_driving.patch(installed(library).package)
    done.restore()
    found = {name.rpartition(".")[2] for name in done.replaced}
    reasons = "; ".join(f"{name}: {reason}" for name, reason in done.skipped.items())
    missing = ", ".join(sorted(EXPECTED[library] - found))
    assert not missing, f"patch({library!r}) must replace {missing}; got {', '.join(done.replaced)}; left alone: {reasons}"


@pytest.mark.parametrize(("library", "model"), MODELS)
def test_a_patched_model_gives_its_own_numbers(library, model):
    """Outputs and the gradients of all parameters in float64, and every layer calls an operator."""
    subject = libraries.in_float64(installed(library).models()[model](320, 320))
    torch.set_default_dtype(torch.float64)
    layers = [part for part in subject.model.modules() if hasattr(part, "sampling_offsets")]
    with mx_driving.patched(subject.model) as done, mx_driving.viz.recording() as looks:
        subject.forward()
    outputs, gradients = models.compare(subject)
    assert EXPECTED[library] <= {name.rpartition(".")[2] for name in done.replaced}
    assert len(looks) >= len(layers) > 0
    assert outputs < 1e-9, f"outputs of {model} must be its own; they differ by {outputs:.1e}"
    assert gradients < 1e-7, f"gradients of {model} must be its own; they differ by {gradients:.1e}"
