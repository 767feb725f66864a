"""Declared text: the tokens that do not depend on what stands before and after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from sglang_acache.core.spans.types import TokenArray, as_tokens

CONTEXTS = (("\n", "\n"), (" ", " "), ("a", "a"), (".", "."), ("\n\n", "\n\n"), (": ", " a"))
_SLACK = 8  # tokens by which an edge may shift


def stable_interior(
    encode: Callable[[str], Sequence[int]], text: str, contexts: Sequence[tuple[str, str]] = CONTEXTS
) -> TokenArray:
    """The longest run of encode(text) found again, at the same place, in every encode(before + text + after).

    A tokenizer may merge the first and last tokens of a text with its neighbours. Declaring only the interior lets the
    span match in all contexts; the edges are recomputed as prompt tokens. Empty if nothing is stable.
    """
    alone = as_tokens(encode(text))
    first, last = 0, len(alone)
    for before, after in contexts:
        start, stop = _longest_common(alone, as_tokens(encode(before + text + after)))
        first, last = max(first, start), min(last, stop)
    return alone[first : max(first, last)]


def _longest_common(alone: TokenArray, within: TokenArray) -> tuple[int, int]:
    """Longest run [start, stop) of ``alone`` that equals ``within`` at one shift."""
    best = (0, 0)
    for shift in range(-_SLACK, len(within) - len(alone) + _SLACK + 1):
        low, high = max(0, -shift), min(len(alone), len(within) - shift)
        if high > low:
            start, stop = _longest_true(alone[low:high] == within[low + shift : high + shift])
            if stop - start > best[1] - best[0]:
                best = (low + start, low + stop)
    return best


def _longest_true(flags: npt.NDArray[np.bool_]) -> tuple[int, int]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    if not len(edges):
        return 0, 0
    longest = int((edges[1::2] - edges[::2]).argmax())
    return int(edges[2 * longest]), int(edges[2 * longest + 1])
