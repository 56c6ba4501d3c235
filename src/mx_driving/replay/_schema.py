"""The form of a recorded file: what it says about its call, its tensors, and how much there is to compute.

A file may have been edited, cut or written by somebody else. All of it is looked at here, once and before anything is computed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from mx_driving_portable.record import FORMAT

from .._checks.inputs import host_memory
from .._cli_support.problems import Problem, ruled
from .._operators import OPERATORS, SamplingInputs

NUMBERS = 2**30  # 8 GB in float64
MAPS = 2**10  # the reference takes one after another
LONGEST, SENTENCE = 200, 1000  # characters of a fact, and of a sentence with it


class _Rule(NamedTuple):
    words: str
    holds: Callable[[Any], bool]


def _whole(x: Any) -> bool:
    return type(x) is int and 0 <= x < 2**63


def _sizes(x: Any) -> bool:
    return isinstance(x, dict) and all(all(map(_whole, s)) if isinstance(s, list) else _whole(s) for s in x.values())


def _strides(x: Any) -> bool:
    return isinstance(x, dict) and all(isinstance(s, list) and all(map(_whole, s)) for s in x.values())


_TEXT = _Rule("be text", lambda x: isinstance(x, str))
_FLAG = _Rule("be true or false", lambda x: isinstance(x, bool))
_BARE = [name for name, row in OPERATORS.items() if not row.bare]
ABOUT = {
    **dict.fromkeys(("function", "device", "caller", "reason", "direction", "of", "form"), _TEXT),
    **dict.fromkeys(("autocast", "packed", "cleared"), _FLAG),
    "shared": _Rule("be a list of names", lambda x: isinstance(x, list) and all(isinstance(name, str) for name in x)),
    "operator": _Rule(f"be one of {', '.join(_BARE)}", lambda x: isinstance(x, str) and x in _BARE),
    "index": _Rule("be a whole number", _whole),
    "sizes": _Rule("be whole numbers, or lists of them, by name", _sizes),
    "strides": _Rule("be lists of whole numbers, by input", _strides),
}


def shown(fact: Any, most: int = LONGEST) -> str:
    """Text that any terminal and any file takes."""
    text = "".join(c if c.isprintable() else "?" for c in str(fact)[: most + 1])
    return text if len(text) <= most else text[:most] + "..."


def metadata(file: str, found: Any) -> str:
    """What a file says about its call, as it is written."""
    if not isinstance(found, dict):
        raise Problem(f"the metadata of {file} must be a table; got {type(found).__name__}")
    if found.get("format") != str(FORMAT):
        theirs = shown(found.get("format", "none"))
        raise Problem(f"{file} must have format {FORMAT}, the one that this version reads; got {theirs}")
    return found["call"]


def about(name: str, found: Any) -> dict[str, Any]:
    """What a file says about its call. What we do not read may be anything."""
    if not isinstance(found, dict):
        raise Problem(f"what {name} says about its call must be a table; got {type(found).__name__}")
    for key, rule in ABOUT.items():
        if key in found and not rule.holds(found[key]):
            raise Problem(f"the {key} of {name} must {rule.words}; got {shown(found[key])}")
    if "operator" not in found:
        raise Problem(f"{name} must name its operator; got {shown(', '.join(map(str, found)) or 'nothing')}")
    return {key: shown(fact) if isinstance(fact, str) else fact for key, fact in found.items() if key in ABOUT}


def tensors(file: str, found: Any) -> dict[str, Tensor]:
    """Tensors as the recorder writes them. One that says to be larger than the file is not contiguous."""
    if not isinstance(found, dict):
        raise Problem(f"the tensors of {file} must be a table; got {type(found).__name__}")
    for key, t in found.items():
        try:
            host_memory(f"{shown(key)} of {file}", t)
        except (TypeError, ValueError) as error:
            raise Problem(str(error)) from None
        if not t.is_contiguous():
            raise Problem(f"{shown(key)} of {file} must be contiguous; got strides {shown(t.stride())}")
    return {str(key): t.detach() for key, t in found.items()}


def hold_size(name: str, grouped: bool, inputs: SamplingInputs) -> None:
    """Refuse what is too large to be computed. An axis without entries counts as one: others may be of any size beside it."""
    (bs, *_), locations = inputs.value.shape, inputs.locations.shape
    queries, points, channels = locations[1], locations[2 if grouped else 4], inputs.value.shape[2:]
    for what, most, sizes in (
        ("maps", MAPS, inputs.starts.shape),
        ("numbers in its output", NUMBERS, (bs, queries, *channels)),
        ("numbers for a query", NUMBERS // 16, (bs, points, *channels)),
    ):
        number = math.prod(max(1, size) for size in sizes)
        if number > most:
            raise Problem(f"{name} must have at most {most} {what}, to be computed here; got {number}")


def histories(path: Path) -> Iterator[str | Problem]:
    """Why a recording ended before its program did, of each that did, from its manifest. Older ones called it "ended"."""
    for file in sorted(path.rglob("manifest.json")) if path.is_dir() else []:
        try:
            with ruled(f"{file.relative_to(path)} must be a manifest that record.py wrote"):
                manifest = json.loads(file.read_bytes())
                if not isinstance(manifest, dict):
                    raise TypeError(type(manifest).__name__)
                if early := shown(manifest.get("ended_early", manifest.get("ended", ""))):
                    yield f"the recording ended early: {early}"
                elif not manifest.get("finished", True):
                    yield "the recording has no end: its program still runs, was killed, or could write no more"
        except Problem as problem:
            yield Problem(shown(problem, SENTENCE))
