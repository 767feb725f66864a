"""Denoising as the method says, slowly and plainly: one request, one step after another, no batching."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from integration_tests.oracle.cached_transformer import CachedTransformer

LogitsFn = Callable[[torch.Tensor], torch.Tensor]  # tokens [T] -> [T, V]


@dataclass(frozen=True)
class Decoding:
    """How to denoise. Exactly one of ``steps`` (over the whole generation region), ``threshold``, ``factor``.

    ``vocab_size``: real tokens; ``eos_ids`` empty = never stop early; ``shift``: the prediction for position i is
    read at i - 1.
    """

    mask_id: int
    vocab_size: int
    block_length: int = 32
    steps: int | None = None
    threshold: float | None = None
    factor: float | None = None
    rule: str = "low_confidence"
    shift: bool = False
    eos_ids: tuple[int, ...] = ()


@dataclass
class Result:
    """``canvas``: all T tokens, still-masked positions holding the mask token; ``masked``: those positions.

    ``commits``: per step, the positions committed, ascending. ``output``: generated tokens up to
    ``max_new_tokens``, cut after the first end-of-sequence token.
    """

    canvas: list[int]
    masked: set[int]
    output: list[int]
    commits: list[list[int]] = field(default_factory=list)


class Predictor(Protocol):
    """Where logits come from: this is what a cache policy decides."""

    def predict(
        self, tokens: torch.Tensor, rows: list[int], first_query: int, block_stop: int, block_start_step: bool
    ) -> torch.Tensor:
        """Logits ``[len(rows), V]`` read at positions ``rows``.

        A step inside the block has to forward from ``first_query`` on; ``block_start_step`` marks a block's first.
        """


class FullForward:
    """Cache ``none``: every step forwards the whole canvas, by any implementation."""

    def __init__(self, logits_fn: LogitsFn) -> None:
        self.logits_fn = logits_fn

    def predict(
        self, tokens: torch.Tensor, rows: list[int], first_query: int, block_stop: int, block_start_step: bool
    ) -> torch.Tensor:
        return self.logits_fn(tokens)[rows]


class CachedForward:
    """Caches ``prefix`` and ``dual``: a block's first step forwards everything, the others a part."""

    def __init__(self, model: CachedTransformer, to_end: bool) -> None:
        self.model, self.to_end = model, to_end

    def predict(
        self, tokens: torch.Tensor, rows: list[int], first_query: int, block_stop: int, block_start_step: bool
    ) -> torch.Tensor:
        if block_start_step:
            self.cache = self.model.empty_cache(len(tokens))
            queries = torch.arange(len(tokens))
        else:
            queries = torch.arange(first_query, len(tokens) if self.to_end else block_stop)
        hidden = self.model.forward(tokens, queries, self.cache)
        return self.model.logits(hidden[torch.searchsorted(queries, torch.tensor(rows))])


def predictor_for(cache: str, model: CachedTransformer, logits_fn: LogitsFn) -> Predictor:
    """The predictor of cache policy ``none``, ``prefix`` or ``dual``."""
    if cache == "none":
        return FullForward(logits_fn)
    return CachedForward(model, to_end={"prefix": True, "dual": False}[cache])


def generate(
    predictor: Predictor, left: Sequence[int], max_new_tokens: int, how: Decoding, right: Sequence[int] = ()
) -> Result:
    """Fill the masks between ``left`` and ``right``. Under the shift ``left`` must not be empty."""
    blocks = -(-max_new_tokens // how.block_length)
    start, stop = len(left), len(left) + blocks * how.block_length
    tokens = torch.tensor([*left, *[how.mask_id] * (stop - start), *right], dtype=torch.int64)
    masked = set(range(start, stop))
    result = Result([], masked, [])
    for block in range(blocks):
        first = start + block * how.block_length
        last = first + how.block_length
        step = 0
        while any(p in masked for p in range(first, last)) and not _finished(tokens, masked, start, stop, how):
            positions = [p for p in range(first, last) if p in masked]
            rows = [p - 1 for p in positions] if how.shift else positions
            first_query = first - 1 if how.shift and first in masked else first
            logits = predictor.predict(tokens, rows, first_query, last, step == 0)
            chosen, confidence = choose(logits, how)
            committed = commit(confidence, how, block, blocks, step)
            for index in committed:
                tokens[positions[index]] = chosen[index]
                masked.discard(positions[index])
            result.commits.append([positions[index] for index in committed])
            step += 1
    result.canvas = tokens.tolist()
    result.output = _cut(result.canvas[start : start + max_new_tokens], how)
    return result


def choose(logits: torch.Tensor, how: Decoding) -> tuple[list[int], list[float]]:
    """Greedy token and confidence of each row; the mask token and padding ids can never win nor weigh."""
    allowed = logits[:, : how.vocab_size].float().clone()
    allowed[:, how.mask_id] = -torch.inf
    chosen = allowed.argmax(dim=-1)
    probabilities = allowed.softmax(dim=-1)
    if how.rule in ("low_confidence", "maskgit_plus"):
        confidence = probabilities.gather(-1, chosen[:, None])[:, 0]
    elif how.rule == "topk_margin":
        best = probabilities.topk(2, dim=-1).values
        confidence = best[:, 0] - best[:, 1]
    elif how.rule == "entropy":
        confidence = torch.special.xlogy(probabilities, probabilities).sum(dim=-1)
    else:
        raise ValueError(f"no greedy reference for the rule {how.rule!r}")
    return chosen.tolist(), confidence.tolist()


def commit(confidence: list[float], how: Decoding, block: int, blocks: int, step: int) -> list[int]:
    """Which of the block's masked positions become final, ascending. Equal confidences: the earlier first."""
    surest = sorted(range(len(confidence)), key=lambda index: (-confidence[index], index))
    if how.threshold is not None:
        limit = float(torch.tensor(how.threshold, dtype=torch.float32))
        count = max(1, sum(value >= limit for value in confidence))
    elif how.factor is not None:
        count = 1
        for m in range(1, len(confidence) + 1):
            if (m + 1) * (1 - confidence[surest[m - 1]]) < how.factor:
                count = m
    else:
        assert how.steps is not None
        count = _scheduled(how.block_length, _steps_of_block(how, block, blocks), step)
    return sorted(surest[:count])


def _steps_of_block(how: Decoding, block: int, blocks: int) -> int:
    """Steps are dealt out to the blocks in turn; more than one step a token is no use."""
    assert how.steps is not None
    dealt = [how.steps // blocks + (1 if index < how.steps % blocks else 0) for index in range(blocks)]
    return min(dealt[block], how.block_length)


def _scheduled(tokens: int, steps: int, step: int) -> int:
    """Tokens of ``step`` when ``tokens`` are dealt out to ``steps``, the remainder to the first ones."""
    return tokens // steps + (1 if step < tokens % steps else 0)


def _finished(tokens: torch.Tensor, masked: set[int], start: int, stop: int, how: Decoding) -> bool:
    """Whether an end-of-sequence token is committed with no mask before it."""
    for position in range(start, stop):
        if position in masked:
            return False
        if int(tokens[position]) in how.eos_ids:
            return True
    return False


def _cut(output: list[int], how: Decoding) -> list[int]:
    for index, token in enumerate(output):
        if token in how.eos_ids:
            return output[: index + 1]
    return output
