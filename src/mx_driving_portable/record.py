"""Record calls of sampling operators and of bev_pool_v3 where they run; `mx-driving replay` judges them on any other machine.

This file needs torch and nothing else of ours, so that it can be copied to a machine with a device:

    python record.py --out calls program.py its arguments
    python -m mx_driving_portable.record --out calls program.py its arguments

or, around a part of a program that runs already:

    with record.recording("calls", every=101):
        train()

Every `every`-th call of each known function is copied to the host: inputs and output, and when autograd comes by, the
gradients. A thread writes them. The calls compute what they would have computed without it: nothing is put into the autograd
graph. A call that cannot be recorded is counted and named, and a disk that takes no more ends the recording alone. Code under
torch.compile is not recorded; it runs as compiled.

Written for Python 3.8 and later. torch is imported when the first function is wrapped, because an import has effects: a
program may set OMP_NUM_THREADS before its own.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import datetime
import functools
import importlib.abc
import importlib.metadata
import itertools
import json
import math
import numbers
import os
import pathlib
import platform
import queue
import runpy
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FORMAT", "Recorder", "main", "recording", "start"]

FORMAT = 1  # of a recording; mx_driving.replay reads this one
EVERY = 101  # a prime: the layers of a model are recorded in turn
MEGABYTES = 1000.0
_WAITING = 512e6  # bytes on their way to the disk; while there are more, no call is copied
_KEPT = 256e6  # bytes of memory that are kept for the next copies
_ABSENT: Any = object()

_SCALE, _AGGREGATION, _GEOMETRIC = "multi_scale_deformable_attn", "deformable_aggregation", "geometric_kernel_attention"
_POOL = "bev_pool_v3"
_OPERATORS = [name + ending for name in (_SCALE, _AGGREGATION, _GEOMETRIC, _POOL) for ending in ("", "_backward")]
_VENDOR = {  # in whichever module of the vendor's mx_driving they are
    _SCALE: _SCALE,
    "npu_multi_scale_deformable_attn_function": _SCALE,
    "MultiScaleDeformableAttnFunction.apply": _SCALE,
    _AGGREGATION: _AGGREGATION,
    "npu_deformable_aggregation": _AGGREGATION,
    "AdsDeformableAggregation.apply": _AGGREGATION,
    _GEOMETRIC: _GEOMETRIC,
    "npu_geometric_kernel_attention": _GEOMETRIC,
    "npu_geometric_kernel_attention_func": _GEOMETRIC,
    "GeometricKernelAttentionFunc.apply": _GEOMETRIC,
    **dict.fromkeys(("bev_pool_v3", "BEVPoolV3.apply", "bev_pool_v2", "bev_pool", "npu_voxel_pooling_train"), _POOL),
}
_RANKS, _INTERVALS = "ranks_depth ranks_feat ranks_bev", "interval_lengths interval_starts"
_TRAIN = "B n C X Y Z geom_xyz feat output= memo"
_POOLS = {  # the parameters of each function that sums points into cells; it writes to those with "="
    **dict.fromkeys(("bev_pool_v3", "BEVPoolV3.apply"), f"depth feat {_RANKS} bev_feat_shape"),
    "bev_pool_v2": f"depth feat {_RANKS} bev_feat_shape interval_starts interval_lengths",
    "bev_pool": "feat geom_feat B D H W",
    "npu_voxel_pooling_train": "geom_xyz feat voxel_num",
    "bev_pool_v2_forward": f"depth feat output= {_RANKS} {_INTERVALS}",
    **dict.fromkeys(
        ("bev_pool_v2_backward", "bev_pool_v2_backward_opt"),
        f"grad_output grad_depth= grad_feat= depth feat {_RANKS} {_INTERVALS}",
    ),
    "bev_pool_forward": f"feat geom_feat {_INTERVALS} B D H W",
    "bev_pool_backward": f"grad_output geom_feat {_INTERVALS} B D H W",
    **dict.fromkeys(("voxel_pooling_train_forward_wrapper", "voxel_pooling_forward_wrapper"), _TRAIN),
    "voxel_pooling_inference_forward_wrapper": "B cams bins height width C X Y Z geom_xyz depth feat output=",
}
_ATTENTION = {"ms_deform_attn_forward": _SCALE, "ms_deform_attn_backward": _SCALE + "_backward"}
_EXTENSIONS = {  # compiled modules, in whichever package they are
    "MultiScaleDeformableAttention": _ATTENTION,
    "deformable_aggregation_ext": {
        "deformable_aggregation_forward": _AGGREGATION,
        "deformable_aggregation_backward": _AGGREGATION + "_backward",
    },
    "GeometricKernelAttention": {
        "geometric_kernel_attn_cuda_forward": _GEOMETRIC,
        "geometric_kernel_attn_cuda_backward": _GEOMETRIC + "_backward",
    },
    "bev_pool_v2_ext": {
        "bev_pool_v2_forward": _POOL,
        "bev_pool_v2_backward": _POOL + "_backward",
        "bev_pool_v2_backward_opt": _POOL + "_backward",
    },
    "bev_pool_ext": {"bev_pool_forward": _POOL, "bev_pool_backward": _POOL + "_backward"},
    "voxel_pooling_train_ext": {"voxel_pooling_train_forward_wrapper": _POOL},
    "voxel_pooling_ext": {"voxel_pooling_forward_wrapper": _POOL},
    "voxel_pooling_inference_ext": {"voxel_pooling_inference_forward_wrapper": _POOL},
}
_PLACES = ("value", "shapes", "starts", "locations", "weights", "grad_output")
_LEARNED = {
    **dict.fromkeys((_SCALE, _AGGREGATION), ("value", "locations", "weights")),
    _GEOMETRIC: ("value", "weights"),
    _POOL: ("feat", "depth"),
}
_NAMES: dict[str, str] = {  # the vendor's, mmcv's and transformers' names of parameters -> places
    **dict.fromkeys(("value", "feature_maps", "mc_ms_feat"), "value"),
    **dict.fromkeys(("value_spatial_shapes", "spatial_shapes", "spatial_shape", "shape"), "shapes"),
    **dict.fromkeys(("value_level_start_index", "level_start_index", "scale_start_index", "offset"), "starts"),
    **dict.fromkeys(("sampling_locations", "sample_locations", "sampling_location", "locations"), "locations"),
    **dict.fromkeys(("attention_weights", "weights", "weight"), "weights"),
    "grad_output": "grad_output",
    "input_features": "feat",  # of npu_voxel_pooling_train
}
_LIBRARIES = ("torch", "mmcv", "mmengine", "mx_driving", "mx_driving_portable", "contextlib", "functools")
_PACKAGES = (
    "mx_driving",
    "mx-driving",
    "mx-driving-portable",
    "torch_npu",
    "mmcv",
    "mmcv-full",
    "MultiScaleDeformableAttention",
)


def _say(sentence: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            print(f"record: {sentence}", file=sys.stderr, flush=True)


def _fact(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error).strip().split("\n")[0] or type(error).__name__


def _known(module: str) -> dict[str, str]:
    """Functions of a module, and their operators."""
    if module == "mmcv._ext":
        return _ATTENTION
    if module.partition(".")[0] == "mx_driving":
        return _VENDOR
    return _EXTENSIONS.get(module.rpartition(".")[2], {})


class _Function:
    """A function that is wrapped, and what became of its calls."""

    def __init__(self, name: str, operator: str) -> None:
        self.name, self.backward = name, operator.endswith("_backward")
        self.operator = operator[: -len("_backward")] if self.backward else operator
        self.learned = _LEARNED[self.operator]
        self.form = next((form for form in _POOLS if ("." + name).endswith("." + form)), self.operator)
        self.number = itertools.count()  # its next() is atomic
        self.calls = self.recorded = self.skipped = 0
        self.not_kept, self.unread = 0, ""  # calls or gradients that could not be recorded, and why the last could not

    def lose(self, error: Exception) -> None:
        """Count a call that cannot be recorded. The recording goes on."""
        self.not_kept, self.unread = self.not_kept + 1, _fact(error)


class _Buffers:
    """Memory of copies that have been written, for the next ones: to touch new memory costs more than to copy into it."""

    def __init__(self) -> None:
        self.free: dict[int, list[Tensor]] = {}
        self.held = 0

    def take(self, t: Tensor) -> Tensor:
        import torch

        size = t.numel() * t.element_size()
        with torch.inference_mode(False):  # a tensor of inference mode could not be written again outside of it
            try:
                found = self.free[size].pop()
            except (KeyError, IndexError):
                return torch.empty(t.shape, dtype=t.dtype)
            self.held -= size
            return found.view(t.dtype).view(t.shape)

    def give(self, t: Tensor) -> None:
        import torch

        size = t.numel() * t.element_size()
        if size >= 4096 and self.held + size <= _KEPT:
            self.held += size
            self.free.setdefault(size, []).append(t.view(-1).view(torch.uint8))


class _Host:
    """A copy on the host. A device may still be writing it; `event` says when it is done."""

    buffers = _Buffers()

    def __init__(self, t: Tensor) -> None:
        import torch

        self.event: Any = None
        self.strides = None if t.is_contiguous() else list(t.stride())
        t = t.detach()
        if t.device.type == "cpu":
            self.tensor = self.buffers.take(t).copy_(t)
            return
        device: Any = getattr(torch, t.device.type, None)
        try:
            self.tensor = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
            self.tensor.copy_(t, non_blocking=True)
            self.event = device.Event()
            self.event.record(device.current_stream(t.device))
        except (AttributeError, NotImplementedError, RuntimeError, TypeError):  # no pinned memory, or no events there
            self.tensor, self.event = t.cpu().contiguous(), None

    def ready(self) -> Tensor:
        if self.event is not None:
            self.event.synchronize()
        return self.tensor


def _plain(t: Tensor) -> bool:
    """A tensor with data of its own: no subclass such as DTensor or FakeTensor, and no wrapper of vmap or grad."""
    import torch

    wrapped = getattr(getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", lambda t: False)
    ordinary = type(t) in (torch.Tensor, torch.nn.Parameter) and t.layout == torch.strided
    return ordinary and t.device.type != "meta" and not wrapped(t)


def _written_down(t: Tensor) -> bool:
    """Whether torch writes down what is called, so that a copy of ours would become a part of it."""
    import torch

    return torch.jit.is_tracing() or (t.is_cuda and torch.cuda.is_current_stream_capturing())  # pyright: ignore


def _autocast(device: str) -> bool:
    """Return whether autocast is on for a type of device."""
    import torch

    try:
        return torch.is_autocast_enabled(device)  # pyright: ignore
    except (RuntimeError, TypeError):  # an older torch, or a device that has no autocast
        module: Any = getattr(torch, device, None)
        return bool(getattr(module, "is_autocast_enabled", torch.is_autocast_enabled)())


def _has_nan(t: Tensor) -> bool:
    """A sum is quick, and NaN if a term is. It is also NaN where infinities cancel."""
    total = t.detach().sum()
    return bool(total != total) and bool(t.isnan().any())


def _bind(function: _Function, args: Any, kwargs: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """The inputs by place, and the tensors after them by name, to which a backward function writes."""
    import torch

    given = list(args)
    while given and not isinstance(given[0], torch.Tensor):
        del given[0]  # self
    if len(given) > 2 and isinstance(given[2], (list, tuple)) and given[2] and isinstance(given[2][0], (list, tuple)):
        del given[2]  # transformers' list of shapes, after their tensor
    if len(given) > 2 and isinstance(given[2], torch.Tensor) and given[2].is_floating_point():
        given.insert(2, None)  # mmcv's plain torch: the levels lie one after the other
    found = {_PLACES[i]: a for i, a in enumerate(given[:6])}
    found.update({_NAMES[name]: a for name, a in kwargs.items() if name in _NAMES})
    for table in ("shapes", "starts"):
        if isinstance(found.get(table), (list, tuple)):
            found[table] = torch.tensor(found[table])
    found = {place: a for place, a in found.items() if a is not None and not isinstance(a, int)}  # im2col_step
    for place in ("value", "shapes", "locations", "weights"):
        if not isinstance(found.get(place), torch.Tensor):
            raise TypeError(f"{place} must be a tensor; got {type(found.get(place)).__name__}")
    return _ordinary(found), _gradients(function, [a for a in given[6:] if isinstance(a, torch.Tensor)]), {}


def _bind_pool(
    function: _Function, args: Any, kwargs: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """The same of a function that sums points into cells, and its sizes."""
    import torch

    names = _POOLS[function.form].split()
    if function.backward and "grad_output" not in names:
        raise TypeError(f"its name must end as one of {', '.join(form for form in _POOLS if 'backward' in form)}")
    found = {names[i].rstrip("="): a for i, a in enumerate(args[: len(names)])}
    found.update({_NAMES.get(name, name): a for name, a in kwargs.items()})
    missing = [name for name in names if name.rstrip("=") not in found]
    if missing:
        raise TypeError(f"{missing[0]} must be given; got {', '.join(found)}")
    found = {name: a for name, a in found.items() if a is not None and name != "memo"}
    tensors = _ordinary({name: a for name, a in found.items() if isinstance(a, torch.Tensor)})
    written = {name[:-1]: tensors.pop(name[:-1]) for name in names if name.endswith("=")}
    sizes = {name: _whole_numbers(a) for name, a in found.items() if name not in tensors and name not in written}
    return tensors, written, sizes


def _whole_numbers(size: Any) -> Any:
    """Return a size, or a list of sizes, as ints: JSON takes no NumPy numbers and no tensors."""
    sequence = isinstance(size, (list, tuple)) or getattr(size, "ndim", 0)
    return [int(number) for number in size] if sequence else int(size)


def _gradients(function: _Function, tensors: Any) -> dict[str, Tensor]:
    """In the order of the inputs that they belong to."""
    return {"grad_" + name: tensors[i] for i, name in enumerate(function.learned[: len(tensors)])}


def _ordinary(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    if not all(map(_plain, tensors.values())):
        raise TypeError("inputs must be ordinary tensors with data; got a subclass, a wrapper or meta tensors")
    return tensors


def _caller() -> str:
    """The file and line that made the call, in the first code that is not a library's."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__")).partition(".")[0]
        if name not in _LIBRARIES and frame.f_code.co_filename != __file__:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class _Call:
    """A call that is being recorded. Its inputs are copied at once, or held until its results have been looked at."""

    def __init__(self, function: _Function, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        import torch

        self.function = function
        self.inputs, self.written, self.sizes = (_bind_pool if function.operator == _POOL else _bind)(function, args, kwargs)
        self.versions = [(t, t._version) for t in self.inputs.values() if not t.is_inference()]
        self.copies: dict[str, _Host] = {}
        self.shared: list[str] = []  # inputs that are one tensor
        self.edges = self._edges() if torch.is_grad_enabled() and not function.backward else {}
        self.about: dict[str, Any] = {"function": function.name, "operator": function.operator, "index": index}
        self.about["direction"] = "backward" if function.backward else "forward"
        self.about.update(device=str(self.first.device), caller=_caller(), autocast=_autocast(self.first.device.type))
        if function.operator == _POOL:
            self.about.update(form=function.form, sizes=self.sizes)
        if self.shared:
            self.about["shared"] = self.shared
        self.stem = ""

    @property
    def first(self) -> Tensor:
        return next(iter(self.inputs.values()))

    def _edges(self) -> dict[str, tuple[Any, int]]:
        """Return where autograd brings the gradient of each input that has one. An edge that several inputs share brings the
        sum of their gradients, which is no result of the operator: leave these inputs out, and name them in `shared`."""
        inputs = {p: self.inputs[p] for p in self.function.learned if p in self.inputs and self.inputs[p].requires_grad}
        # a leaf's node is behind the node of anything that is made from it
        nodes = {p: t.grad_fn or t.expand_as(t).grad_fn.next_functions[0][0] for p, t in inputs.items()}  # pyright: ignore
        edges = {p: (nodes[p], t.output_nr) for p, t in inputs.items()}
        self.shared = [p for p, edge in edges.items() if list(edges.values()).count(edge) > 1]
        return {p: edge for p, edge in edges.items() if p not in self.shared}

    def size(self) -> int:
        """Bytes of all that may be recorded of it."""
        found = sum(t.numel() * t.element_size() for t in (*self.inputs.values(), *self.written.values()))
        if not self.written:
            found += self._output_numbers() * max(4, self.first.element_size())
        return found * (2 if self.edges or self.function.backward else 1)

    def _output_numbers(self) -> int:
        if "locations" in self.inputs:
            return math.prod((*self.inputs["locations"].shape[:2], *self.inputs["value"].shape[2:]))
        if "bev_feat_shape" in self.sizes:
            return math.prod(self.sizes["bev_feat_shape"])
        numbers = [n for size in self.sizes.values() for n in (size if isinstance(size, list) else [size])]
        return math.prod(numbers) * self.inputs.get("feat", self.first).shape[-1]

    def copy_inputs(self, reason: str) -> None:
        if any(t._version != version for t, version in self.versions):
            raise TypeError("inputs must be as they were when the call began; got changed ones, so that a NaN is not recorded")
        self.copies.update({place: _Host(t) for place, t in self.inputs.items()})
        strides = {place: c.strides for place, c in self.copies.items() if c.strides}
        self.about.update(reason=reason, strides=strides, packed="starts" not in self.copies)

    def copy_written(self) -> None:
        """A backward function may add to what it is given: whether that was zero is a part of the call."""
        self.copies.update({f"before_{name}": _Host(t.any()) for name, t in self.written.items()})
        self.about["in_place"] = bool(self.written)

    def results(self, found: Any) -> dict[str, Tensor]:
        """What the function computed, by name."""
        import torch

        if self.written and (self.function.backward or "output" in self.written):
            results = dict(self.written)
        elif not self.function.backward:
            results = {"output": found}
        else:
            results = _gradients(self.function, found if isinstance(found, (list, tuple)) else [found])
        if not results or not all(isinstance(t, torch.Tensor) and _plain(t) for t in results.values()):
            raise TypeError(f"the function must give tensors or write to some; got {type(found).__name__}")
        return results


class _Gradients:
    """The gradients of a call, as they leave the nodes that it put into the graph. The hooks read and change nothing."""

    def __init__(self, recorder: Recorder, call: _Call, output: Tensor) -> None:
        self.recorder, self.call, self.place = recorder, call, output.output_nr
        self.found: dict[str, Any] = {}
        last, hits, nodes = output.grad_fn, {}, [output.grad_fn]
        ends = {id(node) for node, _ in call.edges.values()}
        for node in nodes:  # it grows; the call's nodes lie between its output and its inputs
            if node is not None and id(node) not in ends and id(node) not in hits and len(hits) < 500:
                edges = list(enumerate(node.next_functions))
                hits[id(node)] = [(k, p) for k, edge in edges for p, end in call.edges.items() if edge == end]
                nodes += [below for _, (below, _) in edges]
        hooked = {id(node): node for node in nodes if hits.get(id(node))}
        self.left = len(hooked)
        for node in {**hooked, id(last): last}.values() if hooked else ():
            node.register_hook(functools.partial(self._arrived, node is last, hits[id(node)]))  # pyright: ignore

    def _arrived(self, last: bool, hits: list[tuple[int, str]], grad_inputs: Any, grad_outputs: Any) -> None:
        import torch

        if not self.left or self.recorder.closed:
            return  # `left` is 0 in a second backward through the same graph
        with self.recorder.ours(self.call.function), torch.no_grad():
            if last and grad_outputs[self.place] is not None:
                self.found["grad_output"] = grad_outputs[self.place]
            for k, name in ((k, "grad_" + place) for k, place in hits if grad_inputs[k] is not None):
                self.found[name] = self.found[name] + grad_inputs[k] if name in self.found else grad_inputs[k]
            self.left -= bool(hits)
            if not self.left and len(self.found) > 1 and "grad_output" in self.found:
                self.recorder.gradients(self.call, self.found)
            if not self.left:
                self.found = {}


class _Writer(threading.Thread):
    """Writes files one after another, and the manifest after them. A disk that takes no more ends the recording."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(name="record", daemon=True)
        self.recorder, self.waiting, self.written, self.reported = recorder, 0, 0, 0.0
        self.queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.save: Callable[..., None] | None = None
        self.calls: dict[str, Any] = {}

    def put(self, stem: str, about: dict[str, Any], copies: dict[str, _Host]) -> None:
        size = sum(c.tensor.numel() * c.tensor.element_size() for c in copies.values())
        self.waiting += size
        self.queue.put((stem, about, copies, size))

    def run(self) -> None:
        while True:
            work = self.queue.get()
            try:
                if work is None:
                    self._manifest()
                elif not self.recorder.failed:
                    self._write(*work)
            except Exception as error:
                self._failed(work, error)
            if work is None:
                return
            self.waiting -= work[-1]

    def _failed(self, work: Any, error: Exception) -> None:
        """A disk that takes no more ends the recording. Anything else, such as a device that was lost, loses the call."""
        try:
            if work is None or isinstance(error, OSError):
                raise error
            with tempfile.TemporaryFile(dir=self.recorder.folder) as file:  # safetensors and torch raise errors of their own
                file.write(bytes(work[-1]))
        except Exception as full:
            self.recorder.fail(full)
        else:
            self.recorder.functions[work[1]["function"]].lose(error)

    def _write(self, stem: str, about: dict[str, Any], copies: dict[str, _Host], size: int) -> None:
        tensors = {name: c.ready() for name, c in copies.items()}
        if about.pop("in_place", False):
            before = [bool(tensors.pop(name)) for name in list(tensors) if name.startswith("before_")]
            about["cleared"] = not any(before)
        save = self.save = self.save or _saver()
        path = self.recorder.folder / (stem + (".pt" if save is _as_pt else ".safetensors"))
        self._whole(path, lambda part: save(tensors, part, {"format": str(FORMAT), "call": json.dumps(about)}))
        self.written += size
        self.recorder.functions[about["function"]].recorded += "of" not in about
        self.calls[path.name] = {**about, "tensors": {name: list(t.shape) for name, t in tensors.items()}}
        for copied in copies.values():
            copied.buffers.give(copied.tensor)
        if time.monotonic() > self.reported + 2:  # the process may be killed
            self._manifest()

    def _manifest(self) -> None:
        path, facts = self.recorder.folder / "manifest.json", self.recorder.facts()
        text = json.dumps({**facts, "calls": self.calls}, indent=1)
        try:
            self._whole(path, lambda part: part.write_text(text))
        except OSError:  # no room or no inode for another file: without its calls the text fits into the one that is there
            with contextlib.suppress(OSError), path.open("r+") as file:
                file.write(json.dumps({**facts, "calls": {}}, indent=1))
                file.truncate()
            raise
        self.reported = time.monotonic()

    def _whole(self, path: pathlib.Path, write: Callable[[pathlib.Path], Any]) -> None:
        """A file is there whole or not at all."""
        part = path.with_name(path.name + ".part")
        try:
            write(part)
            os.replace(part, path)
        finally:
            with contextlib.suppress(OSError):
                part.unlink()


def _as_pt(tensors: dict[str, Tensor], path: pathlib.Path, metadata: dict[str, str]) -> None:
    import torch

    torch.save({"metadata": metadata, "tensors": tensors}, path)


def _saver() -> Callable[..., None]:
    """How calls are written here."""
    try:
        import torch
        from safetensors.torch import save, save_file

        save({"trial": torch.zeros(1)})  # it may lack numpy
    except Exception:
        _say("safetensors is not installed (pip install safetensors), so calls are .pt files; mx-driving replay reads both")
        return _as_pt
    return save_file


class _Loader(importlib.abc.Loader):
    """Another loader, until the module is there: no copy of it, because a loader may answer for any attribute."""

    def __init__(self, loader: Any, recorder: Recorder) -> None:
        self.loader, self.recorder = loader, recorder

    def create_module(self, spec: Any) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        spec: Any = module.__spec__
        module.__loader__ = spec.loader = self.loader
        self.loader.exec_module(module)
        self.recorder.wrap(module)

    def __getattr__(self, name: str) -> Any:  # such as get_code, for runpy
        return getattr(self.__dict__["loader"], name)


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the recorder wrap the functions of a module as soon as the module has been imported."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if not self.recorder.watches(name):
            return None
        later = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(name, path, target) for finder in later if hasattr(finder, "find_spec"))
        spec: Any = next(filter(None, found), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, self.recorder)
        return spec


def _rank_folder(out: Any) -> pathlib.Path:
    """Each process of a distributed program has a folder of its own."""
    many = os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ
    return pathlib.Path(out) / f"rank-{os.environ['RANK']}" if many else pathlib.Path(out)


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
        self.named = dict(functions or {})
        for name, operator in self.named.items():
            if operator not in _OPERATORS or "." not in str(name) or name.startswith("torch.ops."):
                rule = f"name a Python function of a module, and one of {', '.join(_OPERATORS)}"
                raise ValueError(f"functions must {rule}; got {name}={operator}")
        self.folder = _rank_folder(out)
        try:
            if not os.fspath(out):
                raise OSError("no name")
            self.folder.mkdir(parents=True, exist_ok=True)
            if any(self.folder.iterdir()):
                raise OSError("one with files")
        except (OSError, ValueError) as error:  # a name with a zero byte is a ValueError
            fact = getattr(error, "strerror", None) or error
            raise ValueError(
                f"out must be a new or an empty folder; got {os.fspath(out) and str(self.folder)!r}, {fact}"
            ) from None
        self.every, self.nan, self.budget, self.taken = int(every), bool(nan), float(megabytes) * 1e6, 0
        self.spent = self.ended = self.closed = self.failed = False  # the budget, sampling, gradients, for a reason
        self.gone = False  # calls are not even counted
        self.functions: dict[str, _Function] = {}
        self.started, self.finished, self.process, self.why = _now(), "", os.getpid(), ""
        self._numbers, self._local, self._lock = itertools.count(), threading.local(), threading.Lock()
        self._wrappers: dict[int, tuple[Any, Any]] = {}  # of originals and of wrappers, so that none is wrapped twice
        self._undo: list[tuple[Any, str, Any]] = []
        self._finder, self.writer = _Finder(self), _Writer(self)

    def start(self) -> Recorder:
        sys.meta_path.insert(0, self._finder)
        for name, module in list(sys.modules.items()):
            if self.watches(name) and isinstance(module, types.ModuleType):
                self.wrap(module)
        self._replace_elsewhere()
        self.writer.start()
        atexit.register(self.stop)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)
        return self

    def stop(self) -> None:
        """Put the functions back, write what is waiting, and say what there is."""
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
        _Host.buffers = _Buffers()
        self._summary()

    def _forked(self) -> None:
        self.ended = self.closed = self.gone = True  # the thread that writes is the parent's

    def _summary(self) -> None:
        for name in self.named:
            if name not in self.functions:
                _say(f"{name} was never imported, or is no function")
        for f in self.functions.values():
            if f.not_kept:
                _say(f"not recorded of {f.name}: {f.not_kept}, calls and gradients; the last: {f.unread}")
            if f.skipped:
                _say(f"not recorded of {f.name}: {f.skipped} calls, made while {_WAITING / 1e6:g} MB waited for the disk")
        calls, recorded = (sum(getattr(f, what) for f in self.functions.values()) for what in ("calls", "recorded"))
        none = "" if calls else "; under torch.compile none is seen"
        _say(f"{recorded} of {calls} calls recorded, {self.writer.written / 1e6:.0f} MB in {self.folder}{none}")

    def facts(self) -> dict[str, Any]:
        """What the manifest says beside the calls."""
        import torch

        shown = ("operator", "backward", "calls", "recorded", "skipped", "not_kept", "unread")
        functions = {n: {k: getattr(f, k) for k in shown} for n, f in self.functions.items() if f.calls}
        options = {"every": self.every, "nan": self.nan, "megabytes": self.budget / 1e6}
        here = {"torch": torch.__version__, "python": platform.python_version(), "system": platform.platform()}
        facts = {"format": FORMAT, "started": self.started, "finished": self.finished, "ended_early": self.why}
        return {**facts, "options": options, "packages": {**here, **_versions()}, "functions": functions}

    def watches(self, module: str) -> bool:
        return bool(_known(module)) or any(name.startswith(module + ".") for name in self.named)

    def wrap(self, module: types.ModuleType) -> None:
        """Wrap the known functions of a module."""
        name = module.__name__
        vendor = name.partition(".")[0] == "mx_driving"
        for path, operator in _known(name).items():
            self._wrap(module, path, f"{'mx_driving' if vendor else name}.{path}", operator)
        for full, operator in self.named.items():
            if full.startswith(name + "."):
                self._wrap(module, full[len(name) + 1 :], full, operator)

    def _wrap(self, owner: Any, path: str, name: str, operator: str) -> None:
        *classes, attribute = path.split(".")
        for one in classes:
            owner = vars(owner).get(one) if owner is not None else None
        if owner is None or not hasattr(owner, "__dict__"):
            return
        if isinstance(owner, type) and attribute == "apply":
            self._wrap_apply(owner, name, operator)
            return
        original = vars(owner).get(attribute, _ABSENT)
        plain = original.__func__ if isinstance(original, staticmethod) else original
        if callable(plain) and not isinstance(plain, types.ModuleType) and id(plain) not in self._wrappers:
            wrapper = self._wrapper(self.functions.setdefault(name, _Function(name, operator)), plain)
            self._wrappers[id(wrapper)] = (wrapper, wrapper)
            self._wrappers[id(plain)] = (plain, wrapper)
        if id(plain) in self._wrappers:
            new = self._wrappers[id(plain)][1]
            self._set(owner, attribute, original, staticmethod(new) if plain is not original else new)

    def _wrap_apply(self, owner: type, name: str, operator: str) -> None:
        """An autograd function. Classes derived from it have forwards of their own, and are left alone."""
        own = vars(owner).get("apply", _ABSENT)
        if id(own) in self._wrappers:
            return
        function = self.functions.setdefault(name, _Function(name, operator))
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

    def _replace_elsewhere(self) -> None:
        """`from mx_driving import ...` has given other modules the originals."""
        for module in list(sys.modules.values()):
            for name, thing in list(getattr(module, "__dict__", {}).items()):
                original, wrapper = self._wrappers.get(id(thing), (None, None))
                if original is thing and original is not None and isinstance(module, types.ModuleType):
                    self._set(module, name, original, wrapper)

    def _wrapper(self, function: _Function, original: Any) -> Any:
        compiling = _compiling()

        @functools.wraps(original)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if compiling():  # torch.compile sees the call alone
                return original(*args, **kwargs)
            return self.call(function, original, args, kwargs)

        return recorded

    def call(self, function: _Function, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the original gives or raises."""
        if self.gone or getattr(self._local, "inside", False):
            return original(*args, **kwargs)
        index = next(function.number)
        function.calls = index + 1
        chosen = index % self.every == 0 and not self.spent
        call = self._begin(function, index, chosen, args, kwargs) if (chosen or self.nan) and not self.ended else None
        self._local.inside = True
        try:
            found = original(*args, **kwargs)
        finally:
            self._local.inside = False
        if call is not None:
            self._finish(call, found)
        return found

    @contextlib.contextmanager
    def ours(self, function: _Function) -> Iterator[None]:
        """Our own errors never reach the program."""
        try:
            yield
        except Exception as error:
            function.lose(error)

    def fail(self, error: Exception) -> None:
        with self._lock:
            if self.failed:
                return
            self.failed = self.closed = self.ended = True
        files = len(self.writer.calls)
        self.why = f"recording into {self.folder} has ended after {files} files: {_fact(error)}; the program goes on"
        _say(self.why)

    def _begin(self, function: _Function, index: int, chosen: bool, args: Any, kwargs: Any) -> _Call | None:
        with self.ours(function):
            call = _Call(function, index, args, kwargs)
            if _written_down(call.first):
                return None
            if chosen and self._has_room(call):
                call.copy_inputs(f"every {self.every}")
                call.copy_written()
            return call if call.copies or self.nan else None

    def _has_room(self, call: _Call) -> bool:
        if self.writer.waiting > _WAITING:
            call.function.skipped += 1
            return False
        self.spent = self.taken + call.size() > self.budget
        if self.spent:
            self.why = f"the budget of {self.budget / 1e6:g} MB is used up; the program goes on"
            self.ended = not self.nan
            _say(self.why)
            return False
        self.taken += call.size()
        return True

    def _finish(self, call: _Call, found: Any) -> None:
        with self.ours(call.function):
            results = call.results(found)
            self._look_for_nan(call, results)
            if call.copies:
                call.copies.update({name: _Host(t) for name, t in results.items()})
                self._put(call)
            output = results.get("output")
            if call.edges and output is not None and output.grad_fn is not None and (call.stem or self.nan):
                _Gradients(self, call, output)
            if call.stem:
                call.inputs, call.written = {}, {}  # the program may want the memory back

    def _look_for_nan(self, call: _Call, results: dict[str, Tensor]) -> None:
        """The first call with a NaN is recorded, chosen or not."""
        if self.nan and any(_has_nan(t) for t in results.values()):
            self.nan, self.ended = False, self.spent
            if not call.copies:
                call.copy_inputs("")
            call.about["reason"] = "the first NaN"

    def gradients(self, call: _Call, found: dict[str, Tensor]) -> None:
        """They have arrived, in the middle of somebody's backward."""
        if not call.stem:
            self._look_for_nan(call, found)
        if call.stem:
            about = {**call.about, "of": call.stem, "direction": "backward"}
            self.writer.put(f"{call.stem}-gradients", about, {name: _Host(t) for name, t in found.items()})
        elif call.copies:  # a NaN that only the gradients have
            call.copies.update({name: _Host(t) for name, t in found.items()})
            self._put(call)

    def _put(self, call: _Call) -> None:
        call.stem = f"call-{next(self._numbers):06d}"
        self.writer.put(call.stem, call.about, call.copies)
        call.copies = {}


def _compiling() -> Callable[[], bool]:
    import torch

    return getattr(getattr(torch, "compiler", None), "is_compiling", lambda: False)


def _now() -> str:
    return datetime.datetime.now().isoformat(timespec="seconds")


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def start(out: Any, **options: Any) -> Recorder:
    """Record into a new folder from now on, until `stop` of what this gives, or the end of the program.

    Args:
        out: folder to make. A process of a distributed program makes a folder of its own in it.
        every: record the first call of each function, and then every so many. The default is a prime, so that the layers of a
            model come up in turn.
        nan: also record the first call with a NaN in its output or its gradients, even when the budget is used up. Every
            call's results are then summed, and on a device the program waits for the sum.
        megabytes: the most to write.
        functions: more functions to wrap, name -> operator, such as {"my_ops.msda": "multi_scale_deformable_attn"}. For one
            that computes gradients the operator ends in "_backward".

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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("record", description="Run a program, and record its calls of sampling operators.")
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
    parser = _parser()
    given = parser.parse_args()
    functions = dict(name.partition("=")[::2] for name in given.function)
    if not given.module and not os.path.isfile(given.program):
        parser.error(f"program must be a file; got {given.program}")
    try:
        recorder = start(given.out, every=given.every, nan=given.nan, megabytes=given.megabytes, functions=functions)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    sys.argv = [given.program, *given.arguments]
    sys.path[0] = os.getcwd() if given.module else os.path.dirname(os.path.abspath(given.program))
    try:
        if given.module:
            runpy.run_module(given.program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(given.program, run_name="__main__")
    finally:
        recorder.stop()


if __name__ == "__main__":
    main()
