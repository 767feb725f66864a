"""Shared spans at work: finding them in prompts, encoding them, probing requests for anchors.

The span tree (core) decides and accounts; this module turns its decisions into entries of a ragged step and copies
on the device. A span that is discovered is encoded in the background of the request that completed the evidence,
which itself runs without it; a request that meets a known span waits for its encoding, at most one step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from sglang_acache.core.plan import Entry, indptr, silent_entry
from sglang_acache.core.reuse import AffixRead, Reuse, Stage
from sglang_acache.core.reuse_params import ReuseParams
from sglang_acache.core.selector import AnchorPolicy, exact_ratio
from sglang_acache.core.spans import (
    Discovery,
    Encode,
    Rebase,
    Segment,
    SpanHandle,
    SpanMatch,
    SpanPart,
    SpanTree,
    State,
    choose_spans,
)
from sglang_acache.core.spans.breakeven import SpanCost
from sglang_acache.core.spans.types import TokenArray
from sglang_acache.srt.importance import ProbeRows, Scorer, build_scorer
from sglang_acache.srt.kv_device import KvDevice
from sglang_acache.srt.live_request import LiveRequest

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class AffixCounters:
    """Totals since the start, for metrics."""

    tokens_reused: int = 0
    tokens_recomputed: int = 0
    tokens_saved: int = 0
    anchors: int = 0
    spans_encoded: int = 0
    probe_tokens: int = 0
    probe_seconds: float = 0.0


class Opening(NamedTuple):
    """What a request can read now. ``waits``: a span with a claim to be read has no room beside what others read."""

    reuse: Reuse | None = None
    waits: bool = False


class Selected(NamedTuple):
    """A request that has chosen its anchors, and the private slots int64 that it needs no more."""

    request: LiveRequest
    released: np.ndarray


@dataclass(slots=True)
class AffixWork:
    """What shared spans add to one step: encodings, then probes, in the order of the step's entries."""

    encodes: list[Encode] = field(default_factory=list)
    probes: list[LiveRequest] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    scorers: list[Scorer] = field(default_factory=list)
    scored: list[tuple[Scorer, list[LiveRequest]]] = field(default_factory=list)
    selected: list[Selected] = field(default_factory=list)  # without a probe, before this step
    started: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(len(entry.positions) for entry in self.entries)


class Affixes:
    """``reduce_scores`` sums float32 scores over tensor-parallel ranks, each of which saw its own heads."""

    def __init__(
        self,
        tree: SpanTree,
        discovery: Discovery | None,
        device: KvDevice,
        *,
        reduce_scores: Callable[[torch.Tensor], torch.Tensor] = lambda scores: scores,
        debug: bool = False,
    ) -> None:
        self.tree = tree
        self.reduce_scores = reduce_scores
        self.discovery = discovery
        self.device = device
        self.debug = debug
        self.counters = AffixCounters()
        self._background: list[SpanHandle] = []
        self._seeds: list[tuple[str, TokenArray]] = []
        self._digests: dict[int, tuple[np.ndarray, bytes]] = {}

    # ── admission ─────────────────────────────────────────────────────────

    def open(self, request: LiveRequest, canvas_tokens: int, block_starts: int, no_share: int | None) -> Opening:
        """Lock the spans worth reading for ``request``.

        ``no_share``: a position that must be forwarded at every block start, where logits are shifted.
        """
        params = request.reuse_params
        if not params.enabled or (exact_ratio(params.anchor_ratio) == 1 and params.coverage is None):
            return Opening()
        policy = _policy(params, request)
        parts = self._parts(request, params, policy, canvas_tokens, block_starts)
        handles = [self.tree.acquire(part.match) for part in parts]
        reads = [_read(handle, part, no_share) for part, handle in zip(parts, handles, strict=True) if handle]
        reads.sort(key=lambda read: read.start)
        reuse = Reuse(reads, policy, canvas_tokens, fused=params.probe == "fused") if reads else None
        return Opening(reuse, self._has_room_alone(parts, handles))

    def _has_room_alone(self, parts: Sequence[SpanPart], handles: Sequence[SpanHandle | None]) -> bool:
        """Whether a span with a claim that has no room now would have it if nobody else read anything."""
        room = self.tree.room_alone(shared=True)
        for part, handle in zip(parts, handles, strict=True):
            needed = part.match.length if handle is None else handle.unpinned_tokens
            if needed > room or not part.match.claimed:
                continue
            room -= needed
            if handle is None:
                return True
        return False

    def fits_alone(self, reuse: Reuse) -> bool:
        """Whether the request has a claim to its spans and would fit with them if there were no other request."""
        held = {id(one): one for read in reuse.reads for one in read.handle.placements}
        shared = sum(len(one) for one in held.values() if not one.pinned)
        claimed = any(read.handle.match.claimed for read in reuse.reads)
        return claimed and reuse.private_needed + shared <= self.tree.room_alone(shared=False)

    def close(self, reuse: Reuse) -> None:
        """Give the spans back; the request reads them no more."""
        if self.debug:
            self._check_digests()
        for read in reuse.reads:
            self.tree.release(read.handle)
        reuse.closed = True

    def _parts(
        self,
        request: LiveRequest,
        params: ReuseParams,
        policy: AnchorPolicy,
        canvas_tokens: int,
        block_starts: int,
    ) -> list[SpanPart]:
        """What the request is to read, in the order in which it may take room.

        Declared spans are judged among themselves and come first; what was discovered is judged on top of them.
        """
        namespace, segments = request.namespace, request.segments
        if params.spans:
            return [SpanPart(self._named(namespace, segments, start, end)) for start, end in params.spans]
        found = self.tree.match(namespace, segments)
        if self.discovery is not None and not request.observed:
            request.observed = True
            self._observe(request, found, canvas_tokens, block_starts)
        parts = [part for match in found for part in self.tree.parts(match)]
        chosen: list[SpanPart] = []
        for claimed in (True, False):
            # By length alone, never by what is encoded now: that would make answers depend on who came before.
            candidates = [part for part in parts if part.match.claimed is claimed]
            costs = [SpanCost(part.length) for part in candidates]
            keep = choose_spans(
                canvas_tokens, costs, block_starts, policy.ratio, needs=policy.needs, probed=bool(chosen)
            )
            chosen += [part for part, worth in zip(candidates, keep, strict=True) if worth]
        return chosen

    def _named(self, namespace: str, segments: Sequence[Segment], start: int, end: int) -> SpanMatch:
        """A span named by offsets in prompt + suffix, on one side of the hole."""
        left = segments[0]
        if start < len(left.tokens):
            return self.tree.request_span(namespace, left.tokens[start:end], start)
        right = segments[1]
        shift = len(left.tokens)
        return self.tree.request_span(namespace, right.tokens[start - shift : end - shift], right.start + start - shift)

    def _observe(
        self, request: LiveRequest, found: Sequence[SpanMatch], canvas_tokens: int, block_starts: int
    ) -> None:
        assert self.discovery is not None
        self.discovery.observe(
            request.namespace,
            request.segments,
            found,
            canvas=canvas_tokens,
            block_starts=block_starts,
            request=request.spec.group or request.req.rid,
        )
        for promotion in self.discovery.promotions():
            self.tree.insert(promotion.namespace, promotion.tokens)
            match = self.tree.locate(promotion.namespace, promotion.tokens, promotion.start)
            handle = None if match is None else self.tree.acquire(match)
            if handle is not None:
                self._background.append(handle)

    # ── one step ──────────────────────────────────────────────────────────

    @property
    def has_background_work(self) -> bool:
        return bool(self._background)

    def seed(self, namespace: str, tokens: TokenArray) -> None:
        """Let discovery count a declared text as seen often enough, now and after every flush."""
        if self.discovery is not None:
            self._seeds.append((namespace, tokens))
            self.discovery.seed(namespace, tokens)

    def before_flush(self) -> None:
        """Give up encodings that no request waits for, and what was seen so far; between steps only."""
        for handle in self._background:
            self.tree.release(handle)
        self._background = []
        if self.discovery is not None:
            self.discovery.forget()
            for namespace, tokens in self._seeds:
                self.discovery.seed(namespace, tokens)

    def prepare(self, live: Sequence[LiveRequest], budget: int) -> AffixWork:
        """Do the copies that are due, and return the encodings and probes that ride in the next step.

        They take about ``budget`` tokens, at least one of them goes; the others wait for the steps after it.
        """
        reading = [request for request in live if request.reuse is not None]
        work = AffixWork(started=time.perf_counter())
        handles = list(self._background)
        handles += [read.handle for request in reading if request.reuse for read in request.reuse.reads]
        for handle in handles:
            if not handle.ready and work.tokens < budget:
                self._begin(handle, work)
        self._background = [handle for handle in self._background if not self._settled(handle)]
        for request in reading:
            reuse = request.reuse
            if reuse is not None and reuse.stage is Stage.ENCODING and reuse.ready:
                scores = self._known_scores(request, reuse)
                if scores is None:
                    reuse.stage = Stage.PROBING
                else:
                    work.selected.append(self._select(request, scores))
        self._add_probes(_within(budget - work.tokens, reading, at_least_one=not work.entries), work)
        return work

    def finish(self, work: AffixWork) -> list[Selected]:
        """After the step's forward: settle encodings, choose anchors."""
        for order in work.encodes:
            if self.tree.mark_ready(order):
                self.counters.spans_encoded += 1
                self._remember(order.slots)
        selected = []
        seconds = time.perf_counter() - work.started
        self.counters.probe_seconds += seconds if work.probes else 0.0
        for scorer, requests in work.scored:
            summed = self.reduce_scores(scorer.scores).cpu().numpy()
            for request, scores in zip(requests, _per_request(summed, scorer.lengths, requests), strict=True):
                assert request.reuse is not None
                assert request.state is not None
                rows = _probe_rows(request)
                request.reuse.note_probe(rows, seconds * 1000.0)
                self.counters.probe_tokens += rows
                request.state.forwarded_tokens += rows
                self._memorise(request, scores)
                selected.append(self._select(request, scores))
        return selected

    def _begin(self, handle: SpanHandle, work: AffixWork) -> None:
        for order in self.tree.begin_work(handle):
            if isinstance(order, Rebase):
                self.device.rebase(order)
                self.tree.mark_ready(order)
                self._remember(order.dst_slots)
            else:
                work.encodes.append(order)
                work.entries.append(_encode_entry(order))

    def _settled(self, handle: SpanHandle) -> bool:
        if handle.ready:
            self.tree.release(handle)
        return handle.ready

    def _known_scores(self, request: LiveRequest, reuse: Reuse) -> Sequence[np.ndarray | None] | None:
        """What decides the anchors without a probe, for each read; None where a probe has to."""
        if reuse.policy.needs == "none":
            return [None] * len(reuse.reads)
        scores = [self._score_of(request, read) for read in reuse.reads]
        return None if any(score is None for score in scores) else scores

    def _score_of(self, request: LiveRequest, read: AffixRead) -> np.ndarray | None:
        """Importance that the request's own probe has found, or another's, if the request wants such."""
        own = request.scores.get((read.start, len(read)))  # it has one where it was retracted: anchors are for life
        if own is None and request.reuse_params.probe == "remembered":
            return _memory(read).get(_memory_key(request, read))
        return own

    def _memorise(self, request: LiveRequest, scores: Sequence[np.ndarray]) -> None:
        assert request.reuse is not None
        for read, score in zip(request.reuse.reads, scores, strict=True):
            request.scores[read.start, len(read)] = score
            _memory(read)[_memory_key(request, read)] = score

    def _select(self, request: LiveRequest, scores: Sequence[np.ndarray | None]) -> Selected:
        assert request.reuse is not None
        assert request.state is not None
        released = request.reuse.select(request.state, scores)
        stats = request.reuse.stats
        request.req.cached_tokens = request.req.cached_tokens_device = stats.affix_tokens - stats.anchor_tokens
        self.counters.anchors += stats.anchor_tokens
        self.counters.tokens_reused += stats.affix_tokens - stats.anchor_tokens
        return Selected(request, released)

    def _add_probes(self, probing: Sequence[LiveRequest], work: AffixWork) -> None:
        by_needs: dict[str, list[LiveRequest]] = {}
        for request in probing:
            assert request.reuse is not None
            by_needs.setdefault(request.reuse.policy.needs, []).append(request)
        base = work.tokens
        for needs, requests in by_needs.items():
            rows: list[ProbeRows] = []
            for request in requests:
                entry, probes = _probe_entry(request, base)
                work.entries.append(entry)
                base += len(entry.positions)
                rows += probes
            scorer = build_scorer(needs, rows, self.device.keys[0].device)
            work.scored.append((scorer, requests))
            work.scorers.append(scorer)
            work.probes += requests

    # ── checks ────────────────────────────────────────────────────────────

    def _remember(self, slots: np.ndarray) -> None:
        if self.debug:
            self._digests[int(slots[0])] = (slots, self.device.digest(slots))

    def _check_digests(self) -> None:
        """Fail where a shared slot that somebody reads has changed since it was encoded."""
        for handle in self.tree.handles.values():
            for placement in handle.placements:
                known = self._digests.get(int(placement.slots[0]))
                if placement.state is not State.READY or not known or not np.array_equal(known[0], placement.slots):
                    continue
                if self.device.digest(placement.slots) != known[1]:
                    raise AssertionError(f"shared slots of {handle.match.name!r} were written after encoding")


def _within(budget: int, reading: Sequence[LiveRequest], *, at_least_one: bool) -> list[LiveRequest]:
    """The probing requests, oldest first, whose probes fit ``budget`` tokens."""
    chosen: list[LiveRequest] = []
    for request in reading:
        if _stage(request) is Stage.PROBING:
            budget -= _probe_rows(request)
            if budget >= 0 or (at_least_one and not chosen):
                chosen.append(request)
    return chosen


def _stage(request: LiveRequest) -> Stage:
    return Stage.DENOISING if request.reuse is None else request.reuse.stage


def _policy(params: ReuseParams, request: LiveRequest) -> AnchorPolicy:
    drop = params.selector == "drop_non_anchors"
    return AnchorPolicy(
        selector="attention" if drop else params.selector,
        ratio=str(params.anchor_ratio),
        coverage=None if params.coverage is None else str(params.coverage),
        drop_non_anchors=drop,
        seed=params.seed,
    )


def _memory(read: AffixRead) -> dict[tuple[str, int], Any]:
    """What the tree's node for this span remembers; lost with the node."""
    return read.handle.placements[-1].node.memory


def _memory_key(request: LiveRequest, read: AffixRead) -> tuple[str, int]:
    """Under which a span's node remembers importance: what was measured, over how many of its tokens."""
    assert request.reuse is not None
    return request.reuse.policy.needs, len(read)


def _read(handle: SpanHandle, part: SpanPart, no_share: int | None) -> AffixRead:
    local = np.arange(part.first, len(handle))
    if no_share is not None:
        local = local[local + handle.start != no_share]
    return AffixRead(handle, local)


def _encode_entry(order: Encode) -> Entry:
    tokens = order.tokens.astype(np.int64)
    positions = np.arange(order.start, order.start + len(tokens))
    return silent_entry(tokens, positions, order.slots, np.concatenate([order.ancestor_slots, order.slots]))


def _probe_entry(request: LiveRequest, base: int) -> tuple[Entry, list[ProbeRows]]:
    """The probe's entry, whose rows start at ``base`` of the step, and one target a span."""
    state, reuse = request.state, request.reuse
    assert state is not None
    assert reuse is not None
    positions = state.recompute_positions
    masks = np.flatnonzero(state.canvas.masked)
    entry = silent_entry(
        state.canvas.tokens[positions], positions, state.write_slot_map[positions], state.attended_slots
    )
    queries = np.searchsorted(positions, masks) + base
    targets = [
        ProbeRows(queries, read.shared_slots, np.searchsorted(positions, read.positions) + base)
        for read in reuse.reads
    ]
    return entry, targets


def _probe_rows(request: LiveRequest) -> int:
    assert request.state is not None
    return len(request.state.recompute_positions)


def _per_request(scores: np.ndarray, lengths: Sequence[int], requests: Sequence[LiveRequest]) -> list[list[np.ndarray]]:
    """Scores float32 ``[L]`` of every span of every request, in the order of the scorer's probes."""
    bounds = indptr(lengths)
    parts = iter([scores[a:b] for a, b in pairwise(bounds)])
    return [[next(parts) for _ in request.reuse.reads] for request in requests if request.reuse]
