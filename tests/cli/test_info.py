"""`mx-driving info` prints a block for a bug report. Without torch, the command line prints a sentence."""

import json
import platform
import subprocess
import sys

import torch
from typer.testing import CliRunner

import mx_driving
from mx_driving import _backends
from mx_driving.cli.app import app

BLOCKED = "import sys; sys.modules['torch'] = None; from mx_driving_portable.command import main; main()"


def run(*arguments):
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    return result.output


def test_json_holds_the_facts():
    facts = json.loads(run("info", "--json"))
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["versions"]["python"] == platform.python_version()
    assert facts["kernels"] == mx_driving.backends()


def test_the_block_names_each_operators_kernel_in_a_line():
    lines = run("info").splitlines()
    operators = mx_driving.backends()["cpu"]
    for name in operators:
        (line,) = [line for line in lines if line.startswith(name + " ")]
        assert "cpu: " in line
        assert len(line) <= 80
    assert any(torch.__version__ in line for line in lines)


def test_any_accelerator_is_named(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(_backends.triton, "why_not", lambda *device: None)
    monkeypatch.setattr(torch.xpu, "get_device_name", "Arc {}".format)
    facts = json.loads(run("info", "--json"))
    assert facts["accelerators"] == ["Arc 0", "Arc 1"]
    assert "cpu: native C++, xpu: Triton" in run("info")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    assert json.loads(run("info", "--json"))["accelerators"] == ["mps", "mps"]


def test_a_missing_torch_is_a_sentence():
    ended = subprocess.run([sys.executable, "-c", BLOCKED, "info"], capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.startswith("mx-driving: torch must be installed (pip install torch); got: ")
    assert ended.stderr.count("\n") == 1
