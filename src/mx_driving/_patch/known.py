"""The table of code that `patch` knows: attention modules, cores, autograd functions and pools of other projects.

known.jsonl has an entry per line. `make known` tries the code of packages, and prints new entries. A trial compared the outputs
and gradients of each entry with those of its form, in float64. In the trial of an autograd function, compat's functions take
the place of compiled functions.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from .._package_files import read_text

Values = Mapping[str, Sequence[Any]]  # name of an attribute or parameter -> its values that a form serves


class Known(NamedTuple):
    """The code of another project, and its form.

    Attributes:
        form: the name of the form.
        seen: project, version or commit, and class or function.
        difference: the largest difference of outputs and gradients in float64.
        flags: attributes of the layer that the code reads, except sizes and linear layers -> the values that the form serves.
        options: parameters without a role that the code reads -> the values that the form serves.
        widths: sizes of the last axis of reference points that the code takes.
        masked: whether the code takes a mask.
        casts: the dtype to which an autograd function's code converts all inputs, or "value" for the dtype of value.
    """

    form: str
    seen: str
    difference: float = 0.0
    flags: Values = MappingProxyType({})
    options: Values = MappingProxyType({})
    widths: Sequence[int] = (2, 4)
    masked: bool = True
    casts: str = ""


_DEFAULTS = Known("", "")._asdict()


def format_entry(key: str, entry: Known) -> str:
    """Return the line of known.jsonl for an entry: the key, and the fields that differ from their defaults."""
    facts = {name: value for name, value in entry._asdict().items() if value != _DEFAULTS[name]}
    return json.dumps({"key": key, **facts})


@functools.cache
def read_table() -> dict[str, Known]:
    """Return key (_code.py) -> entry, for all code in the table. `import mx_driving` does not read the table."""
    lines = read_text("_patch/known.jsonl").splitlines()
    return {entry.pop("key"): Known(**entry) for entry in map(json.loads, lines)}
