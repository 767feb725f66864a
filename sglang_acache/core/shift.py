"""Dream's shifted logits: the prediction for position i is read at position i - 1 (method section 2)."""

from __future__ import annotations

import numpy as np

from sglang_acache.core.canvas import Canvas


def logit_positions(masked_positions: np.ndarray, shift_logits: bool) -> np.ndarray:
    """Positions whose logits predict ``masked_positions``, int64, same shape."""
    return masked_positions - 1 if shift_logits else masked_positions


def first_query_position(canvas: Canvas, shift_logits: bool) -> int:
    """First position a step inside the current block must forward.

    It is the block's start, or the position before it while the shift still reads the block's first token there.
    """
    start = canvas.block_start
    return start - 1 if shift_logits and canvas.masked[start] else start
