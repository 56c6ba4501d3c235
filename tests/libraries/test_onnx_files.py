"""`mx_driving.onnx.fuse` on files that the libraries' own exporters write: every place is found, and the outputs stay."""

import importlib.metadata

import pytest
from onnx_files import EXPORTERS, compare, fused

BY_MODEL = {(exporter.distribution, exporter.model): exporter for exporter in EXPORTERS}


@pytest.mark.parametrize(("library", "file"), BY_MODEL)
def test_a_library_s_own_file(library, file, tmp_path):
    try:
        importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        pytest.fail(f"{library} must be installed, as tests/libraries/requirements.txt says; got no such package")
    exporter = BY_MODEL[library, file]
    before, found = fused(exporter, tmp_path, 320)
    assert len(found.replaced) == exporter.places
    assert not found.left
    compared = compare(before, found.path, 0)
    assert compared.off <= 6, f"queries of {file} must stay in their places; {compared.off} do not"
    assert compared.difference < 1e-3, f"outputs of {file} must be its own; they differ by {compared.difference:.1e}"
