"""Load on ``/generate``: one request, a closed loop of clients, an open loop of arrivals."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

Payload = dict[str, Any]
TIMEOUT_S = 3600.0
READ_BYTES = 10 * 2**20


@dataclass
class Answer:
    """What came back for one request. ``status`` 0: the connection broke, ``error`` says why."""

    status: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    meta: dict[str, Any] = field(default_factory=dict)
    started: float = 0.0
    latency: float = 0.0
    first_token: float | None = None
    error: str = ""

    @property
    def ok(self) -> bool:
        return self.status == 200 and not self.error

    @property
    def aborted(self) -> bool:
        reason = self.meta.get("finish_reason") or {}
        return isinstance(reason, dict) and reason.get("type") == "abort"

    def info(self, key: str) -> dict[str, Any]:
        """``meta_info.diffusion`` or ``meta_info.acache`` of a finished request; empty where there is none."""
        found = self.meta.get(key) or [{}]
        return found[0] if isinstance(found, list) else found


@dataclass(frozen=True)
class Run:
    """Answers in the order of the payloads, and the wall time of all of them."""

    answers: list[Answer]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(answer.meta.get("completion_tokens", 0) for answer in self.answers if answer.ok)


class Client:
    """Use as ``async with Client(url) as client``.

    Every request has a connection of its own: the server closes one that is idle for some seconds, and a request
    that was just being sent on it would be lost.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    async def __aenter__(self) -> Client:
        self.session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            read_bufsize=READ_BYTES,
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.session.close()

    async def generate(self, payload: Payload, stream: bool = True) -> Answer:
        answer = Answer(started=time.perf_counter())
        try:
            body = {**payload, "stream": stream}
            async with self.session.post(self.url + "/generate", json=body) as response:
                answer.status = response.status
                if response.status != 200:
                    answer.error = (await response.text())[:500]
                elif stream:
                    async for event in _events(response):
                        _take(answer, event)
                else:
                    _take(answer, await response.json())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            answer.status, answer.error = 0, f"{type(error).__name__}: {error}"
        answer.latency = time.perf_counter() - answer.started
        return answer

    async def post(self, path: str, body: Payload | None = None) -> int:
        async with self.session.post(self.url + path, json=body or {}) as response:
            await response.read()
            return response.status

    async def get(self, path: str) -> Any:
        async with self.session.get(self.url + path) as response:
            response.raise_for_status()
            return await response.json()

    async def loads(self) -> dict[str, Any]:
        """SGLang's load of the first rank: ``num_used_tokens``, ``num_running_reqs``, ``num_waiting_reqs``, ..."""
        loads: list[dict[str, Any]] = (await self.get("/v1/loads"))["loads"]
        return loads[0]

    async def wait_idle(self, timeout: float = 300.0) -> bool:
        """Wait until no request runs or waits; False where that never happens."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            load = await self.loads()
            if load["num_running_reqs"] == 0 and load["num_waiting_reqs"] == 0:
                return True
            await asyncio.sleep(0.1)
        return False


async def closed_loop(
    client: Client, payloads: Sequence[Payload], clients: int, on_done: Callable[[], object] = lambda: None
) -> Run:
    """``clients`` clients, each with one request in flight, until all payloads are answered."""
    answers: list[Answer] = [Answer()] * len(payloads)
    waiting = iter(range(len(payloads)))

    async def one_client() -> None:
        for index in waiting:
            answers[index] = await client.generate(payloads[index])
            on_done()

    began = time.perf_counter()
    await asyncio.gather(*(one_client() for _ in range(min(clients, len(payloads)))))
    return Run(answers, time.perf_counter() - began)


async def open_loop(
    client: Client, payloads: Sequence[Payload], rate: float, seed: int, on_done: Callable[[], object] = lambda: None
) -> Run:
    """Requests arrive ``rate`` a second on average (Poisson), answered or not; SGLang's own arrival process."""
    from sglang.benchmark.serving import get_request

    async def one(payload: Payload) -> Answer:
        answer = await client.generate(payload)
        on_done()
        return answer

    np.random.seed(seed)  # get_request draws from numpy's global generator
    began = time.perf_counter()
    tasks = []
    async for payload in get_request(list(payloads), rate):
        tasks.append(asyncio.create_task(one(payload)))
    answers = await asyncio.gather(*tasks)
    return Run(list(answers), time.perf_counter() - began)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line[6:])


def _take(answer: Answer, event: dict[str, Any]) -> None:
    """Keep the newest state of an answer; SGLang's stream is cumulative."""
    if "error" in event:  # a refused stream has begun with status 200
        error = event["error"]
        answer.status = int(error.get("code") or 500) if isinstance(error, dict) else 500
        answer.error = str(error)[:500]
        return
    answer.meta = event.get("meta_info") or {}
    answer.text = event.get("text") or ""
    ids = event.get("output_ids")
    if ids is not None:
        answer.token_ids = ids
    if answer.first_token is None and answer.meta.get("completion_tokens"):
        answer.first_token = time.perf_counter() - answer.started
