"""What ``--enable-acache`` costs requests that share nothing: two servers side by side, with it and without."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import numpy as np
from tqdm import tqdm

from sglang_acache.bench.client import Client, closed_loop
from sglang_acache.bench.options import ordinary_words
from sglang_acache.bench.report import Table
from sglang_acache.bench.server import serve
from sglang_acache.bench.stats import bootstrap, paired_ratio
from sglang_acache.bench.workloads import Shape, generate_payload, shared_prompts, without_reuse_fields

FLAG = "--enable-acache"
Rates = dict[str, list[float]]


def measure(model: str, shape: Shape, clients: int, requests: int, rounds: int, options: argparse.Namespace) -> Rates:
    """Tokens a second by round without the flag ("off") and with it, discovery included ("on")."""
    flags = ["--skip-tokenizer-init", "--max-total-tokens", str(shape.canvas * (clients + 4)), *options.server_flags]
    with (
        serve(model, flags, threads=options.threads) as off,
        serve(model, [*flags, FLAG], threads=options.threads) as on,
    ):
        urls = {"off": off.url, "on": on.url}
        return asyncio.run(_alternate(urls, shape, clients, requests, rounds, ordinary_words(model), options.seed))


async def _alternate(
    urls: dict[str, str], shape: Shape, clients: int, requests: int, rounds: int, words: int, seed: int
) -> Rates:
    """Both answer the same requests, in turn, in an order that alternates; every round has prompts of its own."""
    rates: Rates = {name: [] for name in urls}
    with tqdm(total=(rounds + 1) * requests * len(urls), desc=f"unshared, {clients} clients", unit="request") as bar:
        for turn in range(-1, rounds):  # the first turn warms up
            prompts = shared_prompts(np.random.default_rng([seed, turn + 1]), shape, requests, words)
            payloads: list[Any] = [without_reuse_fields(generate_payload(prompt, "dual", {})) for prompt in prompts]
            for name in list(urls)[:: 1 if turn % 2 else -1]:
                async with Client(urls[name]) as client:
                    done = await closed_loop(client, payloads, clients, bar.update)
                if turn >= 0:
                    rates[name].append(done.tokens / done.seconds)
    return rates


def describe(model: str, clients: int, rates: Rates) -> Table:
    cost = paired_ratio(rates["off"], rates["on"])
    return Table(
        f"Nothing shared: {model}, {clients} clients",
        ["", "tokens/s", "time, x without"],
        [["without the flag", bootstrap(rates["off"]).text(1), "1"],
         [FLAG, bootstrap(rates["on"]).text(1), cost.text(3)]],
    )  # fmt: skip
