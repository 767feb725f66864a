"""Seeds of rows: a function of the request alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sglang_acache.core.seeds import row_seeds, seed_from_text

seeds = st.integers(-(2**63), 2**63 - 1)


@given(seeds, st.integers(0, 5000), st.lists(st.integers(0, 4000), min_size=1, unique=True))
def test_a_rows_seed_does_not_depend_on_the_other_rows(seed: int, step: int, positions: list[int]) -> None:
    together = row_seeds(seed, np.array(positions), step)
    alone = [row_seeds(seed, np.array([position]), step)[0] for position in positions]
    assert together.tolist() == alone
    assert together.dtype == np.int64


@given(seeds)
def test_seeds_positions_and_steps_all_matter(seed: int) -> None:
    positions = np.arange(64)
    drawn = [row_seeds(one, positions, step) for one in (seed, (seed + 1) % 2**63) for step in range(16)]
    assert len(np.unique(np.concatenate(drawn))) == 2 * 16 * 64


@given(st.text())
def test_a_texts_seed_is_a_stable_non_negative_int64(text: str) -> None:
    assert 0 <= seed_from_text(text) < 2**63
    assert seed_from_text(text) == seed_from_text(text)


def test_a_texts_seed_is_the_same_in_every_process() -> None:
    assert seed_from_text("request") == 6594123780672833862
