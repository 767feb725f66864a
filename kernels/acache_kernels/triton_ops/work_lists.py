"""What each program of the Triton attention does: lists made on the host, once per step.

    requests     -> tiles of packed rows (query x head of the group), by tile class
    few tiles    -> their keys are split in ranges of SPLIT_KEYS, merged by a second launch

Class and split depend on a request's own shape alone, so its result does not depend on its batch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from acache_kernels.layout import RaggedLayout
from acache_kernels.static_plan import StaticCapacity

SPLIT_KEYS = 512
"""Keys per range when a request's keys are split."""
SPLIT_TILES = 2
"""Requests with at most this many tiles (per key head) have their keys split."""

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


class Requests(NamedTuple):
    """Requests of a step, arrays int64 [B]: where their queries and keys are, in rows of q and of kv_indices."""

    first_query: Int64
    num_rows: Int64  # packed rows: queries x query heads of a key head
    first_key: Int64
    num_keys: Int64

    @classmethod
    def of(cls, layout: RaggedLayout, group: int) -> "Requests":
        first_query = np.cumsum(layout.qo_lens) - layout.qo_lens
        first_key = np.cumsum(layout.kv_lens) - layout.kv_lens
        return cls(first_query, layout.qo_lens * group, first_key, layout.kv_lens)

    def take(self, index: Int64) -> "Requests":
        return Requests(*(column[index] for column in self))

    def with_padding(self, rows: int, first_query: int, group: int, key: int) -> "Requests":
        """One more request: `rows` queries that attend to the entry `key` of kv_indices. Without rows, as it is."""
        if rows == 0:
            return self
        return Requests(*(np.append(c, x) for c, x in zip(self, (first_query, rows * group, key, 1), strict=True)))


class WorkLists(NamedTuple):
    """The work of one tile class; fields as `attention_kernels.py` reads them."""

    work: Int32  # [W, 6]: first query, packed rows, tile, first key, keys, part
    merges: Int32  # [T, 5]: first query, packed rows, tile, first part, parts
    num_parts: int


def by_class(requests: Requests, block_sizes: Sequence[int]) -> list[Requests]:
    """Requests that have rows, by the smallest tile class that holds all of them, else the largest class."""
    chosen = np.minimum(np.searchsorted(np.array(block_sizes), requests.num_rows), len(block_sizes) - 1)
    members = [np.flatnonzero((chosen == i) & (requests.num_rows > 0)) for i in range(len(block_sizes))]
    return [requests.take(index) for index in members]


def work_lists(requests: Requests, block_m: int) -> WorkLists:
    first_query, num_rows, first_key, num_keys = requests
    num_tiles = -(-num_rows // block_m)
    num_splits = np.where(num_tiles <= SPLIT_TILES, -(-num_keys // SPLIT_KEYS), 1)

    # one line per (request, tile)
    owner = np.repeat(np.arange(len(num_rows)), num_tiles)
    tile = _within(num_tiles) * block_m
    parts = np.where(num_splits[owner] > 1, num_splits[owner], 0)
    first_part = np.cumsum(parts) - parts
    merges = np.stack((first_query[owner], num_rows[owner], tile, first_part, parts), axis=1)

    # one line per (request, tile, range of keys)
    splits = num_splits[owner]
    line = np.repeat(np.arange(len(owner)), splits)
    split = _within(splits)
    own = owner[line]
    whole = splits[line] == 1
    start = split * SPLIT_KEYS
    keys = np.where(whole, num_keys[own], np.minimum(SPLIT_KEYS, num_keys[own] - start))
    part = np.where(whole, -1, first_part[line] + split)
    columns = (first_query[own], num_rows[own], tile[line], first_key[own] + start, keys, part)
    work = np.stack(columns, axis=1)
    return WorkLists(work.astype(np.int32), merges[parts > 0].astype(np.int32), int(parts.sum()))


class Bounds(NamedTuple):
    """The most lines that one tile class can have, whatever the step."""

    work: int
    merges: int
    parts: int


def bounds(capacity: StaticCapacity, group: int, block_m: int, *, last: bool) -> Bounds:
    """Of steps that fit `capacity`, padding included; `last`: the largest class in use, the only one with many tiles.

    A request's keys make at most keys / SPLIT_KEYS + 1 ranges, for each of at most SPLIT_TILES tiles. Requests with
    more tiles are not split: their tiles, and those of the padding, are at most rows / block_m, and one over for each.
    """
    ranges = capacity.keys // SPLIT_KEYS + capacity.requests
    if not last:  # one tile a request, no padding
        return Bounds(ranges, capacity.requests, ranges)
    tiles = min(SPLIT_TILES, -(-capacity.longest * group // block_m))
    parts = tiles * ranges
    return Bounds(parts + capacity.queries * group // block_m + 1, tiles * capacity.requests, parts)


def _within(counts: Int64) -> Int64:
    """0, 1, .. counts[0] - 1, 0, 1, .. counts[1] - 1, .."""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
