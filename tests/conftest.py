"""Which implementations run: MX_DRIVING_TEST_BACKENDS, or else all that this machine has. A named one that is missing fails."""

from __future__ import annotations

import os
import platform

import cases
import pytest
import torch

EXPECTED = ["reference", "native-baseline"] + (["native-avx2"] if platform.machine() in ("x86_64", "AMD64") else [])


def wanted_implementations() -> list[str]:
    named = os.environ.get("MX_DRIVING_TEST_BACKENDS")
    if named:
        return named.split(",")
    return list(dict.fromkeys([*EXPECTED, *cases.implementations()]))


@pytest.fixture(params=wanted_implementations())
def implementation(request):
    """Runs the test once per implementation, inside its context."""
    known = cases.implementations()
    if request.param not in known:
        pytest.fail(f"implementation {request.param} is not on this machine; there are {sorted(known)}")
    with known[request.param]():
        yield request.param


@pytest.fixture(autouse=True)
def _one_thread_per_worker():
    """pytest-xdist runs two workers on two cores; threads are tested where they matter."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
