"""Block-start latency with and without reuse, by affix share, anchor ratio and batch size, next to its bounds.

Each sample runs a batch of requests of one block and one step, so that a request is its probe and one block start.
With and without reuse alternate within a round; a figure is the median over rounds of the ratio of the two.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tqdm import tqdm

from sglang_acache.bench.bounds import BlockStart, ModelCost
from sglang_acache.bench.in_process import InProcessScheduler, Step, in_fresh_process
from sglang_acache.bench.options import (
    REUSE_FLAGS,
    add_common,
    dtype_flags,
    integers,
    model_folder,
    names,
    numbers,
    ordinary_words,
    read_config,
)
from sglang_acache.bench.report import Plot, Report, Series, Table
from sglang_acache.bench.stats import Estimate, bootstrap, paired_ratio
from sglang_acache.bench.workloads import Shape, shared_prompts

COLUMNS = (
    "share",
    "ratio",
    "batch",
    "full ms",
    "reused ms",
    "reduction %",
    "speed-up",
    "T/R",
    "of it",
    "FLOP bound",
    "of it",
    "probe / full start",
)


@dataclass(frozen=True)
class Case:
    share: float
    ratio: float
    batch: int


@dataclass
class Samples:
    """Seconds by round: a block start without reuse, with reuse, and the probe; rows of the last two."""

    full: list[float] = field(default_factory=list)
    reused: list[float] = field(default_factory=list)
    probe: list[float] = field(default_factory=list)
    rows: int = 0
    probe_rows: int = 0


@dataclass(frozen=True)
class Plan:
    """Everything a measuring process needs."""

    model: str
    flags: list[str]
    canvas: int
    block_length: int
    cases: list[Case]
    rounds: int
    seed: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser, server=False)
    parser.add_argument("--canvas", type=int, default=1024, help="tokens of a request (default: %(default)s)")
    parser.add_argument("--block-length", type=int, default=32)
    parser.add_argument("--shares", type=numbers, default=[0.25, 0.5, 0.75, 0.9])
    parser.add_argument("--ratios", type=numbers, default=[0.05, 0.1, 0.2, 0.3, 0.5])
    parser.add_argument("--batches", type=integers, default=[1, 4, 16])
    parser.add_argument("--dtypes", type=names, default=["float32"])
    parser.add_argument("--rounds", type=int, default=7)


def run(options: argparse.Namespace) -> int:
    if options.quick:
        options.canvas, options.rounds = 256, 2
        options.shares, options.ratios, options.batches = [0.5, 0.75], [0.2], [1, 2]
    cases = _cases(options)
    report = Report("recompute", options.out, vars(options))
    with model_folder(options) as model:
        cost = ModelCost.of(read_config(model))
        for dtype in options.dtypes:
            slots = 2 * options.canvas * max(options.batches) + 4 * options.canvas
            flags = [*REUSE_FLAGS, "--no-acache-discover", *dtype_flags(dtype), *options.server_flags]
            flags += ["--max-total-tokens", str(slots), "--max-running-requests", str(max(options.batches) + 2)]
            flags += ["--diffusion-step-tokens", str(slots), "--acache-max-shared-tokens", str(2 * options.canvas)]
            plan = Plan(model, flags, options.canvas, options.block_length, cases, options.rounds, options.seed)
            samples = in_fresh_process(options.threads, measure, plan)
            _describe(report, dtype, plan, cost, samples)
    return report.write()


def measure(plan: Plan) -> list[Samples]:
    """In a process of its own: the samples of every case, rounds outermost so that drift meets all cases alike."""
    scheduler = InProcessScheduler(plan.model, plan.flags)
    words = ordinary_words(plan.model)
    samples = [Samples() for _ in plan.cases]
    with tqdm(total=(plan.rounds + 1) * len(plan.cases), desc="recompute", unit="case") as progress:
        for turn in range(-1, plan.rounds):  # the first turn warms up
            for index, case in enumerate(plan.cases):
                _sample(scheduler, plan, case, samples[index] if turn >= 0 else Samples(), words, turn)
                progress.update()
    return samples


def _sample(scheduler: InProcessScheduler, plan: Plan, case: Case, out: Samples, words: int, turn: int) -> None:
    length = plan.block_length
    shape = Shape(plan.canvas, case.share, length, length, per_step=length).check()
    rng = np.random.default_rng([plan.seed, turn + 1])
    prompts = shared_prompts(rng, shape, case.batch, words)
    for reused in (False, True) if turn % 2 else (True, False):
        for prompt in prompts:
            scheduler.submit(prompt, reuse={"anchor_ratio": case.ratio, "probe": "request"} if reused else None)
        steps = scheduler.run()
        starts, probes = _of(steps, "logit_rows"), _of(steps, "probes")
        if reused:
            out.reused.append(sum(step.seconds for step in starts))
            out.probe.append(sum(step.seconds for step in probes))
            out.rows, out.probe_rows = sum(s.rows for s in starts), sum(s.rows for s in probes)
        else:
            out.full.append(sum(step.seconds for step in starts))
    scheduler.flush()


def _of(steps: list[Step], kind: str) -> list[Step]:
    return [step for step in steps if getattr(step, kind)]


def _cases(options: argparse.Namespace) -> list[Case]:
    """All shares and batches at ratio 0.2 (or the first given); the other ratios at share 75%, smallest batch."""
    ratio = 0.2 if 0.2 in options.ratios else options.ratios[0]
    share = 0.75 if 0.75 in options.shares else options.shares[-1]
    cases = [Case(s, ratio, b) for b in options.batches for s in options.shares]
    return cases + [Case(share, r, options.batches[0]) for r in options.ratios if r != ratio]


def _describe(report: Report, dtype: str, plan: Plan, cost: ModelCost, samples: list[Samples]) -> None:
    table = report.add(
        Table(
            f"Block start, {dtype}, canvas {plan.canvas}",
            COLUMNS,
            note="Intervals: 95%, bootstrap over rounds of the paired ratio. T/R counts rows alone; the FLOP bound "
            "counts R rows through the linear layers, R x T attention and the same logits.",
        )
    )
    rows = []
    for case, sample in zip(plan.cases, samples, strict=True):
        row = _figures(plan, case, cost, sample)
        rows.append({**row, "share": case.share, "ratio": case.ratio, "batch": case.batch, "samples": vars(sample)})
        speedup: Estimate = row["speedup"]
        table.rows.append([
            f"{case.share:.0%}", case.ratio, case.batch, row["full_ms"].text(1), row["reused_ms"].text(1),
            row["reduction"].text(1, 100), speedup.text(2), f"{row['row_bound']:.2f}",
            f"{speedup.value / row['row_bound']:.0%}", f"{row['flop_bound']:.2f}",
            f"{speedup.value / row['flop_bound']:.0%}", row["probe"].text(2),
        ])  # fmt: skip
    report.data[dtype] = rows
    report.plots += _plots(dtype, rows)


def _figures(plan: Plan, case: Case, cost: ModelCost, sample: Samples) -> dict[str, Any]:
    affix = int(plan.canvas * case.share)
    bound = BlockStart(plan.canvas, affix, case.ratio, plan.block_length)
    shrunk = np.asarray(sample.reused) / np.asarray(sample.full)
    return {
        "full_ms": bootstrap(np.asarray(sample.full) * 1e3),
        "reused_ms": bootstrap(np.asarray(sample.reused) * 1e3),
        "reduction": bootstrap(1.0 - shrunk),
        "speedup": paired_ratio(sample.full, sample.reused),
        "probe": paired_ratio(sample.probe, sample.full),
        "row_bound": bound.row_bound,
        "flop_bound": bound.flop_bound(cost),
        "rows_expected": bound.recompute * case.batch,
    }


def _plots(dtype: str, rows: list[dict[str, Any]]) -> list[Plot]:
    main = rows[0]["ratio"]
    series = []
    for batch in sorted({row["batch"] for row in rows}):
        found = [row for row in rows if row["batch"] == batch and row["ratio"] == main]
        shares = [row["share"] for row in found]
        series.append(Series.of(f"batch {batch}", shares, [row["reduction"] for row in found], scale=100))
    first = [row for row in rows if row["ratio"] == main and row["batch"] == rows[0]["batch"]]
    for name, key in (("bound: rows", "row_bound"), ("bound: FLOPs", "flop_bound")):
        y = [100 * (1 - 1 / row[key]) for row in first]
        series.append(Series(name, [row["share"] for row in first], y, style="k--" if key == "row_bound" else "k:"))
    title = f"Block-start latency, anchor ratio {main}"
    plots = [Plot(f"shares-{dtype}", title, "affix share of the canvas", "reduction, %", series)]
    at = {row["share"] for row in rows if row["ratio"] != main}
    found = [row for row in rows if row["share"] in at and row["batch"] == rows[0]["batch"]]
    found.sort(key=lambda row: row["ratio"])
    if len(found) > 1:
        ratios = [row["ratio"] for row in found]
        lines = [Series.of("measured", ratios, [row["reduction"] for row in found], scale=100)]
        lines.append(Series("bound: rows", ratios, [100 * (1 - 1 / row["row_bound"]) for row in found], style="k--"))
        title = f"Block-start latency at {next(iter(at)):.0%}"
        plots.append(Plot(f"ratios-{dtype}", title, "anchor ratio", "reduction, %", lines))
    return plots
