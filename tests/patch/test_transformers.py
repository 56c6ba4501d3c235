"""Every model of the installed transformers with a deformable core: found here by its source, patched, and compared."""

import ast
import copy
import functools
import io
import pathlib
import re
import warnings

import pytest
import torch
from torch.utils._pytree import tree_leaves

transformers = pytest.importorskip("transformers")


import models  # noqa: E402
from detectors import small_deformable_detr  # noqa: E402

import mx_driving  # noqa: E402
from mx_driving._patch._patch import survey  # noqa: E402
from mx_driving._patch._trial import FORMS  # noqa: E402
from mx_driving._patch.known import read_table  # noqa: E402

FOLDER = pathlib.Path(transformers.__file__).parent / "models"


def _samples_at_locations(node: ast.AST) -> bool:
    """A function that calls grid_sample once per level, at locations and with weights that it is given."""
    if not isinstance(node, ast.FunctionDef) or not any(isinstance(n, ast.For) for n in ast.walk(node)):
        return False
    calls = {n.func.attr for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)}
    return "grid_sample" in calls and {"sampling_locations", "attention_weights"} <= {a.arg for a in node.args.args}


def _carriers() -> dict[str, ast.Module]:
    """Folders whose modelling file has a core, and that file. Nothing of the package is used, so that it cannot forget one."""
    texts = {f: f.read_text(encoding="utf-8") for f in sorted(FOLDER.glob("*/modeling_*.py"))}
    parsed = {f: ast.parse(text) for f, text in texts.items() if "grid_sample" in text}
    return {f.parent.name: tree for f, tree in parsed.items() if any(_samples_at_locations(node) for node in ast.walk(tree))}


def _attention(tree: ast.Module) -> str:
    """The text of a carrier's attention module, without its model's name."""
    modules = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.endswith("Attention")]
    text = next((text for text in map(ast.unparse, modules) if "sampling_offsets" in text), ast.unparse(tree))
    return re.sub(r"\b\w+Config\b", "", re.sub(r"\w+(?=Multi[sS]cale)", "", text))


TREES = _carriers()
CARRIERS = list(TREES)
# of carriers whose attention modules have the same text, one
FIRST = sorted({_attention(TREES[name]): name for name in reversed(CARRIERS)}.values())


def _shallow(config: transformers.PreTrainedConfig, name: str) -> dict[str, object]:
    """A backbone of one block a stage, or of as many layers as are read, where its configuration counts them."""
    recipe = models.RECIPES.get(name, models.Recipe())
    backbone = copy.deepcopy(getattr(type(config)(**recipe.changes(type(config))), "backbone_config", None))
    counts = [key for key in ("depths", "stage_num_blocks", "stage_numb_of_layers") if hasattr(backbone, key)]
    for key in counts:
        setattr(backbone, key, [1] * len(getattr(backbone, key)))
    if not counts and getattr(backbone, "num_hidden_layers", 0) > 4:
        counts = backbone.num_hidden_layers = len(backbone.out_features)
        backbone.out_features = [f"stage{n + 1}" for n in range(counts)]
    return {"backbone_config": backbone} if counts else {}


OMDET_TEXT = ("text_projection_in_dim", "text_projection_out_dim", "class_embed_dim")


def _shrunk(name: str) -> dict[str, object]:
    """Smaller models save time: a shallow backbone, 50 queries of 300 or 900, and two layers, the fewest that feed one
    another. The text's encoder has two layers, too, and 5000 words where it may."""
    dino = name.endswith("grounding_dino")
    config = transformers.AutoConfig.for_model(name.replace("_", "-") if dino or name == "omdet_turbo" else name)
    found: dict[str, object] = {"num_queries": 50, **_shallow(config, name)}
    if name == "omdet_turbo":
        text = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
        found |= {"decoder_num_layers": 2, **dict.fromkeys(OMDET_TEXT, 64), "text_config": transformers.CLIPTextConfig(**text)}
        return found
    found |= {key: 2 for key in ("encoder_layers", "decoder_layers") if getattr(config, key, 0) > 2}
    text = {"num_hidden_layers": 2, "vocab_size": 5000, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    return found | ({"text_config": transformers.BertConfig(**text)} if dino else {})


@functools.lru_cache(maxsize=1)
def _in_double(name: str) -> models.Subject:
    """A model is built once for its tests, which one process runs in turn: building takes longer than a backward."""
    return models.build(name, 64, 96, torch.float64, **_shrunk(name))


def in_one_process(names):
    """A model is built once for its tests."""
    return [pytest.param(n, marks=[pytest.mark.long, pytest.mark.xdist_group(f"transformers {n}")]) for n in names]


def _list_attention_classes() -> set[str]:
    """Classes whose code names both linear layers of deformable attention."""
    classes = [(name, node) for name, tree in TREES.items() for node in tree.body if isinstance(node, ast.ClassDef)]
    named = [(name, node.name, {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}) for name, node in classes]
    found = [(name, kind) for name, kind, words in named if {"sampling_offsets", "attention_weights"} <= words]
    return {f"transformers.models.{name}.modeling_{name}.{kind}" for name, kind in found if kind.endswith("Attention")}


def test_patch_knows_every_core_and_attention_module():
    """None is skipped, and none needs a trial."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        done = mx_driving.patch("transformers")
    done.restore()
    known = {"deformable_detr", "rt_detr", "rt_detr_v2", "d_fine", "mask2former", "oneformer", "grounding_dino"}
    assert known | {"omdet_turbo", "lw_detr"} <= set(CARRIERS)
    assert sorted({name.split(".")[2] for name in done.replaced}) == CARRIERS
    assert done.skipped == {}
    assert _list_attention_classes() <= set(done.replaced)
    findings, unread = survey("transformers")
    assert ({finding.state for finding in findings}, unread) == ({"known"}, {})


def test_each_entry_of_the_table_names_a_form():
    table = {key: entry for key, entry in read_table().items() if not entry.seen.startswith("tests ")}  # of admit()
    assert {entry.form for entry in table.values()} <= set(FORMS)
    assert all(re.fullmatch("[0-9a-f]{12}", key) and entry.seen for key, entry in table.items())
    limits = {"bevdet": 1e-7}  # its code and ours sum in float32
    assert all(entry.difference < limits.get(entry.form, 1e-12) for entry in table.values())


class _Outputs(torch.nn.Module):
    def __init__(self, model, picture):
        super().__init__()
        self.model, self.mask = model, torch.ones(1, *picture.shape[2:], dtype=torch.long)

    def forward(self, picture):
        return self.model(pixel_values=picture, pixel_mask=self.mask, return_dict=False)[:2]


def _compile(model, picture):
    graphs = []
    torch._dynamo.reset()
    torch.compile(model, fullgraph=True, backend=lambda graph, _: graphs.append(str(graph.code)) or graph)(picture)
    return graphs


NEEDED = {"onnx": "An ONNX file of opset 20"} | dict.fromkeys(("compile", "export"), "A compiled model of transformers 5")
WRITTEN = {
    "compile": _compile,
    "export": lambda model, picture: [torch.export.export(model, (picture,), strict=strict).graph for strict in (False, True)],
    "trace": lambda model, picture: [torch.jit.trace(model, (picture,), check_trace=False).inlined_graph],
    "onnx": lambda model, picture: [torch.onnx.export(
        model, (picture,), dynamo=True, opset_version=20, custom_translation_table=mx_driving.onnx.translations("onnxruntime"),
    ).model.graph],
    # The older exporter must not fail. It traces, as the row above.
    "older onnx": lambda *call: torch.onnx.export(*call, io.BytesIO(), dynamo=False, opset_version=17) or [],
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", [pytest.param(w, marks=pytest.mark.needs(NEEDED[w]) if w in NEEDED else ()) for w in WRITTEN])
def test_a_detector_that_was_never_called_is_written_with_our_operators(way):
    torch.manual_seed(0)
    model, picture = small_deformable_detr().eval(), torch.rand(1, 3, 96, 128)
    with mx_driving.patched(model) as done, torch.no_grad():
        assert len(done.layers) == 3
        for graph in map(str, WRITTEN[way](_Outputs(model, picture), picture)):
            assert graph.count("multi_scale_deformable_attn_with_logits") >= 3
            assert "grid_sampl" not in graph.lower().replace("_", "").replace("gridsampl", "grid_sampl")


@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize("name", in_one_process(CARRIERS))
def test_outputs_and_gradients_in_float64(name):
    """Nothing but rounding may differ. In float32 it would hide a wrong coefficient. Models whose attention has the same text
    share their gradients' test, and cores alone have theirs in the next tests."""
    subject = _in_double(name)
    run = subject.backward if name in FIRST else lambda: (_without_a_graph(subject), {})
    outputs, gradients = run()
    with mx_driving.patched(subject.model, modules=False), mx_driving.viz.recording() as looks:
        of_cores = _without_a_graph(subject)
    with mx_driving.patched(subject.model):
        of_modules, found = run()
    assert len(looks) >= 2
    assert all(float(look.table.std(1).mean()) > 1e-4 for look in looks)  # the models are alive: a wrong sample would show
    assert max(models.model_difference(ours, outputs) for ours in (of_cores, of_modules)) < 1e-13
    assert name not in FIRST or models.model_difference(found, gradients) < 1e-11


def _without_a_graph(subject):
    models.forget(subject.model)
    with torch.no_grad():
        return subject.forward()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", in_one_process(FIRST))
def test_weights_have_the_operators_gradients(name):
    """Weights on request are what a core's operator was given: the output's gradient reaches them. Modules return the same."""
    subject = _in_double(name)
    models.forget(subject.model)
    subject = models.Subject(name, copy.deepcopy(subject.model), subject.inputs)  # it keeps the hooks of what it was asked for
    weights, gradients = _weights_and_gradients(subject)
    with mx_driving.patched(subject.model, modules=False):
        found = _weights_and_gradients(subject)
    with mx_driving.patched(subject.model):
        of_modules = _asked_for_weights(subject)[1]
    assert any(g is not None for g in gradients)  # Mask2Former of two layers returns one layer's
    assert name not in ("deformable_detr", "grounding_dino") or any(t.dim() == 5 for t in weights)  # [..., levels, points]
    torch.testing.assert_close(found[1], gradients, rtol=1e-8, atol=1e-11)
    for ours in (found[0], of_modules):
        torch.testing.assert_close(ours, weights, rtol=1e-9, atol=1e-9)


def _asked_for_weights(subject):
    models.forget(subject.model)
    found = subject.model(**subject.inputs, output_attentions=True)
    outputs = [found[key] for key in models.OUTPUTS if found.get(key) is not None]
    return outputs, [t for key in found if "attentions" in key for t in tree_leaves(found[key]) if t is not None]


def _weights_and_gradients(subject):
    outputs, weights = _asked_for_weights(subject)
    total = sum(torch.where(out.isfinite(), out, 0).square().sum() for out in outputs)
    leaves = [t for t in weights if t.requires_grad]
    return weights, torch.autograd.grad(total, leaves, allow_unused=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", in_one_process(["deformable_detr"]))  # other models refuse gradient_checkpointing_enable
def test_training_with_checkpoints(name, reentrant, tmp_path):
    """Layers run twice, with dropout, and the model is saved and loaded."""
    subject = _in_double(name)
    kind = type(subject.model)
    assert kind.supports_gradient_checkpointing
    subject.model.save_pretrained(tmp_path)

    def gradients():
        loaded = models.Subject(name, kind.from_pretrained(tmp_path, dtype=torch.float64), subject.inputs)
        loaded.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        torch.manual_seed(0)
        outputs = {n: out.detach() for n, out in loaded.forward().items()}
        loaded.model.train()
        total = sum(torch.where(out.isfinite(), out, 0).square().sum() for out in loaded.forward().values())
        total.backward()
        return outputs, {n: p.grad for n, p in loaded.model.named_parameters() if p.grad is not None}

    expected = gradients()
    with mx_driving.patched(kind.__module__) as done:
        found = gradients()
    assert any("Attention" in replaced for replaced in done.replaced)
    assert models.model_difference(found[0], expected[0]) < 1e-13
    assert models.model_difference(found[1], expected[1]) < 1e-9


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
    (look,) = looks
    assert look.operator == ("multi_scale_deformable_attn" if method == "default" else "geometric_kernel_attention")
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.expand_as(b), b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("shapes", "starts"), [(None, None), (torch.float32, torch.int64), (torch.int64, torch.float32)])
def test_the_sampling_layer_reads_its_list_where_a_tensor_is_no_table(shapes, starts):
    from transformers.models.deformable_detr import modeling_deformable_detr as module

    layer, sizes = module.MultiScaleDeformableAttention(), [(4, 5), (2, 3)]
    value, locations, weights = torch.rand(2, 26, 2, 4), torch.rand(2, 7, 2, 2, 3, 2), torch.rand(2, 7, 2, 2, 3)
    table, start = (None if d is None else torch.tensor(t).to(d) for t, d in ((sizes, shapes), ([0, 20], starts)))
    expected = layer(value, table, sizes, start, locations, weights, 64)
    with mx_driving.patched(module), mx_driving.viz.recording() as looks:
        torch.testing.assert_close(layer(value, table, sizes, start, locations, weights, 64), expected, rtol=1e-5, atol=1e-6)
    assert len(looks) == 1
