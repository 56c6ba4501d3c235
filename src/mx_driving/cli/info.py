"""`mx-driving info`: facts for a bug report, as a block to paste."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
from typing import Any

import torch

import mx_driving_portable

from .. import __distribution__, _backends, backends
from .._backends import choose
from .._measure.report import find_processor
from .._operator.description import OPERATORS
from .._show import print_json
from .options import Json

LABELS = {"native": "native C++", "triton": "Triton", "reference": "reference"}  # backend that `choose` returns -> its label
PACKAGES = (__distribution__, "torch", "numpy", "triton", "onnx", "onnxruntime", "transformers")


def _collect() -> dict[str, Any]:
    """Return the facts that `--json` prints. Take torch's version from `torch.__version__`, which also names CUDA's."""
    versions: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    versions["torch"] = str(torch.__version__)
    accelerators = []
    if torch.accelerator.is_available() and (device := torch.accelerator.current_accelerator()):
        # A type without names, such as mps, has its type.
        find_name = getattr(torch.get_device_module(device), "get_device_name", lambda index: device.type)
        accelerators = [find_name(index) for index in range(torch.accelerator.device_count())]
    return {
        "versions": {"python": platform.python_version(), **versions},
        "system": platform.platform(),
        "processor": find_processor(),
        "accelerators": accelerators,
        "instruction_set": None if _backends.native.why_not() else _backends.native.isa(),
        "threads": torch.get_num_threads(),
        "kernels": backends(),
        "beside": mx_driving_portable.beside(),
    }


def _make_lines(facts: dict[str, Any]) -> list[str]:
    """Return the facts as lines of at most 80 columns, unless a name or a sentence is long."""
    versions = [f"{name} {version or 'none'}" for name, version in facts["versions"].items()]
    lines = [
        "versions      " + ", ".join(versions[:3]),
        "              " + ", ".join(versions[3:]),
        f"system        {facts['system']}",
        f"processor     {facts['processor']}",
        f"instructions  {facts['instruction_set'] or 'none: the native library is not used'}",
        f"threads       {facts['threads']}",
        f"accelerators  {', '.join(facts['accelerators']) or 'none'}",
        "",
    ]
    devices = ("cpu", "xpu" if "xpu" in facts["kernels"] else "cuda")
    for name, operator in OPERATORS.items():
        labels = [f"{device}: {LABELS[choose(operator, device)[0]]}" for device in devices]
        lines.append(f"{name:39} {', '.join(labels)}")
    lines.append("")
    for device, sentences in facts["kernels"].items():
        lines += [f"{device}: {sentence}" for sentence in dict.fromkeys(sentences.values())]
    return [*lines, f"beside: {facts['beside']}"] if facts["beside"] else lines


def info(as_json: Json = False) -> None:
    """Print versions, the processor and the kernel of each operator, as a block to paste into a bug report.

    Example: `mx-driving info --json`
    """
    facts = _collect()
    if as_json:
        print_json(facts)
    else:
        print("\n".join(_make_lines(facts)))
