"""LibreYOLO's slot of kernels, with its package: attention modules call our operator, and give their own numbers."""

import copy
import importlib
from typing import Any

import pytest
import test_rt_detr_family as family
import torch
from attention_modules import build, floating, results
from torch.utils._pytree import tree_map

import mx_driving

MODULES = [(model, how) for library, model, how, _ in family.ROWS if library == "libreyolo" and ".gtr." not in model]
MORE = {model: bool(more) for _, model, _, more in family.ROWS}  # points are a list
DTYPES = (torch.float64, torch.bfloat16)


def tried(*what: str):
    """All attention modules that consult the slot, and words for the record."""
    rows = [("libreyolo", f"{model}, slot, {words}", how) for words in what for model, how in MODULES]
    return pytest.mark.parametrize(("library", "model", "how"), rows)


@pytest.fixture(autouse=True)
def kernels():
    """LibreYOLO's registry, as it is when this test is over."""
    found = importlib.import_module("libreyolo.kernels")
    yield found
    found.unregister("ms_deform_attn", "mx_driving")
    found.clear_cache()


def counted(module: torch.nn.Module, arguments: dict[str, Any]) -> tuple[list[torch.Tensor], int]:
    """The output and all gradients, and how often an operator of ours was called."""
    with mx_driving.viz.recording() as looks:
        return results(module, **arguments), len(looks)


def error(found: list[torch.Tensor], true: list[torch.Tensor]) -> float:
    """The largest difference, of the largest number in a tensor."""
    return max(float((f.double() - t).abs().max() / t.abs().max().clamp_min(1e-3)) for f, t in zip(found, true, strict=True))


@tried(*(str(dtype).removeprefix("torch.") for dtype in DTYPES))
def test_a_module_with_its_slot(library, model, how):
    """No further from float64 than its own path, but for a factor of two, and a few ulps where that has no rounding at all."""
    name, dtype = model.partition(", ")[0], getattr(torch, model.rpartition(", ")[2])
    python, _, kind = name.rpartition(".")
    more = {"num_points": [4, 4]} if MORE[name] else {}
    module = build(getattr(importlib.import_module(python), kind), **more).to(dtype)
    arguments = {n: cast(a, dtype) for n, a in family.inputs_for(module, how).items()}
    own, calls = counted(module, arguments)
    true = results(copy.deepcopy(module).double(), **{n: cast(a, torch.float64) for n, a in arguments.items()})
    assert calls == 0
    mx_driving.kernels.libreyolo.register()
    found, calls = counted(module, arguments)
    assert calls == 1
    assert found[0].dtype == own[0].dtype == dtype
    assert error(found, true) <= 2 * error(own, true) + 16 * torch.finfo(dtype).eps


def cast(argument: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda t: t.to(dtype) if floating(t) else t, argument)


@pytest.mark.parametrize(("library", "model"), [("libreyolo", "slot, order of kernels")])
def test_ours_comes_first_and_goes(library, model, kernels):
    """Also when LibreYOLO looked for kernels before, and when it is registered twice."""
    before = [name for name, _ in kernels.iter_impls("ms_deform_attn")]
    assert kernels.resolve("ms_deform_attn") is None or before
    for _ in range(2):
        mx_driving.kernels.libreyolo.register()
        assert [name for name, _ in kernels.iter_impls("ms_deform_attn")] == ["mx_driving", *before]
        assert kernels.active()["ms_deform_attn"] == "mx_driving"
    kernels.unregister("ms_deform_attn", "mx_driving")
    assert [name for name, _ in kernels.iter_impls("ms_deform_attn")] == before
