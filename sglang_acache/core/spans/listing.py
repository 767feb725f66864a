"""What is known and who holds how much, for people and metrics."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_acache.core.spans.ledger import Ledger
from sglang_acache.core.spans.matching import auto_name
from sglang_acache.core.spans.node import Node
from sglang_acache.core.spans.shape import Space
from sglang_acache.core.spans.types import SpanInfo, State, Usage


def spans(space: Space) -> list[SpanInfo]:
    """One entry per declared name, one per end of an undeclared span."""
    infos = []
    for node in space.root.subtree():
        names = dict(node.declarations)
        if node.end:
            names[auto_name(node.path_tokens())] = False
        infos += [_info(space, node, name, pinned) for name, pinned in names.items()]
    return infos


def usage(ledger: Ledger, spaces: Iterable[Space]) -> Usage:
    nodes = [node for space in spaces for node in space.root.subtree() if node.parent is not None]
    return Usage(
        used=ledger.used,
        evictable=ledger.evictable,
        protected=ledger.protected,
        detached=ledger.detached,
        spans=sum(len(node.declarations) + node.end for node in nodes),
        nodes=len(nodes),
        evicted=ledger.evicted,
    )


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
