"""mx_driving.patcher: the vendor's names for patching. Patches without an effect here warn."""

import importlib
import sys
import types

import pytest
import torch
from test_patching import GOOD, calls, module_of

from mx_driving import patcher
from mx_driving._patch import _patch
from mx_driving.patcher import Patch, PatcherBuilder


@pytest.fixture
def library(monkeypatch):
    """Return a library whose function `core` is a deformable sampling core."""
    module = module_of(GOOD.replace("def deformable", "def core"), "core", "some_library")
    module.core.__module__ = "some_library"
    monkeypatch.setitem(sys.modules, "some_library", module)
    yield module
    for change in list(_patch._changes.values()):  # patches of patcher stay after the block, as in the vendor's package
        change.use(own=True)
    _patch._changes.clear()


def test_msda_is_patch(library):
    assert calls(library.core) == 0
    with PatcherBuilder().add_module_patch("some_library", Patch(patcher.msda)).build() as applied:
        assert calls(library.core) == 1
        applied.apply()  # the second call does nothing
    assert calls(library.core) == 1  # the patch stays after the block, as in the vendor's package


def test_a_patch_of_ones_own(library):
    """Patches get the module and their options, in the order of their priority. A disabled patch does not run."""
    seen = []

    def first(module, options):
        seen.append((module, options))

    def second(module, options):
        seen.append(options["word"])

    def third(module, options):
        seen.append("disabled")

    builder = PatcherBuilder().add_module_patch("some_library", Patch(second, {"word": 2}, priority=5), Patch(third))
    assert builder.add_module_patch("some_library", Patch(first)).disable_patches("third") is builder
    with builder.build():
        pass
    assert seen == [(library, {}), 2]


def test_failures_are_said_and_stop_nothing(library):
    def broken(module, options):
        raise AttributeError("no such thing")

    def silent(module, options):
        raise AttributeError("nor this")

    seen = []
    builder = PatcherBuilder().add_module_patch("not_there", Patch(seen.append))
    builder.add_module_patch("some_library", Patch(broken), Patch(silent, patch_failure_warning=False))
    builder.add_module_patch("some_library", Patch(lambda module, options: seen.append(module)))
    with pytest.warns(UserWarning, match="cannot") as warned, builder.build():
        pass
    assert [str(w.message) for w in warned] == [
        "mx_driving.patcher cannot import not_there: No module named 'not_there'",
        "mx_driving.patcher cannot apply broken to some_library: no such thing",
    ]
    assert seen == [library]


PATHS = [name for name in sys.modules if name.startswith("mx_driving.patcher.")]
ACTIVE = {"msda", "numpy_type", "patch_mmcv_version", "Patch", "Patcher", "PatcherBuilder"}
NEEDLESS = [(path, name) for path in PATHS for name in importlib.import_module(path).__all__ if name not in ACTIVE]


@pytest.mark.parametrize(("path", "name"), NEEDLESS)
def test_patches_that_have_nothing_to_do_say_so(path, name, library):
    """They warn under both of the vendor's import paths, and leave the library unchanged."""
    patch = getattr(patcher, name)
    assert getattr(importlib.import_module(path), name) is patch
    before = dict(vars(library))
    builder = PatcherBuilder().add_module_patch("some_library", Patch(patch))
    with pytest.warns(UserWarning, match=f"leaves some_library as it is: {name} ") as warned, builder.build():
        pass
    assert len(warned) == 1
    assert vars(library) == before


def test_old_libraries_are_mended(monkeypatch):
    numpy = types.ModuleType("numpy")
    vars(numpy)["int"] = "its own"
    patcher.numpy_type(numpy, {})
    assert (numpy.bool, numpy.float, numpy.object, numpy.int) == (bool, float, object, "its own")

    seen = []
    mmcv = types.ModuleType("mmcv")
    vars(mmcv)["__version__"] = "1.7.2"

    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name in ("mmdet", "mmdet3d"):
                seen.append((name, vars(mmcv)["__version__"]))

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    monkeypatch.setitem(sys.modules, "mmcv", mmcv)
    monkeypatch.delitem(sys.modules, "mmdet", raising=False)
    patcher.patch_mmcv_version("1.6.0")
    assert seen == [("mmdet", "1.6.0")]  # mmdet is not installed, so mmdet3d is not imported
    assert vars(mmcv)["__version__"] == "1.7.2"


def test_what_is_not_there_is_refused():
    with pytest.raises(AttributeError, match=r"mx_driving\.patcher\.AtomicPatch is the vendor's, for its device"):
        patcher.AtomicPatch  # noqa: B018
    for method in ("with_profiling", "brake_at"):
        with pytest.raises(NotImplementedError, match=f"PatcherBuilder.{method} .*; on a PC, "):
            getattr(PatcherBuilder(), method)(500)


def test_names_of_cuda_stay_without_the_stand_in():
    """tests/helpers/npu_programs.py tests the transfer with the stand-in."""
    before = torch.cuda.is_available
    with PatcherBuilder().build():
        assert torch.cuda.is_available is before
