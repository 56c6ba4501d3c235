"""`mx-driving` has help, exits with 0 only if all is well, and refuses a wrong command line in a sentence before the work."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
import typer.rich_utils  # reads FORCE_COLOR at import, so import it before a test sets FORCE_COLOR
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

import mx_driving
from mx_driving import _backends
from mx_driving._measure.workloads import CHECKED, EXAMPLES, WORKLOADS
from mx_driving._operator import rules
from mx_driving.cli import bench as bench_module
from mx_driving.cli import check as check_module
from mx_driving.cli.app import app

pytestmark = pytest.mark.usefixtures("wide_terminal")


def fifty_points(generator):
    """Return the inputs of the vendor's example of an aggregation with 50 of its 2000 points."""
    *tables, locations, weight = EXAMPLES[2].make(generator)
    return *tables, locations[:, :, :50], weight[:, :, :50]


@pytest.fixture
def small_examples(monkeypatch):
    """Check only the vendor's two small examples, with fewer points."""
    monkeypatch.setattr(check_module, "CHECKED", (EXAMPLES[0], EXAMPLES[2]._replace(make=fifty_points)))


def run(*args):
    return CliRunner().invoke(app, list(args))


COMMANDS = {
    "check": {"--device", "--dtype", "--quick", "--only", "--threads", "--json"},
    "bench": {"--only", "--workload", "--dtype", "--threads", "--seconds", "--csv", "--list"},
    "info": {"--json"},
    "record": set(),  # record.py has the options
    "replay": {"calls", "--call", "--threads", "--csv", "--json"},
    "forms": {"target", "--rows", "--seen", "--json"},
    "fuse": {"path_in", "path_out", "--form", "--plugin-version", "--time", "--inputs", "--seconds", "--threads", "--json"},
    "verify": {"path_in", "--runtime", "--inputs", "--original", "--precision", "--threads", "--json"},
}


def test_every_command_is_listed():
    assert set(typer.main.get_command(app).commands) == set(COMMANDS)


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_names_every_option_and_cuts_no_word_in_80_columns(monkeypatch, command):
    for name, value in {"COLUMNS": "80", "TERMINAL_WIDTH": "80", "FORCE_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    result = run(*filter(None, [command]), "--help")
    assert result.exit_code == 0
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", result.output)
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert "<" not in re.sub(r"<[^<>\n]*>", "", shown)  # typer would wrap a `<type>` at any character
    program = typer.main.get_command(app)
    found = program.commands[command] if command else program
    options = {name for p in found.params for name in (*p.opts, *p.secondary_opts)}
    assert options == (COMMANDS[command] if command else {"--version"})
    texts = [*options, found.help, *(p.help for p in found.params), *(COMMANDS if command is None else ())]
    assert all(texts)

    def words(text):
        return set(re.findall(r"[\w*-]+(?:\.[\w-]+)*", text))

    assert words(" ".join(texts)) <= words(shown)


@pytest.mark.parametrize("command", ["check", "bench"])
def test_threads_are_torchs_but_when_asked_for(mx, monkeypatch, command):
    """A command sets the number of threads before it prints its title, which has the number."""
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)

    def stop(title):
        raise rules.Problem(f"title must be last; got {asked}")

    for module in (check_module, bench_module):
        monkeypatch.setattr(module, "open_console", stop)
    assert mx(command)[2] == "mx-driving: title must be last; got []\n"
    assert mx(command, "--threads", "3")[2] == "mx-driving: title must be last; got [3]\n"


def test_check_takes_the_rows_asked_for(mx, monkeypatch):
    checked = []

    def check_one(workload, *rest):
        checked.append(workload.name)
        return fake_check(workload, *rest)

    monkeypatch.setattr(check_module, "check_one", check_one)
    assert mx("check", "--only", "*GEOMETRIC*", "--only", "vendor example small*")[0] == 0
    assert checked == [EXAMPLES[0].name, EXAMPLES[3].name]
    code, _, err = mx("check", "--only", "yolo")
    assert (code, err.startswith(f"mx-driving: --only must match one of {len(CHECKED)} names, such as '")) == (2, True)


def test_check_passes(small_examples):
    result = run("check", "--quick", "--dtype", "float32", "--dtype", "bfloat16")
    assert result.exit_code == 0, result.output
    assert "all is well" in result.output
    for word in ("multi_scale_deformable_attn", "deformable_aggregation", _backends.native.isa(), "locations", "bfloat16"):
        assert word in result.output


def test_check_prints_json(small_examples):
    result = run("check", "--quick", "--json")
    facts = json.loads(result.stdout)
    assert facts["right"] is (result.exit_code == 0) is True
    assert [row["operator"] for row in facts["rows"]] == ["multi_scale_deformable_attn", "deformable_aggregation"]
    assert all(row["errors"][name] <= row["allowed"][name] for row in facts["rows"] for name in row["errors"])


class Off(TorchDispatchMode):
    """Multiply the results of an operator by 1.00001."""

    def __init__(self, name):
        super().__init__()
        self.name = f"mx_driving::{name}"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func.name() != self.name:
            return found
        return tuple(t * 1.00001 for t in found) if isinstance(found, tuple) else found * 1.00001


@pytest.mark.parametrize("name", ["multi_scale_deformable_attn", "deformable_aggregation_backward"])
def test_check_fails_when_a_kernel_is_wrong(small_examples, name):
    with Off(name):
        result = run("check", "--quick")
    assert result.exit_code == 1
    assert "wrong:" in result.output


def test_check_fails_when_the_cpu_has_only_the_reference(small_examples, monkeypatch):
    monkeypatch.setattr(_backends.native, "why_not", lambda: "it was not built")
    result = run("check", "--quick")
    assert result.exit_code == 1
    assert "runs on the reference" in result.output


def test_other_devices_have_their_own_kernels_and_clock(monkeypatch):
    """`check --device xpu` says which kernels xpu has, and waits for xpu before it reads the clock."""
    waits, to, zeros = [], torch.Tensor.to, torch.zeros
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(_backends.triton, "why_not", lambda *device: None)
    monkeypatch.setattr(torch.xpu, "synchronize", lambda: waits.append("xpu"))
    monkeypatch.setattr(torch.Tensor, "to", lambda t, *args: t if args == ("xpu",) else to(t, *args))
    monkeypatch.setattr(torch, "zeros", lambda *args, **options: zeros(*args, **{**options, "device": None}))
    monkeypatch.setattr(check_module, "CHECKED", EXAMPLES[:1])
    rows = json.loads(run("check", "--quick", "--device", "xpu", "--json").stdout)["rows"]
    assert rows[0]["backend"].startswith("xpu: Triton, never run on Intel's GPUs; float32")
    assert waits


@pytest.fixture
def no_work(monkeypatch):
    """Let the test fail if a command starts its work."""

    def work(*args, **kwargs):
        raise AssertionError("the work was begun")

    for module, name in ((bench_module, "measure"), (check_module, "check_one"), (torch, "set_num_threads")):
        monkeypatch.setattr(module, name, work)


def is_a_sentence(code: int, out: str, err: str, words: str) -> bool:
    """Return whether a command ended with status 2 and one sentence on standard error: name must rule; got fact."""
    return code == 2 and out == "" and err.count("\n") == 1 and words in err and re.match("mx-driving: .* must .*; got", err)


def test_version(mx):
    code, out, _ = mx("--version")
    versions = f"mx-driving {mx_driving.__version__}, torch {torch.__version__}, {_backends.native.isa()}"
    assert (code, out) == (0, versions + "\n")


NUMBER, WHOLE = "must be a number of 0 or more; got", "must be a whole number from 0 to 4096; got"
DTYPES = "must be one of float32, float64, float16, bfloat16; got"
LONG = "a" * 300
# The sentence goes on with the words of typer or argparse, which name the wrong argument.
AS_HELP_SAYS = {
    "--nosuch": "--nosuch",
    "nosuch": "nosuch",
    "info --quick": "--quick",
    "info --json=1": "--json",
    "check cpu": "cpu",
    "check --dtype float32 --dtype": "--dtype",
    "replay": "calls",
    "replay a b": "b",
    "fuse a": "path_out",
    "fuse a b c d": "c d",
    "verify a": "--runtime",
    "verify a --runtime": "--runtime",
    "demo": "demo",
    "record": "program",
    "record --nosuch p.py": "--nosuch",
    "record --o x p.py": "--o",
    "record --nan=1 p.py": "--nan",
    "record --out": "--out",
}
WRONG = {
    "check --dtype int8": f"--dtype {DTYPES} 'int8'",
    "check --threads 1.5": f"--threads {WHOLE} '1.5'",
    "bench --threads -1": f"--threads {WHOLE} '-1'",
    "check --threads 99999999999999999999": f"--threads {WHOLE} '99999999999999999999'",
    "bench --seconds long": f"--seconds {NUMBER} 'long'",
    "bench --seconds nan": f"--seconds {NUMBER} 'nan'",
    "bench --seconds inf": f"--seconds {NUMBER} 'inf'",
    "bench --csv .": "--csv must be a file; got ., a folder",
    "bench --csv none/x": "the folder of --csv must exist; got none",
    "bench --csv p.py/x": "the folder of --csv must be a folder; got p.py",
    f"bench --csv {LONG}": f"--csv must be a place to write to; got {LONG}: File name too long",
    "replay none": "calls must be a folder that record.py wrote, or one file of it; got none, which is not there",
    "replay . --csv none/x": "calls must hold files call-*.pt; got none in .",
    "fuse none b": "path_in must be a file that can be read; got none: No such file or directory",
    f"fuse {LONG} b": f"path_in must be a file that can be read; got {LONG}: File name too long",
    "fuse . b": "path_in must be a file that can be read; got .: Is a directory",
    "verify a --runtime openvino --precision int8": f"--precision {DTYPES} 'int8'",
    "record ''": "program must be a file; got ''",
    "record -m ''": "program must be a module that Python finds; got ''",
    "record none.py": "program must be a file; got none.py",
    "record .": "program must be a file; got .",
    "record --out p.py p.py": "out must be a new or an empty folder; got 'p.py', File exists",
    "record --every x p.py": "every must be a whole number of 1 or more; got 'x'",
    "record --every 0 p.py": "every must be a whole number of 1 or more; got 0",
    "record --every nan p.py": "every must be a whole number of 1 or more; got nan",
    "record --megabytes -1 p.py": "megabytes must be more than 0; got -1",
    "record -m nosuch": "program must be a module that Python finds; got nosuch",
    "record -m nosuch.module": "program must be a module that Python finds; got nosuch.module",
    "record -m json": "program must be a module that Python finds; got json",  # a package without __main__
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_command_line_ends_with_a_sentence(mx, no_work, monkeypatch, tmp_path, line):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("p.py").write_text("raise AssertionError('the program ran')")
    assert mx(*shlex.split(line)) == (2, "", f"mx-driving: {WRONG[line]}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["p.py"]


@pytest.mark.parametrize("line", AS_HELP_SAYS)
def test_a_command_line_that_help_does_not_list_ends_with_a_sentence(mx, no_work, line):
    found = mx(*shlex.split(line))
    assert is_a_sentence(*found, "the command line must be as --help says; got: ")
    assert AS_HELP_SAYS[line] in found[2].lower()


PRINTING = [["--help"], ["--version"], ["bench", "--list"], ["check"], ["bench"]]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
@pytest.mark.parametrize("args", PRINTING, ids=" ".join)
def test_a_full_output_is_noticed_before_the_work(mx, no_work, monkeypatch, args):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        found = mx(*args)
    assert is_a_sentence(*found, "standard output must take what is printed; got No space left on device")


@pytest.mark.parametrize("args", PRINTING[:4], ids=" ".join)
def test_a_reader_that_went_away_ends_it_quietly(mx, no_work, monkeypatch, args):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        assert mx(*args) == (1, "", "")


def test_no_command_prints_the_help_alone(mx):
    code, out, err = mx()
    assert (code, err) == (2, "")
    assert "replay" in out


def test_a_closed_output(mx, no_work, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert is_a_sentence(*mx("check"), "standard output must be open; got a closed one")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_python_says_no_more_when_it_exits():
    """At exit Python would write the rest of the buffer, and fail again."""
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "mx_driving", "--version"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert is_a_sentence(done.returncode, "", done.stderr, "standard output must take what is printed")


@pytest.mark.parametrize("device", ["foo", "meta", "xla", "cuda:99"])
def test_a_device_that_is_not_there(mx, no_work, device):
    assert is_a_sentence(*mx("check", "--device", device), f"--device={device} must be a device that torch can use here; got")


@pytest.mark.parametrize("name", ["--only", "--workload"])
@pytest.mark.parametrize("options", [[], ["--list"], ["--only", "MapTR*"], ["--workload", "MapTR*"]])
def test_no_workload_of_that_name(mx, no_work, name, options):
    found = mx("bench", name, "yolo*", *options)
    assert is_a_sentence(*found, f"--only must match one of {len(WORKLOADS)} names, such as '")
    assert found[2].endswith("; got 'yolo*'\n")


MAPTR = "MapTR tiny\nMapTR nano\nMapTR tiny, with logits\nMapTR nano, with logits\n"


def test_a_whole_name_is_a_pattern_though_it_has_brackets(mx):
    name = WORKLOADS[-1].name
    for option in ("--only", "--workload"):
        assert mx("bench", "--list", option, name)[1] == name + "\n"
        assert mx("bench", "--list", option, "maptr*", "--only", "*NANO")[1] == MAPTR


def long_rows(workload, dtype, *rest):
    names = ("mx_driving", "plain torch", "torch.compile", "torch-ms-deform-attn", "gather loop")
    return [
        {"workload": workload.name, "dtype": dtype, "direction": direction, "implementation": name}
        | {"milliseconds": 123456.78, "times ours": 1234.56, "rounds": 3}
        for direction in ("forward", "forward + backward", "backward")
        for name in names
    ]


CHECKED_WORDS = [word for w in CHECKED for word in (w.description.bare or w.operator, *w.name.split(), *w.differentiable_names)]
TIMED_WORDS = [word for w in WORKLOADS for word in f"{w.name}, bfloat16 123456.78 1234.56".split()]
TABLES = [(["check", "--quick", "--dtype", "bfloat16"], CHECKED_WORDS), (["bench", "--dtype", "bfloat16"], TIMED_WORDS)]


@pytest.mark.parametrize(("columns", "terminal"), [(80, True), (40, False)])
@pytest.mark.parametrize(("args", "words"), TABLES, ids=[args[0] for args, _ in TABLES])
def test_tables_keep_words_whole_in_80_columns(mx, monkeypatch, args, words, columns, terminal):
    """A terminal has 80 columns. Without a terminal of 80 columns, tables are as wide as in 80 columns."""
    monkeypatch.setenv("COLUMNS", str(columns))
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(bench_module, "measure", long_rows)
    monkeypatch.setattr(check_module, "check_one", fake_check)
    code, out, err = mx(*args)
    assert (code, err) == (0, "")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out)
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    assert set(words) <= set(shown.split())
    lines = [line for line in shown.splitlines() if set(line) & set("\u2502\u2500\u2501")]
    assert lines
    assert max(map(len, lines)) <= 80


def fake_check(workload, dtype, device, quick):
    errors = dict.fromkeys(("output", *workload.differentiable_names), 1.2e-7)
    row = "cpu: native C++, avx512, threads of libgomp", errors, errors, 12.34567, 123.4
    return check_module.WorkloadErrors(workload, dtype, *row)


def test_a_file_that_is_there_is_kept_until_the_work_is_done(mx, monkeypatch, tmp_path):
    kept = tmp_path / "kept.csv"
    kept.write_text("an earlier result")

    def measure(*args):
        assert kept.read_text() == "an earlier result"
        raise rules.Problem("output must be right; got another")

    monkeypatch.setattr(bench_module, "measure", measure)
    code, _, err = mx("bench", "--csv", kept)
    assert (code, err) == (2, "mx-driving: output must be right; got another\n")
    assert kept.read_text() == "an earlier result"
