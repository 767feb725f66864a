"""Peers that are loops in Python, not servers: each in a worker process, in the interpreter it needs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_acache.bench.peers_work import Request, Work

WORKER = Path(__file__).with_name("peers_worker.py")
FAST_DLLM_FILE = Path("llada/generate.py")
DLLM_CACHE_FILE = Path("dllm_cache/hooks/cache_hook_LLaDA.py")
DLLM_CACHE_OPTIONS = {"prompt_interval_steps": 50, "gen_interval_steps": 7, "transfer_ratio": 0.25}
"""Of dLLM-Cache's published GSM8K script for LLaDA-8B-Instruct."""


class PeerFailed(RuntimeError):
    """A peer could not be started or stopped answering; the message is what it said."""


@dataclass(frozen=True)
class Outcome:
    """Seconds for all requests, and their answers as token ids."""

    seconds: float
    answers: list[list[int]]


@dataclass(frozen=True)
class ScriptPeer:
    """A loop that ``peers_worker`` knows by ``name``. ``batches``: it answers several prompts at once."""

    name: str
    python: str = sys.executable
    repo: Path | None = None
    batches: bool = True
    note: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def refuses(self, work: Work) -> str | None:
        return None

    def command(self) -> list[str]:
        return [self.python, "-W", "ignore", str(WORKER)]

    def load_order(self, work: Work, threads: int) -> dict[str, Any]:
        repo = None if self.repo is None else str(self.repo.resolve())
        return {"do": "load", "peer": self.name, "repo": repo, "model": str(work.model), "threads": threads}

    def run_order(self, work: Work, requests: Sequence[Request], clients: int) -> dict[str, Any]:
        return {
            "do": "run",
            "prompts": [request.ids for request in requests],
            "batch": clients if self.batches else 1,
            "new_tokens": work.new_tokens,
            "block_length": work.block_length,
            "steps": work.steps,
            "mask_id": work.mask_id,
            **self.options,
        }

    @contextlib.contextmanager
    def start(self, work: Work, threads: int) -> Iterator[ScriptRunner]:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        process = subprocess.Popen(
            self.command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment,
            text=True,
        )  # fmt: skip
        try:
            runner = ScriptRunner(self, work, process)
            runner.versions = runner.ask(self.load_order(work, threads))["versions"]
            yield runner
        finally:
            process.kill()
            process.wait()


class ScriptRunner:
    """A loaded peer. Attributes: versions: of what it runs on."""

    def __init__(self, peer: ScriptPeer, work: Work, process: subprocess.Popen[str]) -> None:
        self.peer, self.work, self.process = peer, work, process
        self.versions: dict[str, str] = {}

    def run(self, requests: Sequence[Request], clients: int) -> Outcome:
        reply = self.ask(self.peer.run_order(self.work, requests, clients))
        return Outcome(reply["seconds"], reply["answers"])

    def pause(self) -> None:
        """A worker without an order sleeps."""

    def resume(self) -> None:
        pass

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PeerFailed(f"{self.peer.name}: the worker died (exit code {self.process.poll()})")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise PeerFailed(f"{self.peer.name}: {reply['error']}")
        return reply


def plain() -> ScriptPeer:
    return ScriptPeer("plain", note="transformers Llama, full mask, no cache, padded batch")


def fast_dllm(repo: Path, python: str, mode: str) -> ScriptPeer:
    return ScriptPeer(f"fast-dllm {mode}", python, repo, batches=False, note="generate.py; one prompt at a time")


def dllm_cache(repo: Path, python: str) -> ScriptPeer:
    settings = ", ".join(f"{key}={value}" for key, value in DLLM_CACHE_OPTIONS.items())
    note = f"its hooks on its own copy of LLaDA; {settings}"
    return ScriptPeer("dllm-cache", python, repo, note=note, options={"dllm_cache": DLLM_CACHE_OPTIONS})


def missing(repo: Path | None, file: Path, flag: str) -> str | None:
    """Why a checkout cannot be used; None where it can."""
    if repo is None:
        return f"no checkout given ({flag} PATH)"
    return None if (repo / file).is_file() else f"{flag} {repo}: has no {file}"


def commit_of(repo: Path) -> str:
    """The checkout's commit; ``unknown`` where git cannot tell."""
    done = subprocess.run(["git", "-C", str(repo), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"
