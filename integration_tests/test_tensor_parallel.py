"""Two tensor-parallel ranks answer as one does."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from integration_tests.server import Server, serve
from integration_tests.test_crowd import answer

TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


def test_two_ranks_answer_as_one(llada: Server, checkpoint: Callable[[str], Path]) -> None:
    """Greedy and sampled requests, at once."""
    indices = range(20)
    one = [answer(llada, index) for index in indices]
    with serve(checkpoint("llada"), "--tp-size", "2", "--max-total-tokens", "8192", env=TWO_RANKS) as server:
        with ThreadPoolExecutor(len(indices)) as pool:
            two = list(pool.map(lambda index: answer(server, index), indices))
        server.assert_healthy()
    assert two == one
