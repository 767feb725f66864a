"""What a request holds while it reads a span."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from sglang_acache.core.spans.node import AnchorOverride, Placement
from sglang_acache.core.spans.types import SlotArray, SpanMatch, State


class SpanHandle:
    """A lock on the placements of one match, from ``SpanTree.acquire`` to ``SpanTree.release``.

    Its slots never change and, once ``ready``, are never written until it is released, whatever happens to the tree.
    """

    def __init__(self, handle_id: int, match: SpanMatch, placements: tuple[Placement, ...]) -> None:
        self.id = handle_id
        self.match = match
        self.placements = placements  # root to leaf
        self.anchors: AnchorOverride | None = None  # positions relative to the span
        self.released = False
        self.encoded = 0  # tokens that were forwarded on behalf of this handle
        self.rebased = 0  # tokens that were copied on behalf of this handle

    def __len__(self) -> int:
        return self.match.length

    @property
    def start(self) -> int:
        return self.match.start

    @property
    def ready(self) -> bool:
        """Every shared slot may be read."""
        return all(p.state is State.READY for p in self.placements)

    @property
    def reads_copy(self) -> bool:
        """Some of the K/V was re-based from another offset."""
        return any(p.state is State.READY and not p.home for p in self.placements)

    @cached_property
    def shared_slots(self) -> SlotArray:
        """int64[L]: the shared slot of every position of the span."""
        slots = np.concatenate([p.slots for p in self.placements])
        slots.setflags(write=False)
        return slots

    @property
    def unpinned_tokens(self) -> int:
        """Slots that are held for the sake of readers."""
        return sum(len(p) for p in self.placements if not p.pinned)

    def read_slots(self) -> SlotArray:
        """int64[L]: the span's part of the read-slot map, i.e. shared slots but private ones for the anchors."""
        slots = self.shared_slots.copy()
        if self.anchors is not None:
            slots[self.anchors.positions] = self.anchors.slots
        return slots

    def set_anchors(self, positions: npt.ArrayLike, private_slots: npt.ArrayLike) -> None:
        """Record at the nodes which positions this reader reads elsewhere. Replaces an earlier record.

        positions: int[K], relative to the span, strictly ascending; private_slots: int[K], none of them
        shared. ValueError otherwise. The private slots stay the caller's.
        """
        at = np.asarray(positions, np.int64).reshape(-1)
        slots = np.asarray(private_slots, np.int64).reshape(-1)
        if self.released:
            raise ValueError("the handle has been released")
        if len(at) != len(slots):
            raise ValueError(f"{len(at)} anchors but {len(slots)} slots")
        if len(at) and (at[0] < 0 or at[-1] >= len(self) or (np.diff(at) <= 0).any()):
            raise ValueError(f"anchors must ascend strictly within [0, {len(self)})")
        if np.intersect1d(slots, self.shared_slots).size or len(np.unique(slots)) != len(slots):
            raise ValueError("anchors need private slots of their own")
        self.anchors = AnchorOverride(at, slots)
        bounds = np.searchsorted(at, [p.depth for p in self.placements] + [len(self)])
        for placement, first, last in zip(self.placements, bounds[:-1], bounds[1:], strict=True):
            placement.overrides[self.id] = AnchorOverride(at[first:last] - placement.depth, slots[first:last])
