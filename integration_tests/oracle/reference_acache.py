"""ACache as the method says (section 4), for one request: shared K/V of affixes, probe, anchors, recompute set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise

import numpy as np
import torch

from integration_tests.oracle.cached_transformer import CachedTransformer, KVCache

UNPROBED = ("first", "random")
"""Selectors that look at no importance."""


@dataclass(frozen=True)
class Affix:
    """Positions [start, stop) of the canvas, shared with other requests.

    ``cuts`` (positions inside) split it into the nodes of a radix tree: a node is encoded seeing itself in both
    directions and its ancestors' frozen K/V. ``root``: where the path begins, if an affix before this one is its
    ancestor; that one comes first in a request's list.
    """

    start: int
    stop: int
    cuts: tuple[int, ...] = ()
    root: int | None = None

    def __len__(self) -> int:
        return self.stop - self.start

    def nodes(self) -> list[tuple[int, int]]:
        edges = [self.start, *self.cuts, self.stop]
        return list(pairwise(edges))


@dataclass
class Selection:
    """What the probe found: importance by affix (float32 ``[L]``), and the anchors as canvas positions.

    ``margin``: by how much, relative to the largest score, the last anchor beats the first that is none; the least
    over the affixes, infinite where no score decides. Far above float noise, the anchors are certain.
    """

    scores: list[torch.Tensor] = field(default_factory=list)
    anchors: list[int] = field(default_factory=list)
    margin: float = float("inf")


class ACacheForward:
    """A predictor: at a block's start it forwards the recompute set, inside the block what ``cache`` says of it.

    ``region`` is the generation region [start, stop). Under the shift the position before it is the request's own
    even inside an affix: its hidden state is needed at every block start, and a shared slot is never written.

    ``selector``: one of ``attention``, ``attention_affix``, ``bottom``, ``kv_deviation``, ``first``, ``random`` (from
    ``seed``) and ``drop_non_anchors``. ``fused``: the probe's K/V of the request's own positions is kept, so the first
    block start forwards the anchors and its block alone. Where no probe is needed, it changes nothing.

    ``starts``: rows forwarded at every block start so far; ``probe_rows``: those of the probe.
    """

    def __init__(
        self,
        model: CachedTransformer,
        affixes: Sequence[Affix],
        ratio: float,
        region: tuple[int, int],
        *,
        selector: str = "attention",
        coverage: float | None = None,
        seed: int = 0,
        shift: bool = False,
        cache: str = "dual",
        fused: bool = False,
    ) -> None:
        self.model, self.affixes, self.ratio, self.region = model, list(affixes), ratio, region
        self.selector, self.coverage, self.seed, self.shift = selector, coverage, seed, shift
        self.probes = selector not in UNPROBED and ratio > 0
        self.cache_policy, self.fused = cache, fused and self.probes and selector != "kv_deviation"
        self.selection: Selection | None = None
        self.starts: list[int] = []
        self.probe_rows = 0

    def predict(
        self, tokens: torch.Tensor, rows: list[int], first_query: int, block_stop: int, block_start_step: bool
    ) -> torch.Tensor:
        block = set(range(first_query, block_stop))
        if self.selection is None:
            self.selection = self._prepare(tokens)
            start = {*self.selection.anchors, *block} if self.fused else self.recompute
        elif block_start_step or self.cache_policy == "none":
            start = self.recompute
        else:
            stop = {"dual": block_stop, "prefix": len(tokens)}[self.cache_policy]
            start = {p for p in self.recompute if first_query <= p < stop}
        # Non-anchors are read from the shared K/V for the request's life; all else is stored afresh.
        queries = torch.tensor(sorted(start))
        if block_start_step:
            self.starts.append(len(queries))
        hidden = self.model.forward(tokens, queries, self.cache, visible=self.visible)
        return self.model.logits(hidden[torch.searchsorted(queries, torch.tensor(rows))])

    def _prepare(self, tokens: torch.Tensor) -> Selection:
        """Encode the affixes, probe, choose the anchors; once, before the first step."""
        self.cache = self.model.empty_cache(len(tokens))
        for affix in self.affixes:
            encode(self.model, tokens, affix, self.cache)
        own = self.region[0] - 1 if self.shift else None
        self.readable = [[p for p in range(a.start, a.stop) if p != own] for a in self.affixes]
        shared = {p for positions in self.readable for p in positions}
        outside = {p for p in range(len(tokens)) if p not in shared}
        selection = self._select(self._importance(tokens, torch.tensor(sorted(outside))))
        self.recompute = {*outside, *selection.anchors}
        dropped = self.selector == "drop_non_anchors"
        self.visible = torch.tensor(sorted(self.recompute)) if dropped else None
        return selection

    def _importance(self, tokens: torch.Tensor, outside: torch.Tensor) -> list[torch.Tensor]:
        if not self.probes:
            return [torch.zeros(len(positions)) for positions in self.readable]
        if self.selector == "kv_deviation":
            return self._deviation(tokens)
        masks = (outside >= self.region[0]) & (outside < self.region[1])
        scores = [torch.zeros(len(positions)) for positions in self.readable]

        def observe(layer: int, q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> None:
            for positions, score in zip(self.readable, scores, strict=True):
                share = weights[:, masks][..., positions]  # [Hq, masks, L]
                if self.selector == "attention_affix":
                    share = share / share.sum(dim=-1, keepdim=True)
                score += share.float().sum(dim=(0, 1))

        cache = self.cache if self.fused else self.cache.clone()
        self.probe_rows = len(outside)
        self.model.forward(tokens, outside, cache, observe=observe)
        return scores

    def _deviation(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """Squared distance of the K/V of a forward of everything from the shared K/V."""
        fresh = self.model.empty_cache(len(tokens))
        self.probe_rows = len(tokens)
        self.model.forward(tokens, torch.arange(len(tokens)), fresh)
        pairs = [*zip(fresh.keys, self.cache.keys, strict=True), *zip(fresh.values, self.cache.values, strict=True)]
        moved = torch.stack([(ours - shared).square().sum(dim=(1, 2)) for ours, shared in pairs]).sum(dim=0)
        return [moved[positions] for positions in self.readable]

    def _select(self, scores: list[torch.Tensor]) -> Selection:
        selection = Selection(scores)
        for index, (positions, score) in enumerate(zip(self.readable, scores, strict=True)):
            order = self._order(score, index)
            count = self._count(score[order])
            selection.anchors += sorted(positions[j] for j in order[:count])
            if 0 < count < len(order) and self.probes:
                gap = abs(float(score[order[count - 1]] - score[order[count]]))
                selection.margin = min(selection.margin, gap / float(score.max()))
        return selection

    def _order(self, score: torch.Tensor, index: int) -> list[int]:
        """Offsets within the affix, most wanted first."""
        if self.selector == "random":
            return list(np.random.default_rng((self.seed, self.affixes[index].start)).permutation(len(score)))
        sign = 1 if self.selector == "bottom" else -1
        return sorted(range(len(score)), key=lambda j: (sign * float(score[j]), j))

    def _count(self, falling: torch.Tensor) -> int:
        most = budget(self.ratio, len(falling))
        if self.coverage is None:
            return most
        wanted = self.coverage * float(falling.sum())
        return next((k for k in range(most) if float(falling[:k].sum()) >= wanted), most)


def encode(model: CachedTransformer, tokens: torch.Tensor, affix: Affix, cache: KVCache) -> None:
    """Store the affix's shared K/V: from its own tokens alone, node by node."""
    first = affix.start if affix.root is None else affix.root
    for start, stop in affix.nodes():
        model.forward(tokens, torch.arange(start, stop), cache, visible=torch.arange(first, stop))


def budget(ratio: float, length: int) -> int:
    """min(ceil(ratio * length), length), in exact arithmetic: 0.07 of 100 is 7."""
    exact = Fraction(str(ratio)) * length
    return min(-(-exact.numerator // exact.denominator), length)
