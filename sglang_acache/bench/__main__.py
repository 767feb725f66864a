"""``python -m sglang_acache.bench SUBCOMMAND``: measure speed, memory and answers, and write a report."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import warnings
from pathlib import Path

SUBCOMMANDS = {
    "steps": "cache policies, time outside the model, attention cost, concurrency",
    "recompute": "block-start latency with and without reuse, against what counts promise",
    "throughput": "tokens/s and latency at 1..64 clients, closed and open loop",
    "kv": "peak K/V slots with and without reuse, against the formula",
    "fidelity": "accuracy and agreement with full recompute by ratio, selector and position",
    "admission": "cost of finding known spans in prompts",
    "peers": "ours beside a plain loop, Fast-dLLM, dLLM-Cache, dlmserve and dfastllm",
    "soak": "thousands of mixed requests with aborts, bad input, flushes and eviction: wrong answers and leaks",
}
"""Each is a module of this package with ``add_arguments(parser)`` and ``run(options) -> exit code``."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sglang_acache.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    chosen = (argv if argv is not None else sys.argv[1:])[:1]
    for name, summary in SUBCOMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if chosen == [name]:  # import only what is asked for: some need matplotlib, aiohttp, torch
            _module(name).add_arguments(command)
    options = parser.parse_args(argv)
    if options.out is None:
        options.out = Path("results") / options.command
    warnings.filterwarnings("ignore", category=FutureWarning)
    from sglang_acache.server_process import ServerFailed

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that the server is stopped too
    try:
        return int(_module(options.command).run(options))
    except ServerFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _module(name: str):  # type: ignore[no-untyped-def]
    return importlib.import_module(f"sglang_acache.bench.{name}")


if __name__ == "__main__":
    sys.exit(main())
