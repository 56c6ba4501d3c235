"""Wrong uses of `fuse` and `verify` end in one sentence that names the fault."""

import errno
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnx_writings as writings
import pytest


@pytest.mark.parametrize(
    ("command", "who"),
    [
        (("fuse", "LOOP", "after.onnx"), "path_in must be a file that can be read"),
        (("verify", "LOOP", "--runtime", "onnxruntime"), "path_in must be a file that can be read"),
        (("verify", "STACKED", "--runtime", "onnxruntime", "--inputs", "LOOP"), "--inputs must be an .npz file"),
    ],
)
def test_a_link_to_itself_is_one_sentence(command, who, mx, stacked, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("LOOP").symlink_to("LOOP")
    status, _, problem = mx(*(stacked if word == "STACKED" else word for word in command))
    assert (status, problem) == (2, f"mx-driving: {who}; got LOOP: Too many levels of symbolic links\n")


def test_weights_in_a_link_to_itself(after, tmp_path):
    path = tmp_path / "b.onnx"
    writings.export(writings.Projected(), path, "older")
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights", size_threshold=0)
    (tmp_path / "weights").unlink()
    (tmp_path / "weights").symlink_to("weights")
    writings.assert_refused(tmp_path / "b.onnx", r"path_in must have its weights beside it; got .*, and no file weights")


def test_numbers_in_the_other_order_of_bytes_are_read(mx, stacked, tmp_path):
    swapped = {name: array.astype(array.dtype.newbyteorder()) for name, array in writings.feeds().items()}
    assert not swapped["v"].dtype.isnative
    np.savez(tmp_path / "inputs.npz", **swapped)
    assert mx("verify", stacked, "--runtime", "onnxruntime", "--inputs", tmp_path / "inputs.npz")[::2] == (0, "")


@pytest.mark.parametrize("option", ["--inputs", "--seconds"])
def test_options_that_fuse_would_not_use(option, mx, stacked, after, tmp_path):
    np.savez(tmp_path / "inputs.npz", wrong=np.ones(2))
    number_or_file = "1" if option == "--seconds" else tmp_path / "inputs.npz"
    status, _, problem = mx("fuse", stacked, after, option, number_or_file)
    assert (status, problem) == (2, f"mx-driving: {option} must come with --time, which runs both files; got {option} alone\n")
    assert not after.exists()


def test_a_full_temporary_folder_is_named(mx, stacked, monkeypatch):
    """A full temporary folder is told from a full standard output."""

    def fill(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ir, "save", fill)
    status, _, problem = mx("verify", stacked, "--runtime", "onnxruntime")
    rule = f"the temporary folder {tempfile.gettempdir()} must have room"
    assert (status, problem) == (2, f"mx-driving: {rule}; got No space left on device\n")
