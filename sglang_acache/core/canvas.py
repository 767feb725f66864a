"""The canvas: one request's fixed token grid (method section 1).

::

    0            gen_start                     gen_stop        length
    | left context | masked_1 ... masked_n      | right context |
                   |block 0|block 1| ... |block B-1|
"""

from __future__ import annotations

import numpy as np


class Canvas:
    """Tokens of one request and which of them are still to be generated.

    ``tokens`` int64 ``[length]``; ``masked`` bool ``[length]``. Whether a position is still to be generated is
    tracked in ``masked`` alone, never by token id: a prompt may contain the mask token's id as ordinary text.
    Invariants: ``masked`` is true only inside the generation region; a position that became false stays false;
    tokens outside the generation region never change; blocks before ``block`` hold no mask.
    """

    __slots__ = ("block", "block_length", "gen_start", "gen_stop", "masked", "num_blocks", "step", "tokens")

    def __init__(
        self,
        left: np.ndarray,
        right: np.ndarray,
        *,
        max_new_tokens: int,
        block_length: int,
        mask_token_id: int,
    ) -> None:
        self.block_length = block_length
        self.num_blocks = num_blocks(max_new_tokens, block_length)
        self.gen_start = len(left)
        self.gen_stop = self.gen_start + self.num_blocks * block_length
        generated = np.full(self.gen_stop - self.gen_start, mask_token_id, dtype=np.int64)
        self.tokens = np.concatenate([left, generated, right]).astype(np.int64, copy=False)
        self.masked = np.zeros(len(self.tokens), dtype=bool)
        self.masked[self.gen_start : self.gen_stop] = True
        self.block = 0
        self.step = 0  # denoising steps already done inside the current block

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def block_start(self) -> int:
        return self.gen_start + self.block * self.block_length

    @property
    def block_stop(self) -> int:
        return self.block_start + self.block_length

    def masked_positions(self) -> np.ndarray:
        """Positions of the current block still masked, ascending, int64."""
        start = self.block_start
        return np.flatnonzero(self.masked[start : self.block_stop]) + start

    def commit(self, positions: np.ndarray, tokens: np.ndarray) -> None:
        """Write final ``tokens`` at ``positions`` (masked ones of the current block) and advance the schedule.

        When the block holds no mask afterwards, the next block becomes current and its step count starts at 0.
        """
        self.tokens[positions] = tokens
        self.masked[positions] = False
        self.step += 1
        if not self.masked[self.block_start : self.block_stop].any():
            self.block += 1
            self.step = 0

    @property
    def complete(self) -> bool:
        return self.block >= self.num_blocks

    def committed_prefix(self) -> int:
        """Number of leading generated tokens that are final: the contiguous part that may be streamed."""
        start = self.block_start
        if self.complete:
            return self.gen_stop - self.gen_start
        in_block = self.masked[start : self.block_stop]
        return start - self.gen_start + int(in_block.argmax())


def num_blocks(max_new_tokens: int, block_length: int) -> int:
    """Blocks of ``block_length`` needed for ``max_new_tokens`` tokens: the last block is filled up."""
    return -(-max_new_tokens // block_length)


def canvas_length(left: int, right: int, max_new_tokens: int, block_length: int) -> int:
    """Tokens of the whole canvas, the number of K/V slots that a request without reuse reserves."""
    return left + num_blocks(max_new_tokens, block_length) * block_length + right
