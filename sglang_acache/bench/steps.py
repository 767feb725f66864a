"""Speed of denoising itself, without reuse: cache policies, time outside the model, attention, concurrency."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tqdm import tqdm

from sglang_acache.bench import attention_cost, unshared
from sglang_acache.bench.bounds import ModelCost
from sglang_acache.bench.client import Client, Run, closed_loop
from sglang_acache.bench.in_process import InProcessScheduler, Step, in_fresh_process
from sglang_acache.bench.options import (
    add_common,
    add_shape,
    dtype_flags,
    integers,
    model_folder,
    names,
    ordinary_words,
    read_config,
)
from sglang_acache.bench.report import Plot, Report, Series, Table
from sglang_acache.bench.server import serve
from sglang_acache.bench.stats import bootstrap, paired_ratio
from sglang_acache.bench.workloads import Shape, generate_payload, shared_prompts, without_reuse_fields
from sglang_acache.models.names import resolve_model

POLICIES = ("none", "prefix", "dual")
PARTS = ("policies", "attention", "concurrency", "unshared")
CLIENTS = 16
TINY = "llada-tiny"
TINY_SHAPE, TINY_WORDS = Shape(canvas=128, share=0.0, new_tokens=32, per_step=1), 100
"""Requests of ``llada-tiny``: prompts of its first words, one token a step."""


@dataclass(frozen=True)
class Plan:
    model: str
    flags: list[str]
    shape: Shape
    batches: list[int]
    rounds: int
    seed: int


@dataclass
class Samples:
    """By round, of one policy at one batch size: seconds of the whole batch, and of its parts."""

    seconds: list[float] = field(default_factory=list)
    forward: list[float] = field(default_factory=list)
    inner_seconds: list[float] = field(default_factory=list)  # of steps inside a block alone
    inner_forward: list[float] = field(default_factory=list)
    rows: int = 0
    pairs: int = 0
    logit_rows: int = 0
    steps: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    add_shape(parser, canvas=512, new_tokens=64)
    parser.add_argument("--parts", type=names, default=list(PARTS), help=f"which of {','.join(PARTS)}")
    parser.add_argument("--per-step", type=int, default=4, help="tokens committed a step (default: %(default)s)")
    parser.add_argument("--batches", type=integers, default=[1, 4, 16])
    parser.add_argument("--dtypes", type=names, default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)


def run(options: argparse.Namespace) -> int:
    if options.quick:
        options.canvas, options.new_tokens, options.batches, options.rounds = 128, 32, [1, 2], 2
        options.dtypes = options.dtypes[:1]
    report = Report("steps", options.out, vars(options))
    if "policies" in options.parts:
        _policies(report, options)
    if "attention" in options.parts:
        _attention(report, options)
    if "concurrency" in options.parts:
        _concurrency(report, options)
    if "unshared" in options.parts:
        _unshared(report, options)
    return report.write()


# ── policies, and the time outside the model ────────────────────────────────


def _policies(report: Report, options: argparse.Namespace) -> None:
    shape = Shape(options.canvas, 0.0, options.new_tokens, options.block_length, options.per_step).check()
    most = max(options.batches)
    with model_folder(options) as model:
        cost = ModelCost.of(read_config(model))
        for dtype in options.dtypes:
            flags = [*dtype_flags(dtype), "--max-total-tokens", str(shape.canvas * (most + 2))]
            flags += ["--max-running-requests", str(most + 1), "--diffusion-step-tokens", str(shape.canvas * most)]
            plan = Plan(model, [*flags, *options.server_flags], shape, options.batches, options.rounds, options.seed)
            samples = in_fresh_process(options.threads, measure_policies, plan)
            _describe_policies(report, dtype, plan, cost, samples)


def measure_policies(plan: Plan) -> dict[tuple[int, str], Samples]:
    """In a process of its own. Within a round the policies take turns, in an order that rotates."""
    scheduler = InProcessScheduler(plan.model, plan.flags)
    words = ordinary_words(plan.model)
    samples = {(batch, policy): Samples() for batch in plan.batches for policy in POLICIES}
    with tqdm(total=(plan.rounds + 1) * len(samples), desc="policies", unit="batch") as progress:
        for turn in range(-1, plan.rounds):  # the first turn warms up
            for batch in plan.batches:
                prompts = shared_prompts(np.random.default_rng([plan.seed, turn + 1]), plan.shape, batch, words)
                for policy in np.roll(POLICIES, turn):
                    for prompt in prompts:
                        scheduler.submit(prompt, cache=str(policy))
                    steps = scheduler.run()
                    if turn >= 0:
                        _add(samples[batch, str(policy)], steps)
                    progress.update()
    return samples


def _add(sample: Samples, steps: list[Step]) -> None:
    fewest = min(step.rows for step in steps)
    inner = [step for step in steps if step.rows == fewest]
    sample.seconds.append(sum(step.seconds for step in steps))
    sample.forward.append(sum(step.forward_seconds for step in steps))
    sample.inner_seconds.append(float(np.median([step.seconds for step in inner])))
    sample.inner_forward.append(float(np.median([step.forward_seconds for step in inner])))
    sample.rows, sample.pairs = sum(step.rows for step in steps), sum(step.pairs for step in steps)
    sample.logit_rows, sample.steps = sum(step.logit_rows for step in steps), len(steps)


def _describe_policies(
    report: Report, dtype: str, plan: Plan, cost: ModelCost, samples: dict[tuple[int, str], Samples]
) -> None:
    speed = Table(
        f"Cache policies at fixed steps, {dtype}, canvas {plan.shape.canvas}, {plan.shape.new_tokens} new tokens",
        ["batch", "policy", "s a batch", "rows", "speed-up over none", "rows alone", "of it", "FLOPs alone", "of it"],
    )
    outside = Table(
        f"Share of a step outside the model's forward, {dtype}",
        ["batch", "policy", "ms a step inside a block", "outside %", "outside % of the whole run"],
        note="Outside: admission, planning, index tensors, token choice, commits, streaming to the next process.",
    )
    for (batch, policy), sample in samples.items():
        base = samples[batch, "none"]
        speedup = paired_ratio(base.seconds, sample.seconds)
        rows, flops = base.rows / sample.rows, _flops(cost, base) / _flops(cost, sample)
        speed.rows.append([
            batch, policy, bootstrap(sample.seconds).text(3), sample.rows, speedup.text(), f"{rows:.2f}",
            f"{speedup.value / rows:.0%}", f"{flops:.2f}", f"{speedup.value / flops:.0%}",
        ])  # fmt: skip
        inner = _outside(sample.inner_seconds, sample.inner_forward)
        whole = _outside(sample.seconds, sample.forward)
        step_ms = bootstrap(np.asarray(sample.inner_seconds) * 1e3)
        outside.rows.append([batch, policy, step_ms.text(2), inner.text(1, 100), whole.text(1, 100)])
    report.tables += [speed, outside]
    report.data[f"policies-{dtype}"] = {f"{batch}-{policy}": vars(s) for (batch, policy), s in samples.items()}


def _flops(cost: ModelCost, sample: Samples) -> float:
    return cost.forward(sample.rows, sample.pairs, sample.logit_rows)


def _outside(seconds: list[float], forward: list[float]) -> Any:
    return bootstrap(1.0 - np.asarray(forward) / np.asarray(seconds))


# ── attention ───────────────────────────────────────────────────────────────


def _attention(report: Report, options: argparse.Namespace) -> None:
    queries, keys, batches = [4, 16, 32, 128, 512, 1024], [256, 1024, 2048], [1, 16]
    if options.quick:
        queries, keys, batches = [4, 32], [64, 128], [1]
    for dtype in options.dtypes:
        cells = in_fresh_process(
            options.threads, attention_cost.measure, dtype, queries, keys, batches, 2 if options.quick else 15
        )
        table, plot = attention_cost.describe(dtype, cells)
        report.add(table)
        report.plots.append(plot)
        report.data[f"attention-{dtype}"] = [vars(cell) for cell in cells]


# ── concurrency ─────────────────────────────────────────────────────────────


def _concurrency(report: Report, options: argparse.Namespace) -> None:
    """``llada-tiny``, whose step is all overhead: what batching requests into one ragged forward is worth."""
    requests, rounds = (8, 1) if options.quick else (4 * CLIENTS, 5)
    with serve(TINY, options.server_flags, base_url=options.base_url, threads=options.threads) as target:
        rates = asyncio.run(_alternate(target.url, requests, rounds, options.seed))
    gain = paired_ratio(rates[CLIENTS], rates[1])
    report.add(
        Table(
            "llada-tiny over HTTP: concurrent requests against one at a time",
            ["clients", "tokens/s", "ratio to one at a time"],
            [[n, bootstrap(rates[n]).text(0), gain.text() if n > 1 else "1"] for n in rates],
        )
    )
    report.data["concurrency"] = {str(clients): found for clients, found in rates.items()}
    line = Series.of("tokens/s", list(rates), [bootstrap(found) for found in rates.values()])
    report.plots.append(Plot("concurrency", "llada-tiny", "clients", "tokens/s", [line]))


def _unshared(report: Report, options: argparse.Namespace) -> None:
    shape = Shape(options.canvas, 0.0, options.new_tokens, options.block_length, options.per_step).check()
    requests, rounds = (4, 1) if options.quick else (32, 2 * options.rounds)
    with model_folder(options) as folder:
        for name, model, canvas in ((options.model, folder, shape), (TINY, resolve_model(TINY), TINY_SHAPE)):
            for clients in (1, CLIENTS):
                rates = unshared.measure(model, canvas, clients, requests, rounds, options)
                report.add(unshared.describe(name, clients, rates))
                report.data[f"unshared-{name}-{clients}"] = rates


async def _alternate(url: str, requests: int, rounds: int, seed: int) -> dict[int, list[float]]:
    rates: dict[int, list[float]] = {1: [], CLIENTS: []}
    async with Client(url) as client:
        with tqdm(total=(rounds + 1) * 2 * requests, desc="concurrency", unit="request") as progress:
            for turn in range(-1, rounds):
                prompts = shared_prompts(np.random.default_rng([seed, turn + 1]), TINY_SHAPE, requests, TINY_WORDS)
                payloads = [without_reuse_fields(generate_payload(prompt, "dual", None)) for prompt in prompts]
                for clients in rates:
                    done: Run = await closed_loop(client, payloads, clients, progress.update)
                    if turn >= 0:
                        rates[clients].append(done.tokens / done.seconds)
    return rates
