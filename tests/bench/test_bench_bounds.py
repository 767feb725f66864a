"""What counts promise: rows, operations and slots."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_acache.bench.bounds import BlockStart, ModelCost, slots

COST = ModelCost(hidden=64, heads=4, kv_heads=2, layers=3, inner=160, vocab=200)


def test_a_row_costs_two_operations_a_weight() -> None:
    weights = 3 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 160)
    assert COST.row() == 2 * weights
    assert COST.forward(0, 10, 0) == 10 * 4 * 64 * 3
    assert COST.forward(0, 0, 5) == 2 * 5 * 64 * 200


def test_three_quarters_shared_at_a_fifth_recomputed_leave_forty_percent_of_the_rows() -> None:
    start = BlockStart(canvas=1000, affix=750, ratio=0.2, logit_rows=32)
    assert start.recompute == 400
    assert start.row_bound == pytest.approx(2.5)


@given(st.integers(1, 500), st.integers(0, 500), st.sampled_from([0.0, 0.05, 0.2, 0.7, 1.0]))
def test_logits_that_are_computed_anyway_keep_operations_below_rows(affix: int, own: int, ratio: float) -> None:
    start = BlockStart(affix + own + 32, affix, ratio, 32)
    assert 1 <= start.flop_bound(COST) <= start.row_bound + 1e-9


def test_ratio_one_promises_nothing() -> None:
    assert BlockStart(100, 60, 1.0, 8).flop_bound(COST) == 1


def test_slots_of_the_papers_four_shot_prompt() -> None:
    without, reused = slots(canvas=1024, affix=601, ratio=0.2, requests=16)
    assert without == 16 * 1024
    assert reused == 16 * (1024 - 601 + 121) + 601
    assert 1 - reused / without == pytest.approx(0.433, abs=0.003)


def test_both_published_layouts_say_the_same_shape() -> None:
    llada = {"d_model": 64, "n_heads": 4, "n_kv_heads": 2, "n_layers": 3, "mlp_hidden_size": 160, "embedding_size": 200}
    dream = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "intermediate_size": 160,
        "vocab_size": 200,
    }
    assert ModelCost.of(llada) == ModelCost.of(dream) == COST
