"""Every model of the installed transformers with a deformable core: found here by its source, patched, and compared."""

from __future__ import annotations

import ast
import os
import pathlib
import re
import subprocess
import sys
import warnings

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers")

import mx_driving  # noqa: E402
from mx_driving.measure import models, plain  # noqa: E402

FOLDER = pathlib.Path(transformers.__file__).parent / "models"


def _samples_at_locations(node: ast.AST) -> bool:
    """A function that calls grid_sample once per level, at locations and with weights that it is given."""
    if not isinstance(node, ast.FunctionDef) or not any(isinstance(n, ast.For) for n in ast.walk(node)):
        return False
    calls = {n.func.attr for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)}
    return "grid_sample" in calls and {"sampling_locations", "attention_weights"} <= {a.arg for a in node.args.args}


def _carriers() -> list[str]:
    """Folders whose modelling file has a core. Nothing of the package is used, so that it cannot forget one."""
    files = sorted(FOLDER.glob("*/modeling_*.py"))
    texts = {f: f.read_text(encoding="utf-8") for f in files}
    return [f.parent.name for f, text in texts.items() if "grid_sample" in text and _has_core(text)]


def _has_core(text: str) -> bool:
    return any(_samples_at_locations(node) for node in ast.walk(ast.parse(text)))


CARRIERS = _carriers()


def _shrunk(name: str) -> dict[str, object]:
    """Smaller models save time: 100 queries of 300 or 900, and fewer layers of the two that take more than 10 s."""
    if name in ("grounding_dino", "mm_grounding_dino"):
        text = transformers.BertConfig(num_hidden_layers=2)
        return {"encoder_layers": 2, "decoder_layers": 2, "num_queries": 100, "text_config": text}
    if name == "omdet_turbo":
        return {"decoder_num_layers": 2, "num_queries": 100, "text_config": transformers.CLIPTextConfig(num_hidden_layers=2)}
    return {"num_queries": 100}


def test_the_issue_names_are_among_them():
    expected = {"deformable_detr", "rt_detr", "rt_detr_v2", "d_fine", "mask2former", "oneformer", "grounding_dino"}
    assert expected | {"omdet_turbo", "lw_detr"} <= set(CARRIERS)


def test_patch_finds_every_core():
    with mx_driving.patched("transformers") as done:
        assert sorted({name.split(".")[2] for name in done.replaced}) == CARRIERS
        assert done.skipped == {}


@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize("name", CARRIERS)
def test_outputs_and_gradients_in_float64(name):
    """Nothing but rounding may differ. In float32 it would hide a wrong share."""
    with mx_driving.viz.recording() as looks:
        outputs, gradients = models.compare(models.build(name, 96, 128, torch.float64, **_shrunk(name)))
    assert len(looks) >= 2
    assert all(float(look.table.std(1).mean()) > 1e-4 for look in looks)  # the models are alive: a wrong sample would show
    assert outputs < 1e-13
    assert gradients < 1e-11


class _Calls(TorchDispatchMode):
    """Keeps the inputs and results of every core, forward and backward."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func.namespace == "mx_driving":
            self.kept.append((func, args, _several(found)))
        return found


def _several(found):
    return found if isinstance(found, tuple) else (found,)


def _in_float64(func, args):
    return _several(func(*(a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)))


def _in_plain_torch(func, args):
    """The results of every original core: test_outputs_and_gradients_in_float64 shows that they are."""
    form = getattr(plain, func._opname.removesuffix("_backward"))
    if not func._opname.endswith("_backward"):
        return _several(form(*args))
    grad, *inputs, mask = args
    assert all(mask)
    leaves = [a.detach().requires_grad_(i in (0, 3, 4)) for i, a in enumerate(inputs)]
    return torch.autograd.grad(form(*leaves), [leaves[i] for i in (0, 3, 4)], grad)


def _clear_of_centres(shapes, locations):
    """0 for locations within rounding of a pixel's centre, which may take the slope of either side; 1 for all others."""
    size = shapes.flip(-1)[:, None]
    pixel = locations.double() * size - 0.5
    clear = ((pixel - pixel.round()).abs() > 1e-5 * size).all(-1, keepdim=True)
    assert clear.double().mean() > 0.9
    return clear


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CARRIERS)
def test_outputs_and_gradients_in_float32(name):
    """Each core gets the float32 model's inputs. Ours may be four times as far from float64 as plain torch is, because two
    draws of the same rounding errors differ. The model's end would say less: on some processor a ranking, or the threshold
    of a mask, turns a rounding error into another picture."""
    subject = models.build(name, 96, 128, **_shrunk(name))
    with mx_driving.patched(subject.model), _Calls() as calls:
        outputs, _ = subject.backward()
    assert not any(out.isnan().any() for out in outputs.values())
    assert len(calls.kept) >= 4
    for func, args, ours in calls.kept:
        for place, results in enumerate(zip(ours, _in_plain_torch(func, args), _in_float64(func, args), strict=True)):
            kept = _clear_of_centres(args[2], args[4]) if len(ours) == 3 and place == 1 else 1
            mine, theirs, exact = (t.double() * kept for t in results)
            assert (mine - exact).abs().max() <= 4 * (theirs - exact).abs().max()


def test_model_built_before_or_after_or_copied():
    """D-FINE's layers hold the core in an attribute. Models built before see the change; models built inside are given back."""
    import transformers.models.d_fine.modeling_d_fine as d_fine

    config = d_fine.DFineConfig(decoder_n_points=[3, 6, 3])
    layer = d_fine.DFineMultiscaleDeformableAttention(config).eval()
    torch.nn.init.normal_(layer.sampling_offsets.weight, std=0.1)

    def run(layer):
        generator = torch.Generator().manual_seed(0)
        hidden, reference, memory = (torch.rand(2, *s, generator=generator) for s in ((5, 256), (5, 1, 4), (29, 256)))
        sizes = [(4, 5), (2, 3), (1, 3)]
        return layer(
            hidden_states=hidden,
            reference_points=reference,
            encoder_hidden_states=memory,
            spatial_shapes=torch.tensor(sizes),
            spatial_shapes_list=sizes,
        )[0]

    def looks(layer):
        with mx_driving.viz.recording() as found:
            out = run(layer)
        return len(found), out

    count, plain = looks(layer)
    assert count == 0
    with mx_driving.patched("transformers"):
        within = d_fine.DFineMultiscaleDeformableAttention(config).eval()
        within.load_state_dict(layer.state_dict())
        for one in (layer, within):
            count, out = looks(one)
            assert count == 1
            torch.testing.assert_close(out, plain, rtol=1e-5, atol=1e-6)
    for one in (layer, within):
        assert looks(one)[0] == 0


@pytest.mark.parametrize("counts", [[4, 4, 4], [3, 6, 3], [1, 2, 4]])
@pytest.mark.parametrize("method", ["default", "discrete"])
def test_uneven_points_and_nearest_pixels(counts, method):
    """RT-DETR v2's and D-FINE's options that no default configuration uses."""
    from transformers.models.rt_detr_v2 import modeling_rt_detr_v2 as module

    sizes = [(4, 5), (2, 3), (1, 3)]

    def run():
        generator = torch.Generator().manual_seed(1)
        sides = ((29, 3, 4), (7, 3, sum(counts), 2), (7, 3, sum(counts)))
        leaves = [torch.rand(2, *s, generator=generator).double().mul(1.2).sub(0.1).requires_grad_() for s in sides]
        out = module.multi_scale_deformable_attention_v2(leaves[0], sizes, *leaves[1:], counts, method)
        gradients = torch.autograd.grad((out * out).sum(), leaves, allow_unused=True)
        return [out, *(torch.zeros(()) if g is None else g for g in gradients)]

    theirs = run()
    with mx_driving.patched(module), mx_driving.viz.recording() as looks:
        ours = run()
    assert [look.operator for look in looks] == [
        "multi_scale_deformable_attn" if method == "default" else "geometric_kernel_attention"
    ]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.expand_as(b), b, rtol=1e-11, atol=1e-11)


@pytest.mark.filterwarnings("ignore")
def test_compiled_model():
    """A graph that was compiled before patching is not used after it, nor the other way round."""
    subject = models.build("rt_detr_v2", 64, 96, num_queries=20)
    layer = next(m for m in subject.model.modules() if type(m).__name__ == "RTDetrV2MultiscaleDeformableAttention")
    arguments = {}
    hook = layer.register_forward_pre_hook(lambda _, args, kwargs: arguments.update(kwargs), with_kwargs=True)
    hidden = []
    taken = layer.register_forward_pre_hook(lambda _, args: hidden.extend(args))
    with torch.no_grad():
        subject.forward()
        hook.remove()
        taken.remove()
        compiled = torch.compile(layer, backend="eager")
        plain = compiled(*hidden, **arguments)[0]
        with mx_driving.patched(subject.model), mx_driving.viz.recording() as looks:
            ours = compiled(*hidden, **arguments)[0]
        with mx_driving.viz.recording() as after:
            compiled(*hidden, **arguments)
    assert (len(looks), len(after)) == (1, 0)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


def test_reads_their_checkpoints():
    """The layer of transformers' Deformable DETR and ours: the same state, the same numbers."""
    from transformers.models.deformable_detr import modeling_deformable_detr as module

    config = transformers.DeformableDetrConfig(d_model=32, num_feature_levels=2, use_timm_backbone=False)
    theirs = module.DeformableDetrMultiscaleDeformableAttention(config, num_heads=4, n_points=3)
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.2)
    ours = mx_driving.nn.MultiScaleDeformableAttention(32, 4, 2, 3)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    value, shapes, starts = mx_driving.nn.flatten_levels([torch.rand(2, 32, 5, 4), torch.rand(2, 32, 3, 2)])
    query = torch.rand(2, 6, 32)
    kept = torch.rand(2, 26) > 0.2
    for numbers in (2, 4):
        reference = torch.rand(2, 6, 2, numbers)
        expected, weights = theirs(
            query,
            attention_mask=kept,
            encoder_hidden_states=value,
            reference_points=reference,
            spatial_shapes=shapes,
            spatial_shapes_list=[tuple(s) for s in shapes.tolist()],
            level_start_index=starts,
        )
        torch.testing.assert_close(ours(query, reference, value, shapes, starts, ~kept), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours.sampling(query, reference, shapes)[1], weights)


def test_queries_off():
    theirs = {"logits": torch.randn(1, 50, 7), "pred_boxes": torch.rand(1, 50, 4)}
    order = torch.arange(50)
    order[[3, 9]] = order[[9, 3]]
    assert models.queries_off({n: out[:, order] * (1 + 1e-6) for n, out in theirs.items()}, theirs).nonzero()[
        :, 0
    ].tolist() == [3, 9]
    assert models.queries_off({n: out * 1.01 for n, out in theirs.items()}, theirs).sum() > 25


def test_command_line(tmp_path):
    command = [sys.executable, "-m", "mx_driving", "models", "--only", "rt_detr", "--height", "128", "--width", "160"]
    done = subprocess.run([*command, "--seconds", "0.1"], capture_output=True, text=True, env={**os.environ, "COLUMNS": "120"})
    assert done.returncode == 0, done.stderr
    assert re.search(r"rt_detr +\de-\d\d +\d+ ", done.stdout), done.stdout


def test_nothing_is_warned_about():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        mx_driving.patch("transformers").restore()
