"""Recurring spans anywhere in prompts, found on token ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_acache.core.selector import Ratio
from sglang_acache.core.spans.breakeven import DEFAULT_COSTS, Costs, SpanCost, choose_spans
from sglang_acache.core.spans.recurrence import RecentPrompts, Run
from sglang_acache.core.spans.types import Segment, SpanMatch, TokenArray, as_tokens


@dataclass(frozen=True)
class PromotionRule:
    """When a recurring run becomes a known span.

    1. It stood in at least ``min_seen`` distinct requests.
    2. Reuse pays for its encoding (``breakeven``): in a request like the one just seen, with its other known
    spans, the run has a positive value when its encoding is written off over ``seen - 1`` further uses. A run
    that came back n times is expected to come back n times more: the plain guess without any knowledge of the
    traffic. block_starts is only used if the caller does not say how many the request makes.
    """

    min_seen: int = 2
    ratio: Ratio = 0.2
    block_starts: int = 4
    costs: Costs = DEFAULT_COSTS

    def keep(
        self, canvas: int, known: Sequence[int], runs: Sequence[tuple[int, int]], block_starts: int | None
    ) -> list[bool]:
        """For each run (length, seen), whether to promote it; ``known``: lengths of the request's known spans."""
        spans = [SpanCost(length) for length in known]
        spans += [SpanCost(length, encode=length, uses=seen - 1) for length, seen in runs]
        starts = block_starts or self.block_starts
        worth = choose_spans(canvas, spans, starts, self.ratio, self.costs)[len(known) :]
        return [pays and seen >= self.min_seen for pays, (_, seen) in zip(worth, runs, strict=True)]


@dataclass(frozen=True, eq=False)
class Promotion:
    """Insert ``tokens`` into the tree. The first ``known`` of them are a known span, the rest becomes its child.
    ``start`` is where the last request had them: the offset to encode at, if encoded ahead of the next reader."""

    namespace: str
    tokens: TokenArray
    start: int
    seen: int
    known: int = 0


class Discovery:
    """Watches prompts and proposes spans. Knows nothing about K/V.

    Found are maximal runs: what two requests have in common, token by token, wherever it stands; where a
    tokenizer merged the edges with their neighbours, that is the interior. Name spaces never mix.
    """

    def __init__(self, min_tokens: int = 32, rule: PromotionRule | None = None, max_tokens: int = 1 << 20) -> None:
        self.min_tokens = min_tokens
        self.rule = rule or PromotionRule()
        self.recent = RecentPrompts(min_tokens, max_tokens)
        self._pending: dict[tuple[str, bytes], Promotion] = {}

    def observe(
        self,
        namespace: str,
        segments: Sequence[Segment],
        matches: Iterable[SpanMatch] = (),
        *,
        canvas: int | None = None,
        block_starts: int | None = None,
        request: str | None = None,
    ) -> None:
        """Take note of a prompt, once per request, at its admission.

        matches: what the tree found in it. canvas: all positions, masks included (default: the prompt only).
        request: requests of the same key (parallel samples of one prompt) are not distinct.
        """
        known = sorted((m.start, m.end) for m in matches)
        texts = [Segment(as_tokens(s.tokens), s.start) for s in segments]
        proposals: list[Promotion] = []
        documents = []
        for text in texts:
            marks = self.recent.marks(text.tokens)
            runs = self.recent.runs(namespace, request, text.tokens, marks)
            seen = np.ones(len(text.tokens), np.int32)
            for run in runs:
                np.maximum(seen[run.start : run.stop], run.seen + 1, out=seen[run.start : run.stop])
            documents.append((text.tokens, seen, marks))
            inside = [(s - text.start, e - text.start) for s, e in known]
            proposals += self._propose(namespace, text, runs, inside)
        for tokens, seen, marks in documents:  # only now: a request is not compared with itself
            self.recent.add(namespace, request, tokens, seen, marks)
        lengths = [(len(p.tokens) - p.known, p.seen) for p in proposals]
        total = sum(len(t.tokens) for t in texts) if canvas is None else canvas
        keep = self.rule.keep(total, [e - s for s, e in known], lengths, block_starts)
        for promotion in (p for p, wanted in zip(proposals, keep, strict=True) if wanted):
            self._pending.setdefault((namespace, promotion.tokens.tobytes()), promotion)

    def seed(self, namespace: str, tokens: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """A declared text counts as seen often enough: a prompt with only a part of it (other edges, a
        quotation) gets that part promoted at once."""
        ids = as_tokens(tokens)
        seen = np.full(len(ids), self.rule.min_seen - 1, np.int32)
        self.recent.add(namespace, None, ids, seen, self.recent.marks(ids))

    def promotions(self) -> list[Promotion]:
        """What has become worth knowing since the last call."""
        pending = list(self._pending.values())
        self._pending.clear()
        return pending

    def forget(self, namespace: str | None = None) -> None:
        """Drop all memory of the prompts of a name space, or of all."""
        self.recent.forget(namespace)
        for key in [k for k in self._pending if namespace is None or k[0] == namespace]:
            del self._pending[key]

    def _propose(self, namespace: str, text: Segment, runs: list[Run], known: list[tuple[int, int]]) -> list[Promotion]:
        """Of every run the parts that were seen often enough; longest first, without overlaps."""
        parts = [part for run in runs for part in _frequent(run, self.rule.min_seen, self.min_tokens)]
        taken = np.zeros(len(text.tokens), bool)
        proposals = []
        for first, last, seen in sorted(parts, key=lambda p: (p[0] - p[1], p[0])):
            for start, edge, stop in unknown_pieces(first, last, known, self.min_tokens):
                if not taken[edge:stop].any():
                    taken[edge:stop] = True
                    tokens = text.tokens[start:stop].copy()
                    proposals.append(Promotion(namespace, tokens, text.start + start, seen, edge - start))
        return proposals


def _frequent(run: Run, min_seen: int, min_tokens: int) -> list[tuple[int, int, int]]:
    """Maximal (start, stop, seen) within the run whose tokens all stood in ``min_seen`` requests."""
    often = np.concatenate([[False], run.seen + 1 >= min_seen, [False]])
    edges = np.flatnonzero(np.diff(often.astype(np.int8))).tolist()
    return [
        (run.start + a, run.start + b, int(run.seen[a:b].min()) + 1)
        for a, b in zip(edges[::2], edges[1::2], strict=True)
        if b - a >= min_tokens
    ]


def unknown_pieces(first: int, last: int, known: Sequence[tuple[int, int]], least: int) -> list[tuple[int, int, int]]:
    """What of the run [first, last) no known span covers, in pieces of at least ``least`` tokens.

    Each is (start, edge, stop): tokens[edge:stop] are new; tokens[start:edge] are the known span right before
    them whose child they become, empty if there is none within the run. ``known`` is sorted.
    """
    pieces = []
    start = edge = first
    for begin, end in known:
        if end <= first or begin >= last:
            continue
        if begin - edge >= least:
            pieces.append((start, edge, begin))
        start, edge = (begin if begin >= first else end), end
    if last - edge >= least:
        pieces.append((start, edge, last))
    return pieces
