"""Writing fresh keys and values to their slots, for callers without a pool of their own that does it."""

import torch


def store_kv(k_pool: torch.Tensor, v_pool: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Modifies `k_pool[slots]` and `v_pool[slots]`, [S, Hkv, D], to `k` and `v`, [n, Hkv, D].

    `slots` is int64 [n] without repetition: with one, either of the two values may win.
    """
    k_pool.index_copy_(0, slots, k.to(k_pool.dtype))
    v_pool.index_copy_(0, slots, v.to(v_pool.dtype))
