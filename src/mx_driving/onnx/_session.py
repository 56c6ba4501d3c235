"""Sessions of onnxruntime. onnxruntime is imported when the first session is opened."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir


def open_session(
    model: Path | ir.Model,
    *,
    library: str = "",
    optimise: bool = True,
    threads: int = 0,
    provider: str = "CPUExecutionProvider",
    devices: Sequence[Any] = (),
    settings: dict[str, str] | None = None,
) -> Any:
    """Open a session of a file or a model.

    `library` is the path of our library, which registers our nodes. `devices` of a plugin, with its `settings`, run the session
    in place of `provider`. `threads=0` leaves the number to onnxruntime.
    """
    onnxruntime: Any = importlib.import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # print nothing, because errors are raised
    options.intra_op_num_threads = threads
    if not optimise:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if library:
        options.register_custom_ops_library(library)
    if devices:
        options.add_provider_for_devices(devices, settings or {})
    source = model if isinstance(model, Path) else ir.serde.serialize_model(model).SerializeToString()
    return onnxruntime.InferenceSession(source, options, providers=None if devices else [provider])


def is_missing_kernel(error: Exception) -> bool:
    """Return whether onnxruntime refused a model because it has no kernel for a node."""
    onnxruntime: Any = importlib.import_module("onnxruntime")
    return isinstance(error, onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented)
