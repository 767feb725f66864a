"""Affix importance in Triton: column sums of attention weights, with neither scores nor weights in memory.

Not run on a GPU so far: tested under Triton's interpreter, compiled ahead of time.

    tile of keys x key head  ->  one program that walks over all query rows of the probe (all heads of the group)
    partial [Hkv, keys]      ->  summed over key heads afterwards: no atomics, so the sums are reproducible

`attention_affix` first runs `affix_lse` for the log-sum-exp over the probe's own keys.
"""

import math
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from acache_kernels.layout import ImportanceTargets
from acache_kernels.triton_ops.compat import operand

WORK_FIELDS = 5
LOG2E = math.log2(math.e)


@triton.jit
def _query_tile(
    q, query_rows, first, rows, num_rows, kv_head, dims, q_row, q_head, GROUP: tl.constexpr, D: tl.constexpr
):
    """Packed rows of a probe: (tile [rows, dims], row of q [rows], head [rows])."""
    row_ok = rows < num_rows
    row = tl.load(query_rows + first + rows // GROUP, mask=row_ok, other=0).to(tl.int64)
    head = kv_head * GROUP + rows % GROUP
    at = q + row[:, None] * q_row + head[:, None] * q_head + dims[None, :]
    return tl.load(at, mask=row_ok[:, None] & (dims < D)[None, :], other=0.0), row, head


@triton.jit
def _key_tile(k, key_slots, first, cols, num_keys, kv_head, dims, k_row, k_head, D: tl.constexpr):
    """Keys of a probe, [dims, cols]."""
    col_ok = cols < num_keys
    slot = tl.load(key_slots + first + cols, mask=col_ok, other=0).to(tl.int64)
    at = k + slot[None, :] * k_row + kv_head * k_head + dims[:, None]
    return tl.load(at, mask=(dims < D)[:, None] & col_ok[None, :], other=0.0)


@triton.jit
def affix_lse(
    q,
    k,
    norms,
    query_rows,
    key_slots,
    work,
    scale_log2,
    q_row,
    q_head,
    k_row,
    k_head,
    num_q_heads,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """norms [M, Hq] = base-2 log-sum-exp of each query row and head over its probe's keys."""
    item = work + tl.program_id(0) * FIELDS
    kv_head = tl.program_id(1)
    first_query = tl.load(item)
    num_rows = tl.load(item + 1) * GROUP
    first_key = tl.load(item + 2)
    num_keys = tl.load(item + 3)
    rows = tl.load(item + 4) + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    q_tile, _, head = _query_tile(q, query_rows, first_query, rows, num_rows, kv_head, dims, q_row, q_head, GROUP, D)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, num_keys, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        k_tile = _key_tile(k, key_slots, first_key, cols, num_keys, kv_head, dims, k_row, k_head, D)
        scores = tl.dot(operand(q_tile), operand(k_tile), input_precision="ieee") * scale_log2
        scores = tl.where((cols < num_keys)[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        total = total * tl.exp2(peak - new_peak) + tl.sum(tl.exp2(scores - new_peak[:, None]), 1)
        peak = new_peak
    at = norms + (first_query + rows // GROUP).to(tl.int64) * num_q_heads + head
    tl.store(at, peak + tl.log2(total), mask=rows < num_rows)


@triton.jit
def column_sums(
    q,
    k,
    norms,
    sums,
    query_rows,
    key_slots,
    work,
    scale_log2,
    norm_scale,
    q_row,
    q_head,
    k_row,
    k_head,
    num_q_heads,
    total_keys,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FIELDS: tl.constexpr,
    NORM_BY_ROW: tl.constexpr,
):
    """sums [Hkv, keys] = sum over a probe's packed rows of exp2(score - norm).

    norms holds one line per row of q (NORM_BY_ROW) or one per entry of query_rows.
    """
    item = work + tl.program_id(0) * FIELDS
    kv_head = tl.program_id(1)
    first_query = tl.load(item)
    num_rows = tl.load(item + 1) * GROUP
    first_key = tl.load(item + 2)
    num_keys = tl.load(item + 3)
    cols = tl.load(item + 4) + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    k_tile = _key_tile(k, key_slots, first_key, cols, num_keys, kv_head, dims, k_row, k_head, D)
    column = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, num_rows, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        row_ok = rows < num_rows
        q_tile, row, head = _query_tile(
            q, query_rows, first_query, rows, num_rows, kv_head, dims, q_row, q_head, GROUP, D
        )
        line = row if NORM_BY_ROW else (first_query + rows // GROUP).to(tl.int64)
        norm = tl.load(norms + line * num_q_heads + head, mask=row_ok, other=0.0) * norm_scale
        scores = tl.dot(operand(q_tile), operand(k_tile), input_precision="ieee") * scale_log2 - norm[:, None]
        column += tl.sum(tl.where(row_ok[:, None], tl.exp2(scores), 0.0), 0)
    tl.store(sums + kv_head.to(tl.int64) * total_keys + first_key + cols, column, mask=cols < num_keys)


@dataclass(frozen=True)
class _Work:
    """Tiles of the probes that have both queries and keys: (query, queries, key, keys, tile start) each."""

    by_key: torch.Tensor  # int32 [W, WORK_FIELDS]
    by_row: torch.Tensor
    has_idle_keys: bool  # some probe has keys but no queries


def block_sizes(head_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Rows and keys of a tile, chosen so that no kernel spills registers."""
    if dtype == torch.float32:
        return {"BLOCK_M": 32, "BLOCK_N": 32 if head_dim <= 128 else 16}
    return {"BLOCK_M": 64, "BLOCK_N": 64}


def launch_options(dtype: torch.dtype) -> dict[str, int]:
    return {"num_warps": 4, "num_stages": 1 if dtype == torch.float32 else 2}


_WORK: WeakKeyDictionary[ImportanceTargets, dict[tuple[int, int, int], _Work]] = WeakKeyDictionary()


def accumulate_importance(
    scores: torch.Tensor,
    q: torch.Tensor,
    k_pool: torch.Tensor,
    lse: torch.Tensor | None,
    targets: ImportanceTargets,
    scale: float,
) -> None:
    """See `acache_kernels.importance.accumulate_importance`; without lse each probe's own is used."""
    if q.stride(-1) != 1 or k_pool.stride(-1) != 1:
        raise ValueError("the last dimension of q and k_pool must be contiguous")
    num_q_heads, num_kv_heads, head_dim = q.shape[1], *k_pool.shape[1:]
    group = num_q_heads // num_kv_heads
    blocks = block_sizes(head_dim, q.dtype)
    work = _work(targets, group, blocks)
    if not len(work.by_key):
        return
    strides = (q.stride(0), q.stride(1), k_pool.stride(0), k_pool.stride(1))
    sizes = {
        "GROUP": group,
        "D": head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "FIELDS": WORK_FIELDS,
        **blocks,
        **launch_options(q.dtype),
    }
    rows, slots = targets.query_rows, targets.key_slots
    norms = lse.contiguous() if lse is not None else q.new_empty((len(rows), num_q_heads), dtype=torch.float32)
    if lse is None:
        affix_lse[(len(work.by_row), num_kv_heads)](
            q, k_pool, norms, rows, slots, work.by_row, scale * LOG2E, *strides, num_q_heads, **sizes
        )
    blank = torch.zeros if work.has_idle_keys else torch.empty
    sums = blank((num_kv_heads, targets.num_keys), dtype=torch.float32, device=q.device)
    column_sums[(len(work.by_key), num_kv_heads)](
        q,
        k_pool,
        norms,
        sums,
        rows,
        slots,
        work.by_key,
        scale * LOG2E,
        1.0 if lse is None else LOG2E,
        *strides,
        num_q_heads,
        targets.num_keys,
        NORM_BY_ROW=lse is not None,
        **sizes,
    )
    scores += sums.sum(dim=0)


def _work(targets: ImportanceTargets, group: int, blocks: dict[str, int]) -> _Work:
    """Built once per targets object and kind of tile, whatever the number of layers."""
    known = _WORK.setdefault(targets, {})
    kind = (group, blocks["BLOCK_M"], blocks["BLOCK_N"])
    if kind not in known:
        queries, keys = targets.query_lens, targets.key_lens
        active = np.flatnonzero((queries > 0) & (keys > 0))
        device = targets.key_slots.device
        by_key, by_row = (
            torch.from_numpy(_tiles(targets, active, lens, block)).to(device, non_blocking=True)
            for lens, block in ((keys, blocks["BLOCK_N"]), (queries * group, blocks["BLOCK_M"]))
        )
        known[kind] = _Work(by_key, by_row, bool(((queries == 0) & (keys > 0)).any()))
    return known[kind]


def _tiles(
    targets: ImportanceTargets, active: npt.NDArray[np.int64], lens: npt.NDArray[np.int64], block: int
) -> npt.NDArray[np.int32]:
    """Tiles of `block` along `lens` of the active probes."""
    first_query = np.cumsum(targets.query_lens) - targets.query_lens
    first_key = np.cumsum(targets.key_lens) - targets.key_lens
    counts = -(-lens[active] // block)
    owner = np.repeat(active, counts)
    start = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * block
    columns = (first_query[owner], targets.query_lens[owner], first_key[owner], targets.key_lens[owner], start)
    return np.stack(columns, axis=1).astype(np.int32)
