"""Where slots come from."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from sglang_acache.core.spans.types import SlotArray


class SlotPool(Protocol):
    """The KV pool's allocator. Private and shared slots come from the same one."""

    def alloc(self, n: int) -> SlotArray | None:
        """n slots (int64[n]), owned by the caller until ``free``; None when fewer are free."""
        ...

    def free(self, slots: SlotArray) -> None: ...

    def available(self) -> int: ...


class ListSlotPool:
    """A pool without memory behind it, for tests and dry runs; detects double frees."""

    def __init__(self, size: int, first: int = 0) -> None:
        self.size = size
        self._first = first
        self._free = list(range(first + size - 1, first - 1, -1))
        self._is_free = np.ones(size, bool)

    def alloc(self, n: int) -> SlotArray | None:
        if n < 0:
            raise ValueError(f"cannot allocate {n} slots")
        if n > len(self._free):
            return None
        slots = np.array([self._free.pop() for _ in range(n)], np.int64)
        self._is_free[slots - self._first] = False
        return slots

    def free(self, slots: SlotArray) -> None:
        at = np.asarray(slots, np.int64) - self._first
        if len(np.unique(at)) != len(at) or self._is_free[at].any():
            raise ValueError("slot freed twice")
        self._is_free[at] = True
        self._free.extend((at + self._first).tolist())

    def available(self) -> int:
        return len(self._free)
