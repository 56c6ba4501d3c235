"""Tables of times, from the CSV files of benchmarks/results."""

from __future__ import annotations

import csv
import pathlib
import re
from collections.abc import Iterable

RESULTS = pathlib.Path(__file__).parent.parent / "benchmarks" / "results"
BENCH = "epyc-zen4-2-cores.csv"  # bench.py --peers
MODULES_BY_MODE = "epyc-zen4-2-cores-modules-by-mode.csv"  # bench.py --only 'Module:*' --dtype float32 --dtype bfloat16
BY_MODE = "epyc-zen4-2-cores-models-by-mode.csv"  # time_models.py --mode float32 --mode autocast --mode bfloat16
GPU = "nvidia-h100-80gb-hbm3.csv"  # gpu.py
GPU_MODELS = "nvidia-h100-80gb-hbm3-models.csv"  # gpu_models.py
DIGITS = "train-digits.csv"  # precision.csv of examples/train_digits.py
# Processor -> the file of bare operators, the file of operators with logits.
PROCESSORS = {
    "Xeon": ("xeon-207-2-cores.csv", "xeon-207-2-cores.csv"),
    "Zen 4": ("epyc-zen4-2-cores.csv", "epyc-zen4-2-cores.csv"),
    "Zen 5": ("epyc-zen5-2-cores.csv", "epyc-zen5-2-cores-with-logits.csv"),
    "Zen 3": ("epyc-zen3-2-cores.csv", "epyc-zen3-2-cores.csv"),
}
MODES = ("float32", "autocast to bfloat16", "bfloat16")
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
    """Return the time of an implementation divided by ours."""
    ratio = float(row["times ours"])
    return f"{ratio:.1f}" if ratio < 100 else f"{ratio:.0f}"


def by_implementation(direction: str, file: str = BENCH, dtype: str = "float32") -> dict[str, dict[str, Row]]:
    """Return the rows of one direction: workload -> implementation -> row."""
    workloads: dict[str, dict[str, Row]] = {}
    for row in read(file):
        if (row["direction"], row["dtype"]) == (direction, dtype):
            workloads.setdefault(row["workload"], {})[row["implementation"]] = row
    return workloads


RIVALS = ("plain torch", "torch.compile", "torch-ms-deform-attn")
# Implementations that only operators with logits (BARE) and modules (PARTS) have.
BARE, PARTS = "bare operator", "layers + operator"
MODULES = ("plain torch", "torch.compile", "transformers", "transformers, compiled", "mmcv", "mmcv, compiled")
NOT_YET = "*The recorded run has no such row yet.*\n"


def workloads_with(implementation: str, direction: str, file: str = BENCH) -> dict[str, dict[str, Row]]:
    return {name: by for name, by in by_implementation(direction, file).items() if implementation in by}


def bare_workloads(direction: str, file: str = BENCH) -> dict[str, dict[str, Row]]:
    """Return the workloads of operators without logits."""
    return {name: by for name, by in by_implementation(direction, file).items() if not {BARE, PARTS} & by.keys()}


def _cells(by: dict[str, Row], rivals: Iterable[str]) -> list[str]:
    return [speed_up(by[rival]) if rival in by else "" for rival in rivals]


def speed_ups(direction: str, file: str = BENCH) -> str:
    """Return a table of our time in milliseconds and the speed-up over each measured rival."""
    workloads = bare_workloads(direction, file)
    rivals = [rival for rival in RIVALS if any(rival in by for by in workloads.values())]
    rows = [[name, milliseconds(by["mx_driving"]), *_cells(by, rivals)] for name, by in workloads.items()]
    return markdown(["workload", "mx_driving, ms", *(f"over {rival}" for rival in rivals)], rows)


def ratio(by: dict[str, Row], other: str) -> str:
    """Return our time divided by the time of another implementation."""
    return f"{float(by['mx_driving']['milliseconds']) / float(by[other]['milliseconds']):.2f}"


def beside(other: str, rivals: Iterable[str], file: str = BENCH) -> str:
    """Return a table of the workloads that have `other`: our time, its ratio to `other`, the speed-up over each rival."""
    rows = [
        [f"{name}; {direction}", milliseconds(by["mx_driving"]), ratio(by, other), *_cells(by, rivals)]
        for direction in ("forward", "forward + backward")
        for name, by in workloads_with(other, direction, file).items()
    ]
    if not rows:
        return NOT_YET
    return markdown(["workload", "mx_driving, ms", f"ours / {other}", *(f"over {rival}" for rival in rivals)], rows)


def floors(file: str = BENCH) -> str:
    """Return a table of the workloads with gather loops: our time in milliseconds, and as a multiple of each loop."""
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
    """Return a table of some columns. `columns` maps the name in the file to the name on the page."""
    return markdown(columns.values(), [[row[name] for name in columns] for row in rows])


def from_to(before: float, after: float) -> str:
    """Return "before → after (speed-up)" of two times in milliseconds, with spaces at which no line breaks."""
    digits = [f"{time:.{2 if time < 10 else 1 if time < 100 else 0}f}" for time in (before, after)]
    ratio = before / after
    return f"{digits[0]} → {digits[1]} ({ratio:.{2 if ratio < 10 else 0}f})".replace(" ", "\u00a0")


def of_mode(file: str, direction: str) -> dict[str, list[str]]:
    """Return workload -> cells, one for each mode, with the times of plain torch and ours."""
    cells: dict[str, list[str]] = {}
    for mode in MODES:
        for name, by in by_implementation(direction, file, mode).items():
            pair = (float(by[one]["milliseconds"]) for one in ("plain torch", "mx_driving"))
            cells.setdefault(name, []).append(from_to(*pair))
    return cells


def of_models() -> dict[str, list[str]]:
    """Return whole model -> cells, one for each mode, sorted by the gain in float32."""
    models: dict[str, list[str]] = {}
    measured = read(BY_MODE)
    gains = {row["model"]: float(row["speed-up"]) for row in measured if row["mode"] == MODES[0]}
    for row in sorted(measured, key=lambda row: -gains[row["model"]]):
        models.setdefault(row["model"], []).append(from_to(float(row["before s"]) * 1e3, float(row["after s"]) * 1e3))
    return models


def of_operators() -> dict[str, list[str]]:
    """Return operator -> its cell in float32, without the vendor's examples."""
    names = [name for name in bare_workloads("forward", BENCH) if not name.startswith("Vendor example")]
    cells = of_mode(BENCH, "forward")
    return {name: cells[name] for name in names}


def forwards(what: str, modes: Iterable[str], rows: dict[str, list[str]], file: str) -> str:
    """Return the table of whole models, modules or operators, and its machine."""
    return f"{markdown([f'{what}, ms', *modes], [[name, *cells] for name, cells in rows.items()])}\n{made(read(file))}\n"


def module_forwards() -> str:
    rows = {name.removeprefix("Module: "): cells for name, cells in of_mode(MODULES_BY_MODE, "forward").items()}
    return forwards("module", MODES, rows, MODULES_BY_MODE)


FIRST = ("Deformable DETR", "Grounding DINO", "Mask2Former", "RT-DETR", "Operator: Deformable-DETR encoder")
FIRST_ON_GPU = ("float32, batch 8", "bfloat16, batch 8", "compiled, float32, batch 1")
FIRST_ON_GPU += ("training step, float32, batch 4 *", "training step, autocast, batch 4")


def first() -> str:
    """Return the table of README and the landing page."""
    rows = of_models() | {f"Operator: {name}": [*cells, "", ""] for name, cells in of_operators().items()}
    table = markdown(["milliseconds", *MODES], [[name, *rows[name]] for name in FIRST])
    return f"{table}\n{made([row for file in (BY_MODE, BENCH) for row in read(file)])}\n"


def first_on_gpu() -> str:
    """Return the GPU table of README and the landing page: milliseconds and memory of each variant."""
    calls = gpu_calls(short=True)
    variants = {"plain": "its own code", "torch-ms-deform-attn": "CUDA extension", "mx_driving": "mx_driving"}
    rows = []
    for name in FIRST_ON_GPU:
        by = calls[f"Deformable DETR, {name}"]
        memory = " / ".join(f"{int(row['MiB']):,}" for row in by.values() if row["MiB"])
        rows.append([f"Deformable DETR, {name}", *(by[key]["milliseconds"] if key in by else "" for key in variants), memory])
    return f"{markdown(['milliseconds', *variants.values(), 'peak MiB of the three'], rows)}\n{made(read(GPU_MODELS))}\n"


def modules_by_mode() -> str:
    """Return a table of modules in each mode and direction, with the ratio of autocast to the module's parts."""
    rows = []
    for direction in ("forward", "forward + backward"):
        parts = by_implementation(direction, MODULES_BY_MODE, MODES[1])
        for name, cells in of_mode(MODULES_BY_MODE, direction).items():
            rows.append([f"{name.removeprefix('Module: ')}; {direction}", *cells, ratio(parts[name], PARTS)])
    return f"{markdown(['module, ms', *MODES, 'autocast / its parts'], rows)}\n{made(read(MODULES_BY_MODE))}\n"


def others() -> dict[str, tuple[str, str]]:
    return {name: files for name, files in PROCESSORS.items() if BENCH not in files}


def other_measured() -> str:
    return made([row for files in others().values() for file in files for row in read(file)]) + "\n"


def undisturbed(direction: str, file: str) -> dict[str, dict[str, Row]]:
    """Return the workloads without disturbed ones. A run measures a bare operator twice, alone and beside its operator with
    logits; it was disturbed if the two times differ by more than a factor of 1.3."""
    workloads = by_implementation(direction, file)

    def agrees(name: str) -> bool:
        bare = name.removesuffix(", with logits")
        by = workloads.get(f"{bare}, with logits", {})
        if bare not in workloads or BARE not in by:
            return True
        return 1 / 1.3 <= float(ratio({"mx_driving": workloads[bare]["mx_driving"], BARE: by[BARE]}, BARE)) <= 1.3

    return {name: by for name, by in workloads.items() if agrees(name)}


def other_processors(direction: str) -> str:
    """Return a table of our time on the other processors, and the speed-up over plain torch."""
    columns = [undisturbed(direction, bare) for bare, _ in others().values()]
    names = dict.fromkeys(name for by_name in columns for name, by in by_name.items() if not {BARE, PARTS} & by.keys())
    rows = [[name, *(cell for by_name in columns for cell in _time_and_speed_up(by_name.get(name)))] for name in names]
    heads = [head for name in others() for head in (f"{name}, ms", "over plain torch")]
    return markdown(["workload", *heads], rows)


def _time_and_speed_up(by: dict[str, Row] | None) -> list[str]:
    return [milliseconds(by["mx_driving"]), *_cells(by, RIVALS[:1])] if by else ["", ""]


def other_processors_with_logits() -> str:
    """Return a table of the other processors: the time with logits divided by that of the bare operator."""
    directions = ("forward", "forward + backward")
    columns = [{way: undisturbed(way, logits) for way in directions} for _, logits in others().values()]
    names = dict.fromkeys(name for by_way in columns for by in by_way.values() for name in by if BARE in by[name])
    cells = {
        f"{name}; {way}": [ratio(by_way[way][name], BARE) if name in by_way[way] else "" for by_way in columns]
        for way in directions
        for name in names
    }
    return markdown(["workload", *others()], [[name, *of] for name, of in cells.items()])


def microseconds(by: dict[str, Row], name: str = "mx_driving, kernel") -> str:
    return f"{1e3 * float(by[name]['milliseconds']):,.0f}"


def gpu() -> str:
    """Return a table of our GPU kernels in each dtype, and of a call from Python in float32."""
    rows = []
    for direction in ("forward", "backward"):
        narrow = [by_implementation(direction, GPU, dtype) for dtype in ("bfloat16", "float16")]
        for name, by in by_implementation(direction, GPU).items():
            kernels = [microseconds(of[name]) for of in narrow]
            rows.append([f"{name}; {direction}", microseconds(by), *kernels, microseconds(by, "mx_driving, call")])
    return f"{markdown(['microseconds', 'float32', 'bfloat16', 'float16', 'float32, a call'], rows)}\n{made(read(GPU))}\n"


def gpu_calls(short: bool = False) -> dict[str, dict[str, Row]]:
    """Return whole models on a GPU: measurement -> variant -> row. A star marks rows in which Python limits our time."""
    measures = {"forward": "", "compiled forward": "compiled, "} if short else {}
    calls: dict[str, dict[str, Row]] = {}
    for row in read(GPU_MODELS):
        measure = measures.get(row["measure"], f"{row['measure']}, ")
        mode = row["mode"].removesuffix(" to bfloat16") if short else row["mode"]
        calls.setdefault(f"{row['model']}, {measure}{mode}, batch {row['batch']}", {})[row["variant"]] = row
    return {f"{name} *" if short and by["mx_driving"]["host-bound"] else name: by for name, by in calls.items()}


def gpu_models() -> str:
    """Return a table of whole models on a GPU: wall time, (time of all kernels), memory before and after `patch`."""
    variants = ("plain", "torch-ms-deform-attn", "mx_driving")
    rows = []
    for name, by in gpu_calls().items():
        before, after = by["plain"], by["mx_driving"]
        kernels = [float(row["GPU milliseconds"] or 0) for row in (before, after)]
        memory = f"{int(before['MiB']):,} → {int(after['MiB']):,}" if before["MiB"] else ""
        gain = f"{kernels[0] / kernels[1]:.2f}" if all(kernels) else ""
        rows.append([name, *(_time_on_gpu(by.get(variant)) for variant in variants), gain, memory])
    header = ["milliseconds (of all kernels)", *variants, "kernels, plain / mx_driving", "MiB, plain → mx_driving"]
    return f"{markdown(header, rows)}\n{made(read(GPU_MODELS))}\n"


def _time_on_gpu(row: Row | None) -> str:
    if not row:
        return ""
    kernels = f" ({row['GPU milliseconds']})" if row["GPU milliseconds"] else ""
    return f"{row['milliseconds']}{'*' if row['host-bound'] else ''}{kernels}"


def plain(file: str, last: str = "machine") -> str:
    """Return a file's rows. The values of the column `last` are listed once, below the table."""
    if not (RESULTS / file).exists():
        return NOT_YET
    rows = read(file)
    columns = {name: name for name in rows[0] if name != last}
    return f"{renamed(rows, columns)}\n{made(rows, last)}\n"


def made(rows: list[Row], column: str = "machine") -> str:
    """Return the distinct machines, dates and versions of the rows, in italics."""
    return f"*{'; '.join(dict.fromkeys(row[column] for row in rows))}*"


def libraries() -> str:
    """Return a table of libraries' models before and after `patch`, and sentences on failed ONNX exports."""
    if not (RESULTS / "libraries.csv").exists():
        return NOT_YET
    rows = read("libraries.csv")
    columns = {"library": "library", "model": "model", "replaced": "replaced", "difference": "differs by"}
    columns |= {"before ms": "before, ms", "after ms": "after, ms", "speed-up": "speed-up"}
    body = [[*(row[name] for name in columns), row["onnx"].partition(":")[0]] for row in rows]
    refused = [f"{row['model']} in ONNX: {row['onnx'][4:]}." for row in rows if row["onnx"].startswith("no: ")]
    return "\n\n".join([markdown([*columns.values(), "ONNX"], body).rstrip(), *refused, made(rows)]) + "\n"


def onnx_files() -> str:
    """Return a table of the ONNX files that libraries export, before and after `fuse`."""
    if not (RESULTS / "onnx-files.csv").exists():
        return NOT_YET
    columns = {"library": "library", "model": "model", "writing": "made of", "replaced": "replaced", "left": "left"}
    columns |= {"difference": "differs by", "off": "queries off", "before ms": "before, ms", "after ms": "after, ms"}
    rows = read("onnx-files.csv")
    return f"{renamed(rows, columns | {'speed-up': 'speed-up'})}\n{made(rows)}\n"
