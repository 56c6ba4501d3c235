"""A folder like a device's machine: a program, stand-ins for the packages that serve its calls there, and record.py alone."""

import json
import os
import pathlib
import subprocess
import sys

import torch

from mx_driving_portable import record

FILE = pathlib.Path(record.__file__)
# Code as it lies on a device's machine. Its arithmetic is not ours: mx_driving is not imported in these processes.
SAMPLE = """
import torch

def sample(value, shapes, starts, locations, weights):
    bs, _, heads, channels = value.shape
    out = 0
    for l, ((h, w), start) in enumerate(zip(shapes.tolist(), starts.tolist())):
        level = value[:, start : start + h * w].permute(0, 2, 3, 1).reshape(bs * heads, channels, h, w)
        grid = 2 * locations[:, :, :, l].transpose(1, 2).flatten(0, 1) - 1
        samples = torch.nn.functional.grid_sample(level, grid, align_corners=False)
        out = out + (samples * weights[:, :, :, l].transpose(1, 2).flatten(0, 1)[:, None]).sum(-1)
    return out.view(bs, heads * channels, -1).transpose(1, 2).contiguous()

def sample_backward(value, shapes, starts, locations, weights, grad):
    leaves = [t.detach().requires_grad_() for t in (value, locations, weights)]
    with torch.enable_grad():
        out = sample(leaves[0], shapes, starts, leaves[1], leaves[2])
        return list(torch.autograd.grad(out, leaves, grad))
"""
VENDOR = """
from torch.autograd import Function
from .kernels import sample, sample_backward

class MultiScaleDeformableAttnFunction(Function):
    @staticmethod
    def forward(ctx, value, shapes, starts, locations, weights):
        ctx.save_for_backward(value, shapes, starts, locations, weights)
        return sample(value, shapes, starts, locations, weights)

    @staticmethod
    def backward(ctx, grad):
        value, locations, weights = sample_backward(*ctx.saved_tensors, grad)
        return value, None, None, locations, weights

def multi_scale_deformable_attn(value, value_spatial_shapes, value_level_start_index, sampling_locations, attention_weights):
    tables = value_spatial_shapes, value_level_start_index
    return MultiScaleDeformableAttnFunction.apply(value, *tables, sampling_locations, attention_weights)
"""
MMCV = """
from .kernels import sample, sample_backward

def ms_deform_attn_forward(value, shapes, starts, locations, weights, im2col_step=64):
    return sample(value, shapes, starts, locations, weights)

def ms_deform_attn_backward(value, shapes, starts, locations, weights, grad, *outputs, im2col_step=64):
    for out, gradient in zip(outputs, sample_backward(value, shapes, starts, locations, weights, grad)):
        out.copy_(gradient)
"""
PROGRAM = """
import sys
assert "torch" not in sys.modules
import mmcv._ext
from mx_driving import multi_scale_deformable_attn as vendors
from own.kernels import sample
import torch

class Mmcv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        ctx.save_for_backward(*inputs)
        return mmcv._ext.ms_deform_attn_forward(*inputs, im2col_step=64)

    @staticmethod
    def backward(ctx, grad):
        gradients = [torch.zeros_like(ctx.saved_tensors[i]) for i in (0, 3, 4)]
        mmcv._ext.ms_deform_attn_backward(*ctx.saved_tensors, grad.contiguous(), *gradients, im2col_step=64)
        return gradients[0], None, None, gradients[1], gradients[2]

shapes, starts = torch.tensor([[4, 6], [2, 3]]), torch.tensor([0, 24])
for attention in (vendors, Mmcv.apply, sample):
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 8)
    total = torch.zeros(())
    for step in range(7):
        value = layer(torch.rand(2, 30, 8)).view(2, 30, 2, 4)
        locations = (torch.rand(2, 5, 2, 2, 3, 2) * 1.2 - 0.1).requires_grad_()
        weights = torch.rand(2, 5, 2, 2, 3, requires_grad=True)
        (attention(value, shapes, starts, locations, weights).sin().sum() + value.cos().sum()).backward()
        total = total + locations.grad.sum() + weights.grad.sum()
    print(sys.argv[1:], total.item().hex(), layer.weight.grad.sum().item().hex())
"""
FILES = {
    **dict.fromkeys([f"{name}/kernels.py" for name in ("mx_driving", "mmcv", "own")], SAMPLE),
    **dict.fromkeys([f"{name}/__init__.py" for name in ("mmcv", "own")], ""),
    **{"mx_driving/__init__.py": VENDOR, "mmcv/_ext.py": MMCV, "program.py": PROGRAM},
}


def device_machine(folder: pathlib.Path) -> pathlib.Path:
    """Make a folder with a program, the packages that serve its calls, and a copy of record.py. No mx_driving of ours can be
    found there."""
    for name, text in {**FILES, "record.py": FILE.read_text()}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def run(folder: pathlib.Path, *args: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess:
    """Run Python in the folder, without the finder of our editable installation."""
    command = "import runpy, sys; sys.meta_path = [f for f in sys.meta_path if '_editable' not in type(f).__module__]; "
    command += "sys.argv = sys.argv[1:]; sys.path.insert(0, '.'); runpy.run_path(sys.argv[0], run_name='__main__')"
    options = {"capture_output": True, "text": True, "env": {**os.environ, "OMP_NUM_THREADS": "1", **environment}}
    return subprocess.run([sys.executable, "-c", command, *args], cwd=folder, check=check, **options)


def read_calls(folder: pathlib.Path) -> dict[str, tuple[dict, dict[str, torch.Tensor]]]:
    """Return the files of a recording by name: the facts about a call, and its tensors."""
    calls = {}
    for file in sorted(folder.glob("*.pt")):
        whole = torch.load(file, weights_only=True)
        calls[file.stem] = json.loads(whole["metadata"]["call"]), whole["tensors"]
    return calls
