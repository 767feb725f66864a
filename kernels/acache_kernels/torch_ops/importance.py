"""Affix importance in plain torch, a bounded block of scores at a time."""

import torch

from acache_kernels.layout import ImportanceTargets

BLOCK_SCORES = 1 << 20
"""Most scores (heads x queries x keys) written out at once."""


def accumulate_importance(
    scores: torch.Tensor,
    q: torch.Tensor,
    k_pool: torch.Tensor,
    lse: torch.Tensor | None,
    targets: ImportanceTargets,
    scale: float,
) -> None:
    """See `acache_kernels.importance.accumulate_importance`; without lse each probe's own is used."""
    rows = targets.query_rows.split(targets.query_lens.tolist())
    slots = targets.key_slots.split(targets.key_lens.tolist())
    parts = scores.split(targets.key_lens.tolist())
    for probe_rows, probe_slots, part in zip(rows, slots, parts, strict=True):
        if len(probe_rows) and len(probe_slots):
            keys = k_pool.index_select(0, probe_slots).float().permute(1, 2, 0)  # [Hkv, D, L]
            _accumulate_probe(part, q, keys, lse, probe_rows, scale)


def _accumulate_probe(
    part: torch.Tensor,
    q: torch.Tensor,
    keys: torch.Tensor,
    lse: torch.Tensor | None,
    rows: torch.Tensor,
    scale: float,
) -> None:
    kv_heads, head_dim, length = keys.shape
    for block in rows.split(max(1, BLOCK_SCORES // (q.shape[1] * length))):
        queries = q.index_select(0, block).float().mul_(scale)  # [m, Hq, D]
        packed = queries.view(len(block), kv_heads, -1, head_dim).permute(1, 2, 0, 3)  # [Hkv, g, m, D]
        weights = torch.bmm(packed.reshape(kv_heads, -1, head_dim), keys)  # [Hkv, g * m, L]
        if lse is None:
            norm = torch.logsumexp(weights, dim=-1, keepdim=True)
        else:
            norm = lse.index_select(0, block).T.reshape(kv_heads, -1, 1)  # [Hkv, g * m, 1]
        part += weights.sub_(norm).exp_().sum(dim=(0, 1))
