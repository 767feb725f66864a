"""ACache as the method says (section 4), for one request: shared K/V of affixes, probe, anchors, recompute set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise

import torch

from integration_tests.oracle.cached_transformer import CachedTransformer, KVCache


@dataclass(frozen=True)
class Affix:
    """Positions [start, stop) of the canvas, shared with other requests.

    ``cuts`` (positions inside) split it into the nodes of a radix tree: a node is encoded seeing itself in both
    directions and its ancestors' frozen K/V.
    """

    start: int
    stop: int
    cuts: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.stop - self.start

    def nodes(self) -> list[tuple[int, int]]:
        edges = [self.start, *self.cuts, self.stop]
        return list(pairwise(edges))


@dataclass
class Selection:
    """What the probe found: importance by affix (float32 ``[L]``), and the anchors as canvas positions."""

    scores: list[torch.Tensor] = field(default_factory=list)
    anchors: list[int] = field(default_factory=list)


class ACacheForward:
    """A predictor: at a block's start it forwards the recompute set, inside the block the block only.

    ``region`` is the generation region [start, stop). Under the shift the position before it is the request's own
    even inside an affix: its hidden state is needed at every block start, and a shared slot is never written.
    """

    def __init__(
        self,
        model: CachedTransformer,
        affixes: Sequence[Affix],
        ratio: float,
        region: tuple[int, int],
        *,
        importance: str = "attention",
        shift: bool = False,
    ) -> None:
        self.model, self.affixes, self.ratio, self.region = model, list(affixes), ratio, region
        self.importance, self.shift = importance, shift
        self.selection: Selection | None = None

    def predict(
        self, tokens: torch.Tensor, rows: list[int], first_query: int, block_stop: int, block_start_step: bool
    ) -> torch.Tensor:
        if self.selection is None:
            self._prepare(tokens)
        # Non-anchors are read from the shared K/V for the request's life; all else is stored afresh.
        queries = self.recompute if block_start_step else torch.arange(first_query, block_stop)
        hidden = self.model.forward(tokens, queries, self.cache)
        return self.model.logits(hidden[torch.searchsorted(queries, torch.tensor(rows))])

    def _prepare(self, tokens: torch.Tensor) -> None:
        """Encode the affixes, probe, choose the anchors; once, before the first step."""
        self.cache = self.model.empty_cache(len(tokens))
        for affix in self.affixes:
            encode(self.model, tokens, affix, self.cache)
        own = self.region[0] - 1 if self.shift else None
        self.readable = [[p for p in range(a.start, a.stop) if p != own] for a in self.affixes]
        shared = {p for positions in self.readable for p in positions}
        outside = [p for p in range(len(tokens)) if p not in shared]
        self.selection = self._probe(tokens, torch.tensor(outside))
        self.recompute = torch.tensor(sorted({*outside, *self.selection.anchors}))

    def _probe(self, tokens: torch.Tensor, outside: torch.Tensor) -> Selection:
        masks = (outside >= self.region[0]) & (outside < self.region[1])
        scores = [torch.zeros(len(positions)) for positions in self.readable]

        def observe(layer: int, q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> None:
            for positions, score in zip(self.readable, scores, strict=True):
                share = weights[:, masks][..., positions]  # [Hq, masks, L]
                if self.importance == "attention_affix":
                    share = share / share.sum(dim=-1, keepdim=True)
                score += share.float().sum(dim=(0, 1))

        self.model.forward(tokens, outside, self.cache.clone(), observe=observe)
        selection = Selection(scores)
        for positions, score in zip(self.readable, scores, strict=True):
            best = sorted(range(len(positions)), key=lambda j: (-float(score[j]), j))
            selection.anchors += sorted(positions[j] for j in best[: budget(self.ratio, len(positions))])
        return selection


def encode(model: CachedTransformer, tokens: torch.Tensor, affix: Affix, cache: KVCache) -> None:
    """Store the affix's shared K/V: from its own tokens alone, node by node."""
    for start, stop in affix.nodes():
        model.forward(tokens, torch.arange(start, stop), cache, visible=torch.arange(affix.start, stop))


def budget(ratio: float, length: int) -> int:
    """min(ceil(ratio * length), length), in exact arithmetic: 0.07 of 100 is 7."""
    exact = Fraction(str(ratio)) * length
    return min(-(-exact.numerator // exact.denominator), length)
