"""One step on the device: the tensors of a ``StepPlan``, carried through SGLang's ``ForwardBatch``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from acache_kernels.layout import RaggedLayout

from sglang_acache.core.plan import StepPlan

STATE_KEY = "acache"
"""Key of ``ForwardBatch.model_specific_states`` under which a step travels to the model and the backend."""


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """One layer's attention of a step, after its K/V was stored.

    ``query`` ``[N, Hq, D]``, ``key`` and ``value`` ``[N, Hkv, D]``: the step's rows. ``k_pool`` and ``v_pool``
    ``[S, Hkv, D]``: the layer's K/V of all slots. ``lse`` float32 ``[N, Hq]``: log-sum-exp of the scaled scores.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    lse: torch.Tensor | None
    scale: float


class LayerObserver(Protocol):
    """Sees every layer's attention of a step, for instance to sum the importance of a span's tokens."""

    def observe(self, attention: LayerAttention) -> None: ...


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Device side of one step. ``logit_rows`` int64 ``[M]``: rows of the ragged batch whose logits are wanted.

    ``plan``: what the attention kernel planned for it beforehand; None leaves that to the step's first layer.
    """

    tokens: torch.Tensor  # int64 [N]
    positions: torch.Tensor  # int64 [N]
    write_slots: torch.Tensor  # int64 [N]
    logit_rows: torch.Tensor
    layout: RaggedLayout
    observers: Sequence[LayerObserver] = ()
    plan: Any = None

    @classmethod
    def build(cls, plan: StepPlan, device: torch.device | str, observers: Sequence[LayerObserver] = ()) -> StepTensors:
        tokens, positions, write_slots, logit_rows, read_slots = to_device(
            [plan.tokens, plan.positions, plan.write_slots, plan.logit_rows, plan.read_slots], device
        )
        layout = RaggedLayout.build(np.diff(plan.qo_indptr), np.diff(plan.kv_indptr), read_slots)
        return cls(tokens, positions, write_slots, logit_rows, layout, observers)


def to_device(arrays: Sequence[np.ndarray], device: torch.device | str) -> Sequence[torch.Tensor]:
    """int64 arrays to device tensors: one transfer for all of them, none on a CPU."""
    if torch.device(device).type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    packed = torch.from_numpy(np.concatenate(arrays)).pin_memory().to(device, non_blocking=True)
    return packed.split([len(array) for array in arrays])


def step_of(forward_batch: Any) -> StepTensors:
    """The step inside a ``ForwardBatch`` built by our worker."""
    states = forward_batch.model_specific_states
    if not states or STATE_KEY not in states:
        raise RuntimeError("the acache attention backends run only batches of the diffusion scheduler")
    return states[STATE_KEY]
