"""Peers that are HTTP servers, ours among them: started on the work's checkpoint, under a closed loop of clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_acache.bench.client import Client, closed_loop
from sglang_acache.bench.options import REUSE_FLAGS
from sglang_acache.bench.peers_scripts import Outcome, PeerFailed
from sglang_acache.bench.peers_work import PUBLISHED_MASK, Request, Work, read_words
from sglang_acache.bench.server import serve
from sglang_acache.server_process import HOST, free_port, status, stop

START_TIMEOUT_S = 600.0
MODEL_CODE = ("configuration_llada.py", "modeling_llada.py")
_ASK_VERSIONS = """
import importlib.metadata, sys
for package in sys.argv[1:]:
    try:
        print(package, importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        pass
"""
OURS, OURS_REUSE = "ours dual", "ours dual+acache"


@dataclass(frozen=True)
class OurPeer:
    """This package's server, with reuse or without; both modes are served by one process (see ``serving``)."""

    name: str
    reuse: bool
    ratio: float = 0.2
    note: str = ""

    def payload(self, work: Work, request: Request) -> dict[str, Any]:
        reuse = {"spans": [[0, work.shared]], "anchor_ratio": self.ratio} if self.reuse else {"enabled": False}
        custom = {"block_length": work.block_length, "steps": work.steps, "cache": "dual", "acache": reuse}
        sampling = {"max_new_tokens": work.new_tokens, "temperature": 0.0, "ignore_eos": True, "custom_params": custom}
        return {"input_ids": request.ids, "sampling_params": sampling}


@dataclass
class OurRunner:
    peer: OurPeer
    work: Work
    url: str
    versions: dict[str, str]

    def run(self, requests: Sequence[Request], clients: int) -> Outcome:
        done = asyncio.run(self._load([self.peer.payload(self.work, request) for request in requests], clients))
        failed = [answer for answer in done.answers if not answer.ok]
        if failed:
            raise PeerFailed(f"{self.peer.name}: {failed[0].status} {failed[0].error}")
        return Outcome(done.seconds, [answer.token_ids for answer in done.answers])

    async def _load(self, payloads: list[dict[str, Any]], clients: int) -> Any:
        async with Client(self.url) as client:
            return await closed_loop(client, payloads, clients)

    def pause(self) -> None:
        """An idle server sleeps."""

    def resume(self) -> None:
        pass


@contextlib.contextmanager
def serving(work: Work, peers: Sequence[OurPeer], clients: int, threads: int) -> Iterator[list[OurRunner]]:
    """One server of ours for all modes: reuse is switched per request."""
    canvas = work.shared + work.own + work.new_tokens + 64
    flags = [*REUSE_FLAGS, "--no-acache-discover", "--dtype", "float32", "--skip-tokenizer-init"]
    flags += ["--max-running-requests", str(clients), "--max-total-tokens", str(max(canvas, 256) * (clients + 4))]
    with serve(work.model, flags, threads=threads) as target:
        yield [OurRunner(peer, work, target.url, {}) for peer in peers]


@dataclass(frozen=True)
class ServerPeer:
    """A server from PyPI, in the interpreter that has it. It loads the model by remote code, which the user's
    checkout of Fast-dLLM or dLLM-Cache carries (``code``: the folder of the two files)."""

    name: str
    python: str
    code: Path
    clients: int
    note: str = ""

    def refuses(self, work: Work) -> str | None:
        if work.spec is None:
            return "needs a chat template and a block length of 32; llada-tiny has blocks of 4"
        if self.name == "dlmserve" and work.mask_id != PUBLISHED_MASK:
            return f"has the mask token {PUBLISHED_MASK} built in; this checkpoint has {work.mask_id}"
        return None

    def command(self, model: Path, port: int, work: Work) -> list[str]:
        if self.name == "dlmserve":
            app = ["-m", "uvicorn", "dlmserve.api.server:app", "--host", HOST, "--port", str(port)]
            return [self.python, "-W", "ignore", *app, "--log-level", "warning"]
        module = [self.python, "-W", "ignore", "-m", "dfastllm.entrypoints.openai.api_server"]
        load = ["--max-concurrent-requests", str(self.clients), "--rate-limit-requests", "1000000"]
        decode = ["--diffusion-steps", str(work.steps), "--block-size", str(work.block_length), "--disable-apd"]
        return [*module, "--model", str(model), "--trust-remote-code", "--dtype", "float32", "--no-compile",
                "--host", HOST, "--port", str(port), *load, *decode]  # fmt: skip

    def environment(self, model: Path, threads: int) -> dict[str, str]:
        own = {
            "DLMSERVE_MODEL": str(model),
            "DLMSERVE_DTYPE": "bf16",  # its only choice without a GPU
            "DLMSERVE_DEVICE": "cpu",
            "DLMSERVE_MAX_BATCH": str(self.clients),
            "HF_HUB_OFFLINE": "1",
        }
        return {**os.environ, "OMP_NUM_THREADS": str(threads), **own}

    def request(self, work: Work, model: Path, request: Request) -> tuple[str, dict[str, Any]]:
        """Path and body of one greedy request."""
        body = {"model": str(model), "temperature": 0.0, "max_tokens": work.new_tokens}
        messages = {"messages": [{"role": "user", "content": request.user}]}
        if self.name == "dlmserve":
            return "/v1/chat/completions", {
                **body, **messages, "num_denoising_steps": work.steps, "block_length": work.block_length,
            }  # fmt: skip
        return "/v1/chat/completions", {**body, **messages}

    @contextlib.contextmanager
    def start(self, work: Work, threads: int) -> Iterator[ServerRunner]:
        with tempfile.TemporaryDirectory(prefix="acache-peer-") as folder:
            model = with_code(work.model, Path(folder) / f"llada-{work.name}", self.code)
            port, log = free_port(), Path(folder) / "log.txt"
            with log.open("wb") as sink:
                process = subprocess.Popen(
                    self.command(model, port, work), stdout=sink, stderr=subprocess.STDOUT, start_new_session=True,
                    env=self.environment(model, threads), cwd=folder,
                )  # fmt: skip
            try:
                runner = ServerRunner(self, work, model, f"http://{HOST}:{port}", process)
                runner.wait_ready(log)
                yield runner
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGCONT)
                stop(process)


@dataclass
class ServerRunner:
    peer: ServerPeer
    work: Work
    model: Path
    url: str
    process: subprocess.Popen[bytes]

    @property
    def versions(self) -> dict[str, str]:
        return package_versions(self.peer.python, (self.peer.name, "torch", "transformers"))

    def wait_ready(self, log: Path) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        path = "/ready" if self.peer.name == "dlmserve" else "/health"
        while status(self.url + path, timeout=5.0) != 200:
            if self.process.poll() is not None or time.monotonic() > deadline:
                tail = " / ".join(log.read_text(errors="replace").splitlines()[-3:])
                raise PeerFailed(f"{self.peer.name}: did not start: {tail[-400:]}")
            time.sleep(0.5)

    def run(self, requests: Sequence[Request], clients: int) -> Outcome:
        return asyncio.run(self._load(requests, clients))

    async def _load(self, requests: Sequence[Request], clients: int) -> Outcome:
        async with Client(self.url) as client:
            bodies = [self.peer.request(self.work, self.model, request) for request in requests]
            began = time.perf_counter()
            texts = await in_flight([_completion(client, path, body) for path, body in bodies], clients)
        return Outcome(time.perf_counter() - began, [read_words(text) for text in texts])

    def pause(self) -> None:
        """Stop the process: an idle server that polls would take time from the one that is measured."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)


async def in_flight(calls: Sequence[Awaitable[str]], clients: int) -> list[str]:
    """Results in the order of the calls, ``clients`` at a time."""
    gate = asyncio.Semaphore(clients)

    async def one(call: Awaitable[str]) -> str:
        async with gate:
            return await call

    return list(await asyncio.gather(*(one(call) for call in calls)))


async def _completion(client: Client, path: str, body: dict[str, Any]) -> str:
    async with client.session.post(client.url + path, json=body) as response:
        if response.status != 200:
            raise PeerFailed(f"{path}: {response.status} {(await response.text())[:300]}")
        return str((await response.json())["choices"][0]["message"]["content"])


def with_code(model: Path, folder: Path, code: Path) -> Path:
    """A copy of the checkpoint beside the modelling files that its ``auto_map`` names, readable by transformers 4."""
    shutil.copytree(model, folder)
    tokenizer = folder / "tokenizer_config.json"
    fields = json.loads(tokenizer.read_text())
    extra = fields.pop("extra_special_tokens", [])  # transformers 5's name of the list
    fields |= {"tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": list(extra)}
    tokenizer.write_text(json.dumps(fields))
    for file in MODEL_CODE:
        shutil.copy(code / file, folder / file)
    return folder


def model_code(fast_dllm: Path | None, dllm_cache: Path | None) -> Path | None:
    """The folder of LLaDA's modelling files in one of the checkouts."""
    folders = []
    if fast_dllm is not None:
        folders.append(fast_dllm / "llada" / "model")
    if dllm_cache is not None:
        folders.append(dllm_cache / "mmada_models")
    found = (folder for folder in folders if all((folder / file).is_file() for file in MODEL_CODE))
    return next(found, None)


def package_versions(python: str, packages: Sequence[str]) -> dict[str, str]:
    """Versions of what an interpreter has installed; absent packages are left out."""
    if not shutil.which(python):
        return {}
    done = subprocess.run([python, "-c", _ASK_VERSIONS, *packages], capture_output=True, text=True)
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())
