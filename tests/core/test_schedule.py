"""What each step forwards: cache policies, Dream's shift, shared slots, the ragged plan and its token budget."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_acache.core.canvas import Canvas
from sglang_acache.core.params import DiffusionParams
from sglang_acache.core.plan import build_plan, denoise_entry, row_sampling, silent_entry, within_budget
from sglang_acache.core.request import SHARED, DiffusionRequest, Sampling
from sglang_acache.core.seeds import row_seeds

BLOCK = 4
GREEDY = Sampling()


def make_request(
    left: int = 5,
    right: int = 3,
    new_tokens: int = 12,
    *,
    shift: bool = False,
    sampling: Sampling = GREEDY,
    **params: Any,
) -> DiffusionRequest:
    canvas = Canvas(
        np.arange(left), np.arange(right), max_new_tokens=new_tokens, block_length=BLOCK, mask_token_id=99
    )
    request = DiffusionRequest(
        canvas, DiffusionParams(block_length=BLOCK, **params), sampling, shift_logits=shift
    )
    request.use_private_slots(1000 + np.arange(len(canvas)))
    return request


def step(request: DiffusionRequest, *offsets: int) -> None:
    """One forward, which commits the masks at ``offsets`` of the current block."""
    request.note_forward(len(request.query_positions()))
    positions = request.canvas.block_start + np.array(offsets)
    request.canvas.commit(positions, positions)


@pytest.mark.parametrize(
    ("cache", "inside"), [("none", range(20)), ("prefix", range(5, 20)), ("dual", range(5, 9))]
)
def test_a_block_start_forwards_all_and_later_steps_what_the_cache_says(cache: str, inside: range) -> None:
    request = make_request(cache=cache)
    assert request.query_positions().tolist() == list(range(20))
    step(request, 2)
    assert request.query_positions().tolist() == list(inside)
    step(request, 0, 1, 3)
    assert request.at_block_start
    assert request.query_positions().tolist() == list(range(20))


def test_the_shift_reads_a_blocks_first_token_before_the_block() -> None:
    request = make_request(shift=True)
    step(request, 2)
    assert request.query_positions().tolist() == [4, 5, 6, 7, 8], "the first position is still masked"
    step(request, 0)
    assert request.query_positions().tolist() == [5, 6, 7, 8], "it no longer is"


@given(
    st.booleans(),
    st.sampled_from(["none", "prefix", "dual"]),
    st.integers(1, 6),
    st.integers(0, 5),
    st.randoms(use_true_random=False),
)
def test_every_masked_position_has_its_row(shift: bool, cache: str, left: int, right: int, random: Any) -> None:
    """Whatever was committed before, logits are wanted for exactly the masks of the block, read where they belong."""
    request = make_request(left, right, shift=shift, cache=cache)
    while not request.canvas.complete:
        entry = denoise_entry(request)
        masked = request.canvas.masked_positions()
        assert entry.masked_positions.tolist() == masked.tolist()
        assert entry.positions[entry.logit_rows].tolist() == (masked - shift).tolist()
        assert entry.tokens.tolist() == request.canvas.tokens[entry.positions].tolist()
        assert entry.write_slots.tolist() == (1000 + entry.positions).tolist()
        assert entry.read_slots.tolist() == list(range(1000, 1000 + len(request.canvas)))
        offsets = (masked - request.canvas.block_start).tolist()
        step(request, *random.sample(offsets, random.randint(1, len(offsets))))


def test_shared_slots_are_read_and_never_written() -> None:
    request = make_request(left=10, new_tokens=4, right=6)
    spans = [(np.arange(2, 6), np.arange(50, 54)), (np.arange(14, 18), np.arange(60, 64))]
    request.use_shared_slots(spans, np.arange(100, 112))
    assert request.recompute_positions.tolist() == [0, 1, 6, 7, 8, 9, 10, 11, 12, 13, 18, 19]
    assert request.read_slot_map[[2, 5, 14, 17, 0, 19]].tolist() == [50, 53, 60, 63, 100, 111]
    request.override_anchors(np.array([3, 15]), np.array([200, 201]))
    shared = [2, 4, 5, 14, 16, 17]
    assert np.flatnonzero(request.write_slot_map == SHARED).tolist() == shared
    entry = denoise_entry(request)
    assert not set(entry.positions.tolist()) & set(shared)
    assert set(entry.write_slots.tolist()) == {*range(100, 112), 200, 201}
    assert entry.read_slots[[2, 3, 15, 16]].tolist() == [50, 200, 201, 62]


def test_non_anchors_can_be_dropped_from_attention() -> None:
    request = make_request(left=6, new_tokens=4, right=0)
    request.use_shared_slots([(np.arange(1, 4), np.arange(50, 53))], np.arange(100, 107))
    request.override_anchors(np.array([2]), np.array([200]), drop_others=True)
    assert denoise_entry(request).read_slots.tolist() == [100, 200, 101, 102, 103, 104, 105, 106]


def test_after_a_fused_probe_the_first_step_forwards_anchors_and_block_once() -> None:
    request = make_request(left=8, new_tokens=8, right=0)
    request.use_shared_slots([(np.arange(1, 5), np.arange(50, 54))], np.arange(100, 112))
    request.override_anchors(np.array([3]), np.array([200]))
    request.reuse_probe(np.array([3]))
    assert request.query_positions().tolist() == [3, 8, 9, 10, 11]
    step(request, 0, 1, 2, 3)
    assert request.query_positions().tolist() == [0, 3, *range(4 + 1, 16)]


# ── the plan ──────────────────────────────────────────────────────────────


def test_entries_are_concatenated_and_rows_shifted() -> None:
    requests = [make_request(left=2, right=0, new_tokens=4), make_request(left=3, right=1, new_tokens=8)]
    step(requests[1], 0, 1)
    span = silent_entry(*(np.arange(3) + base for base in (0, 0, 70, 70)))
    plan = build_plan([denoise_entry(requests[0]), span, denoise_entry(requests[1])])
    assert plan.qo_indptr.tolist() == [0, 6, 9, 13]
    assert plan.kv_indptr.tolist() == [0, 6, 9, 9 + 12]
    assert plan.row_indptr.tolist() == [0, 4, 4, 6]
    assert plan.positions[plan.logit_rows].tolist() == [2, 3, 4, 5, 5, 6]
    for part in (plan.tokens, plan.positions, plan.write_slots):
        assert (len(part), part.dtype) == (13, np.int64)


def test_rows_are_sampled_as_their_request_says() -> None:
    requests = [
        make_request(new_tokens=4, sampling=Sampling(0.5, 3, 0.9, seed=11), remasking="random"),
        make_request(new_tokens=4),
    ]
    step(requests[1], 0)
    entries = [denoise_entry(request) for request in requests]
    rows = row_sampling(requests, entries)
    assert rows.temperature.tolist() == [0.5] * 4 + [0.0] * 3
    assert rows.top_k.tolist() == [3] * 4 + [0] * 3
    assert rows.top_p.tolist() == [np.float32(0.9)] * 4 + [1.0] * 3
    assert rows.rule == ["random"] * 4 + ["low_confidence"] * 3
    expected = [row_seeds(11, entries[0].masked_positions, 0), row_seeds(0, entries[1].masked_positions, 1)]
    assert rows.seed.tolist() == np.concatenate(expected).tolist()


# ── the budget ────────────────────────────────────────────────────────────

requests_and_progress = st.lists(
    st.tuples(st.integers(1, 60), st.booleans(), st.sampled_from(["none", "prefix", "dual"])), min_size=1, max_size=8
)


@given(requests_and_progress, st.integers(1, 120), st.integers(0, 60))
def test_a_step_keeps_to_its_budget_and_starves_nobody(
    drawn: list[tuple[int, bool, str]], budget: int, spent: int
) -> None:
    waiting = []
    for left, inside, cache in drawn:
        request = make_request(left, cache=cache)
        if inside:
            step(request, 0)
        waiting.append(request)
    chosen = within_budget(waiting, budget, spent)
    assert waiting[0] in chosen, "the longest waiting always goes"
    assert len(set(map(id, chosen))) == len(chosen)
    sizes = [len(request.query_positions()) for request in chosen]
    first_start = next((request for request in waiting if request.at_block_start), None)
    privileged = sum(
        size for request, size in zip(chosen, sizes, strict=True) if request in (waiting[0], first_start)
    )
    assert sum(sizes) <= max(budget - spent, 0) + privileged
