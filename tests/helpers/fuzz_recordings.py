"""Recordings that somebody edited, cut or wrote by hand, for `mx-driving replay`:

    python tests/helpers/fuzz_recordings.py 30        # seconds
    python tests/helpers/fuzz_recordings.py 0 1234    # the recording of this seed

A seed makes a folder of a right call and a broken one: bytes, the description or tensors of one of its files are changed.
Replay must judge the right call, and judge the broken one or say in a sentence why not, in SECONDS and within MEMORY. A finding
is printed with its seed, and its folder is kept.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pathlib
import random
import re
import shutil
import signal
import struct
import sys
import tempfile
import time
from typing import Any

import torch
from safetensors.torch import save, save_file
from typer.testing import CliRunner

import mx_driving
from mx_driving.cli.app import app

OPERATORS = ("multi_scale_deformable_attn", "deformable_aggregation", "geometric_kernel_attention")
POOL = "bev_pool_v3"
NAMES = ("value", "shapes", "starts", "locations", "weights")
LEARNED = {OPERATORS[0]: (0, 3, 4), OPERATORS[1]: (0, 3, 4), OPERATORS[2]: (0, 4)}
SECONDS, MEMORY, BATCH = 60, 4 * 2**30, 25
KEPT = ()  # seeds of findings
ODD = (None, True, 0, -1, 2**31, 2**63, 2**64, 10**4000, 0.5, 1e308, float("nan"), "", "7", "\ud800", "\x1b[31m[red]",
       "x" * 5000, [], [[]], {}, {"value": [1, -1]}, {"value": None}, [None] * 3, "[" * 50000)  # fmt: skip
Tensors = dict[Any, Any]


def pooling(random: random.Random) -> tuple[dict[str, Any], Tensors, Tensors]:
    """The same of a function that sums points into cells."""
    torch.manual_seed(random.randrange(2**31))
    n, rows, c, b, d, h, w = (random.randint(1, 4) for _ in range(7))
    feat, depth, geometry = torch.randn(rows, c), torch.rand(2, rows), torch.randint(-1, 3, (b, n, 3))
    ranks = {
        f"ranks_{name}": torch.randint(most, (n,))
        for name, most in (("depth", 2 * rows), ("feat", rows), ("bev", b * d * h * w))
    }
    lifted, shape = {"depth": depth, "feat": feat, **ranks}, {"bev_feat_shape": [b, d, h, w, c]}
    intervals = {"interval_starts": torch.arange(n), "interval_lengths": torch.ones(n, dtype=torch.long)}
    places = torch.stack([torch.randint(most, (rows,)) for most in (h, w, d, b)], 1)
    form, tensors, sizes = random.choice(
        (
            ("bev_pool_v3", lifted, shape),
            ("bev_pool_v2", {**lifted, **intervals}, shape),
            ("bev_pool", {"feat": feat, "geom_feat": places}, {"B": b, "D": d, "H": h, "W": w}),
            ("npu_voxel_pooling_train", {"geom_xyz": geometry, "feat": torch.randn(b, n, c)}, {"voxel_num": [w, h, d]}),
        )
    )
    leaves = {name: t.clone().requires_grad_(name in ("feat", "depth")) for name, t in tensors.items()}
    names = {"feat": "input_features"} if "voxel" in form else {}
    output = getattr(mx_driving, form)(**{names.get(name, name): t for name, t in leaves.items()}, **sizes)
    grad, learned = torch.randn(output.shape), [name for name, t in leaves.items() if t.requires_grad]
    found = torch.autograd.grad(output, [leaves[name] for name in learned], grad)
    gradients = {f"grad_{name}": t for name, t in zip(learned, found, strict=True)}
    about = {"operator": POOL, "form": form, "sizes": sizes}
    return about, {**tensors, "output": output.detach().contiguous()}, {"grad_output": grad, **gradients}


def call(random: random.Random) -> tuple[dict[str, Any], Tensors, Tensors]:
    """What says which operator it is, the tensors of a small call, and of its gradients."""
    operator = random.choice((*OPERATORS, POOL))
    if operator == POOL:
        return pooling(random)
    torch.manual_seed(random.randrange(2**31))
    bs, queries, heads, channels, points = (random.randint(1, 3) for _ in range(5))
    shapes = torch.tensor([(3, 5), (2, 4)][: random.randint(1, 2)])
    if operator == "deformable_aggregation":
        shapes = shapes.expand(random.randint(1, 3), -1, -1).contiguous()
        sizes = (bs, queries, points, len(shapes)), (bs, queries, points, *shapes.shape[:2], heads)
        value = torch.randn(bs, int(shapes.prod(-1).sum()), heads * channels)
    else:
        sizes = ((bs, queries, heads, len(shapes), points),) * 2
        value = torch.randn(bs, int(shapes.prod(-1).sum()), heads, channels)
    rows = shapes.prod(-1).flatten()
    starts = (rows.cumsum(0) - rows).view(shapes.shape[:-1])
    scale = 5 if operator == "geometric_kernel_attention" else 1
    inputs = [value, shapes, starts, (torch.rand(*sizes[0], 2) * scale).floor() if scale > 1 else torch.rand(*sizes[0], 2)]
    inputs.append(torch.rand(sizes[1]))
    leaves = [t.clone().requires_grad_(i in LEARNED[operator]) for i, t in enumerate(inputs)]
    output = getattr(mx_driving, operator)(*leaves)
    grad = torch.randn(output.shape)
    found = torch.autograd.grad(output, [leaves[i] for i in LEARNED[operator]], grad)
    gradients = {"grad_" + NAMES[i]: t for i, t in zip(LEARNED[operator], found, strict=True)}
    tensors = {**dict(zip(NAMES, inputs, strict=True)), "output": output.detach()}
    return {"operator": operator}, tensors, {"grad_output": grad, **gradients}


def description(operator: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    about: dict[str, Any] = {"function": "a.b", **operator, "index": 0, "direction": "forward", "device": "npu:0"}
    name = "value" if "value" in tensors else "feat"
    strides = {name: list(tensors[name].transpose(0, 1).contiguous().transpose(0, 1).stride())}
    return {**about, "caller": "/a/train.py:7", "autocast": False, "reason": "every 3", "strides": strides, "packed": False}


def written(tensors: Tensors, metadata: Any, ending: str) -> bytes:
    if ending == "safetensors":
        return save({name: t.clone().contiguous() for name, t in tensors.items()}, metadata)
    with tempfile.TemporaryFile() as file:
        torch.save({"metadata": metadata, "tensors": tensors}, file)
        file.seek(0)
        return file.read()


def changed_bytes(random: random.Random, data: bytes) -> bytes:
    at, length = random.randrange(len(data)), random.choice((1, 1, 4, 8, 100))
    piece = random.choice((random.randbytes, bytes, lambda n: b"\xff" * n))(length) if random.random() < 0.3 else None
    return random.choice(
        (
            data[:at],
            data[:at] + data[at + length :],
            data[:at] + (piece or random.randbytes(length)) + data[at + length :],
            data[:at] + (piece or random.randbytes(length)) + data[at:],
            data[:at] + struct.pack("<q", random.choice((0, -1, 2**31, 2**40, 2**62))) + data[at + 8 :],
            data + data[at:],
        )
    )


def changed_header(random: random.Random, data: bytes) -> bytes:
    """The shape, dtype or place of a tensor in a safetensors file."""
    (length,) = struct.unpack("<q", data[:8])
    header = json.loads(data[8 : 8 + length])
    name = random.choice(list(header))
    header[name] = changed_json(random, header[name])
    text = json.dumps(header).encode()
    return struct.pack("<q", len(text)) + text + data[8 + length :]


def changed_json(random: random.Random, value: Any) -> Any:
    """A value somewhere in it is another, is gone, or has another name."""
    if isinstance(value, dict) and value and random.random() < 0.9:
        key, way = random.choice(list(value)), random.random()
        rest = {k: v for k, v in value.items() if k != key}
        if way < 0.1:
            return rest
        return {**rest, "other": value[key]} if way < 0.15 else {**value, key: changed_json(random, value[key])}
    if isinstance(value, list) and value and random.random() < 0.7:
        at = random.randrange(len(value))
        return [*value[:at], changed_json(random, value[at]), *value[at + 1 :]]
    return random.choice(ODD)


def changed_tensor(random: random.Random, t: torch.Tensor, foreign: bool) -> Any:
    """Other numbers, another shape or another dtype; in a .pt file anything."""
    axis, large = (random.randrange(t.dim()) if t.dim() else 0 for _ in range(2))
    numbers = [float("nan"), float("inf"), -float("inf"), 0, 1e30, -1e30] if t.is_floating_point() else [0, -1, 2**62, 7]
    ways = [
        lambda: torch.where(torch.rand(t.shape) < random.random(), torch.tensor(random.choice(numbers), dtype=t.dtype), t),
        lambda: t * random.choice((0, -1, 2, 100)),
        lambda: t[random.randrange(len(t)) :] if len(t) else t,
        lambda: t.narrow(axis, 0, random.randint(0, t.shape[axis])),
        lambda: t.repeat_interleave(random.choice((0, 2, 40)), axis),
        lambda: t.transpose(0, axis).contiguous(),
        lambda: t.flatten(),
        lambda: t[None],
        lambda: t.to(random.choice((torch.float16, torch.float64, torch.int8, torch.int32, torch.bool, torch.bfloat16))),
        lambda: torch.empty([0 if i == axis else 2**34 if i == large else n for i, n in enumerate(t.shape)], dtype=t.dtype),
    ]
    strange = [
        lambda: random.choice(ODD[:-1]),
        lambda: t[:1].expand(2**34, *t.shape[1:]) if len(t) else t,
        lambda: t.to_sparse(),
        lambda: t + 0j,
        lambda: t.transpose(0, axis),
        lambda: torch.nn.Parameter(t.double()),
        lambda: t.to("meta"),
        lambda: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    ]
    return random.choice(ways + strange if foreign else ways)()


def changed_tensors(random: random.Random, tensors: Tensors, foreign: bool) -> Any:
    tensors = dict(tensors)
    name, other = (random.choice(list(tensors)) for _ in range(2))
    way = random.random()
    if way < 0.1:
        del tensors[name]
    elif way < 0.2:
        tensors[name], tensors[other] = tensors[other].clone(), tensors[name].clone()
    elif way < 0.25 and foreign:
        return random.choice((*ODD, list(tensors.values()), dict(enumerate(tensors.values()))))
    elif way < 0.4:  # an axis is empty everywhere
        return {key: t[:0].clone() if key not in ("shapes", "starts") else t for key, t in tensors.items()}
    else:
        tensors[name] = changed_tensor(random, tensors[name], foreign)
    return tensors


def broken(random: random.Random, folder: pathlib.Path) -> None:
    """call-000001, with one file of it changed, some twice."""
    operator, inputs, gradients = call(random)
    about, which = description(operator, inputs), random.randrange(3)
    way = random.choice(("bytes", "header", "json", "tensors", "tensors", "metadata"))
    ending = random.choice(("safetensors", "pt")) if way != "header" else "safetensors"
    for place, (part, tensors) in enumerate((("", inputs), ("-gradients", gradients))):
        metadata: Any = {"format": "1", "call": json.dumps(about)}
        mine = place == (which == 2)
        if mine and way == "json":
            text = json.dumps(changed_json(random, about))
            metadata["call"] = text if random.random() < 0.8 else changed_bytes(random, text.encode()).decode("latin-1")
        if mine and way == "metadata":
            strange = changed_json(random, metadata)
            metadata = strange if ending == "pt" else {"format": str(random.choice(ODD[:6])), "call": "{}"}
        if mine and way == "tensors":
            tensors = changed_tensors(random, tensors, ending == "pt")
        data = written(tensors, metadata, ending)
        for _ in range(random.randint(1, 2) if mine and way in ("bytes", "header") else 0):
            data = (changed_header if way == "header" else changed_bytes)(random, data) or b"x"
            way = "bytes"
        (folder / f"call-000001{part}.{ending}").write_bytes(data)
    if random.random() < 0.05:
        (folder / "manifest.json").write_text(json.dumps(changed_json(random, {"ended_early": "", "calls": {}})))


def recording(seed: int, folder: pathlib.Path) -> None:
    chosen = random.Random(seed)
    operator, tensors, _ = call(random.Random(0))
    metadata = {"format": "1", "call": json.dumps(description(operator, tensors))}
    save_file(tensors, folder / "call-000000.safetensors", metadata)
    broken(chosen, folder)


def finding(seed: int, folder: pathlib.Path) -> str:
    """What is wrong about replay's answer to the recording of a seed; empty if nothing is."""
    recording(seed, folder)
    begin = time.monotonic()
    done = CliRunner().invoke(app, ["replay", str(folder), "--csv", str(folder / "rows.csv")], env={"COLUMNS": "200"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        return f"{type(done.exception).__name__}: {done.exception}"
    said = re.findall("not read: (.*)", done.output)
    judged = set(re.findall(r"│ (call-\d+) ", done.output))
    of_manifest = [sentence for sentence in said if sentence.startswith("manifest.json ")]
    if "call-000000" not in judged:
        return "the right call was not judged"
    if "call-000001" not in judged and len(said) != 1 + len(of_manifest):
        return f"not judged, and {len(said)} sentences"
    wrong = [one for one in said if not re.search("must .*; got ", one) or re.search("must be a call that can be", one)]
    if wrong:
        return wrong[0]
    return f"{time.monotonic() - begin:.0f} s" if time.monotonic() - begin > SECONDS else ""


class _Hung(BaseException):
    pass


def _hung(*_: Any) -> None:
    raise _Hung


def _run(seeds: list[int], now: Any) -> None:
    """Seeds in a process of their own, because a finding may be a crash. Its exit status says whether all is well."""
    import resource

    used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    signal.signal(signal.SIGALRM, _hung)
    for seed in seeds:
        now.value = seed
        folder = pathlib.Path(tempfile.mkdtemp(prefix=f"recording-{seed}-"))
        signal.alarm(2 * SECONDS)
        try:
            found = finding(seed, folder)
        except _Hung:
            found = f"more than {2 * SECONDS} s"
        signal.alarm(0)
        if found:
            print(f"FINDING {seed}: {found}; {folder}", flush=True)
            os._exit(1)
        shutil.rmtree(folder)
    os._exit(0)


def main(seconds: float, *seeds: int) -> int:
    context, findings, tried = multiprocessing.get_context("fork"), 0, 0
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        finding(0, pathlib.Path(folder))  # imports what is imported late, once for all processes
    begin, upcoming = time.monotonic(), list(seeds or KEPT)
    first = int(os.environ.get("FUZZ_FIRST") or random.randrange(2**40))
    while upcoming or time.monotonic() < begin + seconds:
        batch = upcoming or list(range(first + tried, first + tried + BATCH))
        upcoming, now = [], context.Value("q", 0)
        process = context.Process(target=_run, args=(batch, now))
        process.start()
        process.join()
        if process.exitcode:
            findings += 1
            upcoming = batch[batch.index(now.value) + 1 :]
            if process.exitcode < 0:
                print(f"FINDING {now.value}: {signal.Signals(-process.exitcode).name}", flush=True)
        tried += len(batch) - len(upcoming)
    print(f"{tried} recordings, {findings} findings")
    return int(findings > 0)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(float(sys.argv[1]), *map(int, sys.argv[2:])))
