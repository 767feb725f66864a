"""A server on ``--attention-backend acache_triton``, in Triton's interpreter, answers as one on ``acache_torch``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from integration_tests.oracle.reference_acache import Affix
from integration_tests.prompts import prompt_ids
from integration_tests.reuse_cases import Case
from integration_tests.server import Server

SHARED = prompt_ids(20, seed=900)
CASES = (
    Case(prompt_ids(9, seed=901), new_tokens=16),
    Case(prompt_ids(5, seed=902), right=prompt_ids(4, seed=903), new_tokens=8, params={"cache": "prefix"}),
    Case([*prompt_ids(3, seed=904), *SHARED], spans=(Affix(3, 23),), new_tokens=8),
    Case([*prompt_ids(7, seed=905), *SHARED], spans=(Affix(7, 27),), new_tokens=8, acache={"anchor_ratio": 0.0}),
)
"""Steps of a block and of whole canvases, an encoded span, a probe, anchors, a re-based span, a hole."""


@pytest.fixture
def dream_triton(start: Callable[[str], Server]) -> Callable[[str], Server]:
    """Starts servers; the name puts its test among those of the server that it ends with."""
    return start


def test_answers_are_those_of_the_torch_kernels(dream_triton: Callable[[str], Server]) -> None:
    expected = answers(dream_triton("dream_acache"))
    shared = len(SHARED) - 1  # a shift reads the first answer token at the last of the prompt, which is not shared
    assert [affix_tokens for _, affix_tokens, _ in expected] == [0, 0, shared, shared]
    server = dream_triton("dream_triton")
    assert server.get("/server_info").json()["attention_backend"] == "acache_triton"
    assert answers(server) == expected
    server.assert_healthy()


def answers(server: Server) -> list[Any]:
    """Tokens, and what was reused, of every case in turn."""
    found = []
    for case in CASES:
        response = server.post("/generate", case.body())
        assert response.status_code == 200, f"{response.text}\n{server.log_tail()}"
        answer = response.json()
        account = answer["meta_info"]["acache"][0]
        found.append((answer["output_ids"], account["affix_tokens"], account["anchor_tokens"]))
    return found
