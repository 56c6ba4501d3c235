"""The tests that reach a line: python tests/helpers/tests_of.py COVERAGE FILE:LINE, of a file that `make tests-of` records."""

from __future__ import annotations

import pathlib
import sys

import coverage


def tests_of(recorded: str, file: str, line: int) -> list[str]:
    """Names of tests, in order; a line that runs when its file is imported has the name "import"."""
    data = coverage.CoverageData(recorded)
    data.read()
    if (path := str(pathlib.Path(file).resolve())) not in data.measured_files():
        raise SystemExit(f"FILE must be one of src/mx_driving in Python that a test imports; got {file}")
    contexts = data.contexts_by_lineno(path).get(line, [])
    return sorted({context.partition("|")[0] or "import" for context in contexts})


if __name__ == "__main__":
    file, _, line = sys.argv[2].rpartition(":")
    if not (file and line.isdigit()):
        raise SystemExit(f"AT must be FILE:LINE; got {sys.argv[2]!r}")
    print(*(tests_of(sys.argv[1], file, int(line)) or [f"no test reaches {file}:{line}"]), sep="\n")
