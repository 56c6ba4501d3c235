"""Compare the outputs of another build with those of this one, byte for byte. Run: python benchmarks/same_bits.py OTHER

OTHER is a libmx_driving of another build, or the Python of another checkout's environment. Both builds run the inputs of
tests/helpers on each operator: output and gradients, every dtype, each instruction set, 1 to 64 threads, several masks of
gradients. One process per build writes a digest of each output. Exit status 1: outputs differ or have no counterpart.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

THREADS = (1, 2, 7, 64)


def import_with(library: str | None):
    """Import mx_driving.config. If `library` is given, load that library instead of the installed one."""
    if library:
        spec = importlib.util.find_spec("mx_driving")
        spec.submodule_search_locations.insert(0, str(Path(library).resolve().parent))
        module = sys.modules["mx_driving"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return importlib.import_module("mx_driving.config")


def pooling(cells: int, points: int, channels: int) -> tuple:
    """Return inputs of bev_pool_v3: two batches of `cells` x `cells`, with several points in most cells and none in some."""
    generator = torch.Generator().manual_seed(0)
    ranks = [torch.randint(n, (points,), generator=generator) for n in (40, 300, 2 * cells * cells)]
    feat, depth = (torch.randn(*n, dtype=torch.float64, generator=generator) for n in ((40, channels), (300,)))
    return feat, depth, *ranks[:2], ranks[2].sort().values, 2, 1, cells, cells


def cases_of(helpers: Path):
    """Yield (operator, name, inputs in float64) of every case."""
    sys.path.insert(0, str(helpers))
    import cases
    import logits_cases

    for operator, name, make in (*cases.CASES, *cases.LATTICE, *cases.LARGE, *logits_cases.CASES):
        yield operator, name, make()
    for cells, points, channels in ((9, 700, 80), (9, 700, 37), (3, 40, 1), (30, 4000, 64)):
        yield "bev_pool_v3", f"{points} points, {channels} channels", pooling(cells, points, channels)


def casts(args: tuple):
    """Yield the inputs in each dtype, with int32 tables, and with only the first input in 16 bits."""
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        floats = tuple(a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
        yield str(dtype), floats
        if dtype == torch.float32:
            yield "int32", tuple(a.int() if isinstance(a, Tensor) and a.dtype == torch.int64 else a for a in floats)
            yield "bfloat16 beside float32", (floats[0].bfloat16(), *floats[1:])


def outputs_of(operator: str, args: tuple):
    """Yield the output, and the gradients: all together, only the first, all but the first."""
    forward, backward = (getattr(torch.ops.mx_driving, operator + suffix).default for suffix in ("", "_backward"))
    yield "output", (output := forward(*args))
    grad = torch.randn(output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    others = len(backward._schema.returns) - 1
    for mask in [True] * (1 + others), [True] + [False] * others, [False] + [True] * others:
        for i, gradient in enumerate(backward(grad, *args, mask)):
            yield f"gradient {i} of mask {mask}", gradient


def write_digests(file: str, only: str, library: str | None = None) -> None:
    """Write a digest of each output of this process's build, by call and output."""
    config = import_with(library)
    native, digests = ctypes.CDLL(str(config.library_path())), {}
    native.mxd_set_work_of_a_thread(ctypes.c_int64(1000))  # small inputs run on several threads, too
    isas = [isa for isa in ("baseline", "avx2", "avx512") if native.mxd_use_isa(isa.encode()) == 0]
    checkouts = Path(config.__file__).parents[2], Path(__file__).parents[1]
    helpers = next(top / "tests" / "helpers" for top in checkouts if (top / "tests" / "helpers").exists())
    for operator, name, inputs in cases_of(helpers):
        for dtype, args in casts(inputs) if only in f"{operator}: {name}" else ():
            for isa in isas:
                native.mxd_use_isa(isa.encode())
                for threads in THREADS:
                    torch.set_num_threads(threads)
                    for what, t in outputs_of(operator, args):
                        call = f"{operator}: {name}; {dtype}; {isa}; {threads} threads; {what}"
                        digests[call] = hashlib.md5(t.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()
    Path(file).write_text(json.dumps(digests))


def digests_of(only: str, python: str, *library: str) -> dict[str, str]:
    with tempfile.NamedTemporaryFile() as file:
        subprocess.run([python, "-W", "ignore", __file__, "--write", file.name, only, *library], check=True)
        return json.loads(Path(file.name).read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", help="libmx_driving of another build, or the Python of another checkout")
    parser.add_argument("--only", default="", help="only cases whose 'operator: name' has this in it")
    options = parser.parse_args()
    is_library, name = options.other.endswith((".so", ".dylib", ".dll")), import_with(None).library_path().name
    if is_library and Path(options.other).name != name:
        parser.error(f"OTHER must have the file name {name}, by which the package finds it; got {options.other}")
    old = digests_of(options.only, *([sys.executable] if is_library else []), options.other)
    new = digests_of(options.only, sys.executable)
    alone, both = sorted(old.keys() ^ new.keys()), [name for name in old if name in new]
    differ = [name for name in both if old[name] != new[name]]
    shown = *(f"differs: {name}" for name in differ[:20]), *(f"in one build only: {name}" for name in alone[:20])
    print(*shown, f"{len(both)} outputs compared, {len(differ)} differ, {len(alone)} have no counterpart", sep="\n")
    sys.exit(bool(differ or alone or not both))


if __name__ == "__main__":
    write_digests(*sys.argv[2:]) if sys.argv[1:2] == ["--write"] else main()
