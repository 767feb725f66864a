"""Paged attention through FlashInfer's batch prefill wrapper, pages of one slot, planned once per step.

Not run on hardware so far: the calls are checked against FlashInfer's documented contract by a recording fake.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from acache_kernels.attention import AttentionKernel, check_heads, check_run_shapes
from acache_kernels.layout import RaggedLayout
from acache_kernels.static_plan import StaticCapacity, StaticPlan

WORKSPACE_BYTES = 128 << 20
"""What FlashInfer recommends for its split-key intermediate results."""
DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class FlashInferPlan:
    num_queries: int
    heads: tuple[int, int, int]  # Hq, Hkv, D
    wrapper: Any  # planned; None when the step has no queries


class FlashInferAttention(AttentionKernel):
    """bfloat16 and float16 on CUDA, head sizes FlashInfer has kernels for. The scale is fixed to head_dim^-0.5.

    `backend` is FlashInfer's: `auto` picks by device.
    """

    name = "flashinfer"
    has_static_plans = True

    def __init__(self, backend: str = "auto") -> None:
        self._backend = backend
        self._planner: Planner | None = None

    def plan(
        self,
        layout: RaggedLayout,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> FlashInferPlan:
        check_served(num_q_heads, num_kv_heads, head_dim, dtype)
        layout.check_answerable()
        heads = (num_q_heads, num_kv_heads, head_dim)
        if layout.num_queries == 0:
            return FlashInferPlan(0, heads, None)
        qo_indptr, kv_indptr, kv_indices = asking_requests(layout)
        if self._planner is None:
            self._planner = Planner(make_wrapper(workspace(device), self._backend))
        self._planner.plan((qo_indptr, kv_indptr, kv_indices), heads, dtype)
        return FlashInferPlan(layout.num_queries, heads, self._planner.wrapper)

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
        from acache_kernels.flashinfer_ops.static_plan import make_static_plans

        check_served(num_q_heads, num_kv_heads, head_dim, dtype)
        return make_static_plans(capacities, (num_q_heads, num_kv_heads, head_dim), dtype, device, self._backend)

    def run(
        self,
        plan: FlashInferPlan,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        *,
        scale: float,
        return_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As the interface says. Raises ValueError when `scale` is not head_dim^-0.5, which was planned."""
        check_run_shapes(plan.num_queries, plan.heads, q, k_pool, v_pool)
        if not math.isclose(scale, plan.heads[2] ** -0.5, rel_tol=1e-6):
            raise ValueError(f"attention kernel 'flashinfer' was planned for scale {plan.heads[2] ** -0.5}")
        if plan.wrapper is None:
            return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
        # pages of one slot: [S, Hkv, D] -> [pages, page_size, Hkv, D], a view
        pages = (k_pool.unsqueeze(1), v_pool.unsqueeze(1))
        if not return_lse:
            return plan.wrapper.run(q, pages), None
        out, lse = plan.wrapper.run(q, pages, return_lse=True)
        return out, lse * math.log(2)  # FlashInfer's log-sum-exp is base 2


def check_served(num_q_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """Raises ValueError for heads or a dtype that this kernel does not serve."""
    check_heads(num_q_heads, num_kv_heads, head_dim)
    if dtype not in DTYPES:
        raise ValueError(f"attention kernel 'flashinfer' cannot serve {dtype}")


def workspace(device: torch.device | str) -> torch.Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def make_wrapper(workspace: torch.Tensor, backend: str, **graph: Any) -> Any:
    """FlashInfer's wrapper; `graph`: the arguments of its CUDA-graph mode."""
    import flashinfer

    return flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend, **graph)


class Planner:
    """Plans one wrapper again and again.

    FlashInfer writes each plan to the one page-locked buffer of its wrapper and queues a copy of it to the device; it
    does not wait for that copy when it writes the next plan. Nor does a step without logits or probes wait for the
    device, so the copy may still be queued behind earlier steps. Hence the wait here: for the last plan's copy, which
    comes before the work that it plans.
    """

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self._copied: torch.cuda.Event | None = None  # on the stream that the plan was copied on

    def plan(
        self,
        step: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        heads: tuple[int, int, int],
        dtype: torch.dtype,
    ) -> None:
        """`step`: qo_indptr and kv_indptr int32 on the host, kv_indices int32 on the device."""
        qo_indptr, kv_indptr, kv_indices = step
        num_q_heads, num_kv_heads, head_dim = heads
        if self._copied is not None:
            self._copied.synchronize()
        self.wrapper.plan(
            qo_indptr,
            kv_indptr,
            kv_indices,
            torch.ones(len(qo_indptr) - 1, dtype=torch.int32),  # a page of one slot is always full
            num_q_heads,
            num_kv_heads,
            head_dim,
            1,  # page_size
            causal=False,
            sm_scale=head_dim**-0.5,
            q_data_type=dtype,
            kv_data_type=dtype,
        )
        if kv_indices.is_cuda:
            self._copied = self._copied or torch.cuda.Event()
            self._copied.record()


def asking_requests(layout: RaggedLayout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(qo_indptr, kv_indptr, kv_indices) of the requests that have queries.

    The pointers are int32 on the host, where FlashInfer's planner wants them; the indices int32 on the device.
    """
    asking = layout.qo_lens > 0
    pointers = (
        torch.from_numpy(np.concatenate(([0], np.cumsum(lens[asking]))).astype(np.int32))
        for lens in (layout.qo_lens, layout.kv_lens)
    )
    indices = layout.kv_indices
    if not asking.all():
        parts = indices.split(layout.kv_lens.tolist())
        kept = [part for part, asks in zip(parts, asking, strict=True) if asks]
        indices = torch.cat(kept) if kept else indices[:0]
    qo_indptr, kv_indptr = pointers
    return qo_indptr, kv_indptr, indices.to(torch.int32)
