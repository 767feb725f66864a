"""Shape, placements, work orders, locks and memory of the span tree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from span_world import World, kinds

from sglang_acache.core.spans import Segment, SpanHandle, SpanMatch, SpanNameTaken, State

A = list(range(100, 120))
B = list(range(200, 220))
C = list(range(300, 320))
OWN = list(range(900, 907))


@pytest.fixture
def world() -> World:
    return World(slots=400, min_tokens=4)


def find(world: World, *segments: Sequence[int], start: int = 0, **options: bool) -> list[SpanMatch]:
    parts = []
    for tokens in segments:
        parts.append(Segment(np.array(tokens, np.int32), start))
        start += len(tokens) + 8
    return world.tree.match("", parts, **options)


def where(matches: list[SpanMatch]) -> list[tuple[int, int]]:
    return [(m.start, m.length) for m in matches]


def read(world: World, tokens: Sequence[int], start: int = 0) -> SpanHandle:
    """Acquire the only match and make it ready."""
    (match,) = find(world, tokens, start=start)
    handle = world.tree.acquire(match)
    assert handle is not None
    world.work(handle)
    assert handle.ready
    assert world.read(handle) == world.expected(handle)
    world.check()
    return handle


def edges(handle: SpanHandle) -> list[list[int]]:
    return [p.tokens.tolist() for p in handle.placements]


class TestMatch:
    def test_prefix_infix_suffix_and_several(self, world: World) -> None:
        for tokens, name in ((A, "a"), (B, "b"), (C, "c")):
            world.tree.declare("", tokens, name)
        matches = find(world, A + OWN + B + OWN, C)
        assert where(matches) == [(0, 20), (27, 20), (62, 20)]
        assert [m.name for m in matches] == ["a", "b", "c"]

    def test_parts_of_a_match(self, world: World) -> None:
        """What was discovered behind a declared span is read apart from it."""
        world.tree.declare("", A, "a")
        world.tree.insert("", A + B)
        (match,) = find(world, A + B + OWN)
        head, tail = world.tree.parts(match)
        assert (head.match.tokens.tolist(), head.first, head.length) == (A, 0, 20)
        assert (head.match.name, head.match.source, head.match.claimed) == ("a", "declared", True)
        assert (tail.match.tokens.tolist(), tail.first, tail.length) == (A + B, 20, 20)
        assert (tail.match.source, tail.match.claimed) == ("discovered", False)
        assert tail.match.name in {info.name for info in world.tree.spans("", source="discovered")}
        world.tree.insert("", A + B[:3])  # a node of its own, so that it is matched whole
        (short,) = find(world, A + B[:3] + OWN)
        assert short.length == 23
        (cut,) = world.tree.parts(short)
        assert (cut.match.tokens.tolist(), cut.first) == (A, 0), "three tokens are fewer than the least"
        (whole,) = world.tree.parts(find(world, A)[0])
        assert (whole.match.tokens.tolist(), whole.first) == (A, 0)
        world.tree.declare("", A + B, "ab")
        (whole,) = world.tree.parts(find(world, A + B)[0])
        assert (whole.match.tokens.tolist(), whole.first) == (A + B, 0)

    def test_a_short_declared_beginning_is_no_span_of_its_own(self, world: World) -> None:
        """Two declared texts begin alike for three tokens; text found behind these is not theirs."""
        world.tree.declare("", A[:3] + B, "ab")
        world.tree.declare("", A[:3] + C, "ac")
        assert find(world, A[:3] + OWN) == []
        world.tree.insert("", A[:3] + OWN)
        (part,) = world.tree.parts(find(world, A[:3] + OWN)[0])
        assert (part.match.tokens.tolist(), part.first) == (A[:3] + OWN, 0)
        assert (part.match.source, part.match.claimed) == ("discovered", False)
        assert part.match.name.startswith("auto-")

    def test_never_across_segments(self, world: World) -> None:
        world.tree.declare("", A, "a")
        assert find(world, A[:10], A[10:], declared_only=True) == []

    def test_name_spaces_never_mix(self, world: World) -> None:
        world.tree.declare("tenant", A, "a")
        assert find(world, A) == []
        assert len(world.tree.match("tenant", [Segment(np.array(A), 3)])) == 1

    def test_longest_declared_path(self, world: World) -> None:
        world.tree.declare("", A, "short")
        world.tree.declare("", A + B, "long")
        assert where(find(world, A + OWN)) == [(0, 20)]
        assert where(find(world, OWN + A + B + OWN)) == [(7, 40)]

    def test_longest_first_and_the_loser_serves_its_whole_nodes(self, world: World) -> None:
        world.tree.declare("", A, "short")
        world.tree.declare("", A + B[:8], "long")
        world.tree.declare("", B + C, "other")
        assert where(find(world, A + B + C)) == [(0, 20), (20, 40)]

    def test_below_min_tokens(self, world: World) -> None:
        world.tree.declare("", A[:3], "tiny")
        world.tree.declare("", B[:4], "small")
        assert where(find(world, A[:3] + B[:4])) == [(3, 4)]
        with pytest.raises(ValueError, match="at least the tree's 4"):
            world.tree.match("", [], min_tokens=2)

    def test_the_same_span_twice_in_a_prompt(self, world: World) -> None:
        world.tree.declare("", A, "a")
        matches = find(world, A + OWN + A)
        first, second = (world.tree.acquire(m) for m in matches)
        assert first is not None
        assert second is not None
        assert kinds(world.tree.begin_work(second)) == "E"
        assert world.tree.begin_work(first) == []  # waits for the home, then copies

    def test_declared_is_found_as_without_discoveries(self, world: World) -> None:
        world.tree.declare("", B, "b")
        prompt = A + B + C
        plain = find(world, prompt)
        world.tree.insert("", A + B[:10])
        world.tree.insert("", B + C)
        found = find(world, prompt)
        assert where(found) == [(0, 20), (20, 40)]
        assert found[1].declared == 20
        assert where(find(world, prompt, declared_only=True)) == where(plain) == [(20, 20)]

    def test_prompt_of_one_token_is_bounded(self, world: World) -> None:
        world.tree.declare("", [7] * 16 + A, "a")
        assert find(world, [7] * 5000, declared_only=True) == []


class TestShape:
    def test_declared_shape_does_not_depend_on_order(self, world: World) -> None:
        world.tree.declare("", A + B, "ab")
        assert edges(read(world, A + B)) == [A + B]
        world.tree.declare("", A + C, "ac")
        assert edges(read(world, A + B)) == [A, B]
        world.tree.remove("", "ac")
        world.check()
        assert edges(read(world, A + B)) == [A + B]

    def test_a_request_never_cuts_a_declared_edge(self, world: World) -> None:
        world.tree.declare("", A + B, "ab")
        part = read(world, A + OWN)
        assert part.match.source == "discovered"
        assert edges(part) == [A]
        assert edges(read(world, A + B)) == [A + B]

    def test_partial_walk_splits_a_discovered_edge(self, world: World) -> None:
        world.tree.insert("", A + B)
        old = read(world, A + B)
        new = read(world, A + OWN)
        assert edges(new) == [A]
        assert world.read(old) == world.expected(old)
        assert edges(old) == [A + B]  # lives on, detached
        assert world.tree.usage().detached == 40
        again = read(world, A + B)
        assert edges(again) == [A, B]
        world.tree.release(old)
        world.check()
        assert world.tree.usage().detached == 0

    def test_a_split_also_retires_what_attended_the_old_edge(self, world: World) -> None:
        world.tree.insert("", A + B)
        world.tree.insert("", A + B + C)
        world.tree.release(read(world, A + B + C))
        (match,) = find(world, A + B + C)
        assert (match.ready, match.encode) == (60, 0)
        world.tree.release(read(world, A + OWN))
        (match,) = find(world, A + B + C)
        assert (match.ready, match.encode) == (20, 40)

    def test_a_tail_shorter_than_min_tokens_does_not_cut(self, world: World) -> None:
        world.tree.insert("", A)
        world.tree.insert("", A + B)
        assert where(find(world, A + B[:3] + OWN)) == [(0, 20)]
        assert where(find(world, A + B[:4] + OWN)) == [(0, 24)]

    def test_discovery_extends_a_declared_path_by_a_child(self, world: World) -> None:
        world.tree.declare("", A, "a")
        world.tree.insert("", A + B)
        handle = read(world, OWN + A + B)
        assert edges(handle) == [A, B]
        assert (handle.match.name, handle.match.source, handle.match.declared) == ("a", "declared", 20)

    def test_declare_again_and_errors(self, world: World) -> None:
        assert world.tree.declare("", A, "a") == "a"
        world.tree.declare("", A, "a", pinned=True)
        with pytest.raises(SpanNameTaken, match=r"'a' .* other tokens"):
            world.tree.declare("", B, "a")
        with pytest.raises(KeyError, match="no span 'b'"):
            world.tree.remove("", "b")
        with pytest.raises(ValueError, match="at least one token"):
            world.tree.declare("", [], "c")
        assert [(s.name, s.pinned) for s in world.tree.spans()] == [("a", True)]
        auto = world.tree.declare("", B)
        assert auto == world.tree.declare("", B)

    def test_two_names_for_the_same_tokens(self, world: World) -> None:
        world.tree.declare("", A, "one")
        world.tree.declare("", A, "two")
        world.tree.remove("", "one")
        world.check()
        assert where(find(world, A)) == [(0, 20)]
        world.tree.remove("", "two")
        assert world.tree.spaces == {}

    def test_max_spans_forgets_the_oldest(self) -> None:
        world = World(slots=400, min_tokens=4, max_spans=10)
        world.tree.insert("", A)
        held = read(world, A)
        for i in range(40):
            world.tree.insert("", [1000 + i] * 2 + [5, 6, 7])
            world.check()
        assert world.tree.usage().spans <= 10
        assert where(find(world, A)) == [(0, 20)]
        world.tree.release(held)


class TestRequestSpans:
    def test_stands_for_itself(self, world: World) -> None:
        world.tree.declare("", A + B, "ab")
        world.tree.insert("", A[:10])
        match = world.tree.request_span("", A, start=5)
        assert match.source == "request"
        handle = world.tree.acquire(match)
        assert handle is not None
        world.work(handle)
        assert edges(handle) == [A]
        world.check()
        assert where(find(world, A, declared_only=True)) == []

    def test_is_a_declared_path_if_the_tokens_are_one(self, world: World) -> None:
        world.tree.declare("", A, "a")
        assert world.tree.request_span("", A, start=5).source == "declared"

    def test_any_length(self, world: World) -> None:
        assert world.tree.request_span("", [3], start=0).length == 1


class TestWork:
    def test_home_then_copies(self, world: World) -> None:
        world.tree.declare("", A, "a")
        home = read(world, A, start=3)
        assert (home.encoded, home.rebased, home.reads_copy) == (20, 0, False)
        copy = read(world, A, start=50)
        assert (copy.encoded, copy.rebased, copy.reads_copy) == (0, 20, True)
        again = read(world, A, start=50)
        assert (again.encoded, again.rebased) == (0, 0)
        assert again.shared_slots.tolist() == copy.shared_slots.tolist()

    def test_copies_are_made_from_homes_only(self, world: World) -> None:
        world.tree.declare("", A, "a")
        world.tree.release(read(world, A, start=0))
        kept = read(world, A, start=50)
        world.tree.evict(20)  # the home goes, the copy is locked
        assert read(world, A, start=9).encoded == 20
        assert kept.ready

    def test_a_path_is_encoded_root_first(self, world: World) -> None:
        world.tree.declare("", A, "a")
        world.tree.declare("", A + B, "ab")
        (match,) = find(world, A + B)
        handle = world.tree.acquire(match)
        assert handle is not None
        first, second = world.tree.begin_work(handle)
        assert second.ancestor_slots.tolist() == first.slots.tolist()  # type: ignore[union-attr]
        assert world.tree.begin_work(handle) == []
        assert world.tree.mark_failed(first) is False
        assert world.tree.mark_ready(second) is False  # it read what was never written
        assert not handle.ready
        world.check()
        assert kinds(world.work(handle)) == "EE"
        assert world.read(handle) == world.expected(handle)

    def test_a_child_waits_for_a_parent_that_another_handle_encodes(self, world: World) -> None:
        world.tree.declare("", A, "a")
        world.tree.declare("", A + B, "ab")
        short, long = (world.tree.acquire(find(world, prompt)[0]) for prompt in (A, A + B))
        assert short is not None
        assert long is not None
        (order,) = world.tree.begin_work(short)
        assert world.tree.begin_work(long) == []
        world.execute(order)
        world.tree.mark_ready(order)
        assert kinds(world.work(long)) == "E"
        assert world.read(long) == world.expected(long)

    def test_mixed_path(self, world: World) -> None:
        world.tree.declare("", A, "a")
        world.tree.declare("", A + B, "ab")
        read(world, A, start=0)
        (match,) = find(world, A + B, start=30)
        assert (match.ready, match.rebase, match.encode) == (0, 20, 20)
        handle = world.tree.acquire(match)
        assert handle is not None
        assert kinds(world.work(handle)) == "RE"
        assert world.read(handle) == world.expected(handle)

    def test_release_in_the_middle_of_encoding(self, world: World) -> None:
        world.tree.declare("", A, "a")
        (match,) = find(world, A)
        handle = world.tree.acquire(match)
        assert handle is not None
        (order,) = world.tree.begin_work(handle)
        world.tree.release(handle)
        world.check()
        assert world.pool.available() == 400
        assert world.tree.mark_ready(order) is False
        with pytest.raises(ValueError, match="not held"):
            world.tree.release(handle)

    def test_another_reader_takes_over(self, world: World) -> None:
        world.tree.declare("", A, "a")
        (match,) = find(world, A)
        first, second = world.tree.acquire(match), world.tree.acquire(match)
        assert first is not None
        assert second is not None
        world.tree.begin_work(first)
        assert world.tree.begin_work(second) == []
        world.tree.release(first)
        world.check()
        assert kinds(world.work(second)) == "E"

    def test_source_of_a_copy_survives_eviction_and_flush(self, world: World) -> None:
        world.tree.declare("", A, "a")
        world.tree.release(read(world, A, start=0))
        (match,) = find(world, A, start=30)
        handle = world.tree.acquire(match)
        assert handle is not None
        (order,) = world.tree.begin_work(handle)
        assert world.tree.evict(100) == 0
        world.tree.flush()
        world.check()
        world.execute(order)
        assert world.tree.mark_ready(order)
        world.check()
        assert world.read(handle) == world.expected(handle)
        world.tree.release(handle)
        assert world.pool.available() == 400

    def test_work_goes_on_after_a_split(self, world: World) -> None:
        world.tree.insert("", A + B)
        (match,) = find(world, A + B)
        slow = world.tree.acquire(match)
        assert slow is not None
        read(world, A + OWN)
        assert kinds(world.work(slow)) == "E"
        assert world.read(slow) == world.expected(slow)
        world.check()


class TestAnchors:
    def test_recorded_at_the_nodes_until_release(self, world: World) -> None:
        world.tree.declare("", A, "a")
        world.tree.declare("", A + B, "ab")
        handle = read(world, A + B)
        private = world.pool.alloc(3)
        assert private is not None
        handle.set_anchors([0, 19, 25], private)
        at_a, at_b = world.tree.overrides("", A + B)
        assert at_a[handle.id].positions.tolist() == [0, 19]
        assert at_b[handle.id].positions.tolist() == [5]
        slots = handle.read_slots()
        assert slots[[0, 19, 25]].tolist() == private.tolist()
        assert np.delete(slots, [0, 19, 25]).tolist() == np.delete(handle.shared_slots, [0, 19, 25]).tolist()
        world.tree.check_integrity()
        world.tree.release(handle)
        assert world.tree.overrides("", A + B) == [{}, {}]
        world.pool.free(private)
        world.check()

    @pytest.mark.parametrize(
        ("positions", "slots"),
        [([0], [1, 2]), ([3, 2], [1, 2]), ([3, 3], [1, 2]), ([20], [1]), ([-1], [1]), ([1, 2], [5, 5])],
    )
    def test_refused(self, world: World, positions: list[int], slots: list[int]) -> None:
        world.tree.declare("", A, "a")
        handle = read(world, A)
        with pytest.raises(ValueError, match="anchors"):
            handle.set_anchors(positions, slots)
        with pytest.raises(ValueError, match="private"):
            handle.set_anchors([0], handle.shared_slots[:1])


class TestMemory:
    def test_evicts_oldest_first_leaves_first_copies_first(self, world: World) -> None:
        world.tree.declare("", A, "a")
        world.tree.declare("", A + B, "ab")
        world.tree.declare("", C, "c")
        world.tree.release(read(world, A + B, start=0))
        world.tree.release(read(world, A + B, start=50))
        world.tree.release(read(world, C, start=0))
        assert world.tree.evictable == 100
        seen = []
        while world.tree.evictable:
            (match,) = find(world, A + B, start=50)
            seen.append((match.ready, match.rebase, match.encode))
            assert world.tree.evict(1) == 20
            world.check()
        # the homes at 0 are as recent as their copies at 50, which go first: leaf, root; then the homes; then C
        assert seen == [(40, 0, 0), (20, 20, 0), (0, 40, 0), (0, 20, 20), (0, 0, 40)]
        assert (world.tree.usage().evicted, world.tree.usage().evictions) == (100, 5)
        assert {s.name for s in world.tree.spans()} == {"a", "ab", "c"}

    def test_copies_before_homes_of_the_same_age(self, world: World) -> None:
        world.tree.declare("", A, "a")
        world.tree.release(read(world, A, start=0))
        world.tree.release(read(world, A, start=50))
        world.tree.evict(20)
        assert find(world, A, start=0)[0].ready == 20

    def test_pinned_home_stays_copies_go(self, world: World) -> None:
        world.tree.declare("", A + B, "ab", pinned=True)
        world.tree.declare("", A, "a")
        world.tree.release(read(world, A + B, start=0))
        world.tree.release(read(world, A + B, start=50))
        assert (world.tree.evictable, world.tree.protected) == (40, 40)
        assert (world.tree.usage().pinned, world.tree.usage().placements) == (40, 4)
        assert world.tree.evict(1000) == 40
        world.check()
        world.tree.declare("", A + B, "ab", pinned=False)
        world.check()
        assert world.tree.evictable == 40

    def test_acquire_evicts_or_refuses_without_damage(self) -> None:
        world = World(slots=50, min_tokens=4)
        world.tree.declare("", A, "a")
        world.tree.declare("", B, "b")
        world.tree.declare("", C, "c")
        world.tree.release(read(world, A))
        held = read(world, B)
        third = read(world, C)  # evicts A
        assert world.tree.usage().evicted == 20
        (match,) = find(world, A)
        assert world.tree.acquire(match) is None
        world.check()
        world.tree.release(third)
        assert world.tree.acquire(match) is not None
        world.tree.release(held)
        world.check()

    def test_cap_on_shared_tokens(self) -> None:
        world = World(slots=400, min_tokens=4, max_shared_tokens=30)
        world.tree.declare("", A, "a")
        world.tree.declare("", B, "b")
        world.tree.declare("", A + B, "ab")
        assert world.tree.acquire(find(world, A + B)[0]) is None
        world.tree.release(read(world, A))
        world.tree.release(read(world, B))
        assert world.tree.shared_slots_used == 20

    def test_refusal_does_not_cut(self) -> None:
        world = World(slots=50, min_tokens=4)
        world.tree.insert("", A + B)
        held = read(world, A + B)
        (match,) = find(world, A + OWN)
        assert world.tree.acquire(match) is None
        assert world.tree.usage().detached == 0
        assert held.placements[0].attached

    def test_flush_keeps_declarations_only(self, world: World) -> None:
        world.tree.declare("", A, "a", pinned=True)
        world.tree.insert("", B)
        world.tree.declare("other", A, "a")
        world.tree.release(world_read_other(world))
        held = read(world, A)
        world.tree.release(read(world, B))
        world.tree.flush("")
        world.check()
        assert [(s.name, s.namespace) for s in world.tree.spans()] == [("a", ""), ("a", "other")]
        usage = world.tree.usage()
        assert (usage.used, usage.detached, usage.evictable) == (40, 20, 20)
        assert world.read(held) == world.expected(held)
        world.tree.release(held)
        world.tree.flush()
        world.check()
        assert world.pool.available() == 400

    def test_listing(self, world: World) -> None:
        world.tree.declare("", A + B, "ab", pinned=True)
        read(world, A + B, start=0)
        read(world, A + B, start=9)
        (info,) = world.tree.spans("")
        assert (info.name, info.source, info.length, info.pinned) == ("ab", "declared", 40, True)
        assert (info.readers, info.hits) == (2, 0), "a lock is no hit: requests count theirs"
        assert (info.placements, info.encoded_tokens, info.slots) == (2, 40, 80)

    def test_a_match_that_is_no_longer_known_is_refused(self, world: World) -> None:
        world.tree.declare("", A, "a")
        (match,) = find(world, A)
        world.tree.remove("", "a")
        assert world.tree.acquire(match) is None

    def test_state_names(self) -> None:
        assert [s.value for s in State] == ["unencoded", "encoding", "ready"]


def world_read_other(world: World) -> SpanHandle:
    (match,) = world.tree.match("other", [Segment(np.array(A), 0)])
    handle = world.tree.acquire(match)
    assert handle is not None
    world.work(handle)
    return handle
