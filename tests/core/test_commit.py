"""How many tokens a step commits, against the rules written one request at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_acache.core.commit import CommitRule, block_steps, select_commits, step_count

confidences = st.lists(st.floats(-5, 1, width=32), max_size=12)
rules = st.one_of(
    st.builds(CommitRule, count=st.integers(0, 12)),
    st.builds(CommitRule, threshold=st.floats(0, 1)),
    st.builds(CommitRule, factor=st.floats(0.01, 20)),
)


def plainly(confidence: list[float], rule: CommitRule) -> list[bool]:
    order = sorted(range(len(confidence)), key=lambda row: (-confidence[row], row))
    if rule.count is not None:
        number = max(rule.count, 1)
    elif rule.threshold is not None:
        number = max(1, sum(value >= np.float32(rule.threshold) for value in np.array(confidence, dtype=np.float32)))
    else:
        assert rule.factor is not None
        holds = [m for m in range(1, len(order) + 1) if (m + 1) * (1 - confidence[order[m - 1]]) < rule.factor]
        number = max(holds, default=1)
    return [row in order[:number] for row in range(len(confidence))]


@given(st.lists(st.tuples(confidences, rules), max_size=6))
def test_a_ragged_batch_commits_what_each_request_would_alone(batch: list[tuple[list[float], CommitRule]]) -> None:
    rows = [row for confidence, _ in batch for row in confidence]
    indptr = np.cumsum([0, *(len(confidence) for confidence, _ in batch)])
    chosen = select_commits(np.array(rows, dtype=np.float32), indptr, [rule for _, rule in batch])
    assert chosen.tolist() == [flag for confidence, rule in batch for flag in plainly(confidence, rule)]
    for (confidence, _), start in zip(batch, indptr, strict=False):
        assert chosen[start : start + len(confidence)].any() or not confidence


@given(st.integers(1, 64), st.data())
def test_fixed_steps_commit_the_block_with_the_remainder_first(block: int, data: st.DataObject) -> None:
    steps = data.draw(st.integers(1, block))
    counts = [step_count(block, steps, step) for step in range(steps)]
    assert sum(counts) == block
    assert counts == sorted(counts, reverse=True)
    assert max(counts) - min(counts) <= 1


@given(st.integers(1, 16), st.integers(1, 32), st.data())
def test_total_steps_are_dealt_to_the_blocks(blocks: int, block_length: int, data: st.DataObject) -> None:
    total = data.draw(st.integers(blocks, blocks * block_length * 2))
    dealt = [block_steps(total, blocks, block_length, block) for block in range(blocks)]
    assert sum(dealt) == min(total, blocks * block_length)
    assert all(1 <= steps <= block_length for steps in dealt)


def test_the_threshold_is_a_float32() -> None:
    confidence = np.array([0.9, 0.5], dtype=np.float32)
    chosen = select_commits(confidence, np.array([0, 2]), [CommitRule(threshold=0.9)])
    assert chosen.tolist() == [True, False]


@pytest.mark.parametrize("rule", [CommitRule(threshold=1.0), CommitRule(factor=1e-9), CommitRule(count=0)])
def test_at_least_one_and_ties_to_the_earlier_row(rule: CommitRule) -> None:
    chosen = select_commits(np.full(3, 0.25, dtype=np.float32), np.array([0, 3]), [rule])
    assert chosen.tolist() == [True, False, False]
