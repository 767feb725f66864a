"""How much attention the mask queries of a probe pay to each affix token."""

from collections.abc import Callable

import torch

from acache_kernels.layout import ImportanceTargets
from acache_kernels.registry import Registry, default_impl

MODES = ("attention", "attention_affix")

ImportanceFn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, ImportanceTargets, float], None]

_REGISTRY: Registry[ImportanceFn] = Registry(
    "importance implementation",
    {
        "torch": "acache_kernels.torch_ops.importance:accumulate_importance",
        "triton": "acache_kernels.triton_ops.importance:accumulate_importance",
    },
)


def accumulate_importance(
    scores: torch.Tensor,
    q: torch.Tensor,
    k_pool: torch.Tensor,
    lse: torch.Tensor | None,
    targets: ImportanceTargets,
    *,
    scale: float,
    mode: str = "attention",
    impl: str | None = None,
) -> None:
    """Adds one layer's importance to `scores`, float32 [sum of key_lens], in place.

    For affix key j of probe p, summed over p's query rows r and all query heads h in float32:
        mode "attention":        exp(scale * q[r, h] . K[j] - lse[r, h]), the attention weight really paid
        mode "attention_affix":  the same with the log-sum-exp over p's affix keys only (`lse` is not read)
    A grouped key head counts once per query head.

    q: [N, Hq, D]; k_pool: [S, Hkv, D]; lse: float32 [N, Hq], what attention returned for these q, natural log.
    Raises ValueError for an unknown mode or implementation, a wrong shape or dtype, or a missing lse.
    """
    if mode not in MODES:
        raise ValueError(f"unknown importance mode {mode!r}; valid modes: {', '.join(MODES)}")
    if scores.shape != (targets.num_keys,) or scores.dtype != torch.float32:
        raise ValueError(f"scores must be float32 ({targets.num_keys},), got {scores.dtype} {tuple(scores.shape)}")
    if mode == "attention" and (lse is None or lse.shape != q.shape[:2]):
        raise ValueError(f"mode 'attention' needs lse of shape {tuple(q.shape[:2])}")
    if not len(targets.query_rows) or not targets.num_keys:
        return
    name = impl or default_impl(q.device.type)
    _REGISTRY.get(name)(scores, q, k_pool, lse if mode == "attention" else None, targets, scale)
