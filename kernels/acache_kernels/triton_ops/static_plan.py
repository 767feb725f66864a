"""Plans of a fixed size for the Triton attention: work lists of a fixed length, in buffers that each step rewrites.

Not run on a GPU so far: tested under Triton's interpreter, where every launch of a plan is seen to have the same grid
and the same addresses.

    tables, one int32 buffer       a class the step does not use has idle lines only
      class 32    work    | step's lines | idle ..  ]     an idle line has no rows and no keys:
                  merges  | step's lines | idle ..  ]     its program loads nothing more and stores nothing
      class 64    work ..
    kv_indices    | step's read slots | stale .. | padding slot |
    part_out, part_lse   for the plan that needs most
"""

from collections.abc import Sequence

import numpy as np
import torch

from acache_kernels.layout import RaggedLayout
from acache_kernels.static_plan import StaticCapacity, StaticPlan, largest, padding_indices
from acache_kernels.triton_ops.attention import Launch, TileShape, TritonPlan, part_buffers, tile_shapes
from acache_kernels.triton_ops.attention_kernels import MERGE_FIELDS, WORK_FIELDS
from acache_kernels.triton_ops.work_lists import Bounds, Requests, bounds, by_class, work_lists

Heads = tuple[int, int, int]  # Hq, Hkv, D


class TritonStaticPlan(StaticPlan):
    """`capacity.requests + 1` requests at most: the last of them are the padding rows."""

    def __init__(
        self,
        capacity: StaticCapacity,
        heads: Heads,
        shapes: Sequence[TileShape],
        sizes: Sequence[Bounds],
        buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        """`buffers`: kv_indices, part_out and part_lse, at least as large as this capacity needs."""
        self._group = heads[0] // heads[1]
        self._sizes = sizes
        lines = [(size.work, WORK_FIELDS) for size in sizes] + [(size.merges, MERGE_FIELDS) for size in sizes]
        self._table = torch.zeros(sum(n * fields for n, fields in lines), dtype=torch.int32, device=buffers[0].device)
        parts = self._table.split([n * fields for n, fields in lines])
        lists = [part.view(shape) for part, shape in zip(parts, lines, strict=True)]
        launches = [
            Launch(shape, work, merges, size.parts)
            for shape, work, merges, size in zip(shapes, lists, lists[len(sizes) :], sizes, strict=False)
        ]
        super().__init__(capacity, TritonPlan(capacity.queries, heads, buffers[0], tuple(launches), *buffers[1:]))

    def _update(self, layout: RaggedLayout) -> None:
        plan: TritonPlan = self.plan
        padding_key = len(plan.kv_indices) - 1
        padding = self.capacity.queries - layout.num_queries
        requests = Requests.of(layout, self._group)
        classes = by_class(requests, [launch.shape.block_m for launch in plan.launches])
        classes[-1] = classes[-1].with_padding(padding, layout.num_queries, self._group, padding_key)
        works, merges = [], []
        for launch, members, size in zip(plan.launches, classes, self._sizes, strict=True):
            lists = work_lists(members, launch.shape.block_m)
            works.append(_fill(lists.work, size.work))
            merges.append(_fill(lists.merges, size.merges))
        table = torch.from_numpy(np.concatenate(works + merges))
        if self._table.is_cuda:
            table = table.pin_memory()  # a fresh piece of pinned memory: the last step's may still be under way
        self._table.copy_(table, non_blocking=True)
        plan.kv_indices[: len(layout.kv_indices)].copy_(layout.kv_indices)


def _fill(lines: np.ndarray, count: int) -> np.ndarray:
    """`lines` and idle ones up to `count`, flat."""
    assert len(lines) <= count, "work_lists.bounds is wrong"
    return np.concatenate((lines, np.zeros((count - len(lines), lines.shape[1]), dtype=np.int32))).ravel()


def make_static_plans(
    capacities: Sequence[StaticCapacity], heads: Heads, dtype: torch.dtype, device: torch.device | str
) -> list[StaticPlan]:
    """One plan for each capacity, over one set of read slots and partial results."""
    if not capacities:
        return []
    rows = max(part_rows(one, heads, dtype) for one in capacities)
    buffers = (padding_indices(largest(capacities), 1, device), *part_buffers(rows, heads[2], device))
    return [TritonStaticPlan(one, heads, *_launch_sizes(one, heads, dtype), buffers) for one in capacities]


def part_rows(capacity: StaticCapacity, heads: Heads, dtype: torch.dtype) -> int:
    """Partial results of the class that has most of them; the classes run one after another."""
    shapes, sizes = _launch_sizes(capacity, heads, dtype)
    return max(size.parts * heads[1] * shape.block_m for shape, size in zip(shapes, sizes, strict=True))


def _launch_sizes(
    capacity: StaticCapacity, heads: Heads, dtype: torch.dtype
) -> tuple[Sequence[TileShape], Sequence[Bounds]]:
    """The tile classes that a plan launches, and how much each may have to do."""
    group = heads[0] // heads[1]
    shapes = classes_in_use(tile_shapes(heads[2], dtype), capacity.longest * group)
    return shapes, [_aligned(bounds(capacity, group, shape.block_m, last=shape is shapes[-1])) for shape in shapes]


def _aligned(size: Bounds) -> Bounds:
    """Lists of four lines each, so that every one starts at 16 bytes: Triton compiles for such addresses."""
    return Bounds(-(-size.work // 4) * 4, -(-size.merges // 4) * 4, size.parts)


def classes_in_use(shapes: Sequence[TileShape], packed_rows: int) -> Sequence[TileShape]:
    """Up to the class that holds the longest request: others would only ever launch idle programs."""
    count = sum(shape.block_m < packed_rows for shape in shapes) + 1
    return shapes[:count]
