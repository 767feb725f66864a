"""A runner without a model: it writes into fake slot memory what a real one would write into the KV pool."""

from __future__ import annotations

from sglang_acache.core.spans import Encode, ListSlotPool, Rebase, SpanHandle, SpanTree, WorkOrder

Content = tuple[int, int]  # (what K and V were computed from, position of the key)


def encoding(edges: list[tuple[int, ...]], start: int) -> list[Content]:
    """K/V of a path of nodes: block-causal, so a function of the ancestors' edges and the own tokens."""
    above: list[int] = []
    for edge in edges:
        above += [hash((tuple(above), edge, i)) for i in range(len(edge))]
    return [(value, start + i) for i, value in enumerate(above)]


class World:
    """A tree, its pool and the memory behind it."""

    def __init__(self, slots: int = 64, **options: int | None) -> None:
        self.pool = ListSlotPool(slots, first=100)
        self.tree = SpanTree(self.pool, **options)  # type: ignore[arg-type]
        self.memory: dict[int, Content] = {}

    def execute(self, order: WorkOrder) -> None:
        if isinstance(order, Rebase):
            for src, dst in zip(order.src_slots.tolist(), order.dst_slots.tolist(), strict=True):
                value, position = self.memory[src]
                self.memory[dst] = (value, position + order.delta)
            return
        above = [self.memory[slot] for slot in order.ancestor_slots.tolist()]
        assert [at for _, at in above] == list(range(order.start - len(above), order.start))
        edge = tuple(order.tokens.tolist())
        for i, slot in enumerate(order.slots.tolist()):
            self.memory[slot] = (hash((tuple(v for v, _ in above), edge, i)), order.start + i)

    def work(self, handle: SpanHandle) -> list[WorkOrder]:
        """Do all that the handle needs and can be done now."""
        orders = self.tree.begin_work(handle)
        for order in orders:
            self.execute(order)
            assert self.tree.mark_ready(order)
        return orders

    def read(self, handle: SpanHandle) -> list[Content]:
        return [self.memory[slot] for slot in handle.shared_slots.tolist()]

    def expected(self, handle: SpanHandle) -> list[Content]:
        return encoding([tuple(p.tokens.tolist()) for p in handle.placements], handle.start)

    def check(self) -> None:
        self.tree.check_integrity()
        assert self.pool.available() + self.tree.shared_slots_used == self.pool.size


def kinds(orders: list[WorkOrder]) -> str:
    """E for an encoding, R for a re-basing."""
    return "".join("E" if isinstance(order, Encode) else "R" for order in orders)
