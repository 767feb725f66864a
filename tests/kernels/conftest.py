"""Kernel tests run in poisoned memory: what torch.empty returns is NaN until something writes it."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("kernels", deadline=None, derandomize=True)
settings.load_profile("kernels")


@pytest.fixture(autouse=True, scope="package")
def poisoned_memory() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before)
