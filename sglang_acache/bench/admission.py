"""Cost of finding known spans in prompts, by number of known spans and prompt length. No model is needed.

Matching and discovery run in the scheduler's thread when a request arrives, so their time is every request's time.
Measured in processor time of this thread; the bound is 1 ms per 1,000 prompt tokens for ordinary prompts.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field

import numpy as np
from tqdm import tqdm

from sglang_acache.bench.options import add_common, integers
from sglang_acache.bench.report import Plot, Report, Series, Table
from sglang_acache.bench.stats import Estimate, bootstrap
from sglang_acache.core.spans import Segment
from sglang_acache.core.spans.bench_match import BOUND_MS, Workload

KINDS = ("fresh text", "known spans in it")
BOUNDED_FROM = 1_000
"""Prompts shorter than this are shown; the bound is for a thousand tokens or more."""


@dataclass
class Cell:
    """Milliseconds per 1,000 prompt tokens, a sample a prompt."""

    spans: int
    tokens: int
    kind: str
    match: list[float] = field(default_factory=list)
    observe: list[float] = field(default_factory=list)

    @property
    def both(self) -> Estimate:
        return bootstrap(np.asarray(self.match) + np.asarray(self.observe))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser, model=None)
    parser.add_argument("--spans", type=integers, default=[10, 100, 1_000, 10_000])
    parser.add_argument("--prompt-tokens", type=integers, default=[250, 1_000, 4_000, 16_000])
    parser.add_argument("--min-affix-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=31)


def run(options: argparse.Namespace) -> int:
    if options.quick:
        options.spans, options.prompt_tokens, options.rounds = [10, 50], [250, 1_000], 3
    report = Report("admission", options.out, vars(options))
    cells: list[Cell] = []
    for spans in options.spans:
        cells += _measure(spans, options)
    _describe(report, cells)
    return report.write()


def _measure(spans: int, options: argparse.Namespace) -> list[Cell]:
    work = Workload(spans, options.min_affix_tokens, options.seed)
    for _ in range(10 if options.quick else 200):  # recent prompts for discovery to compare with
        _sample(work, work.mixed(1_000), Cell(0, 0, ""))
    cells = [Cell(spans, tokens, kind) for tokens in options.prompt_tokens for kind in KINDS]
    for _ in tqdm(range(options.rounds), desc=f"{spans} known spans", unit="round"):
        for cell in cells:
            prompt = work.text(cell.tokens) if cell.kind == KINDS[0] else work.mixed(cell.tokens)
            _sample(work, prompt, cell)
    return cells


def _sample(work: Workload, prompt: np.ndarray, cell: Cell) -> None:
    segments = [Segment(prompt)]
    begin = time.thread_time()
    matches = work.tree.match("", segments)
    middle = time.thread_time()
    work.discovery.observe("", segments, matches)
    work.discovery.promotions()
    end = time.thread_time()
    cell.match.append((middle - begin) * 1e6 / len(prompt))
    cell.observe.append((end - middle) * 1e6 / len(prompt))


def _describe(report: Report, cells: list[Cell]) -> None:
    table = report.add(
        Table(
            "Milliseconds per 1,000 prompt tokens",
            ["known spans", "prompt tokens", "prompt", "match", "discovery", "both", f"of the bound ({BOUND_MS:g} ms)"],
        )
    )
    for cell in cells:
        table.rows.append([
            cell.spans, cell.tokens, cell.kind, bootstrap(cell.match).text(3), bootstrap(cell.observe).text(3),
            cell.both.text(3), f"{cell.both.value / BOUND_MS:.0%}",
        ])  # fmt: skip
        if cell.tokens >= BOUNDED_FROM and cell.both.low > BOUND_MS:
            what = f"{cell.spans} spans, {cell.tokens} tokens, {cell.kind}"
            report.fail(f"{what}: {cell.both.text(3)} ms is over {BOUND_MS:g}")
    report.data["cells"] = [vars(cell) for cell in cells]
    lines = []
    for tokens in sorted({cell.tokens for cell in cells}):
        found = [cell for cell in cells if cell.tokens == tokens and cell.kind == KINDS[1]]
        lines.append(Series(f"{tokens} tokens", [cell.spans for cell in found], [cell.both.value for cell in found]))
    report.plots.append(
        Plot("admission", "Finding known spans", "known spans", "ms per 1,000 prompt tokens", lines, log_x=True)
    )
