"""Load on a fake ``/generate``: what the loops send, and what they make of the answers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from sglang_acache.bench.client import Answer, Client, closed_loop, open_loop
from sglang_acache.bench.soak_requests import Item

REFUSAL = {"error": {"message": "steps: must be >= 1", "code": 400}}


class FakeServer(BaseHTTPRequestHandler):
    """Streams two tokens; refuses what has no prompt. Answers nobody before ``together`` requests have been here."""

    running: ClassVar[int] = 0
    most: ClassVar[int] = 0
    together: ClassVar[int] = 1
    enough: ClassVar[threading.Event] = threading.Event()
    lock: ClassVar[threading.Lock] = threading.Lock()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.lock:
            type(self).running += 1
            type(self).most = max(self.most, self.running)
            if self.running >= self.together:
                self.enough.set()
        stream, refused = body["stream"], not body["input_ids"]
        self.send_response(400 if refused and not stream else 200)
        self.end_headers()
        self.enough.wait(60)
        for event in [REFUSAL] if refused else self.events():
            if stream:
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n" if stream else json.dumps(REFUSAL if refused else event).encode())
        with self.lock:
            type(self).running -= 1

    @staticmethod
    def events() -> list[dict]:
        last = {"completion_tokens": 2, "diffusion": [{"forwarded_tokens": 7}], "finish_reason": {"type": "length"}}
        return [
            {"text": "a", "output_ids": [5], "meta_info": {"completion_tokens": 1, "diffusion": []}},
            {"text": "a b", "output_ids": [5, 6], "meta_info": last},
        ]

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeServer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    FakeServer.most, FakeServer.together = 0, 1
    FakeServer.enough.clear()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def payloads(count: int) -> list[dict]:
    return [{"input_ids": [index + 1]} for index in range(count)]


def test_closed_loop_keeps_so_many_requests_in_flight(url: str) -> None:
    async def measure():  # type: ignore[no-untyped-def]
        async with Client(url) as client:
            return await closed_loop(client, payloads(9), clients=3)

    FakeServer.together = 3
    done = asyncio.run(measure())
    assert FakeServer.most == 3
    assert [answer.token_ids for answer in done.answers] == [[5, 6]] * 9
    assert done.tokens == 18
    assert all(0 < answer.first_token <= answer.latency for answer in done.answers)
    assert done.answers[0].info("diffusion") == {"forwarded_tokens": 7}


def test_open_loop_does_not_wait_for_answers(url: str) -> None:
    pytest.importorskip("sglang.benchmark.serving")

    async def measure():  # type: ignore[no-untyped-def]
        async with Client(url) as client:
            return await open_loop(client, payloads(8), rate=2000.0, seed=0)

    FakeServer.together = 8
    done = asyncio.run(measure())
    assert all(answer.ok for answer in done.answers)
    assert FakeServer.most == 8


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_has_status_400_streamed_or_not(url: str, stream: bool) -> None:
    async def ask() -> Answer:
        async with Client(url) as client:
            return await client.generate({"input_ids": []}, stream=stream)

    answer = asyncio.run(ask())
    assert answer.status == 400
    assert not answer.ok
    assert "steps" in answer.error


def test_nobody_there_is_an_error_of_the_answer() -> None:
    async def ask() -> Answer:
        async with Client("http://127.0.0.1:9") as client:
            return await client.generate({"input_ids": [1]})

    answer = asyncio.run(ask())
    assert answer.status == 0
    assert not answer.ok


def test_soak_judges_whole_answers_and_beginnings() -> None:
    item = Item([1], [], (0, 1), 3, {}, {"plain": [7, 8, 9]})
    assert item.problem("plain", Answer(200, [7, 8, 9]), cut=False) is None
    assert item.problem("plain", Answer(200, [7, 8]), cut=True) is None
    assert item.problem("plain", Answer(200, []), cut=True) is None
    assert "got [7, 8]" in str(item.problem("plain", Answer(200, [7, 8]), cut=False))
    assert "expected" in str(item.problem("plain", Answer(200, [8]), cut=True))
    assert item.problem("sampled", Answer(200, [1, 2]), cut=False) is None
    assert "4 tokens" in str(item.problem("sampled", Answer(200, [1, 2, 3, 4]), cut=False))
