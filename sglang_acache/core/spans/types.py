"""Words of the span core: tokens in, matches and work orders out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.int32]
SlotArray = npt.NDArray[np.int64]
Source = Literal["declared", "discovered", "request"]


class State(Enum):
    """Life of a placement: slots reserved, being written by the runner, readable."""

    UNENCODED = "unencoded"
    ENCODING = "encoding"
    READY = "ready"


class SpanNameTaken(ValueError):
    """The name is already declared in this name space for other tokens."""


@dataclass(frozen=True, eq=False)
class Segment:
    """A run of prompt tokens without masks: ``tokens[i]`` stands at canvas position ``start + i``.

    The left and the right context of a canvas are two segments; no span crosses from one into the other.
    """

    tokens: TokenArray
    start: int = 0


@dataclass(frozen=True, eq=False)
class SpanMatch:
    """Canvas positions [start, start + length) hold tokens that the tree knows. Only a claim: it locks nothing.

    declared: how many leading tokens are covered by whole declared nodes.
    ready / rebase / encode: tokens that can be read now, copied from another offset, or must be forwarded.
    exact: a span that the request named by its offsets (source "request").
    """

    namespace: str
    tokens: TokenArray
    start: int
    declared: int
    source: Source
    name: str
    ready: int
    rebase: int
    encode: int
    exact: bool = False

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def claimed(self) -> bool:
        """Whether it must be read if it can be, so that answers do not depend on what others read. What was discovered
        may be passed over for want of room: when it was found depended on others anyway."""
        return self.source != "discovered"


@dataclass(frozen=True, eq=False)
class SpanPart:
    """The tokens of ``match`` from ``first`` on: judged, acquired and given anchors on an account of their own.

    What stands before ``first`` is another part's; this one only attends to it.
    """

    match: SpanMatch
    first: int = 0

    @property
    def length(self) -> int:
        return self.match.length - self.first


@dataclass(frozen=True, eq=False)
class Encode:
    """Forward ``tokens`` (int32[n]) at positions ``start ..``, store K/V in ``slots`` (int64[n]).

    Queries see ``ancestor_slots`` (int64[m], positions ``start - m ..``) and ``slots``, nothing else. The ancestors
    are READY or are written by an earlier order of the same list: orders of one list may share one ragged
    forward, because attention stores a layer's K/V before it reads them.
    """

    ticket: int
    tokens: TokenArray
    start: int
    slots: SlotArray
    ancestor_slots: SlotArray


@dataclass(frozen=True, eq=False)
class Rebase:
    """Copy K/V of every layer from ``src_slots`` to ``dst_slots`` (int64[n]), keys rotated by ``delta`` positions."""

    ticket: int
    src_slots: SlotArray
    dst_slots: SlotArray
    delta: int


WorkOrder = Encode | Rebase


@dataclass(frozen=True)
class SpanInfo:
    """One known span, for listings. ``length`` counts the whole path; ``slots`` what its last node holds."""

    name: str
    namespace: str
    source: Source
    length: int
    pinned: bool
    readers: int
    hits: int
    placements: int
    encoded_tokens: int
    slots: int


@dataclass(frozen=True)
class Usage:
    """Tokens (= slots) by owner: ``used == evictable + protected + detached``."""

    used: int
    evictable: int
    protected: int
    detached: int
    pinned: int  # of the protected ones: homes of pinned nodes
    spans: int
    nodes: int
    placements: int  # attached ones that can be read
    evicted: int  # tokens, since the start
    evictions: int  # placements, since the start


def as_tokens(tokens: Sequence[int] | npt.NDArray[Any]) -> TokenArray:
    """Token ids as int32[n]. ValueError unless they are one-dimensional integers that fit."""
    array = np.asarray(tokens)
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"token ids must be a sequence of integers, not {array.dtype}{array.shape}")
    if array.dtype == np.int32:
        return array
    if array.min() < 0 or array.max() > np.iinfo(np.int32).max:
        raise ValueError("token ids must lie in [0, 2**31)")
    return array.astype(np.int32)


def common_prefix(a: TokenArray, b: TokenArray) -> int:
    """Length of the common prefix; looks at 32 tokens first, so that early divergence is cheap."""
    limit = min(len(a), len(b))
    done, step = 0, 32
    while done < limit:
        stop = min(limit, done + step)
        differ = a[done:stop] != b[done:stop]
        at = int(differ.argmax())
        if differ[at]:
            return done + at
        done, step = stop, step * 8
    return limit
