"""Tables of tests, requirements and limits, from the CSV files of docs/support and from the package."""

from __future__ import annotations

import csv
import inspect
import pathlib
import re

from benchmark_tables import NOT_YET, Row, made, markdown, speed_up

# tests.csv: `pytest --record=docs/support/tests.csv tests` and `make test-oldest`; wheels.csv: `make check-wheels`;
# deploy.csv: `make deploy-matrix`; libraries.csv: `make test-libraries`; onnx-forms.csv: `make onnx-forms`
SUPPORT = pathlib.Path(__file__).parent / "support"


def _rows(name: str) -> list[Row]:
    if not (SUPPORT / name).exists():
        return []
    with (SUPPORT / name).open(newline="") as file:
        return list(csv.DictReader(file))


NOTHING_YET = "*Nothing is recorded yet.*\n"
OUTCOMES = ("passed", "failed", "skipped")


def _outcome(rows: list[Row]) -> str:
    """Return the sums over all rows, such as "12 passed, 3 skipped"."""
    sums = {outcome: sum(int(row[outcome]) for row in rows) for outcome in OUTCOMES}
    return ", ".join(f"{count} {outcome}" for outcome, count in sums.items() if count)


def _runs() -> dict[tuple[str, ...], list[Row]]:
    """Return (torch, other packages, Python, system, processor) -> rows of existing test files, oldest torch first."""
    runs: dict[tuple[str, ...], list[Row]] = {}
    columns = ("torch", "packages", "python", "system", "processor")
    files = {file.name for file in (SUPPORT.parents[1] / "tests").rglob("test_*.py")}
    for row in _rows("tests.csv"):
        if row["file"] in files:
            runs.setdefault(tuple(row[column] for column in columns), []).append(row)
    return dict(sorted(runs.items(), key=lambda item: [int(part) for part in item[0][0].partition("+")[0].split(".")]))


def tested() -> str:
    """Return a table of the recorded runs of the tests."""
    rows = [
        [*place, str(len(by_file)), _outcome(by_file), max(row["date"] for row in by_file)]
        for place, by_file in _runs().items()
    ]
    header = ["torch", "other packages", "Python", "system", "processor", "test files", "tests", "date"]
    return markdown(header, rows) if rows else NOTHING_YET


def needs() -> str:
    """Return a table of the features that need a newer torch."""
    from mx_driving._needs import NEEDS

    return markdown(["feature", "needs torch", "older ones fail, since"], [[name, *need] for name, need in NEEDS.items()])


def known() -> str:
    """Return a table of the projects whose code `patch` knows."""
    from mx_driving._patch.known import read_table

    projects: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for entry in read_table().values():
        project, version, name = entry.seen.rsplit(" ", 2)
        versions, names = projects.setdefault(project, ({}, {}))
        versions[version] = None
        names[f"`{name}`"] = None
    rows = [[project, ", ".join(sorted(versions)), ", ".join(names)] for project, (versions, names) in sorted(projects.items())]
    return markdown(["project", "seen in", "known code"], rows)


def limits() -> str:
    """Return a table of the vendor's documented limits and their releases."""
    from mx_driving._vendor.limits import LIMITS, NEWEST

    def releases(first: str, last: str) -> str:
        return f"since {first}" if last == NEWEST else first if first == last else f"{first} to {last}"

    header = ["operator", "argument", "limit of Atlas A2", "releases", "document of Ascend/DrivingSDK"]
    rows = [
        [f"`{row.operator}`", f"`{row.argument}`", f"{row.quantity} {row.relation} {row.bound}{row.when}",
         releases(row.first, row.last), row.document]
        for row in LIMITS
    ]  # fmt: skip
    return markdown(header, rows)


def wheels() -> str:
    """Return a list of the wheels that `make check-wheels` checked."""
    rows = _rows("wheels.csv")
    if not rows:
        return NOTHING_YET
    about = "- **{platform}**: `{wheel}`, {megabytes:.2f} MB. {checked}. Run: {run}. Looked at on {date}."
    lines = [about.format(**row, megabytes=int(row["bytes"]) / 1e6) for row in rows]
    return "\n".join(lines) + f"\n\n*Built by {made(rows, 'built_by').strip('*')}.*\n"


def tested_libraries() -> str:
    """Return a table of the libraries and their outcomes, each with what was tried."""
    rows = _rows("libraries.csv")
    if not rows:
        return NOTHING_YET
    lines: dict[tuple[str, str, str], int] = {}
    for row in rows:
        module, slot, way = row["tried"].partition(", slot, ")  # LibreYOLO: all attention modules of a kind in one line
        outcome = row["outcome"] + (f": {row['message']}" if row["message"] else "")
        line = f"{row['library']} {row['version']}", f"slot of kernels, {way}" if slot else module, outcome
        lines[line] = lines.get(line, 0) + 1
    outcomes: dict[tuple[str, str], list[str]] = {}
    for (library, tried, outcome), count in lines.items():
        outcomes.setdefault((library, outcome), []).append(f"{tried} ({count} attention modules)" if count > 1 else tried)
    table = [[library, "; ".join(tried), outcome] for (library, outcome), tried in outcomes.items()]
    return f"{markdown(['library', 'tried', 'outcome'], table)}\n{made(rows, 'made')}\n"


def onnx_forms() -> str:
    """Return a table of the differences of outputs for each file and each form of `fuse`."""
    files: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in _rows("onnx-forms.csv"):
        files.setdefault((row["library"], row["model"], row["replaced"], row["left"]), {})[row["form"]] = row
    if not files:
        return NOT_YET
    forms = list(next(iter(files.values())))
    table = [[*file, *(by[form]["difference"] if form in by else "" for form in forms)] for file, by in files.items()]
    return f"{markdown(['library', 'model', 'replaced', 'left', *forms], table)}\n{made(_rows('onnx-forms.csv'))}\n"


def _sentence(row: Row) -> str:
    """Return the first sentence of the message."""
    return row["message"].split(". ")[0]


def deploy() -> str:
    """Return a table of runtimes and operators: time / our time (difference). A list below has the numbered messages."""
    rows = _rows("deploy.csv")
    if not rows:
        return NOTHING_YET
    by = {(row["runtime"], row["operator"]): row for row in rows}
    operators, runtimes = (list(dict.fromkeys(row[column] for row in rows)) for column in ("operator", "runtime"))
    messages = list(dict.fromkeys(_sentence(row) for row in rows if row["message"]))

    def cell(row: Row | None) -> str:
        if row is None:
            return ""
        if row["message"]:
            return f"{'does not run' if row['exports'] == 'yes' else 'no export'} [{messages.index(_sentence(row)) + 1}]"
        return f"{speed_up(row)} ({row['difference']})" if row["runs"] == "yes" else "exports, not run"

    body = [[runtime, *(cell(by.get((runtime, operator))) for operator in operators)] for runtime in runtimes]
    heads = [f"`{operator}`".replace("_with_logits`", "` with logits") for operator in operators]
    notes = "".join(f"{number}. `{message}`\n" for number, message in enumerate(messages, 1))
    versions = ", ".join(sorted({row["version"] for row in rows if row["version"]}))
    return f"{markdown(['runtime, form', *heads], body)}\n{notes}\n*{made(rows).strip('*')}; {versions}*\n"


def modules() -> str:
    """Return a section for each name of mx_driving.nn, from its docstrings: settings, and inputs and outputs of forward."""
    from mx_driving import nn

    def list_parts(text: str, title: str, defaults: dict[str, inspect.Parameter]) -> str:
        """Return a list of the entries of a docstring's section: names with their defaults, and the meaning."""
        section = re.search(rf"^ *{title}:\n(.*?)(?:\n\n|\Z)", inspect.cleandoc(text), flags=re.MULTILINE | re.DOTALL)
        entries = re.findall(r"^    (\w[\w, ]*): (.*(?:\n     .*)*)", section[1] if section else "", flags=re.MULTILINE)
        lines = ""
        for names, meaning in entries:
            known = [defaults[name] for name in names.split(", ")]
            code = ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in known)
            lines += f"- `{code}`: {join_lines(meaning)}\n"
        return lines

    def join_lines(text: str) -> str:
        return re.sub(r"\s+", " ", text).strip()

    text = ""
    for name, member in ((name, getattr(nn, name)) for name in nn.__all__):
        call = member.forward if inspect.isclass(member) else member
        inputs, meaning = inspect.signature(call).parameters, inspect.getdoc(call) or ""
        text += f"### {name}\n\n"
        if inspect.isclass(member):
            settings = list_parts(member.__doc__ or "", "Args", dict(inspect.signature(member).parameters))
            text += f"Settings:\n\n{settings}\nInputs of `forward`:\n\n"
        (output,) = re.findall(r"^Returns:\n((?:    .*\n?)+)", meaning, flags=re.MULTILINE)
        text += f"{list_parts(meaning, 'Args', dict(inputs))}- returns {join_lines(output)}\n\n"
    return text.removesuffix("\n")
