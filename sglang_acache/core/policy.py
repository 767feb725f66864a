"""What a denoising step forwards: the cache policies inside one request (method section 3).

A policy only answers which positions a step *inside* a block forwards. A block's first step always forwards the
recompute set (the whole canvas, or less where shared spans are read), which stores fresh K/V for it.
"""

from __future__ import annotations

from typing import Protocol

from sglang_acache.core.canvas import Canvas
from sglang_acache.core.registry import Registry
from sglang_acache.core.shift import first_query_position


class CachePolicy(Protocol):
    exact: bool
    """Whether the tokens equal those of forwarding the whole canvas at every step."""

    def step_range(self, canvas: Canvas, shift_logits: bool) -> tuple[int, int] | None:
        """Half-open range of positions for a step inside a block; None = forward the recompute set again."""


class NoCache:
    """Every step forwards the whole recompute set."""

    exact = True

    def step_range(self, canvas: Canvas, shift_logits: bool) -> tuple[int, int] | None:
        return None


class PrefixCache:
    """Steps inside a block forward from the block's start to the end of the canvas."""

    exact = False

    def step_range(self, canvas: Canvas, shift_logits: bool) -> tuple[int, int] | None:
        return first_query_position(canvas, shift_logits), len(canvas)


class DualCache:
    """Steps inside a block forward the block alone."""

    exact = False

    def step_range(self, canvas: Canvas, shift_logits: bool) -> tuple[int, int] | None:
        return first_query_position(canvas, shift_logits), canvas.block_stop


CACHE_POLICIES: Registry[CachePolicy] = Registry("cache")
CACHE_POLICIES.register("none", NoCache())
CACHE_POLICIES.register("prefix", PrefixCache())
CACHE_POLICIES.register("dual", DualCache())
