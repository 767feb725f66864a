"""Anchor selection."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_acache.core.selector import SELECTORS, AnchorPolicy, Selector, anchor_count, exact_ratio

SCORES = np.array([0.1, 0.5, 0.2, 0.5, 0.0, 0.3])


class TestCount:
    @pytest.mark.parametrize(
        ("ratio", "length", "count"),
        [(0.07, 100, 7), (0.2, 74, 15), (0.0, 9, 0), (1.0, 9, 9), (0.1, 1, 1), (0.29, 100, 29), (0.5, 0, 0)],
    )
    def test_exact(self, ratio: float, length: int, count: int) -> None:
        assert anchor_count(length, ratio) == count

    @given(st.integers(0, 1000), st.integers(0, 3000))
    def test_thousandths(self, thousandths: int, length: int) -> None:
        wanted = -(-thousandths * length // 1000)
        for ratio in (thousandths / 1000, str(Decimal(thousandths) / 1000), Fraction(thousandths, 1000)):
            assert anchor_count(length, ratio) == min(wanted, length)

    def test_float32(self) -> None:
        assert anchor_count(100, np.float32(0.07)) == 7

    @pytest.mark.parametrize("bad", [-0.1, 1.1, float("nan"), float("inf"), "x", True, None, [0.1]])
    def test_refused(self, bad: object) -> None:
        with pytest.raises(ValueError, match="anchor_ratio: must be"):
            exact_ratio(bad)  # type: ignore[arg-type]


class TestSelectors:
    @pytest.mark.parametrize(
        ("name", "chosen"),
        [
            ("attention", [1, 3, 5]),
            ("attention_affix", [1, 3, 5]),
            ("kv_deviation", [1, 3, 5]),
            ("bottom", [0, 2, 4]),
            ("first", [0, 1, 2]),
        ],
    )
    def test_choice(self, name: str, chosen: list[int]) -> None:
        policy = AnchorPolicy(name, 0.5)
        assert policy.select(6, None if policy.needs == "none" else SCORES).tolist() == chosen

    def test_needs(self) -> None:
        assert {name: SELECTORS[name].needs for name in SELECTORS} == {
            "attention": "attention",
            "attention_affix": "attention_affix",
            "bottom": "attention",
            "kv_deviation": "kv_deviation",
            "random": "none",
            "first": "none",
        }
        assert AnchorPolicy("attention", 0).needs == AnchorPolicy("attention", 1).needs == "none"
        assert AnchorPolicy("attention", 1, coverage=0.5).needs == "attention"

    def test_ties_go_to_the_lower_index(self) -> None:
        assert AnchorPolicy(ratio=0.2).select(10, np.ones(10)).tolist() == [0, 1]
        assert AnchorPolicy("bottom", 0.2).select(10, np.ones(10)).tolist() == [0, 1]

    def test_random_depends_on_seed_and_place_only(self) -> None:
        def pick(seed: int, start: int) -> list[int]:
            return AnchorPolicy("random", 0.2, seed=seed).select(100, start=start).tolist()

        assert pick(7, 0) == pick(7, 0)
        assert len({tuple(pick(seed, start)) for seed in (7, 8) for start in (0, 1)}) == 4
        assert len(pick(7, 0)) == len(set(pick(7, 0))) == 20

    @pytest.mark.parametrize("name", list(SELECTORS))
    @pytest.mark.parametrize("ratio", [0.0, 0.13, 1.0])
    def test_sorted_distinct_and_of_the_right_number(self, name: str, ratio: float) -> None:
        scores = np.random.default_rng(1).random(50)
        chosen = AnchorPolicy(name, ratio).select(50, scores)
        assert chosen.dtype == np.int64
        assert len(chosen) == anchor_count(50, ratio)
        assert (np.diff(chosen) > 0).all()

    def test_nan_ranks_last(self) -> None:
        assert AnchorPolicy(ratio=0.5).select(4, [np.nan, 1.0, np.nan, 2.0]).tolist() == [1, 3]

    def test_empty_span(self) -> None:
        assert AnchorPolicy().select(0, []).tolist() == []


class TestCoverage:
    def test_smallest_number_that_covers(self) -> None:
        scores = [4.0, 1.0, 3.0, 2.0]
        for part, chosen in [(0.0, []), (0.4, [0]), (0.41, [0, 2]), (0.9, [0, 2, 3]), (1.0, [0, 1, 2, 3])]:
            assert AnchorPolicy(ratio=1.0, coverage=part).select(4, scores).tolist() == chosen

    def test_capped_by_the_ratio(self) -> None:
        assert AnchorPolicy(ratio=0.25, coverage=1.0).select(4, [4.0, 1.0, 3.0, 2.0]).tolist() == [0]

    def test_nothing_to_cover(self) -> None:
        assert AnchorPolicy(ratio=1.0, coverage=0.9).select(3, np.zeros(3)).tolist() == []
        assert AnchorPolicy(ratio=1.0, coverage=1.0).select(3, [1.0, np.nan, 0.0]).tolist() == [0]


class TestErrors:
    def test_unknown_selector_lists_the_valid_names(self) -> None:
        with pytest.raises(ValueError, match=r"selector must be one of attention, .*random.*; got 'best'"):
            AnchorPolicy("best")

    def test_twice(self) -> None:
        selector = SELECTORS["first"]
        assert isinstance(selector, Selector)
        with pytest.raises(ValueError, match="registered twice"):
            SELECTORS.register("first", selector)

    def test_missing_or_misshapen_scores(self) -> None:
        with pytest.raises(ValueError, match="needs attention scores"):
            AnchorPolicy().select(5)
        with pytest.raises(ValueError, match=r"shape \(5,\)"):
            AnchorPolicy().select(5, np.ones(4))

    def test_seed_and_coverage(self) -> None:
        for seed in (-1, 0.5, True):
            with pytest.raises(ValueError, match="seed: must be an integer"):
                AnchorPolicy(seed=seed)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="coverage: has no meaning with selector 'first'"):
            AnchorPolicy("first", coverage=0.5)
        with pytest.raises(ValueError, match="coverage: must be between"):
            AnchorPolicy(coverage=2)
