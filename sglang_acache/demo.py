"""``python -m sglang_acache demo``: a real server on the bundled model, real requests that share text, a table."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_acache.bench.server import serve
from sglang_acache.tiny import task

REQUESTS = 8
"""Requests a layout; all of one layout share one list of facts."""

TITLES = {
    "prefix": "shared text in front",
    "infix": "shared text in the middle",
    "suffix": "shared text after the hole",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One answered request. ``forwarded_tokens``: token rows that went through the model; seconds end to end."""

    text: str
    correct: bool
    cached_tokens: int
    anchor_tokens: int
    forwarded_tokens: int
    seconds: float


def run_demo(*, stay: bool) -> int:
    """Start the server, ask, print; with ``stay`` keep serving until Ctrl-C.

    Returns 1 where answers are wrong or nothing was reused, else 0.
    """
    flags = ["--enable-acache"]
    print(f"starting: python -m sglang.launch_server --model llada-tiny {' '.join(flags)} (half a minute)", flush=True)
    with serve("llada-tiny", flags) as target:
        print(f"server ready at {target.url}\n")
        worked = True
        for layout in task.LAYOUTS:
            items, full, reused = _measure(target.url, layout)
            _show(layout, items, full, reused)
            worked &= all(outcome.correct for outcome in full) and all(one.cached_tokens > 0 for one in reused)
        print("rows: token positions forwarded through the model, over all steps of a request; what the method saves.")
        print("On this tiny model a step is nearly all fixed overhead, so its seconds say little.\n")
        _time_larger_model()
        if stay:
            _wait(target.url)
    return 0 if worked else 1


def _time_larger_model() -> None:
    """A block's start with and without reuse, on a random model of 25 M parameters that is bound by its arithmetic."""
    print("How much faster: one block's start on a larger random model, 75% of its 1,024 tokens shared, ratio 0.2")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", "-m", "sglang_acache.bench", "recompute", "--out", folder]
        command += ["--threads", str(os.cpu_count() or 1), "--shares", "0.75", "--ratios", "0.2"]
        subprocess.run([*command, "--batches", "1", "--rounds", "5"], check=True, stdout=subprocess.DEVNULL)
        measured = json.loads((Path(folder) / "report.json").read_text())["data"]["float32"][0]
    full, reused, speed_up, probe = (measured[key]["value"] for key in ("full_ms", "reused_ms", "speedup", "probe"))
    print(
        f"  full recompute {full:.0f} ms, ACache {reused:.0f} ms: {speed_up:.2f} x as fast (token counts alone would\n"
        f"  give {measured['row_bound']:.2f} x); the probe, once a request, costs {probe:.2f} of a full start\n"
    )


def _wait(url: str) -> None:
    """Leave the server to the person at the terminal."""
    print(f"The server is still running. Try it:\n\n  curl {url}/v1/completions -H 'Content-Type: application/json' \\")
    item = task.shared_requests(seed=7, n_requests=1, layout="prefix")[0]
    print(f"    -d '{json.dumps({'model': 'llada-tiny', 'prompt': item.left, 'max_tokens': item.hole})}'\n")
    print("Ctrl-C stops it.", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        threading.Event().wait()


def _measure(url: str, layout: str) -> tuple[list[task.Item], list[Outcome], list[Outcome]]:
    items = task.shared_requests(seed=7, n_requests=REQUESTS + 2, layout=layout)
    for item in items[:2]:  # two requests are the evidence that the text recurs; it is encoded behind the second
        ask(url, item, reuse=True)
    items = items[2:]
    full, reused = [], []
    for item in items:  # in turn, so that a drift of the machine's speed meets both alike
        full.append(ask(url, item, reuse=False))
        reused.append(ask(url, item, reuse=True))
    return items, full, reused


def ask(url: str, item: task.Item, *, reuse: bool) -> Outcome:
    """Send one item through ``/generate``; greedy."""
    custom: dict[str, Any] = {"acache": {"enabled": reuse}}
    if item.right:
        custom["suffix"] = item.right
    body = {"text": item.left, "sampling_params": {"max_new_tokens": item.hole, "custom_params": custom}}
    request = urllib.request.Request(
        f"{url}/generate", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    start = time.perf_counter()
    with urllib.request.urlopen(request, timeout=300) as response:
        reply = json.load(response)
    seconds = time.perf_counter() - start
    meta = reply["meta_info"]
    return Outcome(
        text=reply["text"].strip(),
        correct=reply["text"].split() == item.answer.split(),
        cached_tokens=meta["cached_tokens"],
        anchor_tokens=meta["acache"][0]["anchor_tokens"],
        forwarded_tokens=meta["diffusion"][0]["forwarded_tokens"],
        seconds=seconds,
    )


def _show(layout: str, items: Sequence[task.Item], full: Sequence[Outcome], reused: Sequence[Outcome]) -> None:
    print(f"{layout}: {TITLES[layout]} ({len(items)} requests over one list of facts, found without being declared)")
    for item, one in list(zip(items, reused, strict=True))[:3]:
        verdict = "right" if one.correct else f"expected {item.answer}"
        print(f"  ... {item.left[-110:]}\n    -> {one.text}   ({verdict})")
    print(f"  {'':22}{'answers right':>14}{'rows':>8}{'reused tokens':>15}{'anchors':>9}{'median s':>10}")
    for name, outcomes in (("full recompute", full), ("ACache, ratio 0.2", reused)):
        right = sum(outcome.correct for outcome in outcomes)
        print(
            f"  {name:22}{f'{right} of {len(outcomes)}':>14}{_median(outcomes, 'forwarded_tokens'):>8.0f}"
            f"{_median(outcomes, 'cached_tokens'):>15.0f}{_median(outcomes, 'anchor_tokens'):>9.0f}"
            f"{_median(outcomes, 'seconds'):>10.3f}"
        )
    rows = _median(full, "forwarded_tokens") / _median(reused, "forwarded_tokens")
    seconds = statistics.median(a.seconds / b.seconds for a, b in zip(full, reused, strict=True))
    print(f"  {rows:.2f} x fewer rows, {seconds:.2f} x the speed\n")


def _median(outcomes: Sequence[Outcome], field: str) -> float:
    return statistics.median(getattr(outcome, field) for outcome in outcomes)
