"""Each private name of torch works as the package needs. The row of a name says what is lost without it."""

import ast
import pathlib
import re

import pytest
import torch
from torch._decomp import decomposition_table as DECOMPOSITIONS
from torch._decomp import meta_table
from torch._dynamo.exc import Unsupported
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import Linear

import mx_driving
from mx_driving import _torch_private as p

ONE, OP, KEYS = torch.ones(2), torch.ops.mx_driving.bev_pool_v3.default, p.DispatchKey


def under(transform, ask):
    """Return the answers of `ask` for the tensor that a transform passes to a function."""
    answers = []
    transform(lambda t: answers.append(ask(t)) or t.sum())(ONE)
    return answers


def in_make_fx(ask):
    answers = []
    make_fx(lambda t: answers.append(ask()) or t + 1)(ONE)
    return answers[0]


def in_vmap(ask):
    return under(torch.vmap, lambda t: ask())[0]


def tells(inside, ask):
    return inside(ask) and not ask()


def in_forward_mode(ask):
    with forward_ad.dual_level():
        return ask()


def traced(ask):
    answers = []
    torch.jit.trace(lambda t: answers.append(ask()) or t + 1, ONE)
    return answers[0]


def entered(context):
    with context:
        return True


def recorded_below():
    with p.below_autograd():
        return (ONE.clone().requires_grad_() + 1).requires_grad


def of_layer(ask, change):
    """Return the answers of `ask` for a changed layer and for an unchanged layer."""
    layers = Linear(2, 2), Linear(2, 2)
    change(layers[0])
    return [*map(ask, layers)]


def splits_graphs():
    def function(t):
        return t + 1

    p.skip_in_compile(function)
    with pytest.raises(Unsupported):
        torch.compile(lambda t: function(t), backend="eager", fullgraph=True)(ONE)
    return True


def fails_in_graph():
    graph = make_fx(lambda t: p.assert_in_graph(t, "must not be 0"))(torch.ones(()))
    with pytest.raises(RuntimeError, match="must not be 0"):
        graph(torch.zeros(()))
    return True


# name -> (what is lost without it, a function that returns whether it works)
def read_under_grad():
    def read(t):
        with p.outside_transforms():
            assert ONE.tolist() == [1.0, 1.0]
        return t.sum()

    return torch.func.grad(read)(torch.ones(2)).tolist() == [1.0, 1.0]


NAMES = {
    "is_tracing": ("traced graphs that keep no numbers of the example", lambda: tells(traced, p.is_tracing)),
    "count_dispatch_modes": ("fake tensors, which are then read", lambda: tells(in_make_fx, p.count_dispatch_modes)),
    "are_transforms_active": ("torch.func", lambda: tells(in_vmap, p.are_transforms_active)),
    "is_traced_by_make_fx": ("modules in graphs of make_fx", lambda: tells(in_make_fx, p.is_traced_by_make_fx)),
    "is_transformed": ("sentences about tables under vmap", lambda: under(torch.vmap, p.is_transformed) == [1]),
    "has_no_memory": ("zero tensors as tables", lambda: p.has_no_memory(torch._efficientzerotensor(2))),
    "without_gradients": ("sentences about tables under jvp", lambda: under(torch.func.grad, p.without_gradients)[0] is ONE),
    "without_transforms": ("limits of vmapped locations", lambda: under(torch.vmap, p.without_transforms)[0] is ONE),
    "outside_transforms": ("sentences about tables under grad, torch 2.6", lambda: read_under_grad()),
    "is_batched": ("pools of vmapped points", lambda: under(torch.vmap, p.is_batched) == [1]),
    "DispatchKey": ("kernels of GPUs called directly", lambda: p.DispatchKey.CUDA != p.DispatchKey.XPU),
    "BELOW_AUTOGRAD": ("all gradients", lambda: [*map(p.BELOW_AUTOGRAD.has, (KEYS.AutogradCPU, KEYS.CPU))] == [0, 1]),
    "below_autograd": ("gradients by kernels in Python", lambda: not recorded_below()),
    "compiled_autograd_key": ("compiled autograd", lambda: callable(p.compiled_autograd_key or id)),
    "enable_forward_mode": ("jvp of grad", lambda: entered(p.enable_forward_mode(True))),
    "is_forward_mode_active": ("tangents, dropped without a word", lambda: tells(in_forward_mode, p.is_forward_mode_active)),
    "FunctionOfOneLevel": ("all gradients", lambda: issubclass(torch.autograd.Function, p.FunctionOfOneLevel)),
    "allow_function_of_one_level": ("torch.func.grad", lambda: entered(p.allow_function_of_one_level())),
    "register_decomposition": ("torch.onnx.export", lambda: OP in DECOMPOSITIONS and OP in meta_table),
    "keep_whole_in_inductor": ("inductor where CI is set", lambda: not p.keep_whole_in_inductor(OP)),
    "assert_in_graph": ("bev_pool_v2 in a graph, which reads beyond its points", fails_in_graph),
    "skip_in_compile": ("compiled spatial cross-attention", splits_graphs),
    "has_hooks": ("hooks of linear layers", lambda: of_layer(p.has_hooks, lambda m: m.register_forward_hook(id)) == [1, 0]),
    "GLOBAL_HOOKS": ("hooks of all modules", lambda: all(not hooks for hooks in p.GLOBAL_HOOKS)),
    "is_compiled_in_place": ("layers that are compiled", lambda: of_layer(p.is_compiled_in_place, Linear.compile) == [1, 0]),
    "CALL_OF_A_LAYER": ("names of layers in looks", lambda: p.CALL_OF_A_LAYER.co_name == "_call_impl"),
    "tree_flatten": ("trials of modules that return tuples", lambda: p.tree_flatten((1, [2]))[0] == [1, 2]),
    "find_scripted": ("torch.jit.script beside torch_npu's stand-in", lambda: p.find_scripted(torch.relu)),
    "scripted_builtins": ("the same, taken back", lambda: id(torch.relu) in p.scripted_builtins()),
    "STORAGE_PLACES": ("torch.load beside torch_npu's stand-in", lambda: callable(p.STORAGE_PLACES[0][2])),
    "device_constructors": ("devices of torch_npu's stand-in", lambda: torch.empty in p.device_constructors()),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_what_is_lost_without(name):
    lost, does_its_work = NAMES[name]
    assert does_its_work(), f"_torch_private.{name} does not do its work in this torch. Lost: {lost}"


def test_distributed_names():
    """Their work is tested by test_distributed.py, in a process with DTensor."""
    from torch.distributed.tensor import DTensor

    assert hasattr(DTensor, "_op_dispatcher"), "Lost: gradients of sharded inputs"


def test_no_other_file_has_private_names():
    folder = pathlib.Path(mx_driving.__file__).parent
    private_name = re.compile(r"\btorch(\.\w+)*\._(?!_)\w+")
    for file in folder.rglob("*.py"):
        if file.name == "_torch_private.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            if isinstance(node, ast.ImportFrom) and not node.level:
                name = " ".join(f"{node.module}.{alias.name}" for alias in node.names)
            assert not private_name.search(name), f"{file.relative_to(folder)}: {name}"
