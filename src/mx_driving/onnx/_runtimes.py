"""Sessions of onnxruntime, which is imported when the first session is opened, and other runtimes of ONNX files.

A runtime is a function (path, inputs by name) -> outputs by name.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from .. import _backends
from .._io import read_arrays, temporary_folder
from .._operator.rules import Problem, first_line, need
from ..config import library_path

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
_DTYPES = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(bool)": np.bool_,
    "tensor(float16)": np.float16,
    **{f"tensor({sign}int{bits})": getattr(np, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
Run = Callable[[Path, Arrays], Arrays]
# Provider -> its settings. OpenVINO may compute in 16 bits by default.
_OPTIONS = {"OpenVINOExecutionProvider": {"load_config": '{"CPU": {"INFERENCE_PRECISION_HINT": "f32"}}'}}
_REGISTERED: set[str] = set()  # providers of plugin libraries, which onnxruntime accepts only once


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
    in place of `provider`. `threads=0` leaves the number of threads to onnxruntime.
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


def open_with_library(path: Path, **options: Any) -> Any:
    """Return a session with our nodes and torch's number of threads. `options` go to open_session."""
    if reason := _backends.native.why_not():
        raise RuntimeError(reason)
    return open_session(path, library=str(library_path()), threads=torch.get_num_threads(), **options)


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

    If `arrays` is empty, make inputs: random numbers for floats, 1 for other dtypes; a first axis of free size gets size 1.
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


# Runtimes


class Failed(Exception):
    """Raised if a runtime gives no outputs. The message is the reason, a clause of the report."""


def find_runtime(runtime: str) -> Run:
    """Return the runtime with this name, or a runtime that runs this command line."""
    name, _, provider = runtime.partition(":")
    if runtime not in _PYTHON and name != "onnxruntime":
        words = []
        with contextlib.suppress(ValueError):  # an unclosed quotation mark
            words = shlex.split(runtime)
        if not words or shutil.which(words[0]) is None:
            raise Problem(f"--runtime must be onnxruntime, {', '.join(_PYTHON)} or a program that is there; got {runtime!r}")
        return lambda path, arrays: _run_program(words, path, arrays)
    need(f"--runtime {name}", name, name)
    run = _make_onnxruntime(provider) if name == "onnxruntime" else _PYTHON[name]

    def run_or_fail(path: Path, arrays: Arrays) -> Arrays:
        try:
            return run(path, arrays)
        except (Problem, Failed):
            raise
        except Exception as error:
            raise Failed((str(error).strip() or type(error).__name__).splitlines()[-1]) from None

    return run_or_fail


def _make_onnxruntime(provider: str) -> Run:
    """Return a runtime with a provider of onnxruntime, built in or from a plugin package."""
    onnxruntime: Any = importlib.import_module("onnxruntime")
    providers = onnxruntime.get_available_providers()
    plugins: dict[str, Any] = {}  # provider -> package, for the installed packages onnxruntime_ep_*
    for name in [module.name for module in pkgutil.iter_modules() if module.name.startswith("onnxruntime_ep_")]:
        with contextlib.suppress(ImportError, AttributeError):  # a package may consist of dependencies alone
            package = importlib.import_module(name)
            plugins |= dict.fromkeys(package.get_ep_names(), package)
    if provider and provider not in (*providers, *plugins):
        names = ", ".join(dict.fromkeys([*providers, *plugins]))
        advice = "others are packages such as onnxruntime-ep-webgpu"
        raise Problem(f"--runtime onnxruntime:NAME must name one of its providers, {names} ({advice}); got {provider!r}")
    devices = []
    if provider and provider not in providers:  # Load the plugin's library once for the process, and take its first device.
        rule = f"--runtime onnxruntime:{provider} must have a library and a device here"
        try:
            path = plugins[provider].get_library_path()
            if provider not in _REGISTERED:
                onnxruntime.register_execution_provider_library(provider, path)
                _REGISTERED.add(provider)
        except Exception as error:  # onnxruntime and packages raise their own classes
            raise Problem(f"{rule}; got {first_line(error)}") from None
        devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == provider][:1]
        if not devices:
            raise Problem(f"{rule}; got no device for {path}")
    options = {"provider": provider or "CPUExecutionProvider", "devices": devices, "settings": _OPTIONS.get(provider)}
    return lambda path, arrays: run_session(open_with_library(path, **options), arrays)


def _run_openvino(path: Path, arrays: Arrays) -> Arrays:
    """Run on OpenVINO's CPU device in the file's dtypes, because the device's default may be 16 bits."""
    core = importlib.import_module("openvino").Core()
    compiled = core.compile_model(core.read_model(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    outputs = compiled({name: array for name, array in arrays.items() if any(name in i.get_names() for i in compiled.inputs)})
    return {name: outputs[port] for port in compiled.outputs for name in port.get_names()}


def _run_tensorrt(path: Path, arrays: Arrays) -> Arrays:
    """Run with TensorRT's parser and builder, in float32 without TF32."""
    trt: Any = importlib.import_module("tensorrt")
    logger = trt.Logger(trt.Logger.ERROR)
    trt.init_libnvinfer_plugins(logger, "")
    builder = trt.Builder(logger)
    network, config = builder.create_network(0), builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(path)):
        raise Failed(f"its parser says: {parser.get_error(0).desc()}")
    profile = builder.create_optimization_profile()
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    for tensor in inputs:
        profile.set_shape(tensor.name, *[arrays[tensor.name].shape] * 3)
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise Failed("its builder gives no engine")
    engine = trt.Runtime(logger).deserialize_cuda_engine(plan)
    context = engine.create_execution_context()
    tensors = {tensor.name: torch.from_numpy(np.ascontiguousarray(arrays[tensor.name])).cuda() for tensor in inputs}
    for name, tensor in tensors.items():
        context.set_input_shape(name, tuple(tensor.shape))
    for i in range(network.num_outputs):
        name = network.get_output(i).name
        kind = getattr(torch, np.dtype(trt.nptype(engine.get_tensor_dtype(name))).name)
        tensors[name] = torch.empty(tuple(context.get_tensor_shape(name)), dtype=kind, device="cuda")
    for name, tensor in tensors.items():
        context.set_tensor_address(name, tensor.data_ptr())
    stream = torch.cuda.current_stream()
    if not context.execute_async_v3(stream.cuda_stream):
        raise Failed("its engine does not run")
    stream.synchronize()
    return {name: tensor.cpu().numpy() for name, tensor in tensors.items()}


def _run_program(words: list[str], path: Path, arrays: Arrays) -> Arrays:
    """Run `program ... model.onnx inputs.npz outputs.npz`."""
    with temporary_folder() as folder:
        inputs, outputs = folder / "inputs.npz", folder / "outputs.npz"
        np.savez(inputs, **arrays)  # pyright: ignore[reportArgumentType]
        command = [*words, str(path), str(inputs), str(outputs)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        except OSError as error:
            raise Failed(f"the program does not start: {error.strerror or error}") from None
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines()
            raise Failed(f"the program ends with status {done.returncode}" + (f": {lines[-1]}" if lines else ""))
        try:
            return read_arrays("what the program writes", outputs)
        except Problem as problem:
            raise Failed(str(problem)) from None


_PYTHON: dict[str, Run] = {"openvino": _run_openvino, "tensorrt": _run_tensorrt}
