"""Recent prompts, and the runs of tokens that a new prompt has in common with them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sglang_acache.core.spans.hashing import window_for, window_hashes
from sglang_acache.core.spans.types import TokenArray, common_prefix

_LONGEST_PERIOD = 8
_WIDEST_CHOICE = 64
_NEVER = np.uint64(2**64 - 1)


@dataclass(eq=False)
class Document:
    """A segment of an earlier prompt. ``seen[i]``: in how many distinct requests, this one included, token i
    stood within a common run, as far as known."""

    namespace: str
    request: str | None
    tokens: TokenArray
    seen: npt.NDArray[np.int32]
    keys: list[int]


@dataclass(frozen=True, eq=False)
class Run:
    """tokens[start:stop] stand in an earlier document too, whose ``seen`` there is copied."""

    start: int
    stop: int
    seen: npt.NDArray[np.int32]


@dataclass(eq=False)
class _Postings:
    """Fingerprint -> the latest document that has it, and where."""

    latest: dict[int, tuple[Document, int]] = field(default_factory=dict)


Marks = tuple[list[int], list[int]]  # positions and hashes of the chosen windows


def fingerprints(tokens: TokenArray, min_tokens: int) -> Marks:
    """Positions and hashes of chosen windows: the smallest hash of any min_tokens - width + 1 neighbours
    (winnowing), so that two prompts with a common run of min_tokens have a chosen window in common there.
    About one position in (min_tokens - width) / 2. Windows within text of a period of up to 8 tokens are
    never chosen: they would be found everywhere and say nothing."""
    hashes = window_hashes(tokens, window_for(min_tokens))
    if not len(hashes):
        return [], []
    periodic = np.zeros(len(hashes), bool)
    for period in range(1, min(_LONGEST_PERIOD, len(hashes) - 1) + 1):
        same = hashes[period:] == hashes[:-period]
        periodic[period:] |= same
        periodic[:-period] |= same
    hashes = np.where(periodic, _NEVER, hashes)
    choice = min(min_tokens - window_for(min_tokens) + 1, _WIDEST_CHOICE, len(hashes))
    rows = np.lib.stride_tricks.sliding_window_view(hashes, choice)
    chosen = rows.argmin(axis=1) + np.arange(len(rows))  # never falls: the leftmost of equals
    chosen = chosen[np.flatnonzero(np.diff(chosen, prepend=-1))]
    chosen = chosen[hashes[chosen] != _NEVER]
    return chosen.tolist(), hashes[chosen].tolist()


class RecentPrompts:
    """Bounded memory of documents: at most ``max_tokens`` tokens, least recently useful first out."""

    def __init__(self, min_tokens: int, max_tokens: int) -> None:
        self.min_tokens = min_tokens
        self.max_tokens = max_tokens
        self.tokens_held = 0
        self._documents: OrderedDict[Document, None] = OrderedDict()
        self._spaces: dict[str, _Postings] = {}

    def __len__(self) -> int:
        return len(self._documents)

    def marks(self, tokens: TokenArray) -> Marks:
        """What ``runs`` and ``add`` look at."""
        return fingerprints(tokens, self.min_tokens)

    def runs(self, namespace: str, request: str | None, tokens: TokenArray, marks: Marks) -> list[Run]:
        """Maximal common runs with earlier documents of other requests. A bounded number of comparisons,
        whatever the text: a fingerprint inside a run already found against the same document is not followed
        again."""
        space = self._spaces.get(namespace)
        if space is None:
            return []
        found: list[Run] = []
        done: dict[Document, int] = {}
        tries = 32 + len(tokens) // 64
        for at, key in zip(*marks, strict=True):
            document, there = space.latest.get(key, (None, 0))
            if document is None or at < done.get(document, 0):
                continue
            if request is not None and document.request == request:
                continue
            start, stop, there = _extend(tokens, at, document.tokens, there)
            done[document] = stop
            if stop - start >= self.min_tokens:
                found.append(Run(start, stop, document.seen[there : there + stop - start].copy()))
                self._documents.move_to_end(document)
            tries -= 1
            if not tries:
                break
        return found

    def add(
        self, namespace: str, request: str | None, tokens: TokenArray, seen: npt.NDArray[np.int32], marks: Marks
    ) -> None:
        """Remember a document; only its head if it alone would take more than half of the memory."""
        if len(tokens) > self.max_tokens // 2:
            tokens, seen = tokens[: self.max_tokens // 2], seen[: self.max_tokens // 2]
            marks = self.marks(tokens)
        positions, keys = marks
        if not keys:
            return
        document = Document(namespace, request, tokens.copy(), seen.copy(), keys)
        self._documents[document] = None
        self.tokens_held += len(tokens)
        latest = self._spaces.setdefault(namespace, _Postings()).latest
        latest.update((key, (document, at)) for key, at in zip(keys, positions, strict=True))
        while self.tokens_held > self.max_tokens:
            self._drop(next(iter(self._documents)))

    def forget(self, namespace: str | None = None) -> None:
        for document in list(self._documents):
            if namespace is None or document.namespace == namespace:
                self._drop(document)

    def _drop(self, document: Document) -> None:
        del self._documents[document]
        self.tokens_held -= len(document.tokens)
        latest = self._spaces[document.namespace].latest
        for key in document.keys:
            if key in latest and latest[key][0] is document:
                del latest[key]
        if not latest:
            del self._spaces[document.namespace]


def _extend(tokens: TokenArray, at: int, other: TokenArray, there: int) -> tuple[int, int, int]:
    """The maximal common run around tokens[at] and other[there]: start and stop in ``tokens``, start in ``other``."""
    right = common_prefix(tokens[at:], other[there:])
    left = common_prefix(tokens[:at][::-1], other[:there][::-1])
    return at - left, at + right, there - left
