"""Just enough of SGLang's pools and requests to drive ``DiffusionEngine`` without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from sglang_acache.core.params import DiffusionParams
from sglang_acache.core.reuse_params import ReuseParams
from sglang_acache.core.spans import Discovery, SpanTree
from sglang_acache.srt.affix_cache import AffixCache
from sglang_acache.srt.affixes import Affixes
from sglang_acache.srt.engine import DiffusionEngine
from sglang_acache.srt.kv_device import AllocatorPool
from sglang_acache.srt.live_request import LiveRequest
from sglang_acache.srt.request_fields import RequestSpec
from sglang_acache.srt.worker import Choices, DiffusionStep

MASK, WORDS, HEAD_DIM = 99, 90, 4


class FakeAllocator:
    """SGLang's token allocator: a list of free slots; a slot freed twice is an error."""

    device = "cpu"

    def __init__(self, size: int) -> None:
        self.size = size
        self.free_slots = list(range(1, size + 1))

    def available_size(self) -> int:
        return len(self.free_slots)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        if need_size > len(self.free_slots):
            return None
        taken, self.free_slots = self.free_slots[:need_size], self.free_slots[need_size:]
        return torch.tensor(taken, dtype=torch.int64)

    def free(self, slots: torch.Tensor) -> None:
        freed = slots.tolist()
        assert not set(freed) & set(self.free_slots), "slot freed twice"
        assert len(set(freed)) == len(freed), "slot freed twice at once"
        self.free_slots += freed


class FakeRows:
    device = "cpu"

    def __init__(self, rows: int, width: int) -> None:
        self.req_to_token = torch.zeros((rows + 1, width), dtype=torch.int32)
        self.free_slots = list(range(1, rows + 1))

    def available_size(self) -> int:
        return len(self.free_slots)

    def alloc(self, reqs: list[Any]) -> list[int]:
        for req in reqs:
            req.kv.req_pool_idx = self.free_slots.pop()
        return [req.kv.req_pool_idx for req in reqs]

    def write(self, indices: Any, values: torch.Tensor) -> None:
        self.req_to_token[indices] = values


class FakeKv:
    """K/V by slot, as if the whole model were one layer: what a forward stores is chosen by the test."""

    def __init__(self, slots: int) -> None:
        self.keys = [torch.zeros((slots + 1, 1, HEAD_DIM))]
        self.values = [torch.zeros((slots + 1, 1, HEAD_DIM))]
        self.rebased: list[Any] = []

    def rebase(self, order: Any) -> None:
        self.keys[0][order.dst_slots] = self.keys[0][order.src_slots]
        self.values[0][order.dst_slots] = self.values[0][order.src_slots]
        self.rebased.append(order)

    def digest(self, slots: np.ndarray) -> bytes:
        return self.keys[0][slots].numpy().tobytes()


def fake_req(rid: str, tokens: list[int], max_new_tokens: int) -> Any:
    """The attributes of SGLang's ``Req`` that a live request reads and writes."""
    params = SimpleNamespace(
        max_new_tokens=max_new_tokens, sampling_seed=None, top_k=1, temperature=1.0, top_p=1.0, custom_params=None
    )
    kv = SimpleNamespace(req_pool_idx=None, kv_allocated_len=0, kv_committed_len=0, cache_protected_len=0)
    return SimpleNamespace(
        rid=rid,
        origin_input_ids_unpadded=tokens,
        sampling_params=params,
        kv=kv,
        output_ids=[],
        return_logprob=False,
        cache_salt=None,
        extra_key=None,
        cached_tokens=0,
        cached_tokens_device=0,
        to_finish=None,
    )


def fake_request(
    rid: str,
    tokens: list[int],
    max_new_tokens: int,
    reuse: ReuseParams,
    *,
    right: list[int] | None = None,
    group: str = "",
) -> LiveRequest:
    params = DiffusionParams(block_length=4, threshold=None, steps=None, factor=1.0)
    return LiveRequest(fake_req(rid, tokens, max_new_tokens), RequestSpec(params, right or [], group=group), reuse)


class World:
    """An engine over fake pools, and a runner that stores random K/V and draws random choices."""

    def __init__(self, slots: int, rows: int = 8, *, shift_logits: bool = False, seed: int = 0) -> None:
        self.allocator = FakeAllocator(slots)
        self.rows = FakeRows(rows, 512)
        self.kv = FakeKv(slots)
        pool = AllocatorPool(self.allocator)
        self.tree = SpanTree(pool, min_tokens=8, max_shared_tokens=slots // 2)
        self.affixes = Affixes(self.tree, Discovery(min_tokens=8), self.kv, debug=True)  # type: ignore[arg-type]
        self.cache = AffixCache(self.rows, self.allocator, 1, "cpu")
        self.cache.tree = self.tree
        self.cache.before_flush = self.affixes.before_flush
        self.engine = DiffusionEngine(
            req_to_token_pool=self.rows,
            slots=pool,
            affix_cache=self.cache,
            mask_token_id=MASK,
            shift_logits=shift_logits,
            step_tokens=256,
            affixes=self.affixes,
        )
        self.random = np.random.default_rng(seed)

    def step(self) -> int:
        """One step: plan, pretend to forward, commit, release what is complete. Returns the tokens forwarded."""
        step = self.engine.next_step()
        if step is None:
            return 0
        self._forward(step)
        self.engine.apply(step, self._choices(len(step.plan.logit_rows)))
        self.release([r for r in self.engine.live if r.state is not None and r.state.canvas.complete])
        return len(step.plan.tokens)

    def release(self, requests: list[LiveRequest]) -> None:
        """What the scheduler does when requests end."""
        for request in requests:
            kv = request.req.kv
            self.cache.free_kv_row(kv, [(0, kv.kv_allocated_len)])
            self.rows.free_slots.append(kv.req_pool_idx)
            kv.req_pool_idx = None
        self.engine.retire(requests)

    def _forward(self, step: DiffusionStep) -> None:
        slots = step.plan.write_slots
        assert (slots > 0).all(), "a forward would store to no slot or to slot 0"
        assert len(np.unique(slots)) == len(slots), "two rows of a step would store to the same slot"
        self.kv.keys[0][slots] = torch.from_numpy(self.random.random((len(slots), 1, HEAD_DIM), dtype=np.float32))
        for observer in step.observers:
            observer.scores += torch.from_numpy(self.random.random(len(observer.scores), dtype=np.float32))  # type: ignore[attr-defined]

    def _choices(self, rows: int) -> Choices:
        random = self.random.random(rows, dtype=np.float32)
        return Choices(self.random.integers(0, WORDS, rows), random, np.log(random))

    def check(self) -> None:
        """Every slot has one owner, and SGLang's memory check would hold."""
        self.tree.check_integrity()
        private = [slot for slots in self.cache.private_slots.values() for slot in slots.tolist()]
        assert len(set(private)) == len(private)
        assert not set(private) & set(self.allocator.free_slots)
        counted = self.cache.evictable_size() + self.cache.protected_size() + len(private)
        assert counted + self.allocator.available_size() == self.allocator.size
        for request in self.engine.live:
            self._check_maps(request)

    def _check_maps(self, request: LiveRequest) -> None:
        state, kv = request.state, request.req.kv
        assert state is not None
        own = set(self.cache.private_slots[kv.req_pool_idx].tolist())
        assert kv.kv_allocated_len - kv.cache_protected_len == len(own)
        written = state.write_slot_map[state.write_slot_map >= 0]
        assert set(written.tolist()) <= own, "the request could write a slot that is not its own"
        assert (self.rows.req_to_token[kv.req_pool_idx, : len(state.canvas)].numpy() == state.read_slot_map).all()
        assert (state.write_slot_map[state.recompute_positions] >= 0).all()
