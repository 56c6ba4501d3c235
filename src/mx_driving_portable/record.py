"""Record calls of sampling operators and of bev_pool_v3 where they run. `mx-driving replay` judges them on any other machine.

This file needs torch and nothing else of ours, so that it can be copied to a machine with a device:

    python record.py --out calls program.py its arguments
    python -m mx_driving_portable.record --out calls program.py its arguments

or, around a part of a program that runs already:

    with record.recording("calls", every=101):
        train()

Every `every`-th call of each function is copied to the host: inputs, output and, if backward() runs, the gradients. A thread
writes the copies. The calls compute what they would compute without the recorder: it adds nothing to the autograd graph. A call
that cannot be recorded is counted and named. A full disk ends the recording, not the program. Code under torch.compile is not
recorded and runs as compiled.

Written for Python 3.8 and later. The first wrapped function imports torch: the import has effects, and a program may set
OMP_NUM_THREADS before its own.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.abc
import itertools
import json
import numbers
import os
import pathlib
import queue
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FORMAT", "FUNCTIONS", "Recorder", "main", "recording", "start"]

FORMAT = 1  # of a recording; mx_driving.replay reads this one
EVERY = 101  # a prime: the layers of a model are recorded in turn
MEGABYTES = 1000.0
_WAITING = 512e6  # bytes on their way to the disk; while there are more, no call is copied
_ABSENT: Any = object()

_ATTENTION, _AGGREGATION = "multi_scale_deformable_attn", "deformable_aggregation"
_GEOMETRIC, _POOL = "geometric_kernel_attention", "bev_pool_v3"
DIFFERENTIABLE = {
    _ATTENTION: ("value", "locations", "weights"),
    _AGGREGATION: ("value", "locations", "weights"),
    _GEOMETRIC: ("value", "weights"),
    _POOL: ("feat", "depth"),
}
_OPERATORS = [operator + direction for operator in DIFFERENTIABLE for direction in ("", "_backward")]


class Function(NamedTuple):
    """A function of the vendor's library or of a compiled extension that computes one of the operators.

    module: the last part of its module's name, or all of it; "mx_driving" stands for every module of the vendor's library.
    parameters: in our words. The function writes to those that end in "=". One that is given no such tensors returns them.
    """

    module: str
    name: str
    operator: str
    parameters: str

    @property
    def backward(self) -> bool:
        return "grad_output" in self.parameters


_SAMPLES = "value shapes starts locations weights"
_GRADIENTS = f"{_SAMPLES} grad_output grad_value= grad_locations= grad_weights="
_RANKS, _INTERVALS = "ranks_depth ranks_feat ranks_bev", "interval_lengths interval_starts"
_LIFT, _CELLS = f"depth feat {_RANKS} bev_feat_shape", "B D H W"
_LIFT_GRADIENTS = f"grad_output grad_depth= grad_feat= depth feat {_RANKS} {_INTERVALS}"
_VOXELS = "B n C X Y Z geom_xyz feat output= memo"


def _rows(module: str, operator: str, parameters: str, *names: str) -> list[Function]:
    return [Function(module, name, operator, parameters) for name in names]


FUNCTIONS = (
    *_rows("mx_driving", _ATTENTION, _SAMPLES, _ATTENTION, "npu_multi_scale_deformable_attn_function"),
    *_rows("mx_driving", _ATTENTION, _SAMPLES, "MultiScaleDeformableAttnFunction.apply"),
    *_rows("mx_driving", _AGGREGATION, _SAMPLES, _AGGREGATION, "npu_deformable_aggregation", "AdsDeformableAggregation.apply"),
    *_rows("mx_driving", _GEOMETRIC, _SAMPLES, _GEOMETRIC, "npu_geometric_kernel_attention"),
    *_rows("mx_driving", _GEOMETRIC, _SAMPLES, "npu_geometric_kernel_attention_func", "GeometricKernelAttentionFunc.apply"),
    *_rows("mx_driving", _POOL, _LIFT, "bev_pool_v3", "BEVPoolV3.apply"),
    *_rows("mx_driving", _POOL, f"{_LIFT} interval_starts interval_lengths", "bev_pool_v2"),
    *_rows("mx_driving", _POOL, f"feat geom_feat {_CELLS}", "bev_pool"),
    *_rows("mx_driving", _POOL, "geom_xyz feat voxel_num", "npu_voxel_pooling_train"),
    *(
        row
        for module in ("MultiScaleDeformableAttention", "detrex._C", "adet._C", "groundingdino._C")
        for row in (
            Function(module, "ms_deform_attn_forward", _ATTENTION, _SAMPLES),
            Function(module, "ms_deform_attn_backward", _ATTENTION, f"{_SAMPLES} grad_output"),
        )
    ),
    *_rows("mmcv._ext", _ATTENTION, _SAMPLES, "ms_deform_attn_forward"),
    *_rows("mmcv._ext", _ATTENTION, _GRADIENTS, "ms_deform_attn_backward"),
    # also with the cameras' maps apart, value [bs, cam, num_feat, c]: Sparse4D before v3, GaussianFormer, Far3D
    *_rows("deformable_aggregation_ext", _AGGREGATION, _SAMPLES, "deformable_aggregation_forward"),
    *_rows("deformable_aggregation_ext", _AGGREGATION, _GRADIENTS, "deformable_aggregation_backward"),
    *_rows("GeometricKernelAttention", _GEOMETRIC, _SAMPLES, "geometric_kernel_attn_cuda_forward"),
    *_rows("GeometricKernelAttention", _GEOMETRIC, f"{_SAMPLES} grad_output", "geometric_kernel_attn_cuda_backward"),
    *_rows("bev_pool_v2_ext", _POOL, f"depth feat output= {_RANKS} {_INTERVALS}", "bev_pool_v2_forward"),
    *_rows("bev_pool_v2_ext", _POOL, _LIFT_GRADIENTS, "bev_pool_v2_backward", "bev_pool_v2_backward_opt"),
    *_rows("bev_pool_ext", _POOL, f"feat geom_feat {_INTERVALS} {_CELLS}", "bev_pool_forward"),
    *_rows("bev_pool_ext", _POOL, f"grad_output geom_feat {_INTERVALS} {_CELLS}", "bev_pool_backward"),
    *_rows("voxel_pooling_train_ext", _POOL, _VOXELS, "voxel_pooling_train_forward_wrapper"),
    *_rows("voxel_pooling_ext", _POOL, _VOXELS, "voxel_pooling_forward_wrapper"),
    *_rows(
        "voxel_pooling_inference_ext",
        _POOL,
        "B cams bins height width C X Y Z geom_xyz depth feat output=",
        "voxel_pooling_inference_forward_wrapper",
    ),
)
_OPTIONAL = ("starts", "memo", "grad_value", "grad_locations", "grad_weights")
_SIZES = ("bev_feat_shape", "voxel_num", "B", "D", "H", "W", "X", "Y", "Z", "n", "C", "cams", "bins", "height", "width")
_KEYWORDS: dict[str, str] = {  # the vendor's, mmcv's and transformers' names of parameters -> ours
    **dict.fromkeys(("feature_maps", "mc_ms_feat"), "value"),
    **dict.fromkeys(("value_spatial_shapes", "spatial_shapes", "spatial_shape", "shape"), "shapes"),
    **dict.fromkeys(("value_level_start_index", "level_start_index", "scale_start_index", "offset"), "starts"),
    **dict.fromkeys(("sampling_locations", "sample_locations", "sampling_location"), "locations"),
    **dict.fromkeys(("attention_weights", "weight"), "weights"),
    "input_features": "feat",  # of npu_voxel_pooling_train
}
_LIBRARIES = ("torch", "mmcv", "mmengine", "mx_driving", "mx_driving_portable", "contextlib", "functools")
_PACKAGES = ("mx-driving", "mx-driving-portable", "torch_npu", "mmcv", "mmcv-full", "MultiScaleDeformableAttention")


def functions_of(module: str) -> dict[str, Function]:
    """Return the functions of a module by name."""
    vendor, last = module.partition(".")[0] == "mx_driving", module.rpartition(".")[2]
    names = ("mx_driving",) if vendor else (module, last)
    return {row.name: row for row in FUNCTIONS if row.module in names}


def _function_named(full_name: str, operator: str) -> Function:
    """Return the row of a function that the user names: that of a known function whose name ends alike, or the operator's."""
    name, direction = operator.partition("_backward")[:2]
    for row in FUNCTIONS:
        if row.operator == name and row.backward == bool(direction) and ("." + full_name).endswith("." + row.name):
            return row
    parameters = _LIFT if name == _POOL else _SAMPLES
    if direction:
        parameters = "" if name == _POOL else _GRADIENTS
    return Function("", name, name, parameters)


def _say(sentence: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            print(f"record: {sentence}", file=sys.stderr, flush=True)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error).strip().split("\n")[0] or type(error).__name__


def _is_ordinary(t: Any) -> bool:
    """Return whether t is a tensor with data of its own: no subclass such as DTensor, and no wrapper of vmap or grad."""
    import torch

    is_wrapper = getattr(getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", lambda t: False)
    ordinary = type(t) in (torch.Tensor, torch.nn.Parameter) and t.layout == torch.strided
    return ordinary and t.device.type != "meta" and not is_wrapper(t)


def _is_tracing_or_capturing(args: Any) -> bool:
    """Return whether torch records the call into a graph, of which a copy would become a part."""
    import torch

    on_cuda = any(isinstance(a, torch.Tensor) and a.is_cuda for a in args)
    return torch.jit.is_tracing() or (on_cuda and torch.cuda.is_current_stream_capturing())  # pyright: ignore


def _is_autocast_on(device: str) -> bool:
    import torch

    try:
        return torch.is_autocast_enabled(device)  # pyright: ignore
    except (RuntimeError, TypeError):  # torch before 2.4, or a device without autocast
        older = {"cpu": "is_autocast_cpu_enabled", "cuda": "is_autocast_enabled"}.get(device, "")
        owner: Any = torch if older else getattr(torch, device, None)
        return bool(getattr(owner, older or "is_autocast_enabled", bool)())


def _has_nan(t: Tensor) -> bool:
    """Sum first, which is quick. The sum is NaN if an entry is NaN, and also where infinities cancel."""
    total = t.detach().sum()
    return bool(total != total) and bool(t.isnan().any())


def _without_extras(args: Any) -> list[Any]:
    """Return the arguments of a sampling function without those that only some forms of it have."""
    import torch

    args = list(args)
    while args and not isinstance(args[0], torch.Tensor):
        del args[0]  # self
    if len(args) > 2 and isinstance(args[2], (list, tuple)) and args[2] and isinstance(args[2][0], (list, tuple)):
        del args[2]  # transformers' list of shapes, after their tensor
    if len(args) > 2 and isinstance(args[2], torch.Tensor) and args[2].is_floating_point():
        args.insert(2, None)  # mmcv's plain torch has no starts: levels lie one after the other
    return args


def _as_ints(size: Any) -> Any:
    """Return a size, or a sequence of sizes, as ints: JSON takes no NumPy numbers and no tensors."""
    if isinstance(size, (list, tuple)) or getattr(size, "ndim", 0):
        return [int(number) for number in size]
    return int(size)


def _bind(row: Function, args: Any, kwargs: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Return the inputs, the tensors that the function writes to, and the sizes, by name."""
    import torch

    names = [name.rstrip("=") for name in row.parameters.split()]
    if not names:
        raise TypeError("a function of the gradients of bev_pool_v3 must have the name of a known one")
    positional = args if row.operator == _POOL else _without_extras(args)
    bound = dict(zip(names, positional))  # noqa: B905, zip has no strict before Python 3.10
    bound.update({_KEYWORDS.get(name, name): a for name, a in kwargs.items()})
    missing = [name for name in names if name not in bound and name not in _OPTIONAL]
    if missing:
        raise TypeError(f"{missing[0]} must be given; got {', '.join(bound) or 'nothing'}")
    unused = {name for name in _OPTIONAL if isinstance(bound.get(name), int)} | {"memo"}  # im2col_step where gradients would be
    bound = {name: a for name, a in bound.items() if a is not None and name in names and name not in unused}
    sizes = {name: _as_ints(bound.pop(name)) for name in _SIZES if name in bound}
    for table in ("shapes", "starts"):
        if isinstance(bound.get(table), (list, tuple)):
            bound[table] = torch.tensor(bound[table])
    for name, a in bound.items():
        if not _is_ordinary(a):
            raise TypeError(f"{name} must be an ordinary tensor with data; got {type(a).__name__}")
    outputs = {name: bound.pop(name) for name in names if name + "=" in row.parameters.split() and name in bound}
    return bound, outputs, sizes


def _caller() -> str:
    """Return file and line of the call: the innermost frame that is not a library's."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__")).partition(".")[0]
        if name not in _LIBRARIES and frame.f_code.co_filename != __file__:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class _WrappedFunction:
    """A wrapped function and the counters of its calls."""

    def __init__(self, name: str, row: Function) -> None:
        self.name, self.row, self.operator, self.backward = name, row, row.operator, row.backward
        self.number = itertools.count()  # its next() is atomic
        self.calls = self.recorded = self.skipped = 0
        self.not_kept, self.unread = 0, ""  # calls or gradients that could not be recorded, and the reason of the last

    def lose(self, error: Exception) -> None:
        """Count a call that cannot be recorded. The recording goes on."""
        self.not_kept, self.unread = self.not_kept + 1, _reason(error)


class _HostCopy:
    """A copy in host memory. A device may still be writing it: `event` tells when it is complete."""

    def __init__(self, t: Tensor) -> None:
        import torch

        self.event: Any = None
        self.strides = None if t.is_contiguous() else list(t.stride())
        t = t.detach()
        if t.device.type == "cpu":
            self.tensor = t.clone(memory_format=torch.contiguous_format)
            return
        device: Any = getattr(torch, t.device.type, None)
        try:
            self.tensor = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
            self.tensor.copy_(t, non_blocking=True)
            self.event = device.Event()
            self.event.record(device.current_stream(t.device))
        except (AttributeError, NotImplementedError, RuntimeError, TypeError):  # no pinned memory, or no events there
            self.tensor, self.event = t.cpu().contiguous(), None

    def wait(self) -> Tensor:
        if self.event is not None:
            self.event.synchronize()
        return self.tensor


class _OpenCall:
    """A call that is being recorded. Inputs are copied at once, or after a look at the results if only a NaN is wanted."""

    def __init__(self, function: _WrappedFunction, index: int, args: Any, kwargs: dict[str, Any]) -> None:
        import torch

        self.function, self.stem = function, ""
        self.inputs, self.outputs, self.sizes = _bind(function.row, args, kwargs)
        self.versions = [(t, t._version) for t in self.inputs.values() if not t.is_inference()]
        self.copies: dict[str, _HostCopy] = {}
        device = next(iter(self.inputs.values())).device
        self.about: dict[str, Any] = {"function": function.name, "operator": function.operator, "index": index}
        self.about.update(direction="backward" if function.backward else "forward", device=str(device), caller=_caller())
        self.about.update(autocast=_is_autocast_on(device.type), form=function.row.name, sizes=self.sizes)
        self.edges = self._edges() if torch.is_grad_enabled() and not function.backward else {}

    def _edges(self) -> dict[str, tuple[Any, int]]:
        """Return where autograd brings the gradient of each input that has one. An edge that several inputs share brings the
        sum of their gradients, which is no result of the operator: leave these inputs out, and name them."""
        names = DIFFERENTIABLE[self.function.operator]
        inputs = {name: self.inputs[name] for name in names if name in self.inputs and self.inputs[name].requires_grad}
        # a leaf's node is behind the node of anything that is made from it
        nodes = {name: t.grad_fn or t.expand_as(t).grad_fn.next_functions[0][0] for name, t in inputs.items()}  # pyright: ignore
        edges = {name: (nodes[name], t.output_nr) for name, t in inputs.items()}
        shared = [name for name, edge in edges.items() if list(edges.values()).count(edge) > 1]
        if shared:
            self.about["shared"] = shared
        return {name: edge for name, edge in edges.items() if name not in shared}

    def copy_inputs(self, reason: str) -> None:
        if any(t._version != version for t, version in self.versions):
            raise TypeError("inputs must be as they were when the call began; got changed ones, so that a NaN is not recorded")
        self.copies.update({name: _HostCopy(t) for name, t in self.inputs.items()})
        strides = {name: copy.strides for name, copy in self.copies.items() if copy.strides}
        self.about.update(reason=reason, strides=strides, packed="starts" not in self.copies)

    def copy_flags_of_outputs(self) -> None:
        """Record whether the outputs are zero: a function may add to them."""
        self.copies.update({f"before_{name}": _HostCopy(t.any()) for name, t in self.outputs.items()})
        self.about["in_place"] = bool(self.outputs)

    def results(self, returned: Any) -> dict[str, Tensor]:
        """Return what the function computed, by name."""
        if self.outputs:
            results = dict(self.outputs)
        elif not self.function.backward:
            results = {"output": returned}
        else:
            tensors = returned if isinstance(returned, (list, tuple)) else [returned]
            names = ["grad_" + name for name in DIFFERENTIABLE[self.function.operator]]
            results = dict(zip(names, tensors))  # noqa: B905
        if not results or not all(_is_ordinary(t) for t in results.values()):
            raise TypeError(f"the function must give tensors or write to some; got {type(returned).__name__}")
        return results


class _GradientHooks:
    """Hooks on the nodes that a call put into the graph. They read the gradients that leave the nodes, and change nothing."""

    def __init__(self, recorder: Recorder, call: _OpenCall, output: Tensor) -> None:
        self.recorder, self.call, self.output_nr = recorder, call, output.output_nr
        self.gradients: dict[str, Any] = {}
        last, hits, nodes = output.grad_fn, {}, [output.grad_fn]
        ends = {id(node) for node, _ in call.edges.values()}
        for node in nodes:  # it grows; the call's nodes lie between its output and its inputs
            if node is not None and id(node) not in ends and id(node) not in hits and len(hits) < 500:
                edges = list(enumerate(node.next_functions))
                hits[id(node)] = [(k, name) for k, edge in edges for name, end in call.edges.items() if edge == end]
                nodes += [below for _, (below, _) in edges]
        hooked = {id(node): node for node in nodes if hits.get(id(node))}
        self.left = len(hooked)
        for node in {**hooked, id(last): last}.values() if hooked else ():
            node.register_hook(functools.partial(self._arrive, node is last, hits[id(node)]))  # pyright: ignore

    def _arrive(self, last: bool, hits: list[tuple[int, str]], grad_inputs: Any, grad_outputs: Any) -> None:
        import torch

        if not self.left or self.recorder.closed:
            return  # `left` is 0 in a second backward through the same graph
        with self.recorder.ours(self.call.function), torch.no_grad():
            gradients = self.gradients
            if last and grad_outputs[self.output_nr] is not None:
                gradients["grad_output"] = grad_outputs[self.output_nr]
            for k, name in ((k, "grad_" + name) for k, name in hits if grad_inputs[k] is not None):
                gradients[name] = gradients[name] + grad_inputs[k] if name in gradients else grad_inputs[k]
            self.left -= bool(hits)
            if not self.left:
                self.gradients = {}
                if len(gradients) > 1 and "grad_output" in gradients:
                    self.recorder.gradients(self.call, gradients)


class _Writer(threading.Thread):
    """Writes files one after another, and the manifest after them. A full disk ends the recording."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(name="record", daemon=True)
        self.recorder, self.waiting, self.num_bytes, self.reported = recorder, 0, 0, 0.0
        self.queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.calls: dict[str, Any] = {}

    def put(self, stem: str, about: dict[str, Any], copies: dict[str, _HostCopy]) -> None:
        size = sum(copy.tensor.numel() * copy.tensor.element_size() for copy in copies.values())
        self.waiting += size
        self.queue.put((stem, about, copies, size))

    def run(self) -> None:
        for work in iter(self.queue.get, None):
            with self._losing(work):
                if not self.recorder.failed:
                    self._write(*work)
            self.waiting -= work[-1]
        with self._losing(None):
            self._write_manifest()

    @contextlib.contextmanager
    def _losing(self, work: Any) -> Iterator[None]:
        """End the recording if the disk is full. Any other error, such as a lost device, loses the call alone."""
        import tempfile

        try:
            yield
        except Exception as error:
            try:
                if work is None or isinstance(error, OSError):
                    raise
                with tempfile.TemporaryFile(dir=self.recorder.folder) as file:  # torch has errors of its own
                    file.write(bytes(work[-1]))
            except Exception as full:
                self.recorder.fail(full)
            else:
                self.recorder.functions[work[1]["function"]].lose(error)

    def _write(self, stem: str, about: dict[str, Any], copies: dict[str, _HostCopy], size: int) -> None:
        import torch

        tensors = {name: copy.wait() for name, copy in copies.items()}
        if about.pop("in_place", False):
            flags = [bool(tensors.pop(name)) for name in list(tensors) if name.startswith("before_")]
            about["cleared"] = not any(flags)
        path = self.recorder.folder / f"{stem}.pt"
        file = {"metadata": {"format": str(FORMAT), "call": json.dumps(about)}, "tensors": tensors}
        self._write_whole(path, lambda part: torch.save(file, part))
        self.num_bytes += size
        self.recorder.functions[about["function"]].recorded += "of" not in about
        self.calls[path.name] = {**about, "tensors": {name: list(t.shape) for name, t in tensors.items()}}
        if time.monotonic() > self.reported + 2:  # the process may be killed
            self._write_manifest()

    def _write_manifest(self) -> None:
        path, facts = self.recorder.folder / "manifest.json", self.recorder.facts()
        text = json.dumps({**facts, "calls": self.calls}, indent=1)
        try:
            self._write_whole(path, lambda part: part.write_text(text))
        except OSError:  # no room or no inode for another file: without its calls the text fits into the existing file
            with contextlib.suppress(OSError), path.open("r+") as file:
                file.write(json.dumps({**facts, "calls": {}}, indent=1))
                file.truncate()
            raise
        self.reported = time.monotonic()

    def _write_whole(self, path: pathlib.Path, write: Callable[[pathlib.Path], Any]) -> None:
        """Write a file that is there whole or not at all."""
        part = path.with_name(path.name + ".part")
        try:
            write(part)
            os.replace(part, path)
        finally:
            with contextlib.suppress(OSError):
                part.unlink()


class _WrappingFinder(importlib.abc.MetaPathFinder):
    """Lets the recorder wrap the functions of a module as soon as it is imported."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if not self.recorder.watches(name):
            return None
        later = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(name, path, target) for finder in later if hasattr(finder, "find_spec"))
        spec: Any = next(filter(None, specs), None)
        loader = spec and spec.loader
        execute = getattr(loader, "exec_module", None)
        if execute is not None:

            def execute_and_wrap(module: types.ModuleType) -> None:
                with contextlib.suppress(AttributeError):
                    del loader.exec_module  # a loader may have several modules
                execute(module)
                self.recorder.wrap(module)

            loader.exec_module = execute_and_wrap
        return spec


def _make_folder(out: Any) -> pathlib.Path:
    """Make the folder of a recording. Each process of a distributed program has one of its own."""
    folder = pathlib.Path(out)
    if os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ:
        folder /= f"rank-{os.environ['RANK']}"
    try:
        if not os.fspath(out):
            raise OSError("no name")
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise OSError("one with files")
    except (OSError, ValueError) as error:  # a name with a zero byte is a ValueError
        name, fact = os.fspath(out) and str(folder), getattr(error, "strerror", None) or error
        raise ValueError(f"out must be a new or an empty folder; got {name!r}, {fact}") from None
    return folder


class Recorder:
    """Wraps the known functions of modules that are imported, now and later, until `stop`."""

    def __init__(
        self, out: Any, every: int = EVERY, nan: bool = False, megabytes: float = MEGABYTES, functions: Any = None
    ) -> None:
        if not isinstance(every, numbers.Real) or not every >= 1 or every % 1:
            raise ValueError(f"every must be a whole number of 1 or more; got {every!r}")
        if not isinstance(megabytes, numbers.Real) or not megabytes > 0:
            raise ValueError(f"megabytes must be more than 0; got {megabytes!r}")
        if not isinstance(functions or {}, dict):
            raise ValueError(f"functions must be a dict of names and operators; got {type(functions).__name__}")
        for name, operator in (functions or {}).items():
            if operator not in _OPERATORS or "." not in str(name) or name.startswith("torch.ops."):
                rule = f"name a Python function of a module, and one of {', '.join(_OPERATORS)}"
                raise ValueError(f"functions must {rule}; got {name}={operator}")
        self.named = {name: _function_named(name, operator) for name, operator in (functions or {}).items()}
        self.folder = _make_folder(out)
        self.every, self.nan, self.budget, self.copied = int(every), bool(nan), float(megabytes) * 1e6, 0
        # no more samples: the budget is spent; no more calls; no more gradients either; after an error; calls are not counted
        self.spent = self.ended = self.closed = self.failed = self.gone = False
        self.functions: dict[str, _WrappedFunction] = {}
        self.started, self.finished, self.process, self.why = _now(), "", os.getpid(), ""
        self._numbers, self._local, self._lock = itertools.count(), threading.local(), threading.Lock()
        self._wrappers: dict[int, tuple[Any, Any]] = {}  # of originals and of wrappers, so that none is wrapped twice
        self._undo: list[tuple[Any, str, Any]] = []
        self._finder, self.writer = _WrappingFinder(self), _Writer(self)

    def start(self) -> Recorder:
        sys.meta_path.insert(0, self._finder)
        for name, module in list(sys.modules.items()):
            if self.watches(name) and isinstance(module, types.ModuleType):
                self.wrap(module)
        self._replace_imported_names()
        self.writer.start()
        atexit.register(self.stop)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._end_in_child)
        return self

    def stop(self) -> None:
        """Restore the functions, write what is waiting, and print a summary."""
        atexit.unregister(self.stop)
        if self._finder not in sys.meta_path or os.getpid() != self.process:
            return
        self.ended = self.closed = self.gone = True
        self.finished = _now()
        sys.meta_path.remove(self._finder)
        for owner, name, before in reversed(self._undo):
            delattr(owner, name) if before is _ABSENT else setattr(owner, name, before)
        self.writer.queue.put(None)
        self.writer.join()
        self._print_summary()

    def _end_in_child(self) -> None:
        self.ended = self.closed = self.gone = True  # the thread that writes is the parent's

    def _print_summary(self) -> None:
        for name in self.named:
            if name not in self.functions:
                _say(f"{name} was never imported, or is no function")
        for f in self.functions.values():
            if f.not_kept:
                _say(f"not recorded of {f.name}: {f.not_kept}, calls and gradients; the last: {f.unread}")
            if f.skipped:
                _say(f"not recorded of {f.name}: {f.skipped} calls, made while {_WAITING / 1e6:g} MB waited for the disk")
        calls, recorded = (sum(getattr(f, count) for f in self.functions.values()) for count in ("calls", "recorded"))
        none = "" if calls else "; under torch.compile none is seen"
        _say(f"{recorded} of {calls} calls recorded, {self.writer.num_bytes / 1e6:.0f} MB in {self.folder}{none}")

    def facts(self) -> dict[str, Any]:
        """Return what the manifest says beside the calls."""
        import platform

        import torch

        counters = ("operator", "backward", "calls", "recorded", "skipped", "not_kept", "unread")
        functions = {name: {key: getattr(f, key) for key in counters} for name, f in self.functions.items() if f.calls}
        options = {"every": self.every, "nan": self.nan, "megabytes": self.budget / 1e6}
        here = {"torch": torch.__version__, "python": platform.python_version(), "system": platform.platform()}
        facts = {"format": FORMAT, "started": self.started, "finished": self.finished, "ended_early": self.why}
        return {**facts, "options": options, "packages": {**here, **_versions()}, "functions": functions}

    def watches(self, module: str) -> bool:
        return bool(functions_of(module)) or any(name.startswith(module + ".") for name in self.named)

    def wrap(self, module: types.ModuleType) -> None:
        """Wrap the known functions of a module."""
        name = module.__name__
        for path, row in functions_of(name).items():
            self._wrap(module, path, f"{'mx_driving' if row.module == 'mx_driving' else name}.{path}", row)
        for full_name, row in self.named.items():
            if full_name.startswith(name + "."):
                self._wrap(module, full_name[len(name) + 1 :], full_name, row)

    def _wrap(self, owner: Any, path: str, name: str, row: Function) -> None:
        *classes, attribute = path.split(".")
        for class_name in classes:
            owner = vars(owner).get(class_name) if owner is not None else None
        if owner is None or not hasattr(owner, "__dict__"):
            return
        if isinstance(owner, type) and attribute == "apply":
            self._wrap_apply(owner, name, row)
            return
        original = vars(owner).get(attribute, _ABSENT)
        function = original.__func__ if isinstance(original, staticmethod) else original
        if callable(function) and not isinstance(function, types.ModuleType) and id(function) not in self._wrappers:
            wrapper = self._wrapper(self.functions.setdefault(name, _WrappedFunction(name, row)), function)
            self._wrappers[id(wrapper)] = (wrapper, wrapper)
            self._wrappers[id(function)] = (function, wrapper)
        if id(function) in self._wrappers:
            new = self._wrappers[id(function)][1]
            self._set(owner, attribute, original, staticmethod(new) if function is not original else new)

    def _wrap_apply(self, owner: type, name: str, row: Function) -> None:
        """Wrap `apply` of an autograd function. Derived classes have forwards of their own: leave them alone."""
        own = vars(owner).get("apply", _ABSENT)
        if id(own) in self._wrappers:
            return
        function = self.functions.setdefault(name, _WrappedFunction(name, row))
        compiling = _compiling()

        def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
            original = super(owner, cls).apply if own is _ABSENT else own.__get__(None, cls)  # pyright: ignore
            if cls is not owner or compiling():
                return original(*args, **kwargs)
            return self.call(function, original, args, kwargs)

        wrapper: Any = classmethod(apply)
        self._wrappers[id(wrapper)] = (wrapper, wrapper)
        self._set(owner, "apply", own, wrapper)

    def _set(self, owner: Any, name: str, before: Any, new: Any) -> None:
        if new is not before:
            setattr(owner, name, new)
            self._undo.append((owner, name, before))

    def _replace_imported_names(self) -> None:
        """Replace the originals in modules that have them from `from mx_driving import ...`."""
        for module in list(sys.modules.values()):
            for name, value in list(getattr(module, "__dict__", {}).items()):
                original, wrapper = self._wrappers.get(id(value), (None, None))
                if original is value and original is not None and isinstance(module, types.ModuleType):
                    self._set(module, name, original, wrapper)

    def _wrapper(self, function: _WrappedFunction, original: Any) -> Any:
        compiling = _compiling()

        @functools.wraps(original)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if compiling():  # torch.compile sees the call alone
                return original(*args, **kwargs)
            return self.call(function, original, args, kwargs)

        return recorded

    def call(self, function: _WrappedFunction, original: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return or raise what the original does, and record the call if it is its turn."""
        if self.gone or getattr(self._local, "inside", False):
            return original(*args, **kwargs)
        index = next(function.number)
        function.calls = index + 1
        chosen = index % self.every == 0 and not self.spent
        call = self._begin(function, index, chosen, args, kwargs) if (chosen or self.nan) and not self.ended else None
        self._local.inside = True
        try:
            returned = original(*args, **kwargs)
        finally:
            self._local.inside = False
        if call is not None:
            self._finish(call, returned)
        return returned

    @contextlib.contextmanager
    def ours(self, function: _WrappedFunction) -> Iterator[None]:
        """Keep our own errors from the program."""
        try:
            yield
        except Exception as error:
            function.lose(error)

    def fail(self, error: Exception) -> None:
        """End the recording, once, with a sentence."""
        with self._lock:
            if self.failed:
                return
            self.failed = self.closed = self.ended = True
        num_files = len(self.writer.calls)
        self.why = f"recording into {self.folder} has ended after {num_files} files: {_reason(error)}; the program goes on"
        _say(self.why)

    def _begin(self, function: _WrappedFunction, index: int, chosen: bool, args: Any, kwargs: Any) -> _OpenCall | None:
        with self.ours(function):
            if _is_tracing_or_capturing((*args, *kwargs.values())):
                return None
            call = _OpenCall(function, index, args, kwargs)
            if chosen and self.writer.waiting > _WAITING:
                function.skipped += 1
            elif chosen:
                call.copy_inputs(f"every {self.every}")
                call.copy_flags_of_outputs()
            return call if call.copies or self.nan else None

    def _finish(self, call: _OpenCall, returned: Any) -> None:
        with self.ours(call.function):
            results = call.results(returned)
            if not self._copy_inputs_of_first_nan(call, results) and call.copies:
                self._hold_to_budget(call, results)
            if call.copies:
                call.copies.update({name: _HostCopy(t) for name, t in results.items()})
                self._put(call)
            output = results.get("output")
            if call.edges and output is not None and output.grad_fn is not None and (call.stem or self.nan):
                _GradientHooks(self, call, output)
            if call.stem:
                call.inputs, call.outputs = {}, {}  # the program may want the memory back

    def _hold_to_budget(self, call: _OpenCall, results: dict[str, Tensor]) -> None:
        """Count what the call and its gradients take. Drop the call, and end the sampling, if that is more than is left."""
        size = sum(t.numel() * t.element_size() for t in (*call.inputs.values(), *results.values()))
        self.copied += size * (2 if call.edges else 1)
        if self.copied > self.budget:
            self.spent, self.ended, call.copies = True, not self.nan, {}
            self.why = f"the budget of {self.budget / 1e6:g} MB is used up; the program goes on"
            _say(self.why)

    def _copy_inputs_of_first_nan(self, call: _OpenCall, results: dict[str, Tensor]) -> bool:
        if not self.nan or not any(_has_nan(t) for t in results.values()):
            return False
        self.nan, self.ended = False, self.spent
        if not call.copies:
            call.copy_inputs("")
        call.about["reason"] = "the first NaN"
        return True

    def gradients(self, call: _OpenCall, found: dict[str, Tensor]) -> None:
        """Write gradients that have arrived, in the middle of a backward of the program."""
        if not call.stem:
            self._copy_inputs_of_first_nan(call, found)
        copies = {name: _HostCopy(t) for name, t in found.items()} if call.stem or call.copies else {}
        if call.stem:
            self.writer.put(f"{call.stem}-gradients", {**call.about, "of": call.stem, "direction": "backward"}, copies)
        elif call.copies:  # a NaN that only the gradients have
            call.copies.update(copies)
            self._put(call)

    def _put(self, call: _OpenCall) -> None:
        call.stem = f"call-{next(self._numbers):06d}"
        self.writer.put(call.stem, call.about, call.copies)
        call.copies = {}


def _compiling() -> Callable[[], bool]:
    import torch

    return getattr(getattr(torch, "compiler", None), "is_compiling", lambda: False)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S")


def _versions() -> dict[str, str]:
    import importlib.metadata

    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def start(out: Any, **options: Any) -> Recorder:
    """Record into a new folder from now on, until `stop` of the returned recorder, or the end of the program.

    Args:
        out: folder to make. Each process of a distributed program makes a folder of its own in it.
        every: record the first call of each function, and then every so many. The default is a prime, so that the layers of a
            model come up in turn.
        nan: also record the first call with a NaN in its output or its gradients, even when the budget is used up. The results
            of all calls are then summed, and on a device the program waits for the sums.
        megabytes: the most to write.
        functions: more functions to wrap, name -> operator, such as {"my_ops.msda": "multi_scale_deformable_attn"}. For a
            function that computes gradients the operator ends in "_backward".

    Raises:
        ValueError: an argument cannot be used.
    """
    return Recorder(out, **options).start()


@contextlib.contextmanager
def recording(out: Any, **options: Any) -> Iterator[Recorder]:
    """`start`, and `stop` at the end of the block."""
    recorder = start(out, **options)
    try:
        yield recorder
    finally:
        recorder.stop()


def _parser() -> Any:
    import argparse

    name = "mx-driving record" if os.path.basename(sys.argv[0]).startswith("mx-driving") else "record.py"
    parser = argparse.ArgumentParser(name, description="Run a program, and record its calls of sampling operators.")
    parser.add_argument("--out", default="calls", help="folder to make (default: calls)")
    parser.add_argument("--every", type=int, default=EVERY, help=f"record every so many calls (default: {EVERY})")
    parser.add_argument("--nan", action="store_true", help="also record the first call with a NaN; a device waits at each call")
    parser.add_argument("--megabytes", type=float, default=MEGABYTES, help=f"the most to write (default: {MEGABYTES:g})")
    parser.add_argument("--function", action="append", default=[], help="another function: package.name=operator")
    parser.add_argument("-m", dest="module", action="store_true", help="program is a module, as in python -m")
    parser.add_argument("program", help="the program to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def main() -> None:
    """Run a program as `python program.py` or `python -m program` would, and record it."""
    import runpy

    parser = _parser()
    options = parser.parse_args()
    functions = dict(name.partition("=")[::2] for name in options.function)
    if not options.module and not os.path.isfile(options.program):
        parser.error(f"program must be a file; got {options.program}")
    try:
        recorder = start(options.out, every=options.every, nan=options.nan, megabytes=options.megabytes, functions=functions)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    sys.argv = [options.program, *options.arguments]
    sys.path[0] = os.getcwd() if options.module else os.path.dirname(os.path.abspath(options.program))
    try:
        if options.module:
            runpy.run_module(options.program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(options.program, run_name="__main__")
    finally:
        recorder.stop()


if __name__ == "__main__":
    main()
