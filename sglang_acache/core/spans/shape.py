"""The shape of the tree: which nodes exist. Cutting an edge retires the K/V that was made for the old shape."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sglang_acache.core.spans.index import SpanIndex
from sglang_acache.core.spans.ledger import Ledger
from sglang_acache.core.spans.node import ChildKey, Layer, Node, follow
from sglang_acache.core.spans.types import Source, SpanNameTaken, TokenArray, common_prefix


@dataclass(eq=False)
class Space:
    """All spans of one name space."""

    name: str
    index: SpanIndex
    names: dict[str, Node] = field(default_factory=dict)  # declared spans
    root: Node = field(default_factory=lambda: Node(np.empty(0, np.int32), None, Layer.DECLARED, "declared"))


class Shape:
    """Structural changes.

    DECLARED edges form the canonical radix tree of the declared spans: every declared node ends a span or has
    two declared children. So the shape does not depend on the order of declarations, nor on any request.
    Every leaf of any layer ends a span; only ends are in the index.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.undeclared = 0  # nodes with ``end``

    def declare(self, space: Space, tokens: TokenArray, name: str, pinned: bool) -> Node:
        known = space.names.get(name)
        if known is not None and not np.array_equal(known.path_tokens(), tokens):
            raise SpanNameTaken(f"span {name!r} of name space {space.name!r} has been declared with other tokens")
        node = self.grow(tokens, Layer.DECLARED, start=space.root)
        if not node.declarations:
            space.index.add(tokens)
        change = int(pinned) - int(node.declarations.get(name, False))
        node.declarations[name] = pinned
        space.names[name] = node
        for above in node.path() if change else ():
            self.ledger.repin(above, change)
        return node

    def undeclare(self, space: Space, name: str) -> None:
        """KeyError when the name is unknown. The declared edges become those of the remaining declarations."""
        node = space.names.pop(name)
        if node.declarations.pop(name):
            for above in node.path():
                self.ledger.repin(above, -1)
        if node.declarations:
            return
        space.index.discard(node.path_tokens())
        while node.parent is not None and not node.is_end:
            below = node.in_layer(Layer.DECLARED)
            if len(below) == 1:
                self._merge(space, node, below[0])
            if below:
                return
            self._delete(space, node)
            node = node.parent

    def insert(self, space: Space, tokens: TokenArray) -> Node:
        """An undeclared span: the declared edges that it follows whole, then FREE ones."""
        declared = follow(space.root, tokens, Layer.DECLARED)
        node = declared.nodes[-1] if declared.nodes else space.root
        if declared.whole < len(tokens):
            node = self.grow(tokens[declared.whole :], Layer.FREE, start=node)
        if node.layer is Layer.FREE and not node.end:
            node.end = True
            self.undeclared += 1
            space.index.add(tokens)
        return node

    def insert_exact(self, space: Space, tokens: TokenArray) -> Node:
        key: ChildKey = (Layer.EXACT, tokens.tobytes())
        node = space.root.children.get(key)
        if node is None:
            node = Node(tokens.copy(), space.root, Layer.EXACT, "request", end=True)
            space.root.children[key] = node
            self.undeclared += 1
            node.last_access = self.ledger.tick()
        return node

    def grow(self, tokens: TokenArray, layer: Layer, start: Node) -> Node:
        """The node that ends ``tokens`` below ``start``, made by cutting an edge and adding a leaf as needed."""
        node, done = start, 0
        while done < len(tokens):
            child = node.children.get((layer, int(tokens[done])))
            if child is None:
                # a new leaf: the caller marks it as an end
                source: Source = "declared" if layer is Layer.DECLARED else "discovered"
                child = Node(tokens[done:].copy(), node, layer, source)
                node.children[child.key] = child
            shared = common_prefix(child.tokens, tokens[done:])
            node = child if shared == len(child.tokens) else self._split(child, shared)
            node.last_access = self.ledger.tick()
            done += shared
        return node

    def forget(self, space: Space, node: Node) -> None:
        """Drop an undeclared span, and FREE nodes above it that end nothing any more."""
        if node.children:
            if node.end:
                node.end = False
                self.undeclared -= 1
                space.index.discard(node.path_tokens())
            return
        while node.parent is not None and node.layer is not Layer.DECLARED:
            above = node.parent
            self._delete(space, node)
            if above.is_end or above.children:
                return
            node = above

    def clear_undeclared(self, space: Space) -> None:
        for node in list(space.root.subtree()):
            if node.layer is not Layer.DECLARED:
                continue
            for child in list(node.children.values()):
                if child.layer is not Layer.DECLARED:
                    self._delete(space, child)

    def _split(self, node: Node, at: int) -> Node:
        """Cut an edge after ``at`` tokens. ``node`` becomes the lower half; returns the upper one.

        The K/V below was made by attending the uncut edge, so the placements of the whole subtree are retired.
        """
        self.ledger.retire_all(node)
        parent = node.parent
        assert parent is not None
        assert 0 < at < len(node.tokens)
        upper = Node(node.tokens[:at].copy(), parent, node.layer, node.source)
        upper.pins, upper.hits, upper.last_access = node.pins, node.hits, node.last_access
        parent.children[upper.key] = upper
        node.tokens, node.parent = node.tokens[at:].copy(), upper
        upper.children[node.key] = node
        return upper

    def _merge(self, space: Space, node: Node, child: Node) -> None:
        """Join a declared node that neither ends nor branches with its only declared child."""
        self.ledger.retire_all(node)
        for other in list(node.children.values()):
            if other is not child:
                self._delete(space, other)
        assert node.parent is not None
        child.tokens = np.concatenate([node.tokens, child.tokens])
        child.parent = node.parent
        node.parent.children[child.key] = child

    def _delete(self, space: Space, node: Node) -> None:
        """Remove a subtree that holds no declaration."""
        for each in node.subtree():
            assert not each.declarations
            self.undeclared -= each.end
            if each.end and each.layer is not Layer.EXACT:
                space.index.discard(each.path_tokens())
        self.ledger.retire_all(node)
        assert node.parent is not None
        del node.parent.children[node.key]
