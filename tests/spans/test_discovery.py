"""Recurring spans, found anywhere, on token ids."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from span_world import World

from sglang_acache.core.spans import Discovery, Promotion, PromotionRule, Segment
from sglang_acache.core.spans.discovery import unknown_pieces
from sglang_acache.core.spans.recurrence import fingerprints

LEAST = 16
RNG = np.random.default_rng(0)
FREELY = PromotionRule(block_starts=50)  # so many block starts that anything pays


def text(n: int) -> np.ndarray:
    return RNG.integers(0, 50_000, n).astype(np.int32)


def cat(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts).astype(np.int32)


def observe(discovery: Discovery, *segments: np.ndarray, namespace: str = "", **options: object) -> None:
    start, parts = 0, []
    for tokens in segments:
        parts.append(Segment(tokens, start))
        start += len(tokens) + 32
    discovery.observe(namespace, parts, **options)  # type: ignore[arg-type]


def shown(promotions: list[Promotion]) -> list[tuple[int, list[int], int]]:
    return [(p.start, p.tokens.tolist(), p.seen) for p in promotions]


@pytest.fixture
def discovery() -> Discovery:
    return Discovery(min_tokens=LEAST, rule=FREELY)


class TestRuns:
    def test_prefix_infix_suffix_with_maximal_edges(self, discovery: Discovery) -> None:
        head, middle, tail = text(40), text(60), text(33)
        observe(discovery, cat(head, text(20), middle, text(9)), tail)
        assert discovery.promotions() == []
        observe(discovery, cat(head, text(11), middle, text(30)), cat(text(5), tail))
        found = sorted(shown(discovery.promotions()))
        assert found == [
            (0, head.tolist(), 2),
            (51, middle.tolist(), 2),
            (178, tail.tolist(), 2),
        ]

    def test_edges_that_differ_leave_the_interior(self, discovery: Discovery) -> None:
        shared = text(40)
        first, second = shared.copy(), shared.copy()
        second[[0, 39]] += 1
        observe(discovery, cat(text(10), first, text(10)))
        observe(discovery, cat(text(20), second, text(10)))
        assert shown(discovery.promotions()) == [(21, shared[1:39].tolist(), 2)]

    def test_below_min_tokens(self, discovery: Discovery) -> None:
        shared = text(LEAST - 1)
        observe(discovery, cat(text(30), shared, text(30)))
        observe(discovery, cat(text(30), shared, text(30)))
        assert discovery.promotions() == []

    def test_smallest_length_is_always_found(self) -> None:
        for least in (4, 8, 16, 24, 32, 100):
            discovery = Discovery(least, FREELY)
            for _ in range(5):
                shared = text(least)
                observe(discovery, cat(text(50), shared, text(50)))
                observe(discovery, cat(text(70), shared, text(3)))
                assert shared.tolist() in [p.tokens.tolist() for p in discovery.promotions()]

    def test_not_across_segments(self, discovery: Discovery) -> None:
        shared = text(30)
        observe(discovery, shared)
        observe(discovery, shared[:15], shared[15:])
        assert discovery.promotions() == []

    def test_name_spaces_never_mix(self, discovery: Discovery) -> None:
        shared = text(50)
        observe(discovery, shared, namespace="a")
        observe(discovery, shared, namespace="b")
        assert discovery.promotions() == []
        observe(discovery, shared, namespace="b")
        assert [p.namespace for p in discovery.promotions()] == ["b"]

    def test_one_request_is_one_sighting(self, discovery: Discovery) -> None:
        shared = text(50)
        observe(discovery, cat(shared, text(5), shared), shared)
        assert discovery.promotions() == []
        for _ in range(3):
            observe(discovery, text(40), shared, request="parallel samples")
        assert len(discovery.promotions()) == 1  # with the first request, not with each other

    def test_counts_distinct_requests(self) -> None:
        discovery = Discovery(LEAST, PromotionRule(min_seen=3, block_starts=50))
        system, question = text(40), text(30)
        observe(discovery, cat(system, question))
        observe(discovery, cat(system, question))
        assert discovery.promotions() == []
        observe(discovery, cat(system, text(30)))
        assert shown(discovery.promotions()) == [(0, system.tolist(), 3)]

    def test_declared_text_counts_as_seen(self, discovery: Discovery) -> None:
        declared = text(50)
        discovery.seed("", declared)
        observe(discovery, cat(text(20), declared[1:49], text(20)))
        assert shown(discovery.promotions()) == [(20, declared[1:49].tolist(), 2)]

    def test_forget(self, discovery: Discovery) -> None:
        shared = text(50)
        observe(discovery, shared)
        discovery.forget("")
        observe(discovery, shared)
        assert discovery.promotions() == []
        assert discovery.recent.tokens_held == 50


class TestWithTheTree:
    def admit(self, world: World, discovery: Discovery, prompt: np.ndarray) -> list[tuple[int, int]]:
        segments = [Segment(prompt, 0)]
        matches = world.tree.match("", segments)
        discovery.observe("", segments, matches)
        for promotion in discovery.promotions():
            world.tree.insert(promotion.namespace, promotion.tokens)
        world.check()
        return [(m.start, m.length) for m in matches]

    def test_third_request_is_served_and_a_dialogue_grows_a_path(self) -> None:
        world, discovery = World(slots=10, min_tokens=LEAST), Discovery(LEAST, FREELY)
        turns = [text(40) for _ in range(4)]
        for _ in range(2):
            assert self.admit(world, discovery, cat(turns[0], text(20))) == []
        assert self.admit(world, discovery, cat(*turns[:2], text(20))) == [(0, 40)]
        assert self.admit(world, discovery, cat(*turns[:2], text(20))) == [(0, 40)]
        assert self.admit(world, discovery, cat(*turns[:3], text(20))) == [(0, 80)]
        (root,) = world.tree.spaces[""].root.children.values()
        assert [len(n.tokens) for n in root.subtree()] == [40, 40]

    def test_extends_a_declared_span_by_a_child(self) -> None:
        world, discovery = World(slots=10, min_tokens=LEAST), Discovery(LEAST, FREELY)
        declared, more = text(40), text(30)
        world.tree.declare("", declared, "d")
        for _ in range(2):
            assert self.admit(world, discovery, cat(text(9), declared, more, text(9))) == [(9, 40)]
        assert self.admit(world, discovery, cat(text(4), declared, more, text(9))) == [(4, 70)]
        assert self.admit(world, discovery, cat(text(4), declared, text(9))) == [(4, 40)]


class TestRule:
    def test_needs_frequency_and_gain(self) -> None:
        rule = PromotionRule(min_seen=2, block_starts=4)
        assert rule.keep(300, [], [(150, 1), (150, 2), (20, 2), (20, 50)], None) == [False, True, True, True]
        assert rule.keep(300, [], [(20, 2)], None) == [False]  # alone it does not pay for the probe
        assert rule.keep(300, [200], [(20, 2)], None) == [True]  # the probe runs anyway
        assert rule.keep(300, [], [(150, 2)], 1) == [False]  # a single block start saves less than it costs

    def test_pieces(self) -> None:
        assert unknown_pieces(0, 100, [], 10) == [(0, 0, 100)]
        assert unknown_pieces(0, 100, [(0, 100)], 10) == []
        assert unknown_pieces(0, 100, [(0, 40)], 10) == [(0, 40, 100)]
        assert unknown_pieces(10, 100, [(0, 40)], 10) == [(40, 40, 100)]
        assert unknown_pieces(0, 100, [(30, 60)], 10) == [(0, 0, 30), (30, 60, 100)]
        assert unknown_pieces(0, 100, [(5, 95)], 10) == []
        assert unknown_pieces(0, 100, [(0, 20), (20, 40), (50, 60)], 10) == [(20, 40, 50), (50, 60, 100)]


class TestHostileText:
    @pytest.mark.parametrize("period", [1, 2, 3, 8, 13])
    def test_periodic_text_is_cheap(self, discovery: Discovery, period: int) -> None:
        prompt = np.tile(text(period), 20_000 // period).astype(np.int32)
        begin = time.perf_counter()
        for _ in range(4):
            observe(discovery, prompt)
        assert time.perf_counter() - begin < 2.0
        assert len(discovery.promotions()) <= 1

    def test_periodic_windows_are_not_fingerprints(self) -> None:
        positions, _ = fingerprints(np.zeros(500, np.int32), LEAST)
        assert len(positions) == 0
        assert len(fingerprints(text(500), LEAST)[0]) > 20
        assert len(fingerprints(text(LEAST - 1), LEAST)[0]) == 0

    def test_memory_is_bounded(self) -> None:
        discovery = Discovery(LEAST, FREELY, max_tokens=1000)
        for _ in range(50):
            observe(discovery, text(90))
            assert discovery.recent.tokens_held <= 1000
        observe(discovery, text(5000))
        assert discovery.recent.tokens_held <= 1000
        assert sum(len(s.latest) for s in discovery.recent._spaces.values()) < 1000

    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.lists(st.integers(0, 2), max_size=40), max_size=8))
    def test_whatever_is_promoted_stood_in_two_prompts(self, prompts: list[list[int]]) -> None:
        discovery = Discovery(4, FREELY)
        for i, prompt in enumerate(prompts):
            discovery.observe("", [Segment(np.array(prompt, np.int32))])
            for promotion in discovery.promotions():
                wanted = promotion.tokens.tolist()
                assert prompt[promotion.start : promotion.start + len(wanted)] == wanted
                assert any(wanted == p[j : j + len(wanted)] for p in prompts[:i] for j in range(len(p)))
