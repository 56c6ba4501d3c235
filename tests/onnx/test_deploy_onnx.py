"""examples/deploy_onnx.py on a small detector: the boxes of torch from our operators in onnxruntime."""

import contextlib
import io
import logging
import pathlib
import re
import sys
import warnings

import onnx
import onnx_nodes
import onnxruntime.quantization
import pytest
import quick_exports  # noqa: F401
import torch
from programs import example

import mx_driving.onnx

pytest.importorskip("transformers")
pytestmark = [pytest.mark.long, pytest.mark.xdist_group("detector")]  # so that it is exported once
FILE = pathlib.Path(__file__).parents[2] / "examples" / "deploy_onnx.py"


def run(*options: object) -> str:
    """Run the program in this process, which has imported torch.onnx, onnxruntime and transformers. Return its output."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()) as said:
        patch.syspath_prepend(FILE.parent)  # it takes from examples/detect.py
        patch.setattr(sys, "argv", [FILE.name, *map(str, options)])
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            program = example("deploy_onnx")
            patch.setattr(program, "at_least_one", int)  # three times are enough
            program.main()
        finally:
            torch.set_num_threads(threads)
            logging.disable(logging.NOTSET)
    return said.getvalue()


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Export the detector. Return its folder, and the output of the program."""
    import detectors

    detector, folder = tmp_path_factory.mktemp("saved"), tmp_path_factory.mktemp("exported")
    photo = detector / "photo.png"
    detectors.saved(detector, photo)
    options = "--checkpoint", detector, "--photo", photo, "--folder", folder
    return folder, run(*options, "--forms", "onnxruntime", "--seconds", 0)


def nodes_of(file: pathlib.Path) -> set[tuple[str, str]]:
    return {(node.domain, node.op_type) for node in onnx.load(file).graph.node}


@pytest.mark.needs("An ONNX file of opset 20")
def test_the_boxes_of_torch(exported):
    folder, said = exported
    differences = dict(re.findall(r"^ *(.+): +[\d.]+ ms, boxes (\S+)$", said, re.MULTILINE))
    assert list(differences) == ["torch", "torch, patched", "onnxruntime, onnxruntime"]
    assert max(map(float, differences.values())) < 1e-5
    ours = {kind for domain, kind in nodes_of(folder / "onnxruntime.onnx") if domain == "mx_driving"}
    assert ours == {"multi_scale_deformable_attn_with_logits"}


def outputs(file: pathlib.Path, pixels: torch.Tensor) -> list[torch.Tensor]:
    """Return logits and boxes."""
    session = onnx_nodes.session(onnx.load(file), mx_driving.onnx.library(), 1)
    return [torch.from_numpy(array) for array in session.run(None, {session.get_inputs()[0].name: pixels.numpy()})]


@pytest.mark.needs("An ONNX file of opset 20")
def test_a_quantised_detector_runs_with_our_nodes(exported):
    """A layer in int8 rounds its inputs and its weights to 255 steps: its output moves by about 1/255 of the largest number. A
    dozen layers, whose errors have either sign, make sqrt(12) times that; twice as much is allowed. Another picture is
    farther away. Weights are unsigned: the runtime's product of unsigned inputs and signed weights overflows on x86 processors
    without VNNI, and moves these logits by 27 %."""
    folder, _ = exported
    unsigned = onnxruntime.quantization.QuantType.QUInt8
    onnxruntime.quantization.quantize_dynamic(folder / "onnxruntime.onnx", folder / "int8.onnx", weight_type=unsigned)
    kinds = nodes_of(folder / "int8.onnx")
    assert {("mx_driving", "multi_scale_deformable_attn_with_logits"), ("", "MatMulInteger"), ("", "ConvInteger")} <= kinds
    pixels, other = torch.randn(2, 1, 3, 96, 128, generator=torch.Generator().manual_seed(0))
    int8, expected = outputs(folder / "int8.onnx", pixels), outputs(folder / "onnxruntime.onnx", pixels)
    for a, b in zip(int8, expected, strict=True):
        assert 0 < (a - b).abs().max() < 2 * 12**0.5 / 255 * b.abs().max()
    logits = expected[0]
    assert (outputs(folder / "onnxruntime.onnx", other)[0] - logits).abs().max() > 3 * (int8[0] - logits).abs().max()


def test_what_is_no_detector_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        run("--model", "bert")
    assert re.search(r"--model must be one of .*; got bert", f"{ended.value}{capsys.readouterr().err}")
