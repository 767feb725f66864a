"""Full (non-causal) attention of ragged queries over pool slots: the interface, and kernels by name."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from acache_kernels.layout import RaggedLayout
from acache_kernels.registry import Registry
from acache_kernels.static_plan import StaticCapacity, StaticPlan


class AttentionKernel(ABC):
    """Every query row of a request attends to every slot of the request's read-slot map.

    The work that depends on the step only (tile lists, index tensors, workspaces) is done once in `plan`; the
    plan is then passed to `run` by every layer. A plan is valid until the next `plan` of the same kernel object:
    kernels may reuse its buffers.
    """

    name: str
    has_static_plans = False

    @abstractmethod
    def plan(
        self,
        layout: RaggedLayout,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Any:
        """Prepares a step.

        Requests without queries, and an empty batch, are allowed. Raises ValueError when a request has queries
        but no keys, when `num_q_heads` is no multiple of `num_kv_heads`, or when the kernel cannot serve the
        head size, dtype or device.
        """

    @abstractmethod
    def run(
        self,
        plan: Any,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        *,
        scale: float,
        return_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of one layer.

        q: [N, Hq, D], N = the layout's number of queries; k_pool, v_pool: [S, Hkv, D], last dimension contiguous.
        Query head h reads key head h // (Hq // Hkv). Slots outside the maps are never read, so what they hold
        (NaN, say) cannot matter.

        Returns (out [N, Hq, D] in q's dtype, lse): lse is float32 [N, Hq], the natural logarithm of
        sum over keys of exp(scale * q . k), or None without `return_lse`. A request's rows do not depend on the
        other requests in the batch.
        """

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
        """Plans for CUDA graphs, one for each of `capacities`, over shared buffers (`static_plan.py`).

        `run` with one of them launches the same work on the same addresses whatever the step, so it can be captured
        once and replayed after each `StaticPlan.update`. Raises ValueError as `plan` does, and where
        `has_static_plans` is False.
        """
        raise ValueError(f"attention kernel '{self.name}' has no plans of a fixed size")

    def static_bytes(
        self, capacity: StaticCapacity, *, num_q_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Bytes of the intermediate results of such a plan, where they grow with its capacity; 0 where they do not.

        Plans that are made together share them: what counts is the largest.
        """
        return 0


_REGISTRY: Registry[type[AttentionKernel]] = Registry(
    "attention kernel",
    {
        "torch": "acache_kernels.torch_ops.attention:TorchAttention",
        "triton": "acache_kernels.triton_ops.attention:TritonAttention",
        "flashinfer": "acache_kernels.flashinfer_ops.attention:FlashInferAttention",
    },
)


def attention_kernel_names() -> tuple[str, ...]:
    return _REGISTRY.names()


def default_attention_kernel(device: torch.device | str) -> str:
    """The kernel that suits a device: `triton` on CUDA, else `torch`."""
    return "triton" if torch.device(device).type == "cuda" else "torch"


def get_attention_kernel(name: str) -> AttentionKernel:
    """A new kernel object, with its own plan buffers. Raises ValueError that lists the valid names."""
    return _REGISTRY.get(name)()


def check_heads(num_q_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """The number of query heads that share a key head. Raises ValueError when it is not a whole number."""
    if min(num_q_heads, num_kv_heads, head_dim) < 1:
        raise ValueError(f"heads and head size must be positive: {num_q_heads}, {num_kv_heads}, {head_dim}")
    if num_q_heads % num_kv_heads:
        raise ValueError(f"{num_q_heads} query heads cannot share {num_kv_heads} key heads evenly")
    return num_q_heads // num_kv_heads


def check_run_shapes(
    num_queries: int, heads: tuple[int, int, int], q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor
) -> None:
    """Raises ValueError when the tensors of a layer do not fit the plan; heads = (Hq, Hkv, D)."""
    num_q_heads, num_kv_heads, head_dim = heads
    if tuple(q.shape) != (num_queries, num_q_heads, head_dim):
        raise ValueError(f"q is {tuple(q.shape)}, planned ({num_queries}, {num_q_heads}, {head_dim})")
    for name, pool in (("k_pool", k_pool), ("v_pool", v_pool)):
        if tuple(pool.shape[1:]) != (num_kv_heads, head_dim) or pool.ndim != 3:
            raise ValueError(f"{name} is {tuple(pool.shape)}, planned (slots, {num_kv_heads}, {head_dim})")
        if pool.dtype != q.dtype:
            raise ValueError(f"{name} is {pool.dtype} but q is {q.dtype}")
