"""Ragged paged attention in Triton: work lists planned on the host once per step, one or two launches a layer.

Not run on a GPU so far: tested under Triton's interpreter, compiled ahead of time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton

from acache_kernels.attention import AttentionKernel, check_heads, check_run_shapes
from acache_kernels.layout import RaggedLayout
from acache_kernels.static_plan import StaticCapacity, StaticPlan
from acache_kernels.triton_ops.attention_kernels import (
    MERGE_FIELDS,
    MERGE_ROWS,
    WORK_FIELDS,
    attend_tiles,
    merge_parts,
)
from acache_kernels.triton_ops.work_lists import Requests, by_class, work_lists

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
    has_static_plans = True

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
        group = check_served(num_q_heads, num_kv_heads, head_dim, dtype)
        layout.check_answerable()
        shapes = tile_shapes(head_dim, dtype)
        classes = by_class(Requests.of(layout, group), [shape.block_m for shape in shapes])
        launches = []
        rows = 0  # of the partial buffers, for the launch that needs most
        for shape, requests in zip(shapes, classes, strict=True):
            if not len(requests.num_rows):
                continue
            work, merges, num_parts = work_lists(requests, shape.block_m)
            tables = [torch.from_numpy(x).to(layout.device, non_blocking=True) for x in (work, merges)]
            launches.append(Launch(shape, tables[0], tables[1], num_parts))
            rows = max(rows, num_parts * num_kv_heads * shape.block_m)
        heads = (num_q_heads, num_kv_heads, head_dim)
        parts = part_buffers(rows, head_dim, layout.device)
        return TritonPlan(layout.num_queries, heads, layout.kv_indices, tuple(launches), *parts)

    def static_plans(
        self,
        capacities: Sequence[StaticCapacity],
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> list[StaticPlan]:
        from acache_kernels.triton_ops.static_plan import make_static_plans

        check_served(num_q_heads, num_kv_heads, head_dim, dtype)
        return make_static_plans(capacities, (num_q_heads, num_kv_heads, head_dim), dtype, device)

    def static_bytes(
        self, capacity: StaticCapacity, *, num_q_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        from acache_kernels.triton_ops.static_plan import part_rows

        check_served(num_q_heads, num_kv_heads, head_dim, dtype)
        return part_rows(capacity, (num_q_heads, num_kv_heads, head_dim), dtype) * (head_dim + 1) * 4

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


def check_served(num_q_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Query heads per key head. Raises ValueError for heads or a dtype that this kernel does not serve."""
    group = check_heads(num_q_heads, num_kv_heads, head_dim)
    if dtype not in DTYPES:
        raise ValueError(f"attention kernel 'triton' cannot serve {dtype}")
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"attention kernel 'triton' serves head sizes up to {MAX_HEAD_DIM}, not {head_dim}")
    return group


def part_buffers(rows: int, head_dim: int, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """(part_out, part_lse) for `rows` partial results, one after another: head_dim + 1 numbers a row."""
    return (
        torch.empty(rows * head_dim, dtype=torch.float32, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
    )


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
