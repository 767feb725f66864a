"""Which known spans stand in a prompt, and where."""

from __future__ import annotations

import hashlib
import heapq
from bisect import bisect_right, insort
from dataclasses import dataclass

from sglang_acache.core.spans.node import Layer, Node, follow
from sglang_acache.core.spans.shape import Space
from sglang_acache.core.spans.types import Segment, Source, SpanMatch, State, TokenArray


@dataclass(frozen=True, eq=False)
class Reach:
    """How far the tree knows ``tokens`` from their first one: ``length`` tokens, of which ``nodes`` whole.

    What is left after the nodes is a part of an edge, to be cut (FREE) or copied to a FREE edge (DECLARED).
    """

    nodes: tuple[Node, ...]
    declared: int
    length: int

    def cut(self, room: int) -> int:
        """The longest length of whole nodes that fits into ``room``."""
        done = 0
        for node in self.nodes:
            if done + len(node.tokens) > room:
                break
            done += len(node.tokens)
        return done


def reach_declared(space: Space, tokens: TokenArray) -> Reach:
    walk = follow(space.root, tokens, Layer.DECLARED)
    return Reach(walk.nodes, walk.whole, walk.whole)


def reach(space: Space, tokens: TokenArray, min_tail: int) -> Reach:
    """Declared edges as long as they match whole, then undeclared ones.

    The last edge may match in part only; it counts from ``min_tail`` tokens on, since cutting it costs an encoding.
    """
    declared = follow(space.root, tokens, Layer.DECLARED)
    last = declared.nodes[-1] if declared.nodes else space.root
    free = follow(last, tokens[declared.whole :], Layer.FREE)
    tail = free.tail if free.tail >= min_tail else 0
    declared_tail = declared.tail if declared.tail >= min_tail else 0
    length = declared.whole + max(free.whole + tail, declared_tail)
    return Reach(declared.nodes + free.nodes, declared.whole, length)


def find(space: Space, segment: Segment, min_tokens: int, declared_only: bool = False) -> list[SpanMatch]:
    """Non-overlapping matches in one segment, in order of position.

    Declared spans choose first, among themselves, longest first; undeclared ones get what is left: they
    extend a declared path to its right, or begin in a gap. Hence a declared span is matched exactly as if
    nothing had been discovered. Longest first, because one long span keeps more of its own context, has fewer
    edges and needs fewer anchors than several short ones over the same tokens; ties go to the left.
    """
    tokens = segment.tokens
    starts = space.index.candidates(tokens)
    starts = starts[: 48 + len(tokens) // 32]  # only periodic text has more; it must not cost more
    found = [(at, reach_declared(space, tokens[at:])) for at in starts]
    chosen = _longest_first([(at, r) for at, r in found if r.length >= min_tokens], min_tokens)
    if not declared_only:
        edges = sorted(chosen)
        chosen = {at: _best(space, tokens, at, edges, min_tokens).length for at in chosen}
        found = [(at, _best(space, tokens, at, edges, min_tokens)) for at in starts if at not in chosen]
        chosen |= _longest_first([(at, r) for at, r in found if r.length >= min_tokens], min_tokens, chosen)
    return [describe(space, tokens[at : at + n], segment.start + at) for at, n in sorted(chosen.items())]


def _best(space: Space, tokens: TokenArray, at: int, edges: list[int], min_tail: int) -> Reach:
    """Reach from ``at``, not beyond the next declared match."""
    following = bisect_right(edges, at)
    stop = edges[following] if following < len(edges) else len(tokens)
    return reach(space, tokens[at:stop], min_tail)


def _longest_first(
    found: list[tuple[int, Reach]], min_tokens: int, taken: dict[int, int] | None = None
) -> dict[int, int]:
    """Choose among candidates: start -> length. A loser may still serve its whole nodes before the winner."""
    spans = dict(taken or {})
    starts = sorted(spans)
    chosen: dict[int, int] = {}
    heap = [(-r.length, at, i) for i, (at, r) in enumerate(found)]
    heapq.heapify(heap)
    while heap:
        size, at, i = heapq.heappop(heap)
        k = bisect_right(starts, at)
        if k and starts[k - 1] + spans[starts[k - 1]] > at:
            continue
        room = starts[k] - at if k < len(starts) else -size
        if -size > room:
            shorter = found[i][1].cut(room)
            if shorter >= min_tokens:
                heapq.heappush(heap, (-shorter, at, i))
            continue
        chosen[at] = spans[at] = -size
        insort(starts, at)
    return chosen


def describe(space: Space, tokens: TokenArray, start: int, exact: Node | None = None) -> SpanMatch:
    """The match with what it would cost now."""
    known = reach(space, tokens, 1) if exact is None else Reach((exact,), 0, len(tokens))
    cost = {"ready": 0, "rebase": 0}
    for node in known.nodes:
        here = node.placements.get(start)
        if here is not None and here.state is State.READY:
            cost["ready"] += len(node.tokens)
        elif node.home() is not None:
            cost["rebase"] += len(node.tokens)
    source: Source = "request" if exact else "declared" if known.declared else "discovered"
    return SpanMatch(
        namespace=space.name,
        tokens=tokens,
        start=start,
        declared=known.declared,
        source=source,
        name=_name(known, tokens),
        encode=len(tokens) - sum(cost.values()),
        exact=exact is not None,
        **cost,
    )


def _name(known: Reach, tokens: TokenArray) -> str:
    """Of the longest declared span on the path; otherwise made of the tokens."""
    declared = [min(node.declarations) for node in known.nodes if node.declarations]
    return declared[-1] if declared else auto_name(tokens)


def auto_name(tokens: TokenArray) -> str:
    return "auto-" + hashlib.blake2b(tokens.tobytes(), digest_size=6).hexdigest()
