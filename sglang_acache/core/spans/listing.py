"""What is known and who holds how much, for people and metrics."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from sglang_acache.core.spans.ledger import Ledger
from sglang_acache.core.spans.matching import auto_name
from sglang_acache.core.spans.node import Node
from sglang_acache.core.spans.shape import Shape, Space
from sglang_acache.core.spans.types import Source, SpanInfo, State, Usage


def spans(spaces: Iterable[Space], source: Source | None = None, limit: int | None = None) -> list[SpanInfo]:
    """One entry per declared name, one per end of an undeclared span; of these the ``limit`` most in use, if given."""
    ends = [(space, node) for space in spaces for node in space.root.subtree() if node.is_end]
    if source is not None:
        ends = [(space, node) for space, node in ends if node.source == source]
    if limit is not None:
        ends = heapq.nlargest(limit, ends, key=lambda end: (end[1].readers, end[1].hits, end[1].last_access))
    infos = []
    for space, node in ends:
        names = dict(node.declarations)
        if node.end:
            names[auto_name(node.path_tokens())] = False
        infos += [_info(space, node, name, pinned) for name, pinned in names.items()]
    return infos[:limit]


def usage(ledger: Ledger, shape: Shape, spaces: Sequence[Space]) -> Usage:
    return Usage(
        used=ledger.used,
        evictable=ledger.evictable,
        protected=ledger.protected,
        detached=ledger.detached,
        pinned=ledger.pinned,
        spans=shape.undeclared + sum(len(space.names) for space in spaces),
        nodes=sum(_below(space.root) for space in spaces),
        placements=sum(p.state is State.READY for p in ledger.attached),
        evicted=ledger.evicted,
        evictions=ledger.evictions,
    )


def _below(root: Node) -> int:
    """How many nodes a root has below it."""
    count, stack = 0, [root]
    while stack:
        children = stack.pop().children
        count += len(children)
        stack.extend(children.values())
    return count


def _info(space: Space, node: Node, name: str, pinned: bool) -> SpanInfo:
    path = node.path()
    encoded = [n for n in path if any(p.state is State.READY for p in n.placements.values())]
    return SpanInfo(
        name=name,
        namespace=space.name,
        source=node.source,
        length=sum(len(n.tokens) for n in path),
        pinned=pinned,
        readers=node.readers,
        hits=node.hits,
        placements=len(node.placements),
        encoded_tokens=sum(len(n.tokens) for n in encoded),
        slots=sum(len(p) for p in node.placements.values()),
    )
