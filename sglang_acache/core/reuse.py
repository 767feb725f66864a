"""One request's reading of shared spans, from match to anchors (method section 4).

Stages: ENCODING until every span it reads is ready, then PROBING for one forward of the positions that are its own
(skipped by selectors that need no scores), then DENOISING over the recompute set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from sglang_acache.core.request import DiffusionRequest
from sglang_acache.core.selector import AnchorPolicy, anchor_count
from sglang_acache.core.spans import SpanHandle
from sglang_acache.core.spans.node import Node


class Stage(Enum):
    ENCODING = "encoding"
    PROBING = "probing"
    DENOISING = "denoising"


@dataclass(frozen=True, slots=True)
class AffixRead:
    """One span as one request reads it.

    ``local`` int64 ``[L]``, ascending: offsets within the span that are read from shared slots. Not among them
    are a beginning that another read covers, and the position before the answer where logits are shifted: its hidden
    state is needed, so it is forwarded always.
    """

    handle: SpanHandle
    local: np.ndarray

    @property
    def start(self) -> int:
        """Canvas position of the first token read."""
        return self.handle.start + (int(self.local[0]) if len(self.local) else 0)

    @property
    def positions(self) -> np.ndarray:
        """int64 ``[L]``, canvas positions."""
        return self.local + self.handle.start

    @property
    def nodes(self) -> list[Node]:
        """Nodes of the span tree that it reads tokens of."""
        first = int(self.local[0]) if len(self.local) else 0
        return [one.node for one in self.handle.placements if one.depth + len(one) > first]

    @property
    def shared_slots(self) -> np.ndarray:
        return self.handle.shared_slots[self.local]

    def __len__(self) -> int:
        return len(self.local)


@dataclass(slots=True)
class ReuseStats:
    """What a request is told of its reuse; tokens are rows of a forward."""

    affix_tokens: int = 0
    anchor_tokens: int = 0
    recompute_tokens: int = 0
    recompute_tokens_saved: int = 0
    probe_ms: float = 0.0
    spans: list[dict[str, object]] = field(default_factory=list)


class Reuse:
    """The spans of one request and its anchors. Slots: ``private_needed`` are the request's own, no more."""

    def __init__(
        self, reads: Sequence[AffixRead], policy: AnchorPolicy, canvas_tokens: int, *, fused: bool = False
    ) -> None:
        self.reads = list(reads)
        self.policy = policy
        self.fused = fused
        self.canvas_tokens = canvas_tokens
        self.stage = Stage.ENCODING
        self.closed = False  # the spans were given back; what remains is for reporting
        self.affix_tokens = sum(len(read) for read in self.reads)
        self.anchor_budget = sum(anchor_count(len(read), policy.ratio) for read in self.reads)
        self.spare_slots = np.empty(0, dtype=np.int64)
        self.stats = ReuseStats(affix_tokens=self.affix_tokens)

    @property
    def private_needed(self) -> int:
        """Slots to reserve: T - L of its own and K anchors; all T where fresh K/V of the span must exist to compare."""
        if self.policy.needs == "kv_deviation":
            return self.canvas_tokens
        return self.canvas_tokens - self.affix_tokens + self.anchor_budget

    @property
    def ready(self) -> bool:
        return all(read.handle.ready for read in self.reads)

    def begin(self, request: DiffusionRequest, slots: np.ndarray) -> None:
        """Lay the request's maps over ``slots``, int64 ``[private_needed]``."""
        if request.forward_passes == 0:  # a request that was retracted has been counted
            for node in {id(node): node for read in self.reads for node in read.nodes}.values():
                node.hits += 1
        if self.policy.needs == "kv_deviation":
            request.use_private_slots(slots)
            return
        own = self.canvas_tokens - self.affix_tokens
        request.use_shared_slots([(read.positions, read.shared_slots) for read in self.reads], slots[:own])
        self.spare_slots = slots[own:]

    def select(self, request: DiffusionRequest, scores: Sequence[np.ndarray | None]) -> np.ndarray:
        """Choose the anchors of every span and enter DENOISING.

        ``scores``: one array ``[L]`` a span, or None where the policy needs none. Returns the private slots that are
        no longer needed, int64 (empty but for ``kv_deviation``).
        """
        chosen = [
            read.local[self.policy.select(len(read), score, start=read.start)]
            for read, score in zip(self.reads, scores, strict=True)
        ]
        released = np.empty(0, dtype=np.int64)
        if self.policy.needs == "kv_deviation":
            released = self._keep_private(request, chosen)
        used = 0
        for read, anchors in zip(self.reads, chosen, strict=True):
            slots = self.spare_slots[used : used + len(anchors)]
            read.handle.set_anchors(anchors, slots)
            used += len(anchors)
        positions = np.concatenate([a + r.handle.start for r, a in zip(self.reads, chosen, strict=True)])
        request.override_anchors(positions, self.spare_slots[:used], drop_others=self.policy.drop_non_anchors)
        if self.fused and self.stage is Stage.PROBING and self.policy.needs != "kv_deviation":
            request.reuse_probe(positions)
        self.stage = Stage.DENOISING
        self._note_selection(used)
        return released

    def _keep_private(self, request: DiffusionRequest, chosen: Sequence[np.ndarray]) -> np.ndarray:
        """After a full forward into private slots: fall back to shared slots where nothing was chosen."""
        slots = request.read_slot_map
        shared = np.zeros(self.canvas_tokens, dtype=bool)
        for read in self.reads:
            shared[read.positions] = True
        request.use_shared_slots([(read.positions, read.shared_slots) for read in self.reads], slots[~shared])
        spare = slots[shared]
        self.spare_slots = spare[: self.anchor_budget]
        return spare[self.anchor_budget :]

    def _note_selection(self, anchors: int) -> None:
        self.stats.anchor_tokens = anchors
        self.stats.spans = [
            {
                "name": read.handle.match.name,
                "start": read.start,
                "length": len(read),
                "source": read.handle.match.source,
                "rebased": read.handle.reads_copy,
            }
            for read in self.reads
        ]

    def note_probe(self, rows: int, milliseconds: float) -> None:
        self.stats.recompute_tokens += rows
        self.stats.recompute_tokens_saved -= rows
        self.stats.probe_ms += milliseconds

    def note_recompute(self, rows: int) -> None:
        """Account for one recompute point (a block's start) of ``rows`` rows."""
        self.stats.recompute_tokens += rows
        self.stats.recompute_tokens_saved += self.canvas_tokens - rows
