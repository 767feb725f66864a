"""One request being denoised: its canvas, its slot maps, and which positions its next forward covers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_acache.core.canvas import Canvas
from sglang_acache.core.commit import CommitRule, block_steps, step_count
from sglang_acache.core.params import DiffusionParams
from sglang_acache.core.policy import CACHE_POLICIES
from sglang_acache.core.shift import first_query_position

SHARED = -1
"""In a write-slot map: the position reads a shared slot, so nothing may be stored for it."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request draws tokens. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 do not filter."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


class DiffusionRequest:
    """A request between admission and its last token.

    ``read_slot_map`` int64 ``[T]``: the K/V slot every position is read from. ``write_slot_map`` int64 ``[T]``: the
    private slot a forward of that position stores to, or ``SHARED``. ``recompute_positions`` int64 ``[R]``: what a
    block's start forwards, ascending. ``attended_slots`` int64 ``[k]``: the slots attention reads, in order of
    position. Invariant: where ``write_slot_map`` is not ``SHARED`` it equals ``read_slot_map``, and every position
    in ``recompute_positions`` has a private slot; so no forward can write a shared slot.
    """

    __slots__ = (
        "attended_slots",
        "canvas",
        "forward_passes",
        "forwarded_tokens",
        "params",
        "policy",
        "prepared_positions",
        "read_slot_map",
        "recompute_positions",
        "sampling",
        "shift_logits",
        "stored",
        "write_slot_map",
    )

    def __init__(
        self, canvas: Canvas, params: DiffusionParams, sampling: Sampling, *, shift_logits: bool
    ) -> None:
        self.canvas = canvas
        self.params = params
        self.sampling = sampling
        self.shift_logits = shift_logits
        self.policy = CACHE_POLICIES[params.cache]
        empty = np.empty(0, dtype=np.int64)
        self.read_slot_map, self.write_slot_map = empty, empty
        self.recompute_positions, self.attended_slots = empty, empty
        self.stored = False  # whether the slots hold K/V of this canvas, so that a step may forward less than all
        self.prepared_positions: np.ndarray | None = None  # what a block start must forward after a fused probe
        self.forward_passes = 0
        self.forwarded_tokens = 0

    def use_private_slots(self, slots: np.ndarray) -> None:
        """Give every position its own slot, int64 ``[T]``: no reuse. The next forward covers the whole canvas."""
        self.read_slot_map = self.attended_slots = slots
        self.write_slot_map = slots
        self.recompute_positions = np.arange(len(self.canvas))
        self.stored = False
        self.prepared_positions = None

    def use_shared_slots(self, spans: Sequence[tuple[np.ndarray, np.ndarray]], slots: np.ndarray) -> None:
        """Read spans from shared slots and everything else from ``slots`` (int64, one for each other position).

        ``spans`` are pairs of positions and shared slots, int64 ``[L]`` each, not overlapping.
        """
        shared = np.zeros(len(self.canvas), dtype=bool)
        read = np.full(len(self.canvas), SHARED, dtype=np.int64)
        for positions, shared_slots in spans:
            shared[positions] = True
            read[positions] = shared_slots
        self.recompute_positions = np.flatnonzero(~shared)
        read[self.recompute_positions] = slots
        write = np.full(len(self.canvas), SHARED, dtype=np.int64)
        write[self.recompute_positions] = slots
        self.read_slot_map = self.attended_slots = read
        self.write_slot_map = write
        self.stored = False
        self.prepared_positions = None

    def override_anchors(self, positions: np.ndarray, slots: np.ndarray, *, drop_others: bool = False) -> None:
        """Give ``positions`` (int64 ``[K]``, so far shared) private ``slots``: they join the recompute set.

        With ``drop_others`` the positions that stay shared are left out of attention altogether (ablation).
        """
        self.read_slot_map = self.read_slot_map.copy()
        self.read_slot_map[positions] = slots
        self.write_slot_map[positions] = slots
        self.recompute_positions = np.flatnonzero(self.write_slot_map != SHARED)
        own = self.read_slot_map[self.recompute_positions]
        self.attended_slots = own if drop_others else self.read_slot_map
        self.stored = False

    def reuse_probe(self, anchors: np.ndarray) -> None:
        """Let the next block start forward only ``anchors`` and its block: a probe has just stored all the rest."""
        canvas = self.canvas
        block = np.arange(first_query_position(canvas, self.shift_logits), canvas.block_stop)
        self.prepared_positions = np.union1d(anchors, block)

    @property
    def at_block_start(self) -> bool:
        """Whether the next forward must cover the whole recompute set."""
        return self.canvas.step == 0 or not self.stored

    def query_positions(self) -> np.ndarray:
        """Positions the next forward covers, ascending int64; always includes those whose logits are needed."""
        if self.prepared_positions is not None:
            return self.prepared_positions
        if self.at_block_start:
            return self.recompute_positions
        span = self.policy.step_range(self.canvas, self.shift_logits)
        if span is None:
            return self.recompute_positions
        first, last = np.searchsorted(self.recompute_positions, span)
        return self.recompute_positions[first:last]

    def commit_rule(self) -> CommitRule:
        """The rule of the current step (method section 2)."""
        params, canvas = self.params, self.canvas
        if params.steps is not None:
            steps = block_steps(params.steps, canvas.num_blocks, canvas.block_length, canvas.block)
            return CommitRule(count=step_count(canvas.block_length, steps, canvas.step))
        if params.factor is not None:
            return CommitRule(factor=params.factor)
        return CommitRule(threshold=params.threshold)

    def note_forward(self, num_positions: int) -> None:
        """Account for a denoising forward of this request that has been done."""
        self.stored = True
        self.prepared_positions = None
        self.forward_passes += 1
        self.forwarded_tokens += num_positions
