"""Cost of finding spans in prompts: ``python -m sglang_acache.core.spans.bench_match``.

Prints milliseconds of processor time per 1,000 prompt tokens, medians, for matching and for discovery, with many
known spans; exits with 1 when an ordinary prompt costs more than the bound. Hostile prompts are printed beside them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median

import numpy as np

from sglang_acache.core.spans.discovery import Discovery
from sglang_acache.core.spans.pool import ListSlotPool
from sglang_acache.core.spans.tree import SpanTree
from sglang_acache.core.spans.types import Segment, TokenArray

BOUND_MS = 1.0
VOCABULARY = 126_000
Prompt = tuple[str, bool, Callable[[], TokenArray]]  # label, whether the bound applies, a fresh prompt


class Workload:
    """Known spans: half of them stand alone, half extend one of 50 common beginnings. Half are declared."""

    def __init__(self, spans: int, min_tokens: int, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.tree = SpanTree(ListSlotPool(1), min_tokens=min_tokens, max_spans=2 * spans)
        self.discovery = Discovery(min_tokens)
        beginnings = [self.text(64) for _ in range(50)]
        self.spans = []
        for i in range(spans):
            own = self.text(int(self.random.integers(min_tokens, 512)))
            self.spans.append(np.concatenate([beginnings[i % 50], own]) if i % 2 else own)
        for i, span in enumerate(self.spans):
            if i % 4 < 2:
                self.tree.declare("", span)
            else:
                self.tree.insert("", span)
        trap = np.concatenate([np.full(min_tokens - 1, 7), self.text(64)]).astype(np.int32)
        self.tree.declare("", trap)

    def text(self, n: int) -> TokenArray:
        return self.random.integers(0, VOCABULARY, n).astype(np.int32)

    def mixed(self, n: int) -> TokenArray:
        """Known spans, whole and in part, between fresh text."""
        parts: list[TokenArray] = []
        while sum(map(len, parts)) < n:
            span = self.spans[int(self.random.integers(len(self.spans)))]
            parts += [self.text(60), span, self.text(40), span[: len(span) // 2 + 1]]
        return np.concatenate(parts)[:n]

    def prompts(self) -> Iterator[Prompt]:
        for n in (250, 1_000, 4_000, 16_000):
            yield f"{n:6d} fresh tokens", n >= 1_000, lambda n=n: self.text(n)  # type: ignore[misc]
            yield f"{n:6d} tokens, known spans in it", n >= 1_000, lambda n=n: self.mixed(n)  # type: ignore[misc]
        yield "  4000 times the same token", False, lambda: np.full(4_000, 7, np.int32)
        yield "  4000 tokens of period 13", False, lambda: np.tile(self.text(13), 308)[:4_000]

    def measure(self, prompt: Callable[[], TokenArray], repeats: int) -> tuple[float, float]:
        """Milliseconds per 1,000 tokens of matching and of discovery."""
        match, observe = [], []
        for _ in range(repeats):
            segments = [Segment(prompt())]
            n = len(segments[0].tokens)
            begin = time.thread_time()
            matches = self.tree.match("", segments)
            middle = time.thread_time()
            self.discovery.observe("", segments, matches)
            self.discovery.promotions()
            end = time.thread_time()
            match.append((middle - begin) * 1e6 / n)
            observe.append((end - middle) * 1e6 / n)
        return median(match), median(observe)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spans", type=int, default=10_000)
    parser.add_argument("--min-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    work = Workload(options.spans, options.min_tokens, options.seed)
    for _ in range(200):  # recent prompts to compare with
        work.measure(lambda: work.mixed(1_000), 1)
    usage = work.tree.usage()
    print(f"{usage.spans} known spans in {usage.nodes} nodes, {work.discovery.recent.tokens_held} recent tokens")
    print(f"{'ms per 1,000 prompt tokens':38s}{'match':>8s}{'observe':>9s}{'both':>8s}")
    worst = 0.0
    for label, bounded, prompt in work.prompts():
        match, observe = work.measure(prompt, options.repeats)
        worst = max(worst, match + observe) if bounded else worst
        print(f"{label:38s}{match:8.3f}{observe:9.3f}{match + observe:8.3f}")
    print(f"worst ordinary prompt of 1,000 tokens or more: {worst:.3f} (bound {BOUND_MS})")
    return int(worst > BOUND_MS)


if __name__ == "__main__":
    sys.exit(main())
