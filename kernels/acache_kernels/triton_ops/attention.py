"""Ragged paged attention in Triton: work lists planned on the host once per step, one or two launches a layer.

Not run on a GPU so far: tested under Triton's interpreter, compiled ahead of time.

    requests     -> tiles of packed rows (query x head of the group), by tile class 32 / 64 / 128
    few tiles    -> their keys are split in ranges of SPLIT_KEYS, merged by a second launch

Class and split depend on a request's own shape alone, so its result does not depend on its batch.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton

from acache_kernels.attention import AttentionKernel, check_heads, check_run_shapes
from acache_kernels.layout import RaggedLayout
from acache_kernels.triton_ops.attention_kernels import (
    MERGE_FIELDS,
    MERGE_ROWS,
    WORK_FIELDS,
    attend_tiles,
    merge_parts,
)

SPLIT_KEYS = 512
"""Keys per range when a request's keys are split."""
SPLIT_TILES = 2
"""Requests with at most this many tiles (per key head) have their keys split."""
MAX_HEAD_DIM = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class TileShape:
    """Compile-time sizes of one launch."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def tile_shapes(head_dim: int, dtype: torch.dtype) -> tuple[TileShape, ...]:
    """The tile classes of a model, by rising number of rows. Chosen so that no class spills registers."""
    if dtype == torch.float32:
        if head_dim <= 64:
            return (TileShape(32, 32, 4, 1),)
        return (TileShape(16, 32, 8, 1),) if head_dim <= 128 else (TileShape(32, 16, 8, 1),)
    if head_dim <= 64:
        return TileShape(32, 64, 4, 3), TileShape(64, 64, 4, 3), TileShape(128, 64, 8, 3)
    if head_dim <= 128:
        return TileShape(32, 64, 4, 3), TileShape(64, 64, 8, 3), TileShape(128, 32, 8, 3)
    return TileShape(32, 32, 4, 2), TileShape(64, 32, 8, 2)


@dataclass(frozen=True)
class Launch:
    """The work of one tile class."""

    shape: TileShape
    work: torch.Tensor  # int32 [W, WORK_FIELDS]
    merges: torch.Tensor  # int32 [T, MERGE_FIELDS]
    num_parts: int


@dataclass(frozen=True)
class TritonPlan:
    num_queries: int
    heads: tuple[int, int, int]  # Hq, Hkv, D
    kv_indices: torch.Tensor
    launches: tuple[Launch, ...]
    part_out: torch.Tensor  # float32, shared by the launches
    part_lse: torch.Tensor


class TritonAttention(AttentionKernel):
    """float32 (IEEE dot products), bfloat16 and float16; head sizes up to 256, any size, padded inside."""

    name = "triton"

    def plan(
        self,
        layout: RaggedLayout,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> TritonPlan:
        group = check_heads(num_q_heads, num_kv_heads, head_dim)
        if dtype not in DTYPES:
            raise ValueError(f"attention kernel 'triton' cannot serve {dtype}")
        if head_dim > MAX_HEAD_DIM:
            raise ValueError(f"attention kernel 'triton' serves head sizes up to {MAX_HEAD_DIM}, not {head_dim}")
        layout.check_answerable()
        launches = []
        rows, slabs = 0, 0  # elements of the partial buffers, for the launch that needs most
        for shape, requests in _classes(layout.qo_lens * group, tile_shapes(head_dim, dtype)):
            work, merges, num_parts = _work_lists(layout, requests, group, shape.block_m)
            tables = [torch.from_numpy(x).to(layout.device, non_blocking=True) for x in (work, merges)]
            launches.append(Launch(shape, tables[0], tables[1], num_parts))
            rows = max(rows, num_parts * num_kv_heads * shape.block_m)
            slabs = rows * head_dim
        heads = (num_q_heads, num_kv_heads, head_dim)
        part_out = torch.empty(slabs, dtype=torch.float32, device=layout.device)
        part_lse = torch.empty(rows, dtype=torch.float32, device=layout.device)
        return TritonPlan(layout.num_queries, heads, layout.kv_indices, tuple(launches), part_out, part_lse)

    def run(
        self,
        plan: TritonPlan,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        *,
        scale: float,
        return_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        check_run_shapes(plan.num_queries, plan.heads, q, k_pool, v_pool)
        if any(x.stride(-1) != 1 for x in (q, k_pool, v_pool)):
            raise ValueError("the last dimension of q, k_pool and v_pool must be contiguous")
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        for launch in plan.launches:
            _run_launch(launch, plan, q, k_pool, v_pool, out, lse, scale)
        return out, lse if return_lse else None


def _run_launch(
    launch: Launch,
    plan: TritonPlan,
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
) -> None:
    num_q_heads, num_kv_heads, head_dim = plan.heads
    shape = launch.shape
    common = {
        "GROUP": num_q_heads // num_kv_heads,
        "D": head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "BLOCK_M": shape.block_m,
    }
    attend_tiles[(len(launch.work), num_kv_heads)](
        q,
        k_pool,
        v_pool,
        out,
        lse,
        plan.part_out,
        plan.part_lse,
        launch.work,
        plan.kv_indices,
        scale * math.log2(math.e),
        q.stride(0),
        q.stride(1),
        k_pool.stride(0),
        k_pool.stride(1),
        v_pool.stride(0),
        v_pool.stride(1),
        num_q_heads,
        **common,
        BLOCK_N=shape.block_n,
        FIELDS=WORK_FIELDS,
        PRECISION="ieee",
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    if len(launch.merges):
        merge_parts[(len(launch.merges), num_kv_heads, shape.block_m // MERGE_ROWS)](
            plan.part_out,
            plan.part_lse,
            out,
            lse,
            launch.merges,
            num_q_heads,
            **common,
            ROWS=MERGE_ROWS,
            FIELDS=MERGE_FIELDS,
            num_warps=4,
        )


def _classes(
    packed_rows: npt.NDArray[np.int64], shapes: tuple[TileShape, ...]
) -> list[tuple[TileShape, npt.NDArray[np.int64]]]:
    """Requests with queries by the smallest tile class that holds all their rows, else the largest class."""
    sizes = np.array([shape.block_m for shape in shapes])
    chosen = np.minimum(np.searchsorted(sizes, packed_rows), len(shapes) - 1)
    members = [np.flatnonzero((chosen == i) & (packed_rows > 0)) for i in range(len(shapes))]
    return [(shape, requests) for shape, requests in zip(shapes, members, strict=True) if len(requests)]


def _work_lists(
    layout: RaggedLayout, requests: npt.NDArray[np.int64], group: int, block_m: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], int]:
    """(work [W, WORK_FIELDS], merges [T, MERGE_FIELDS], number of partial results) of one tile class."""
    first_query = np.concatenate(([0], np.cumsum(layout.qo_lens)))[requests]
    first_key = np.concatenate(([0], np.cumsum(layout.kv_lens)))[requests]
    num_rows = layout.qo_lens[requests] * group
    num_keys = layout.kv_lens[requests]
    num_tiles = -(-num_rows // block_m)
    num_splits = np.where(num_tiles <= SPLIT_TILES, -(-num_keys // SPLIT_KEYS), 1)

    # one line per (request, tile)
    owner = np.repeat(np.arange(len(requests)), num_tiles)
    tile = _within(num_tiles) * block_m
    parts = np.where(num_splits[owner] > 1, num_splits[owner], 0)
    first_part = np.cumsum(parts) - parts
    merges = np.stack((first_query[owner], num_rows[owner], tile, first_part, parts), axis=1)

    # one line per (request, tile, range of keys)
    splits = num_splits[owner]
    line = np.repeat(np.arange(len(owner)), splits)
    split = _within(splits)
    own = owner[line]
    whole = splits[line] == 1
    start = split * SPLIT_KEYS
    keys = np.where(whole, num_keys[own], np.minimum(SPLIT_KEYS, num_keys[own] - start))
    part = np.where(whole, -1, first_part[line] + split)
    columns = (first_query[own], num_rows[own], tile[line], first_key[own] + start, keys, part)
    work = np.stack(columns, axis=1)
    return work.astype(np.int32), merges[parts > 0].astype(np.int32), int(parts.sum())


def _within(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """0, 1, .. counts[0] - 1, 0, 1, .. counts[1] - 1, .."""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
