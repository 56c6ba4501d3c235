"""Faults in src/mx_driving, as cosmic-ray makes them: a sample of all that it knows."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import itertools
import pathlib

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

FILES = (
    "_checks/rules.py",
    "_checks/inputs.py",
    "_checks/limits.py",
    "_checks/data.py",
    "_checks/flags.py",
    "_dispatch/transforms.py",
    "_dispatch/library.py",
    "_dispatch/decompositions.py",
)
EQUIVALENT = pathlib.Path(__file__).with_name("python_equivalent.toml")


@dataclasses.dataclass(frozen=True)
class Fault:
    file: str
    operator: str
    occurrence: int
    line: int
    code: str  # the line
    nth: int  # of this operator's faults in lines of this text
    reason: str = ""  # why it is none

    def __str__(self) -> str:
        return f"{self.file}, {self.change}"

    @property
    def change(self) -> str:
        return f"{self.operator} {self.nth}: {self.code}"

    @property
    def path(self) -> str:
        return f"src/mx_driving/{self.file}"

    def text(self, source: str) -> str:
        """The source with this fault."""
        from cosmic_ray.mutating import mutate_code
        from cosmic_ray.plugins import get_operator

        mutated = mutate_code(source, get_operator(f"core/{self.operator}")(), self.occurrence)
        assert mutated is not None
        assert mutated != source
        return mutated


def _annotated(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where annotations are. No one evaluates them, so that a fault in one is none."""
    found = []
    for node in ast.walk(ast.parse(source)):
        for note in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if isinstance(note, ast.expr):
                found.append(((note.lineno, note.col_offset), (note.end_lineno or 0, note.end_col_offset or 0)))
    return found


def _all(root: pathlib.Path, file: str, reasons: dict[str, str]) -> list[Fault]:
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    source = (root / "src/mx_driving" / file).read_text()
    lines, annotated, nodes, found = source.splitlines(), _annotated(source), list(ast_nodes(get_ast(source))), []
    seen: dict[tuple[str, str], int] = {}
    for name in sorted(operator_names()):
        operator_class = get_operator(name)
        if operator_class.arguments():
            continue  # those that need a configuration
        operator = operator_class()
        places = [start for node in nodes for start, _ in operator.mutation_positions(node)]
        for occurrence, start in enumerate(places):
            if any(begin <= start <= end for begin, end in annotated):
                continue
            short, code = name.removeprefix("core/"), lines[start[0] - 1].strip()
            nth = seen[short, code] = seen.get((short, code), 0) + 1
            fault = Fault(file, short, occurrence, start[0], code, nth)
            found.append(dataclasses.replace(fault, reason=reasons.pop(str(fault), "")))
    return found


def _reasons() -> dict[str, str]:
    """Fault -> why it is none."""
    return {
        fault: reason
        for entry in tomllib.loads(EQUIVALENT.read_text())["because"]
        for fault in entry["faults"]
        for reason in [entry["reason"]]
    }


def _is_python(text: str) -> bool:
    """`x >= not 1` is none, so that no test is needed to notice it."""
    try:
        compile(text, "fault", "exec")
    except SyntaxError:
        return False
    return True


def _chance(fault: Fault, seed: int) -> str:
    """The same in every version of a file that has this line."""
    return hashlib.sha256(f"{seed} {fault}".encode()).hexdigest()


def faults(root: pathlib.Path, count: int, seed: int) -> list[Fault]:
    """`count` faults. Of each line at most one, as far as that goes, so that no line takes the places of others."""
    reasons = _reasons()
    every = [fault for file in FILES for fault in _all(root, file, reasons)]
    if reasons:
        raise SystemExit(f"{EQUIVALENT.name}: no such fault: {', '.join(reasons)}")
    of_line: dict[tuple[str, int], int] = {}
    ranked = []
    for fault in sorted(every, key=lambda f: _chance(f, seed)):
        place = (fault.file, fault.line)
        of_line[place] = of_line.get(place, 0) + 1
        ranked.append((of_line[place], fault))
    ranked.sort(key=lambda pair: pair[0])
    sources = {file: (root / "src/mx_driving" / file).read_text() for file in FILES}
    whole = (fault for _, fault in ranked if _is_python(fault.text(sources[fault.file])))
    return sorted(itertools.islice(whole, count), key=lambda f: (FILES.index(f.file), f.line))


def lines_of_statement(source: str, line: int) -> range:
    """All lines of the statement that has `line`, because Python reports a statement over several by some of them.

    Of a statement with a body, its head; with decorators and parameters.
    """
    best = range(line, line + 1)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt):
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            body = getattr(node, "body", None)
            end = body[0].lineno if isinstance(body, list) and body else (node.end_lineno or 0) + 1
            head = range(first, max(end, first + 1))
            if line in head and (len(best) == 1 or len(head) < len(best)):
                best = head
    return best
