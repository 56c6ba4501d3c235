"""Transformers' own tests of models with deformable attention, plain and patched: do the same ones fail?

    make test-transformers

The tests come from the sdist of the installed version, which pip downloads. It has the tests that all models share, and no
files of models: `small_models.py` has those. In a source tree of transformers (--checkout) all is there, and its files run.
Nothing else is downloaded: the hub is offline, and slow tests are skipped, as transformers skips them.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import pathlib
import platform
import subprocess
import sys
import tarfile
from datetime import date

import torch
import transformers

HERE = pathlib.Path(__file__).parent
sys.path.append(str(HERE.parent))
from commit import commit  # noqa: E402

ROOT = HERE.parents[2]
BUILD = ROOT / "build" / "transformers"
MODELS = (
    "d_fine", "deformable_detr", "deimv2", "grounding_dino", "lw_detr", "mask2former", "mm_grounding_dino", "omdet_turbo",
    "oneformer", "pp_doclayout_v2", "pp_doclayout_v3", "pp_doclayout_v4", "rf_detr", "rt_detr", "rt_detr_v2",
)  # fmt: skip
# What builds, saves and loads models, parameter by parameter, and the same comparison of dot products for more padding and more
# of torch's kernels: it takes most of the time, and no sample changes it. --all runs it, too.
LEFT_OUT = (
    "load", "_init_", "missing", "tied", "dtype", "safetensors", "mapping", "keys", "no_checkpoint", "keep_in_fp32", "tp_plan",
    "pad_right", "sdpa_kernels",
)  # fmt: skip
WAYS = ("plain", "patched")
Outcomes = dict[str, dict[str, str]]  # model -> test -> passed, failed or skipped


def downloaded() -> pathlib.Path:
    """The folder of the installed version's sdist."""
    name = f"transformers-{transformers.__version__}"
    if not (BUILD / name).exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        given = ["--no-deps", "--no-binary", "transformers", "--dest", str(BUILD), name.replace("-", "==")]
        subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", *given], check=True)
        with tarfile.open(BUILD / f"{name}.tar.gz") as archive:
            archive.extractall(BUILD, [m for m in archive if m.name.startswith(f"{name}/tests/")], filter="data")
    return BUILD / name


def files_of(models: list[str], checkout: pathlib.Path | None) -> list[str]:
    if checkout is None:
        return [str(HERE / "small_models.py")]
    files = [checkout / "tests" / "models" / model / f"test_modeling_{model}.py" for model in models]
    for file in files:
        if not file.exists():
            raise SystemExit(f"--checkout must be a source tree of transformers; got none of its {file.relative_to(checkout)}")
    return [str(file) for file in files]


def started(way: str, models: list[str], checkout: pathlib.Path | None, everything: bool) -> subprocess.Popen[bytes]:
    """A running pytest, which writes `<way>.jsonl` and `<way>.log`."""
    record, folder = BUILD / f"{way}.jsonl", checkout or downloaded()
    record.unlink(missing_ok=True)
    seen = os.pathsep.join(map(str, (HERE, folder, BUILD / "tools")))
    env = {
        **os.environ, "PYTHONPATH": seen, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "MX_DRIVING_RECORD": str(record), "MX_DRIVING_MODELS": " ".join(models), "MX_DRIVING_PATCH": "1" * (way == "patched"),
    }  # fmt: skip
    words = ["-p", "plugin", "--noconftest", "-c", os.devnull, "--rootdir", str(folder), "-q", "-W", "ignore", "--tb", "short"]
    chosen = [] if everything else ["-k", f"not ({' or '.join(LEFT_OUT)})"]
    command = [sys.executable, "-m", "pytest", *words, *chosen, *files_of(models, checkout)]
    with (BUILD / f"{way}.log").open("wb") as log:
        return subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)


def read(way: str) -> Outcomes:
    """The worst outcome of each test: a failed subtest fails it."""
    found: Outcomes = {}
    for line in (BUILD / f"{way}.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        tests = found.setdefault(row["model"], {})
        tests[row["test"]] = "failed" if "failed" in (row["outcome"], tests.get(row["test"])) else row["outcome"]
    return found


def compared(model: str, which: str, found: dict[str, Outcomes]) -> dict[str, str]:
    """A row of the table: both runs side by side, and what only one of them fails."""
    plain, patched = (found[way].get(model, {}) for way in WAYS)
    if plain.keys() != patched.keys():
        raise SystemExit(f"both runs must have the same tests of {model}; got {sorted(plain.keys() ^ patched.keys())}")
    row = {"model": model, "tests": which}
    for outcome in ("passed", "failed", "skipped"):
        row |= {f"{outcome} {way}": str(list(found[way].get(model, {}).values()).count(outcome)) for way in WAYS}
    ours, theirs = failures(patched), failures(plain)
    row |= {"fails patched only": " ".join(sorted(ours - theirs)), "fails plain only": " ".join(sorted(theirs - ours))}
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    return {**row, "fails both": " ".join(sorted(ours & theirs)), "made": f"{date.today()}, {versions}{commit()}"}


def failures(tests: dict[str, str]) -> set[str]:
    return {name for name, outcome in tests.items() if outcome == "failed"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=pathlib.Path, help="a source tree of transformers, whose own files are run")
    parser.add_argument("--only", choices=MODELS, action="append", help="some models alone; may be repeated")
    parser.add_argument("--all", action="store_true", help="also what only builds, saves and loads models")
    parser.add_argument("--csv", type=pathlib.Path, help="write the table to this file")
    given = parser.parse_args()
    models, checkout = list(given.only or MODELS), given.checkout and given.checkout.resolve()
    for way, running in [(way, started(way, models, checkout, given.all)) for way in WAYS]:
        if running.wait() not in (0, 1):  # 1: tests failed
            raise SystemExit(f"pytest must run the tests; got exit status {running.returncode}: {BUILD / way}.log")
    found = {way: read(way) for way in WAYS}
    rows = [compared(model, "its own file" if checkout else "those of all models", found) for model in models]
    for row in rows:
        print("; ".join(f"{name}: {value}" for name, value in row.items() if name not in ("tests", "made")))
    if given.csv:
        write(given.csv, rows)
    if any(row["fails patched only"] for row in rows):
        raise SystemExit(1)


def write(path: pathlib.Path, rows: list[dict[str, str]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
