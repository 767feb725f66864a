"""Writing fresh keys and values to their slots."""

import torch

from acache_kernels.torch_ops.native_rows import native_rows


def store_kv(k_pool: torch.Tensor, v_pool: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Modifies `k_pool[slots]` and `v_pool[slots]`, [S, Hkv, D], to `k` and `v`, [n, Hkv, D].

    `slots` is int64 [n] without repetition: with one, either of the two values may win. Raises ValueError for shapes
    and dtypes that do not fit, IndexError for a slot outside the pool.
    """
    if slots.dtype != torch.int64 or slots.ndim != 1:
        raise ValueError(f"slots must be one-dimensional int64, not {slots.dtype} {tuple(slots.shape)}")
    for pool, rows in ((k_pool, k), (v_pool, v)):
        if rows.shape != (len(slots), *pool.shape[1:]):
            raise ValueError(f"{len(slots)} slots of a pool {tuple(pool.shape)} cannot take {tuple(rows.shape)}")
        native = native_rows(pool, rows)
        if native is not None and slots.is_contiguous() and _rows_are_contiguous(pool, rows):
            native.store(pool, slots, rows)
        else:
            pool.index_copy_(0, slots, rows.to(pool.dtype))


def _rows_are_contiguous(*tensors: torch.Tensor) -> bool:
    """Whether each row is one run of memory, however far apart the rows are."""
    return all(tensor[:1].is_contiguous() for tensor in tensors)
