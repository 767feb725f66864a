"""The same transformer, written plainly, with the keys and values of every position kept and reusable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import linear, silu

from integration_tests.oracle.transformers_oracle import TransformersOracle

# (layer, queries [R, Hq, D], keys [K, Hk, D], attention weights [Hq, R, K])
Observer = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]


@dataclass
class KVCache:
    """Rotated keys and values by layer, each ``[T, Hk, D]``; NaN where nothing was stored yet."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def clone(self) -> KVCache:
        return KVCache([k.clone() for k in self.keys], [v.clone() for v in self.values])


class CachedTransformer:
    """Forwards any set of rows: stores their K/V, then attends to whatever the cache holds."""

    def __init__(self, oracle: TransformersOracle) -> None:
        config = oracle.model.config
        self.model = oracle.model.model
        self.head = oracle.model.lm_head.weight[: oracle.vocab_size]
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.hidden_size // self.heads
        self.eps = config.rms_norm_eps
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        self.inv_freq = config.rope_parameters["rope_theta"] ** -exponents
        self.forwarded = 0  # rows forwarded so far

    def empty_cache(self, length: int) -> KVCache:
        shape = (length, self.kv_heads, self.head_dim)
        layers = len(self.model.layers)
        dtype = self.head.dtype
        return KVCache(
            [torch.full(shape, torch.nan, dtype=dtype) for _ in range(layers)],
            [torch.full(shape, torch.nan, dtype=dtype) for _ in range(layers)],
        )

    @torch.no_grad()
    def forward(
        self,
        tokens: torch.Tensor,
        rows: torch.Tensor,
        cache: KVCache,
        *,
        visible: torch.Tensor | None = None,
        observe: Observer | None = None,
        store: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Forward ``rows`` of the canvas.

        Args:
            tokens: int64 ``[T]``, the canvas. rows: int64 ``[R]``, positions.
            visible: positions attended to; None = all of the canvas.
            store: those of ``rows`` whose K/V go into the cache; None = all of them.

        Returns:
            Final hidden states ``[R, hidden]``, before the output head.
        """
        self.forwarded += len(rows)
        hidden = self.model.embed_tokens.weight[tokens[rows]]
        visible = torch.arange(len(tokens)) if visible is None else visible
        stored = torch.ones(len(rows), dtype=torch.bool) if store is None else torch.isin(rows, store)
        for index, layer in enumerate(self.model.layers):
            attention = layer.self_attn
            x = self._norm(hidden, layer.input_layernorm.weight)
            q = self._rotate(linear(x, attention.q_proj.weight, attention.q_proj.bias), rows, self.heads)
            k = self._rotate(linear(x, attention.k_proj.weight, attention.k_proj.bias), rows, self.kv_heads)
            v = linear(x, attention.v_proj.weight, attention.v_proj.bias)
            cache.keys[index][rows[stored]] = k[stored]
            cache.values[index][rows[stored]] = v.view(-1, self.kv_heads, self.head_dim)[stored]
            keys, values = cache.keys[index][visible], cache.values[index][visible]
            mixed, weights = self._attend(q, keys, values)
            if observe is not None:
                observe(index, q, keys, weights)
            hidden = hidden + linear(mixed, attention.o_proj.weight)
            x = self._norm(hidden, layer.post_attention_layernorm.weight)
            gated = silu(linear(x, layer.mlp.gate_proj.weight)) * linear(x, layer.mlp.up_proj.weight)
            hidden = hidden + linear(gated, layer.mlp.down_proj.weight)
        return self._norm(hidden, self.model.norm.weight)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[R, hidden]`` -> ``[R, vocab_size]``."""
        return linear(hidden, self.head)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))

    def _rotate(self, flat: torch.Tensor, positions: torch.Tensor, heads: int) -> torch.Tensor:
        x = flat.view(len(flat), heads, self.head_dim)
        angles = (positions.float()[:, None] * self.inv_freq)[:, None]  # [R, 1, D / 2]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def _attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        group = self.heads // self.kv_heads
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        scores = torch.einsum("rhd,khd->hrk", q, keys) / self.head_dim**0.5
        weights = scores.softmax(dim=-1)
        return torch.einsum("hrk,khd->rhd", weights, values).flatten(1), weights
