"""`mx_driving_portable/record.py` saves calls, and changes neither bits nor the autograd graph nor errors."""

import ast
import csv
import errno
import functools
import importlib.util
import multiprocessing
import os
import pathlib
import subprocess
import sys
import types

import cases
import numpy as np
import pytest
import torch
from device_machine import FILE, device_machine, read_calls, run
from programs import python
from recorded_calls import call, replay
from torch.utils.checkpoint import checkpoint
from values import Through

import mx_driving
from mx_driving._replay.calls import find_pool
from mx_driving_portable import record

NAMED = {"stand_in.attend": cases.MULTI_SCALE}
NOTHING = "record: 0 of 0 calls recorded, 0 MB in {}; calls in compiled code and in child processes are not seen\n"


def inputs(differentiable=(0, 3, 4)):
    tensors = cases.multi_scale(2, 5, 8, 3, [(4, 6), (2, 3)], 2)
    return [t.clone().requires_grad_(i in differentiable) for i, t in enumerate(tensors)]


@pytest.fixture
def attention():
    """Return a module whose function is recorded."""
    module = types.ModuleType("stand_in")
    module.attend = lambda *args: mx_driving.multi_scale_deformable_attn(*args)
    sys.modules["stand_in"] = module
    yield module
    del sys.modules["stand_in"]


@pytest.fixture
def recording(tmp_path):
    """Return a context manager that records every call into the folder `calls`."""
    return functools.partial(record.recording, tmp_path / "calls", every=1, functions=NAMED)


@pytest.fixture
def calls(tmp_path):
    """Return a function that reads the files in `calls`."""
    return lambda: read_calls(tmp_path / "calls")


def test_a_program_is_recorded_computes_the_same_and_is_right(tmp_path):
    """The program calls the vendor's package, mmcv's extension, and a Python function that the user names."""
    folder = device_machine(tmp_path)
    alone = run(folder, "program.py", "a", "--b").stdout
    options = "--every 3 --function own.kernels.sample=multi_scale_deformable_attn program.py a --b"
    done = run(folder, "record.py", *options.split())
    assert done.stdout == alone
    assert len(set(alone.splitlines())) == 1 < len(alone.splitlines())
    assert done.stderr == f"record: 12 of 28 calls recorded, {done.stderr.split(', ')[1]}"
    names = {"mx_driving.multi_scale_deformable_attn", "own.kernels.sample"}
    names |= {f"mmcv._ext.ms_deform_attn_{direction}" for direction in ("forward", "backward")}
    files = read_calls(folder / "calls")
    for name in names:
        assert {about["index"] for about, _ in files.values() if about["function"] == name} == {0, 3, 6}
    for about, tensors in files.values():
        if "grad_output" in tensors:
            assert {"grad_value", "grad_locations", "grad_weights"} <= set(tensors)
        else:
            assert set(tensors) == {"value", "shapes", "starts", "locations", "weights", "output"}
        assert "program.py:" in about["caller"]
    judged = replay(folder / "calls", "--csv", tmp_path / "x.csv")
    assert judged.output.rstrip().endswith("all is well: 12 calls are right")
    with (tmp_path / "x.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert {row["call"] for row in rows} == {name for name in files if "gradients" not in name}
    assert {row["verdict"] for row in rows} == {"right"}


# Prints how the program was started, and at its end __main__ as a thread and an atexit function see it.
SEEN = """
import atexit, os, pickle, sys, threading, time
class Own: pass
def show(when):
    print(when, sys.modules["__main__"].__dict__ is globals(), type(pickle.loads(pickle.dumps(Own()))) is Own, flush=True)
atexit.register(show, "exit")
threading.Thread(target=lambda: (time.sleep(0.1), show("thread"))).start()
print(__file__, __name__, __package__, getattr(__spec__, "name", None), __cached__, type(__loader__), sys.argv, sys.path[:1])
print(os.getcwd(), "torch" in sys.modules, "typer" in sys.modules)
print(type(__builtins__), sorted(globals()))
sys.exit(3)
"""
RECORD = ["-m", "mx_driving_portable.record"]
PROGRAMS = {
    "script": (RECORD, "tools/module.py"),
    "path with ..": (RECORD, "tools/../tools/module.py"),
    "link": (RECORD, "link.py"),
    "folder": (RECORD, "folder"),
    "module": (RECORD, "-m", "module"),
    "package": (RECORD, "-m", "folder"),
    "command": (["-c", "from mx_driving_portable.command import main; main()", "record"], "tools/module.py"),
}


@pytest.fixture
def programs(tmp_path):
    for name in ("tools/module.py", "module.py", "folder/__main__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(SEEN)
    (tmp_path / "link.py").symlink_to(tmp_path / "tools/module.py")
    return tmp_path


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_as_it_would_alone(name, programs):
    command, *program = PROGRAMS[name]
    alone, done = (
        subprocess.run([sys.executable, *words, *program, "--out", "x"], cwd=programs, capture_output=True, text=True)
        for words in ([], [*command, "--every", "7", "--out", "here"])
    )
    assert (done.returncode, done.stdout) == (alone.returncode, alone.stdout)
    assert (done.returncode, len(done.stdout.splitlines())) == (3, 5)
    assert done.stderr == NOTHING.format(programs / "here")
    assert (programs / "here/manifest.json").exists()


def test_the_whole_packages_command_runs_the_same_recorder(tmp_path):
    (tmp_path / "module.py").write_text("import sys\nprint(sys.argv, __name__)\nsys.exit(3)\n")
    done = python("-m", "mx_driving", "record", "--out", "here", "module.py", "x", cwd=tmp_path, check=False)
    printed = "['module.py', 'x'] __main__\n"
    assert (done.returncode, done.stdout, done.stderr) == (3, printed, NOTHING.format(tmp_path / "here"))


def test_a_program_that_changes_its_folder_is_recorded(attention, tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    with record.recording("calls", every=1, functions=NAMED):
        monkeypatch.chdir("run")
        attention.attend(*inputs()).sum().backward()
    assert len(read_calls(tmp_path / "calls")) == 2


def test_help_and_a_wrong_command_line(mx, monkeypatch, capsys):
    """The command has the same help as the file."""
    helped = mx("record", "--help")[1]
    for words, status in ((["none.py"], "2"), (["--help"], "0")):
        monkeypatch.setattr(sys, "argv", ["record.py", *words])
        with pytest.raises(SystemExit, match=status):
            record.main()
    alone, error = capsys.readouterr()
    assert error == "record.py: program must be a file; got none.py\n"
    assert helped == alone.replace("record.py [", "mx-driving record [")
    assert all(f"  {option} " in alone for option in ("--out", "--every", "--nan", "--megabytes", "--function", "-m"))


def test_the_file_is_alone():
    """It imports only torch and the standard library, and parses with Python 3.8."""
    tree = ast.parse(FILE.read_text(), feature_version=(3, 8))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    outside = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names
    assert outside == {"torch"}
    at_import = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    assert not {alias.name for n in at_import if isinstance(n, ast.Import) for alias in n.names} & outside


def nodes(grad_fn):
    """Return the names of a graph's nodes, depth first."""
    return [grad_fn.name(), *(name for below, _ in grad_fn.next_functions if below is not None for name in nodes(below))]


def test_bits_graph_and_tensors_are_the_programs_own(attention, recording, calls):
    def compute():
        leaves = inputs()
        shared = leaves[0] * 2
        versions = [t._version for t in leaves]
        outs = [attention.attend(shared, *leaves[1:]) for _ in range(3)]  # three gradients meet in value
        out = outs[0] * outs[1] + outs[2]
        graph = nodes(out.grad_fn)
        gradients = torch.autograd.grad(out.sum() + (shared**3).sum(), [leaves[i] for i in (0, 3, 4)])
        assert [t._version for t in leaves] == versions
        return graph, [*outs, *gradients]

    graph, alone = compute()
    with recording(nan=True):
        recorded_graph, results = compute()
    assert recorded_graph == graph
    assert all(torch.equal(a, b) for a, b in zip(results, alone, strict=True))
    assert len(calls()) == 6


def test_gradients_are_those_of_the_call_alone(attention, recording, calls):
    """Gradients from other uses of an input are left out. The call may be several nodes, and inputs may be leaves or not."""
    leaves = inputs()
    attention.attend = lambda v, *rest: mx_driving.multi_scale_deformable_attn(v.float().double() + 0 * v, *rest)
    with recording():
        value = leaves[0].sin()
        out = attention.attend(value, *leaves[1:])
        grad = torch.randn_like(out)
        ((out * grad).sum() + (value**2).sum() + (leaves[3] ** 2).sum()).backward()
    tensors = calls()["call-000000-gradients"][1]
    assert torch.equal(tensors["grad_output"], grad)
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in (value, *leaves[1:])]
    expected = torch.autograd.grad(attention.attend(*leaves), [leaves[i] for i in (0, 3, 4)], grad)
    for name, gradient in zip(("value", "locations", "weights"), expected, strict=True):
        torch.testing.assert_close(tensors["grad_" + name], gradient, rtol=1e-12, atol=1e-12)


def test_copies_are_of_the_time_of_the_call(attention, recording, calls):
    """The program overwrites its tensors after the call. They are strided or inference tensors."""
    with torch.inference_mode():
        tensors = inputs(())
    tensors[0] = tensors[0].transpose(0, 1).contiguous().transpose(0, 1)
    before = [t.clone() for t in tensors]
    with recording():
        out = attention.attend(*tensors)
        output = out.clone()
        with torch.inference_mode():
            for t in (*tensors, out):
                t.zero_()
    about, copies = calls()["call-000000"]
    names = ("value", "shapes", "starts", "locations", "weights", "output")
    assert all(torch.equal(copies[name], t) for name, t in zip(names, [*before, output], strict=True))
    assert about["strides"] == {"value": list(tensors[0].stride())}
    assert about["device"] == "cpu"


def test_a_second_recording_sees_calls_through_names_of_the_first(attention, recording, tmp_path, monkeypatch):
    """A module that imports the function by name while a recording runs gets the original back; a list keeps the wrapper. The
    second recording gives the wrapper to modules that have imported the function."""
    original, user = attention.attend, types.ModuleType("user_of_stand_in")
    with recording():
        user.f, user.fs = attention.attend, [attention.attend]
        monkeypatch.setitem(sys.modules, user.__name__, user)
    assert attention.attend is user.f is original
    with record.recording(tmp_path / "second", every=1, functions=NAMED) as second:
        assert attention.attend is user.f is not original
        user.f(*inputs())
        user.fs[0](*inputs())
    assert attention.attend is user.f is original
    assert second.functions["stand_in.attend"].num_calls == len(read_calls(tmp_path / "second")) == 2


@pytest.mark.parametrize("first_to_stop", [0, 1])
def test_of_two_overlapping_recordings_none_loses_calls(attention, tmp_path, first_to_stop):
    original = attention.attend
    both = [record.start(tmp_path / name, every=1, functions=NAMED) for name in "ab"]
    attention.attend(*inputs()).sum().backward()
    both[first_to_stop].stop()
    attention.attend(*inputs()).sum().backward()
    both[1 - first_to_stop].stop()
    counts = [len(read_calls(tmp_path / name)) for name in "ab"]  # two files of a call
    assert counts == ([2, 4] if first_to_stop == 0 else [4, 2])
    assert attention.attend is original
    assert replay(tmp_path / "b").exit_code == 0


def test_the_second_run_of_a_checkpoint_is_counted_in_words(attention, recording, calls, capsys):
    with recording() as recorder:
        with pytest.raises(ValueError, match="attention_weights"):
            attention.attend(*inputs()[:4], torch.rand(2, 5, 8, 2, 1))
        for _ in range(2):
            value, *rest = inputs()
            checkpoint(attention.attend, value, *rest, use_reentrant=False).sum().backward()
    function = recorder.functions["stand_in.attend"]
    assert (function.num_calls, function.num_recorded, function.num_lost) == (5, 2, 3)
    reason = "torch.utils.checkpoint recomputes the call, and ends it before its result"
    assert f"not recorded of stand_in.attend: 3, calls and gradients; the last: {reason}" in capsys.readouterr().err


def test_a_model_of_modules_is_counted_in_words(recording, calls, capsys):
    module = mx_driving.nn.MultiScaleDeformableAttention(16, num_levels=1)
    levels = mx_driving.nn.flatten_levels([torch.rand(1, 16, 4, 4)])
    with recording():
        module(torch.rand(1, 3, 16), torch.rand(1, 3, 1, 2), *levels).sum().backward()
    assert not calls()
    said = capsys.readouterr().err
    assert "attn_with_logits: 1, calls and gradients; the last: operators with logits, and the mod" in said
    assert "record: 0 of 1 calls recorded" in said


def test_our_own_names_are_wrapped_too_and_derived_functions_are_left_alone(recording, calls):
    class Derived(mx_driving.MultiScaleDeformableAttnFunction):
        @staticmethod
        def forward(ctx, *args):
            return mx_driving.MultiScaleDeformableAttnFunction.forward(ctx, *args) * 2

    tensors = inputs(())
    before = dict(vars(mx_driving))
    expected = Derived.apply(*tensors)
    with recording():
        assert torch.equal(Derived.apply(*tensors), expected)
        mx_driving.MultiScaleDeformableAttnFunction.apply(*tensors)
        mx_driving.geometric_kernel_attention(*tensors)
        mx_driving.deformable_aggregation(*cases.aggregation(2, 5, 3, 8, 2, [[(4, 6)]]))
    assert before == dict(vars(mx_driving))
    assert "apply" not in vars(mx_driving.MultiScaleDeformableAttnFunction)
    assert [about["function"] for about, _ in calls().values()] == [
        "mx_driving.multi_scale_deformable_attn",  # the operator that the derived function's forward calls
        "mx_driving.MultiScaleDeformableAttnFunction.apply",
        "mx_driving.geometric_kernel_attention",
        "mx_driving.deformable_aggregation",
    ]


TRANSFORMS = {
    "compile": lambda m: torch.compile(lambda *args: m.attend(*args), fullgraph=True, backend="eager")(*inputs(())),
    "vmap": lambda m: torch.func.vmap(m.attend, (0, *[None] * 4))(inputs(())[0][None], *inputs(())[1:]),
    "export": lambda m: torch.export.export(Through(lambda *args: m.attend(*args)), tuple(inputs(()))).module()(*inputs(())),
    "trace": lambda m: torch.jit.trace(lambda *args: m.attend(*args), tuple(inputs(())), check_trace=False)(*inputs(())),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_see_no_recorder(attention, recording, calls, transform):
    attention.attend = mx_driving.multi_scale_deformable_attn
    expected = TRANSFORMS[transform](attention)
    with recording():
        assert torch.equal(TRANSFORMS[transform](attention), expected)
    torch.compiler.reset()
    assert not [about for about, _ in calls().values() if about["function"] == "stand_in.attend"]


@pytest.mark.parametrize("megabytes", [1000.0, 1e-6])
def test_the_first_call_with_a_nan_is_recorded_even_when_the_budget_is_used_up(attention, recording, calls, capsys, megabytes):
    numbers = iter(range(10))
    operator = mx_driving.multi_scale_deformable_attn
    attention.attend = lambda *args: operator(*args) + (torch.nan if next(numbers) == 5 else 0)
    with recording(every=4, nan=True, megabytes=megabytes):
        for _ in range(10):
            attention.attend(*inputs()).sum().backward()
    reasons = {about["index"]: about["reason"] for name, (about, _) in calls().items() if "grad" not in name}
    assert reasons == {**({} if megabytes < 1 else dict.fromkeys((0, 4, 8), "every 4")), 5: "the first NaN"}
    assert sum("gradients" in name for name in calls()) == len(reasons)
    assert ("the budget of 1e-06 MB is used up; the program goes on" in capsys.readouterr().err) == (megabytes < 1)


def test_a_nan_that_only_the_gradients_have(attention, recording, calls):
    def attend(value, *rest):
        value = value.clone()
        if value.requires_grad:
            value.register_hook(lambda grad: grad * torch.nan)
        return mx_driving.multi_scale_deformable_attn(value, *rest)

    attention.attend = attend
    with recording(every=1000, nan=True):
        attention.attend(*inputs(())).sum()  # call 0 is recorded anyway
        attention.attend(*inputs()).sum().backward()
    (_, first), (about, tensors) = calls().values()
    assert "output" in first
    assert (about["index"], about["reason"]) == (1, "the first NaN")
    assert tensors["grad_value"].isnan().all()
    assert {"value", "grad_output", "grad_weights"} <= set(tensors)


@pytest.mark.parametrize("late", [False, True])
def test_a_budget_ends_it(attention, recording, calls, capsys, late):
    """The budget reserves bytes for gradients, which may arrive after all calls."""
    with recording(megabytes=0.05) as recorder:
        outputs = [attention.attend(*inputs()) for _ in range(10)] if late else (attention.attend(*inputs()) for _ in range(10))
        for out in outputs:
            out.sum().backward()
    assert 0 < len(calls()) < 20
    assert sum("gradients" in name for name in calls()) * 2 == len(calls())
    assert 0.02e6 < recorder.num_bytes < 0.06e6  # the budget does not count grad_output
    assert capsys.readouterr().err.count("used up") == 1
    assert recorder.why == "the budget of 0.05 MB is used up; the program goes on"
    assert recorder.functions["stand_in.attend"].num_calls == 10


EMPTY = {"bs": (0, 5, 8, 3, [(4, 6)], 2), "queries": (2, 0, 8, 3, [(4, 6)], 2), "points": (2, 5, 8, 3, [(4, 6)], 0)}


@pytest.mark.parametrize("axis", EMPTY)
def test_empty_calls_are_recorded_and_judged(attention, recording, calls, tmp_path, axis):
    tensors = [t.float().requires_grad_() if t.is_floating_point() else t for t in cases.multi_scale(*EMPTY[axis])]
    with recording():
        attention.attend(*tensors).sum().backward()
        attention.attend(*inputs())
    assert sorted(calls()) == ["call-000000", "call-000000-gradients", "call-000001"]
    assert replay(tmp_path / "calls").exit_code == 0
    for file in (tmp_path / "calls").glob("call-000000*"):
        whole = torch.load(file)
        whole["tensors"] = {name: t + 1 if name == "output" or "grad_" in name else t for name, t in whole["tensors"].items()}
        torch.save(whole, file)
    assert replay(tmp_path / "calls").exit_code == int(axis != "bs")  # without batches no result has an entry


VALUE, SHAPES, STARTS, LOCATIONS, WEIGHTS = inputs(())
# Arguments that the recorder cannot record: they are no such tensors, or torch.save refuses their dtype.
ODD = {
    "no tensors": ("value",),
    "ragged lists": (VALUE, [[4, 6], [2]], STARTS, LOCATIONS, WEIGHTS),
    "words": (VALUE, [["4", "6"]], STARTS, LOCATIONS, WEIGHTS),
    "sparse": (VALUE.to_sparse(), SHAPES, STARTS, LOCATIONS, WEIGHTS),
    "ranks": (VALUE[0, 0, 0], SHAPES[0], STARTS[0], LOCATIONS[0, 0], WEIGHTS[0]),
    "float16": (VALUE.half(), SHAPES, STARTS, LOCATIONS, WEIGHTS),
}


@pytest.mark.parametrize("odd", ODD)
def test_no_call_of_the_program_ends_the_recording(attention, recording, calls, capsys, monkeypatch, odd):
    save = torch.save

    def save_no_float16(file, path):
        if file["tensors"]["value"].dtype == torch.float16:
            raise KeyError(torch.float16)
        save(file, path)

    monkeypatch.setattr(torch, "save", save_no_float16)
    attention.attend = lambda value, *rest: value
    with recording() as recorder:
        assert attention.attend(*ODD[odd]) is ODD[odd][0]
        attention.attend(*inputs(()))
    assert not recorder.failed
    function = recorder.functions["stand_in.attend"]
    assert (function.num_calls, function.num_recorded + function.num_lost) == (2, 2)
    said = capsys.readouterr().err
    assert f"record: {function.num_recorded} of 2 calls recorded" in said
    assert len(calls()) == function.num_recorded >= 1
    reason = {"no tensors": "value must be given; got nothing", "float16": "torch.float16"}.get(odd, "")
    assert f"not recorded of stand_in.attend: 1, calls and gradients; the last: {reason}" in said or function.num_recorded == 2


def test_a_full_disk_ends_it_in_a_sentence_and_the_program_goes_on(attention, recording, calls, tmp_path, capsys, monkeypatch):
    def fail(path, _):
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with recording() as recorder:
        attention.attend(*inputs())
        monkeypatch.setattr(pathlib.Path, "write_bytes", fail)
        for _ in range(19):
            attention.attend(*inputs()).sum().backward()
    assert recorder.failed
    said, folder = capsys.readouterr().err, tmp_path / "calls"
    assert said.count("No space left on device") == said.count("; the program goes on") == 1
    assert "record: 1 of 20 calls recorded, 0 MB" in said.splitlines()[-1]
    assert list(calls()) == ["call-000000"]
    assert f"recording into {folder} has ended after 1 calls: No space left" in said
    assert replay(folder).exit_code == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("operator", [*cases.OPERATORS, cases.POOL])
def test_calls_under_autocast_are_right(operator, dtype, recording, tmp_path):
    """Their inputs have 16 bits and their output has 32. Our own results are computed with 32 bits, too."""
    if operator == cases.POOL:
        ranks = torch.arange(24)
        arguments = [torch.rand(24, 1), torch.randn(12, 8), ranks, ranks // 2, ranks // 3, (1, 2, 2, 2, 8)]
    else:
        arguments = list(call(operator)[0])
    arguments = [a.to(dtype) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in arguments]
    leaves = [arguments[i].requires_grad_() for i in cases.DIFFERENTIABLE[operator]]
    with recording(), torch.autocast("cpu", torch.bfloat16):
        out = getattr(mx_driving, operator)(*arguments)
        out.sin().sum().backward()
    assert out.dtype == torch.float32
    assert {leaf.grad.dtype for leaf in leaves} == {dtype}
    judged = replay(tmp_path / "calls")
    assert judged.exit_code == 0
    assert "please report" not in judged.output
    assert judged.output.count(" right ") == 1 + len(leaves)


def test_of_one_tensor_in_two_places_only_its_own_gradient_is_left_out(attention, recording, calls, tmp_path):
    """A tensor at two arguments gets the sum of two gradients, which is no result of the operator."""
    rows, cells = torch.rand(12, 1, requires_grad=True), torch.zeros(12, dtype=torch.long)
    value, shapes, starts, locations, weights = inputs()
    mixed = value.sin()
    with recording():
        mx_driving.bev_pool_v3(rows, rows, torch.arange(12), torch.arange(12), cells, (1, 1, 1, 1, 1)).sum().backward()
        attention.attend(mixed, shapes, starts, locations, weights).sin().sum().backward()
    assert "call-000000-gradients" not in calls()
    judged = replay(tmp_path / "calls")
    assert judged.exit_code == 0
    assert "grad_value" in judged.output


def test_sizes_and_options_are_written_as_plain_numbers(recording, tmp_path):
    """JSON takes no NumPy numbers and no tensors."""
    rows, ranks, places = torch.rand(4, 2), torch.arange(4), torch.zeros(4, 4, dtype=torch.long)
    geometry = torch.zeros(1, 4, 3, dtype=torch.int32)
    with recording(every=np.int64(1), nan=np.bool_(False), megabytes=np.float32(9)):
        for one in (np.int64(1), torch.tensor(1)):
            mx_driving.bev_pool_v3(rows[:, :1], rows, ranks, ranks, ranks * 0, (one, one, one, one, 2))
            mx_driving.bev_pool(rows, places, one, one, one, one)
            mx_driving.npu_voxel_pooling_train(geometry, rows[None], [one, one, one])
        mx_driving.bev_pool_v3(rows[:, :1], rows, ranks, ranks, ranks * 0, [*map(np.int64, (1, 1, 1, 1, 2))])
    assert "7 calls are right" in replay(tmp_path / "calls").output


def test_the_table_has_each_function_once_and_replay_reads_each():
    keys = [(row.module, row.name) for row in record.FUNCTIONS]
    assert len(keys) == len(set(keys))
    assert all(callable(find_pool(row.name)) for row in record.FUNCTIONS if row.operator == "bev_pool_v3")
    for row in record.FUNCTIONS:
        assert len(row.names) == len(set(row.names))
        assert row.backward == ("backward" in row.name)


def test_forms_of_arguments(attention, recording, calls):
    """mmcv's plain torch has no starts; transformers passes itself and a list of shapes; tables may be lists."""
    value, shapes, starts, locations, weights = inputs(())
    attention.attend = lambda *args, **kwargs: value
    with recording():
        attention.attend(value, shapes, locations, weights)
        attention.attend(None, value, shapes, shapes.tolist(), starts, locations, weights, 64)
        attention.attend(value=value, spatial_shapes=shapes.tolist(), level_start_index=starts.tolist(),
                         sampling_locations=locations, attention_weights=weights, im2col_step=64)  # fmt: skip
    assert ["starts" in tensors for _, tensors in calls().values()] == [False, True, True]
    for _, tensors in calls().values():
        assert torch.equal(tensors["shapes"], shapes)
        assert torch.equal(tensors["locations"], locations)
        assert torch.equal(tensors.get("starts", starts), starts)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 2.5}, "every must be a whole number of 1 or more; got 2.5"),
        ({"megabytes": "many"}, "megabytes must be more than 0; got 'many'"),
        ({"functions": ["a.b"]}, "functions must be a dict of names and operators; got list"),
        ({"functions": {"a.b": "convolution"}}, "functions must name a Python function of a module, and one of"),
        ({"functions": {"torch.ops.a.b": cases.MULTI_SCALE}}, "functions must name a Python function of a module"),
        *(({"out": out}, "out must be a new or an empty") for out in ("full", "", "full/file", "a" * 300, "a\0b")),
    ],
)
def test_wrong_options_are_refused_before_anything_is_wrapped(tmp_path, options, words):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("")
    before = list(sys.meta_path)
    out = options.get("out", "calls")
    with pytest.raises(ValueError, match=f"^{words}"):
        record.start(**{**options, "out": out and tmp_path / out})
    assert sys.meta_path == before


def test_of_two_processes_that_start_at_once_one_has_the_folder(attention, recording, tmp_path):
    # Both find the folder empty.
    first, second = (record.Recorder(tmp_path / "calls", every=1, functions=NAMED) for _ in range(2))
    first.start()
    before = list(sys.meta_path)
    with pytest.raises(ValueError, match=r"^out must be a new or an empty folder; got '.*calls', one with files$"):
        second.start()
    assert sys.meta_path == before
    attention.attend(*inputs(()))
    first.stop()
    assert list(read_calls(tmp_path / "calls")) == ["call-000000"]


def test_each_process_of_a_distributed_program_has_its_folder(attention, recording, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with recording():
        attention.attend(*inputs())
    assert len(read_calls(tmp_path / "calls/rank-1")) == 1


def work(folder):
    with record.recording(folder, every=1):
        mx_driving.multi_scale_deformable_attn(*inputs(()))


def test_each_process_that_a_program_starts_has_its_folder(tmp_path):
    context = multiprocessing.get_context("fork" if hasattr(os, "fork") else "spawn")
    processes = [context.Process(target=work, args=(tmp_path / "calls",), name=f"loader 0/{index}") for index in range(2)]
    for step in ("start", "join"):
        for process in processes:
            getattr(process, step)()
    assert [len(read_calls(tmp_path / f"calls/loader-0-{index}")) for index in range(2)] == [1, 1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_records_nothing(attention, recording, calls):
    with recording() as recorder:
        out = attention.attend(*inputs()).sum()
        if (child := os.fork()) == 0:
            out.backward()
            attention.attend(*inputs(())).sum()
            os._exit(recorder.functions["stand_in.attend"].num_calls)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1  # the child's call is not counted
    assert list(calls()) == ["call-000000"]


class EditableLoader:
    """A loader as scikit-build-core's: it forwards missing attributes, so that a copy of it would recurse without end."""

    def __init__(self, loader):
        self.inner = loader

    def __getattr__(self, name):
        return getattr(self.inner, name)


class EditableFinder:
    def __init__(self, path):
        self.path = path

    def find_spec(self, name, path=None, target=None):
        if name != "GeometricKernelAttention":
            return None
        spec = importlib.util.spec_from_file_location(name, self.path)
        spec.loader = EditableLoader(spec.loader)
        return spec


@pytest.mark.parametrize("editable", [False, True])
def test_a_loader_is_left_as_it_was(recording, calls, tmp_path, monkeypatch, editable):
    """After a recording the module has its own loader, for the next recording or import."""
    path = tmp_path / "GeometricKernelAttention.py"
    path.write_text("def geometric_kernel_attn_cuda_forward(*args):\n    return args[0]\n")
    if editable:
        monkeypatch.setattr(sys, "meta_path", [EditableFinder(path), *sys.meta_path])
    else:
        monkeypatch.syspath_prepend(tmp_path)
    with recording():
        first = importlib.import_module("GeometricKernelAttention")
        first.geometric_kernel_attn_cuda_forward(*inputs(()))
    del sys.modules["GeometricKernelAttention"]
    again = importlib.import_module("GeometricKernelAttention")
    del sys.modules["GeometricKernelAttention"]
    assert not hasattr(again.geometric_kernel_attn_cuda_forward, "__wrapped__")
    assert type(first.__loader__) is type(again.__loader__) is type(again.__spec__.loader)
    assert type(again.__loader__).__name__ == ("EditableLoader" if editable else "SourceFileLoader")
    assert len(calls()) == 1
