"""Plans of a fixed size through FlashInfer's documented CUDA-graph mode: one wrapper a size, planned before a replay.

Not run on hardware so far: the calls are checked against FlashInfer's documented contract by a recording fake.

That mode fixes the number of requests and, by the first plan, the most rows; and q must have exactly the rows that
qo_indptr ends with. So every step is padded to `requests + 1` requests and to `queries` rows:

    step's requests | padding rows | no rows .. |     each of the latter reads the padding slot
"""

from collections.abc import Sequence

import torch

from acache_kernels.flashinfer_ops.attention import (
    FlashInferPlan,
    Planner,
    asking_requests,
    make_wrapper,
    workspace,
)
from acache_kernels.layout import RaggedLayout
from acache_kernels.static_plan import PADDING_SLOT, StaticCapacity, StaticPlan, largest, padding_indices

INT_WORKSPACE_BYTES = 8 << 20
"""As large as the one a wrapper makes for itself; it holds the plan, which only the wrapper planned last needs."""


class FlashInferStaticPlan(StaticPlan):
    def __init__(self, capacity: StaticCapacity, plan: FlashInferPlan, planner: Planner, dtype: torch.dtype) -> None:
        """`planner` of the plan's wrapper; plans of one wrapper share it too."""
        super().__init__(capacity, plan)
        self._planner = planner
        self._dtype = dtype

    def _update(self, layout: RaggedLayout) -> None:
        qo_indptr, kv_indptr, kv_indices = asking_requests(layout)
        padding = self.capacity.requests + 2 - len(qo_indptr)  # requests, at least one
        rows = torch.full((padding,), self.capacity.queries, dtype=torch.int32)  # the first of them takes all rows
        keys = kv_indptr[-1] + torch.arange(1, padding + 1, dtype=torch.int32)
        slots = kv_indices.new_full((padding,), PADDING_SLOT)
        step = (torch.cat((qo_indptr, rows)), torch.cat((kv_indptr, keys)), torch.cat((kv_indices, slots)))
        self._planner.plan(step, self.plan.heads, self._dtype)


def make_static_plans(
    capacities: Sequence[StaticCapacity],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device | str,
    backend: str,
) -> list[StaticPlan]:
    """One plan for each capacity, over one set of workspaces and read slots.

    What FlashInfer launches does not depend on the number of keys: capacities that differ in it share a wrapper.
    """
    if not capacities:
        return []
    most = largest(capacities)
    indices = padding_indices(most, most.requests + 1, device)
    floats = workspace(device)
    integers = torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    plans: dict[tuple[int, int], tuple[FlashInferPlan, Planner]] = {}
    for one in capacities:
        size = (one.requests, one.queries)
        if size not in plans:
            pointers = torch.zeros((3, one.requests + 2), dtype=torch.int32, device=device)
            wrapper = make_wrapper(
                floats,
                backend,
                use_cuda_graph=True,
                qo_indptr_buf=pointers[0],
                paged_kv_indptr_buf=pointers[1],
                paged_kv_indices_buf=indices,
                paged_kv_last_page_len_buf=pointers[2, :-1],
            )
            wrapper.reset_workspace_buffer(floats, integers)
            plans[size] = FlashInferPlan(one.queries, heads, wrapper), Planner(wrapper)
    return [FlashInferStaticPlan(one, *plans[one.requests, one.queries], dtype) for one in capacities]
