"""Who owns which shared slot: the one place that allocates and frees them."""

from __future__ import annotations

import heapq

from sglang_acache.core.spans.node import Node, Placement
from sglang_acache.core.spans.pool import SlotPool
from sglang_acache.core.spans.types import State

_HeapItem = tuple[int, bool, int, int, Placement]


class Ledger:
    """Placements and their slots.

        used = evictable + protected + detached          (tokens, one slot each)

    A placement is attached (its node lists it) or detached (its shape is gone, readers remain). An attached
    one is protected while it has guards. Its guards are: its readers, the copies being read from it, 1 if it
    is the home of a pinned node, and the number of its attached child placements that have guards themselves.
    So the parent of a protected placement is protected, and eviction takes leaves first by construction.

    Invariants (checked by ``integrity.check``): an attached placement without readers is READY; a child placement is
    attached only while its parent at the same offset is; everyone who reads a placement reads its ancestors.
    """

    def __init__(self, pool: SlotPool, max_shared_tokens: int | None = None) -> None:
        self.pool = pool
        self.size = pool.available()  # of the whole pool: nobody holds a slot yet
        self.max_shared_tokens = max_shared_tokens
        self.attached: dict[Placement, None] = {}  # used as ordered sets
        self.orphans: dict[Placement, None] = {}
        self.used = self.protected = self.detached = 0
        self.evicted = self.evictions = 0  # tokens and placements, since the start
        self._clock = 0

    @property
    def evictable(self) -> int:
        return self.used - self.protected - self.detached

    def tick(self) -> int:
        self._clock += 1
        return self._clock

    @property
    def pinned(self) -> int:
        return sum(len(placement) for placement in self.attached if placement.pinned)

    def headroom(self) -> int:
        """Most tokens that ``make_room`` could provide now."""
        return self._free_now() + self.evictable

    def make_room(self, n: int) -> bool:
        """Evict until n slots can be allocated within the cap. False, and nothing is evicted, if impossible."""
        shortage = n - self._free_now()
        if shortage > self.evictable:
            return False
        if shortage > 0:
            self.evict(shortage)
        return True

    def open(self, node: Node, offset: int, parent: Placement | None) -> Placement | None:
        """A locked, unencoded placement; None when no slots are left. ``parent`` is attached and locked."""
        slots = self.pool.alloc(len(node.tokens))
        if slots is None:
            return None
        depth = parent.depth + len(parent) if parent else 0
        placement = Placement(node, node.tokens, offset, depth, slots, parent)
        node.placements[offset] = placement
        self.attached[placement] = None
        self.used += len(placement)
        if parent:
            parent.kids += 1
        self.lock(placement)
        return placement

    def lock(self, placement: Placement) -> None:
        placement.readers += 1
        self._guard(placement)

    def unlock(self, placement: Placement) -> None:
        """Slots without content are freed with their last reader; READY ones stay until evicted."""
        placement.readers -= 1
        self._unguard(placement)
        if placement.attached and placement.readers == 0 and placement.state is not State.READY:
            self._retire_below(placement)
        self._free_orphan(placement)

    def lock_source(self, placement: Placement) -> None:
        placement.sources += 1
        self._guard(placement)

    def unlock_source(self, placement: Placement) -> None:
        placement.sources -= 1
        self._unguard(placement)
        self._free_orphan(placement)

    def set_home(self, placement: Placement) -> None:
        placement.home = True
        if placement.attached and placement.node.pins:
            self._guard(placement)

    def repin(self, node: Node, change: int) -> None:
        before, node.pins = bool(node.pins), node.pins + change
        if before == bool(node.pins):
            return
        for placement in node.placements.values():
            if placement.home:
                (self._guard if node.pins else self._unguard)(placement)

    def touch(self, placement: Placement, now: int) -> None:
        """A home is as recent as its most recent copy, so that at equal age the copies go first."""
        placement.last_access = now
        home = placement.node.home() if placement.attached else None
        if home is not None:
            home.last_access = now

    def retire(self, placement: Placement) -> None:
        """Take a placement without kids out of the tree: freed now, or by its last reader."""
        assert placement.attached
        assert placement.kids == 0
        del placement.node.placements[placement.offset]
        del self.attached[placement]
        if placement.guards:
            self.protected -= len(placement)
            if placement.parent:
                self._unguard(placement.parent)
        if placement.parent:
            placement.parent.kids -= 1
        placement.attached, placement.guards = False, 0
        self.detached += len(placement)
        self.orphans[placement] = None
        self._free_orphan(placement)

    def retire_all(self, node: Node) -> None:
        """Retire every placement of ``node`` and of the nodes below it."""
        for each in node.subtree():
            for placement in list(each.placements.values()):
                self.retire(placement)

    def evict(self, n: int) -> int:
        """Free at least n tokens if that many are evictable: least recently used first, leaves before
        parents, copies before homes of the same age. Returns the tokens freed."""
        heap = [self._heap_item(i, p) for i, p in enumerate(self.attached) if not (p.kids or p.guards)]
        heapq.heapify(heap)
        freed, serial = 0, len(self.attached)
        while heap and freed < n:
            placement = heapq.heappop(heap)[-1]
            parent = placement.parent
            freed += len(placement)
            self.evictions += 1
            self.retire(placement)
            if parent and not (parent.kids or parent.guards):
                heapq.heappush(heap, self._heap_item(serial, parent))
                serial += 1
        self.evicted += freed
        return freed

    @staticmethod
    def _heap_item(serial: int, placement: Placement) -> _HeapItem:
        return placement.last_access, placement.home, -placement.depth, serial, placement

    def _free_now(self) -> int:
        free = self.pool.available()
        return free if self.max_shared_tokens is None else min(free, self.max_shared_tokens - self.used)

    def _guard(self, placement: Placement | None) -> None:
        while placement and placement.attached:
            placement.guards += 1
            if placement.guards > 1:
                return
            self.protected += len(placement)
            placement = placement.parent

    def _unguard(self, placement: Placement | None) -> None:
        while placement and placement.attached:
            placement.guards -= 1
            if placement.guards:
                return
            self.protected -= len(placement)
            placement = placement.parent

    def _free_orphan(self, placement: Placement) -> None:
        if placement.attached or placement.held or placement not in self.orphans:
            return
        del self.orphans[placement]
        self.detached -= len(placement)
        self.used -= len(placement)
        self.pool.free(placement.slots)

    def _retire_below(self, placement: Placement) -> None:
        """Retire a placement and its kids: they have no readers, since whoever reads a kid reads its parent."""
        for child in placement.node.children.values():
            if kid := child.placements.get(placement.offset):
                self._retire_below(kid)
        self.retire(placement)
