"""Re-basing in Triton: all layers, keys and values, in one launch through tables of pool addresses.

Not run on a GPU so far: tested under Triton's interpreter, compiled ahead of time.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl


@triton.jit
def rebase_slots(
    k_table,
    v_table,
    src_slots,
    dst_slots,
    cos,
    sin,
    like,
    k_row,
    k_head,
    v_row,
    v_head,
    num_heads,
    HALF: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program: one slot of one layer. `like` only lends its element type."""
    index = tl.program_id(0)
    layer = tl.program_id(1)
    kind = tl.pointer_type(like.dtype.element_ty)
    k = tl.load(k_table + layer).to(kind)
    v = tl.load(v_table + layer).to(kind)
    src = tl.load(src_slots + index)
    dst = tl.load(dst_slots + index)
    pairs = tl.arange(0, BLOCK_HALF)
    pair_ok = pairs < HALF
    c = tl.load(cos + index * HALF + pairs, mask=pair_ok, other=1.0)[None, :]
    s = tl.load(sin + index * HALF + pairs, mask=pair_ok, other=0.0)[None, :]
    dims = tl.arange(0, BLOCK_D)
    for first in range(0, num_heads, BLOCK_H):
        heads = first + tl.arange(0, BLOCK_H)
        head_ok = heads < num_heads
        ok = head_ok[:, None] & pair_ok[None, :]
        at = heads[:, None] * k_head + pairs[None, :]
        low = tl.load(k + src * k_row + at, mask=ok, other=0.0).to(tl.float32)
        high = tl.load(k + src * k_row + at + HALF, mask=ok, other=0.0).to(tl.float32)
        tl.store(k + dst * k_row + at, (low * c - high * s).to(like.dtype.element_ty), mask=ok)
        tl.store(k + dst * k_row + at + HALF, (high * c + low * s).to(like.dtype.element_ty), mask=ok)
        if 2 * HALF < D:
            rest = head_ok[:, None] & ((dims >= 2 * HALF) & (dims < D))[None, :]
            rest_at = heads[:, None] * k_head + dims[None, :]
            tl.store(k + dst * k_row + rest_at, tl.load(k + src * k_row + rest_at, mask=rest), mask=rest)
        whole = head_ok[:, None] & (dims < D)[None, :]
        v_at = heads[:, None] * v_head + dims[None, :]
        tl.store(v + dst * v_row + v_at, tl.load(v + src * v_row + v_at, mask=whole), mask=whole)


def rebase_kv(
    k_pools: Sequence[torch.Tensor],
    v_pools: Sequence[torch.Tensor],
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    delta: torch.Tensor,
    inv_freq: torch.Tensor,
) -> None:
    """See `acache_kernels.rebase.rebase_kv`; the pools of all layers must be laid out alike."""
    kinds = [{(p.shape[1:], p.stride(), p.dtype) for p in pools} for pools in (k_pools, v_pools)]
    if any(len(kind) != 1 for kind in kinds) or k_pools[0].dtype != v_pools[0].dtype:
        raise ValueError("the pools of all layers must have the same head shape, strides and dtype")
    k, v = k_pools[0], v_pools[0]
    if k.stride(-1) != 1 or v.stride(-1) != 1 or k.shape[1:] != v.shape[1:]:
        raise ValueError("keys and values must have equal head shapes and a contiguous last dimension")
    num_heads, head_dim = k.shape[1:]
    angle = delta.to(torch.float64).unsqueeze(1) * inv_freq.to(torch.float64)  # [n, HALF]
    tables = torch.tensor([[p.data_ptr() for p in pools] for pools in (k_pools, v_pools)], dtype=torch.int64)
    tables = tables.to(k.device, non_blocking=True)
    block_d = triton.next_power_of_2(head_dim)
    rebase_slots[(len(src_slots), len(k_pools))](
        tables[0],
        tables[1],
        src_slots,
        dst_slots,
        angle.cos().float(),
        angle.sin().float(),
        k,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        num_heads,
        HALF=inv_freq.numel(),
        D=head_dim,
        BLOCK_H=max(1, min(triton.next_power_of_2(num_heads), 4096 // block_d)),
        BLOCK_HALF=triton.next_power_of_2(inv_freq.numel()),
        BLOCK_D=block_d,
        num_warps=4,
    )
