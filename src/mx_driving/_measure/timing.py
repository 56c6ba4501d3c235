"""Times that can be compared on a machine that does other things too."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

Call = Callable[[], Any]
SHORT = 1.0  # seconds


def interleaved(
    calls: dict[str, Call], seconds: float, within: Callable[[str], AbstractContextManager[Any]] = lambda name: nullcontext()
) -> dict[str, list[float]]:
    """Return the times of each call, in turn, round after round: at least 3 rounds, and about `seconds` if those are done
    before. Whatever else the machine does falls on all calls alike. After 3 rounds a call sits out while it has taken more than
    twice the time of another, so that quick calls are timed as often as slow ones let them. A short call is timed right after a
    run of its own, for two reasons. It then finds the caches as it leaves them itself, not as its neighbour in the round does.
    And its fresh memory was freed just before: memory that was freed seconds ago may be with the host of a virtual machine,
    which gives it back twenty times slower. Each round has an order of its own, because a call after one that frees much memory
    is slower for longer than that run. `within` makes the context that a call runs in; its beginning and end are not timed."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    taken = dict.fromkeys(calls, 0.0)
    for name, call in calls.items():
        with within(name):
            call()
    order = random.Random(0)
    rounds, least = 0, 0.0
    while rounds < 3 or least < seconds / len(calls) / 2:
        for name in order.sample(list(calls), len(calls)):
            if rounds >= 3 and taken[name] > 2 * least:
                continue
            with within(name):
                entered = time.perf_counter()
                if not times[name] or times[name][-1] < SHORT:
                    calls[name]()
                start = time.perf_counter()
                calls[name]()
                ended = time.perf_counter()
            times[name].append(ended - start)
            taken[name] += ended - entered
        rounds += 1
        least = min(taken.values())
    return times
