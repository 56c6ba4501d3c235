"""The faults of `make mutants` can be planted: each quote stands once in its file. What moves one needs another quote."""

from __future__ import annotations

import importlib
import pathlib


def test_every_fault_is_found(monkeypatch):
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parents[1] / "mutants")
    assert len(importlib.import_module("run").faults()) > 200
