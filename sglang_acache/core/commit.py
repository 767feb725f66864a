"""How many tokens a denoising step commits, for a ragged batch at once (method section 2).

The rows of a step are the masked positions of every request's current block. Which token each row would take and
how confident it is, is decided by ``acache_kernels.choose``; this module decides which rows become final.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class CommitRule:
    """One request's rule for the current step. Exactly one of the three fields is set.

    ``count``: commit that many rows (the fixed-step schedule); ``threshold``: every row with confidence >= it, at
    least one; ``factor``: the largest m with (m + 1)(1 - c_(m)) < factor, at least one (Fast-dLLM).
    """

    count: int | None = None
    threshold: float | None = None
    factor: float | None = None


def step_count(block_length: int, steps: int, step: int) -> int:
    """Tokens that step ``step`` (from 0) of a block commits when the block takes ``steps`` steps.

    The remainder is spread over the first steps. Once ``step`` is past the schedule nothing is left to commit.
    """
    base, remainder = divmod(block_length, steps)
    return base + (step < remainder)


def block_steps(total_steps: int, num_blocks: int, block_length: int, block: int) -> int:
    """Steps of block ``block`` when ``total_steps`` are spread over ``num_blocks``, at most one a token."""
    base, remainder = divmod(total_steps, num_blocks)
    return min(base + (block < remainder), block_length)


def select_commits(confidence: np.ndarray, row_indptr: np.ndarray, rules: list[CommitRule]) -> np.ndarray:
    """Which rows become final in this step.

    Args:
        confidence: float32 ``[M]``, row-major by request; higher is surer.
        row_indptr: int64 ``[B + 1]``; request b owns rows ``row_indptr[b]:row_indptr[b + 1]``, possibly none.
        rules: ``B`` rules.

    Returns:
        bool ``[M]``. Every request with rows commits at least one. Equal confidences: the earlier row first.
    """
    num_rows = len(confidence)
    lengths = np.diff(row_indptr)
    owner = np.repeat(np.arange(len(rules)), lengths)
    order = np.lexsort((-confidence, owner))  # stable: ties keep row order
    rank = np.arange(num_rows) - np.repeat(row_indptr[:-1], lengths)  # 0 = surest row of its request
    ranked = confidence[order].astype(np.float64)

    quota = np.ones(len(rules), dtype=np.int64)
    for index, rule in enumerate(rules):
        if rule.count is not None:
            quota[index] = max(rule.count, 1)
    threshold = np.array([np.inf if rule.threshold is None else rule.threshold for rule in rules])
    factor = np.array([-np.inf if rule.factor is None else rule.factor for rule in rules])

    holds = (rank + 2) * (1.0 - ranked) < factor[owner]
    np.maximum.at(quota, owner[holds], rank[holds] + 1)

    chosen = np.empty(num_rows, dtype=bool)
    # The comparison is made in float32, as the confidence is: 0.9 means float32(0.9).
    sure = ranked.astype(np.float32) >= threshold.astype(np.float32)[owner]
    chosen[order] = (rank < quota[owner]) | sure
    return chosen
