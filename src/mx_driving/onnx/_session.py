"""Sessions of onnxruntime, and their inputs. onnxruntime is imported when the first session is opened."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from .._operator.problems import Problem

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
_DTYPES = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(bool)": np.bool_,
    "tensor(float16)": np.float16,
    **{f"tensor({sign}int{bits})": getattr(np, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)},
}


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


def run_session(running: Any, arrays: Arrays) -> dict[str, Any]:
    """Return the outputs by name. Arrays that are not inputs of the file are ignored."""
    names = {described.name for described in running.get_inputs()}
    outputs = running.run(None, {name: array for name, array in arrays.items() if name in names})
    return dict(zip((described.name for described in running.get_outputs()), outputs, strict=True))


def make_inputs(running: Any, arrays: Arrays, defaults: Arrays | None = None) -> dict[str, Array]:
    """Return `arrays`, which must contain all inputs without a default.

    If `arrays` is empty, make inputs: random floats, ones of other dtypes, and a batch of 1.
    """
    defaults = defaults or {}
    required = {described.name: described for described in running.get_inputs()}
    if not arrays:
        random, made = np.random.default_rng(0), {}
        for name, described in required.items():
            if name in defaults:
                made[name] = defaults[name]
                continue
            sizes = [1 if axis == 0 and not isinstance(size, int) else size for axis, size in enumerate(described.shape)]
            if free := [str(size) for size in sizes if not isinstance(size, int)]:
                raise Problem(f"--inputs must have {name!r}, whose sizes {', '.join(free)} the file leaves free; got none")
            if (dtype := _DTYPES.get(described.type)) is None:
                raise Problem(f"--inputs must have {name!r}, of type {described.type}; got none")
            made[name] = random.random(sizes).astype(dtype) if np.dtype(dtype).kind == "f" else np.ones(sizes, dtype)
        return made
    allowed = required | {described.name: described for described in running.get_overridable_initializers()}
    if unknown := [name for name in arrays if name not in allowed]:
        raise Problem(f"--inputs must have arrays for the file's inputs, {', '.join(allowed)}; got {', '.join(unknown)}")
    needed = [name for name in required if name not in defaults]
    if missing := [name for name in needed if name not in arrays]:
        raise Problem(f"--inputs must have all inputs of the file, {', '.join(needed)}; got no {', '.join(missing)}")
    for name, array in arrays.items():
        dtype, shape = _DTYPES.get(allowed[name].type, array.dtype), allowed[name].shape or array.shape
        sizes = zip(shape, array.shape, strict=False)
        fits = len(shape) == array.ndim and all(not isinstance(fixed, int) or fixed == size for fixed, size in sizes)
        if array.dtype != dtype or not fits:
            rule = f"{np.dtype(dtype).name} of shape ({', '.join(map(str, shape))})"
            raise Problem(f"--inputs must have {name!r} as {rule}; got {array.dtype.name} of shape {array.shape}")
    return {**{name: array for name, array in defaults.items() if name in required}, **arrays}
