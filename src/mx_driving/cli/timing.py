"""Times that can be compared on a machine that does other things too."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

Call = Callable[[], Any]


def interleaved(calls: dict[str, Call], seconds: float) -> dict[str, list[float]]:
    """Times of each call, in turn, round after round: at least 3 rounds and about `seconds`. Whatever else the machine does
    falls on all of them alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    began = time.perf_counter()
    while len(next(iter(times.values()))) < 3 or time.perf_counter() - began < seconds:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return times
