"""Paged attention in plain torch and, on CPUs, a C++ kernel: two kinds of work in one plan.

`Tasks` (native.py, where it serves): requests of up to `native_rows` packed rows. Keys and values are read where
they lie in the pool.

`Call`s: everything else. A call serves G requests of the same (queries, keys) shape:

    q rows   [G, n, Hq, D]    a slice of q when the requests are neighbours, else gathered once
    keys     [G, m, Hkv, D]   a view of the pool when the slots are one ascending run, else gathered into a
                              workspace that stays in the processor's cache

so nothing is padded, and what is read is what the maps name. The order of keys is the map's own, and how a
request is served depends on its own shape alone: its result is the same bits in any batch, but for calls of few
queries on several threads, which torch splits by the size of the whole call.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from acache_kernels.attention import AttentionKernel, check_heads, check_run_shapes
from acache_kernels.layout import RaggedLayout
from acache_kernels.torch_ops.native import TASK_ROWS, NativeAttention, load_native

GATHER_BYTES = 1 << 19
"""Most bytes of keys gathered for one call: keys and values together then stay within a core's L2 cache."""
VIEW_BYTES = 1 << 15
"""From this many bytes of keys on, a request whose slots are one run gets its own call on a pool view."""


@dataclass(frozen=True)
class Call:
    """One SDPA call over `size` requests of equal shape."""

    size: int
    num_queries: int  # per request
    num_keys: int  # per request
    rows: slice | torch.Tensor  # of q: a slice, or int64 [size * num_queries]
    run: slice | None  # pool slots, when they are one run (then size is 1)
    slots: torch.Tensor | None  # int64 [size * num_keys] otherwise


@dataclass(frozen=True)
class TorchPlan:
    num_queries: int
    heads: tuple[int, int, int]  # Hq, Hkv, D
    slots: torch.Tensor  # int64, the layout's kv_indices
    tasks: torch.Tensor | None  # int64 [T, native.TASK_FIELDS]
    calls: tuple[Call, ...]


def native_rows(head_dim: int, dtype: torch.dtype) -> int:
    """Packed rows (query x head of the group) of a request up to which the C++ kernel is the faster one."""
    return 1 << 62 if head_dim <= 32 or dtype == torch.bfloat16 else 512


class TorchAttention(AttentionKernel):
    """The reference on any device and the product on CPUs. Takes float32, bfloat16, float16 and float64.

    `native=False` does without the C++ kernel, as happens by itself where there is no compiler.
    """

    name = "torch"

    def __init__(self, native: bool = True) -> None:
        self._native: NativeAttention | None = load_native() if native else None
        self._workspace: dict[torch.dtype, torch.Tensor] = {}

    def plan(
        self,
        layout: RaggedLayout,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> TorchPlan:
        group = check_heads(num_q_heads, num_kv_heads, head_dim)
        layout.check_answerable()
        planner = _Planner(layout, num_kv_heads * head_dim * dtype.itemsize)
        rows = layout.qo_lens * group
        few = np.zeros(len(rows), dtype=bool)
        if self._native and self._native.serves(head_dim, dtype) and layout.device.type == "cpu":
            few = (rows > 0) & (rows <= native_rows(head_dim, dtype))
        tasks = planner.tasks(np.flatnonzero(few), rows) if few.any() else None
        calls = planner.calls(np.flatnonzero(~few & (rows > 0)))
        heads = (num_q_heads, num_kv_heads, head_dim)
        return TorchPlan(layout.num_queries, heads, planner.slots, tasks, calls)

    def run(
        self,
        plan: TorchPlan,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        *,
        scale: float,
        return_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        check_run_shapes(plan.num_queries, plan.heads, q, k_pool, v_pool)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
        if plan.tasks is not None:
            assert self._native is not None
            self._native.attend(plan.tasks, plan.slots, q, k_pool, v_pool, out, lse, scale)
        for call in plan.calls:
            keys, values = self._keys_values(call, k_pool, v_pool)
            queries = q[call.rows].view(call.size, call.num_queries, *q.shape[1:])
            part, part_lse = _attend(queries, keys, values, scale)
            out[call.rows] = part.reshape(-1, *q.shape[1:])
            if lse is not None:
                lse[call.rows] = part_lse.reshape(-1, q.shape[1]).float()
        return out, lse

    def _keys_values(self, call: Call, k_pool: torch.Tensor, v_pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [G, m, Hkv, D] of a call; valid until the next call."""
        if call.run is not None:
            return k_pool[call.run].unsqueeze(0), v_pool[call.run].unsqueeze(0)
        assert call.slots is not None
        count, row = len(call.slots), k_pool.shape[1:]
        workspace = self._buffer(2 * count * row.numel(), k_pool)
        keys, values = workspace.view(2, count, *row).unbind(0)
        torch.index_select(k_pool, 0, call.slots, out=keys)
        torch.index_select(v_pool, 0, call.slots, out=values)
        shape = (call.size, call.num_keys, *row)
        return keys.view(shape), values.view(shape)

    def _buffer(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        buffer = self._workspace.get(like.dtype)
        if buffer is None or buffer.numel() < numel or buffer.device != like.device:
            buffer = self._workspace[like.dtype] = like.new_empty(numel)
        return buffer[:numel]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """q [G, n, Hq, D], k and v [G, m, Hkv, D] -> out [G, n, Hq, D], lse [G, n, Hq]."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=scale)
    else:
        out, lse = _attend_literally(q, k, v, scale)
    return out.transpose(1, 2), lse.transpose(1, 2)


def _attend_literally(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the flash kernel, heads before rows, with the scores written out in float32 or better."""
    wide = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    keys, values = (x.to(wide).repeat_interleave(group, dim=1) for x in (k, v))
    scores = scale * (q.to(wide) @ keys.mT)
    lse = torch.logsumexp(scores, dim=-1)
    return (torch.exp(scores - lse.unsqueeze(-1)) @ values).to(q.dtype), lse


class _Planner:
    """Cuts a layout into tasks and calls. All its work is on the host, in numpy."""

    def __init__(self, layout: RaggedLayout, key_bytes: int) -> None:
        self.slots = layout.kv_indices.long().contiguous()
        self._layout = layout
        self._key_bytes = key_bytes
        self._row_start = np.cumsum(layout.qo_lens) - layout.qo_lens
        self._key_start = np.cumsum(layout.kv_lens) - layout.kv_lens

    def tasks(self, requests: npt.NDArray[np.int64], packed_rows: npt.NDArray[np.int64]) -> torch.Tensor:
        """Tasks of the C++ kernel, int64 [T, TASK_FIELDS], the longest first to balance threads."""
        counts = -(-packed_rows[requests] // TASK_ROWS)
        owner = np.repeat(requests, counts)
        tile = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * TASK_ROWS
        keys = self._layout.kv_lens[owner]
        columns = (self._row_start[owner], packed_rows[owner], tile, self._key_start[owner], keys)
        table = np.stack(columns, axis=1)
        return torch.from_numpy(table[np.argsort(-keys, kind="stable")])

    def calls(self, requests: npt.NDArray[np.int64]) -> tuple[Call, ...]:
        run_start = self._find_runs() if len(requests) else []
        groups: dict[tuple[int, int], list[int]] = {}
        calls: list[Call] = []
        for b in requests.tolist():
            n, m = int(self._layout.qo_lens[b]), int(self._layout.kv_lens[b])
            if run_start[b] >= 0 and m * self._key_bytes >= VIEW_BYTES:
                row, slot = int(self._row_start[b]), run_start[b]
                calls.append(Call(1, n, m, slice(row, row + n), slice(slot, slot + m), None))
            else:
                groups.setdefault((n, m), []).append(b)
        for (n, m), members in groups.items():
            most = max(1, GATHER_BYTES // (m * self._key_bytes))
            calls += [self._gather_call(members[i : i + most], n, m) for i in range(0, len(members), most)]
        return tuple(calls)

    def _find_runs(self) -> list[int]:
        """Per request the first slot when its map is one ascending run, else -1 (always, off the host)."""
        layout = self._layout
        if layout.device.type != "cpu" or not len(self.slots):
            return [-1] * layout.batch_size
        slots = self.slots.numpy()
        breaks = np.concatenate(([0], np.cumsum(np.diff(slots) != 1)))
        first = np.minimum(self._key_start, len(slots) - 1)
        last = np.maximum(self._key_start + layout.kv_lens - 1, 0)
        whole = (breaks[first] == breaks[last]) & (layout.kv_lens > 0)
        return np.where(whole, slots[first], -1).tolist()

    def _gather_call(self, requests: list[int], n: int, m: int) -> Call:
        starts = self._row_start[requests]
        row = int(starts[0])
        rows: slice | torch.Tensor = slice(row, row + len(requests) * n)
        if not np.array_equal(starts, row + n * np.arange(len(requests))):
            table = starts[:, None] + np.arange(n)
            rows = torch.from_numpy(table.reshape(-1)).to(self._layout.device)
        parts = [self.slots[k : k + m] for k in self._key_start[requests].tolist()]
        slots = parts[0] if len(parts) == 1 else torch.cat(parts)
        return Call(len(requests), n, m, rows, None, slots)
