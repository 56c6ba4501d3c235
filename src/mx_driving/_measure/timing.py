"""Time calls so that the times can be compared on a busy machine."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

Call = Callable[[], Any]
SHORT = 1.0  # seconds; shorter calls are run once before they are timed


def interleaved(
    calls: dict[str, Call], seconds: float, within: Callable[[str], AbstractContextManager[Any]] = lambda name: nullcontext()
) -> dict[str, list[float]]:
    """Return the times of each call. Calls alternate in rounds, so that other load of the machine affects all calls alike.

    Run 3 rounds, then further rounds for about `seconds`. After 3 rounds, skip a call while its total time is more than
    twice the smallest total, so that quick calls are timed often. Run a short call once before timing it, for two reasons: the
    caches then hold the call's own data, and its memory was freed recently. The host of a virtual machine may take back memory
    that was freed seconds ago, and returns it twenty times slower. Shuffle each round, because calls are slower for a while
    after a call that frees much memory. `within` makes the context of a call; its entry and exit are not timed.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    totals = dict.fromkeys(calls, 0.0)
    for name, call in calls.items():
        with within(name):
            call()
    order = random.Random(0)
    rounds, least = 0, 0.0
    while rounds < 3 or least < seconds / len(calls) / 2:
        for name in order.sample(list(calls), len(calls)):
            if rounds >= 3 and totals[name] > 2 * least:
                continue
            with within(name):
                entered = time.perf_counter()
                if not times[name] or times[name][-1] < SHORT:
                    calls[name]()
                start = time.perf_counter()
                calls[name]()
                ended = time.perf_counter()
            times[name].append(ended - start)
            totals[name] += ended - entered
        rounds += 1
        least = min(totals.values())
    return times
