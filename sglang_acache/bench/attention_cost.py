"""What attention costs by query and key count: the server's kernel against dense attention over the same pairs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_acache.bench.report import Plot, Series, Table
from sglang_acache.bench.stats import Estimate, paired_ratio

HEADS, HEAD_DIM = 8, 64


@dataclass
class Cell:
    """Seconds by round of our kernel and of dense attention for ``batch`` entries of ``queries`` x ``keys``."""

    batch: int
    queries: int
    keys: int
    ours: list[float]
    dense: list[float]

    @property
    def ratio(self) -> Estimate:
        return paired_ratio(self.ours, self.dense)

    @property
    def milliseconds(self) -> float:
        return statistics.median(self.ours) * 1e3

    @property
    def nanoseconds_a_pair(self) -> float:
        return self.milliseconds * 1e6 / (self.batch * self.queries * self.keys * HEADS)


def measure(dtype_name: str, queries: list[int], keys: list[int], batches: list[int], rounds: int) -> list[Cell]:
    """In a process of its own. The dense side finds its queries and keys gathered and contiguous, outside the clock."""
    import torch

    dtype = getattr(torch, dtype_name)
    torch.manual_seed(0)
    cells = []
    for batch in batches:
        for query_count in queries:
            for key_count in keys:
                cells.append(_cell(batch, query_count, key_count, dtype, rounds))
    return cells


def _cell(batch: int, queries: int, keys: int, dtype: Any, rounds: int) -> Cell:
    import numpy as np
    import torch
    from acache_kernels import RaggedLayout, get_attention_kernel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    pool = batch * keys
    slots = torch.from_numpy(np.random.default_rng(0).permutation(pool))
    layout = RaggedLayout.build([queries] * batch, [keys] * batch, slots)
    q = torch.randn(batch * queries, HEADS, HEAD_DIM).to(device, dtype)
    k, v = (torch.randn(pool, HEADS, HEAD_DIM).to(device, dtype) for _ in range(2))
    kernel: Any = get_attention_kernel("triton" if device == "cuda" else "torch")
    plan = kernel.plan(
        layout, num_q_heads=HEADS, num_kv_heads=HEADS, head_dim=HEAD_DIM, dtype=dtype, device=torch.device(device)
    )
    dense_q, dense_k, dense_v = (
        x.view(batch, -1, HEADS, HEAD_DIM).transpose(1, 2).contiguous() for x in (q, k[slots], v[slots])
    )
    cell = Cell(batch, queries, keys, [], [])
    for turn in range(-1, rounds):
        ours = _time(lambda: kernel.run(plan, q, k, v, scale=HEAD_DIM**-0.5, return_lse=False))
        dense = _time(lambda: torch.nn.functional.scaled_dot_product_attention(dense_q, dense_k, dense_v))
        if turn >= 0:
            cell.ours.append(ours)
            cell.dense.append(dense)
    return cell


def _time(function: Callable[[], object]) -> float:
    import torch

    began = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def describe(dtype: str, cells: list[Cell]) -> tuple[Table, Plot]:
    table = Table(
        f"Attention by query and key count, {dtype}",
        ["entries", "queries", "keys", "ms", "ns a pair and head", "time / dense"],
        [
            [c.batch, c.queries, c.keys, f"{c.milliseconds:.3f}", f"{c.nanoseconds_a_pair:.2f}", c.ratio.text()]
            for c in cells
        ],
        note="Dense: scaled_dot_product_attention over queries and keys already gathered. Slots are in random order, "
        "the worst case of a read-slot map.",
    )
    series = []
    for batch, keys in sorted({(cell.batch, cell.keys) for cell in cells}):
        found = [cell for cell in cells if (cell.batch, cell.keys) == (batch, keys)]
        counts = [cell.queries for cell in found]
        series.append(Series(f"{batch} x {keys} keys", counts, [cell.nanoseconds_a_pair for cell in found]))
    label = "ns a query-key pair and head"
    plot = Plot(f"attention-{dtype}", f"Attention cost, {dtype}", "queries an entry", label, series, log_x=True)
    return table, plot
