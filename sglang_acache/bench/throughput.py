"""Tokens a second and latency over HTTP, with and without reuse, on one server: closed and open loop.

The modes that are compared answer the same requests, in turn, in every round; a ratio is the median over rounds.
Reuse is switched per request, so the server, its process and its memory are the same for all modes.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from tqdm import tqdm

from sglang_acache.bench.client import Client, Payload, Run, closed_loop, open_loop
from sglang_acache.bench.options import (
    REUSE_FLAGS,
    add_common,
    add_shape,
    dtype_flags,
    integers,
    model_folder,
    names,
    numbers,
    ordinary_words,
)
from sglang_acache.bench.report import Plot, Report, Series, Table
from sglang_acache.bench.server import serve
from sglang_acache.bench.stats import Estimate, bootstrap, paired_ratio, percentiles
from sglang_acache.bench.workloads import Prompt, Shape, generate_payload, mixed_prompts, shared_prompts

WORKLOADS = {"shared": shared_prompts, "mixed": mixed_prompts}
REUSE = "+acache"
MOST_REQUESTS = 64
"""A round of a level sends no more, unless it has more clients."""
MODES_HELP = f"CACHE, CACHE{REUSE} or CACHE{REUSE}:PROBE; the first is the baseline (default: dual,dual{REUSE})"


@dataclass(frozen=True)
class Level:
    """One load: ``clients`` in a closed loop, or ``rate`` requests a second in an open one; ``share`` of the canvas is
    shared text."""

    workload: str
    share: float
    modes: tuple[str, ...]
    requests: int
    clients: int = 0
    rate: float = 0.0

    @property
    def name(self) -> str:
        load = f"{self.clients} clients" if self.clients else f"{self.rate:.2g} requests/s"
        return f"{self.share:.0%} shared, {load}"


@dataclass
class Samples:
    """One mode at one level: a rate a round, latencies of all requests, what the server counted."""

    tokens_per_second: list[float] = field(default_factory=list)
    requests_per_second: list[float] = field(default_factory=list)
    latency: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    rows: int = 0  # forwarded, probes included
    forward_passes: int = 0
    errors: list[str] = field(default_factory=list)


Results = dict[Level, dict[str, Samples]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    add_shape(parser)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--shares", type=numbers, default=[0.75], help="affix shares of the canvas (default: 0.75)")
    parser.add_argument("--ratio", type=float, default=0.2, help="anchor ratio (default: %(default)s)")
    parser.add_argument("--per-step", type=int, default=4, help="tokens committed a step (default: %(default)s)")
    parser.add_argument("--clients", type=integers, default=[1, 4, 16, 64])
    parser.add_argument("--modes", type=names, default=["dual", "dual" + REUSE], help=MODES_HELP)
    further = ["none", "prefix", "prefix" + REUSE]
    parser.add_argument("--policies", type=names, default=further, help="further modes, for --policy-clients")
    parser.add_argument("--policy-clients", type=int, default=4, help="clients at which --policies run too; 0 = never")
    parser.add_argument("--workloads", type=names, default=list(WORKLOADS), help="of shared, mixed")
    parser.add_argument("--mixed-clients", type=integers, default=[16])
    parser.add_argument("--load", type=numbers, default=[0.5, 0.9], help="open loop: parts of the baseline's capacity")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=2, help="requests a client and round (default: %(default)s)")


def run(options: argparse.Namespace) -> int:
    if options.quick:
        options.canvas, options.new_tokens, options.rounds = 128, 32, 1
        options.clients, options.policy_clients, options.mixed_clients, options.load = [1, 4], 4, [2], [0.5]
    for share in options.shares:
        shape = _shape(options, share).check()
    report = Report("throughput", options.out, {**vars(options), "steps": shape.steps})
    most = max([*options.clients, *options.mixed_clients])
    with model_folder(options) as model:
        flags = [*REUSE_FLAGS, "--no-acache-discover", *dtype_flags(options.dtype), "--skip-tokenizer-init"]
        flags += ["--max-total-tokens", str(shape.canvas * (most + 4)), "--max-running-requests", str(most)]
        flags += ["--diffusion-step-tokens", str(max(8192, 16 * shape.canvas)), *options.server_flags]
        words = ordinary_words(model)
        with serve(model, flags, base_url=options.base_url, threads=options.threads) as target:
            results = asyncio.run(_measure(target.url, options, words))
    _describe(report, results)
    return report.write()


def _shape(options: argparse.Namespace, share: float) -> Shape:
    return Shape(options.canvas, share, options.new_tokens, options.block_length, options.per_step)


async def _measure(url: str, options: argparse.Namespace, words: int) -> Results:
    results: Results = {}
    async with Client(url) as client:
        closed = _closed_levels(options)
        for level in closed:
            results[level] = await _run_level(client, level, options, words)
        capacity = _capacity(results, options.modes[0])
        for level in _open_levels(options, capacity):
            results[level] = await _run_level(client, level, options, words)
    return results


def _closed_levels(options: argparse.Namespace) -> list[Level]:
    modes = tuple(options.modes)
    levels = []
    for share in options.shares:
        for clients in options.clients if "shared" in options.workloads else ():
            chosen = modes + (tuple(options.policies) if clients == options.policy_clients else ())
            levels.append(Level("shared", share, chosen, _count(options, clients), clients))
        for clients in options.mixed_clients if "mixed" in options.workloads else ():
            levels.append(Level("mixed", share, modes, _count(options, clients), clients))
    return levels


def _count(options: argparse.Namespace, clients: int) -> int:
    return max(4, clients, min(options.requests * clients, MOST_REQUESTS))


def _capacity(results: Results, baseline: str) -> float:
    """Requests a second of the baseline at its best level of the shared workload."""
    shared = [found[baseline] for level, found in results.items() if level.workload == "shared"]
    return max((float(np.median(samples.requests_per_second)) for samples in shared), default=0.0)


def _open_levels(options: argparse.Namespace, capacity: float) -> list[Level]:
    count = 4 if options.quick else 24
    rates = [load * capacity for load in options.load if capacity > 0]
    return [
        Level("shared", share, tuple(options.modes), count, rate=rate) for share in options.shares for rate in rates
    ]


async def _run_level(
    client: Client, level: Level, options: argparse.Namespace, words: int
) -> dict[str, Samples]:
    samples = {mode: Samples() for mode in level.modes}
    total = level.requests * len(level.modes) * options.rounds
    with tqdm(total=total, desc=f"{level.workload}, {level.name}", unit="request") as progress:
        for turn in range(options.rounds):
            rng = np.random.default_rng([options.seed, turn, level.requests])
            prompts = WORKLOADS[level.workload](rng, _shape(options, level.share), level.requests, words)
            await _warm(client, [generate_payload(prompt, "dual", {}) for prompt in prompts[:4]])
            for mode in np.roll(level.modes, turn):
                payloads = [_payload(prompt, str(mode), options.ratio) for prompt in prompts]
                done = await _load(client, level, payloads, options.seed + turn, progress)
                _add(samples[str(mode)], done)
    return samples


def _payload(prompt: Prompt, mode: str, ratio: float) -> Payload:
    """``CACHE``, ``CACHE+acache`` or ``CACHE+acache:PROBE``."""
    cache, plus, probe = mode.partition(REUSE)
    if not plus:
        return generate_payload(prompt, cache, None)
    return generate_payload(prompt, cache, {"anchor_ratio": ratio, "probe": probe.removeprefix(":") or "request"})


async def _warm(client: Client, payloads: Sequence[Payload]) -> None:
    """Encode the round's affixes, once for all modes: what is measured is the steady state of a shared text."""
    await asyncio.gather(*(client.generate(payload) for payload in payloads))


async def _load(client: Client, level: Level, payloads: list[Payload], seed: int, progress: Any) -> Run:
    if level.clients:
        return await closed_loop(client, payloads, level.clients, progress.update)
    return await open_loop(client, payloads, level.rate, seed, progress.update)


def _add(samples: Samples, done: Run) -> None:
    good = [answer for answer in done.answers if answer.ok]
    samples.tokens_per_second.append(done.tokens / done.seconds)
    samples.requests_per_second.append(len(good) / done.seconds)
    samples.latency += [answer.latency for answer in good]
    samples.first_token += [answer.first_token for answer in good if answer.first_token is not None]
    for answer in good:
        counted = answer.info("diffusion")
        samples.rows += counted.get("forwarded_tokens", 0)
        samples.forward_passes += counted.get("forward_passes", 0)
    samples.errors += [f"{answer.status}: {answer.error}" for answer in done.answers if not answer.ok]


def _describe(report: Report, results: Results) -> None:
    for workload in dict.fromkeys(level.workload for level in results):
        mine = {level: found for level, found in results.items() if level.workload == workload}
        for loop, is_closed in (("closed", True), ("open", False)):
            levels = {level: found for level, found in mine.items() if bool(level.clients) == is_closed}
            if levels:
                report.add(_table(f"{workload} workload, {loop} loop", levels))
    for level, found in results.items():
        for mode, samples in found.items():
            if samples.errors:
                report.fail(f"{level.name}, {mode}: {len(samples.errors)} requests failed, first: {samples.errors[0]}")
    report.data["levels"] = [
        {**asdict(level), "samples": {mode: asdict(s) for mode, s in found.items()}} for level, found in results.items()
    ]
    report.plots += _plots(results)


def _table(title: str, levels: Results) -> Table:
    table = Table(
        title,
        ["load", "mode", "tokens/s", "x baseline", "requests/s", "latency p50/p95/p99 s", "p99 x baseline",
         "first token p50/p95/p99 s", "rows a request"],
        note="x baseline: median over rounds of the paired ratio, 95% bootstrap interval. Rows: token-forwards, probes "
        "included, as the server counts them.",
    )  # fmt: skip
    for level, found in levels.items():
        base = found[level.modes[0]]
        for mode, samples in found.items():
            if not samples.latency:
                continue
            gain: Estimate = paired_ratio(samples.tokens_per_second, base.tokens_per_second)
            worst = [percentiles(part.latency).get("p99", float("nan")) for part in (samples, base)]
            table.rows.append([
                level.name, mode, bootstrap(samples.tokens_per_second).text(1), gain.text(),
                f"{np.median(samples.requests_per_second):.3g}", _seconds(samples.latency),
                f"{worst[0] / worst[1]:.2f}", _seconds(samples.first_token), samples.rows // len(samples.latency),
            ])  # fmt: skip
    return table


def _seconds(samples: list[float]) -> str:
    return " / ".join(f"{value:.2f}" for value in percentiles(samples).values())


def _plots(results: Results) -> list[Plot]:
    levels = [level for level in results if level.clients and level.workload == "shared"]
    plots = []
    for share in dict.fromkeys(level.share for level in levels):
        plots += _plots_by_clients(share, {level: results[level] for level in levels if level.share == share})
    gains = [_gain_by_share([level for level in levels if level.clients == clients], results)
             for clients in dict.fromkeys(level.clients for level in levels if len(level.modes) > 1)]  # fmt: skip
    if gains and len(gains[0].x) > 1:
        plots.append(Plot("speed_up", "Shared affix, closed loop", "shared, % of the canvas", "x baseline", gains))
    return plots


def _gain_by_share(levels: Sequence[Level], results: Results) -> Series:
    """Of the second mode over the first, at one number of clients."""
    gains = []
    for level in levels:
        base, other = (results[level][mode].tokens_per_second for mode in level.modes[:2])
        gains.append(paired_ratio(other, base))
    return Series.of(f"{levels[0].clients} clients", [100 * level.share for level in levels], gains)


def _plots_by_clients(share: float, results: Results) -> list[Plot]:
    modes = next(iter(results)).modes
    clients = [level.clients for level in results]
    rates, tails = [], []
    for mode in modes:
        found = [samples[mode] for samples in results.values()]
        rates.append(Series.of(mode, clients, [bootstrap(samples.tokens_per_second) for samples in found]))
        for point, style in (("p99", "o-"), ("p50", "o:")):
            tail = [percentiles(samples.latency).get(point, np.nan) for samples in found]
            tails.append(Series(f"{mode}, {point}", clients, tail, style=style))
    title = f"{share:.0%} shared, closed loop"
    return [
        Plot(f"throughput_{share:.0%}".rstrip("%"), title, "clients", "tokens/s", rates, log_x=True),
        Plot(f"latency_{share:.0%}".rstrip("%"), title, "clients", "latency, s", tails, log_x=True),
    ]
