"""Paged attention in plain torch: on CPUs through the flash kernel, on other devices the literal formula.

A plan is a list of calls. A call serves G requests of the same (queries, keys) shape:

    q rows   [G, n, Hq, D]    a slice of q when the requests are neighbours, else gathered once
    keys     [G, m, Hkv, D]   a view of the pool when the slots are one ascending run, else gathered into a
                              workspace that stays in the processor's cache

so nothing is padded, and what is read is what the maps name. The order of keys is the map's own, and no call
depends on which other requests share it: a request's result is the same bits in any batch.
"""

from dataclasses import dataclass

import numpy as np
import torch

from acache_kernels.attention import AttentionKernel, check_heads, check_run_shapes
from acache_kernels.layout import RaggedLayout

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
    calls: tuple[Call, ...]


class TorchAttention(AttentionKernel):
    """The reference on any device and the product on CPUs. Takes float32, bfloat16, float16 and float64."""

    name = "torch"

    def __init__(self) -> None:
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
        check_heads(num_q_heads, num_kv_heads, head_dim)
        layout.check_answerable()
        key_bytes = num_kv_heads * head_dim * dtype.itemsize
        calls = _Planner(layout, key_bytes).calls()
        return TorchPlan(layout.num_queries, (num_q_heads, num_kv_heads, head_dim), calls)

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
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
        for call in plan.calls:
            keys, values = self._keys_values(call, k_pool, v_pool)
            shape = (call.size, call.num_queries, *q.shape[1:])
            queries = q[call.rows].view(shape)
            part, part_lse = _attend(queries, keys, values, scale)
            out[call.rows] = part.reshape(-1, *q.shape[1:])
            if lse is not None:
                lse[call.rows] = part_lse.reshape(-1, q.shape[1]).float()
        return out, lse

    def _keys_values(
        self, call: Call, k_pool: torch.Tensor, v_pool: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
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


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
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
    """Cuts a layout into calls. All its work is on the host, in numpy."""

    def __init__(self, layout: RaggedLayout, key_bytes: int) -> None:
        self._layout = layout
        self._key_bytes = key_bytes
        self._row_start = np.concatenate(([0], np.cumsum(layout.qo_lens)))
        self._key_start = np.concatenate(([0], np.cumsum(layout.kv_lens)))
        self._slots = layout.kv_indices.long()
        self._run_start = self._find_runs()

    def calls(self) -> tuple[Call, ...]:
        groups: dict[tuple[int, int], list[int]] = {}
        calls: list[Call] = []
        for b, (n, m) in enumerate(zip(self._layout.qo_lens.tolist(), self._layout.kv_lens.tolist(), strict=True)):
            if n == 0:
                continue
            if self._run_start[b] >= 0 and m * self._key_bytes >= VIEW_BYTES:
                calls.append(self._view_call(b, n, m))
            else:
                groups.setdefault((n, m), []).append(b)
        for (n, m), requests in groups.items():
            most = max(1, GATHER_BYTES // (m * self._key_bytes))
            calls += [self._gather_call(requests[i : i + most], n, m) for i in range(0, len(requests), most)]
        return tuple(calls)

    def _find_runs(self) -> list[int]:
        """Per request the first slot when its map is one ascending run, else -1 (always, off the host)."""
        layout = self._layout
        if layout.device.type != "cpu" or not layout.batch_size or not len(self._slots):
            return [-1] * layout.batch_size
        slots = self._slots.numpy()
        breaks = np.concatenate(([0], np.cumsum(np.diff(slots) != 1), [0]))[: len(slots)]
        first = np.minimum(self._key_start[:-1], len(slots) - 1)
        last = np.maximum(self._key_start[1:] - 1, 0)
        whole = (breaks[first] == breaks[last]) & (layout.kv_lens > 0)
        return np.where(whole, slots[first], -1).tolist()

    def _view_call(self, b: int, n: int, m: int) -> Call:
        row, slot = int(self._row_start[b]), self._run_start[b]
        return Call(1, n, m, slice(row, row + n), slice(slot, slot + m), None)

    def _gather_call(self, requests: list[int], n: int, m: int) -> Call:
        first = requests[0]
        row = int(self._row_start[first])
        rows: slice | torch.Tensor = slice(row, row + len(requests) * n)
        starts = self._row_start[requests]
        if not np.array_equal(starts, row + n * np.arange(len(requests))):
            table = starts[:, None] + np.arange(n)
            rows = torch.from_numpy(table.reshape(-1)).to(self._layout.device)
        parts = [self._slots[k : k + m] for k in self._key_start[requests].tolist()]
        slots = parts[0] if len(parts) == 1 else torch.cat(parts)
        return Call(len(requests), n, m, rows, None, slots)
