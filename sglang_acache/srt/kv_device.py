"""The K/V pool as the span tree's slot pool, and what must be done to slots outside a forward."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from acache_kernels.rebase import rebase_kv

from sglang_acache.core.spans import Rebase


class AllocatorPool:
    """SGLang's token allocator as the core's ``SlotPool``: private and shared slots come from the same pool."""

    def __init__(self, allocator: Any) -> None:
        self.allocator = allocator

    def alloc(self, n: int) -> np.ndarray | None:
        """``n`` slots, int64; None where fewer are free."""
        if n > self.allocator.available_size():
            return None
        slots = self.allocator.alloc(n)
        return None if slots is None else slots.cpu().numpy()

    def free(self, slots: np.ndarray) -> None:
        if len(slots):
            self.allocator.free(torch.from_numpy(np.ascontiguousarray(slots)).to(self.allocator.device))

    def available(self) -> int:
        return self.allocator.available_size()


class KvDevice:
    """Copies and checks of K/V by slot, over all layers."""

    def __init__(self, kv_pool: Any, inv_freq: torch.Tensor) -> None:
        layers = range(kv_pool.start_layer, kv_pool.start_layer + kv_pool.layer_num)
        self.keys = [kv_pool.get_key_buffer(layer) for layer in layers]
        self.values = [kv_pool.get_value_buffer(layer) for layer in layers]
        self.inv_freq = inv_freq

    def rebase(self, order: Rebase) -> None:
        """Copy a span's K/V to other slots, keys rotated by ``order.delta`` positions."""
        device = self.keys[0].device
        source = torch.from_numpy(order.src_slots).to(device)
        target = torch.from_numpy(order.dst_slots).to(device)
        rebase_kv(self.keys, self.values, source, target, int(order.delta), inv_freq=self.inv_freq)

    def digest(self, slots: np.ndarray) -> bytes:
        """A hash of every layer's K/V in ``slots``: equal before and after any number of readers."""
        index = torch.from_numpy(np.ascontiguousarray(slots)).to(self.keys[0].device)
        state = hashlib.blake2b(digest_size=16)
        for pool in (*self.keys, *self.values):
            state.update(pool[index].contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return state.digest()
