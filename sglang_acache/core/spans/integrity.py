"""Adds up everything that the span tree counts. Tests call it after every operation."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from sglang_acache.core.spans.node import Layer, Placement
from sglang_acache.core.spans.shape import Space
from sglang_acache.core.spans.types import Encode, State

if TYPE_CHECKING:
    from sglang_acache.core.spans.tree import SpanTree


def check(tree: SpanTree) -> None:
    """AssertionError naming the first fault."""
    for space in tree.spaces.values():
        _check_shape(space)
    ends = sum(n.end for space in tree.spaces.values() for n in space.root.subtree())
    _require(ends == tree.shape.undeclared, f"{ends} undeclared spans, counted {tree.shape.undeclared}")
    _check_placements(tree)
    _check_orders(tree)
    _check_handles(tree)
    _check_sums(tree)


def _require(condition: bool, fault: str) -> None:
    if not condition:
        raise AssertionError(fault)


def _check_shape(space: Space) -> None:
    index: Counter[int] = Counter()
    for node in space.root.subtree():
        where = f"node {node.path_tokens()[:8].tolist()}.. of {space.name!r}"
        for key, child in node.children.items():
            _require(child.parent is node, f"{where}: a child has another parent")
            _require(len(child.tokens) > 0 and child.key == key, f"{where}: a child under a wrong key")
            _require(node.layer is Layer.DECLARED or child.layer is node.layer, f"{where}: layers mixed")
        pins = sum(node.declarations.values()) + sum(c.pins for c in node.children.values())
        if node.parent is not None:
            declared = node.in_layer(Layer.DECLARED)
            _require(node.pins == pins, f"{where}: pins {node.pins}, should be {pins}")
            _require(bool(node.children) or node.is_end, f"{where}: a leaf that ends nothing")
            fits = node.layer is Layer.DECLARED or not node.declarations
            _require(fits, f"{where}: declared in another layer")
            canonical = node.layer is not Layer.DECLARED or node.declarations or len(declared) > 1
            _require(bool(canonical), f"{where}: a declared edge that should have been merged")
        if (node.is_end and node.layer is not Layer.EXACT) and (key_ := space.index.key(node.path_tokens())):
            index[key_] += 1
        for name in node.declarations:
            _require(space.names.get(name) is node, f"{where}: name {name!r} leads elsewhere")
    names = sum(len(node.declarations) for node in space.root.subtree())
    _require(names == len(space.names), "a name without a declaration")
    _require(dict(index) == space.index.counts(), f"index of {space.name!r} differs from the tree")


def _check_placements(tree: SpanTree) -> None:
    nodes = [node for space in tree.spaces.values() for node in space.root.subtree()]
    attached = [p for node in nodes for p in node.placements.values()]
    _require(set(attached) == set(tree.ledger.attached), "nodes and ledger list different placements")
    readers = Counter(p for handle in tree.handles.values() for p in handle.placements)
    sources = Counter(o.source for o in tree.work.outstanding.values() if o.source is not None)
    for node in nodes:
        for offset, placement in node.placements.items():
            where = _name(placement)
            above = node.parent.placements.get(offset) if node.parent else None
            own = placement.attached and placement.node is node and placement.offset == offset
            _require(own, f"{where}: belongs elsewhere")
            _require(np.array_equal(placement.tokens, node.tokens), f"{where}: made for other tokens")
            _require(placement.parent is above, f"{where}: parent is not the parent's placement")
            top = node.parent is not None and node.parent.parent is None
            _require(top or above is not None, f"{where}: without its parent")
            kids = [k for c in node.children.values() if (k := c.placements.get(offset))]
            _require(placement.kids == len(kids), f"{where}: kids {placement.kids}, should be {len(kids)}")
            reasons = [readers[placement], sources[placement], int(placement.home and node.pins > 0)]
            guards = sum(reasons) + sum(k.guards > 0 for k in kids)
            _require(placement.guards == guards, f"{where}: guards {placement.guards}, should be {guards}")
            fit = placement.readers > 0 or placement.state is State.READY
            _require(fit, f"{where}: unread and not ready")
    for placement in [*attached, *tree.ledger.orphans]:
        where = _name(placement)
        depth = sum(len(p) for p in placement.ancestors())
        _require(placement.depth == depth, f"{where}: depth {placement.depth}, should be {depth}")
        _require(len(placement.slots) == len(placement.tokens), f"{where}: slots do not fit its tokens")
        _require(placement.readers == readers[placement], f"{where}: readers {placement.readers}")
        _require(placement.sources == sources[placement], f"{where}: sources {placement.sources}")
        _require(not placement.home or placement.state is State.READY, f"{where}: a home that is not ready")
    for placement in tree.ledger.orphans:
        _require(not placement.attached and placement.held, f"{_name(placement)}: detached and not read")
    known = set(attached) | set(tree.ledger.orphans)
    _require(set(readers) | set(sources) <= known, "a handle or an order holds a placement that was freed")


def _check_orders(tree: SpanTree) -> None:
    underway = {p for p in [*tree.ledger.attached, *tree.ledger.orphans] if p.state is State.ENCODING}
    entries = tree.work.outstanding
    _require({e.placement for e in entries.values()} == underway, "orders and ENCODING placements differ")
    for ticket, entry in entries.items():
        where = _name(entry.placement)
        _require(entry.placement.ticket == ticket == entry.order.ticket, f"{where}: wrong ticket")
        _require(tree.handles.get(entry.handle.id) is entry.handle, f"{where}: ordered by a released handle")
        _require(isinstance(entry.order, Encode) is (entry.source is None), f"{where}: copy without source")
        _require(entry.source is None or entry.source.home, f"{where}: copied from a copy")


def _check_handles(tree: SpanTree) -> None:
    for handle in tree.handles.values():
        where = f"handle {handle.id}"
        tokens = np.concatenate([p.tokens for p in handle.placements])
        _require(np.array_equal(tokens, handle.match.tokens), f"{where}: placements hold other tokens")
        _require(all(p.offset == handle.start for p in handle.placements), f"{where}: offsets differ")
        _require(handle.placements[-1].ancestors() == list(handle.placements[:-1]), f"{where}: broken path")
        _require(not handle.released, f"{where}: held and released")
        recorded = [p.overrides[handle.id] for p in handle.placements if handle.id in p.overrides]
        wanted = len(handle.anchors.slots) if handle.anchors else 0
        _require(sum(len(o.slots) for o in recorded) == wanted, f"{where}: anchors and nodes differ")
    for placement in [*tree.ledger.attached, *tree.ledger.orphans]:
        for reader, override in placement.overrides.items():
            held = tree.handles.get(reader)
            fault = f"{_name(placement)}: override of {reader}"
            _require(held is not None and placement in held.placements, f"{fault}, who does not read it")
            inside = (override.positions >= 0) & (override.positions < len(placement))
            _require(bool(inside.all()), f"{fault} outside the node")


def _check_sums(tree: SpanTree) -> None:
    book = tree.ledger
    everything = [*book.attached, *book.orphans]
    slots = np.concatenate([p.slots for p in everything] or [np.empty(0, np.int64)])
    _require(len(np.unique(slots)) == len(slots), "a slot belongs to two placements")
    protected = sum(len(p) for p in book.attached if p.guards)
    detached = sum(len(p) for p in book.orphans)
    _require(book.used == len(slots), f"used {book.used}, should be {len(slots)}")
    _require(book.protected == protected, f"protected {book.protected}, should be {protected}")
    _require(book.detached == detached, f"detached {book.detached}, should be {detached}")
    cap = book.max_shared_tokens
    _require(cap is None or book.used <= cap, f"used {book.used} of at most {cap}")


def _name(placement: Placement) -> str:
    tokens = placement.node.path_tokens() if placement.attached else placement.tokens
    return f"placement {tokens[:8].tolist()}.. at {placement.offset} ({placement.state.value})"
