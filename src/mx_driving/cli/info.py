"""`mx-driving info`: facts for a bug report, as a block to paste."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform

import torch

import mx_driving_portable

from .. import __distribution__, _backends, backends
from .._backends import choose
from .._io import print_json
from .._measure.report import find_processor
from .._operator.description import OPERATORS
from .start import Json

LABELS = {"native": "native C++", "triton": "Triton", "reference": "reference"}  # backend that `choose` returns -> its label
PACKAGES = (__distribution__, "torch", "numpy", "triton", "onnx", "onnxruntime", "transformers")


def info(as_json: Json = False) -> None:
    """Print versions, the processor and the kernel of each operator, as a block to paste into a bug report.

    Example: `mx-driving info --json`
    """
    versions: dict[str, str | None] = {"python": platform.python_version(), **dict.fromkeys(PACKAGES)}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    versions["torch"] = str(torch.__version__)  # __version__ also names CUDA's version.
    accelerators = []
    if torch.accelerator.is_available() and (accelerator := torch.accelerator.current_accelerator()):
        kind = accelerator.type  # Devices without names, such as mps, are listed by type.
        find_name = getattr(torch.get_device_module(accelerator), "get_device_name", lambda index: kind)
        accelerators = [find_name(index) for index in range(torch.accelerator.device_count())]
    facts = {
        "versions": versions,
        "system": platform.platform(),
        "processor": find_processor(),
        "accelerators": accelerators,
        "instruction_set": None if _backends.native.why_not() else _backends.native.isa(),
        "threads": torch.get_num_threads(),
        "kernels": backends(),
        "beside": mx_driving_portable.beside(),
    }
    if as_json:
        print_json(facts)
        return
    # Lines of at most 80 columns, unless a name or a sentence is long.
    words = [f"{name} {version or 'none'}" for name, version in versions.items()]
    print("versions      " + ", ".join(words[:3]))
    print("              " + ", ".join(words[3:]))
    print(f"system        {facts['system']}")
    print(f"processor     {facts['processor']}")
    print(f"instructions  {facts['instruction_set'] or 'none: the native library is not used'}")
    print(f"threads       {facts['threads']}")
    print(f"accelerators  {', '.join(accelerators) or 'none'}\n")
    devices = ("cpu", "xpu" if "xpu" in facts["kernels"] else "cuda")
    for name, operator in OPERATORS.items():
        labels = [f"{device}: {LABELS[choose(operator, device)[0]]}" for device in devices]
        print(f"{name:39} {', '.join(labels)}")
    print()
    for device, sentences in facts["kernels"].items():
        for sentence in dict.fromkeys(sentences.values()):
            print(f"{device}: {sentence}")
    if facts["beside"]:
        print(f"beside: {facts['beside']}")
