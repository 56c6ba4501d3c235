"""Record calls of sampling operators and of bev_pool_v3 where they run. `mx-driving replay` judges them on any other machine.

This file needs torch and nothing else of ours, so that it can be copied to a machine with a device:

    python record.py --out calls program.py its arguments
    python -m mx_driving_portable.record --out calls program.py its arguments

or, around a part of a program that runs already:

    with record.recording("calls", every=101):
        train()

Every `every`-th call of each function is copied to the host and written: inputs, output and, if backward() runs, the gradients.
The calls compute what they would compute without the recorder: it adds nothing to the autograd graph. A call that cannot be
recorded is counted and named. A full disk ends the recording, not the program. Code under torch.compile is not recorded and
runs as compiled.

Written for Python 3.8 and later. The first wrapped function imports torch: the import has effects, and a program may set
OMP_NUM_THREADS before its own.
"""

from __future__ import annotations

import atexit
import contextlib
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
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FORMAT", "FUNCTIONS", "Recorder", "main", "recording", "start"]

FORMAT = 1  # of a recording; mx_driving.replay reads this one
EVERY = 101  # a prime: the layers of a model are recorded in turn
MEGABYTES = 1000.0
_ABSENT: Any = object()

_POOL = "bev_pool_v3"
DIFFERENTIABLE = {
    "multi_scale_deformable_attn": ("value", "locations", "weights"),
    "deformable_aggregation": ("value", "locations", "weights"),
    "geometric_kernel_attention": ("value", "weights"),
    _POOL: ("feat", "depth"),
}
_OPERATORS = [*DIFFERENTIABLE, *(f"{operator}_backward" for operator in DIFFERENTIABLE if operator != _POOL)]


class Function(NamedTuple):
    """A function of the vendor's library or of a compiled extension that computes one of the operators.

    module: the last part of its module's name, or all of it; "mx_driving" stands for every module of the vendor's library.
    parameters: in our words. The function writes to those that end in "=", and adds to those that end in "+". One that is given
        no such tensors returns them.
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
        """The names of the tensors that the function changes; without `memo`, which is no result of an operator."""
        return [name[:-1] for name in self.parameters.split() if name[-1] in "=+"]


_SAMPLES = "value shapes starts locations weights"
_GRADIENTS = f"{_SAMPLES} grad_output grad_value= grad_locations= grad_weights="
_RANKS = "ranks_depth ranks_feat ranks_bev interval_lengths interval_starts"
_SUM = "interval_lengths interval_starts B D H W"
_LIFT = "depth feat ranks_depth ranks_feat ranks_bev bev_feat_shape"
# The one table of foreign functions: record, compat and replay read it. An operator, the layout of a pool and parameters stand
# above the functions that have them: modules and names. `deformable_aggregation_ext` is also called with the cameras' maps
# apart, value [bs, cam, num_feat, c]: Sparse4D before v3, GaussianFormer, Far3D. `MultiScaleDeformableAttention` is also called
# without starts: TrackFormer, TransTrack.
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


class AutogradFunction(NamedTuple):
    """An autograd function of repositories over these extensions, which `patch` replaces.

    pattern: of its name.
    parameters: its own, without ctx.
    words: the same parameters in our words.
    """

    pattern: str
    operator: str
    parameters: str
    words: str
    layout: str = "BCDHW"


_MMCV = "value value_spatial_shapes value_level_start_index sampling_locations attention_weights im2col_step"
_SPARSE4D = "mc_ms_feat spatial_shape scale_start_index sampling_location weights"
_ATTENTION, _POOLING = "(?i)(ms|multi_?scale)_?deform", "(?i)cumsum|pool"
_LIFT_BY_INTERVALS, _CELLS = f"{_LIFT} interval_starts interval_lengths", "ranks B D H W"
AUTOGRAD_FUNCTIONS = (
    AutogradFunction(_ATTENTION, "multi_scale_deformable_attn", _MMCV, f"{_SAMPLES} step"),
    AutogradFunction(
        _ATTENTION,
        "multi_scale_deformable_attn",
        _MMCV.replace("value_level_start_index ", ""),
        "value shapes locations weights step",
    ),
    AutogradFunction("(?i)geometric", "geometric_kernel_attention", _MMCV, f"{_SAMPLES} step"),
    AutogradFunction("(?i)deformable_?aggregation", "deformable_aggregation", _SPARSE4D, _SAMPLES),
    AutogradFunction(_POOLING, _POOL, _LIFT_BY_INTERVALS, _LIFT_BY_INTERVALS, "BDHWC"),
    AutogradFunction(_POOLING, _POOL, f"x geom_feats {_CELLS}", f"feat geom_feat {_CELLS}", "BDHWC"),
    AutogradFunction(_POOLING, _POOL, f"feats coords {_CELLS} pooling_method", f"feat geom_xyzb {_CELLS} method", "BDHWC"),
    AutogradFunction(_POOLING, _POOL, "x geom_feats ranks", "feat places ranks"),  # Lift-Splat
    AutogradFunction("(?i)voxels_?sum", _POOL, "x geometry ranks", "feat places ranks"),  # FIERY
    AutogradFunction(_POOLING, _POOL, "geom_xyz input_features voxel_num", "geom_xyz feat voxel_num"),
    AutogradFunction(_POOLING, _POOL, "geom_xyz depth_features context_features voxel_num", "geom_xyz depth feat voxel_num"),
)


def find_autograd_function(name: str, parameters: Sequence[str]) -> AutogradFunction | None:
    """Return the row of an autograd function by its name and its own parameters."""
    rows = (row for row in AUTOGRAD_FUNCTIONS if row.parameters.split() == list(parameters))
    return next((row for row in rows if re.search(row.pattern, name)), None)


_OPTIONAL = ("starts", "step", "memo", "grad_value", "grad_locations", "grad_weights")
_SIZES = ("bev_feat_shape", "voxel_num", "B", "D", "H", "W", "X", "Y", "Z", "n", "C", "cams", "bins", "height", "width")
KEYWORDS: dict[str, str] = {  # the vendor's, mmcv's and transformers' names of parameters -> ours
    **dict.fromkeys(("feature_maps", "mc_ms_feat"), "value"),
    **dict.fromkeys(("value_spatial_shapes", "spatial_shapes", "spatial_shape", "shape"), "shapes"),
    **dict.fromkeys(("value_level_start_index", "level_start_index", "scale_start_index", "offset"), "starts"),
    **dict.fromkeys(("sampling_locations", "sample_locations", "sampling_location"), "locations"),
    **dict.fromkeys(("attention_weights", "weight"), "weights"),
    **{"im2col_step": "step", "grad_sampling_loc": "grad_locations", "grad_attn_weight": "grad_weights"},
    "input_features": "feat",  # of npu_voxel_pooling_train
}
_LIBRARIES = ("torch", "mmcv", "mmengine", "mx_driving", "mx_driving_portable", "contextlib", "functools")


def _function_named(operator: str) -> Function:
    """Return the row of a function that the user names: its parameters are the operator's."""
    name, direction = operator.partition("_backward")[:2]
    return Function("", name, name, _LIFT if name == _POOL else _GRADIENTS if direction else _SAMPLES)


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


def _is_compiling() -> bool:
    import torch

    return hasattr(torch, "compiler") and torch.compiler.is_compiling()


def insert_starts(args: Any) -> list[Any]:
    """Return the arguments of a sampling function. None stands for starts where it has none: levels lie one after the other.

    So do mmcv's plain torch, TrackFormer and TransTrack.
    """
    third: Any = args[2] if len(args) > 2 else None
    has_locations = hasattr(third, "is_floating_point") and third.dim() > 2 and third.is_floating_point()
    return [*args[:2], None, *args[2:]] if has_locations else list(args)


def _without_extras(args: Any) -> list[Any]:
    """Return the arguments of a sampling function without those that only some forms of it have."""
    import torch

    args = list(args)
    while args and not isinstance(args[0], torch.Tensor):
        del args[0]  # self
    if len(args) > 2 and isinstance(args[2], (list, tuple)) and args[2] and isinstance(args[2][0], (list, tuple)):
        del args[2]  # transformers' list of shapes, after their tensor
    return insert_starts(args)


def _as_ints(size: Any) -> Any:
    """Return a size, or a sequence of sizes, as ints: JSON takes no NumPy numbers and no tensors."""
    if isinstance(size, (list, tuple)) or getattr(size, "ndim", 0):
        return [int(number) for number in size]
    return int(size)


def _bind(row: Function, args: Any, kwargs: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Return the inputs, the tensors that the function writes to, and the sizes, by name."""
    import torch

    names = row.names
    positional = args if row.operator == _POOL else _without_extras(args)
    bound = dict(zip(names, positional))  # noqa: B905, zip has no strict before Python 3.10
    bound.update({KEYWORDS.get(name, name): a for name, a in kwargs.items()})
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
    outputs = {name: bound.pop(name) for name in row.outputs if name in bound}
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
        self.name, self.row = name, row
        self.number = itertools.count()  # its next() is atomic
        self.calls = self.recorded = 0
        self.not_kept, self.unread = 0, ""  # calls or gradients that could not be recorded, and the reason of the last

    @contextlib.contextmanager
    def counting_losses(self) -> Iterator[None]:
        """Keep our own errors from the program, and count what is lost."""
        try:
            yield
        except Exception as error:
            self.not_kept, self.unread = self.not_kept + 1, _reason(error)


class _OpenCall:
    """A call that is being recorded. Inputs are copied at once, or after a look at the results if only a NaN is wanted."""

    def __init__(self, function: _WrappedFunction, index: int, args: Any, kwargs: dict[str, Any]) -> None:
        import torch

        self.function, self.row, self.stem = function, function.row, ""
        self.inputs, self.outputs, sizes = _bind(self.row, args, kwargs)
        for name, t in self.outputs.items():
            if bool(t.any()):
                raise TypeError(f"{name} must be zero before a function adds to it; got other numbers")
        self.versions = [(t, t._version) for t in self.inputs.values() if not t.is_inference()]
        self.copies: dict[str, Tensor] = {}
        self.about: dict[str, Any] = {
            **{"function": function.name, "operator": self.row.operator, "form": self.row.name, "sizes": sizes},
            **{"index": index, "device": str(next(iter(self.inputs.values())).device), "caller": _caller()},
        }
        self.edges = self._edges() if torch.is_grad_enabled() and not self.row.backward else {}

    def _edges(self) -> dict[str, tuple[Any, int]]:
        """Return where autograd brings the gradient of each input that has one. An edge that several inputs share brings the
        sum of their gradients, which is no result of the operator: leave these inputs out."""
        names = DIFFERENTIABLE[self.row.operator]
        inputs = {name: self.inputs[name] for name in names if name in self.inputs and self.inputs[name].requires_grad}
        # a leaf's node is behind the node of anything that is made from it
        nodes = {name: t.grad_fn or t.expand_as(t).grad_fn.next_functions[0][0] for name, t in inputs.items()}  # pyright: ignore
        edges = {name: (nodes[name], t.output_nr) for name, t in inputs.items()}
        return {name: edge for name, edge in edges.items() if list(edges.values()).count(edge) == 1}

    def copy_inputs(self, reason: str) -> None:
        if any(t._version != version for t, version in self.versions):
            raise TypeError("inputs must be as they were when the call began; got changed ones, so that a NaN is not recorded")
        self.copies = _copy_to_host(self.inputs)
        strides = {name: list(t.stride()) for name, t in self.inputs.items() if not t.is_contiguous()}
        self.about.update(reason=reason, strides=strides)

    def results(self, returned: Any) -> dict[str, Tensor]:
        """Return what the function computed, by name."""
        if self.outputs:
            results = dict(self.outputs)
        elif not self.row.backward:
            results = {"output": returned}
        else:
            tensors = returned if isinstance(returned, (list, tuple)) else [returned]
            results = dict(zip(["grad_" + name for name in DIFFERENTIABLE[self.row.operator]], tensors))  # noqa: B905
        if not results or not all(_is_ordinary(t) for t in results.values()):
            raise TypeError(f"the function must give tensors or write to some; got {type(returned).__name__}")
        return results


def _copy_to_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    import torch

    contiguous = torch.contiguous_format
    return {name: t.detach().to("cpu", copy=True, memory_format=contiguous) for name, t in tensors.items()}


def _num_bytes(*tensors: dict[str, Tensor]) -> int:
    return sum(t.numel() * t.element_size() for some in tensors for t in some.values())


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
        if not self.left or not self.recorder.is_active():
            return  # `left` is 0 in a second backward through the same graph
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
                    self.recorder._take_gradients(self.call, gradients)


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


def _check_options(every: float, megabytes: float, functions: Any) -> None:
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


class Recorder:
    """Wraps the known functions of modules that are imported, now and later, until `stop`."""

    def __init__(
        self, out: Any, every: int = EVERY, nan: bool = False, megabytes: float = MEGABYTES, functions: Any = None
    ) -> None:
        _check_options(every, megabytes, functions)
        self.named = {name: _function_named(operator) for name, operator in (functions or {}).items()}
        self.folder = _make_folder(out)
        self.every, self.nan, self.megabytes = int(every), bool(nan), float(megabytes)
        self.functions: dict[str, _WrappedFunction] = {}
        self._process = os.getpid()
        self.num_bytes, self.reserved = 0, 0  # written, and written or awaited: gradients arrive later
        self.why = ""  # why no more calls are sampled
        self.failed = self._stopped = False
        self._numbers, self._local, self._lock = itertools.count(), threading.local(), threading.Lock()
        self._wrappers: dict[int, tuple[Any, Any]] = {}  # of originals and of wrappers, so that none is wrapped twice
        self._undo: list[tuple[Any, str, Any]] = []
        self._finder = _WrappingFinder(self)

    def start(self) -> Recorder:
        self._write_manifest()
        sys.meta_path.insert(0, self._finder)
        for name, module in list(sys.modules.items()):
            if self.watches(name) and isinstance(module, types.ModuleType):
                self.wrap(module)
        self._replace_imported_names()
        atexit.register(self.stop)
        return self

    def is_active(self) -> bool:
        """Return whether the recording goes on here: a forked child's files would have its parent's names."""
        return not self._stopped and os.getpid() == self._process

    def stop(self) -> None:
        """Restore the functions, and print a summary."""
        atexit.unregister(self.stop)
        if not self.is_active():
            return
        self._stopped = True
        sys.meta_path.remove(self._finder)
        for owner, name, before in reversed(self._undo):
            delattr(owner, name) if before is _ABSENT else setattr(owner, name, before)
        self._print_summary()

    def _print_summary(self) -> None:
        for name in self.named:
            if name not in self.functions:
                _say(f"{name} was never imported, or is no function")
        for f in self.functions.values():
            if f.not_kept:
                _say(f"not recorded of {f.name}: {f.not_kept}, calls and gradients; the last: {f.unread}")
        calls, recorded = (sum(getattr(f, count) for f in self.functions.values()) for count in ("calls", "recorded"))
        none = "" if calls else "; under torch.compile none is seen"
        _say(f"{recorded} of {calls} calls recorded, {self.num_bytes / 1e6:.0f} MB in {self.folder}{none}")

    def _write_manifest(self) -> None:
        import importlib.metadata
        import platform

        packages = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
        facts = {"program": sys.argv, "python": sys.version, "system": platform.platform(), "packages": packages}
        try:
            with (self.folder / "manifest.json").open("x") as file:  # another process may have found the folder empty, too
                file.write(json.dumps(facts, indent=1))
        except FileExistsError:
            raise ValueError(f"out must be a new or an empty folder; got {str(self.folder)!r}, one with files") from None
        except OSError as error:
            self._fail(error)

    def watches(self, module: str) -> bool:
        return bool(self._functions_of(module))

    def wrap(self, module: types.ModuleType) -> None:
        """Wrap the functions of a module that are recorded."""
        for path, (name, row) in self._functions_of(module.__name__).items():
            self._wrap(module, path, name, row)

    def _functions_of(self, module: str) -> dict[str, tuple[str, Function]]:
        """Return the functions of a module that are recorded: path in the module -> name and row."""
        is_vendors, last = module.partition(".")[0] == "mx_driving", module.rpartition(".")[2]
        owner, modules = ("mx_driving", ("mx_driving",)) if is_vendors else (module, (module, last))
        known = {row.name: (f"{owner}.{row.name}", row) for row in FUNCTIONS if row.module in modules}
        named = {name[len(module) + 1 :]: (name, row) for name, row in self.named.items() if name.startswith(module + ".")}
        return {**known, **named}

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

        def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
            original = super(owner, cls).apply if own is _ABSENT else own.__get__(None, cls)  # pyright: ignore
            if cls is not owner:
                return original(*args, **kwargs)
            return self._call(function, original, args, kwargs)

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
        @functools.wraps(original)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            return self._call(function, original, args, kwargs)

        return recorded

    def _call(self, function: _WrappedFunction, original: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return or raise what the original does, and record the call if it is its turn."""
        if _is_compiling() or not self.is_active() or getattr(self._local, "inside", False):
            return original(*args, **kwargs)
        index = next(function.number)
        function.calls = index + 1
        sampled = index % self.every == 0 and not self.why
        call = self._begin(function, index, sampled, args, kwargs) if sampled or self.nan else None
        self._local.inside = True
        try:
            returned = original(*args, **kwargs)
        finally:
            self._local.inside = False
        if call is not None:
            self._finish(call, returned)
        return returned

    def _begin(self, function: _WrappedFunction, index: int, sampled: bool, args: Any, kwargs: Any) -> _OpenCall | None:
        with function.counting_losses():
            if _is_tracing_or_capturing((*args, *kwargs.values())):
                return None
            call = _OpenCall(function, index, args, kwargs)
            if sampled:
                call.copy_inputs(f"every {self.every}")
            return call

    def _finish(self, call: _OpenCall, returned: Any) -> None:
        with call.function.counting_losses():
            results = call.results(returned)
            is_first_nan = self._copy_inputs_of_first_nan(call, results)
            if call.copies and (self._fits_budget(call, results) or is_first_nan):
                self._write_call(call, results)
            output = results.get("output")
            if call.edges and output is not None and output.grad_fn is not None and (call.stem or self.nan):
                _GradientHooks(self, call, output)
            if call.stem:
                call.inputs, call.outputs, call.versions = {}, {}, []  # the program may want the memory back

    def _fits_budget(self, call: _OpenCall, results: dict[str, Tensor]) -> bool:
        """Count what the call and its gradients take. End the sampling if that is more than is left."""
        self.reserved += _num_bytes(call.inputs, results) * (2 if call.edges else 1)
        if not self.why and self.reserved > self.megabytes * 1e6:
            self.why = f"the budget of {self.megabytes:g} MB is used up; the program goes on"
            _say(self.why)
        return not self.why

    def _copy_inputs_of_first_nan(self, call: _OpenCall, results: dict[str, Tensor]) -> bool:
        if not self.nan or not any(bool(t.detach().isnan().any()) for t in results.values()):
            return False
        self.nan = False
        if not call.copies:
            call.copy_inputs("")
        call.about["reason"] = "the first NaN"
        return True

    def _take_gradients(self, call: _OpenCall, gradients: dict[str, Tensor]) -> None:
        """Write gradients that have arrived, in the middle of a backward of the program."""
        if call.stem:
            self._write(f"{call.stem}-gradients", call.about, _copy_to_host(gradients))
        elif self._copy_inputs_of_first_nan(call, gradients):  # a NaN that only the gradients have
            self._write_call(call, gradients)

    def _write_call(self, call: _OpenCall, results: dict[str, Tensor]) -> None:
        stem = f"call-{next(self._numbers):06d}"
        if self._write(stem, call.about, {**call.copies, **_copy_to_host(results)}):
            call.stem, call.function.recorded = stem, call.function.recorded + 1
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
            self.num_bytes += _num_bytes(tensors)
            return True

    def _fail(self, error: OSError) -> None:
        """End the recording with a sentence."""
        if not self.failed:
            self.failed, self.nan = True, False
            num_calls = sum(f.recorded for f in self.functions.values())
            self.why = f"recording into {self.folder} has ended after {num_calls} calls: {_reason(error)}; the program goes on"
            _say(self.why)


def start(out: Any, **options: Any) -> Recorder:
    """Record into a new folder from now on, until `stop` of the returned recorder, or the end of the program.

    Args:
        out: folder to make. Each process of a distributed program makes a folder of its own in it.
        every: record the first call of each function, and then every so many. The default is a prime, so that the layers of a
            model come up in turn.
        nan: also record the first call with a NaN in its output or its gradients, even when the budget is used up. The results
            of all calls are then read, and on a device the program waits for them.
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


def _can_run(module: str) -> bool:
    """Return whether `python -m module` finds a module, or a package with a program."""
    import importlib.util

    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # the parent package is missing; an empty name
        return False
    return spec is not None and (spec.submodule_search_locations is None or _can_run(f"{module}.__main__"))


def _check_program(program: str, module: bool) -> None:
    """Raise an error if there is no such program. sys.path begins as Python's would for it."""
    sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.abspath(program))
    if module and not _can_run(program):
        raise ValueError(f"program must be a module that Python finds; got {program or repr(program)}")
    if not module and not os.path.isfile(program):
        raise ValueError(f"program must be a file; got {program or repr(program)}")


def _number(text: str) -> float | str:
    """Return a number, or a text that is none, which the recorder refuses."""
    try:
        return int(text) if text.lstrip("-").isdecimal() else float(text)
    except ValueError:
        return text


def _explain(message: str) -> str:
    """Return a sentence for an error of argparse."""
    option, _, fact = message.partition(": ")
    option = option.split()[-1]
    if "expected one argument" in fact:
        return f"{option} must have a value; got none"
    if "ignored explicit argument" in fact:
        return f"{option} must have no value; got one"
    if option == "arguments":
        return f"an option must be one that --help lists; got {fact}"
    return "program must be given; got none" if option == "required" else message


def main(command: str = "record.py", words: list[str] | None = None) -> None:
    """Run a program, and record it. A wrong command line ends with one sentence and exit status 2.

    Args:
        command: begins the sentence.
        words: the command line, without the program's name; by default that of this process.
    """
    import argparse
    import runpy

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> Any:
            self.exit(2, f"{command}: {_explain(message)}\n")

    name = "mx-driving record" if words is not None else "record.py"
    about = "Run a program, and record its calls of sampling operators for `mx-driving replay`."
    parser = Parser(usage=f"{name} [options] program [arguments]", description=about, allow_abbrev=False)
    add = parser.add_argument
    add("--out", default="calls", metavar="FOLDER", help="Folder to make (default: calls).")
    first = "Record the first call of each function, and then every so many"
    add("--every", type=_number, default=EVERY, metavar="N", help=f"{first} (default: {EVERY}).")
    add("--nan", action="store_true", help="Also record the first call with a NaN. A device then waits at each call.")
    add("--megabytes", type=_number, default=MEGABYTES, metavar="N", help=f"The most to write (default: {MEGABYTES:g}).")
    named = "Another function, package.name=operator; may be repeated."
    add("--function", action="append", default=[], metavar="NAME", help=named)
    add("-m", dest="module", action="store_true", help="The program is a module, as in `python -m`.")
    add("program", help="The program to run.")
    add("arguments", nargs=argparse.REMAINDER, help="Its arguments.")
    options = vars(parser.parse_args(words))
    program, arguments, module = (options.pop(name) for name in ("program", "arguments", "module"))
    options["functions"] = dict(name.partition("=")[::2] for name in options.pop("function"))
    try:
        _check_program(program, module)
        recorder = start(**options)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    sys.argv = [program, *arguments]
    try:
        if module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program, run_name="__main__")
    finally:
        recorder.stop()


if __name__ == "__main__":
    main()
