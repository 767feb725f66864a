"""The canvas: positions, blocks, what may be streamed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_acache.core.canvas import Canvas, canvas_length, num_blocks

MASK = 7


def make_canvas(left: int, right: int, new_tokens: int, block: int) -> Canvas:
    ids = np.arange(left + right) % 10  # the mask's id is among them
    return Canvas(ids[:left], ids[left:], max_new_tokens=new_tokens, block_length=block, mask_token_id=MASK)


shapes = st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(1, 40), st.integers(1, 12))


@given(shapes)
def test_a_new_canvas_is_context_hole_context(shape: tuple[int, int, int, int]) -> None:
    left, right, new_tokens, block = shape
    canvas = make_canvas(*shape)
    assert len(canvas) == canvas_length(left, right, new_tokens, block)
    hole = canvas.gen_stop - canvas.gen_start
    assert hole % block == 0
    assert 0 <= hole - new_tokens < block
    assert canvas.masked.sum() == hole
    assert canvas.masked[canvas.gen_start : canvas.gen_stop].all()
    assert (canvas.tokens[canvas.masked] == MASK).all()
    assert canvas.committed_prefix() == 0


@given(shapes, st.randoms(use_true_random=False))
def test_any_schedule_of_commits_fills_the_canvas_in_blocks(shape: tuple[int, int, int, int], random: object) -> None:
    """Commits in any order inside a block: never outside the current block, never twice, never over the context."""
    canvas = make_canvas(*shape)
    context = ~canvas.masked
    before = canvas.tokens[context].copy()
    sent = 0
    while not canvas.complete:
        open_positions = canvas.masked_positions()
        assert len(open_positions) > 0
        assert canvas.block_start <= open_positions.min() <= open_positions.max() < canvas.block_stop
        step, block = canvas.step, canvas.block
        chosen = random.sample(open_positions.tolist(), random.randint(1, len(open_positions)))  # type: ignore[attr-defined]
        canvas.commit(np.array(chosen), np.full(len(chosen), MASK))  # even the mask's id counts as committed
        assert (canvas.block, canvas.step) in ((block, step + 1), (block + 1, 0))
        prefix = canvas.committed_prefix()
        assert prefix >= sent
        assert not canvas.masked[canvas.gen_start : canvas.gen_start + prefix].any()
        assert prefix == canvas.gen_stop - canvas.gen_start or canvas.masked[canvas.gen_start + prefix]
        sent = prefix
    assert not canvas.masked.any()
    assert (canvas.tokens[context] == before).all()


@pytest.mark.parametrize(("tokens", "block", "blocks"), [(0, 32, 0), (1, 32, 1), (32, 32, 1), (33, 32, 2), (5, 1, 5)])
def test_the_last_block_is_filled_up(tokens: int, block: int, blocks: int) -> None:
    assert num_blocks(tokens, block) == blocks
