"""patch: code of which only the byte code is there, and patched models that other processes get."""

import importlib
import inspect
import multiprocessing
import py_compile
import sys

import pytest
import torch
from attention_modules import BARE, WITH_LOGITS, operators, plain_core
from torch import nn

import mx_driving

SOURCE = f"""
import torch
import torch.nn.functional as F
from torch import nn
{inspect.getsource(plain_core)}
class Attention(nn.Module):
    def __init__(self, d_model=16, n_levels=2, n_heads=2, n_points=4):
        super().__init__()
        self.d_model, self.n_levels, self.n_heads, self.n_points = d_model, n_levels, n_heads, n_points
        self.sampling_offsets = nn.Linear(d_model, n_heads * n_levels * n_points * 2)
        self.attention_weights = nn.Linear(d_model, n_heads * n_levels * n_points)
        self.value_proj, self.output_proj = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)

    def forward(self, query, reference_points, input_flatten, input_spatial_shapes, input_level_start_index,
                input_padding_mask=None):
        value = self.value_proj(input_flatten)
        if input_padding_mask is not None:
            value = value.masked_fill(input_padding_mask[..., None], 0.0)
        value = value.unflatten(-1, (self.n_heads, -1))
        sides = (self.n_heads, self.n_levels, self.n_points)
        offsets = self.sampling_offsets(query).unflatten(-1, (*sides, 2))
        weights = self.attention_weights(query).unflatten(-1, (self.n_heads, -1)).softmax(-1).unflatten(-1, sides[1:])
        reference = reference_points[:, :, None, :, None]
        if reference_points.shape[-1] == 2:
            locations = reference + offsets / input_spatial_shapes.flip(-1)[:, None]
        else:
            locations = reference[..., :2] + offsets / self.n_points * reference[..., 2:] * 0.5
        return self.output_proj(plain_core(value, input_spatial_shapes, locations, weights))
"""
FORMS = {"Attention": "deformable_detr", "plain_core": "core"}


@pytest.fixture
def import_file(tmp_path, monkeypatch):
    """Import the file, or its byte code alone, as an application has it that was frozen."""
    monkeypatch.syspath_prepend(tmp_path)
    names = []

    def import_file(name, is_byte_code=False):
        names.append(name)
        (tmp_path / f"{name}.py").write_text(SOURCE)
        if is_byte_code:
            py_compile.compile(str(tmp_path / f"{name}.py"), str(tmp_path / f"{name}.pyc"), doraise=True)
            (tmp_path / f"{name}.py").unlink()
        return importlib.import_module(name)

    yield import_file
    for name in names:
        del sys.modules[name]


def build(module):
    """A layer in float64 and its arguments."""
    torch.manual_seed(0)
    layer = module.Attention().double().eval()
    for p in layer.parameters():
        nn.init.normal_(p, std=0.4)
    sizes = torch.tensor([[4, 5], [3, 2]])
    query, reference, value = (torch.rand(2, n, *s, dtype=torch.float64) for n, s in ((7, (16,)), (7, (2, 2)), (26, (16,))))
    return layer, (query, reference, value, sizes, torch.tensor([0, 20]))


@pytest.mark.filterwarnings("ignore:mx_driving.patch left")
@pytest.mark.parametrize("named", [["Attention"], ["plain_core"], ["plain_core", "Attention"]])
def test_byte_code_alone_is_replaced_if_its_form_is_named(named, import_file):
    module = import_file("a_frozen_library", is_byte_code=True)
    assert module.__file__.endswith(".pyc")
    layer, arguments = build(module)
    expected = layer(*arguments)
    reason = "its code is not known, because the source of .* is not at hand"
    advice = r'To replace it, try: mx_driving\.patch\(\.\.\., forms={Attention: "deformable_detr"}\)'
    with pytest.raises(ValueError, match=rf"a_frozen_library\.Attention: {reason}\. {advice}"):
        mx_driving.patch(layer)
    with mx_driving.patched(layer, forms={getattr(module, name): FORMS[name] for name in named}) as done:
        assert set(done.replaced) == {f"a_frozen_library.{name}" for name in named}
        assert done.layers == ("",)
        assert operators(layer, *arguments) == [WITH_LOGITS if "Attention" in named else BARE]
        torch.testing.assert_close(layer(*arguments), expected, rtol=1e-10, atol=1e-10)
    assert operators(layer, *arguments) == []
    with pytest.raises(ValueError, match="got 'mmcv' for Attention: "):
        mx_driving.patch(layer, forms={module.Attention: "mmcv"})


def work(model, arguments, answers):
    """In a worker: the operators that a call of the model runs, and the model's output."""
    torch.set_num_threads(1)
    answers.put((operators(model, *arguments), model(*arguments).tolist()))


def test_a_patched_model_that_a_worker_gets_calls_operators_there(import_file):
    """A worker that is spawned imports the model's file anew. The model's pickle patches the file there."""
    module = import_file("a_library_for_workers")
    layer, arguments = build(module)
    layer, workers = layer.requires_grad_(False), {}
    with mx_driving.patched(layer, forms={module.Attention: "deformable_detr", module.plain_core: "core"}):
        expected = layer(*arguments).tolist()
        for start in multiprocessing.get_all_start_methods():
            context = multiprocessing.get_context(start)
            answers = context.Queue()
            workers[start] = context.Process(target=work, args=(layer, arguments, answers)), answers
            workers[start][0].start()
        for start, (process, answers) in workers.items():
            assert answers.get(timeout=300) == ([WITH_LOGITS], expected), start
            process.join()
