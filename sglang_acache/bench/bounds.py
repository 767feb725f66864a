"""What counts alone would give: the bounds that measured speed-ups are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_acache.core.selector import anchor_count


@dataclass(frozen=True)
class ModelCost:
    """Floating-point operations of a forward, from a checkpoint's shape."""

    hidden: int
    heads: int
    kv_heads: int
    layers: int
    inner: int
    vocab: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelCost:
        """From the ``config.json`` of a LLaDA or Dream checkpoint."""

        def first(*names: str) -> int:
            return int(next(config[name] for name in names if config.get(name) is not None))

        heads = first("n_heads", "num_attention_heads")
        kv_heads = first("n_kv_heads", "num_key_value_heads", "n_heads", "num_attention_heads")
        return cls(
            hidden=first("d_model", "hidden_size"),
            heads=heads,
            kv_heads=kv_heads,
            layers=first("n_layers", "num_hidden_layers"),
            inner=first("mlp_hidden_size", "intermediate_size"),
            vocab=first("embedding_size", "vocab_size"),
        )

    def row(self) -> float:
        """One row through the linear layers of all blocks."""
        keys = self.hidden // self.heads * self.kv_heads
        weights = 2 * self.hidden * self.hidden + 2 * self.hidden * keys + 3 * self.hidden * self.inner
        return 2.0 * weights * self.layers

    def pair(self) -> float:
        """One query attending to one key, over all layers and heads: the scores and the weighted sum."""
        return 4.0 * self.hidden * self.layers

    def forward(self, rows: int, pairs: int, logit_rows: int = 0) -> float:
        """``rows`` through the linear layers, ``pairs`` of query and key, ``logit_rows`` through the LM head."""
        return rows * self.row() + pairs * self.pair() + 2.0 * logit_rows * self.hidden * self.vocab


@dataclass(frozen=True)
class BlockStart:
    """A block start of a canvas of T tokens with an affix of L at an anchor ratio, and what counts promise for it."""

    canvas: int
    affix: int
    ratio: float
    logit_rows: int

    @property
    def recompute(self) -> int:
        """R: anchors and everything that is not the affix."""
        return self.canvas - self.affix + anchor_count(self.affix, str(self.ratio))

    @property
    def row_bound(self) -> float:
        """T / R: the speed-up if every row cost the same."""
        return self.canvas / self.recompute

    def flop_bound(self, cost: ModelCost) -> float:
        """The speed-up that operations allow: rows shrink from T to R, pairs from T x T to R x T, logits not."""
        full = cost.forward(self.canvas, self.canvas**2, self.logit_rows)
        return full / cost.forward(self.recompute, self.recompute * self.canvas, self.logit_rows)


def slots(canvas: int, affix: int, ratio: float, requests: int) -> tuple[int, int]:
    """Peak K/V slots of ``requests`` requests over one affix: without reuse, and with it."""
    private = canvas - affix + anchor_count(affix, str(ratio))
    return requests * canvas, requests * private + affix
