"""Random orders of everything that can happen to the span tree, against a simple model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from span_world import Content, World, encoding

from sglang_acache.core.spans import Encode, Segment, SpanHandle, SpanNameTaken, SpanTree, State, WorkOrder
from sglang_acache.core.spans.node import Layer, Node

# A few chunks make all texts: they share beginnings, recur whole and inside each other, and are cut all the time.
CHUNKS = st.sampled_from([[1, 2], [1, 3], [2], [3, 3, 1], [1, 2, 2, 3]])
TEXTS = st.lists(CHUNKS, min_size=1, max_size=3).map(lambda chunks: [token for chunk in chunks for token in chunk])
SPACES = st.sampled_from(["", "", "", "tenant"])
NAMES = st.sampled_from(["a", "b", "c", "d"])
STARTS = st.sampled_from([0, 1, 7, 20])


@dataclass
class Reader:
    """What the model knows about a handle from the moment it was acquired."""

    handle: SpanHandle
    tokens: list[int]
    slots: list[int]
    content: list[Content]
    private: np.ndarray | None = None


class SpanMachine(RuleBasedStateMachine):
    readers = Bundle("readers")
    orders = Bundle("orders")

    @initialize(slots=st.sampled_from([20, 60, 200]), cap=st.sampled_from([15, 50, None]))
    def start(self, slots: int, cap: int | None) -> None:
        self.world = World(slots=slots, min_tokens=2, max_shared_tokens=cap, max_spans=6)
        self.tree = self.world.tree
        self.texts: list[list[int]] = [[1, 2]]  # whatever was made known, now forgotten or not
        self.declared: dict[tuple[str, str], tuple[list[int], bool]] = {}
        self.live: dict[int, Reader] = {}
        self.private = 0

    # ---- what is known

    @rule(space=SPACES, name=NAMES, tokens=TEXTS, pinned=st.booleans())
    def declare(self, space: str, name: str, tokens: list[int], pinned: bool) -> None:
        known = self.declared.get((space, name))
        try:
            self.tree.declare(space, tokens, name, pinned)
        except SpanNameTaken:
            assert known is not None
            assert known[0] != tokens
            return
        assert known is None or known[0] == tokens
        self.declared[space, name] = (tokens, pinned)
        self.texts.append(tokens)

    @rule(data=st.data(), pinned=st.booleans())
    def declare_again(self, data: st.DataObject, pinned: bool) -> None:
        if self.declared:
            space, name = data.draw(st.sampled_from(sorted(self.declared)))
            self.declare(space, name, self.declared[space, name][0], pinned)

    @rule(data=st.data())
    def remove_known(self, data: st.DataObject) -> None:
        if self.declared:
            self.remove(*data.draw(st.sampled_from(sorted(self.declared))))

    @rule(data=st.data(), name=NAMES, more=TEXTS)
    def declare_longer(self, data: st.DataObject, name: str, more: list[int]) -> None:
        if self.declared:
            space, known = data.draw(st.sampled_from(sorted(self.declared)))
            self.declare(space, name, self.declared[space, known][0] + more, pinned=False)

    @rule(space=SPACES, name=NAMES)
    def remove(self, space: str, name: str) -> None:
        try:
            self.tree.remove(space, name)
            del self.declared[space, name]
        except KeyError:
            assert (space, name) not in self.declared

    @rule(space=SPACES, tokens=TEXTS)
    def insert(self, space: str, tokens: list[int]) -> None:
        self.tree.insert(space, tokens)
        self.texts.append(tokens)

    @rule(space=st.none() | SPACES)
    def flush(self, space: str | None) -> None:
        self.tree.flush(space)
        assert all(info.slots == 0 for info in self.tree.spans(space))
        if space is None:
            usage = self.tree.usage()
            assert usage.used == usage.detached

    # ---- reading

    @rule(target=readers, space=SPACES, data=st.data(), around=TEXTS, start=STARTS, run=st.booleans())
    def match_and_acquire(self, space: str, data: st.DataObject, around: list[int], start: int, run: bool) -> object:
        known = st.sampled_from(self.texts)
        left = data.draw(known) + around
        right = around[:1] + data.draw(known)
        segments = [Segment(np.array(left), start), Segment(np.array(right), start + len(left) + 5)]
        canvas = dict(zip(range(start, start + len(left)), left, strict=True))
        canvas |= dict(zip(range(segments[1].start, segments[1].start + len(right)), right, strict=True))
        taken: set[int] = set()
        handles = []
        for match in self.tree.match(space, segments):
            positions = range(match.start, match.end)
            assert match.tokens.tolist() == [canvas[at] for at in positions]
            assert not taken & set(positions)
            assert match.ready + match.rebase + match.encode == match.length >= 2
            taken |= set(positions)
            before = self.world.pool.available()
            handle = self.tree.acquire(match)
            if handle is None:
                assert self.world.pool.available() == before
            else:
                handles.append(self._hold(handle))
                if run:
                    self.world.work(handle)
        return multiple(*handles)

    @rule(target=readers, space=SPACES, tokens=TEXTS, start=STARTS)
    def request_span(self, space: str, tokens: list[int], start: int) -> object:
        handle = self.tree.acquire(self.tree.request_span(space, tokens, start))
        return multiple() if handle is None else self._hold(handle)

    def _hold(self, handle: SpanHandle) -> Reader:
        edges = [tuple(p.tokens.tolist()) for p in handle.placements]
        tokens = [token for edge in edges for token in edge]
        reader = Reader(handle, tokens, handle.shared_slots.tolist(), encoding(edges, handle.start))
        assert tokens == handle.match.tokens.tolist()
        self.live[handle.id] = reader
        return reader

    @rule(target=orders, reader=readers)
    def begin_work(self, reader: Reader) -> object:
        if reader.handle.released:
            return multiple()
        orders = self.tree.begin_work(reader.handle)
        written = [slot for p in reader.handle.placements if p.state is State.READY for slot in p.slots.tolist()]
        for order in orders:
            if isinstance(order, Encode):
                assert set(order.ancestor_slots.tolist()) <= set(written)
            written += (order.slots if isinstance(order, Encode) else order.dst_slots).tolist()
        assert len(written) == len(set(written)) <= len(reader.tokens)
        return multiple(*[(reader, order) for order in orders])

    @rule(item=consumes(orders), fail=st.booleans())
    def settle(self, item: tuple[Reader, WorkOrder], fail: bool) -> None:
        reader, order = item
        if reader.handle.released:
            assert not self.tree.mark_ready(order)
        elif fail or not self._can_run(order):
            self.tree.mark_failed(order)
        else:
            self.world.execute(order)
            self.tree.mark_ready(order)

    def _can_run(self, order: WorkOrder) -> bool:
        """A runner that settles out of order or after a failure would read slots that nobody wrote."""
        entry = self.tree.work.outstanding[order.ticket]
        above = entry.placement.ancestors() if isinstance(order, Encode) else []
        return all(p.state is State.READY for p in above)

    @rule(reader=readers)
    def run_to_ready(self, reader: Reader) -> None:
        if not reader.handle.released:
            self.world.work(reader.handle)

    @rule(reader=readers, data=st.data())
    def set_anchors(self, reader: Reader, data: st.DataObject) -> None:
        if reader.handle.released:
            return
        positions = data.draw(st.sets(st.integers(0, len(reader.tokens) - 1)))
        slots = self.world.pool.alloc(len(positions))
        if slots is None:
            return
        self._free_private(reader)
        reader.private = slots
        self.private += len(slots)
        reader.handle.set_anchors(sorted(positions), slots)
        assert np.isin(slots, reader.handle.read_slots()).all()

    @rule(reader=consumes(readers), again=st.booleans())
    def release(self, reader: Reader, again: bool) -> None:
        if not reader.handle.released:
            self.tree.release(reader.handle)
            self._free_private(reader)
            del self.live[reader.handle.id]
        elif again:
            with pytest.raises(ValueError, match="not held"):
                self.tree.release(reader.handle)

    def _free_private(self, reader: Reader) -> None:
        if reader.private is not None:
            self.world.pool.free(reader.private)
            self.private -= len(reader.private)
            reader.private = None

    # ---- memory

    @rule(n=st.integers(1, 30))
    def evict(self, n: int) -> None:
        evictable = self.tree.evictable
        freed = self.tree.evict(n)
        assert freed >= min(n, evictable)
        assert self.tree.evictable == evictable - freed

    # ---- what must hold after each of them

    @invariant()
    def adds_up(self) -> None:
        self.tree.check_integrity()
        held = self.tree.shared_slots_used + self.private
        assert self.world.pool.available() + held == self.world.pool.size
        if not self.live:
            usage = self.tree.usage()
            pinned = {k for k, (_, pin) in self.declared.items() if pin}
            assert usage.detached == 0
            assert usage.protected == 0 or pinned

    @invariant()
    def readers_are_not_disturbed(self) -> None:
        owners: set[int] = set()
        placements = {p for reader in self.live.values() for p in reader.handle.placements}
        for placement in placements:
            slots = set(placement.slots.tolist())
            assert not owners & slots
            owners |= slots
        for reader in self.live.values():
            assert reader.handle.shared_slots.tolist() == reader.slots
            if reader.handle.ready:
                assert self.world.read(reader.handle) == reader.content

    @invariant()
    def declarations_are_the_models(self) -> None:
        infos = {(s.namespace, s.name): s for s in self.tree.spans() if s.source == "declared"}
        assert {k: (s.length, s.pinned) for k, s in infos.items()} == {
            k: (len(tokens), pinned) for k, (tokens, pinned) in self.declared.items()
        }

    @invariant()
    def declared_shape_is_canonical(self) -> None:
        fresh = SpanTree(self.world.pool, min_tokens=2)
        for (space, name), (tokens, _) in sorted(self.declared.items()):
            fresh.declare(space, tokens, name)
        for space in {space for space, _ in self.declared}:
            assert shape(self.tree.spaces[space].root) == shape(fresh.spaces[space].root)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for reader in self.live.values():
            self.tree.release(reader.handle)
            self._free_private(reader)
        self.tree.flush()
        self.tree.check_integrity()
        assert self.world.pool.available() == self.world.pool.size


def shape(node: Node) -> object:
    """Declared edges and where spans end."""
    below = sorted((child.tokens.tolist(), shape(child)) for child in node.in_layer(Layer.DECLARED))
    return sorted(node.declarations), below


SpanMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSpanMachine = SpanMachine.TestCase
