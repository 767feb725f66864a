"""Rotary positions, computed in float32 whatever the model's dtype is."""

from __future__ import annotations

import torch
from acache_kernels.rows import rotate
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from torch import nn


class RotaryPositions(nn.Module):
    """Rotates queries and keys by their absolute positions (half rotation, as Llama's).

    On CUDA this is SGLang's fused kernel, which computes in float32 too; elsewhere SGLang would round the
    angles to the model's dtype, hence our own kernel.
    """

    inv_freq: torch.Tensor
    cos_sin: torch.Tensor

    def __init__(self, head_dim: int, max_positions: int, theta: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        inv_freq = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.fused: RotaryEmbedding | None = None
        if inv_freq.is_cuda:
            self.fused = RotaryEmbedding(
                head_dim, head_dim, max_positions, theta, is_neox_style=True, dtype=torch.get_default_dtype()
            )
        else:
            angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * inv_freq  # [P, D / 2]
            self.register_buffer("cos_sin", torch.cat([angles.cos(), angles.sin()], dim=-1), persistent=False)

    def forward(self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated ``(q, k)``, which may be modified; positions ``[N]``, q ``[N, Hq * D]``, k ``[N, Hk * D]``."""
        if self.fused is not None:
            return self.fused(positions, q, k)
        for x in (q, k):
            rotate(x.view(len(x), -1, self.head_dim), positions, self.cos_sin)
        return q, k
