"""The ragged batch: one forward over any mix of query sets, as one set of indptr arrays (host side).

An entry is one request's (or one span's) share of the step: which positions are queries, where their K/V is stored,
which slots they attend to, and which rows need logits. The arrays are built once per step and shared by all layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_acache.core.request import DiffusionRequest
from sglang_acache.core.seeds import row_seeds
from sglang_acache.core.shift import logit_positions


@dataclass(frozen=True, slots=True)
class Entry:
    """One ragged entry; all arrays int64.

    ``tokens``, ``positions``, ``write_slots`` ``[q]``; ``read_slots`` ``[k]``; ``logit_rows`` ``[m]`` are rows of this
    entry's queries whose logits predict ``masked_positions`` ``[m]``.
    """

    tokens: np.ndarray
    positions: np.ndarray
    write_slots: np.ndarray
    read_slots: np.ndarray
    logit_rows: np.ndarray
    masked_positions: np.ndarray


_NONE = np.empty(0, dtype=np.int64)


def denoise_entry(request: DiffusionRequest) -> Entry:
    """The entry of a request's next denoising step."""
    positions = request.query_positions()
    masked = request.canvas.masked_positions()
    rows = np.searchsorted(positions, logit_positions(masked, request.shift_logits))
    return Entry(
        tokens=request.canvas.tokens[positions],
        positions=positions,
        write_slots=request.write_slot_map[positions],
        read_slots=request.attended_slots,
        logit_rows=rows,
        masked_positions=masked,
    )


def silent_entry(
    tokens: np.ndarray, positions: np.ndarray, write_slots: np.ndarray, read_slots: np.ndarray
) -> Entry:
    """An entry that only stores K/V (a span's encoding, a probe): no logits."""
    return Entry(tokens, positions, write_slots, read_slots, _NONE, _NONE)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The concatenated entries. ``qo_indptr``, ``kv_indptr``, ``row_indptr`` int64 ``[B + 1]``."""

    entries: Sequence[Entry]
    tokens: np.ndarray  # [N]
    positions: np.ndarray  # [N]
    write_slots: np.ndarray  # [N]
    read_slots: np.ndarray  # [sum k]
    logit_rows: np.ndarray  # [M], rows of the N queries
    qo_indptr: np.ndarray
    kv_indptr: np.ndarray
    row_indptr: np.ndarray


def build_plan(entries: Sequence[Entry]) -> StepPlan:
    """Concatenate ``entries`` (at least one)."""
    qo_indptr = indptr(len(entry.positions) for entry in entries)
    return StepPlan(
        entries=entries,
        tokens=np.concatenate([entry.tokens for entry in entries]),
        positions=np.concatenate([entry.positions for entry in entries]),
        write_slots=np.concatenate([entry.write_slots for entry in entries]),
        read_slots=np.concatenate([entry.read_slots for entry in entries]),
        logit_rows=np.concatenate([entry.logit_rows + base for entry, base in zip(entries, qo_indptr, strict=False)]),
        qo_indptr=qo_indptr,
        kv_indptr=indptr(len(entry.read_slots) for entry in entries),
        row_indptr=indptr(len(entry.logit_rows) for entry in entries),
    )


def indptr(lengths: Iterable[int]) -> np.ndarray:
    """int64 ``[B + 1]``: running sums of ``lengths``, from 0."""
    sizes = np.fromiter(lengths, dtype=np.int64)
    out = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=out[1:])
    return out


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Per logits row: how its token is drawn. Arrays ``[M]``."""

    temperature: np.ndarray  # float32
    top_k: np.ndarray  # int64, 0 = all
    top_p: np.ndarray  # float32
    seed: np.ndarray  # int64
    rule: list[str]


def row_sampling(requests: Sequence[DiffusionRequest], entries: Sequence[Entry]) -> RowSampling:
    """Spread each request's sampling over its rows; ``requests`` and ``entries`` correspond one to one."""
    counts = [len(entry.logit_rows) for entry in entries]
    each = [request.sampling for request in requests]
    seeds = [
        row_seeds(request.sampling.seed, entry.masked_positions, request.forward_passes)
        for request, entry in zip(requests, entries, strict=True)
    ]
    rules: list[str] = []
    for request, count in zip(requests, counts, strict=True):
        rules += [request.params.remasking] * count
    return RowSampling(
        temperature=np.repeat(np.array([s.temperature for s in each], dtype=np.float32), counts),
        top_k=np.repeat(np.array([s.top_k for s in each], dtype=np.int64), counts),
        top_p=np.repeat(np.array([s.top_p for s in each], dtype=np.float32), counts),
        seed=np.concatenate(seeds) if seeds else _NONE,
        rule=rules,
    )


def within_budget(requests: Sequence[DiffusionRequest], budget: int, spent: int = 0) -> list[DiffusionRequest]:
    """Requests that take part in a step of about ``budget`` forwarded tokens, ``spent`` of them already.

    ``requests`` come longest waiting first. Steps inside a block go while they fit; then the longest waiting block
    start goes whatever its size, and further ones while they fit. The longest waiting request of all always goes, so
    that nothing waits for ever.
    """
    chosen: list[DiffusionRequest] = []
    starts = [request for request in requests if request.at_block_start]
    for request in requests:
        if request.at_block_start:
            continue
        size = len(request.query_positions())
        if spent + size <= budget or request is requests[0]:
            chosen.append(request)
            spent += size
    for request in starts:
        size = len(request.query_positions())
        if spent + size <= budget or request is starts[0]:
            chosen.append(request)
            spent += size
    return chosen
