"""The vendor's distribution beside ours: a folder of packages with both, installed and uninstalled in either order.

As with pip, an installation overwrites files, and an uninstallation removes the files in its record.
"""

import base64
import hashlib
import importlib.machinery
import importlib.metadata
import json
import os
import pathlib

import pytest
from programs import python

import mx_driving

SOURCES = pathlib.Path(mx_driving.__file__).parent.parent
OURS = {
    str(file.relative_to(SOURCES)): file.read_bytes()
    for package in ("mx_driving", "mx_driving_portable")
    for file in (SOURCES / package).rglob("*.py")
}
SHARED = [
    *("mx_driving/__init__.py", "mx_driving/common.py", "mx_driving/fused.py", "mx_driving/point.py"),
    *(f"mx_driving/ops/{name}.py" for name in ("__init__", "geometric_kernel_attention", "multi_scale_deformable_attn")),
    "mx_driving/ops/npu_deformable_aggregation.py",
    "mx_driving/patcher/__init__.py",
]
COMPILED = "mx_driving/_C" + importlib.machinery.EXTENSION_SUFFIXES[0]
THEIRS = dict.fromkeys(SHARED, b"'of the vendor'\n") | {COMPILED: b"not a library"}
FILES = {"mx-driving-portable": OURS, "mx-driving": THEIRS}
REMEDY = "run `pip uninstall mx-driving mx-driving-portable`, then install the one that you want"
VENDOR = "the vendor's mx-driving 26.2.0.post2 "
BESIDE = f"{VENDOR}is installed under the same import name, and uninstalling one breaks the other: {REMEDY}"
FILES_OF_OURS = "files of mx-driving-portable (9, mx_driving/__init__.py first)"
OVERWRITTEN = f"{VENDOR}replaced or removed {FILES_OF_OURS}: {REMEDY}"
GUTTED = OVERWRITTEN.replace(" 26.2.0.post2", "")


def record_of(folder: pathlib.Path, name: str) -> pathlib.Path:
    version = {"mx-driving-portable": mx_driving.__version__, "mx-driving": "26.2.0.post2"}[name]
    return folder / f"{name.replace('-', '_')}-{version}.dist-info"


def install(folder: pathlib.Path, name: str, files: dict[str, bytes] | None = None) -> None:
    lines = []
    for file, content in sorted((FILES[name] if files is None else files).items()):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(content)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        lines.append(f"{file},sha256={digest},{len(content)}\n")
    info = record_of(folder, name)
    info.mkdir()
    (info / "RECORD").write_text("".join(lines))
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {info.stem.rpartition('-')[2]}\n")


def uninstall(folder: pathlib.Path, name: str) -> None:
    for file in FILES[name]:
        (folder / file).unlink(missing_ok=True)
    for file in record_of(folder, name).iterdir():
        file.unlink()
    record_of(folder, name).rmdir()


def made(folder: pathlib.Path, order: str) -> pathlib.Path:
    """Install and uninstall in the order of a line such as "ours, theirs, -theirs"."""
    names = {"ours": "mx-driving-portable", "theirs": "mx-driving"}
    for step in order.split(", "):
        (uninstall if step.startswith("-") else install)(folder, names[step.removeprefix("-")])
    return folder


# Find mx_driving in the folder only. The mx_driving that runs these tests may lie beside torch.
ALONE = """
import importlib.machinery, json, sys
folder = sys.argv.pop(1)
sys.path.insert(0, folder)

class Alone:
    def find_spec(name, path=None, target=None):
        if name in ("mx_driving", "mx_driving_portable"):
            return importlib.machinery.PathFinder.find_spec(name, [folder])

sys.meta_path = [Alone, *(f for f in sys.meta_path if not type(f).__module__.startswith("_editable"))]
"""


def run(folder, code, *args):
    return python("-W", "ignore", "-c", ALONE + code, folder, *args, env={**os.environ, "COLUMNS": "400"}, check=False)


LOOK = "import mx_driving_portable as p\nprint(json.dumps([p.beside(), sorted(p.lost_files())]))\n"


def look(folder):
    """Return beside() and lost_files() of the distributions in a folder."""
    return json.loads(run(folder, LOOK).stdout)


STATES = {
    "ours": (None, []),
    "theirs, -theirs, ours": (None, []),
    "theirs, ours": (BESIDE, []),
    "ours, theirs": (OVERWRITTEN, SHARED),
    "theirs, ours, -theirs": (GUTTED, SHARED),
    "ours, theirs, -theirs": (GUTTED, SHARED),
    "ours, theirs, -theirs, -ours, ours": (None, []),
}


@pytest.mark.parametrize("order", STATES)
def test_what_each_order_leaves(order, tmp_path):
    sentence, lost = STATES[order]
    assert look(made(tmp_path, order)) == [sentence, sorted(lost)]


def test_an_editable_installation_loses_nothing(tmp_path):
    """The record of ours has a hook and the library. The vendor's files are in the folder; ours are elsewhere."""
    install(tmp_path, "mx-driving")
    install(tmp_path, "mx-driving-portable", {"_editable_hook.py": b"", "mx_driving/libmx_driving.so": b""})
    assert look(tmp_path) == [BESIDE, []]
    uninstall(tmp_path, "mx-driving")
    assert look(tmp_path) == [None, []]


def test_somebodys_own_change_is_not_the_vendors(tmp_path):
    made(tmp_path, "theirs, ours")
    with (tmp_path / "mx_driving/reference.py").open("a") as file:
        file.write("# changed\n")
    assert look(tmp_path) == [BESIDE, []]


COMMAND = "from mx_driving_portable.command import main\nmain()\n"


@pytest.mark.parametrize("order", ["ours, theirs", "theirs, ours, -theirs"])
def test_the_command_says_that_files_are_lost(order, tmp_path):
    done = run(made(tmp_path, order), COMMAND, "check")
    sentence, _ = STATES[order]
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"mx-driving: {sentence}\n")


def test_ours_over_theirs_works_and_says_so(tmp_path):
    """The vendor's compiled _C, which Python prefers to a _C.py, is not loaded."""
    code = (
        "import mx_driving._C\n"
        "print(json.dumps([mx_driving.__file__, mx_driving._C.__file__, mx_driving.backends()]))\n"
        "from mx_driving.cli import check\n"
        "from mx_driving._measure.workloads import EXAMPLES\n"
        "check.CHECKED = EXAMPLES[:1]\n"
    )
    done = run(made(tmp_path, "theirs, ours"), code + COMMAND, "check", "--quick")
    first, _, said = done.stdout.partition("\n")
    package, extension, backends = json.loads(first)
    assert (package, extension) == (str(tmp_path / "mx_driving/__init__.py"), str(tmp_path / "mx_driving/_vendor/compiled.py"))
    sentences = [sentence for by in backends.values() for sentence in by.values()]
    assert sentences
    assert all(sentence.endswith("; " + BESIDE) for sentence in sentences)
    assert f"beside: {BESIDE}\n" in said


ROOMS = ("aclnn", "cli.app", "compat", "nn", "onnx", "patching", "reference", "viz")
TRY = """
said = {}
for room in sys.argv[1:]:
    try:
        importlib.import_module("mx_driving." + room)
    except ImportError as error:
        said[room] = str(error)
print(json.dumps(said))
"""


@pytest.mark.parametrize("order", ["ours, theirs", "ours, theirs, -theirs"])
def test_rooms_of_ours_refuse_a_package_that_is_not(order, tmp_path):
    """The vendor's __init__ runs, or none is left."""
    done = run(made(tmp_path, order), TRY, *ROOMS)
    assert json.loads(done.stdout) == dict.fromkeys(ROOMS, STATES[order][0]), done.stderr
