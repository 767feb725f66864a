"""The span tree: shared K/V of token spans, found anywhere in a prompt, read by many requests at once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy.typing as npt

from sglang_acache.core.spans import integrity, listing, matching
from sglang_acache.core.spans.handle import SpanHandle
from sglang_acache.core.spans.hashing import window_for
from sglang_acache.core.spans.index import SpanIndex
from sglang_acache.core.spans.ledger import Ledger
from sglang_acache.core.spans.node import AnchorOverride, ChildKey, Layer, Node, Placement, follow
from sglang_acache.core.spans.pool import SlotPool
from sglang_acache.core.spans.shape import Shape, Space
from sglang_acache.core.spans.types import (
    Segment,
    Source,
    SpanInfo,
    SpanMatch,
    SpanPart,
    TokenArray,
    Usage,
    WorkOrder,
    as_tokens,
)
from sglang_acache.core.spans.work import WorkBook

Tokens = Sequence[int] | npt.NDArray[Any]


class SpanTree:
    """A radix tree per name space over the token ids of known spans.

    Host side only: it decides and accounts, the caller's runner forwards and copies. Not thread-safe.

    pool: where shared slots come from, the same pool as the private ones.
    min_tokens: no shorter match is ever served; also fixes the window of the index.
    max_shared_tokens: cap on shared slots, detached ones included.
    max_spans: cap on undeclared spans known; the least recently used ones are forgotten.
    """

    def __init__(
        self,
        pool: SlotPool,
        *,
        min_tokens: int = 32,
        max_shared_tokens: int | None = None,
        max_spans: int = 20_000,
    ) -> None:
        self.min_tokens = min_tokens
        self.max_spans = max_spans
        self.ledger = Ledger(pool, max_shared_tokens)
        self.shape = Shape(self.ledger)
        self.work = WorkBook(self.ledger)
        self.spaces: dict[str, Space] = {}
        self.handles: dict[int, SpanHandle] = {}
        self._window = window_for(min_tokens)
        self._serial = 0

    # ---- what is known -------------------------------------------------------------------------------------

    def declare(self, namespace: str, tokens: Tokens, name: str | None = None, pinned: bool = False) -> str:
        """Make a span known under a name (by default made of its tokens) and return the name.

        Declaring it again with the same tokens sets ``pinned``. Nothing is encoded before it is acquired.
        Pinned means that the home of every node on the path, once encoded, is not evicted (copies at other
        offsets are). Raises SpanNameTaken for other tokens, ValueError without tokens.
        """
        ids = self._non_empty(tokens)
        name = name or "span-" + hashlib.blake2b(ids.tobytes(), digest_size=6).hexdigest()
        self.shape.declare(self._space(namespace), ids, name, pinned)
        return name

    def insert(self, namespace: str, tokens: Tokens) -> None:
        """Make a discovered span known: its beginning follows existing nodes, the rest becomes a child."""
        self.shape.insert(self._space(namespace), self._non_empty(tokens))
        self._forget_oldest()

    def remove(self, namespace: str, name: str) -> None:
        """Forget a declaration, and its K/V when no other declaration covers it. KeyError if unknown.

        Readers are not disturbed. The rest of the tree takes the shape that the remaining declarations give.
        """
        space = self.spaces.get(namespace)
        if space is None or name not in space.names:
            raise KeyError(f"no span {name!r} is declared in name space {namespace!r}")
        self.shape.undeclare(space, name)
        self._drop_if_empty(space)

    def flush(self, namespace: str | None = None) -> None:
        """Drop all K/V and all undeclared spans; what has readers is detached and freed by the last of them.
        Declared spans stay known. Pins do not protect from a flush."""
        for space in list(self.spaces.values()):
            if namespace is None or space.name == namespace:
                self.ledger.retire_all(space.root)
                self.shape.clear_undeclared(space)
                self._drop_if_empty(space)

    def spans(
        self, namespace: str | None = None, *, source: Source | None = None, limit: int | None = None
    ) -> list[SpanInfo]:
        """Known spans: one entry per declared name, one per undeclared end; with ``limit`` those most in use."""
        spaces = [s for s in self.spaces.values() if namespace is None or s.name == namespace]
        return listing.spans(spaces, source, limit)

    # ---- what a prompt contains ----------------------------------------------------------------------------

    def match(
        self,
        namespace: str,
        segments: Sequence[Segment],
        *,
        min_tokens: int | None = None,
        declared_only: bool = False,
    ) -> list[SpanMatch]:
        """Non-overlapping known spans of at least ``min_tokens`` in each segment, in order; see ``matching.find``.

        Changes nothing and locks nothing. ValueError if ``min_tokens`` is below the tree's.
        """
        least = self.min_tokens if min_tokens is None else min_tokens
        if least < self.min_tokens:
            raise ValueError(f"min_tokens must be at least the tree's {self.min_tokens}, not {least}")
        space = self.spaces.get(namespace)
        if space is None:
            return []
        found: list[SpanMatch] = []
        for segment in segments:
            part = Segment(as_tokens(segment.tokens), segment.start)
            found += matching.find(space, part, least, declared_only)
        return found

    def parts(self, match: SpanMatch) -> list[SpanPart]:
        """The declared beginning of a match, and apart from it what was discovered behind.

        Each is read on its own account, so that the declared tokens get as many anchors as they would get if nothing
        had been discovered. Neither is shorter than ``min_tokens``: a shorter tail is left out, and a path whose
        declared beginning alone would not be served is a discovered one.
        """
        space = self.spaces.get(match.namespace)
        if space is None or not 0 < match.declared < match.length:
            return [SpanPart(match)]
        found = replace(match, source="discovered", name=matching.auto_name(match.tokens))
        if match.declared < self.min_tokens:
            return [SpanPart(found)]
        head = SpanPart(matching.describe(space, match.tokens[: match.declared], match.start))
        tail = SpanPart(found, match.declared)
        return [head, tail] if tail.length >= self.min_tokens else [head]

    def request_span(self, namespace: str, tokens: Tokens, start: int) -> SpanMatch:
        """A span that a request names by its offsets, of any length.

        It is a declared path if the tokens are exactly one; otherwise it stands for itself, so that what it
        answers does not depend on anything else that is known.
        """
        ids = self._non_empty(tokens)
        space = self._space(namespace)
        if matching.reach_declared(space, ids).length == len(ids):
            return matching.describe(space, ids, start)
        node = self.shape.insert_exact(space, ids)
        self._forget_oldest(keep=node)
        return matching.describe(space, ids, start, exact=node)

    def locate(self, namespace: str, tokens: Tokens, start: int = 0) -> SpanMatch | None:
        """The whole of ``tokens`` as one match at ``start`` (e.g. to encode a promoted span ahead of its next
        reader); None if the tree does not know all of it."""
        ids = self._non_empty(tokens)
        space = self.spaces.get(namespace)
        if space is None or matching.reach(space, ids, 1).length < len(ids):
            return None
        return matching.describe(space, ids, start)

    # ---- reading -------------------------------------------------------------------------------------------

    def acquire(self, match: SpanMatch) -> SpanHandle | None:
        """Lock the span for reading at its offset; cuts an edge if the match ends inside one.

        None, and nothing is locked, if there is no room for its slots even after evicting all that may be evicted, or
        if the tree no longer knows the tokens. The caller then treats the span as ordinary prompt text.
        """
        space = self.spaces.get(match.namespace)
        if space is None or not self._knows(space, match) or not self._fits(space, match):
            return None
        path = self._path(space, match)
        placements = self._lock_path(path, match.start)
        if placements is None:
            return None
        now = self.ledger.tick()
        for node, placement in zip(path, placements, strict=True):
            node.last_access = now
            self.ledger.touch(placement, now)
        self._serial += 1
        handle = self.handles[self._serial] = SpanHandle(self._serial, match, tuple(placements))
        self._forget_oldest()
        return handle

    def begin_work(self, handle: SpanHandle) -> list[WorkOrder]:
        """Take over the work that the handle still needs and that can be done now; see ``WorkBook.begin``.

        Every order must be settled with ``mark_ready`` or ``mark_failed``. An empty list while ``handle.ready`` is
        False means: another handle's orders come first, ask again after they are settled.
        """
        return self.work.begin(handle)

    def mark_ready(self, order: WorkOrder) -> bool:
        """The slots are written. Settle the orders of a list in its order.

        False if they must not be read: the order was withdrawn by a release, or an order it builds on failed.
        """
        return self.work.settle(order, ok=True)

    def mark_failed(self, order: WorkOrder) -> bool:
        """The order was not carried out; whoever reads the placement may begin it again."""
        return self.work.settle(order, ok=False)

    def release(self, handle: SpanHandle) -> None:
        """Give the lock back, with the anchor overrides and any orders not settled. ValueError the second time.

        Call it between steps: an order that is being executed must be settled first, since its slots may be freed.
        """
        if self.handles.pop(handle.id, None) is not handle:
            raise ValueError(f"handle {handle.id} is not held")
        self.work.withdraw(handle)
        handle.released = True
        now = self.ledger.tick()
        for placement in reversed(handle.placements):
            placement.overrides.pop(handle.id, None)
            self.ledger.touch(placement, now)
            self.ledger.unlock(placement)

    def overrides(self, namespace: str, tokens: Tokens) -> list[dict[int, AnchorOverride]]:
        """Anchor overrides of present readers by handle id, one dict per node on the path of ``tokens``."""
        space = self.spaces.get(namespace)
        nodes = matching.reach(space, self._non_empty(tokens), 1).nodes if space else ()
        return [node.overrides() for node in nodes]

    # ---- memory --------------------------------------------------------------------------------------------

    def evict(self, n_tokens: int) -> int:
        """Free at least n tokens' slots if that many are evictable; returns how many. Spans stay known."""
        return self.ledger.evict(n_tokens)

    def usage(self) -> Usage:
        return listing.usage(self.ledger, self.shape, list(self.spaces.values()))

    def room_alone(self, *, shared: bool) -> int:
        """Slots that one request could hold if nobody else held any: all but pinned ones, within the cap if shared."""
        size, cap = self.ledger.size, self.ledger.max_shared_tokens
        return (min(size, cap) if shared and cap is not None else size) - self.ledger.pinned

    @property
    def evictable(self) -> int:
        """O(1), for the scheduler's memory check."""
        return self.ledger.evictable

    @property
    def protected(self) -> int:
        """O(1). Locked, pinned, and detached tokens: everything used that is not evictable."""
        return self.ledger.used - self.ledger.evictable

    @property
    def shared_slots_used(self) -> int:
        return self.ledger.used

    def check_integrity(self) -> None:
        """Add up every slot and every count. AssertionError naming the fault."""
        integrity.check(self)

    # ---- inside --------------------------------------------------------------------------------------------

    def _space(self, namespace: str) -> Space:
        if namespace not in self.spaces:
            self.spaces[namespace] = Space(namespace, SpanIndex(self._window))
        return self.spaces[namespace]

    def _drop_if_empty(self, space: Space) -> None:
        if not space.root.children:
            self.spaces.pop(space.name, None)

    @staticmethod
    def _non_empty(tokens: Tokens) -> TokenArray:
        ids = as_tokens(tokens)
        if not len(ids):
            raise ValueError("a span needs at least one token")
        return ids

    def _knows(self, space: Space, match: SpanMatch) -> bool:
        if match.exact:
            return _exact_key(match) in space.root.children
        return matching.reach(space, match.tokens, 1).length == match.length

    def _fits(self, space: Space, match: SpanMatch) -> bool:
        """Room is certain before an edge is cut, so that a refusal costs nobody any K/V."""
        exact = space.root.children[_exact_key(match)] if match.exact else None
        nodes = (exact,) if exact else matching.reach(space, match.tokens, 1).nodes
        here = [p for node in nodes if (p := node.placements.get(match.start))]
        missing = match.length - sum(len(p) for p in here)
        idle = sum(len(p) for p in here if not p.guards)  # evictable now, but not once they are locked
        return missing + idle <= self.ledger.headroom() or not missing

    def _path(self, space: Space, match: SpanMatch) -> list[Node]:
        """Nodes whose edges are exactly the match, root first; cuts and adds FREE edges where needed."""
        if match.exact:
            return [space.root.children[_exact_key(match)]]
        declared = follow(space.root, match.tokens, Layer.DECLARED)
        node = declared.nodes[-1] if declared.nodes else space.root
        if declared.whole < match.length:
            node = self.shape.insert(space, match.tokens)
        return node.path()

    def _lock_path(self, path: list[Node], start: int) -> list[Placement] | None:
        """Placements of the path at ``start``, locked. None, with nothing locked, when slots run out."""
        placements = [node.placements[start] for node in path if start in node.placements]
        for placement in placements:
            self.ledger.lock(placement)
        missing = path[len(placements) :]  # a child's placement implies its parent's
        if self.ledger.make_room(sum(len(node.tokens) for node in missing)):
            for node in missing:
                placement_or_none = self.ledger.open(node, start, placements[-1] if placements else None)
                if placement_or_none is None:
                    break
                placements.append(placement_or_none)
        if len(placements) == len(path):
            return placements
        for placement in reversed(placements):
            self.ledger.unlock(placement)
        return None

    def _forget_oldest(self, keep: Node | None = None) -> None:
        """Hold ``max_spans``: forget the least recently used undeclared leaves without readers, a tenth at a time."""
        excess = self.shape.undeclared - self.max_spans
        if excess <= 0:
            return
        leaves = [
            (node.last_access, i, space, node)
            for space in list(self.spaces.values())
            for i, node in enumerate(space.root.subtree())
            if node.end and node is not keep and not node.children and not node.held
        ]
        leaves.sort(key=lambda leaf: leaf[:2])
        for _, _, space, node in leaves[: excess + self.max_spans // 10]:
            self.shape.forget(space, node)
            self._drop_if_empty(space)


def _exact_key(match: SpanMatch) -> ChildKey:
    return (Layer.EXACT, match.tokens.tobytes())
