"""Kernel tests run in poisoned memory: what torch.empty returns is NaN until something writes it."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("kernels", deadline=None, derandomize=True)
settings.load_profile("kernels")


@pytest.fixture(autouse=True, scope="package")
def poisoned_memory() -> Iterator[None]:
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.set_deterministic_debug_mode(before)
