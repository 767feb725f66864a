"""Thousands of mixed requests at once, many of them cut off, on a pool too small for them: what went wrong?

Before the soak every prompt is answered once alone, with reuse off and with its declared span; during the soak the
same prompts must get the same answers, whatever runs beside them. After each stretch the server is let idle, its
used K/V slots must be 0, it is flushed, and the memory of its processes is noted. Ends with code 1 where anything
was wrong, leaked or died.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import psutil
from tqdm import tqdm

from sglang_acache.bench.client import Answer, Client
from sglang_acache.bench.options import REUSE_FLAGS, add_common, dtype_flags, model_folder, ordinary_words
from sglang_acache.bench.report import Plot, Report, Series, Table
from sglang_acache.bench.server import Target, serve
from sglang_acache.bench.soak_requests import CHECKED, MODES, Item, bad_payload, random_items, tiny_items
from sglang_acache.bench.stats import percentiles
from sglang_acache.server_process import MEMORY_CHECKS

TINY = "llada-tiny"
FAULTS = ("memory leak", "Leak", "Traceback", "double free", "use-after-free", "AssertionError")
REFUSED = (400, 422)
KNOWN_FAULT = "'GenerateReqInput' object has no attribute 'is_single'"
"""SGLang's own: a streamed request that is refused before it is normalised has nothing to abort, and its clean-up
fails. It then closes the connection: a client that keeps it alive loses its next request. Our client does not. Counted,
not held against the run."""
CONTEXT = 16  # lines of a traceback that are shown
SHOWN = 20  # problems listed in the report


@dataclass
class Tally:
    """What happened so far. ``outcomes`` counts (kind of request, outcome)."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    latency: list[float] = field(default_factory=list)
    flushes: Counter[int] = field(default_factory=Counter)
    memory: list[dict[str, float]] = field(default_factory=list)
    idle_slots: list[int] = field(default_factory=list)
    sent: int = 0
    known_faults: int = 0

    def wrong(self, kind: str, problem: str) -> None:
        self.outcomes[kind, "wrong"] += 1
        self.problems.append(f"{kind}: {problem}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser, model=TINY)
    parser.add_argument("--requests", type=int, default=10_000, help="stop after so many (default: %(default)s)")
    parser.add_argument("--minutes", type=float, help="stop after so long instead")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--abort-share", type=float, default=0.2, help="cut off: half aborted, half disconnected")
    parser.add_argument("--bad-share", type=float, default=0.05)
    parser.add_argument("--affixes", type=int, default=36, help="different shared texts (default: %(default)s)")
    parser.add_argument("--pool", type=int, default=2560, help="K/V slots; small, so that spans get evicted")
    parser.add_argument("--stretch", type=int, default=1_000, help="requests between two idle checks")
    parser.add_argument("--max-growth-mb", type=float, default=64.0, help="growth of a process that fails the run")


def run(options: argparse.Namespace) -> int:
    if options.quick:
        options.requests, options.stretch, options.affixes, options.clients = 60, 30, 6, 8
    report = Report("soak", options.out, vars(options))
    with model_folder(options) as model:
        if options.model == TINY:
            items = tiny_items(options.affixes, options.seed)
        else:
            items = random_items(options.affixes, options.seed, ordinary_words(model))
        flags = [*REUSE_FLAGS, *dtype_flags("float32"), "--max-total-tokens", str(options.pool)]
        flags += ["--max-running-requests", "16", "--enable-metrics", *options.server_flags]
        with serve(
            model, flags, base_url=options.base_url, threads=options.threads, env=MEMORY_CHECKS
        ) as target:
            began = time.monotonic()
            tally = asyncio.run(_soak(target, items, options))
            _check_log(target, tally)
            _describe(report, tally, time.monotonic() - began, options)
    return report.write()


async def _soak(target: Target, items: list[Item], options: argparse.Namespace) -> Tally:
    tally, rng = Tally(), random.Random(options.seed)
    async with Client(target.url) as client:
        await _learn(client, items, tally)
        deadline = None if options.minutes is None else time.monotonic() + 60 * options.minutes
        total = options.requests if deadline is None else None
        with tqdm(total=total, desc="soak", unit="request") as progress:
            while (tally.sent < options.requests) if deadline is None else (time.monotonic() < deadline):
                count = options.stretch if total is None else min(options.stretch, total - tally.sent)
                await _stretch(client, items, tally, count, options, rng, progress)
                if not await _rest(client, target, tally):
                    break
    return tally


async def _learn(client: Client, items: list[Item], tally: Tally) -> None:
    """The right answers, one request at a time; asked twice, so that an unstable server is seen at once."""
    for item in tqdm(items, desc="sequential answers", unit="prompt"):
        for mode in CHECKED:
            first = await client.generate(item.payload(mode, 0))
            again = await client.generate(item.payload(mode, 0))
            if not first.ok or first.token_ids != again.token_ids:
                tally.wrong(mode, f"alone: {first.status} {first.error} {first.token_ids} then {again.token_ids}")
            item.expected[mode] = first.token_ids


async def _stretch(
    client: Client,
    items: list[Item],
    tally: Tally,
    count: int,
    options: argparse.Namespace,
    rng: random.Random,
    progress: Any,
) -> None:
    waiting = iter(range(count))

    async def one_client() -> None:
        for _ in waiting:
            tally.sent += 1
            await _one(client, rng.choice(items), tally, options, rng)
            progress.update()

    await asyncio.gather(*(one_client() for _ in range(options.clients)), _flush_sometimes(client, tally))


async def _flush_sometimes(client: Client, tally: Tally) -> None:
    """A flush of a busy server is refused, of an idle one it forgets every span; neither may harm a request."""
    for _ in range(3):
        await asyncio.sleep(0.5)
        tally.flushes[await client.post("/flush_cache")] += 1


async def _one(client: Client, item: Item, tally: Tally, options: argparse.Namespace, rng: random.Random) -> None:
    draw = rng.random()
    if draw < options.bad_share:
        _judge_bad(tally, await client.generate(bad_payload(item, rng), stream=rng.random() < 0.5))
        return
    mode, seed = rng.choice(MODES), rng.randrange(2**31)
    if draw < options.bad_share + options.abort_share / 2:
        await _abort(client, item, mode, seed, tally, rng)
    elif draw < options.bad_share + options.abort_share:
        await _disconnect(client, item, mode, seed, tally, rng)
    else:
        answer = await client.generate(item.payload(mode, seed), stream=rng.random() < 0.7)
        _judge(tally, mode, mode, item, answer)
        tally.latency.append(answer.latency)


async def _abort(client: Client, item: Item, mode: str, seed: int, tally: Tally, rng: random.Random) -> None:
    rid = f"soak-{tally.sent}-{seed}"
    task = asyncio.create_task(client.generate(item.payload(mode, seed, rid), stream=rng.random() < 0.5))
    await asyncio.sleep(rng.random() * 0.3)
    await client.post("/abort_request", {"rid": rid})
    answer = await task
    if answer.aborted or answer.status in (400, 499, 503):
        problem = item.problem(mode, answer, cut=True)
        tally.outcomes["aborted", "cut off"] += problem is None
        if problem is not None:
            tally.wrong("aborted", problem)
    else:
        _judge(tally, "aborted", mode, item, answer)


async def _disconnect(client: Client, item: Item, mode: str, seed: int, tally: Tally, rng: random.Random) -> None:
    task = asyncio.create_task(client.generate(item.payload(mode, seed), stream=rng.random() < 0.5))
    done, _ = await asyncio.wait([task], timeout=rng.random() * 0.3)
    if done:
        _judge(tally, "disconnected", mode, item, task.result())
        return
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    tally.outcomes["disconnected", "cut off"] += 1


def _judge(tally: Tally, kind: str, mode: str, item: Item, answer: Answer) -> None:
    problem = item.problem(mode, answer, cut=False) if answer.ok else f"{answer.status}: {answer.error}"
    if problem is not None:
        tally.wrong(kind, f"{problem} ({mode}, {item.params}, span {item.span})")
    else:
        tally.outcomes[kind, "right" if mode in CHECKED else "done"] += 1


def _judge_bad(tally: Tally, answer: Answer) -> None:
    if answer.status in REFUSED:
        tally.outcomes["bad", "refused"] += 1
    else:
        tally.wrong("bad", f"answered with {answer.status} {answer.error or answer.token_ids}")


async def _rest(client: Client, target: Target, tally: Tally) -> bool:
    """Idle, account, flush, note the memory; False where the server is gone or never gets idle."""
    try:
        if not await client.wait_idle():
            tally.problems.append(f"never idle: {await client.loads()}")
            return False
        await asyncio.sleep(1.5)  # SGLang's own memory check runs when idle, and ends a server that lost a slot
        tally.idle_slots.append((await client.loads())["num_used_tokens"])
        code = await client.post("/flush_cache")
        if code != 200:
            tally.problems.append(f"flush of an idle server: {code}")
        tally.idle_slots.append((await client.loads())["num_used_tokens"])
    except Exception as error:  # whatever it is, the server no longer answers as it should
        tally.problems.append(f"the server is gone ({type(error).__name__}: {error})\n{target.log_tail()}")
        return False
    if target.own is not None:
        tally.memory.append(process_memory(target.own.process.pid))
    return target.alive


def process_memory(root: int) -> dict[str, float]:
    """MB by process of a server, by name and id: unique memory where the system tells it, else resident."""
    parent = psutil.Process(root)
    found = {}
    for process in [parent, *parent.children(recursive=True)]:
        try:
            info = process.memory_full_info()
            name = "launch_server" if process.pid == root else process.name()
            found[f"{name} {process.pid}"] = getattr(info, "uss", info.rss) / 2**20
        except psutil.Error:
            continue
    return found


def _check_log(target: Target, tally: Tally) -> None:
    if target.own is None:
        return
    lines = target.own.log_lines()
    at = [number for number, line in enumerate(lines) if any(word in line for word in FAULTS)]
    faults = [text for text in (fault(lines, number) for number in at) if KNOWN_FAULT not in text[-1]]
    tally.known_faults = len(at) - len(faults)
    if faults:
        tally.problems.append(f"{len(faults)} faults in the server's log, the first:\n" + "\n".join(faults[0]))
    if not target.alive:
        tally.problems.append(f"the server died\n{target.log_tail()}")


def fault(lines: list[str], at: int) -> list[str]:
    """The lines around number ``at``; of a traceback its last calls and the exception."""
    end = at + 1
    while end < len(lines) and lines[end].startswith(" "):
        end += 1
    return [*lines[max(at - 2, 0) : at + 1], *lines[max(end - CONTEXT, at + 1) : end + 1]]


def _describe(report: Report, tally: Tally, seconds: float, options: argparse.Namespace) -> None:
    kinds = dict.fromkeys(kind for kind, _ in tally.outcomes)
    outcomes = dict.fromkeys(outcome for _, outcome in tally.outcomes)
    rows: list[list[Any]] = [[kind, *(tally.outcomes[kind, outcome] for outcome in outcomes)] for kind in kinds]
    report.add(Table("Requests by what was asked and what happened", ["kind", *outcomes], rows))
    wrong = sum(count for (_, outcome), count in tally.outcomes.items() if outcome == "wrong")
    leaked = max(tally.idle_slots, default=0)
    done = sum(tally.outcomes.values())
    refused = sum(count for (_, outcome), count in tally.outcomes.items() if outcome == "refused")
    latency = ", ".join(f"{name} {value:.2f}" for name, value in percentiles(tally.latency).items())
    rows = [
        ["requests sent", tally.sent], ["refused", refused], ["wrong", wrong], ["slots leaked", leaked],
        ["requests a second", f"{done / seconds:.1f}"], ["latency, s", latency],
        ["known faults of SGLang's own in the log", tally.known_faults],
        ["flushes while busy, by status", dict(tally.flushes)], ["idle checks", len(tally.idle_slots) // 2],
    ]  # fmt: skip
    report.add(Table("Summary", ["", "count"], rows))
    growth = _memory(report, tally)
    for problem in tally.problems[:SHOWN]:
        report.fail(problem)
    if len(tally.problems) > SHOWN:
        report.fail(f"... and {len(tally.problems) - SHOWN} more")
    if leaked:
        report.fail(f"{leaked} K/V slots in use while idle")
    report.failures += [f"{name} grew by {mb:.0f} MB" for name, mb in growth.items() if mb > options.max_growth_mb]
    report.data = {"tally": {**vars(tally), "outcomes": {" / ".join(key): n for key, n in tally.outcomes.items()}}}


def _memory(report: Report, tally: Tally) -> dict[str, float]:
    """Growth in MB of each process that lived from the end of the first third to the end of the soak."""
    if not tally.memory:
        return {}
    start, last = tally.memory[len(tally.memory) // 3], tally.memory[-1]
    growth = {name: mb - start[name] for name, mb in last.items() if name in start}
    table = Table("Memory of the server's processes, MB", ["process", "after warming up", "at the end", "growth"])
    table.rows = [[name, f"{start[name]:.0f}", f"{last[name]:.0f}", f"{mb:+.1f}"] for name, mb in growth.items()]
    report.add(table)
    lines = [
        Series(name, list(range(1, len(tally.memory) + 1)), [sample.get(name, float("nan")) for sample in tally.memory])
        for name in last
    ]
    report.plots.append(Plot("memory", "Memory while soaking", "stretch", "MB", lines))
    return growth
