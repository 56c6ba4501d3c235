"""A pytest plugin for transformers' own tests: the same random numbers each time, and the patch. `make test-transformers`."""

import os
import random
import sys

import numpy
import pytest
import torch

import mx_driving


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    if os.environ.get("MX_DRIVING_PATCH"):
        print(mx_driving.patch("transformers"))


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """A test must see the same inputs and weights in both runs."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    common = sys.modules.get("tests.test_modeling_common")
    if common is not None:
        common.global_rng.seed(0)
