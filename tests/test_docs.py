"""Doctests of the doors, and the README's Python snippets, run as they stand."""

from __future__ import annotations

import doctest
import importlib
import pathlib
import re

import pytest

README = pathlib.Path(__file__).parent.parent / "README.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize(
    "module",
    [
        "mx_driving.ops.multi_scale_deformable_attn",
        "mx_driving.ops.npu_deformable_aggregation",
        "mx_driving.ops.geometric_kernel_attention",
        "mx_driving._library",
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
def test_readme_snippets_run(snippet):
    exec(compile(snippet, str(README), "exec"), {})
