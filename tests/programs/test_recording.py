"""`mx_driving_portable/record.py` saves calls of what serves them, and changes nothing: bits, graph, errors."""

from __future__ import annotations

import ast
import csv
import dataclasses
import errno
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
import types

import cases
import numpy as np
import pytest
import torch
from device_machine import FILE, KINDS, device_machine, recorded, run
from programs import python
from recorded_calls import call, replay

import mx_driving
from mx_driving._vendor.replay import forms
from mx_driving_portable import record

FILES = {
    "vendor": ["mx_driving.multi_scale_deformable_attn"],
    "mmcv": ["mmcv._ext.ms_deform_attn_forward", "mmcv._ext.ms_deform_attn_backward"],
    "extension": [f"ops.MultiScaleDeformableAttention.ms_deform_attn_{way}" for way in ("forward", "backward")],
    "by name": ["own.kernels.sample"],
}


ALONE: list[str] = []  # what the program says that is not recorded


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_is_recorded_computes_the_same_and_is_right(kind, tmp_path):
    folder = device_machine(tmp_path, kind)
    if not ALONE:  # all kinds compute alike
        ALONE.append(run(folder, "program.py", "a", "--b").stdout)
    named = ["--function", "own.kernels.sample=multi_scale_deformable_attn"] if kind == "by name" else []
    done = run(folder, "record.py", "--every", "3", *named, "program.py", "a", "--b")
    assert done.stdout == ALONE[0] != ""
    calls = 7 * len(FILES[kind])
    assert done.stderr == f"record: {3 * len(FILES[kind])} of {calls} calls recorded, {done.stderr.split(', ')[1]}"
    manifest = json.loads((folder / "calls/manifest.json").read_text())
    assert manifest["format"] == record.FORMAT
    assert {name: f["recorded"] for name, f in manifest["functions"].items()} == dict.fromkeys(FILES[kind], 3)
    found = recorded(folder / "calls")
    assert sorted(manifest["calls"]) == sorted(f"{name}.pt" for name in found)
    assert {about["function"] for about, _ in found.values()} == set(FILES[kind])
    assert sorted(about["index"] for about, _ in found.values()) == sorted([0, 3, 6] * 2)
    for about, tensors in found.values():
        if about["direction"] == "backward":
            assert {"grad_output", "grad_value", "grad_locations", "grad_weights"} <= set(tensors)
        else:
            assert set(tensors) == {"value", "shapes", "starts", "locations", "weights", "output"}
        assert about["caller"].endswith(".py:" + about["caller"].rpartition(":")[2])
        assert "program.py" in about["caller"]
    replayed = replay(folder / "calls", "--csv", tmp_path / "x.csv")
    assert replayed.exit_code == 0, replayed.output
    calls = {name for name in found if "gradients" not in name}
    assert replayed.output.rstrip().endswith(f"all is well: {len(calls)} calls are right")
    with (tmp_path / "x.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert {row["call"] for row in rows} == calls
    assert {row["result"] for row in rows} == {"output", "grad_value", "grad_locations", "grad_weights"}
    assert {row["verdict"] for row in rows} == {"right"}
    assert all(0 < float(row[column]) <= 1 for row in rows for column in ("device", "float32", "ours"))


def test_python_m_runs_scripts_and_modules(tmp_path):
    (tmp_path / "module.py").write_text("import sys\nprint(sys.argv[0][-9:], sys.argv[1:], __name__)\nsys.exit(3)\n")
    for what in (["module.py"], ["-m", "module"]):
        done = python("-m", "mx_driving_portable.record", *what, "--every", "7", cwd=tmp_path, check=False)
        assert done.returncode == 3
        assert done.stdout == "module.py ['--every', '7'] __main__\n"
        assert done.stderr == "record: 0 of 0 calls recorded, 0 MB in calls; under torch.compile none is seen\n"
        (tmp_path / "calls/manifest.json").unlink()


@pytest.mark.parametrize("words", [["-m", "mx_driving"], ["-c", "from mx_driving_portable import main; main()"]])
def test_the_command_is_the_same_program(words, tmp_path):
    (tmp_path / "program.py").write_text("import sys\nprint(sys.argv, 'typer' in sys.modules)\nsys.exit(3)\n")
    done = python(*words, "record", "--every", "7", "program.py", "--out", "x", cwd=tmp_path, check=False)
    assert done.returncode == 3
    assert done.stdout == "['program.py', '--out', 'x'] False\n"
    assert done.stderr == "record: 0 of 0 calls recorded, 0 MB in calls; under torch.compile none is seen\n"
    helped = python(*words, "record", "-h", cwd=tmp_path)
    assert "--megabytes" in helped.stdout


def test_the_file_is_alone():
    """It imports nothing of ours, and parses with the Python of older machines."""
    tree = ast.parse(FILE.read_text(), feature_version=(3, 8))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    outside = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names
    assert outside == {"torch"}
    lazy = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    assert not {alias.name for n in lazy if isinstance(n, ast.Import) for alias in n.names} & outside


def inputs(learned=(0, 3, 4)):
    made = cases.multi_scale(2, 5, 8, 3, [(4, 6), (2, 3)], 2)
    return [t.clone().requires_grad_(i in learned) for i, t in enumerate(made)]


@pytest.fixture
def attention():
    """A module whose function is recorded."""
    module = types.ModuleType("stand_in")
    module.attend = lambda *args: mx_driving.multi_scale_deformable_attn(*args)
    sys.modules["stand_in"] = module
    yield module
    del sys.modules["stand_in"]


NAMED = {"stand_in.attend": cases.MULTI_SCALE}


def nodes(grad_fn):
    """The names of a graph's nodes, depth first."""
    return [grad_fn.name(), *(name for below, _ in grad_fn.next_functions if below is not None for name in nodes(below))]


def test_bits_graph_and_tensors_are_the_programs_own(attention, tmp_path):
    def results(recording):
        given = inputs()
        shared = given[0] * 2
        versions = [t._version for t in given]
        outs = [attention.attend(shared, *given[1:]) for _ in range(3)]  # three gradients meet in value
        out = outs[0] * outs[1] + outs[2]
        graph = nodes(out.grad_fn)
        gradients = torch.autograd.grad(out.sum() + (shared**3).sum(), [given[i] for i in (0, 3, 4)])
        assert [t._version for t in given] == versions
        return graph, [*outs, *gradients]

    graph, alone = results(None)
    with record.recording(tmp_path / "calls", every=1, nan=True, functions=NAMED) as recording:
        recorded_graph, found = results(recording)
    assert recorded_graph == graph
    assert all(torch.equal(a, b) for a, b in zip(found, alone, strict=True))
    assert len(recorded(tmp_path / "calls")) == 6


def test_gradients_are_those_of_the_call_alone(attention, tmp_path):
    """Not those that an input has from elsewhere; also where the call is several nodes, and its inputs are leaves or not."""
    given = inputs()
    attention.attend = lambda v, *rest: mx_driving.multi_scale_deformable_attn(v.float().double() + 0 * v, *rest)
    with record.recording(tmp_path / "calls", functions=NAMED):
        value = given[0].sin()
        out = attention.attend(value, *given[1:])
        direction = torch.randn_like(out)
        ((out * direction).sum() + (value**2).sum() + (given[3] ** 2).sum()).backward()
    tensors = recorded(tmp_path / "calls")["call-000000-gradients"][1]
    assert torch.equal(tensors["grad_output"], direction)
    leaves = [t.detach().requires_grad_(t.requires_grad) for t in (value, *given[1:])]
    leaves[0].requires_grad_()
    expected = torch.autograd.grad(attention.attend(*leaves), [leaves[i] for i in (0, 3, 4)], direction)
    for name, gradient in zip(("value", "locations", "weights"), expected, strict=True):
        torch.testing.assert_close(tensors["grad_" + name], gradient, rtol=1e-12, atol=1e-12)


def test_copies_are_of_the_time_of_the_call(attention, tmp_path):
    given = inputs(())
    before = [t.clone() for t in given]
    with record.recording(tmp_path / "calls", functions=NAMED):
        out = attention.attend(*given)
        kept = out.clone()
        for t in (*given, out):
            t.zero_()
    tensors = recorded(tmp_path / "calls")["call-000000"][1]
    assert torch.equal(tensors["output"], kept)
    names = ("value", "shapes", "starts", "locations", "weights")
    assert all(torch.equal(tensors[name], t) for name, t in zip(names, before, strict=True))


def test_errors_pass_through_and_the_functions_come_back(attention, tmp_path):
    original = attention.attend
    with record.recording(tmp_path / "calls", every=1, functions=NAMED) as recording:
        assert attention.attend is not original
        with pytest.raises(ValueError, match="attention_weights must have shape"):
            attention.attend(*inputs()[:4], torch.rand(2, 5, 8, 2, 1))
        attention.attend(*inputs())
    assert attention.attend is original
    assert (recording.functions["stand_in.attend"].calls, len(recorded(tmp_path / "calls"))) == (2, 1)


def test_modules_that_have_imported_the_function_get_the_wrapper(attention, tmp_path):
    user = types.ModuleType("user_of_stand_in")
    user.f = attention.attend
    sys.modules["user_of_stand_in"] = user
    try:
        with record.recording(tmp_path / "calls", every=1, functions=NAMED):
            user.f(*inputs())
        assert user.f is attention.attend
    finally:
        del sys.modules["user_of_stand_in"]
    assert len(recorded(tmp_path / "calls")) == 1


def test_our_own_names_are_wrapped_too_and_derived_functions_are_left_alone(tmp_path):
    class Derived(mx_driving.MultiScaleDeformableAttnFunction):
        @staticmethod
        def forward(ctx, *args):
            return mx_driving.MultiScaleDeformableAttnFunction.forward(ctx, *args) * 2

    given = inputs(())
    before = dict(vars(mx_driving)), vars(mx_driving.MultiScaleDeformableAttnFunction).get("apply")
    expected = Derived.apply(*given)
    with record.recording(tmp_path / "calls", every=1):
        assert torch.equal(Derived.apply(*given), expected)
        mx_driving.MultiScaleDeformableAttnFunction.apply(*given)
        mx_driving.geometric_kernel_attention(*given)
        mx_driving.deformable_aggregation(*cases.aggregation(2, 5, 3, 8, 2, [[(4, 6)]]))
    assert before == (dict(vars(mx_driving)), vars(mx_driving.MultiScaleDeformableAttnFunction).get("apply"))
    names = [about["function"] for about, _ in recorded(tmp_path / "calls").values()]
    assert names == [
        "mx_driving.multi_scale_deformable_attn",  # the operator that the derived function's forward calls
        "mx_driving.MultiScaleDeformableAttnFunction.apply",
        "mx_driving.geometric_kernel_attention",
        "mx_driving.deformable_aggregation",
    ]


def test_under_torch_compile_a_call_runs_as_compiled(attention, tmp_path):
    attention.attend = mx_driving.multi_scale_deformable_attn
    given = inputs(())
    with record.recording(tmp_path / "calls", every=1, functions=NAMED):
        compiled = torch.compile(lambda *args: attention.attend(*args) * 2, fullgraph=True, backend="eager")
        assert torch.equal(compiled(*given), mx_driving.multi_scale_deformable_attn.__wrapped__(*given) * 2)
    torch.compiler.reset()
    assert not [about for about, _ in recorded(tmp_path / "calls").values() if about["function"] == "stand_in.attend"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("transform", ["vmap", "export", "trace"])
def test_transforms_see_no_recorder(attention, tmp_path, transform):
    attention.attend = mx_driving.multi_scale_deformable_attn
    given = inputs(())

    def results():
        if transform == "vmap":
            return torch.func.vmap(attention.attend, (0, None, None, 0, 0))(*(t[None] if i in (0, 3, 4) else t
                                                                              for i, t in enumerate(given)))  # fmt: skip
        module = torch.nn.Module()
        module.forward = lambda *args: attention.attend(*args)
        if transform == "trace":
            return torch.jit.trace(lambda *args: attention.attend(*args), tuple(given), check_trace=False)(*given)
        exported = torch.export.export(Attend(attention), tuple(given))
        return exported.module()(*given)

    expected = results()
    with record.recording(tmp_path / "calls", every=1, functions=NAMED):
        assert torch.equal(results(), expected)
    assert not recorded(tmp_path / "calls")


class Attend(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.attend = lambda *args: module.attend(*args)

    def forward(self, *args):
        return self.attend(*args)


def with_nan(at):
    calls = iter(range(100))

    def attend(*args):
        out = mx_driving.multi_scale_deformable_attn(*args)
        return out + torch.nan if next(calls) == at else out

    return attend


@pytest.mark.parametrize("megabytes", [1000.0, 1e-6])
def test_the_first_call_with_a_nan_is_recorded_even_when_the_budget_is_used_up(attention, tmp_path, capsys, megabytes):
    attention.attend = with_nan(5)
    with record.recording(tmp_path / "calls", every=4, nan=True, megabytes=megabytes, functions=NAMED):
        for _ in range(10):
            attention.attend(*inputs()).sum().backward()
    found = recorded(tmp_path / "calls")
    by_call = {
        about["index"]: (about["reason"], about["direction"]) for name, (about, _) in found.items() if "grad" not in name
    }
    sampled = {} if megabytes < 1 else dict.fromkeys((0, 4, 8), ("every 4", "forward"))
    assert by_call == {**sampled, 5: ("the first NaN", "forward")}
    assert sum("gradients" in name for name in found) == len(by_call)
    assert ("the budget of 1e-06 MB is used up; the program goes on" in capsys.readouterr().err) == (megabytes < 1)


def test_a_nan_that_only_the_gradients_have(attention, tmp_path):
    class Spoilt(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * torch.nan

    attention.attend = lambda v, *rest: mx_driving.multi_scale_deformable_attn(Spoilt.apply(v), *rest)
    with record.recording(tmp_path / "calls", every=1000, nan=True, functions=NAMED):
        attention.attend(*inputs(())).sum()  # call 0 is recorded anyway
        attention.attend(*inputs()).sum().backward()
    (_, first), (about, tensors) = recorded(tmp_path / "calls").values()
    assert "output" in first
    assert (about["index"], about["reason"]) == (1, "the first NaN")
    assert tensors["grad_value"].isnan().all()
    assert {"value", "grad_output", "grad_weights"} <= set(tensors)


def test_a_budget_ends_it(attention, tmp_path, capsys):
    with record.recording(tmp_path / "calls", every=1, megabytes=0.05, functions=NAMED):
        for _ in range(10):
            attention.attend(*inputs()).sum().backward()
    written = sum(file.stat().st_size for file in (tmp_path / "calls").glob("call*"))
    calls = recorded(tmp_path / "calls")
    assert 0 < len(calls) < 20
    assert sum("gradients" in name for name in calls) * 2 == len(calls)
    assert written < 0.05e6 + 1200 * len(calls)  # headers are not counted
    assert capsys.readouterr().err.count("used up") == 1


def test_what_cannot_be_recorded_is_said_and_the_call_goes_on(attention, tmp_path, capsys):
    attention.attend = lambda *args, **kwargs: 5
    with record.recording(tmp_path / "calls", every=1, functions=NAMED):
        assert attention.attend("value") == 5
    words = "not recorded of stand_in.attend: 1, calls and gradients; the last: value must be given; got nothing"
    assert words in capsys.readouterr().err


EMPTY = {"bs": (0, 5, 8, 3, [(4, 6)], 2), "queries": (2, 0, 8, 3, [(4, 6)], 2), "points": (2, 5, 8, 3, [(4, 6)], 0)}


@pytest.mark.parametrize("axis", EMPTY)
def test_empty_calls_are_recorded(attention, tmp_path, capsys, axis):
    given = [t.requires_grad_(i in (0, 3, 4)) for i, t in enumerate(cases.multi_scale(*EMPTY[axis]))]
    with record.recording(tmp_path / "calls", every=1, functions=NAMED):
        attention.attend(*given).sum().backward()
        attention.attend(*inputs())
    assert "record: 2 of 2 calls recorded, 0 MB" in capsys.readouterr().err
    assert len(list((tmp_path / "calls").glob("call-*.pt"))) == 3


@dataclasses.dataclass
class Odd:
    """What a program may give, and where the recorder fails on it: it has no such tensors, or cannot write their dtype."""

    name: str
    inputs: tuple

    def __str__(self):
        return self.name


def odd_inputs():
    value, shapes, starts, locations, weights = inputs(())
    scalar = torch.tensor(1.0)
    return [
        Odd("numbers", (scalar, scalar, scalar, scalar, scalar)),
        Odd("ragged lists", (value, [[4, 6], [2]], starts, locations, weights)),
        Odd("words", (value, [["4", "6"]], starts, locations, weights)),
        Odd("complex", (value * 1j, shapes, starts, locations, weights)),
        Odd("sparse", (value.to_sparse(), shapes, starts, locations, weights)),
        Odd("ranks", (value[0, 0, 0], shapes[0], starts[0], locations[0, 0], weights[0])),
    ]


@pytest.mark.parametrize("odd", odd_inputs(), ids=str)
def test_no_call_of_the_program_ends_the_recording(attention, tmp_path, capsys, odd):
    attention.attend = lambda value, *rest: value
    with record.recording(tmp_path / "calls", every=1, functions=NAMED) as recording:
        assert attention.attend(*odd.inputs) is odd.inputs[0]
        attention.attend(*inputs(()))
    assert not recording.failed
    function = recording.functions["stand_in.attend"]
    assert (function.calls, function.recorded + function.not_kept) == (2, 2)
    assert f"record: {function.recorded} of 2 calls recorded" in capsys.readouterr().err
    assert len(recorded(tmp_path / "calls")) == function.recorded >= 1


def test_calls_that_the_disk_is_too_slow_for_are_counted(attention, tmp_path, capsys, monkeypatch):
    with record.recording(tmp_path / "calls", every=2, functions=NAMED):
        attention.attend(*inputs(()))
        monkeypatch.setattr(record, "_WAITING", -1e6)
        for _ in range(4):
            attention.attend(*inputs(()))
    said = capsys.readouterr().err
    assert "not recorded of stand_in.attend: 2 calls, made while -1 MB waited for the disk" in said
    assert "record: 1 of 5 calls recorded" in said


def test_what_cannot_be_written_is_counted_and_the_next_call_is_recorded(attention, tmp_path, capsys, monkeypatch):
    whole = torch.save

    def no_such_dtype(file, path):
        if file["tensors"]["value"].dtype == torch.float16:
            raise KeyError(torch.float16)
        whole(file, path)

    monkeypatch.setattr(torch, "save", no_such_dtype)
    given = inputs(())
    with record.recording(tmp_path / "calls", every=1, functions=NAMED):
        attention.attend(given[0].half(), *given[1:])
        attention.attend(*given)
    said = capsys.readouterr().err
    assert "not recorded of stand_in.attend: 1, calls and gradients; the last: torch.float16" in said
    assert "record: 1 of 2 calls recorded" in said


def test_the_manifest_has_times_of_begin_and_end_and_the_reason_of_an_early_one(attention, tmp_path):
    with record.recording(tmp_path / "calls", every=1, megabytes=0.05, functions=NAMED) as recording:
        attention.attend(*inputs())
        while recording.writer.waiting:  # with the first call comes a manifest
            time.sleep(0.01)
        while_it_runs = json.loads((tmp_path / "calls/manifest.json").read_text())
        for _ in range(10):
            attention.attend(*inputs())
    manifest = json.loads((tmp_path / "calls/manifest.json").read_text())
    assert (while_it_runs["finished"], while_it_runs["ended_early"]) == ("", "")
    assert manifest["started"] <= manifest["finished"]
    assert manifest["ended_early"] == "the budget of 0.05 MB is used up; the program goes on"
    assert manifest["functions"]["stand_in.attend"]["calls"] == 11


def test_a_killed_recorder_leaves_nothing_that_replay_does_not_mention(tmp_path):
    code = textwrap.dedent(
        """
        import os, sys, torch, types
        from mx_driving_portable import record
        module = sys.modules["stand_in"] = types.ModuleType("stand_in")
        module.attend = lambda *args: args[0]
        inputs = torch.rand(1, 4, 1, 2), torch.tensor([[2, 2]]), torch.tensor([0])
        inputs += torch.rand(1, 1, 1, 1, 1, 2), torch.rand(1, 1, 1, 1, 1)
        os.replace = lambda *paths: os._exit(9)
        with record.recording("calls", every=1, functions={"stand_in.attend": "multi_scale_deformable_attn"}):
            module.attend(*inputs)
        """
    )
    assert python("-c", code, cwd=tmp_path, check=False).returncode == 9
    assert [file.name for file in (tmp_path / "calls").iterdir()] == ["call-000000.pt.part"]


@pytest.mark.parametrize("way", ["whole", "tmpfs", "tmpfs, inodes"])
def test_a_full_disk_ends_it_with_a_sentence_and_the_program_goes_on(attention, tmp_path, capsys, monkeypatch, way):
    folder = tmp_path / "disk"
    folder.mkdir()
    if "tmpfs" in way:
        small = "nr_inodes=8" if "inodes" in way else "size=64k"
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", small, "tmpfs", str(folder)], capture_output=True)
        if mounted.returncode:
            pytest.skip("mounting a small disk needs root on Linux")
    try:
        if way == "whole":
            whole = torch.save

            def full(file, path):
                whole(file, path)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            monkeypatch.setattr(torch, "save", full)
        with record.recording(folder / "calls", every=1, functions=NAMED) as recording:
            results = [attention.attend(*inputs()) for _ in range(20)]
            recording.writer.queue.put(None)
            recording.writer.join()
        assert len(results) == 20
        assert recording.failed
        said = capsys.readouterr().err
        assert said.count("No space left on device") == said.count("; the program goes on") == 1
        names = [file.name for file in (folder / "calls").iterdir()]
        assert not [name for name in names if name.endswith(".part")]
        kept = len(list((folder / "calls").glob("call-*")))
        assert all("output" in tensors for _, tensors in recorded(folder / "calls").values())  # what is there is whole
        assert f"record: {kept} of 20 calls recorded, 0 MB" in said.splitlines()[-1]
        judged = replay(folder / "calls")
        assert "the recording ended early: recording into" in judged.output if kept else judged.exit_code == 1
    finally:
        if "tmpfs" in way:
            subprocess.run(["umount", str(folder)], check=True)


def test_a_recording_that_a_disk_without_inodes_ended_has_its_reason(attention, tmp_path, capsys, monkeypatch):
    """No new file can be made from the third call on: neither a call's, nor one to replace the manifest."""
    writer = record._Writer._write_whole

    def without_inodes(self, path, write):
        if len(self.calls) >= 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        writer(self, path, write)

    monkeypatch.setattr(record._Writer, "_write_whole", without_inodes)
    with record.recording(tmp_path / "calls", every=1, functions=NAMED) as recording:
        for _ in range(5):
            attention.attend(*inputs(()))
            while recording.writer.waiting:
                time.sleep(0.01)
        monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: without_inodes(recording.writer, None, None))
        attention.attend(*inputs(()))
    words = f"recording into {tmp_path / 'calls'} has ended after 2 files: No space left on device; the program goes on"
    assert words in capsys.readouterr().err
    manifest = json.loads((tmp_path / "calls/manifest.json").read_text())
    assert manifest["finished"] >= manifest["started"]
    judged = replay(tmp_path / "calls")
    assert judged.exit_code == 0
    assert "the recording ended early: recording into" in judged.output


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("operator", [*cases.OPERATORS, "bev_pool_v3"])
def test_calls_under_autocast_are_right(operator, dtype, tmp_path):
    """Their inputs have 16 bits and their output 32, in which our own columns are computed, too."""
    if operator == "bev_pool_v3":
        ranks = torch.arange(24)
        arguments = [torch.rand(24, 1), torch.randn(12, 8), ranks, ranks // 2, ranks // 3, (1, 2, 2, 2, 8)]
    else:
        arguments = list(call(operator)[0])
    arguments = [a.to(dtype) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in arguments]
    leaves = [arguments[i].requires_grad_() for i in {**cases.DIFFERENTIABLE, "bev_pool_v3": (0, 1)}[operator]]
    with record.recording(tmp_path / "calls", every=1), torch.autocast("cpu", torch.bfloat16):
        out = getattr(mx_driving, operator)(*arguments)
        out.sin().sum().backward()
    assert out.dtype == torch.float32
    assert {leaf.grad.dtype for leaf in leaves} == {dtype}
    assert recorded(tmp_path / "calls")["call-000000"][0]["autocast"] is True
    judged = replay(tmp_path / "calls")
    assert judged.exit_code == 0
    assert "please report" not in judged.output
    assert judged.output.count(" right ") == 1 + len(leaves)


def test_older_torch_has_a_query_of_autocast_for_each_device(monkeypatch):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda: "of cuda")  # before torch 2.4
    monkeypatch.setattr(torch, "is_autocast_cpu_enabled", lambda: False)
    monkeypatch.setattr(torch, "npu", types.SimpleNamespace(is_autocast_enabled=lambda: True), raising=False)
    devices = ("cpu", "cuda", "npu", "mps", "nowhere")
    assert [record._is_autocast_on(device) for device in devices] == [False, True, True, False, False]


def test_of_one_tensor_in_two_places_only_its_own_gradient_is_left_out(attention, tmp_path):
    """Autograd brings it the sum of two gradients, which is no result of the operator."""
    rows, one = torch.rand(12, 1, requires_grad=True), torch.zeros(12, dtype=torch.long)
    value, shapes, starts, locations, weights = inputs()
    mixed = value.sin()
    with record.recording(tmp_path / "calls", every=1, functions=NAMED):
        mx_driving.bev_pool_v3(rows, rows, torch.arange(12), torch.arange(12), one, (1, 1, 1, 1, 1)).sum().backward()
        attention.attend(mixed, shapes, starts, locations, weights).sin().sum().backward()
    files = recorded(tmp_path / "calls")
    assert files["call-000000"][0]["shared"] == ["feat", "depth"]
    assert "call-000000-gradients" not in files
    judged = replay(tmp_path / "calls")
    assert judged.exit_code == 0
    assert "feat and depth are one tensor, which has the sum of their gradients: not judged" in judged.output
    assert "grad_value" in judged.output


def test_sizes_and_options_are_written_as_plain_numbers(tmp_path, capsys):
    """NumPy's numbers and tensors without axes are no JSON."""
    rows, ranks, places = torch.rand(4, 2), torch.arange(4), torch.zeros(4, 4, dtype=torch.long)
    geometry = torch.zeros(1, 4, 3, dtype=torch.int32)
    number, tensor = np.int64(1), torch.tensor(1)
    with record.recording(tmp_path / "calls", every=np.int64(1), nan=np.bool_(False), megabytes=np.float32(9)):
        for one in (number, tensor):
            mx_driving.bev_pool_v3(rows[:, :1], rows, ranks, ranks, ranks * 0, (one, one, one, one, 2))
            mx_driving.bev_pool(rows, places, one, one, one, one)
            mx_driving.npu_voxel_pooling_train(geometry, rows[None], [one, one, one])
        mx_driving.bev_pool_v3(rows[:, :1], rows, ranks, ranks, ranks * 0, [*map(np.int64, (1, 1, 1, 1, 2))])
    assert "record: 7 of 7 calls recorded" in capsys.readouterr().err
    judged = replay(tmp_path / "calls")
    assert judged.exit_code == 0
    assert "7 calls are right" in judged.output


def flat_aggregation(inputs, grad=None):
    """Compute Sparse4D's older form of an aggregation by the newer operator, where each point is an anchor."""
    value, shapes, starts, locations, weights = inputs
    cams, rows = value.shape[1:3]
    tables = shapes.expand(cams, -1, -1).contiguous(), starts + torch.arange(cams)[:, None] * rows
    return value.flatten(1, 2), *tables, locations[:, :, None], weights[:, :, None]


def test_the_older_interface_of_an_aggregation(tmp_path, monkeypatch):
    """Cameras' maps lie apart, and each point has a row of the output: Sparse4D before v3, GaussianFormer, Far3D."""
    value = torch.randn(2, 3, 30, 8)
    shapes, starts = torch.tensor([[4, 6], [2, 3]]), torch.tensor([0, 24])
    older = value, shapes, starts, torch.rand(2, 7, 3, 2), torch.rand(2, 7, 3, 2, 4)
    backward = torch.ops.mx_driving.deformable_aggregation_backward.default

    def add_gradients(*args):
        gradients = backward(args[5], *flat_aggregation(args[:5]), [True] * 3)
        for out, gradient in zip(args[6:], gradients, strict=True):
            out += gradient.view(out.shape)

    module = types.ModuleType("theirs.deformable_aggregation_ext")
    module.deformable_aggregation_forward = lambda *args: mx_driving.deformable_aggregation(*flat_aggregation(args))
    module.deformable_aggregation_backward = add_gradients
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with record.recording(tmp_path / "calls", every=1):
        out = module.deformable_aggregation_forward(*older)
        zeros = [torch.zeros_like(older[i]) for i in (0, 3, 4)]
        module.deformable_aggregation_backward(*older, torch.randn_like(out), *zeros)
    judged = replay(tmp_path / "calls")
    assert judged.output.rstrip().endswith("all is well: 2 calls are right")
    assert all(f"  grad_{name} " in judged.output for name in ("value", "locations", "weights"))


def test_the_table_has_each_function_once_and_replay_reads_each():
    keys = [(row.module, row.name) for row in record.FUNCTIONS]
    assert len(keys) == len(set(keys))
    assert {row.name for row in record.FUNCTIONS if row.operator == "bev_pool_v3"} == set(forms._FORMS)
    for row in record.FUNCTIONS:
        names = [name.rstrip("=") for name in row.parameters.split()]
        assert len(names) == len(set(names))
        assert row.backward == ("backward" in row.name)


def test_forms_of_arguments(attention, tmp_path):
    """mmcv's plain torch has no starts; transformers passes itself and a list of shapes; tables may be lists."""
    value, shapes, starts, locations, weights = inputs(())
    attention.attend = lambda *args, **kwargs: value
    with record.recording(tmp_path / "calls", every=1, functions=NAMED):
        attention.attend(value, shapes, locations, weights)
        attention.attend(None, value, shapes, shapes.tolist(), starts, locations, weights, 64)
        attention.attend(value=value, spatial_shapes=shapes.tolist(), level_start_index=starts.tolist(),
                         sampling_locations=locations, attention_weights=weights, im2col_step=64)  # fmt: skip
    found = list(recorded(tmp_path / "calls").values())
    assert [about["packed"] for about, _ in found] == [True, False, False]
    for _, tensors in found:
        assert torch.equal(tensors["shapes"], shapes)
        assert torch.equal(tensors["locations"], locations)
        assert torch.equal(tensors.get("starts", starts), starts)


def test_strides_and_devices_are_written_down(attention, tmp_path):
    given = inputs(())
    given[0] = given[0].transpose(0, 1).contiguous().transpose(0, 1)
    with record.recording(tmp_path / "calls", functions=NAMED):
        attention.attend(*given)
    about, tensors = recorded(tmp_path / "calls")["call-000000"]
    assert about["strides"] == {"value": list(given[0].stride())}
    assert about["device"] == "cpu"
    assert torch.equal(tensors["value"], given[0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 0}, "every must be a whole number of 1 or more; got 0"),
        ({"every": 2.5}, r"every must be a whole number of 1 or more; got 2\.5"),
        ({"every": "often"}, "every must be a whole number of 1 or more; got 'often'"),
        ({"every": float("inf")}, "every must be a whole number of 1 or more; got inf"),
        ({"megabytes": "many"}, "megabytes must be more than 0; got 'many'"),
        ({"functions": ["a.b"]}, "functions must be a dict of names and operators; got list"),
        ({"megabytes": 0}, "megabytes must be more than 0; got 0"),
        ({"functions": {"a.b": "convolution"}}, "functions must name a Python function of a module, and one of"),
        ({"functions": {"torch.ops.a.b": cases.MULTI_SCALE}}, "functions must name a Python function of a module"),
        ({"out": "full"}, "out must be a new or an empty folder; got '.*full', one with files"),
        ({"out": ""}, "out must be a new or an empty folder; got '', no name"),
        ({"out": "full/file"}, "out must be a new or an empty folder; got '.*file', "),
        ({"out": "full/file/in"}, "out must be a new or an empty folder; got '.*in', "),
        ({"out": "a" * 300}, "out must be a new or an empty folder; got '.*a', "),
        ({"out": "a\0b"}, r"out must be a new or an empty folder; got '.*a.x00b', .*embedded null"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_wrapped(tmp_path, options, words):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("kept")
    before = list(sys.meta_path)
    out = options.get("out", "calls")
    options = {**options, "out": out and tmp_path / out}
    with pytest.raises(ValueError, match=words):
        record.start(**options)
    assert sys.meta_path == before


def test_a_wrong_command_line_is_refused_in_a_sentence(tmp_path):
    done = python(FILE, "none.py", cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, "record.py: error: program must be a file; got none.py")
    assert not (tmp_path / "calls").exists()


def test_each_process_of_a_distributed_program_has_its_folder(attention, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with record.recording(tmp_path / "calls", functions=NAMED):
        attention.attend(*inputs())
    assert len(recorded(tmp_path / "calls/rank-1")) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_records_nothing(tmp_path):
    code = textwrap.dedent(
        """
        import os, sys, torch
        sys.path.insert(0, sys.argv[1])
        import record, types
        module = sys.modules["stand_in"] = types.ModuleType("stand_in")
        module.attend = lambda *args: args[0].sum()
        inputs = torch.rand(1, 4, 1, 2), torch.tensor([[2, 2]]), torch.tensor([0])
        inputs += torch.rand(1, 1, 1, 1, 1, 2), torch.rand(1, 1, 1, 1, 1)
        with record.recording("calls", every=1, functions={"stand_in.attend": "multi_scale_deformable_attn"}) as r:
            module.attend(*inputs)
            if os.fork() == 0:
                module.attend(*inputs)
                print(r.functions["stand_in.attend"].calls)
                sys.exit()
            os.wait()
        """
    )
    done = python("-c", code, FILE.parent, cwd=tmp_path)
    assert done.stdout == "1\n"  # the child's call is not counted: nobody would write what it copies
    assert done.stderr.startswith("record: 1 of 1 calls recorded")
    assert len(recorded(tmp_path / "calls")) == 1


def test_a_loader_is_left_as_it_was(tmp_path, monkeypatch):
    """Another recording, or none, finds the module's loader as it was."""
    (tmp_path / "GeometricKernelAttention.py").write_text(
        "def geometric_kernel_attn_cuda_forward(*args):\n    return args[0]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with record.recording(tmp_path / "calls", every=1):
        import GeometricKernelAttention  # pyright: ignore

        GeometricKernelAttention.geometric_kernel_attn_cuda_forward(*inputs(()))
    del sys.modules["GeometricKernelAttention"]
    import GeometricKernelAttention as again  # pyright: ignore

    del sys.modules["GeometricKernelAttention"]
    assert not hasattr(again.geometric_kernel_attn_cuda_forward, "__wrapped__")
    assert type(again.__loader__).__name__ == "SourceFileLoader"
    assert len(recorded(tmp_path / "calls")) == 1


class EditableLoader:
    """As scikit-build-core's: what it lacks, another loader answers, so that a copy of it would ask itself for ever."""

    def __init__(self, loader):
        self.inner = loader

    def __getattr__(self, name):
        return getattr(self.inner, name)


class EditableFinder:
    def __init__(self, path):
        self.path = path

    def find_spec(self, name, path=None, target=None):
        if name != "MultiScaleDeformableAttention":
            return None
        spec = importlib.util.spec_from_file_location(name, self.path)
        spec.loader = EditableLoader(spec.loader)
        return spec


def test_an_editable_install_is_recorded(tmp_path, monkeypatch):
    path = tmp_path / "extension.py"
    path.write_text("def ms_deform_attn_forward(*args):\n    return args[0]\n")
    monkeypatch.setattr(sys, "meta_path", [EditableFinder(path), *sys.meta_path])
    with record.recording(tmp_path / "calls", every=1):
        import MultiScaleDeformableAttention as extension  # pyright: ignore

        extension.ms_deform_attn_forward(*inputs(()))
    del sys.modules["MultiScaleDeformableAttention"]
    assert type(extension.__loader__) is type(extension.__spec__.loader) is EditableLoader
    assert len(recorded(tmp_path / "calls")) == 1
