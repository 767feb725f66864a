"""A dataset of the same shape for ``llada-tiny``: groups of requests over shared facts, as rows or as a JSONL file."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from sglang_acache.tiny import task as tiny

REQUESTS_A_GROUP = 8


Row = dict[str, str]


def rows(count: int, seed: int = 0, task: str = "hop", requests_a_group: int = REQUESTS_A_GROUP) -> list[Row]:
    """``count`` documents on facts that no training run has seen, ``requests_a_group`` on each list of facts."""
    rng = random.Random(f"evals-{seed}")
    found: list[Row] = []
    while len(found) < count:
        facts = tiny.draw_facts(rng, tiny.N_FACTS, tiny.N_NAMES, "test")
        for _ in range(min(requests_a_group, count - len(found))):
            puzzle = tiny.draw_puzzle(rng, facts, tiny.N_NAMES, task)
            found.append(
                {
                    "facts": facts.text,
                    "updates": puzzle.updates_text,
                    "question": puzzle.question_text,
                    "answer": puzzle.answer,
                }
            )
    return found


def write(path: Path, count: int, seed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(count, seed)), encoding="utf-8")
    return path


def load(data_file: str | None = None, count: int = 256, seed: int = 0, **_: Any) -> dict[str, Any]:
    """lm-eval's ``custom_dataset``: the rows of ``data_file`` (JSONL), else ``count`` drawn ones.

    All arguments come from ``metadata``: ``--metadata '{"data_file": "tiny.jsonl"}'``.
    """
    from datasets import Dataset

    if data_file is None:
        return {"test": Dataset.from_list(rows(count, seed))}
    lines = Path(data_file).read_text(encoding="utf-8").splitlines()
    return {"test": Dataset.from_list([json.loads(line) for line in lines if line.strip()])}
