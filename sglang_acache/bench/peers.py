"""Ours beside the other ways to run LLaDA: one checkpoint, the same greedy requests over one shared prefix, in turn.

Every peer but the plain loop is optional: what is absent is skipped with one line that says what to install or check
out. In every round all peers answer the same requests, one after the other; a ratio is the median over rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from sglang_acache.bench.options import add_common, integers, names
from sglang_acache.bench.peers_scripts import (
    DLLM_CACHE_FILE,
    FAST_DLLM_FILE,
    Outcome,
    PeerFailed,
    commit_of,
    dllm_cache,
    fast_dllm,
    missing,
    plain,
)
from sglang_acache.bench.peers_servers import (
    OURS,
    OURS_REUSE,
    OurPeer,
    ServerPeer,
    model_code,
    package_versions,
    serving,
)
from sglang_acache.bench.peers_work import MODELS, PUBLISHED_IDS, RANDOM, TINY, Request, Work, open_work
from sglang_acache.bench.report import Plot, Report, Series, Table
from sglang_acache.bench.stats import bootstrap, paired_ratio

REFERENCE = "plain"
FAST_DLLM_MODES = ("none", "prefix", "dual")
SERVERS = ("dlmserve", "dfastllm")
_LARGE_VOCABULARY = (REFERENCE, *SERVERS)
"""Peers on the checkpoint with the published ids: it is there for servers that can load no other."""


@dataclass
class Samples:
    """One peer at one level: tokens a second by round, and answers of all rounds in order."""

    tokens_per_second: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)


Results = dict[int, dict[str, Samples]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser, model=None)
    parser.add_argument("--models", type=names, default=[TINY, RANDOM], help=f"of {', '.join(MODELS)}")
    parser.add_argument("--clients", type=integers, default=[1, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=1, help="requests a client and round, 2 at least in all")
    parser.add_argument("--threads", type=int, default=1, help="OpenMP threads of every peer (default: %(default)s)")
    parser.add_argument("--ratio", type=float, default=0.2, help="our anchor ratio (default: %(default)s)")
    shape = parser.add_argument_group("random checkpoints")
    shape.add_argument("--layers", type=int, default=8)
    shape.add_argument("--hidden", type=int, default=512)
    shape.add_argument("--canvas", type=int, default=512, help="tokens of a request (default: %(default)s)")
    shape.add_argument("--new-tokens", type=int, default=64, help="of which generated (default: %(default)s)")
    shape.add_argument("--share", type=float, default=0.75, help="of which shared (default: %(default)s)")
    shape.add_argument("--block-length", type=int, default=32)
    shape.add_argument("--per-step", type=int, default=4, help="tokens committed a step; llada-tiny: 2 at most")
    peers = parser.add_argument_group("peers")
    peers.add_argument("--fast-dllm", type=Path, metavar="PATH", help="a checkout of NVlabs/Fast-dLLM")
    peers.add_argument("--fast-dllm-modes", type=names, default=["prefix", "dual"], help="of none, prefix, dual")
    peers.add_argument("--dllm-cache", type=Path, metavar="PATH", help="a checkout of maomaocun/dLLM-cache")
    for name, what in (("scripts", "the two checkouts"), *((name, name) for name in SERVERS)):
        text = f"interpreter with what {what} need(s), transformers 4 (default: this one)"
        peers.add_argument(f"--{name}-python", metavar="PYTHON", default=sys.executable, help=text)


def run(options: argparse.Namespace) -> int:
    if options.quick:
        options.rounds, options.clients = 1, [1, 4]
        options.layers, options.hidden, options.canvas, options.new_tokens = 2, 128, 128, 32
    report = Report("peers", options.out, vars(options))
    scripts, servers = scripts_of(options, report), servers_of(options, report)
    for name in options.models:
        chosen = [*scripts, *servers]
        if name == PUBLISHED_IDS:
            if not servers:
                skip(report, f"{name}: only for {' and '.join(SERVERS)}, and neither is there")
                continue
            chosen = [peer for peer in chosen if peer.name in _LARGE_VOCABULARY]
        with open_work(name, options) as work:
            describe(report, work, *measure(report, work, chosen, options))
    return report.write()


def skip(report: Report, reason: str) -> None:
    print(f"skipped {reason}", file=sys.stderr, flush=True)
    report.data.setdefault("skipped", []).append(reason)


def scripts_of(options: argparse.Namespace, report: Report) -> list[Any]:
    """The plain loop, and those of the checkouts that are there."""
    found: list[Any] = [plain()]
    python, versions = options.scripts_python, report.conditions.setdefault("peers", {})
    absent = missing(options.fast_dllm, FAST_DLLM_FILE, "--fast-dllm")
    if absent:
        skip(report, f"Fast-dLLM: {absent}")
    else:
        versions["fast-dllm"] = commit_of(options.fast_dllm)
        found += [fast_dllm(options.fast_dllm, python, mode) for mode in options.fast_dllm_modes]
    absent = missing(options.dllm_cache, DLLM_CACHE_FILE, "--dllm-cache")
    if absent:
        skip(report, f"dLLM-Cache: {absent}")
    else:
        versions["dllm-cache"] = commit_of(options.dllm_cache)
        found.append(dllm_cache(options.dllm_cache, python))
    return found


def servers_of(options: argparse.Namespace, report: Report) -> list[Any]:
    """The servers that their interpreters have installed."""
    code = model_code(options.fast_dllm, options.dllm_cache)
    found = []
    for name in SERVERS:
        python = getattr(options, f"{name}_python")
        version = package_versions(python, [name]).get(name)
        if version is None:
            skip(report, f"{name}: not installed (pip install {name}, and --{name}-python if in a venv of its own)")
        elif code is None:
            skip(report, f"{name}: loads LLaDA by remote code; give --fast-dllm or --dllm-cache, which carry it")
        else:
            report.conditions.setdefault("peers", {})[name] = version
            found.append(ServerPeer(name, python, code, max(options.clients)))
    return found


def measure(
    report: Report, work: Work, peers: Sequence[Any], options: argparse.Namespace
) -> tuple[Results, dict[str, Any]]:
    """Samples by clients and peer, and the versions that each peer runs on. A peer that fails is left out."""
    ours = [OurPeer(OURS, reuse=False), OurPeer(OURS_REUSE, reuse=True, ratio=options.ratio)]
    with contextlib.ExitStack() as stack:
        live: dict[str, Any] = {}
        for runner in stack.enter_context(serving(work, ours, max(options.clients), options.threads)):
            live[runner.peer.name] = runner
        for peer in peers:
            reason = peer.refuses(work)
            if reason is not None:
                skip(report, f"{peer.name} on {work.name}: {reason}")
                continue
            print(f"starting {peer.name} ...", file=sys.stderr, flush=True)
            with report_failure(report, live, peer.name, work):
                live[peer.name] = stack.enter_context(peer.start(work, options.threads))
                live[peer.name].run(work.requests(2, seed=-1 % 2**32), 2)  # first calls pay for what stays
                live[peer.name].pause()
        results = {clients: _level(report, work, live, clients, options) for clients in options.clients}
        return results, {name: runner.versions for name, runner in live.items() if runner.versions}


@contextlib.contextmanager
def report_failure(report: Report, live: dict[str, Any], name: str, work: Work) -> Iterator[None]:
    """A peer's failure is one line of the report, and the end of that peer; ours is the benchmark's failure."""
    try:
        yield
    except (PeerFailed, OSError) as error:
        live.pop(name, None)
        if name in (OURS, OURS_REUSE):
            report.fail(f"{name} on {work.name}: {error}")
        else:
            skip(report, f"{name} on {work.name}: {error}")


def _level(
    report: Report, work: Work, live: dict[str, Any], clients: int, options: argparse.Namespace
) -> dict[str, Samples]:
    samples = {name: Samples() for name in live}
    count = max(2, clients * options.requests)
    with tqdm(total=options.rounds * len(live), desc=f"{work.name}, {clients} clients", unit="run") as progress:
        for turn in range(options.rounds):
            requests = work.requests(count, options.seed + 1000 * turn + clients)
            _warm(live, requests)
            for name in np.roll(list(live), turn):
                with report_failure(report, live, str(name), work):
                    done = _run(live[str(name)], requests, clients)
                    samples[str(name)].tokens_per_second.append(work.new_tokens * count / done.seconds)
                    samples[str(name)].answers += done.answers
                progress.update()
    return {name: found for name, found in samples.items() if len(found.tokens_per_second) == options.rounds}


def _warm(live: dict[str, Any], requests: Sequence[Request]) -> None:
    """Encode the shared text: what is measured is the steady state of a text that many requests share."""
    if OURS_REUSE in live:
        live[OURS_REUSE].run(requests[:2], 2)


def _run(runner: Any, requests: Sequence[Request], clients: int) -> Outcome:
    runner.resume()
    try:
        outcome: Outcome = runner.run(requests, clients)
    finally:
        runner.pause()
    return outcome


def describe(report: Report, work: Work, results: Results, versions: dict[str, Any]) -> None:
    most = max(results)
    table = Table(
        f"{work.name}: {work.new_tokens} tokens an answer, {work.steps} steps, blocks of {work.block_length}",
        ["peer", *(f"tokens/s, {clients} clients" for clients in results), f"ours / peer, {most} clients",
         "answers as plain", f"answers as {OURS}", "on"],
        note=f"ours: {OURS_REUSE}. Scripts have no clients: they get as many requests, in batches of that size where "
        "they can, else one after another. float32, dlmserve bfloat16. Answers: share that is equal token by token.",
    )  # fmt: skip
    for name in results[most]:
        rates = [results[clients].get(name) for clients in results]
        shown = [bootstrap(found.tokens_per_second).text(1) if found else "-" for found in rates]
        runs_on = ", ".join(f"{key} {value}" for key, value in versions.get(name, {}).items())
        table.rows.append([
            name, *shown, _gain(results[most], name), _equal(results, name, REFERENCE), _equal(results, name, OURS),
            runs_on or "-",
        ])  # fmt: skip
    report.add(table)
    report.data[work.name] = {
        clients: {name: vars(found) for name, found in level.items()} for clients, level in results.items()
    }
    lines = [
        Series.of(name, list(results), [bootstrap(results[clients][name].tokens_per_second) for clients in results])
        for name in results[most]
        if all(name in level for level in results.values())
    ]
    title = f"{work.name}: shared prefix, greedy"
    report.plots.append(Plot(work.name, title, "clients", "tokens/s", lines, log_x=True))


def _gain(level: dict[str, Samples], name: str) -> str:
    if OURS_REUSE not in level or name == OURS_REUSE:
        return "-"
    return paired_ratio(level[OURS_REUSE].tokens_per_second, level[name].tokens_per_second).text()


def _equal(results: Results, name: str, other: str) -> str:
    """Share of answers that two peers give alike, over all levels."""
    pairs = [
        (mine, theirs)
        for level in results.values()
        if name in level and other in level
        for mine, theirs in zip(level[name].answers, level[other].answers, strict=True)
    ]
    return f"{np.mean([mine == theirs for mine, theirs in pairs]):.2f}" if pairs else "-"
