"""The pages' tables, from the CSV files of benchmarks/results and docs/support: `python docs/tables.py` prints them."""

from __future__ import annotations

import csv
import pathlib
import re
from collections.abc import Callable, Iterable

RESULTS = pathlib.Path(__file__).parent.parent / "benchmarks" / "results"
# tests.csv: `pytest --record`; wheels.csv: `make check-wheels`; deploy.csv: `make deploy-matrix`;
# libraries.csv: `make test-libraries`; onnx-forms.csv: `make onnx-forms`
SUPPORT = pathlib.Path(__file__).parent / "support"
BENCH = "epyc-zen4-2-cores.csv"
# Other processors: the file of bare operators, and that of operators with logits
OTHERS = {
    "zen5": ("epyc-zen5-2-cores.csv", "epyc-zen5-2-cores-with-logits.csv"),
    "zen3": ("epyc-zen3-2-cores.csv", "epyc-zen3-2-cores.csv"),
}
MODELS = "epyc-zen4-2-cores-models.csv"
BY_MODE = "xeon-207-2-cores-models-by-mode.csv"
ZEN3_MODULES = "epyc-zen3-2-cores-modules-memory-kept.csv"
Row = dict[str, str]


def read(name: str) -> list[Row]:
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table whose columns of numbers are aligned to the right; columns with any word are aligned to the left."""
    header, rows = list(header), [list(row) for row in rows]
    columns = list(zip(*rows, strict=True)) if rows else [() for _ in header]
    rules = ["---:" if any(cells) and all(is_number(cell) for cell in cells if cell) else "---" for cells in columns]
    lines = [header, rules, *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def is_number(cell: str) -> bool:
    """Return whether a cell is a number, possibly with a unit or a mark behind it."""
    return re.fullmatch(r"[-+]?[\d.,]+(e[-+]?\d+)?( ?\S{1,2})?", cell) is not None


def milliseconds(row: Row) -> str:
    time = float(row["milliseconds"])
    return f"{time:.2f}" if time < 100 else f"{time:.0f}"


def speed_up(row: Row) -> str:
    """How many times longer an implementation takes than this package."""
    ratio = float(row["times ours"])
    return f"{ratio:.1f}" if ratio < 100 else f"{ratio:.0f}"


def by_implementation(direction: str, file: str = BENCH) -> dict[str, dict[str, Row]]:
    """workload -> implementation -> its row, of one direction."""
    found: dict[str, dict[str, Row]] = {}
    for row in read(file):
        if row["direction"] == direction:
            found.setdefault(row["workload"], {})[row["implementation"]] = row
    return found


RIVALS = ("plain torch", "torch.compile", "torch-ms-deform-attn")
# What the rows of operators with logits and of modules have beside them, and no other row.
BARE, PARTS = "bare operator", "layers + operator"
MODULES = ("plain torch", "torch.compile", "transformers", "transformers, compiled", "mmcv", "mmcv, compiled")
NOT_YET = "*The recorded run has no such row yet.*\n"


def workloads_with(implementation: str, direction: str, file: str = BENCH) -> dict[str, dict[str, Row]]:
    return {name: by for name, by in by_implementation(direction, file).items() if implementation in by}


def bare_workloads(direction: str, file: str = BENCH) -> dict[str, dict[str, Row]]:
    """Those of operators on locations and weights that are ready."""
    return {name: by for name, by in by_implementation(direction, file).items() if not {BARE, PARTS} & by.keys()}


def _cells(by: dict[str, Row], rivals: Iterable[str]) -> list[str]:
    return [speed_up(by[rival]) if rival in by else "" for rival in rivals]


def speed_ups(direction: str, file: str = BENCH) -> str:
    """Our time in milliseconds, and the speed-up over each rival that was measured."""
    found = bare_workloads(direction, file)
    rivals = [rival for rival in RIVALS if any(rival in by for by in found.values())]
    rows = [[name, milliseconds(by["mx_driving"]), *_cells(by, rivals)] for name, by in found.items()]
    return markdown(["workload", "mx_driving, ms", *(f"over {rival}" for rival in rivals)], rows)


def ratio(by: dict[str, Row], other: str) -> str:
    """Our time over that of another implementation."""
    return f"{float(by['mx_driving']['milliseconds']) / float(by[other]['milliseconds']):.2f}"


def beside(other: str, rivals: Iterable[str], file: str = BENCH) -> str:
    """Of rows that have `other` beside them: our time, its ratio to that of `other`, and the speed-up over each rival."""
    rows = [
        [f"{name}; {direction}", milliseconds(by["mx_driving"]), ratio(by, other), *_cells(by, rivals)]
        for direction in ("forward", "forward + backward")
        for name, by in workloads_with(other, direction, file).items()
    ]
    if not rows:
        return NOT_YET
    return markdown(["workload", "mx_driving, ms", f"ours / {other}", *(f"over {rival}" for rival in rivals)], rows)


def floors(file: str = BENCH) -> str:
    """Return our time in milliseconds, and as a multiple of either gather loop, of workloads that have one."""
    forward, backward = bare_workloads("forward", file), by_implementation("backward", file)
    floors = ("gather loop", "gather loop, head-major")
    rows = []
    for name in [name for name, by in forward.items() if floors[0] in by]:
        cells = [name]
        for by in (forward[name], backward[name]):
            cells += [milliseconds(by["mx_driving"]), *(ratio(by, floor) if floor in by else "" for floor in floors)]
        rows.append(cells)
    of_each = ["ours / loop", "ours / head-major loop"]
    return markdown(["workload", "forward, ms", *of_each, "backward, ms", *of_each], rows)


def renamed(rows: list[Row], columns: dict[str, str]) -> str:
    """Some columns, by their names in the file and on the page."""
    return markdown(columns.values(), [[row[name] for name in columns] for row in rows])


def whole_models() -> str:
    """Every model as `patch` makes it, and how many gain next to nothing."""
    rows = read(MODELS)
    little = sum(float(row["whole speed-up"]) <= 1.06 for row in rows)
    columns = {
        "model": "model",
        "whole before ms": "whole, before, ms",
        "whole modules ms": "after, ms",
        "whole speed-up": "speed-up",
        "core before ms": "sampling, before, ms",
        "core after ms": "after, ms",
        "core speed-up": "speed-up",
    }
    return f"{renamed(rows, columns)}\n{little} of the {len(rows)} rows gain 6 % or less.\n\n{made(rows)}\n"


def models_by_mode() -> str:
    """Seconds of every model before and after `patch` in three modes, and the speed-up."""
    cells: dict[str, list[str]] = {}
    for row in read(BY_MODE):
        before, after = (f"{float(row[when]):.2f}" for when in ("before s", "after s"))
        cells.setdefault(row["model"], []).append(f"{before} -> {after} ({row['speed-up']})")
    heads = ["model", "float32", "autocast to bfloat16", "`.bfloat16()`"]
    return f"{markdown(heads, [[name, *three] for name, three in cells.items()])}\n{made(read(BY_MODE))}\n"


def attention_modules() -> str:
    """Every model with its cores replaced and with its modules replaced."""
    columns = {
        "model": "model",
        "whole cores ms": "whole, cores, ms",
        "whole modules ms": "modules, ms",
        "whole gain": "gain",
        "modules before ms": "modules alone, before, ms",
        "modules cores ms": "cores, ms",
        "modules modules ms": "modules, ms",
        "modules gain": "gain",
    }
    return renamed(read(MODELS), columns)


def plain(file: str, last: str = "machine") -> str:
    """Return a file's rows. The values of the column `last` are listed once, below the table."""
    rows = read(file)
    columns = {name: name for name in rows[0] if name != last}
    return f"{renamed(rows, columns)}\n{made(rows, last)}\n"


def made(rows: list[Row], column: str = "machine") -> str:
    """Return dates, machines and versions of the rows, each once."""
    return f"*{'; '.join(dict.fromkeys(row[column] for row in rows))}*"


def _rows(name: str) -> list[Row]:
    if not (SUPPORT / name).exists():
        return []
    with (SUPPORT / name).open(newline="") as file:
        return list(csv.DictReader(file))


NOTHING_YET = "*Nothing is recorded yet.*\n"
OUTCOMES = ("passed", "failed", "skipped")


def _outcome(rows: list[Row]) -> str:
    """ "12 passed, 3 skipped" of all rows together."""
    sums = {outcome: sum(int(row[outcome]) for row in rows) for outcome in OUTCOMES}
    return ", ".join(f"{count} {outcome}" for outcome, count in sums.items() if count)


def _runs() -> dict[tuple[str, ...], list[Row]]:
    """(torch, other packages, Python, system, processor) -> its rows, older torch first."""
    found: dict[tuple[str, ...], list[Row]] = {}
    columns = ("torch", "packages", "python", "system", "processor")
    for row in _rows("tests.csv"):
        found.setdefault(tuple(row[column] for column in columns), []).append(row)
    return dict(sorted(found.items(), key=lambda item: [int(part) for part in item[0][0].partition("+")[0].split(".")]))


def tested() -> str:
    """Each run of the tests."""
    rows = [
        [*place, str(len(by_file)), _outcome(by_file), max(row["date"] for row in by_file)]
        for place, by_file in _runs().items()
    ]
    header = ["torch", "other packages", "Python", "system", "processor", "test files", "tests", "date"]
    return markdown(header, rows) if rows else NOTHING_YET


def tested_by_file() -> str:
    """What each file of tests gave on each torch."""
    runs = _runs()
    if not runs:
        return NOTHING_YET
    files = sorted({row["file"] for rows in runs.values() for row in rows})
    cells = [
        [
            file.removeprefix("test_").removesuffix(".py"),
            *(_outcome([r for r in rows if r["file"] == file]) for rows in runs.values()),
        ]
        for file in files
    ]
    header = ["tests of"]
    for (torch, packages, *_), rows in runs.items():
        dates = sorted(row["date"] for row in rows)
        header.append(f"torch {torch}, {packages}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}")
    return markdown(header, cells)


def needs() -> str:
    """The features that not every torch has."""
    from mx_driving._needs import NEEDS

    return markdown(["feature", "needs torch", "older ones fail, since"], [[name, *need] for name, need in NEEDS.items()])


def limits() -> str:
    """The vendor's documented limits, with the releases that have them."""
    from mx_driving._operator.limits import LIMITS, NEWEST

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
    """A line for each wheel that `make check-wheels` looked at."""
    rows = _rows("wheels.csv")
    if not rows:
        return NOTHING_YET
    about = "- **{platform}**: `{wheel}`, {megabytes:.2f} MB. {checked}. Run: {run}. Looked at on {date}."
    lines = [about.format(**row, megabytes=int(row["bytes"]) / 1e6) for row in rows]
    return "\n".join(lines) + f"\n\n*Built by {made(rows, 'built_by').strip('*')}.*\n"


def tested_libraries() -> str:
    """Each library with what was tried on it."""
    rows = _rows("libraries.csv")
    if not rows:
        return NOTHING_YET
    lines: dict[tuple[str, str, str], int] = {}
    for row in rows:
        module, slot, way = row["tried"].partition(", slot, ")  # attention modules of LibreYOLO in one line for each way
        outcome = row["outcome"] + (f": {row['message']}" if row["message"] else "")
        line = f"{row['library']} {row['version']}", f"slot of kernels, {way}" if slot else module, outcome
        lines[line] = lines.get(line, 0) + 1
    several = {line: f": {n} attention modules" if n > 1 else "" for line, n in lines.items()}
    counted = [[library, tried + more, outcome] for (library, tried, outcome), more in several.items()]
    return f"{markdown(['library', 'tried', 'outcome'], counted)}\n{made(rows, 'made')}\n"


def libraries() -> str:
    """Models of other libraries before and after `patch`, and the models that no ONNX file can be made of."""
    if not (RESULTS / "libraries.csv").exists():
        return NOT_YET
    rows = read("libraries.csv")
    columns = {"library": "library", "model": "model", "replaced": "replaced", "difference": "differs by"}
    columns |= {"before ms": "before, ms", "after ms": "after, ms", "speed-up": "speed-up"}
    body = [[*(row[name] for name in columns), row["onnx"].partition(":")[0]] for row in rows]
    refused = [f"{row['model']} in ONNX: {row['onnx'][4:]}." for row in rows if row["onnx"].startswith("no: ")]
    return "\n\n".join([markdown([*columns.values(), "ONNX"], body).rstrip(), *refused, made(rows)]) + "\n"


def onnx_files() -> str:
    """Files that libraries export of their models, before and after `fuse`."""
    if not (RESULTS / "onnx-files.csv").exists():
        return NOT_YET
    columns = {"library": "library", "model": "model", "writing": "made of", "replaced": "replaced", "left": "left"}
    columns |= {"difference": "differs by", "off": "queries off", "before ms": "before, ms", "after ms": "after, ms"}
    rows = read("onnx-files.csv")
    return f"{renamed(rows, columns | {'speed-up': 'speed-up'})}\n{made(rows)}\n"


def onnx_forms() -> str:
    """The same files in each form of `fuse`: how far outputs are from the file's own."""
    files: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in _rows("onnx-forms.csv"):
        files.setdefault((row["library"], row["model"], row["replaced"], row["left"]), {})[row["form"]] = row
    if not files:
        return NOT_YET
    forms = list(next(iter(files.values())))
    table = [[*file, *(by[form]["difference"] if form in by else "" for form in forms)] for file, by in files.items()]
    return f"{markdown(['library', 'model', 'replaced', 'left', *forms], table)}\n{made(_rows('onnx-forms.csv'))}\n"


def _sentence(row: Row) -> str:
    """The first of a message."""
    return row["message"].split(". ")[0]


def deploy() -> str:
    """Runtimes by operators: how many times longer than ours, and the difference. Numbers in brackets are messages, below."""
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


TABLES: dict[str, Callable[[], str]] = {
    "forward": lambda: speed_ups("forward"),
    "forward_backward": lambda: speed_ups("forward + backward"),
    "with_logits": lambda: beside(BARE, RIVALS[:2]),
    "modules": lambda: beside(PARTS, MODULES),
    "floors": floors,
    "modules_zen3": lambda: f"{beside(PARTS, ('plain torch', 'transformers'), ZEN3_MODULES)}\n{made(read(ZEN3_MODULES))}\n",
    "measured": lambda: made(read(BENCH)) + "\n",
    "whole_models": whole_models,
    "attention_modules": attention_modules,
    "models_by_mode": models_by_mode,
    "libraries": libraries,
    "onnx_files": onnx_files,
    "onnx_forms": onnx_forms,
    "detectors": lambda: plain("epyc-zen3-2-cores-detectors.csv"),
    "train_bev": lambda: plain("epyc-zen4-2-cores-train-bev.csv"),
    "bev_pool": lambda: plain("epyc-zen4-2-cores-bev-pool.csv"),
    "machine_code": lambda: plain("triton-3.6.0-machine-code.csv", "made by"),
    "gpu_peers": lambda: plain("gpu-peers.csv", "made by"),
    "gpu_static": lambda: plain("gpu-static.csv", "made by"),
    "gpu_static_times": lambda: plain("gpu-static-times.csv", "made by"),
    "tested": tested,
    "tested_by_file": tested_by_file,
    "needs": needs,
    "wheels": wheels,
    "limits": limits,
    "deploy": deploy,
    "tested_libraries": tested_libraries,
}


def _of(processor: str, file: str, with_logits: str) -> dict[str, Callable[[], str]]:
    """The tables of another processor."""
    tables = {
        "measured": lambda: made(read(file)) + "\n",
        "forward": lambda: speed_ups("forward", file),
        "forward_backward": lambda: speed_ups("forward + backward", file),
        "with_logits": lambda: f"{beside(BARE, RIVALS[:1], with_logits)}\n{made(read(with_logits))}\n",
        "floors": lambda: floors(file),
    }
    return {f"{name}_{processor}": table for name, table in tables.items()}


for processor, files in OTHERS.items():
    TABLES.update(_of(processor, *files))


def write(folder: pathlib.Path) -> None:
    for name, table in TABLES.items():
        (folder / f"{name}.md").write_text(table(), encoding="utf-8")


if __name__ == "__main__":
    for name, table in TABLES.items():
        print(f"## {name}\n\n{table()}")
