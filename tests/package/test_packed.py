"""Packed programs: archives, PyInstaller, no docstrings. If a file of the package is lost, the package says which and why."""

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch
from programs import load_file

import mx_driving
from mx_driving import __pyinstaller as pyinstaller
from mx_driving import _package_files, config
from mx_driving._operator.description import OPERATORS

SOURCES = pathlib.Path(mx_driving.__file__).parent
SITE = pathlib.Path(torch.__file__).parents[1]
LOST, KNOWN = _package_files.library_path().name, "_patch/known.jsonl"

# A call, the table of `patch` and a kernel repository. Prints warnings, results and the errors about files.
PROGRAM = """
import json, sys, tempfile, warnings
sys.frozen = FROZEN
import torch
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import mx_driving
    from mx_driving._patch import known
    one = torch.ones(1, 1, 1, 1)
    args = one, torch.tensor([[1, 1]]), torch.tensor([0]), torch.full((1, 1, 1, 1, 1, 2), 0.5), one[None]
    outputs = [mx_driving.multi_scale_deformable_attn(*args).item() for _ in range(2)]
said = dict(outputs=outputs, file=mx_driving.__file__, reason=mx_driving.backends()["cpu"]["bev_pool_v3"])
said["warnings"] = [str(w.message) for w in caught if "mx_driving" in str(w.message)]
reads = dict(known=lambda: len(known.read_table()), kernels=lambda: mx_driving.kernels.write(tempfile.mkdtemp()))
for name, read in reads.items():
    try:
        said[name] = str(read())
    except OSError as error:
        said[name] = str(error)
print(json.dumps(said))
"""


def run(folder, *flags, frozen=False):
    """Run the program with the package of a folder or an archive. Without `site`, no editable installation is in the way."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (folder, SITE)))}
    command = [sys.executable, "-S", *flags, "-c", PROGRAM.replace("FROZEN", str(frozen))]
    said = json.loads(subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout)
    assert pathlib.Path(said["file"]).is_relative_to(folder)
    assert said["outputs"] == [1.0, 1.0]
    return said


@pytest.fixture
def copied(tmp_path):
    """Return a folder with the package's files, without the native library."""
    ignore = shutil.ignore_patterns("__pycache__", "*.so", "*.dylib", "*.dll", "cmake", "include")
    for package in ("mx_driving", "mx_driving_portable"):
        shutil.copytree(SOURCES.parent / package, tmp_path / "packed" / package, ignore=ignore)
    return tmp_path / "packed"


def check_reference(said, why):
    sentence = f"{LOST} is not in the package: {why}"
    assert said["reason"].startswith(f"reference: {sentence}")
    assert said["warnings"] == [f"mx_driving computes with plain PyTorch on a CPU, which is slow: {sentence}"]


def test_without_docstrings(copied):
    shutil.copy(_package_files.library_path(), copied / "mx_driving")
    said = run(copied, "-OO")
    assert said["warnings"] == []
    assert said["reason"].startswith("native C++")
    assert int(said["known"]) > 100


def test_an_archive(copied, tmp_path):
    archive = shutil.make_archive(str(tmp_path / "archive"), "zip", copied)
    said = run(archive)
    check_reference(said, "the package is in an archive, from which no library can be loaded; unpack it")
    assert int(said["known"]) > 100
    layers = pathlib.Path(said["kernels"], "build", "torch-cpu", "layers.py")
    assert layers.read_text() == (SOURCES / "kernels/_hub/layers.py").read_text()


@pytest.mark.parametrize("frozen", [False, True])
def test_lost_files(copied, frozen):
    frozen_without = "the program was frozen without it; with PyInstaller, --collect-all mx_driving adds it"
    why = frozen_without if frozen else "it was not built or not installed"
    lost = {"known": KNOWN, "kernels": "kernels/_hub/layers.py"}
    for name in lost.values():
        (copied / "mx_driving" / name).unlink()
    said = run(copied, frozen=frozen)
    check_reference(said, why)
    for key, name in lost.items():
        path = copied / "mx_driving" / name
        assert said[key] == f"{path} must be a file of the package; got none: {path.name} is not in the package: {why}"


def test_what_pyinstaller_collects():
    (folder,) = pyinstaller.get_hook_dirs()
    hook = load_file("hook", pathlib.Path(folder, "hook-mx_driving.py"))
    assert (str(_package_files.library_path()), "mx_driving") in hook.binaries
    assert (config.torch_library(), "mx_driving") in hook.binaries
    texts = {str(f.relative_to(SOURCES)) for f in SOURCES.rglob("*") if f.is_file() and f.suffix not in (".py", ".pyc")}
    texts = {name for name in texts - {"py.typed"} if name.split(os.sep)[0] not in ("cmake", "include")}
    texts -= {pathlib.Path(file).name for file, _ in hook.binaries}
    hub = {f"kernels/_hub/{name}.py" for name in ("__init__", "layers")}
    collected = {str(pathlib.Path(to, pathlib.Path(file).name)): pathlib.Path(file) for file, to in hook.datas}
    assert set(collected) == {os.path.join("mx_driving", name) for name in texts | hub}
    assert all(file.is_file() for file in collected.values())
    assert set(hook.hiddenimports) >= {f"mx_driving._backends.triton.{name}" for name in OPERATORS}


def test_the_distribution_names_the_hook():
    """PyInstaller finds hooks by this entry point."""
    (entry,) = (e for e in importlib.metadata.entry_points(group="pyinstaller40") if e.value.startswith("mx_driving"))
    assert entry.load() is pyinstaller.get_hook_dirs
