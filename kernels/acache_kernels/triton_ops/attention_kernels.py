"""Device code of the ragged paged attention; `attention.py` builds its work lists and launches it.

A row of a tile is one (query, query head of the group) pair, so a key that a group of heads shares is read once
for all of them:

    packed row r of a request   ->   query r // GROUP, head kv_head * GROUP + r % GROUP
"""

import triton
import triton.language as tl

from acache_kernels.triton_ops.compat import operand

WORK_FIELDS = 6
MERGE_FIELDS = 5
MERGE_ROWS = 8


@triton.jit
def attend_keys(
    q_tile,
    keys_at,
    values_at,
    dim_ok,
    slots,
    num_keys,
    k_row,
    v_row,
    scale_log2,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Rows of `q_tile` [M, D] against the keys in `num_keys` slots: (sum of weights x values, peak, sum of weights).

    Weights are exp2(score - peak), `peak` [M] the row's largest score. keys_at and values_at [D] point into slot 0.
    """
    peak = tl.full([q_tile.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([q_tile.shape[0]], tl.float32)
    acc = tl.zeros([q_tile.shape[0], q_tile.shape[1]], tl.float32)
    for start in range(0, num_keys, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        col_ok = cols < num_keys
        slot = tl.load(slots + cols, mask=col_ok, other=0).to(tl.int64)
        k_tile = tl.load(keys_at[:, None] + slot[None, :] * k_row, mask=dim_ok[:, None] & col_ok[None, :], other=0.0)
        scores = tl.dot(operand(q_tile), operand(k_tile), input_precision=PRECISION) * scale_log2
        scores = tl.where(col_ok[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weights, 1)
        v_tile = tl.load(values_at[None, :] + slot[:, None] * v_row, mask=col_ok[:, None] & dim_ok[None, :], other=0.0)
        weights = operand(weights.to(v_tile.dtype))
        acc = tl.dot(weights, operand(v_tile), acc * shrink[:, None], input_precision=PRECISION)
        peak = new_peak
    return acc, peak, total


@triton.jit
def attend_tiles(
    q,
    k,
    v,
    out,
    lse,
    part_out,
    part_lse,
    work,
    kv_indices,
    scale_log2,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    num_q_heads,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FIELDS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: BLOCK_M packed rows of one request and key head against one range of its keys."""
    item = work + tl.program_id(0) * FIELDS
    kv_head = tl.program_id(1)
    first_query = tl.load(item)
    num_rows = tl.load(item + 1)  # packed rows of the request
    tile = tl.load(item + 2)  # first packed row
    key_start = tl.load(item + 3)
    num_keys = tl.load(item + 4)  # >= 1
    part = tl.load(item + 5)  # partial result to write, or -1: the whole result

    rows = tile + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    row_ok = rows < num_rows
    dim_ok = dims < D
    query = (first_query + rows // GROUP).to(tl.int64)
    head = kv_head * GROUP + rows % GROUP
    q_at = q + query[:, None] * q_row + head[:, None] * q_head + dims[None, :]
    q_tile = tl.load(q_at, mask=row_ok[:, None] & dim_ok[None, :], other=0.0)
    keys_at = k + kv_head * k_head + dims
    values_at = v + kv_head * v_head + dims

    slots = kv_indices + key_start
    acc, peak, total = attend_keys(
        q_tile, keys_at, values_at, dim_ok, slots, num_keys, k_row, v_row, scale_log2, BLOCK_N, PRECISION
    )
    acc = acc / total[:, None]
    norm = peak + tl.log2(total)  # base 2
    if part < 0:
        out_at = out + (query[:, None] * num_q_heads + head[:, None]) * D + dims[None, :]
        tl.store(out_at, acc.to(out.dtype.element_ty), mask=row_ok[:, None] & dim_ok[None, :])
        tl.store(lse + query * num_q_heads + head, norm * 0.6931471805599453, mask=row_ok)
    else:
        base = (part * tl.num_programs(1) + kv_head).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(part_out + base[:, None] * D + dims[None, :], acc, mask=row_ok[:, None] & dim_ok[None, :])
        tl.store(part_lse + base, norm, mask=row_ok)


@triton.jit
def merge_parts(
    part_out,
    part_lse,
    out,
    lse,
    merges,
    num_q_heads,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """One program: the partial results of ROWS packed rows of one key head, weighted by their sums."""
    item = merges + tl.program_id(0) * FIELDS
    kv_head = tl.program_id(1)
    first_query = tl.load(item)
    num_rows = tl.load(item + 1)
    tile = tl.load(item + 2)
    first_part = tl.load(item + 3)
    num_parts = tl.load(item + 4)

    lanes = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)
    rows = tile + lanes
    row_ok = rows < num_rows
    ok = row_ok[:, None] & (dims < D)[None, :]
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for part in range(first_part, first_part + num_parts):
        base = (part * tl.num_programs(1) + kv_head).to(tl.int64) * BLOCK_M + lanes
        norm = tl.load(part_lse + base, mask=row_ok, other=0.0)
        result = tl.load(part_out + base[:, None] * D + dims[None, :], mask=ok, other=0.0)
        new_peak = tl.maximum(peak, norm)
        shrink = tl.exp2(peak - new_peak)
        weight = tl.exp2(norm - new_peak)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + result * weight[:, None]
        peak = new_peak

    query = (first_query + rows // GROUP).to(tl.int64)
    head = kv_head * GROUP + rows % GROUP
    out_at = out + (query[:, None] * num_q_heads + head[:, None]) * D + dims[None, :]
    tl.store(out_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=ok)
    norm = (peak + tl.log2(total)) * 0.6931471805599453
    tl.store(lse + query * num_q_heads + head, norm, mask=row_ok)
