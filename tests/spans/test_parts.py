"""Hashes, the index, break-even, stable interiors, token checks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_acache.core.spans import Costs, break_even_length, choose_spans, stable_interior
from sglang_acache.core.spans.breakeven import SpanCost, span_value
from sglang_acache.core.spans.hashing import window_for, window_hashes
from sglang_acache.core.spans.index import SpanIndex
from sglang_acache.core.spans.pool import ListSlotPool
from sglang_acache.core.spans.types import as_tokens, common_prefix

TOKENS = st.lists(st.integers(0, 3), max_size=60).map(lambda t: np.array(t, np.int32))


class TestHashing:
    @given(TOKENS, st.sampled_from([1, 2, 4, 8, 16]))
    def test_equal_windows_have_equal_hashes_and_others_do_not(self, tokens: np.ndarray, width: int) -> None:
        hashes = window_hashes(tokens, width)
        windows = [tuple(tokens[i : i + width].tolist()) for i in range(len(tokens) - width + 1)]
        assert len(hashes) == len(windows)
        assert len(set(hashes.tolist())) == len(set(windows))

    def test_window(self) -> None:
        assert [window_for(n) for n in (1, 2, 3, 15, 16, 74, 1000)] == [1, 2, 2, 8, 16, 16, 16]
        with pytest.raises(ValueError, match="at least 1"):
            window_for(0)
        with pytest.raises(ValueError, match="power of two"):
            window_hashes(np.zeros(4, np.int32), 3)

    @given(TOKENS, TOKENS)
    def test_common_prefix(self, a: np.ndarray, b: np.ndarray) -> None:
        n = common_prefix(a, b)
        assert a[:n].tolist() == b[:n].tolist()
        assert n == min(len(a), len(b)) or a[n] != b[n]

    def test_common_prefix_of_long_texts(self) -> None:
        a = np.arange(5000, dtype=np.int32)
        for at in (31, 32, 287, 288, 4999):
            b = a.copy()
            b[at] = 0
            assert common_prefix(a, b) == at
        assert common_prefix(a, a) == 5000


class TestIndex:
    def test_many_spans_come_and_go(self) -> None:
        index = SpanIndex(4)
        spans = [np.arange(i, i + 6, dtype=np.int32) for i in range(0, 6000, 6)]
        for span in [*spans, *spans[:10]]:
            index.add(span)
        prompt = np.concatenate([spans[3], [9999], spans[500]]).astype(np.int32)
        assert index.candidates(prompt) == [0, 7]
        for span in [*spans, *spans[:9]]:
            index.discard(span)
        assert len(index) == 1
        assert index.candidates(prompt) == []
        assert index.candidates(spans[9]) == [0]

    def test_shorter_than_the_window(self) -> None:
        index = SpanIndex(4)
        index.add(np.array([1, 2, 3], np.int32))
        index.discard(np.array([1, 2, 3], np.int32))
        assert index.candidates(np.array([1, 2, 3], np.int32)) == []


class TestBreakEven:
    def test_formula(self) -> None:
        free = Costs(span=0.0)
        # 4 starts x (100 - 20) saved, probe of 200 rows: pays; 1 start x 80: does not
        assert choose_spans(300, [SpanCost(100)], 4, 0.2, free) == [True]
        assert choose_spans(300, [SpanCost(100)], 1, 0.2, free) == [False]
        assert span_value(SpanCost(100, encode=100, uses=2), 4, 0.2, free) == 320 + 100 - 50
        assert span_value(SpanCost(100, rebase=100), 4, 0.2, free) == 320 + 100 - 2
        assert span_value(SpanCost(100), 4, 0.2, free, "kv_deviation") == 320
        assert span_value(SpanCost(100), 4, 0.2, free, "none") == 320

    def test_spans_pay_for_the_probe_together(self) -> None:
        assert choose_spans(300, [SpanCost(60)], 4, 0.2) == [False]
        assert choose_spans(300, [SpanCost(60), SpanCost(60)], 4, 0.2) == [True, True]
        assert choose_spans(300, [SpanCost(60), SpanCost(60), SpanCost(1)], 4, 0.2) == [True, True, False]

    def test_a_probe_is_paid_once(self) -> None:
        assert choose_spans(300, [SpanCost(10)], 4, 0.2) == [False]
        assert choose_spans(300, [SpanCost(10), SpanCost(1)], 4, 0.2, probed=True) == [True, False]

    @pytest.mark.parametrize("starts", [1, 3, 4, 8])
    @pytest.mark.parametrize("ratio", [0.0, 0.2, 1.0])
    @pytest.mark.parametrize("needs", ["none", "attention", "kv_deviation"])
    def test_length_is_where_it_turns(self, starts: int, ratio: float, needs: str) -> None:
        at = break_even_length(300, starts, ratio, needs=needs)  # type: ignore[arg-type]
        pays = [choose_spans(300, [SpanCost(n)], starts, ratio, needs=needs)[0] for n in range(1, 301)]  # type: ignore[arg-type]
        assert pays == [at is not None and n >= at for n in range(1, 301)]

    def test_ratio_one_never_pays(self) -> None:
        assert break_even_length(300, 8, 1.0) is None
        assert break_even_length(300, 8, 1.0, needs="none") is None

    def test_the_tiny_models_affix_pays(self) -> None:
        assert choose_spans(124, [SpanCost(74, encode=74, uses=2)], 3, 0.2) == [True]


class TestInterior:
    @staticmethod
    def encode(text: str) -> list[int]:
        """Merges every pair of equal neighbours into one token: edges depend on the context."""
        out, i = [], 0
        while i < len(text):
            pair = i + 1 < len(text) and text[i] == text[i + 1]
            out.append(ord(text[i]) + 1000 * pair)
            i += 1 + pair
        return out

    def test_drops_edges_that_merge(self) -> None:
        text = "aXbcdeY."
        assert stable_interior(self.encode, text).tolist() == [ord(c) for c in "XbcdeY"]

    def test_stable_text_is_kept_whole(self) -> None:
        assert stable_interior(self.encode, "XbcdeY").tolist() == [ord(c) for c in "XbcdeY"]

    def test_nothing_stable(self) -> None:
        assert stable_interior(self.encode, "a", [("a", "")]).tolist() == []
        assert stable_interior(self.encode, "").tolist() == []


class TestInput:
    @pytest.mark.parametrize("bad", [[0.5], [[1, 2]], ["a"], [2**31], [-1]])
    def test_token_ids(self, bad: list[object]) -> None:
        with pytest.raises(ValueError, match="token ids"):
            as_tokens(bad)  # type: ignore[arg-type]

    def test_pool_finds_double_frees(self) -> None:
        pool = ListSlotPool(4)
        slots = pool.alloc(3)
        assert slots is not None
        assert pool.alloc(2) is None
        pool.free(slots)
        with pytest.raises(ValueError, match="twice"):
            pool.free(slots[:1])
        with pytest.raises(ValueError, match="-1"):
            pool.alloc(-1)
