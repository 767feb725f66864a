"""Copying KV to other slots and other positions: keys are rotated by the distance, values copied."""

from collections.abc import Callable, Sequence

import torch

from acache_kernels.registry import Registry, default_impl

RebaseFn = Callable[
    [Sequence[torch.Tensor], Sequence[torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None
]

_REGISTRY: Registry[RebaseFn] = Registry(
    "rebase implementation",
    {
        "torch": "acache_kernels.torch_ops.rebase:rebase_kv",
        "triton": "acache_kernels.triton_ops.rebase:rebase_kv",
    },
)


def rebase_kv(
    k_pools: Sequence[torch.Tensor],
    v_pools: Sequence[torch.Tensor],
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    delta: int | torch.Tensor,
    *,
    inv_freq: torch.Tensor,
    impl: str | None = None,
) -> None:
    """For every layer, K[dst] = K[src] rotated by `delta` positions and V[dst] = V[src].

    k_pools, v_pools: one [S, Hkv, D] tensor per layer, modified at `dst_slots`. src_slots, dst_slots: int64 [n];
    `dst_slots` must not repeat nor overlap `src_slots`. delta: one int, or int64 [n]; it may be negative.

    Rotary convention (LLaDA's and Dream's, "rotate half"): dimensions i and i + R/2 form a pair that position p
    turns by the angle p * inv_freq[i]; inv_freq is float32 [R/2] with R <= D, and dimensions from R on are not
    rotated. The angle and its sine and cosine are float32 or better whatever the pool's dtype.
    """
    count = len(src_slots)
    if len(dst_slots) != count:
        raise ValueError(f"{count} source slots but {len(dst_slots)} destination slots")
    if len(k_pools) != len(v_pools):
        raise ValueError(f"{len(k_pools)} key pools but {len(v_pools)} value pools")
    if count == 0 or not k_pools:
        return
    if 2 * inv_freq.numel() > k_pools[0].shape[-1]:
        raise ValueError(f"{inv_freq.numel()} frequencies for head size {k_pools[0].shape[-1]}")
    if isinstance(delta, int):
        delta = torch.full((count,), delta, dtype=torch.int64, device=src_slots.device)
    elif delta.shape != (count,):
        raise ValueError(f"delta has shape {tuple(delta.shape)} for {count} slots")
    name = impl or default_impl(k_pools[0].device.type)
    _REGISTRY.get(name)(k_pools, v_pools, src_slots, dst_slots, delta, inv_freq)
