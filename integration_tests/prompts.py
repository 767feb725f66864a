"""Prompts for the random checkpoints, whose tokens are words: ``w7`` is token 7."""

from __future__ import annotations

import random

from integration_tests.oracle.checkpoints import CheckpointSpec

WORDS = CheckpointSpec().words


def prompt_ids(length: int, seed: int = 0) -> list[int]:
    """Ordinary tokens, drawn from the seed."""
    return random.Random(f"prompt-{seed}").choices(range(WORDS), k=length)


def text_of(ids: list[int]) -> str:
    return " ".join(f"w{token}" for token in ids)


def prompt(length: int, seed: int = 0) -> str:
    return text_of(prompt_ids(length, seed))
