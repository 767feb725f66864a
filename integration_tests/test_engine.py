"""``sglang.Engine`` with the bundled model, in a program of its own: batch, stream, refusal, launch flags, answers."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest

from integration_tests.engine_program import REQUESTS
from integration_tests.server import server_environment

LIMIT_S = 900.0


@pytest.fixture(scope="module")
def outcome() -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "integration_tests.engine_program"],
        env=server_environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-5000:]
    return dict(json.loads(run.stdout.splitlines()[-1]))


def test_a_batch_gives_what_single_calls_give(outcome: dict[str, Any]) -> None:
    assert outcome["batch"] == outcome["answers"][:REQUESTS]


def test_a_stream_grows_to_the_answer(outcome: dict[str, Any]) -> None:
    stream = outcome["stream"]
    assert all(later.startswith(earlier) for earlier, later in pairwise(stream))
    assert stream[-1] == outcome["batch"][0]


def test_what_cannot_be_honoured_raises(outcome: dict[str, Any]) -> None:
    assert "regex" in outcome["refusal"]


def test_launch_flags_are_arguments(outcome: dict[str, Any]) -> None:
    assert outcome["default"] == 24


def test_the_bundled_model_answers_right(outcome: dict[str, Any]) -> None:
    pairs = list(zip(outcome["answers"], outcome["right"], strict=True))
    right = sum(answer.split()[: len(expected.split())] == expected.split() for answer, expected in pairs)
    assert right >= 0.9 * len(pairs), pairs
