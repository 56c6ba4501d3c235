"""OpenVINO runs exported gathers, and our kernels as an extension: examples/openvino, built against its wheel."""

import pathlib
import shutil
import subprocess
import sys

import cases
import pytest
import torch
from small_cases import GROWING
from test_onnx import FORMS
from test_onnx import exported as in_form
from test_onnxruntime import one_node

import mx_driving
from mx_driving import config

openvino = pytest.importorskip("openvino")
pytestmark = pytest.mark.needs("An ONNX file of opset 20")
SOURCE = pathlib.Path(__file__).parents[2] / "examples" / "openvino"


@pytest.mark.parametrize(("operator", "form"), FORMS)
def test_gathers_give_the_same_numbers_for_any_batch_and_queries(operator, form):
    """Ask for float32, because OpenVINO may compute in bfloat16 on processors that have it."""
    core, options = openvino.Core(), {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    compiled = core.compile_model(core.read_model(in_form(operator, form).SerializeToString(), b""), "CPU", options)
    for bs, queries in ((3, 5), (1, 7), (4, 1)):
        args = cases.cast(GROWING[operator](bs, queries), torch.float32)
        output = torch.from_numpy(compiled([a.numpy() for a in args])[0])
        torch.testing.assert_close(output, getattr(mx_driving, operator)(*args), rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    cmake, folder = pathlib.Path(sys.executable).with_name("cmake"), tmp_path_factory.mktemp("extension")
    cmake = cmake if cmake.exists() else shutil.which("cmake")
    options = [f"-Dmx_driving_DIR={config.cmakedir()}", f"-DOpenVINO_DIR={pathlib.Path(openvino.__path__[0], 'cmake')}"]
    for step in (["-S", SOURCE, "-B", folder, *options], ["--build", folder]):
        done = subprocess.run([cmake, *step], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    core = openvino.Core()
    core.add_extension(next(folder.glob("*mx_driving_openvino.*")))
    return core


@pytest.mark.parametrize("operator", cases.EVERY)
def test_the_bits_of_torch(core, operator):
    args = cases.cast(GROWING[operator](3, 5), torch.float32)
    tensors = tuple(a for a in args if isinstance(a, torch.Tensor))
    model = core.read_model(one_node(operator).SerializeToString(), b"")
    compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    output = torch.from_numpy(compiled([t.numpy() for t in tensors])[0])
    assert torch.equal(output, getattr(mx_driving, operator)(*args))


def test_a_bad_table_is_refused(core):
    args = cases.cast(GROWING[cases.MULTI_SCALE](3, 5), torch.float32)
    model = core.read_model(one_node(cases.MULTI_SCALE).SerializeToString(), b"")
    compiled = core.compile_model(model, "CPU")
    with pytest.raises(RuntimeError, match="multi_scale_deformable_attn must have arguments that fit: status "):
        compiled([t.numpy() for t in (args[0], args[1], args[2] + 10**6, *args[3:])])
