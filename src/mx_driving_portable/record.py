"""Record calls of sampling operators and of bev_pool_v3 where they run. `mx-driving replay` judges them on any other machine.

This file needs torch and no other file of ours, so that it can be copied to a machine with a device:

    python record.py --out calls program.py its arguments
    python -m mx_driving_portable.record --out calls program.py its arguments

or, around a part of a program that runs already:

    with record.recording("calls", every=101):
        train()

The recorder copies every `every`-th call of each function to the host and writes it: inputs, output and, if backward() runs,
the gradients. It adds nothing to the autograd graph, so results stay the same. It counts the calls that it cannot record, and
prints the reason. A full disk ends the recording, not the program. Code under torch.compile runs compiled, and is not recorded.
A process that the program starts is recorded if it calls `recording` itself.

Written for Python 3.8 and later. torch is imported only when the first function is wrapped, because the import has effects: a
program may set OMP_NUM_THREADS before it imports torch itself.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import dataclasses
import functools
import importlib.abc
import io
import itertools
import json
import numbers
import os
import pathlib
import re
import sys
import threading
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FORMAT", "FUNCTIONS", "Recorder", "main", "recording", "start"]

FORMAT = 1  # version of the file format; keep equal to FORMAT of _replay/calls.py
EVERY = 101  # a prime, to record the layers of a model in turn: a multiple of their number would record one layer only
MEGABYTES = 1000.0
_ABSENT: Any = object()
# A function has one wrapper, which serves all recorders of the process. An object that got the wrapper while one recorder ran
# keeps the wrapper, and the next recorder sees calls through this object.
_recorders: list[Recorder] = []
_wrappers: dict[Any, tuple[Any, Any]] = {}  # id of an original or a wrapper -> (that object, its wrapper)
_undo: list[tuple[Any, str, Any]] = []

# The table of functions. mx_driving/_foreign_functions.py reads it, too.
_POOL = "bev_pool_v3"
DIFFERENTIABLE = {
    "multi_scale_deformable_attn": ("value", "locations", "weights"),
    "deformable_aggregation": ("value", "locations", "weights"),
    "geometric_kernel_attention": ("value", "weights"),
    _POOL: ("feat", "depth"),
}


class Function(NamedTuple):
    """A function of the vendor's library or of a compiled extension that computes one of the operators.

    module: the last part of its module's name, or all of it; "mx_driving" stands for every module of the vendor's library.
    parameters: our names. The function writes to parameters with "=", and adds to parameters with "+". A function without such
        parameters returns its results.
    layout: the axes of a pool's output, and of its grad_output.
    """

    module: str
    name: str
    operator: str
    parameters: str
    layout: str = "BCDHW"

    @property
    def backward(self) -> bool:
        return "grad_output" in self.parameters

    @property
    def names(self) -> list[str]:
        return [name.rstrip("=+") for name in self.parameters.split()]

    @property
    def outputs(self) -> list[str]:
        """Return the names of the tensors that the function changes, except `memo`, which is no result of an operator."""
        return [name[:-1] for name in self.parameters.split() if name[-1] in "=+"]


_SAMPLES = "value shapes starts locations weights"
_GRADIENTS = f"{_SAMPLES} grad_output grad_value= grad_locations= grad_weights="
_RANKS = "ranks_depth ranks_feat ranks_bev interval_lengths interval_starts"
_SUM = "interval_lengths interval_starts B D H W"
_LIFT = "depth feat ranks_depth ranks_feat ranks_bev bev_feat_shape"
# Grammar: an unindented line is "operator [layout]: parameters"; only pools have a layout. An indented line below it is
# "modules: functions": each of these modules has each of these functions, with these parameters.
#
# Sparse4D before v3, GaussianFormer and Far3D call `deformable_aggregation_ext` with value [bs, cam, num_feat, c]. TrackFormer
# and TransTrack call `MultiScaleDeformableAttention` without starts.
_TABLE = f"""
multi_scale_deformable_attn: {_SAMPLES}
    mx_driving: multi_scale_deformable_attn npu_multi_scale_deformable_attn_function MultiScaleDeformableAttnFunction.apply
multi_scale_deformable_attn: {_SAMPLES} step
    MultiScaleDeformableAttention detrex._C adet._C groundingdino._C mmcv._ext: ms_deform_attn_forward
multi_scale_deformable_attn: {_SAMPLES} grad_output step
    MultiScaleDeformableAttention detrex._C adet._C groundingdino._C: ms_deform_attn_backward
multi_scale_deformable_attn: {_GRADIENTS} step
    mmcv._ext: ms_deform_attn_backward
deformable_aggregation: {_SAMPLES}
    mx_driving: deformable_aggregation npu_deformable_aggregation AdsDeformableAggregation.apply
    deformable_aggregation_ext: deformable_aggregation_forward
deformable_aggregation: {_SAMPLES} grad_output grad_value+ grad_locations+ grad_weights+
    deformable_aggregation_ext: deformable_aggregation_backward
geometric_kernel_attention: {_SAMPLES}
    mx_driving: geometric_kernel_attention npu_geometric_kernel_attention npu_geometric_kernel_attention_func
    mx_driving: GeometricKernelAttentionFunc.apply
geometric_kernel_attention: {_SAMPLES} step
    GeometricKernelAttention: geometric_kernel_attn_cuda_forward
geometric_kernel_attention: {_SAMPLES} grad_output step
    GeometricKernelAttention: geometric_kernel_attn_cuda_backward
bev_pool_v3: {_LIFT}
    mx_driving: bev_pool_v3
bev_pool_v3 BDHWC: {_LIFT}
    mx_driving: BEVPoolV3.apply
bev_pool_v3: {_LIFT} interval_starts interval_lengths
    mx_driving: bev_pool_v2
bev_pool_v3 BDHWC: depth feat output= {_RANKS}
    bev_pool_v2_ext: bev_pool_v2_forward
bev_pool_v3 BDHWC: grad_output grad_depth+ grad_feat+ depth feat {_RANKS}
    bev_pool_v2_ext: bev_pool_v2_backward bev_pool_v2_backward_opt
bev_pool_v3: feat geom_feat B D H W
    mx_driving: bev_pool
bev_pool_v3 BDHWC: feat geom_feat {_SUM}
    bev_pool_ext: bev_pool_forward
bev_pool_v3 BDHWC: grad_output geom_feat {_SUM}
    bev_pool_ext: bev_pool_backward
bev_pool_v3 BDHWC: feat geom_xyzb {_SUM}
    bev_pool_ext: bev_sum_pool_forward
bev_pool_v3 BDHWC: grad_output geom_xyzb {_SUM}
    bev_pool_ext: bev_sum_pool_backward
bev_pool_v3: geom_xyz feat voxel_num
    mx_driving: npu_voxel_pooling_train
bev_pool_v3 BYXC: B n C X Y Z geom_xyz feat output+ memo
    voxel_pooling_train_ext: voxel_pooling_train_forward_wrapper
    voxel_pooling_ext: voxel_pooling_forward_wrapper
bev_pool_v3 BYXC: B cams bins height width C X Y Z geom_xyz depth feat output+
    voxel_pooling_inference_ext: voxel_pooling_inference_forward_wrapper
"""


def _read_table(text: str) -> Iterator[Function]:
    operator = layout = parameters = ""
    for line in text.strip().split("\n"):
        left, right = line.split(": ")
        if not line.startswith(" "):
            operator, _, layout = left.partition(" ")
            parameters = right
            continue
        for module, name in itertools.product(left.split(), right.split()):
            yield Function(module, name, operator, parameters, layout or "BCDHW")


FUNCTIONS = tuple(_read_table(_TABLE))

KEYWORDS: dict[str, str] = {  # the vendor's, mmcv's and transformers' names of parameters -> ours
    **dict.fromkeys(("feature_maps", "mc_ms_feat"), "value"),
    **dict.fromkeys(("value_spatial_shapes", "spatial_shapes", "spatial_shape", "shape"), "shapes"),
    **dict.fromkeys(("value_level_start_index", "level_start_index", "scale_start_index", "offset"), "starts"),
    **dict.fromkeys(("sampling_locations", "sample_locations", "sampling_location"), "locations"),
    **dict.fromkeys(("attention_weights", "weight"), "weights"),
    **{"im2col_step": "step", "grad_sampling_loc": "grad_locations", "grad_attn_weight": "grad_weights"},
    "input_features": "feat",  # in npu_voxel_pooling_train
}


def insert_starts(args: Any) -> list[Any]:
    """Return the arguments of a sampling function, with None for starts if the function has no starts.

    mmcv's plain torch, TrackFormer and TransTrack have none: their levels lie one after the other.
    """
    third: Any = args[2] if len(args) > 2 else None
    has_locations = hasattr(third, "is_floating_point") and third.dim() > 2 and third.is_floating_point()
    return [*args[:2], None, *args[2:]] if has_locations else list(args)


# Functions whose calls are only counted, because replay knows bare operators alone.
_COUNTED = tuple(Function("mx_driving", f"{operator}_with_logits", operator, "") for operator in DIFFERENTIABLE)
_OPERATORS = [*DIFFERENTIABLE, *(f"{operator}_backward" for operator in DIFFERENTIABLE if operator != _POOL)]
_OPTIONAL = ("starts", "step", "memo", "grad_value", "grad_locations", "grad_weights")
_SIZES = ("bev_feat_shape", "voxel_num", "B", "D", "H", "W", "X", "Y", "Z", "n", "C", "cams", "bins", "height", "width")
_LIBRARIES = ("torch", "mmcv", "mmengine", "mx_driving", "mx_driving_portable", "contextlib", "functools")


def _say(sentence: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            print(f"record: {sentence}", file=sys.stderr, flush=True)


def _find_reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error).strip().split("\n")[0] or type(error).__name__


def _is_ordinary(t: Any) -> bool:
    """Return whether t is a plain strided tensor: no subclass such as DTensor, and no wrapper of vmap or grad."""
    import torch

    is_wrapper = getattr(getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", lambda t: False)
    is_plain = type(t) in (torch.Tensor, torch.nn.Parameter) and t.layout == torch.strided
    return is_plain and t.device.type != "meta" and not is_wrapper(t)


def _bind(entry: Function, args: Any, kwargs: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Return the inputs, the tensors that the function writes to, and the sizes, by name."""
    import torch

    if entry in _COUNTED:
        raise TypeError("operators with logits, and the modules of mx_driving.nn, which call them, are not recorded")
    names, positional = entry.names, list(args)
    if entry.operator != _POOL:  # remove the arguments that only some sampling functions have
        while positional and not isinstance(positional[0], torch.Tensor):
            del positional[0]  # self
        listed = positional[2] if len(positional) > 2 else None
        if isinstance(listed, (list, tuple)) and listed and isinstance(listed[0], (list, tuple)):
            del positional[2]  # transformers' list of shapes, which follows the tensor of shapes
        positional = insert_starts(positional)
    bound = dict(zip(names, positional))  # noqa: B905, zip has no strict before Python 3.10
    bound.update({KEYWORDS.get(name, name): a for name, a in kwargs.items()})
    missing = [name for name in names if name not in bound and name not in _OPTIONAL]
    if missing:
        raise TypeError(f"{missing[0]} must be given; got {', '.join(bound) or 'nothing'}")
    # mmcv's backward may have im2col_step at the index of a gradient.
    unused = {name for name in _OPTIONAL if isinstance(bound.get(name), int)} | {"memo"}
    bound = {name: a for name, a in bound.items() if a is not None and name in names and name not in unused}
    sizes: dict[str, Any] = {}
    for name in [name for name in _SIZES if name in bound]:  # as ints: JSON takes no NumPy numbers and no tensors
        size = bound.pop(name)
        several = isinstance(size, (list, tuple)) or getattr(size, "ndim", 0)
        sizes[name] = [int(number) for number in size] if several else int(size)  # pyright: ignore
    for table in ("shapes", "starts"):
        if isinstance(bound.get(table), (list, tuple)):
            bound[table] = torch.tensor(bound[table])
    for name, a in bound.items():
        if not _is_ordinary(a):
            raise TypeError(f"{name} must be an ordinary tensor with data; got {type(a).__name__}")
    outputs = {name: bound.pop(name) for name in entry.outputs if name in bound}
    return bound, outputs, sizes


@dataclasses.dataclass
class _WrappedFunction:
    """A wrapped function and the counters of its calls."""

    name: str
    entry: Function
    number: Iterator[int] = dataclasses.field(default_factory=itertools.count)  # next() of an itertools.count is atomic
    num_calls: int = 0
    num_recorded: int = 0
    num_lost: int = 0  # calls and gradients that could not be recorded
    last_reason: str = ""  # why the last of them could not be recorded

    @contextlib.contextmanager
    def counting_losses(self) -> Iterator[None]:
        """Hide the recorder's errors from the program, and count the calls and gradients that are lost."""
        try:
            yield
        except Exception as error:
            self.count_loss(_find_reason(error))

    def count_loss(self, reason: str) -> None:
        self.num_lost, self.last_reason = self.num_lost + 1, reason


class _OpenCall:
    """A call that is being recorded. Its inputs are copied before the function runs, or, for the first NaN, after it ran."""

    def __init__(self, function: _WrappedFunction, index: int, args: Any, kwargs: dict[str, Any]) -> None:
        import torch

        self.function, self.entry, self.stem = function, function.entry, ""
        self.inputs, self.outputs, sizes = _bind(self.entry, args, kwargs)
        for name, t in self.outputs.items():
            if bool(t.any()):
                raise TypeError(f"{name} must be zero before a function adds to it; got other numbers")
        self.versions = [(t, t._version) for t in self.inputs.values() if not t.is_inference()]
        self.copies: dict[str, Tensor] = {}
        # the file and line of the call: the innermost frame outside of libraries
        frame, caller = sys._getframe(), ""
        while frame is not None and not caller:
            name = str(frame.f_globals.get("__name__")).partition(".")[0]
            if name not in _LIBRARIES and frame.f_code.co_filename != __file__:
                caller = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back
        self.about: dict[str, Any] = {
            **{"function": function.name, "operator": self.entry.operator, "form": self.entry.name, "sizes": sizes},
            **{"index": index, "device": str(next(iter(self.inputs.values())).device), "caller": caller},
        }
        # name -> autograd edge (node, index) for each differentiable input. Leave out inputs that share an edge: the edge gets
        # only the sum of their gradients, and the operator returns a gradient for each.
        self.edges: dict[str, tuple[Any, int]] = {}
        if torch.is_grad_enabled() and not self.entry.backward:
            names = DIFFERENTIABLE[self.entry.operator]
            inputs = {name: self.inputs[name] for name in names if name in self.inputs and self.inputs[name].requires_grad}
            # The node of a leaf is the next function of a view of the leaf.
            nodes = {name: t.grad_fn or t.expand_as(t).grad_fn.next_functions[0][0] for name, t in inputs.items()}  # pyright: ignore
            edges = {name: (nodes[name], t.output_nr) for name, t in inputs.items()}
            self.edges = {name: edge for name, edge in edges.items() if list(edges.values()).count(edge) == 1}

    def copy_inputs(self, reason: str) -> None:
        if any(t._version != version for t, version in self.versions):
            raise TypeError("inputs must be as they were when the call began; got changed ones, so that a NaN is not recorded")
        self.copies = _copy_to_host(self.inputs)
        strides = {name: list(t.stride()) for name, t in self.inputs.items() if not t.is_contiguous()}
        self.about.update(reason=reason, strides=strides)

    def name_results(self, returned: Any) -> dict[str, Tensor]:
        """Return the results of the function by name."""
        if self.outputs:
            results = dict(self.outputs)
        elif not self.entry.backward:
            results = {"output": returned}
        else:
            tensors = returned if isinstance(returned, (list, tuple)) else [returned]
            results = dict(zip(["grad_" + name for name in DIFFERENTIABLE[self.entry.operator]], tensors))  # noqa: B905
        if not results or not all(_is_ordinary(t) for t in results.values()):
            raise TypeError(f"the function must give tensors or write to some; got {type(returned).__name__}")
        return results


def _copy_to_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    import torch

    contiguous = torch.contiguous_format
    return {name: t.detach().to("cpu", copy=True, memory_format=contiguous) for name, t in tensors.items()}


def _count_bytes(*tensors: dict[str, Tensor]) -> int:
    return sum(t.numel() * t.element_size() for some in tensors for t in some.values())


class _GradientHooks:
    """Hooks on the nodes that a call added to the autograd graph. They read the gradients that leave the nodes."""

    def __init__(self, recorder: Recorder, call: _OpenCall, output: Tensor) -> None:
        self.recorder, self.call, self.output_nr = recorder, call, output.output_nr
        self.gradients: dict[str, Any] = {}
        last, hits, nodes = output.grad_fn, {}, [output.grad_fn]
        ends = {id(node) for node, _ in call.edges.values()}
        for node in nodes:  # `nodes` grows in the loop: breadth first from output to inputs
            if node is not None and id(node) not in ends and id(node) not in hits and len(hits) < 500:
                edges = list(enumerate(node.next_functions))
                hits[id(node)] = [(k, name) for k, edge in edges for name, end in call.edges.items() if edge == end]
                nodes += [below for _, (below, _) in edges]
        hooked = {id(node): node for node in nodes if hits.get(id(node))}
        self.left = len(hooked)
        for node in {**hooked, id(last): last}.values() if hooked else ():
            node.register_hook(functools.partial(self._arrive, node is last, hits[id(node)]))  # pyright: ignore

    def _arrive(self, last: bool, hits: list[tuple[int, str]], grad_inputs: Any, grad_outputs: Any) -> None:
        if not self.left or not self.recorder.is_active():
            return  # `left` is 0 in a second backward through the graph
        import torch

        with self.call.function.counting_losses(), torch.no_grad():
            gradients = self.gradients
            if last and grad_outputs[self.output_nr] is not None:
                gradients["grad_output"] = grad_outputs[self.output_nr]
            for k, name in ((k, "grad_" + name) for k, name in hits if grad_inputs[k] is not None):
                gradients[name] = gradients[name] + grad_inputs[k] if name in gradients else grad_inputs[k]
            self.left -= bool(hits)
            if not self.left:
                self.gradients = {}
                if len(gradients) > 1 and "grad_output" in gradients:
                    recorder, call = self.recorder, self.call
                    if call.stem:
                        recorder._write(f"{call.stem}-gradients", call.about, _copy_to_host(gradients))
                    elif recorder._copy_inputs_of_first_nan(call, gradients):  # the first NaN is in a gradient
                        recorder._write_call(call, gradients)


@dataclasses.dataclass(eq=False)
class _WrappingFinder(importlib.abc.MetaPathFinder):
    """Lets the recorder wrap the functions of a module right after the import of the module."""

    recorder: Recorder

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
                    del loader.exec_module  # A loader may load several modules: wrap only this one.
                execute(module)
                self.recorder.wrap(module)

            loader.exec_module = execute_and_wrap
        return spec


class Recorder:
    """Wraps known functions of all modules, imported already or later, until `stop`."""

    def __init__(
        self, out: Any, every: int = EVERY, nan: bool = False, megabytes: float = MEGABYTES, functions: Any = None
    ) -> None:
        if not isinstance(every, numbers.Real) or not every >= 1 or every % 1:
            raise ValueError(f"every must be a whole number of 1 or more; got {every!r}")
        if not isinstance(megabytes, numbers.Real) or not megabytes > 0:
            raise ValueError(f"megabytes must be more than 0; got {megabytes!r}")
        if not isinstance(functions or {}, dict):
            raise ValueError(f"functions must be a dict of names and operators; got {type(functions).__name__}")
        self.named: dict[str, Function] = {}
        for name, operator in (functions or {}).items():
            if operator not in _OPERATORS or "." not in str(name) or name.startswith("torch.ops."):
                rule = f"name a Python function of a module, and one of {', '.join(_OPERATORS)}"
                raise ValueError(f"functions must {rule}; got {name}={operator}")
            bare, is_backward = operator.partition("_backward")[:2]
            parameters = _LIFT if bare == _POOL else _GRADIENTS if is_backward else _SAMPLES
            self.named[name] = Function("", bare, bare, parameters)
        # The folder of the recording. Each process of a distributed program, or of multiprocessing, gets a subfolder.
        folder = pathlib.Path(out)
        if os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ:
            folder /= f"rank-{os.environ['RANK']}"
        multiprocessing: Any = sys.modules.get("multiprocessing")
        if multiprocessing and multiprocessing.parent_process() is not None:
            folder /= re.sub(r"[^\w:-]", "-", multiprocessing.current_process().name)
        try:
            if not os.fspath(out):
                raise OSError("no name")
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise OSError("one with files")
        except (OSError, ValueError) as error:  # a zero byte in the path raises ValueError
            name, fact = os.fspath(out) and str(folder), getattr(error, "strerror", None) or error
            raise ValueError(f"out must be a new or an empty folder; got {name!r}, {fact}") from None
        self.folder = folder.absolute()  # the program may change the working folder
        self.every, self.nan, self.megabytes = int(every), bool(nan), float(megabytes)
        self.functions: dict[str, _WrappedFunction] = {}
        self._process = os.getpid()
        # num_bytes: the bytes that are written. reserved: the bytes of recorded calls, with gradients that may follow.
        self.num_bytes, self.reserved = 0, 0
        self.why = ""  # why no more calls are recorded, but the first one with NaN; "" before that
        self.failed = self._stopped = False
        self._numbers, self._local, self._lock = itertools.count(), threading.local(), threading.Lock()
        self._watched: dict[int, _WrappedFunction] = {}  # id of a wrapper -> its function
        self._finder = _WrappingFinder(self)

    def start(self) -> Recorder:
        import importlib.metadata
        import platform

        packages = {package.metadata["Name"]: package.version for package in importlib.metadata.distributions()}
        facts = {"program": sys.argv, "python": sys.version, "system": platform.platform(), "packages": packages}
        try:
            with (self.folder / "manifest.json").open("x") as file:  # fails if another process took the folder meanwhile
                file.write(json.dumps(facts, indent=1))
        except FileExistsError:
            raise ValueError(f"out must be a new or an empty folder; got {str(self.folder)!r}, one with files") from None
        except OSError as error:
            self._fail(error)
        _recorders.append(self)
        sys.meta_path.insert(0, self._finder)
        for name, module in list(sys.modules.items()):
            if self.watches(name) and isinstance(module, types.ModuleType):
                self.wrap(module)
        # Replace the originals in the modules that imported them with `from mx_driving import ...`.
        for module in list(sys.modules.values()):
            for name, value in list(getattr(module, "__dict__", {}).items()):
                original, wrapper = _wrappers.get(id(value), (None, None))
                if original is value and id(wrapper) in self._watched and isinstance(module, types.ModuleType):
                    _set(module, name, original, wrapper)
        atexit.register(self.stop)
        return self

    def is_active(self) -> bool:
        """Return whether this process records. A forked child does not record: its files would have the parent's names."""
        return not self._stopped and os.getpid() == self._process

    def stop(self) -> None:
        """Restore the functions, and print a summary."""
        atexit.unregister(self.stop)
        if not self.is_active():
            return
        self._stopped = True
        sys.meta_path.remove(self._finder)
        _recorders.remove(self)
        if not any(recorder.is_active() for recorder in _recorders):
            while _undo:
                owner, name, before = _undo.pop()
                delattr(owner, name) if before is _ABSENT else setattr(owner, name, before)
            # Give the originals to the modules that imported a wrapper meanwhile.
            originals = {id(wrapper): original for original, wrapper in _wrappers.values() if original is not wrapper}
            for module in [module for module in sys.modules.values() if isinstance(module, types.ModuleType)]:
                for name, value in list(vars(module).items()):
                    if id(value) in originals and _wrappers[id(value)][0] is value:
                        setattr(module, name, originals[id(value)])
        for name in self.named:
            if name not in self.functions:
                _say(f"{name} was never imported, or is no function")
        for f in self.functions.values():
            if f.num_lost:
                _say(f"not recorded of {f.name}: {f.num_lost}, calls and gradients; the last: {f.last_reason}")
        num_calls = sum(f.num_calls for f in self.functions.values())
        num_recorded = sum(f.num_recorded for f in self.functions.values())
        remark = "" if num_calls else "; calls in compiled code and in child processes are not seen"
        _say(f"{num_recorded} of {num_calls} calls recorded, {self.num_bytes / 1e6:.0f} MB in {self.folder}{remark}")

    def watches(self, module: str) -> bool:
        return bool(self._find_functions(module))

    def wrap(self, module: types.ModuleType) -> None:
        """Wrap the known functions of a module."""
        for path, (name, entry) in self._find_functions(module.__name__).items():
            self._wrap(module, path, name, entry)

    def _find_functions(self, module: str) -> dict[str, tuple[str, Function]]:
        """Return the known functions of a module: path in the module -> (name, entry)."""
        is_vendors, last = module.partition(".")[0] == "mx_driving", module.rpartition(".")[2]
        owner, modules = ("mx_driving", ("mx_driving",)) if is_vendors else (module, (module, last))
        entries = (entry for entry in (*FUNCTIONS, *_COUNTED) if entry.module in modules)
        known = {entry.name: (f"{owner}.{entry.name}", entry) for entry in entries}
        named = {name[len(module) + 1 :]: (name, entry) for name, entry in self.named.items() if name.startswith(module + ".")}
        return {**known, **named}

    def _wrap(self, owner: Any, path: str, name: str, entry: Function) -> None:
        """Wrap a function of a module or of a class. Its calls are recorded under the first of its names."""
        *classes, attribute = path.split(".")
        for class_name in classes:
            owner = vars(owner).get(class_name) if owner is not None else None
        if owner is None or not hasattr(owner, "__dict__"):
            return
        original = vars(owner).get(attribute, _ABSENT)
        if isinstance(owner, type) and attribute == "apply":
            # `apply` of an autograd function. Do not wrap derived classes, because they have their own forward.
            def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
                call = super(owner, cls).apply if original is _ABSENT else original.__get__(None, cls)  # pyright: ignore
                return call(*args, **kwargs) if cls is not owner else _call_recorders(wrapper, call, args, kwargs)

            key = id(original) if id(original) in _wrappers else (id(owner), "apply")
            function, new, is_static = owner, classmethod(apply), False
        else:
            is_static = isinstance(original, staticmethod)
            function = original.__func__ if is_static else original
            if not callable(function) or isinstance(function, types.ModuleType):
                return

            @functools.wraps(function)
            def recorded(*args: Any, **kwargs: Any) -> Any:
                return _call_recorders(wrapper, function, args, kwargs)

            key, new = id(function), recorded
        if key not in _wrappers:
            _wrappers[id(new)] = (new, new)
            _wrappers[key] = (function, new)
        wrapper = _wrappers[key][1]  # `new`, or the wrapper that another recorder has made
        if id(wrapper) not in self._watched:
            self._watched[id(wrapper)] = self.functions.setdefault(name, _WrappedFunction(name, entry))
        _set(owner, attribute, original, staticmethod(wrapper) if is_static else wrapper)

    def _call(self, function: _WrappedFunction, original: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call the original, and record the call if its number is a multiple of `every`, or if it gives the first NaN."""
        if not self.is_active() or getattr(self._local, "inside", False):
            return original(*args, **kwargs)
        index = next(function.number)
        function.num_calls = index + 1
        sampled, call = index % self.every == 0 and not self.why, None
        if sampled or self.nan:
            import torch

            with function.counting_losses():
                # If torch traces or captures the call, our copies would become a part of the graph.
                on_cuda = any(isinstance(a, torch.Tensor) and a.is_cuda for a in (*args, *kwargs.values()))
                captured = on_cuda and torch.cuda.is_current_stream_capturing()
                if not (captured or torch.jit.is_tracing()):  # pyright: ignore
                    opened = _OpenCall(function, index, args, kwargs)
                    if sampled:
                        opened.copy_inputs(f"every {self.every}")
                    call = opened
        self._local.inside = True
        try:
            returned = original(*args, **kwargs)
        except BaseException as error:
            if call is not None and sampled:
                recomputed = "torch.utils.checkpoint recomputes the call, and ends it before its result"
                is_checkpoint = type(error).__name__ == "_StopRecomputationError"
                function.count_loss(recomputed if is_checkpoint else f"the call raised {type(error).__name__}")
            raise
        finally:
            self._local.inside = False
        if call is None:
            return returned
        with function.counting_losses():
            results = call.name_results(returned)
            is_first_nan = self._copy_inputs_of_first_nan(call, results)
            if call.copies:
                self.reserved += _count_bytes(call.inputs, results) * (2 if call.edges else 1)  # with gradients
                if not self.why and self.reserved > self.megabytes * 1e6:
                    self.why = f"the budget of {self.megabytes:g} MB is used up; the program goes on"
                    _say(self.why)
                if is_first_nan or not self.why:
                    self._write_call(call, results)
            output = results.get("output")
            if call.edges and output is not None and output.grad_fn is not None and (call.stem or self.nan):
                _GradientHooks(self, call, output)
            if call.stem:
                call.inputs, call.outputs, call.versions = {}, {}, []  # free the memory for the program
        return returned

    def _copy_inputs_of_first_nan(self, call: _OpenCall, results: dict[str, Tensor]) -> bool:
        if not self.nan or not any(bool(t.detach().isnan().any()) for t in results.values()):
            return False
        self.nan = False
        if not call.copies:
            call.copy_inputs("")
        call.about["reason"] = "the first NaN"
        return True

    def _write_call(self, call: _OpenCall, results: dict[str, Tensor]) -> None:
        stem = f"call-{next(self._numbers):06d}"
        if self._write(stem, call.about, {**call.copies, **_copy_to_host(results)}):
            call.stem, call.function.num_recorded = stem, call.function.num_recorded + 1
        call.copies = {}

    def _write(self, stem: str, about: dict[str, Any], tensors: dict[str, Tensor]) -> bool:
        """Write a file. A full disk ends the recording."""
        import torch

        file, path = io.BytesIO(), self.folder / f"{stem}.pt"
        torch.save({"metadata": {"format": str(FORMAT), "call": json.dumps(about)}, "tensors": tensors}, file)
        with self._lock:
            if self.failed:
                return False
            try:
                path.write_bytes(file.getbuffer())
            except OSError as error:
                self._fail(error)
                with contextlib.suppress(OSError):
                    path.unlink()
                return False
            self.num_bytes += _count_bytes(tensors)
            return True

    def _fail(self, error: OSError) -> None:
        """Print the error and end the recording."""
        if not self.failed:
            self.failed, self.nan = True, False
            num_calls = sum(f.num_recorded for f in self.functions.values())
            self.why = (
                f"recording into {self.folder} has ended after {num_calls} calls: {_find_reason(error)}; the program goes on"
            )
            _say(self.why)


def _call_recorders(wrapper: Any, original: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call the original through each recorder that watches the wrapper; directly in a graph of torch.compile."""
    import torch

    if hasattr(torch, "compiler") and torch.compiler.is_compiling():
        return original(*args, **kwargs)
    call = original
    for recorder in list(_recorders):
        if id(wrapper) in recorder._watched:
            call = functools.partial(recorder._call, recorder._watched[id(wrapper)], call)
    return call(*args, **kwargs)


def _set(owner: Any, name: str, before: Any, new: Any) -> None:
    """Set an attribute of a module or a class. Leave a staticmethod or a classmethod that has the wrapper already."""
    if new is not before and getattr(before, "__func__", None) is not getattr(new, "__func__", _ABSENT):
        setattr(owner, name, new)
        _undo.append((owner, name, before))


def start(out: Any, **options: Any) -> Recorder:
    """Record into a new folder until `stop` of the returned recorder is called, or the program ends.

    Args:
        out: the folder to make. Each process of a distributed program makes a subfolder.
        every: record the calls 0, `every`, 2 * `every`, ... of each function. The default is a prime, to record the layers of
            a model in turn.
        nan: also record the first call with a NaN in its output or its gradients, even if the budget is used up. For this the
            recorder reads the results of all calls, and on a device the program waits for them.
        megabytes: the budget: most bytes to write, in 10**6.
        functions: more functions to wrap, name -> operator, such as {"my_ops.msda": "multi_scale_deformable_attn"}. For a
            function that computes gradients, the operator ends in "_backward".

    Raises:
        ValueError: an argument cannot be used.
    """
    return Recorder(out, **options).start()


@contextlib.contextmanager
def recording(out: Any, **options: Any) -> Iterator[Recorder]:
    """Record the block: `start`, and `stop` at its end."""
    recorder = start(out, **options)
    try:
        yield recorder
    finally:
        recorder.stop()


def _find_program(module: str) -> Any:
    """Return the spec of the module that `python -m module` runs; None if there is no such module."""
    import importlib.util

    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # ImportError: there is no parent package. ValueError: the name is empty.
        return None
    return _find_program(f"{module}.__main__") if spec and spec.submodule_search_locations is not None else spec


def _load_program(program: str, module: bool) -> tuple[types.ModuleType, Any]:
    """Return the module `__main__` and its code. Set sys.path and sys.argv[0] as Python does. runpy would take
    the module away at the program's end, before threads and atexit functions end."""
    import pkgutil
    from importlib.machinery import SourceFileLoader, SourcelessFileLoader

    path, spec = os.path.join(os.getcwd(), program), None
    importer: Any = None if module else pkgutil.get_importer(path)  # of a folder or a zip application; None for a file
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd() if module else path if importer else os.path.dirname(os.path.realpath(path))
    if module or importer:
        spec = _find_program(program) if module else importer.find_spec("__main__")
    if spec is None and (module or not os.path.isfile(path)):
        rule = "a module that Python finds" if module else "a file"
        raise ValueError(f"program must be {rule}; got {program or repr(program)}")
    if spec is not None:
        loader, path = spec.loader, spec.origin
        code = loader.get_code(spec.name)
    elif path.endswith(".pyc"):
        loader = SourcelessFileLoader("__main__", path)
        code = loader.get_code("__main__")
    else:
        loader = SourceFileLoader("__main__", path)
        code = loader.source_to_code(loader.get_data(path), path)  # get_code would write a .pyc file
    sys.argv[0] = path if module else program
    main = types.ModuleType("__main__")
    names = {"__file__": path, "__cached__": spec and spec.cached, "__package__": spec and spec.parent}
    vars(main).update(names, __spec__=spec, __loader__=loader, __builtins__=builtins)
    if sys.version_info < (3, 14):  # from 3.14 on, Python makes this dictionary at the first read
        vars(main)["__annotations__"] = {}
    return main, code


def _read_number(text: str) -> float | str:
    """Return the number that a text says. Return other texts unchanged, so that the recorder refuses them."""
    try:
        return int(text) if text.lstrip("-").isdecimal() else float(text)
    except ValueError:
        return text


def main(command: str = "record.py", words: list[str] | None = None) -> None:
    """Run a program, and record it. A wrong command line ends with one sentence and exit status 2.

    Args:
        command: the program's name, with which the sentence begins.
        words: the command line, without the program's name; by default that of this process.
    """
    import argparse

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> Any:
            self.exit(2, f"{command}: the command line must be as --help says; got: {message}\n")

    name = "mx-driving record" if words is not None else "record.py"
    about = "Run a program, and record its calls of sampling operators for `mx-driving replay`."
    parser = Parser(usage=f"{name} [options] program [arguments]", description=about, allow_abbrev=False)
    add = parser.add_argument
    add("--out", default="calls", metavar="FOLDER", help="Folder to make (default: calls).")
    first = "Record the first call of each function, and then every so many"
    add("--every", type=_read_number, default=EVERY, metavar="N", help=f"{first} (default: {EVERY}).")
    add("--nan", action="store_true", help="Also record the first call with a NaN. A device then waits at each call.")
    add("--megabytes", type=_read_number, default=MEGABYTES, metavar="N", help=f"The most to write (default: {MEGABYTES:g}).")
    named = "Another function, package.name=operator; may be repeated."
    add("--function", action="append", default=[], metavar="NAME", help=named)
    add("-m", dest="module", action="store_true", help="The program is a module, as in `python -m`.")
    add("program", help="The program to run.")
    add("arguments", nargs=argparse.REMAINDER, help="Its arguments.")
    options = vars(parser.parse_args(words))
    program, arguments, module = (options.pop(name) for name in ("program", "arguments", "module"))
    options["functions"] = dict(name.partition("=")[::2] for name in options.pop("function"))
    sys.argv = ["-m" if module else program, *arguments]
    try:
        main_module, code = _load_program(program, module)
        start(**options)  # records until the program's threads and its atexit functions have ended
    except (ValueError, OSError) as error:
        parser.exit(2, f"{command}: {error}\n")
    sys.modules["__main__"] = main_module
    exec(code, vars(main_module))


if __name__ == "__main__":
    main()
