"""Faults in src/mx_driving, as cosmic-ray makes them: a sample of all that it knows."""

from __future__ import annotations

import ast
import dataclasses
import pathlib
import random

# File -> the tests that protect it.
PROTECTED_BY = {
    "_checks/rules.py": ("operators/test_errors.py", "models/test_patching.py"),
    "_checks/inputs.py": ("operators/test_errors.py", "native/test_aclnn_refusals.py"),
    "_checks/with_logits.py": ("operators/test_with_logits_errors.py",),
    "_checks/limits.py": ("operators/test_limits.py",),
    "_checks/data.py": ("operators/test_data_checks.py",),
    "_checks/flags.py": ("operators/test_limits.py", "operators/test_data_checks.py"),
    "_dispatch/transforms.py": ("torch/test_transforms.py", "operators/test_autograd.py"),
    "_dispatch/library.py": ("operators/test_autograd.py", "operators/test_errors.py", "torch/test_compile.py"),
    "_dispatch/decompositions.py": ("torch/test_export.py",),
}


@dataclasses.dataclass(frozen=True)
class Fault:
    file: str
    operator: str
    arguments: tuple[tuple[str, object], ...]
    occurrence: int
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}, {self.operator.removeprefix('core/')}, number {self.occurrence}"

    def text(self, source: str) -> str:
        """The source with this fault."""
        from cosmic_ray.mutating import mutate_code
        from cosmic_ray.plugins import get_operator

        mutated = mutate_code(source, get_operator(self.operator)(**dict(self.arguments)), self.occurrence)
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


def _all(root: pathlib.Path, file: str) -> list[Fault]:
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    source = (root / "src/mx_driving" / file).read_text()
    annotated, nodes, found = _annotated(source), list(ast_nodes(get_ast(source))), []
    for name in sorted(operator_names()):
        operator_class = get_operator(name)
        if operator_class.arguments():
            continue  # those that need a configuration
        operator = operator_class()
        places = [start for node in nodes for start, _ in operator.mutation_positions(node)]
        for occurrence, start in enumerate(places):
            if not any(begin <= start <= end for begin, end in annotated):
                found.append(Fault(file, name, (), occurrence, start[0]))
    return found


def faults(root: pathlib.Path, count: int, seed: int) -> list[Fault]:
    """`count` faults. Of each line at most one, as far as that goes, so that no line takes the places of others."""
    every = [fault for file in PROTECTED_BY for fault in _all(root, file)]
    random.Random(seed).shuffle(every)
    of_line: dict[tuple[str, int], int] = {}
    ranked = []
    for fault in every:
        place = (fault.file, fault.line)
        of_line[place] = of_line.get(place, 0) + 1
        ranked.append((of_line[place], fault))
    ranked.sort(key=lambda pair: pair[0])
    return [fault for _, fault in ranked[:count]]
