"""The operators and their backwards in torch's dispatcher. The dispatcher and `choose` select the kernel of a call before any
kernel runs: there is no fallback after an error.

We cannot use `torch.library.register_autograd`: it has reverse mode only. Its kernels raise under torch.func.grad, and silently
drop forward-mode tangents.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import _backends, _data_checks, _torch_private, reference
from .._backends import choose
from .._backends.triton import from_cpp
from .._operator import checks, rules
from .._operator.composition import autocast_dtype, empty_gradients
from .._operator.description import OPERATORS, Operator
from . import decompositions, distributed, flops

# If another program defined our schemas in C++, why_by_ctypes() removes its definitions first.
_CPU_IN_PYTHON = _backends.native.why_by_ctypes() is not None  # False: C++ has registered the CPU kernels
_PLAIN = (Tensor, torch.nn.Parameter)
_NOTHING = contextlib.nullcontext()
_DEVICES = {"CPU": "cpu", "CUDA": "cuda", "XPU": "xpu", "CompositeExplicitAutograd": "other"}  # dispatch key -> device type
_library = torch.library.Library("mx_driving", "DEF")


class Registered:
    """An operator, its `<name>_autocast` or its `<name>_backward` in torch's dispatcher. Methods are in the order of a call.

    `<name>_autocast` reads 16-bit inputs without converting them, and returns the float32 output that converted inputs would
    give. Its backward is the operator's backward, with grad_output in float32.
    """

    value = 0  # the index of value among the arguments: 1 in a backward, after grad_output

    def __init__(self, operator: Operator, suffix: str) -> None:
        self.operator, self.name, self.is_autocast = operator, operator.name + suffix, suffix == "_autocast"
        self.count = self.value + len(operator.inputs)  # arguments that are tensors or None
        # the indices of differentiable arguments
        self.differentiable = (0, *(i + 1 for i in operator.differentiable)) if self.value else operator.differentiable
        self.shared = tuple(self.value + i for i in operator.shared)
        # Python kernels call this check before they run. C++ kernels check their arguments themselves.
        self.check = functools.partial(checks.check_backward if self.value else checks.check_inputs, operator)
        tensors = (f"Tensor{'?' * t.optional} {t.name}" for t in operator.tensors)
        arguments, count = ", ".join((*tensors, *operator.options)), len(operator.differentiable)
        self.schema = f"{self.name}({arguments}) -> Tensor"
        if self.value:
            results = ", ".join(["Tensor"] * count)
            self.schema = f"{self.name}(Tensor grad_output, {arguments}, bool[{count}] output_mask) -> ({results})"
        _library.define(self.schema, tags=(torch.Tag.pt2_compliant_tag,))
        self.op = getattr(torch.ops.mx_driving, self.name).default
        native = _backends.native.Kernel(operator.name, self.value > 0, autocast=self.is_autocast)
        self.kernels = {"native": native, "triton": self.run_triton, "reference": self.run_reference}
        self.function = self.make_function()

        if not suffix:  # under autocast, call `<name>_autocast` with the inputs in their own dtypes
            for key in ("AutocastCPU", "AutocastCUDA", "AutocastXPU"):
                _library.impl(self.name, lambda *args: REGISTERED[f"{self.name}_autocast"].op(*args), key)
        torch.library.register_vmap(f"mx_driving::{self.name}", self.vmap, lib=_library)
        _library.impl(self.name, self.autograd, "Autograd", with_keyset=True)
        torch.library.register_fake(f"mx_driving::{self.name}", self.fake, lib=_library)
        kernels = {
            key: functools.partial(self.run, device) for key, device in _DEVICES.items() if key != "CPU" or _CPU_IN_PYTHON
        }
        if self.name in from_cpp.OPERATORS and from_cpp.why_not() is None:  # C++ has registered the CUDA kernel
            from_cpp.define(self.name, self.schema, kernels.pop("CUDA"))
        for key, kernel in kernels.items():
            _library.impl(self.name, kernel, key)
        self.gpu_kernels = {getattr(_torch_private.DispatchKey, key): kernels[key] for key in ("CUDA", "XPU") if key in kernels}
        if not self.value:
            packet = getattr(torch.ops.mx_driving, operator.name)
            decomposition = (lambda *args: packet(*_widen(args))) if self.is_autocast else decompositions.find(operator.name)
            _torch_private.register_decomposition(self.op, decomposition, self.fake)

    def vmap(self, info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        dims = [dim if isinstance(a, Tensor) else None for a, dim in zip(args, in_dims, strict=True)]

        def check_entry() -> None:
            """Check the shapes and dtypes of one entry of the vmapped axis."""
            self.check(*(a if d is None else a.new_empty(a.movedim(d, 0).shape[1:]) for a, d in zip(args, dims, strict=True)))

        if info.batch_size == 0:  # folded axes have size 0 and always agree
            check_entry()
        try:
            return self.map_call(info.batch_size, dims, args)
        except Exception:
            check_entry()  # an entry is not folded, so the error has the caller's sizes
            raise

    def map_call(self, size: int, dims: list[int | None], args: tuple[Any, ...]) -> Any:
        """Return the results for all entries of the vmapped axis, and the dimension of the vmapped axis in every result.

        Fold the vmapped axis into the batches or queries, and call the operator once: fold into the batches if an input that
        all queries read, such as value, is vmapped or needs a gradient; else into the queries. For pooling, or if an input that
        batches share, such as the sizes of maps, is vmapped, call the operator once per entry.

        Args:
            size: the size of the vmapped axis.
            dims: the vmapped dimension of each argument, or None.
        """
        operator, value = self.operator, self.value
        if operator.kind == "pooling" or any(dims[i] is not None for i in self.shared):
            if size == 0:
                rules.fail(ValueError, "in_dims", f"name axes with entries where vmap calls {self.name} for each", "size 0")
            entry_results = []
            for entry in range(size):
                inputs = [a if d is None else a.select(d, entry) for a, d in zip(args, dims, strict=True)]
                try:
                    entry_results.append(self.op(*inputs))
                except RuntimeError:  # check the numbers in index tensors here: callers cannot read those of vmapped tensors
                    self.check(*inputs)
                    checks.check_readable_numbers(operator, inputs[value : len(args) - value])
                    raise
            if value == 0:
                return torch.stack(entry_results), 0
            return tuple(map(torch.stack, zip(*entry_results, strict=True))), (0,) * len(entry_results[0])
        mask = args[-1] if value else None
        needed = [value + i for i, need in zip(operator.differentiable, mask or (), strict=False) if need]
        read_by_all = [value + i for i, axis in enumerate(operator.axes[operator.queries][:-1]) if axis is None]
        joined = 0 if any(dims[i] is not None or i in needed for i in read_by_all) else 1
        whole = read_by_all if joined else self.shared
        folded = [
            _move_to(a, dim, size, joined).flatten(joined, joined + 1) if isinstance(a, Tensor) and i not in whole else a
            for i, (a, dim) in enumerate(zip(args, dims, strict=True))
        ]
        locations = value + 3
        count = _move_to(args[locations], dims[locations], size, joined).shape[joined + 1]  # number of batches or queries
        results = self.op(*folded)
        if mask is None:
            return results.unflatten(joined, (size, count)), joined
        outputs = tuple(g.unflatten(joined, (size, count)) if needed else g for g, needed in zip(results, mask, strict=True))
        return outputs, tuple(joined if needed else None for needed in mask)

    def autograd(self, keyset: Any, *args: Any) -> Any:
        """Serve the Autograd key: forward mode by the reference, reverse mode by an autograd function of a single level.

        A single level suffices, because torch.func unwraps its levels before the dispatcher calls us. All operations of the
        reference have formulas for tangents.
        """
        args = distributed.prepare(args, self.shared)
        transformed = _torch_private.are_transforms_active()
        # only `transformed` shows a compiled torch.func.jvp, which sets no level in forward_ad
        if (transformed or _torch_private.is_forward_mode_active()) and any(
            isinstance(a, Tensor) and forward_ad.unpack_dual(a, level=0).tangent is not None for a in args
        ):
            self.check(*args)
            checks.check_readable_numbers(self.operator, args[self.value : len(args) - self.value])
            # forward mode ignores the tangent of an input that is not differentiable
            detached = (a if i in self.differentiable or not isinstance(a, Tensor) else a.detach() for i, a in enumerate(args))
            return self.reference(*detached)
        if torch.is_grad_enabled():
            for i in self.differentiable:
                if args[i] is not None and args[i].requires_grad:  # the kernel refuses None
                    with _torch_private.allow_function_of_one_level() if transformed else _NOTHING:
                        return self.function.apply(keyset, *args)
        return self.below_autograd(keyset, *args)

    def below_autograd(self, keyset: Any, *args: Any) -> Any:
        """Call the device's kernel. Send calls that C++ kernels cannot serve to the reference.

        Exclude the Autograd keys, because Python kernels call torch operations, which must not be recorded.
        """
        value, below = args[self.value], keyset & _torch_private.BELOW_AUTOGRAD
        if type(value) in _PLAIN and value.is_cpu:
            if value.numel() > _backends.native.MOST_ROWS:  # with fewer elements, value has fewer rows
                inputs = args[self.value : self.count]
                if choose(self.operator, "cpu", inputs)[0] == "reference":
                    return self.run("cpu", *args)
            if not _CPU_IN_PYTHON:
                return self.op.redispatch(below, *args)
        # GPU: call the Python kernel directly, because a redispatch takes 5 us
        kernel = self.gpu_kernels.get(below.highestPriorityTypeId())
        with _torch_private.below_autograd():
            return kernel(*args) if kernel else self.op.redispatch(below, *args)

    def make_function(self) -> Any:
        """Return the autograd function, whose graph node has the operator's name. Its first argument is a dispatch keyset."""

        def forward(ctx: Any, keyset: Any, *args: Any) -> Any:
            ctx.save_for_backward(*args[: self.count])
            ctx.options = args[self.count :]
            if not _torch_private.are_transforms_active():
                return self.below_autograd(keyset, *args)
            # Autograd disables grad mode and forward mode inside a function's forward. Outer levels of torch.func need both.
            with torch.enable_grad(), _torch_private.enable_forward_mode(True):
                return self.below_autograd(keyset, *args)

        members = {
            "forward": forward,
            "backward": lambda ctx, *grads: (None, *self.differentiate(ctx, grads, ctx.needs_input_grad[1:])),
        }
        if _torch_private.compiled_autograd_key:
            members["_compiled_autograd_key"] = _torch_private.compiled_autograd_key
        members = {name: staticmethod(member) for name, member in members.items()}
        return type(self.name, (_torch_private.FunctionOfOneLevel,), members)

    def differentiate(self, ctx: Any, grads: tuple[Any, ...], needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
        """Return the gradients of all arguments, by `<name>_backward`. Skip the Autograd key of the backward if nothing
        records the call."""
        mask = [needs[i] for i in self.differentiable]
        backward = getattr(torch.ops.mx_driving, self.operator.name + "_backward").default
        options = ctx.options if self.operator.options else ()  # an OperatorFunction saves no options
        inputs = ctx.saved_tensors
        args = (*grads, *inputs, *options, mask)
        # The call needs our Autograd kernel if grad mode, torch.compile or a transform of torch.func is active; or if value is
        # of a subclass of Tensor, or may have too many rows for C++.
        is_recorded = type(inputs[0]) not in _PLAIN or torch.is_grad_enabled() or torch.compiler.is_compiling()
        if is_recorded or _torch_private.are_transforms_active() or inputs[0].numel() > _backends.native.MOST_ROWS:
            gradients = backward(*args)
        else:
            with _torch_private.below_autograd():
                gradients = backward(*args)
        by_argument: list[Tensor | None] = [None] * (self.count + len(options))
        for i, needed, g in zip(self.differentiable, mask, gradients, strict=True):
            by_argument[i] = g if needed else None
        return tuple(by_argument)

    def fake(self, *args: Any) -> Any:
        _torch_private.keep_whole_in_inductor(self.op)  # here, because inductor traces a graph before it lowers the graph
        self.check(*args)
        dtype = autocast_dtype(args[0]) if self.is_autocast else args[0].dtype
        return args[0].new_empty(checks.output_shape(self.operator, args), dtype=dtype)

    def run(self, device: str, *args: Any) -> Any:
        """Run the kernel of a device. After a forward, run the data checks if they are on."""
        self.check(*args)
        backend, _ = choose(self.operator, device, args[self.value : self.count])
        results = self.kernels[backend](*args)
        if not self.value and _data_checks.enabled():
            _data_checks.check(self.operator, args)
        return results

    def run_triton(self, *args: Any) -> Any:
        """Run the Triton kernel. The first call imports it."""
        dtype = {"dtype": autocast_dtype(args[0])} if self.is_autocast else {}
        return _backends.triton.kernel(self.operator.name, self.value > 0)(*args, **dtype)

    def run_reference(self, *args: Any) -> Any:
        """Run the reference. First check the numbers in index tables: on a CPU, where reading is free, and in data_checks()."""
        names = ("grad_output", *self.operator.inputs)[1 - self.value :]
        rules.need_tensors(*((n, a) for n, a in zip(names, args[: self.count], strict=True) if a is not None))
        if args[self.value].device.type == "cpu" or _data_checks.enabled():
            checks.check_numbers(self.operator, args[self.value : len(args) - self.value])
        return self.reference(*args)

    def reference(self, *args: Any) -> Any:
        if self.is_autocast:
            return getattr(reference, self.operator.name)(*_widen(args))
        return getattr(reference, self.name)(*args)


class RegisteredBackward(Registered):
    """An operator's backward. Its arguments are grad_output, the inputs and output_mask."""

    value = 1

    def differentiate(self, ctx: Any, grads: tuple[Any, ...], needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
        """Return the second derivative: differentiate the reference's backward, which is differentiable torch."""
        tensors, (*options, mask) = list(ctx.saved_tensors), ctx.options
        indices = [i for i in self.differentiable if needs[i]]

        def first_gradients(*chosen: Tensor) -> tuple[Tensor, ...]:
            for i, t in zip(indices, chosen, strict=True):
                tensors[i] = t
            outputs = self.reference(*tensors, *options, mask)
            return tuple(g for g, needed in zip(outputs, mask, strict=True) if needed)

        outputs, vjp, *_ = torch.func.vjp(first_gradients, *(tensors[i] for i in indices))
        needed = [g for g, needed in zip(grads, mask, strict=True) if needed]
        filled = [torch.zeros_like(o) if g is None else g for g, o in zip(needed, outputs, strict=True)]
        second = dict(zip(indices, vjp(tuple(filled)), strict=True))
        return (*map(second.get, range(self.count + len(options))), None)

    def fake(self, *args: Any) -> Any:
        self.check(*args)
        _, *inputs, mask = args
        return tuple(empty_gradients([inputs[i] for i in self.operator.differentiable], mask))


def _move_to(t: Tensor, dim: int | None, size: int, axis: int) -> Tensor:
    """Move the vmapped axis to `axis`. Without a vmapped axis, expand a new axis of `size`, which copies nothing."""
    if dim is not None:
        return t.movedim(dim, axis)
    return t.unsqueeze(axis).expand(*t.shape[:axis], size, *t.shape[axis:])


def _widen(args: tuple[Any, ...]) -> Iterator[Any]:
    """Return the arguments with 16-bit tensors in float32."""
    return (a.to(autocast_dtype(a)) if isinstance(a, Tensor) else a for a in args)


def _follow_data() -> None:
    """Replace the CPU's C++ kernels by Python kernels, which run the data checks while these are on. Never undo this: a call
    of a Python kernel may still be running when the checks are turned off."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        for name, registered in REGISTERED.items():
            if not isinstance(registered, RegisteredBackward):
                _library.impl(name, functools.partial(registered.run, "cpu"), "CPU")


REGISTERED: dict[str, Registered] = {}
for _operator in OPERATORS.values():
    for _suffix, _class in (("", Registered), ("_autocast", Registered), ("_backward", RegisteredBackward)):
        REGISTERED[_operator.name + _suffix] = _class(_operator, _suffix)
if not _CPU_IN_PYTHON:
    _data_checks.when_enabled(_follow_data)
if from_cpp.why_not() is None:
    _data_checks.when_enabled(from_cpp.stop)
flops.register()
