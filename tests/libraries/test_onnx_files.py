"""`mx_driving.onnx.fuse` on files that the libraries' own exporters write: every place is found, and the outputs stay."""

from __future__ import annotations

import importlib.metadata

import numpy as np
import pytest
from onnx_files import EXPORTERS, compared, fused

from mx_driving.measure import models, onnx_files

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
    seen = compared(before, found.path, 320, 0)
    assert seen.difference < 1e-3, f"outputs of {file} must be its own; they differ by {seen.difference:.1e}"
    if seen.off > 6:
        theirs, ours = scores(before), scores(found.path)
        assert np.allclose(ours, theirs, rtol=0, atol=1e-6), (
            f"{seen.off} queries of {file} change places, and so do scores"
        )


def scores(path):
    """In their order. Where they nearly tie, rounding alone puts queries in other places, and the same scores are in each."""
    running = onnx_files.session(path)
    photograph = models.photograph(320, 320).numpy()
    return running.run(["scores"], {running.get_inputs()[0].name: photograph})[0]
