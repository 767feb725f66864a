"""Nodes of the span tree and their placements: plain records, changed only by ``Shape`` and ``Ledger``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from sglang_acache.core.spans.types import SlotArray, Source, State, TokenArray, common_prefix


class Layer(IntEnum):
    """Who may shape an edge.

    DECLARED edges are cut by declarations only, so their shape, and with it their K/V, is a function of the
    set of declared spans. FREE edges come from discovery and from prompts that share a part of an edge. EXACT
    spans were named by a request's own offsets: whole, childless, keyed by all of their tokens.
    """

    DECLARED = 0
    FREE = 1
    EXACT = 2


ChildKey = tuple[Layer, int | bytes]


@dataclass(frozen=True, eq=False)
class AnchorOverride:
    """Positions (relative to the node, ascending) that one reader reads from private slots instead."""

    positions: SlotArray
    slots: SlotArray


@dataclass(eq=False)
class Node:
    """One edge of the tree. ``tokens`` are its own; the span it ends is the concatenation from the root."""

    tokens: TokenArray
    parent: Node | None
    layer: Layer
    source: Source
    children: dict[ChildKey, Node] = field(default_factory=dict)
    placements: dict[int, Placement] = field(default_factory=dict)  # by root offset
    declarations: dict[str, bool] = field(default_factory=dict)  # name -> pinned, for spans that end here
    end: bool = False  # an undeclared span ends here
    pins: int = 0  # pinned declarations at or below
    hits: int = 0
    last_access: int = 0
    # Importance that an earlier probe found for the span ending here, by (what was measured, number of tokens).
    memory: dict[tuple[str, int], npt.NDArray[np.float32]] = field(default_factory=dict)

    @property
    def key(self) -> ChildKey:
        if self.layer is Layer.EXACT:
            return (Layer.EXACT, self.tokens.tobytes())
        return (self.layer, int(self.tokens[0]))

    @property
    def is_end(self) -> bool:
        return self.end or bool(self.declarations)

    @property
    def readers(self) -> int:
        return sum(p.readers for p in self.placements.values())

    @property
    def held(self) -> bool:
        return any(p.held for p in self.placements.values())

    def path(self) -> list[Node]:
        """Nodes from the top-level node to this one."""
        nodes: list[Node] = []
        node: Node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def path_tokens(self) -> TokenArray:
        return np.concatenate([n.tokens for n in self.path()] or [self.tokens])

    def in_layer(self, layer: Layer) -> list[Node]:
        return [child for key, child in self.children.items() if key[0] is layer]

    def subtree(self) -> Iterator[Node]:
        """This node and all below, children before parents."""
        nodes, stack = [], [self]
        while stack:
            nodes.append(stack.pop())
            stack.extend(nodes[-1].children.values())
        yield from reversed(nodes)

    def overrides(self) -> dict[int, AnchorOverride]:
        """Anchor overrides of all present readers, by handle id."""
        return {reader: o for p in self.placements.values() for reader, o in p.overrides.items()}

    def home(self) -> Placement | None:
        """A placement that was encoded directly and can be copied from."""
        return next((p for p in self.placements.values() if p.home and p.state is State.READY), None)


@dataclass(eq=False)
class Placement:
    """Shared K/V of a node when the root of its path stands at canvas position ``offset``.

    Everything that the runner and the readers need is here and not in the node, so that a placement can
    outlive the shape it was made for: a detached one serves its readers and is freed when the last one goes.
    """

    node: Node
    tokens: TokenArray
    offset: int
    depth: int  # tokens on the path before this node
    slots: SlotArray
    parent: Placement | None
    state: State = State.UNENCODED
    home: bool = False  # encoded directly, not copied
    attached: bool = True
    readers: int = 0  # handles whose path contains it
    sources: int = 0  # outstanding copies that read it
    guards: int = 0  # reasons why it may not be evicted: see Ledger
    kids: int = 0  # attached placements of child nodes at the same offset
    last_access: int = 0
    ticket: int = 0  # of the outstanding order while ENCODING
    overrides: dict[int, AnchorOverride] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def held(self) -> bool:
        return self.readers + self.sources > 0

    @property
    def pinned(self) -> bool:
        """Kept whether or not it is read."""
        return self.attached and self.home and self.node.pins > 0

    def ancestors(self) -> list[Placement]:
        """Placements of the path before this one, root first."""
        chain: list[Placement] = []
        above = self.parent
        while above is not None:
            chain.append(above)
            above = above.parent
        return chain[::-1]


@dataclass(frozen=True, eq=False)
class Walk:
    """How far ``tokens`` follow one layer from a node: whole edges, then ``tail`` tokens into the edge ``partial``."""

    nodes: tuple[Node, ...]
    whole: int
    partial: Node | None
    tail: int


def follow(node: Node, tokens: TokenArray, layer: Layer) -> Walk:
    nodes: list[Node] = []
    done = 0
    while done < len(tokens):
        child = node.children.get((layer, int(tokens[done])))
        if child is None:
            break
        shared = common_prefix(child.tokens, tokens[done:])
        if shared < len(child.tokens):
            return Walk(tuple(nodes), done, child, shared)
        nodes.append(child)
        node, done = child, done + shared
    return Walk(tuple(nodes), done, None, 0)
