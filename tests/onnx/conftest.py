"""Paths of files that tests of `fuse` and `verify` read and write."""

import onnx_writings
import pytest


@pytest.fixture
def before(tmp_path):
    return tmp_path / "before.onnx"


@pytest.fixture
def after(tmp_path):
    return tmp_path / "after.onnx"


@pytest.fixture(scope="session")
def stacked(tmp_path_factory):
    """A file with attention of fixed sizes. Tests do not change it."""
    path = tmp_path_factory.mktemp("files") / "stacked.onnx"
    onnx_writings.export(onnx_writings.Stacked(), path, "older, fixed sizes")
    return path
