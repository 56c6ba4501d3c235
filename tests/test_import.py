"""Importing registers and does nothing else; backends() says what runs."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import cases
import pytest

import mx_driving
from mx_driving import _native

MEASURE = """
import json, pathlib, sys, time, torch
before, start = set(sys.modules), time.perf_counter()
import mx_driving
spent = time.perf_counter() - start
maps = pathlib.Path("/proc/self/maps").read_text() if sys.platform == "linux" else ""
new = sorted(m for m in set(sys.modules) - before if "." not in m)
print(json.dumps({"spent": spent, "loaded": "libmx_driving" in maps, "new": new}))
"""


def test_import_only_registers():
    runs = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-W", "error", "-c", MEASURE], capture_output=True, text=True, check=True)
        assert done.stdout.count("\n") == 1  # nothing printed but the measurement
        assert done.stderr == ""
        runs.append(json.loads(done.stdout))
    assert not runs[0]["loaded"]
    assert not {"rich", "typer", "numpy", "matplotlib", "triton"} & set(runs[0]["new"])
    assert min(run["spent"] for run in runs) < 0.06


def test_backends_names_kernel_and_instruction_set(implementation):
    found = mx_driving.backends()
    assert set(found) == {"cpu", "cuda", "other"}
    for device in found.values():
        assert tuple(device) == cases.OPERATORS
    isa = _native.isa()
    assert all(f"native C++, {isa}," in sentence for sentence in found["cpu"].values())
    assert all(sentence.startswith("reference: ") for sentence in found["other"].values())


def test_without_the_library_the_reference_serves_and_says_why():
    code = (
        "import pathlib, torch, mx_driving\n"
        "from mx_driving import _native\n"
        "_native._library_path = lambda: pathlib.Path('/nowhere/libmx_driving.so')\n"
        "print(mx_driving.backends()['cpu']['multi_scale_deformable_attn'])\n"
        "args = (torch.ones(1, 1, 1, 1), torch.tensor([[1, 1]]), torch.tensor([0]))\n"
        "rest = (torch.full((1, 1, 1, 1, 1, 2), 0.5), torch.ones(1, 1, 1, 1, 1))\n"
        "print(mx_driving.multi_scale_deformable_attn(*args, *rest).item())\n"
        "try:\n"
        "    mx_driving.multi_scale_deformable_attn(args[0], args[1], args[2] + 1, *rest)\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == "reference: libmx_driving.so is not in the package: it was not built or not installed"
    assert lines[1] == "1.0"
    assert lines[2].startswith("value_level_start_index[0] must leave room")


def test_unknown_isa_is_refused():
    with pytest.raises(ValueError, match="isa must be one of"), _native.use_isa("sse9"):
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="reads ELF symbols")
def test_only_the_c_interface_is_exported():
    """Nothing of C++ leaks: no other library in the process can take the place of a function of this one."""
    library = _native._library_path()
    names = subprocess.run(["nm", "-C", "--defined-only", "-D", str(library)], capture_output=True, text=True, check=True)
    exported = [line.split(maxsplit=2)[2] for line in names.stdout.splitlines()]
    assert all(re.match(r"(mxd|acl)", name) for name in exported), exported
    assert "mxd_multi_scale_deformable_attn" in exported


def test_version_is_the_distributions():
    text = (pathlib.Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert f'version = "{mx_driving.__version__}"' in text
    assert os.path.isfile(_native._library_path())
