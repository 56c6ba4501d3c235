"""The package's rooms lie on floors, and imports go downwards. CONTRIBUTING.md describes the rooms."""

import ast
import graphlib
import pathlib

import pytest

import mx_driving
import mx_driving_portable

SOURCES, PORTABLE = (pathlib.Path(*package.__path__) for package in (mx_driving, mx_driving_portable))
# The lowest floor first. A room is a folder, or a file that lies in none. Rooms of one floor do not import each other.
LOWEST = ("_agreement", "_foreign_functions", "_package_files", "_needs", "_replacing")
FLOORS = (
    (*LOWEST, "__pyinstaller", "_torch_private"),
    ("_operator", "config"),
    ("_data_checks", "_io", "geometry", "reference"),
    ("_backends",),
    ("_dispatch",),
    ("ops",),
    ("_foreign",),
    ("_measure", "_vendor", "common", "fused", "kernels", "nn", "point", "viz"),
    ("_replay", "aclnn", "compat"),
    ("onnx",),
    ("_patch",),
    ("patcher", "patching"),
    ("__init__",),
    ("cli",),
    ("__main__",),
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def name_of(file):
    parts = file.relative_to(SOURCES.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(file): file for file in sorted((*SOURCES.rglob("*.py"), *PORTABLE.rglob("*.py")))}
OURS = [module for module in MODULES if module.partition(".")[0] == "mx_driving"]


def imports(module):
    """Yield the modules of the two packages that a module imports, also in functions."""
    home = MODULES[module].relative_to(SOURCES.parent).parent.parts
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = home[: len(home) + 1 - node.level] if node.level else ()
            names = [".".join([*base, *filter(None, [node.module]), name.name]) for name in node.names]
        else:
            continue
        yield from filter(None, map(module_of, names))


def module_of(name):
    """Return the module of a name, which may be in the module: `mx_driving.ops` for `mx_driving.ops.levels`."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def room_of(module):
    return [*module.split("."), "__init__"][1]


def upward(room):
    """Return (module, imported module) for imports from another room of the same floor or of a higher floor."""
    imported = ((module, name) for module in OURS if room_of(module) == room for name in imports(module) if name in OURS)
    return [(module, name) for module, name in imported if room_of(name) != room and FLOOR[room_of(name)] >= FLOOR[room]]


def test_every_room_has_a_floor():
    assert {room_of(module) for module in OURS} == set(FLOOR)


@pytest.mark.parametrize("room", FLOOR)
def test_imports_go_downwards(room):
    assert upward(room) == []


def test_no_circle_of_the_two_packages():
    graph = {module: set(imports(module)) - {module} for module in MODULES}
    assert sum(map(len, graph.values())) > len(graph)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("file", sorted(EXAMPLES.rglob("*.py")), ids=lambda file: file.stem)
def test_examples_import_public_names_only(file):
    for node in ast.walk(ast.parse(file.read_text())):
        names = [name.name for name in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        module = getattr(node, "module", None) or ""
        assert not [name for name in names if "mx_driving" in f"{module}.{name}" and "._" in f".{module}.{name}"]
