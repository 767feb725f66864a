"""Peak K/V slots of concurrent requests over one affix, with and without reuse, against the formula.

Without reuse every request reserves its canvas, T slots. With reuse at ratio r it reserves r * L + (T - L), and the
affix's L slots are there once. Counted from the allocator before every step, so the figure is exact. Of a server that
runs already (``--base-url``) it is the highest of its ``/v1/loads`` while the requests are in flight; the server must
have room for all of them, and one that finds spans by itself (discovery) may hold more.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from sglang_acache.bench.bounds import slots
from sglang_acache.bench.client import Client, Payload, closed_loop
from sglang_acache.bench.in_process import InProcessScheduler, in_fresh_process
from sglang_acache.bench.options import (
    REUSE_FLAGS,
    add_common,
    add_shape,
    integers,
    model_folder,
    numbers,
    ordinary_words,
)
from sglang_acache.bench.report import Plot, Report, Series, Table
from sglang_acache.bench.workloads import Shape, generate_payload, shared_prompts
from sglang_acache.server_process import ServerFailed

FOUR_SHOT_SHARE = 0.587
"""Share of a canvas that four worked examples take, for which the formula gives the paper's -43.3% at 16 requests."""


@dataclass(frozen=True)
class Plan:
    model: str
    flags: list[str]
    shape: Shape
    batches: list[int]
    ratios: list[float]
    seed: int


@dataclass(frozen=True)
class Peak:
    requests: int
    ratio: float
    without: int
    reused: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser, model="llada-tiny")
    add_shape(parser, new_tokens=256)
    parser.add_argument("--share", type=float, default=FOUR_SHOT_SHARE, help="affix share (default: %(default)s)")
    parser.add_argument("--batches", type=integers, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--ratios", type=numbers, default=[0.1, 0.2, 0.5])


def run(options: argparse.Namespace) -> int:
    if options.quick:
        options.canvas, options.new_tokens, options.batches, options.ratios = 256, 64, [1, 4], [0.2]
    shape = Shape(options.canvas, options.share, options.new_tokens, options.block_length, per_step=16).check()
    report = Report("kv", options.out, vars(options))
    with model_folder(options) as model:
        pool = shape.canvas * (max(options.batches) + 2)
        flags = [*REUSE_FLAGS, "--no-acache-discover", "--max-total-tokens", str(pool)]
        flags += ["--max-running-requests", str(max(options.batches) + 1), *options.server_flags]
        plan = Plan(model, flags, shape, options.batches, options.ratios, options.seed)
        if options.base_url is None:
            peaks = in_fresh_process(options.threads, measure, plan)
        else:
            peaks = asyncio.run(measure_server(options.base_url.rstrip("/"), plan))
    _describe(report, shape, peaks)
    return report.write()


def measure(plan: Plan) -> list[Peak]:
    scheduler = InProcessScheduler(plan.model, plan.flags)
    words = ordinary_words(plan.model)
    peaks = []
    cases = [(requests, ratio) for requests in plan.batches for ratio in plan.ratios]
    for requests, ratio in tqdm(cases, desc="kv", unit="case"):
        prompts = shared_prompts(np.random.default_rng(plan.seed), plan.shape, requests, words)
        found = []
        for reuse in (None, {"anchor_ratio": ratio}):
            for prompt in prompts:
                scheduler.submit(prompt, reuse=reuse)
            found.append(max(step.used_slots for step in scheduler.run()))
            scheduler.flush()
        peaks.append(Peak(requests, ratio, *found))
    return peaks


async def measure_server(url: str, plan: Plan) -> list[Peak]:
    words = ordinary_words(plan.model)
    peaks = []
    cases = [(requests, ratio) for requests in plan.batches for ratio in plan.ratios]
    async with Client(url) as client:
        for requests, ratio in tqdm(cases, desc="kv", unit="case"):
            prompts = shared_prompts(np.random.default_rng(plan.seed), plan.shape, requests, words)
            found = []
            for reuse in (None, {"anchor_ratio": ratio}):
                await client.wait_idle()
                await client.post("/flush_cache")
                found.append(await _watch(client, [generate_payload(prompt, "dual", reuse) for prompt in prompts]))
            peaks.append(Peak(requests, ratio, *found))
    return peaks


async def _watch(client: Client, payloads: list[Payload]) -> int:
    """The most slots in use while ``payloads`` are answered all at once."""
    load = asyncio.create_task(closed_loop(client, payloads, len(payloads)))
    peak = 0
    while not load.done():
        peak = max(peak, (await client.loads())["num_used_tokens"])
        await asyncio.sleep(0.01)
    for answer in load.result().answers:
        if not answer.ok:
            raise ServerFailed(f"a request failed: {answer.status} {answer.error}")
    return peak


def _describe(report: Report, shape: Shape, peaks: list[Peak]) -> None:
    table = report.add(
        Table(
            f"Peak K/V slots, canvas {shape.canvas}, affix {shape.affix}",
            ["requests", "ratio", "without", "with", "change %", "formula without", "formula with", "formula change %"],
        )
    )
    for peak in peaks:
        without, reused = slots(shape.canvas, shape.affix, peak.ratio, peak.requests)
        change, promised = _change(peak.without, peak.reused), _change(without, reused)
        table.rows.append(
            [peak.requests, peak.ratio, peak.without, peak.reused, f"{change:.1f}", without, reused, f"{promised:.1f}"]
        )
        if (peak.without, peak.reused) != (without, reused):
            report.fail(f"{peak.requests} requests, ratio {peak.ratio}: not what the formula says")
    report.data["peaks"] = [vars(peak) for peak in peaks]
    series = []
    for ratio in sorted({peak.ratio for peak in peaks}):
        found = [peak for peak in peaks if peak.ratio == ratio]
        requests = [peak.requests for peak in found]
        series.append(Series(f"measured, ratio {ratio}", requests, [_change(p.without, p.reused) for p in found]))
        promised_line = [_change(*slots(shape.canvas, shape.affix, ratio, n)) for n in requests]
        series.append(Series(f"formula, ratio {ratio}", requests, promised_line, style="k:"))
    title = "Peak K/V slots with reuse"
    report.plots.append(Plot("kv", title, "requests over one affix", "change, %", series, log_x=True))


def _change(before: int, after: int) -> float:
    return 100.0 * (after / before - 1.0)
