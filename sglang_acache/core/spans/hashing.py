"""Hashes of all k-token windows of a prompt, vectorised."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sglang_acache.core.spans.types import TokenArray

HashArray = npt.NDArray[np.uint64]

MAX_WINDOW = 16
_BASE = 0xD6E8FEB86659FD93  # odd
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_S27, _S30, _S31 = np.uint64(27), np.uint64(30), np.uint64(31)


def window_for(min_tokens: int) -> int:
    """The window of an index that must find every run of at least ``min_tokens``: the largest power of two that
    fits, at most 16. A run shorter than ``min_tokens`` is never served, so no shorter window is ever needed."""
    if min_tokens < 1:
        raise ValueError(f"min_tokens must be at least 1, not {min_tokens}")
    return min(MAX_WINDOW, 1 << (min_tokens.bit_length() - 1))


def _scramble(x: HashArray) -> HashArray:
    x = (x ^ (x >> _S30)) * _MIX1
    x = (x ^ (x >> _S27)) * _MIX2
    return x ^ (x >> _S31)


def window_hashes(tokens: TokenArray, width: int) -> HashArray:
    """uint64[max(T - width + 1, 0)]: a hash of tokens[i : i + width] for every i. ``width`` is a power of two.

    A polynomial modulo 2**64 over scrambled token ids, built by doubling the width. Only a filter: whoever
    uses it compares the tokens.
    """
    if width & (width - 1) or width < 1:
        raise ValueError(f"the window must be a power of two, not {width}")
    if len(tokens) < width:
        return np.empty(0, np.uint64)
    hashes = _scramble(tokens.astype(np.uint64) + _GOLDEN)
    done, power = 1, _BASE
    while done < width:
        hashes = hashes[:-done] * np.uint64(power) + hashes[done:]
        done, power = done * 2, power * power % 2**64
    return _scramble(hashes)
