"""`mx-driving`: teaches, checks, and exits 0 only when all is well."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from mx_driving import _native
from mx_driving.cli import check as check_module
from mx_driving.cli.app import app
from mx_driving.cli.examples import EXAMPLES


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def small_examples(monkeypatch):
    """The two small ones of the four."""
    monkeypatch.setattr(check_module, "EXAMPLES", (EXAMPLES[0], EXAMPLES[2]))


def run(*args):
    return CliRunner().invoke(app, list(args))


def test_help_teaches():
    for args, words in (
        (["--help"], ("check", "demo")),
        (["check", "--help"], ("float64 reference", "Exit status 0", "--quick", "Example")),
        (["demo", "--help"], ("--rig", "gradient")),
    ):
        result = run(*args)
        assert result.exit_code == 0
        assert all(word in result.output for word in words)


def test_python_m():
    done = subprocess.run([sys.executable, "-m", "mx_driving", "check", "--help"], capture_output=True, text=True, check=True)
    assert "Usage: mx-driving check" in done.stdout


def test_check_passes(small_examples):
    result = run("check", "--quick", "--dtype", "float32", "--dtype", "bfloat16")
    assert result.exit_code == 0, result.output
    assert "all is well" in result.output
    for word in ("multi_scale_deformable_attn", "deformable_aggregation", _native.isa(), "locations", "bfloat16"):
        assert word in result.output


@pytest.mark.parametrize("name", ["multi_scale_deformable_attn", "deformable_aggregation_backward"])
def test_check_fails_when_a_kernel_is_wrong(name):
    """In a process of its own, where a kernel is replaced by one that is off by a hundred-thousandth."""
    code = (
        "import torch, sys\n"
        "from mx_driving import _native\n"
        "from mx_driving.cli.app import app\n"
        "from mx_driving.cli import check as module\n"
        "from mx_driving.cli.examples import EXAMPLES\n"
        "module.EXAMPLES = (EXAMPLES[0], EXAMPLES[2])\n"
        f"right = _native.{name}\n"
        "def off(x):\n"
        "    return tuple(t * 1.00001 for t in x) if isinstance(x, tuple) else x * 1.00001\n"
        "kernel = lambda *a: off(right(*a))\n"
        "broken = torch.library.Library('mx_driving', 'IMPL')\n"
        f"broken.impl('{name}', kernel, 'CPU', allow_override=True)\n"
        "sys.argv = ['mx-driving', 'check', '--quick']\n"
        "app()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "wrong:" in done.stdout


def test_check_fails_when_the_cpu_has_only_the_reference(small_examples, monkeypatch):
    monkeypatch.setattr(_native, "why_not", lambda: "it was not built")
    result = run("check", "--quick")
    assert result.exit_code == 1
    assert "runs on the reference" in result.output
