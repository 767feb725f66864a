"""Scores for anchor selection, summed over layers while a probe's forward runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from acache_kernels.importance import accumulate_importance
from acache_kernels.layout import ImportanceTargets

from sglang_acache.srt.step import LayerAttention


@dataclass(frozen=True, slots=True)
class ProbeRows:
    """One probe within the step's ragged batch.

    ``query_rows`` int64 ``[m]``: rows that are mask queries; ``affix_rows`` int64 ``[L]``: rows of the affix itself
    (only where it is forwarded too); ``key_slots`` int64 ``[L]``: the affix's shared slots.
    """

    query_rows: np.ndarray
    key_slots: np.ndarray
    affix_rows: np.ndarray


class AttentionImportance:
    """Sums attention paid to affix tokens; ``mode`` as in ``acache_kernels.importance``."""

    def __init__(self, probes: Sequence[ProbeRows], mode: str, device: Any) -> None:
        self.mode = mode
        self.lengths = [len(probe.key_slots) for probe in probes]
        self.targets = ImportanceTargets.build(
            torch.from_numpy(np.concatenate([probe.query_rows for probe in probes])).to(device),
            [len(probe.query_rows) for probe in probes],
            torch.from_numpy(np.concatenate([probe.key_slots for probe in probes])).to(device),
            self.lengths,
        )
        self.scores = torch.zeros(sum(self.lengths), dtype=torch.float32, device=device)

    def observe(self, attention: LayerAttention) -> None:
        accumulate_importance(
            self.scores,
            attention.query,
            attention.k_pool,
            attention.lse,
            self.targets,
            scale=attention.scale,
            mode=self.mode,
        )


class KvDeviation:
    """Sums the squared L2 distance of fresh K and V from shared K and V over layers and heads (CacheBlend)."""

    mode = "kv_deviation"

    def __init__(self, probes: Sequence[ProbeRows], device: Any) -> None:
        self.lengths = [len(probe.key_slots) for probe in probes]
        self.rows = torch.from_numpy(np.concatenate([probe.affix_rows for probe in probes])).to(device)
        self.slots = torch.from_numpy(np.concatenate([probe.key_slots for probe in probes])).to(device)
        self.scores = torch.zeros(sum(self.lengths), dtype=torch.float32, device=device)

    def observe(self, attention: LayerAttention) -> None:
        for fresh, pool in ((attention.key, attention.k_pool), (attention.value, attention.v_pool)):
            difference = fresh[self.rows].float() - pool[self.slots].float()
            self.scores += difference.square().sum(dim=(1, 2))


Scorer = AttentionImportance | KvDeviation


def build_scorer(needs: str, probes: Sequence[ProbeRows], device: Any) -> Scorer:
    """The observer that computes what a selector needs for ``probes`` of one step."""
    return KvDeviation(probes, device) if needs == "kv_deviation" else AttentionImportance(probes, needs, device)
