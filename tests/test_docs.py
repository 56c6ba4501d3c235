"""Doctests of the doors, and the README's Python snippets, run as they stand."""

from __future__ import annotations

import doctest
import importlib
import pathlib
import re
import socket

import pytest
import torch
import torch.distributed

README = pathlib.Path(__file__).parent.parent / "README.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize(
    "module",
    [
        "mx_driving.ops.multi_scale_deformable_attn",
        "mx_driving.ops.npu_deformable_aggregation",
        "mx_driving.ops.geometric_kernel_attention",
        "mx_driving._library",
        "mx_driving._data_checks",
        "mx_driving.aclnn",
        "mx_driving.onnx",
        "mx_driving.patching._patch",
        "mx_driving.viz",
        "mx_driving.nn._pyramid",
        "mx_driving.nn.multi_scale_deformable_attn",
        "mx_driving.nn.geometric_kernel_attention",
    ],
)
def test_doctests(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0


def test_readme_has_a_snippet_per_operator():
    assert len(SNIPPETS) >= 3


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_readme_snippets_run(snippet, tmp_path, monkeypatch):
    """In a folder of its own, and in the environment that torchrun gives a single process."""
    monkeypatch.chdir(tmp_path)
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    try:
        exec(compile(snippet, str(README), "exec"), {"__name__": "snippet"})
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
