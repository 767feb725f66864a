"""Where in a prompt a known span may begin."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sglang_acache.core.spans.hashing import HashArray, window_hashes
from sglang_acache.core.spans.types import TokenArray

_MIN_BITS = 10
_LOAD = 16  # buckets per key: one position in 16 passes the filter by chance at the most


class SpanIndex:
    """The first ``width`` tokens of every known span (a multiset), as a filter over all positions of a prompt.

    Any run of at least ``width`` tokens that follows a known span from its first token begins at a candidate.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self._counts: dict[int, int] = {}
        self._rebuild(_MIN_BITS)

    def __len__(self) -> int:
        return sum(self._counts.values())

    def counts(self) -> dict[int, int]:
        return dict(self._counts)

    def key(self, tokens: TokenArray) -> int | None:
        """Hash of the first window; None when the span is shorter, which means that it is never served."""
        hashes = window_hashes(tokens[: self.width], self.width)
        return int(hashes[0]) if len(hashes) else None

    def add(self, tokens: TokenArray) -> None:
        key = self.key(tokens)
        if key is None:
            return
        self._counts[key] = self._counts.get(key, 0) + 1
        if self._counts[key] == 1:
            self._filter[key & self._mask] += 1
            if len(self._counts) * _LOAD > self._mask + 1:
                self._rebuild((self._mask + 1).bit_length() + 1)

    def discard(self, tokens: TokenArray) -> None:
        key = self.key(tokens)
        if key is None:
            return
        self._counts[key] -= 1
        if self._counts[key] == 0:
            del self._counts[key]
            self._filter[key & self._mask] -= 1

    def candidates(self, tokens: TokenArray) -> list[int]:
        """Ascending positions i at which tokens[i : i + width] is the beginning of a known span (by hash)."""
        if not self._counts:
            return []
        hashes = window_hashes(tokens, self.width)
        at = np.flatnonzero(self._filter[self._buckets(hashes)])
        return [i for i, key in zip(at.tolist(), hashes[at].tolist(), strict=True) if key in self._counts]

    def _buckets(self, hashes: HashArray) -> npt.NDArray[np.int64]:
        return (hashes & np.uint64(self._mask)).astype(np.int64)

    def _rebuild(self, bits: int) -> None:
        self._mask = (1 << bits) - 1
        keys = np.fromiter(self._counts, np.uint64, len(self._counts))
        self._filter = np.bincount(self._buckets(keys), minlength=1 << bits).astype(np.uint32)
