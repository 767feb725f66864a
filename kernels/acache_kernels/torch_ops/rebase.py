"""Re-basing in plain torch, one gather and one scatter per layer."""

from collections.abc import Sequence

import torch


def rebase_kv(
    k_pools: Sequence[torch.Tensor],
    v_pools: Sequence[torch.Tensor],
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    delta: torch.Tensor,
    inv_freq: torch.Tensor,
) -> None:
    """See `acache_kernels.rebase.rebase_kv`; delta is int64 [n]."""
    angle = delta.to(torch.float64).unsqueeze(1) * inv_freq.to(torch.float64)  # [n, R/2]
    cos, sin = angle.cos().float().unsqueeze(1), angle.sin().float().unsqueeze(1)  # [n, 1, R/2]
    for k_pool, v_pool in zip(k_pools, v_pools, strict=True):
        k_pool.index_copy_(0, dst_slots, rotate(k_pool.index_select(0, src_slots), cos, sin))
        v_pool.index_copy_(0, dst_slots, v_pool.index_select(0, src_slots))


def rotate(k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """k [n, H, D] turned by the angles of cos and sin, [n, 1, R/2]; computed in cos' dtype, returned in k's."""
    half = cos.shape[-1]
    low, high = k[..., :half].to(cos.dtype), k[..., half : 2 * half].to(cos.dtype)
    turned = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(k.dtype)
    return turned if 2 * half == k.shape[-1] else torch.cat((turned, k[..., 2 * half :]), dim=-1)
