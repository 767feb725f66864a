"""SGLang's prefix-cache seat, taken by the owner of a diffusion request's slots.

K/V of a full-bidirectional model must never enter SGLang's own radix tree: a prompt's K/V depends on the answer being
generated. This cache matches no prefixes; it knows which slots of a request's row are the request's own, so that
SGLang's release paths free those and nothing else, and it answers the memory check.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    DecLockRefResult,
    EvictResult,
    IncLockRefResult,
    MatchResult,
)

from sglang_acache.core.spans import SpanTree


class AffixCache(BasePrefixCache):
    """Row positions a request does not own are shared: ``free_kv_row`` leaves them alone.

    ``tree`` holds the shared spans; None where nothing is reused. ``before_flush`` ends what is under way.
    """

    def __init__(self, req_to_token_pool: Any, allocator: Any, page_size: int, device: Any) -> None:
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool_allocator = allocator
        self.page_size = page_size
        self.device = device
        self.disable = True
        self.root_node = None
        self.private_slots: dict[int, torch.Tensor] = {}

        self.tree: SpanTree | None = None
        self.before_flush: Callable[[], None] = lambda: None

    def own(self, row: int, slots: np.ndarray) -> None:
        """Record that the request in ``row`` of ``req_to_token`` owns ``slots`` int64 ``[n]``, in any order."""
        self.private_slots[row] = torch.from_numpy(slots).to(self.device)

    def free_kv_row(self, kv: Any, ranges: list[tuple[int, int]]) -> None:
        slots = self.private_slots.pop(kv.req_pool_idx, None)
        if slots is not None:
            self.token_to_kv_pool_allocator.free(slots)

    def reset(self) -> None:
        """Flush: called when nothing runs, right before SGLang marks every slot free."""
        self.private_slots.clear()
        if self.tree is not None:
            self.before_flush()
            assert not self.tree.handles, "flushed while spans are read: their slots would be freed twice"
            self.tree.flush()

    def evictable_size(self) -> int:
        return 0 if self.tree is None else self.tree.evictable

    def protected_size(self) -> int:
        return 0 if self.tree is None else self.tree.protected

    full_evictable_size = evictable_size
    full_protected_size = protected_size

    def match_prefix(self, params: Any) -> MatchResult:
        return MatchResult(device_prefix_len=0, last_device_node=None, last_host_node=None, best_match_node=None)

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Nothing of a running request may be kept: see the module's first lines."""

    def evict(self, params: Any) -> EvictResult:
        return EvictResult(num_tokens_evicted=0 if self.tree is None else self.tree.evict(params.num_tokens))

    def inc_lock_ref(self, node: Any) -> IncLockRefResult:
        return IncLockRefResult()

    def dec_lock_ref(self, node: Any, params: Any = None) -> DecLockRefResult:
        return DecLockRefResult()


def build_affix_cache(context: Any) -> AffixCache:
    """Factory for ``--radix-cache-backend acache``."""
    params = context.params
    return AffixCache(
        params.req_to_token_pool, params.token_to_kv_pool_allocator, params.page_size, context.server_args.device
    )
