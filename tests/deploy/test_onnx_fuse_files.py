"""`mx_driving.onnx.fuse`: which files it reads and writes, and which it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import onnx_ir  # noqa: E402
from onnx_ir.passes.common import LiftConstantsToInitializersPass  # noqa: E402
from onnx_writings import WRITINGS, Projected, Stacked, export, inputs, masked, run  # noqa: E402

import mx_driving.onnx  # noqa: E402


@pytest.fixture
def outside(tmp_path):
    """A file whose weights lie in model.onnx.data, under another name than model.onnx."""
    export(Projected().eval(), tmp_path / "whole.onnx", "older")
    path, whole = tmp_path / "renamed.onnx", onnx.load(tmp_path / "whole.onnx")
    onnx.save(whole, path, save_as_external_data=True, location="model.onnx.data", size_threshold=0, convert_attribute=True)
    (tmp_path / "whole.onnx").unlink()
    return path


def snapshot(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "link", "renamed.onnx", "other.onnx"])
def test_no_file_of_the_source_is_written(name, outside, tmp_path):
    """Not under its own name, nor under a link to it, nor where weights would go."""
    (tmp_path / "link").hardlink_to(outside)
    (tmp_path / "other.onnx.data").symlink_to(tmp_path / "model.onnx.data")
    before = snapshot(tmp_path)
    with pytest.raises(ValueError, match="path_out must"):
        mx_driving.onnx.fuse(outside, tmp_path / name)
    assert snapshot(tmp_path) == before


def test_weights_that_nodes_hold_outside(outside, tmp_path):
    (tmp_path / "out").mkdir()
    mx_driving.onnx.fuse(outside, tmp_path / "out" / "after.onnx")
    (tmp_path / "model.onnx.data").unlink()
    with torch.no_grad():
        true = Projected().eval()(*inputs()).numpy()
    np.testing.assert_allclose(run(tmp_path / "out" / "after.onnx", inputs()), true, atol=1e-5)


def test_weights_that_are_not_there(outside, tmp_path):
    weights = tmp_path / "model.onnx.data"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"its weights beside it; got .*renamed.onnx, and model.onnx.data of \d+ bytes"):
        mx_driving.onnx.fuse(outside, tmp_path / "after.onnx")
    weights.unlink()
    with pytest.raises(ValueError, match=r"must have its weights beside it; got .*renamed.onnx, and no file model.onnx.data"):
        mx_driving.onnx.fuse(outside, tmp_path / "after.onnx")
    assert not (tmp_path / "after.onnx").exists()


def test_bad_files(tmp_path):
    out = tmp_path / "out.onnx"
    plain = tmp_path / "plain.onnx"
    torch.onnx.export(torch.nn.Linear(2, 2).eval(), (torch.ones(1, 2),), plain, dynamo=True, verbose=False)
    with pytest.raises(ValueError, match=r"made of GridSample or gathers; got .*plain.onnx \(it has no weighted samples\)"):
        mx_driving.onnx.fuse(plain, out)
    with pytest.raises(ValueError, match="path_out must be another file than path_in"):
        mx_driving.onnx.fuse(plain, plain)
    with pytest.raises(ValueError, match="path_in must be a file that can be read"):
        mx_driving.onnx.fuse(tmp_path / "none.onnx", out)
    (tmp_path / "text.onnx").write_text("not a graph")
    export(Stacked(), tmp_path / "whole.onnx", "older")
    (tmp_path / "cut.onnx").write_bytes((tmp_path / "whole.onnx").read_bytes()[:-1000])
    for name in ("text.onnx", "cut.onnx"):
        with pytest.raises(ValueError, match=f"path_in must be an ONNX file; got .*{name}"):
            mx_driving.onnx.fuse(tmp_path / name, out)
    assert not out.exists()


def with_inputs(path, out, *, chosen=lambda tensor: True, ir_version=8):
    """Every constant is an initializer, and those that are chosen are inputs, too."""
    model = onnx_ir.load(path)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    names = [name for name, value in model.graph.initializers.items() if chosen(value.const_value.numpy())]
    model.graph.inputs.extend(model.graph.initializers[name] for name in names)
    model.ir_version = ir_version
    onnx_ir.save(model, out)
    return names


def test_a_default_stays_an_input(tmp_path):
    """Since version 4 of ONNX an initializer that is an input, too, is a default that a caller may override."""
    whole, before, after = (tmp_path / f"{name}.onnx" for name in ("whole", "before", "after"))
    export(WRITINGS["stacked"], whole, "older")
    (factor,) = with_inputs(whole, before, chosen=lambda tensor: tensor.max() == 1.5)
    assert len(mx_driving.onnx.fuse(before, after).replaced) == 1
    fed = {factor: np.array(-3, np.float32)}
    np.testing.assert_allclose(run(after, inputs(), **fed), run(before, inputs(), **fed), atol=1e-5)
    assert np.abs(run(after, inputs(), **fed) - run(after, inputs())).max() > 1


@pytest.mark.parametrize("number", [1.0, 2.0, 30, None])
def test_a_default_that_decides_what_is_sampled(number, tmp_path):
    """2 and 1 of 2 * locations - 1, lengths of levels, and everything."""
    whole, before = tmp_path / "whole.onnx", tmp_path / "before.onnx"
    export(WRITINGS["stacked"], whole, "older")
    with_inputs(whole, before, chosen=lambda tensor: number is None or (tensor.max() == number and tensor.size < 3))
    with pytest.raises(ValueError, match=r"an input with a default|its grid is not|does not fix|no tensors have the shapes"):
        mx_driving.onnx.fuse(before, tmp_path / "after.onnx")


def test_before_version_4_nothing_is_overridden(tmp_path):
    """There, every initializer had to be an input, and onnxruntime takes them for constants."""
    whole, before, after = (tmp_path / f"{name}.onnx" for name in ("whole", "before", "after"))
    export(Stacked(masked), whole, "older", 11)
    assert with_inputs(whole, before, ir_version=3)
    assert len(mx_driving.onnx.fuse(before, after).replaced) == 1
    np.testing.assert_allclose(run(after, inputs()), run(before, inputs()), atol=1e-5)
