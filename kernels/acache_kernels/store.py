"""Writing fresh keys and values to their slots."""

import torch

from acache_kernels.torch_ops.native_rows import native_rows


def store_kv(k_pool: torch.Tensor, v_pool: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Modifies `k_pool[slots]` and `v_pool[slots]`, [S, Hkv, D], to `k` and `v`, [n, Hkv, D], each row contiguous.

    `slots` is int64 [n] without repetition: with one, either of the two values may win.
    """
    for pool, rows in ((k_pool, k), (v_pool, v)):
        native = native_rows(pool, rows)
        if native is not None and slots.dtype == torch.int64:
            native.store(pool, slots, rows)
        else:
            pool.index_copy_(0, slots, rows.to(pool.dtype))
