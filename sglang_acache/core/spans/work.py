"""Work orders: what the runner has to write before a handle can be read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_acache.core.spans.handle import SpanHandle
from sglang_acache.core.spans.ledger import Ledger
from sglang_acache.core.spans.node import Placement
from sglang_acache.core.spans.types import Encode, Rebase, State, WorkOrder


@dataclass(frozen=True, eq=False)
class Outstanding:
    order: WorkOrder
    placement: Placement
    source: Placement | None  # locked until the copy is settled
    handle: SpanHandle


class WorkBook:
    """Orders handed out and not yet settled.

    A placement is ENCODING exactly while it has an order here, and only while the order's handle is held:
    releasing the handle withdraws its orders. A withdrawn or failed placement is UNENCODED again: another
    reader of it takes the work over, and without one it is freed.

    Copies are made from homes only, never from copies, so that the rounding of a re-based key does not add up.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.outstanding: dict[int, Outstanding] = {}
        self._tickets = 0

    def begin(self, handle: SpanHandle) -> list[WorkOrder]:
        """All orders that can be carried out now, root first. Left out: what another handle's order is
        already writing, what waits for a home that is being written, and encodings below either."""
        orders: list[WorkOrder] = []
        below_ready = True  # all ancestors are READY or earlier in ``orders``
        for placement in handle.placements:
            if placement.state is State.READY:
                continue
            source = placement.node.home() if placement.attached else None
            if placement.state is State.UNENCODED and source is not None:
                orders.append(self._rebase(handle, placement, source))
            elif placement.state is State.UNENCODED and below_ready and not self._home_underway(placement):
                orders.append(self._encode(handle, placement))
            else:
                below_ready = False
        return orders

    def settle(self, order: WorkOrder, ok: bool) -> bool:
        """Whether the placement can be read now. Not if the order was withdrawn meanwhile: then what it wrote
        belongs to nobody; nor if an encoding was settled while an ancestor is not READY: it read garbage."""
        entry = self.outstanding.pop(order.ticket, None)
        if entry is None:
            return False
        placement = entry.placement
        if isinstance(order, Encode):
            ok = ok and all(p.state is State.READY for p in placement.ancestors())
        placement.state, placement.ticket = (State.READY if ok else State.UNENCODED), 0
        if ok and isinstance(order, Encode):
            self.ledger.set_home(placement)
            entry.handle.encoded += len(placement)
        elif ok:
            entry.handle.rebased += len(placement)
        if entry.source is not None:
            self.ledger.unlock_source(entry.source)
        return ok

    def withdraw(self, handle: SpanHandle) -> None:
        for entry in [e for e in self.outstanding.values() if e.handle is handle]:
            self.settle(entry.order, ok=False)

    def _home_underway(self, placement: Placement) -> bool:
        """Another placement of this node is being encoded: wait for it and copy."""
        if not placement.attached:
            return False
        return any(
            isinstance(self.outstanding[p.ticket].order, Encode)
            for p in placement.node.placements.values()
            if p.state is State.ENCODING
        )

    def _encode(self, handle: SpanHandle, placement: Placement) -> WorkOrder:
        above = [p.slots for p in placement.ancestors()]
        order = Encode(
            ticket=self._next_ticket(),
            tokens=placement.tokens,
            start=placement.offset + placement.depth,
            slots=placement.slots,
            ancestor_slots=np.concatenate(above) if above else np.empty(0, np.int64),
        )
        return self._hand_out(order, placement, None, handle)

    def _rebase(self, handle: SpanHandle, placement: Placement, source: Placement) -> WorkOrder:
        self.ledger.lock_source(source)
        delta = placement.offset - source.offset
        order = Rebase(self._next_ticket(), source.slots, placement.slots, delta)
        return self._hand_out(order, placement, source, handle)

    def _hand_out(
        self, order: WorkOrder, placement: Placement, source: Placement | None, handle: SpanHandle
    ) -> WorkOrder:
        placement.state, placement.ticket = State.ENCODING, order.ticket
        self.outstanding[order.ticket] = Outstanding(order, placement, source, handle)
        return order

    def _next_ticket(self) -> int:
        self._tickets += 1
        return self._tickets
