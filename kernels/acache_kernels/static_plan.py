"""Attention plans of a fixed size, whose buffers each step rewrites in place: what a CUDA graph can replay.

A plan made by `AttentionKernel.plan` has new tensors and new launch grids every step. A static plan has the same ones
always. A step that is smaller than the plan is padded:

    rows of q            step's queries            ┐ padding rows, up to `queries`
    requests             step's requests           │ they attend to slot 0 alone, which is nobody's
    read slots           step's kv_indices  stale  ┘ past the step's own nothing is read

So every row of the output is written, and no bit of it depends on what an earlier step left in a buffer.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from acache_kernels.layout import RaggedLayout

PADDING_SLOT = 0
"""The one slot that padding rows read. Whoever stores their keys must store them there, and nobody else may."""


@dataclass(frozen=True)
class StaticCapacity:
    """The largest step of a static plan. `longest` bounds the queries of one request, the others the whole step."""

    requests: int
    queries: int
    keys: int
    longest: int

    def __post_init__(self) -> None:
        if min(self.requests, self.queries, self.keys, self.longest) < 1:
            raise ValueError(f"a static plan must hold something: {self}")

    def fits(self, layout: RaggedLayout) -> bool:
        return (
            layout.batch_size <= self.requests
            and len(layout.kv_indices) <= self.keys
            and layout.num_queries <= self.queries
            and int(layout.qo_lens.max(initial=0)) <= self.longest
        )


class StaticPlan(ABC):
    """`plan` is what `AttentionKernel.run` takes: one object for good, over tensors that never move.

    `run` then takes q of `capacity.queries` rows. Plans that were made together share buffers: only the one that was
    updated last may run.
    """

    def __init__(self, capacity: StaticCapacity, plan: Any) -> None:
        self.capacity = capacity
        self.plan = plan

    def update(self, layout: RaggedLayout) -> None:
        """Make `plan` that of a step, in the order of the current stream. An empty step is allowed.

        Raises ValueError when the step does not fit, or has queries without keys.
        """
        if not self.capacity.fits(layout):
            raise ValueError(f"a step of {layout.batch_size} requests does not fit {self.capacity}")
        layout.check_answerable()
        self._update(layout)

    @abstractmethod
    def _update(self, layout: RaggedLayout) -> None: ...


def largest(capacities: Sequence[StaticCapacity]) -> StaticCapacity:
    """Holds every step that one of `capacities` (at least one) holds: what shared buffers are sized for."""
    return StaticCapacity(*(max(getattr(c, name) for c in capacities) for name in StaticCapacity.__annotations__))


def padding_indices(capacity: StaticCapacity, extra: int, device: torch.device | str) -> torch.Tensor:
    """int32 `[keys + extra]`: a buffer for read slots of which all name the padding slot."""
    return torch.full((capacity.keys + extra,), PADDING_SLOT, dtype=torch.int32, device=device)
