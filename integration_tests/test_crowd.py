"""Many clients at once: nobody's answer depends on who else is there, who leaves, or who is thrown out."""

from __future__ import annotations

import random
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import requests

from integration_tests.prompts import prompt_ids
from integration_tests.server import REQUEST_TIMEOUT_S, Server, sse_events

CACHES = ("dual", "prefix", "none")
SCHEDULES: tuple[dict[str, Any], ...] = ({}, {"threshold": 0.6}, {"steps": 40}, {"factor": 1.0})


def body(index: int) -> dict[str, Any]:
    """Request ``index``: prompt, hole, suffix, schedule and cache vary; every fifth is sampled, from a seed."""
    rng = random.Random(f"crowd-{index}")
    params = {
        "block_length": rng.choice((4, 8, 16, 32)),
        "cache": CACHES[index % 3],
        "suffix_ids": prompt_ids(rng.choice((0, 0, 11)), seed=index),
        **SCHEDULES[index % 4],
    }
    sampling: dict[str, Any] = {"max_new_tokens": rng.randint(1, 80), "custom_params": params, "temperature": 0}
    if index % 5 == 4:
        sampling |= {"temperature": 1.2, "top_p": 0.9, "sampling_seed": index}
    return {"input_ids": prompt_ids(rng.randint(1, 400), seed=1000 + index), "sampling_params": sampling}


def answer(server: Server, index: int) -> list[int]:
    response = server.post("/generate", body(index))
    assert response.status_code == 200, response.text
    return list(response.json()["output_ids"])


def abort_midway(server: Server, index: int) -> None:
    """Stream, and ask for an abort after the first tokens; the stream ends, by itself or as aborted."""
    rid = f"aborted-{index}"
    request = {**body(index), "rid": rid, "stream": True}
    with requests.post(server.url + "/generate", json=request, stream=True, timeout=REQUEST_TIMEOUT_S) as response:
        events = sse_events(response)
        next(events)
        server.post("/abort_request", {"rid": rid})
        assert all(event for event in events)


def hang_up(server: Server, index: int) -> None:
    request = {**body(index), "stream": True}
    with requests.post(server.url + "/generate", json=request, stream=True, timeout=REQUEST_TIMEOUT_S) as response:
        next(sse_events(response))


def test_sixty_four_mixed_requests(llada: Server) -> None:
    staying, aborted, leaving = range(44), range(44, 54), range(54, 64)
    alone = [answer(llada, index) for index in staying]
    assert len({tuple(one) for one in alone}) > 40
    with ThreadPoolExecutor(64) as pool:
        others: list[Future[None]] = [pool.submit(abort_midway, llada, index) for index in aborted]
        others += [pool.submit(hang_up, llada, index) for index in leaving]
        together = list(pool.map(lambda index: answer(llada, index), staying))
        for other in others:
            other.result()
    assert together == alone
    llada.assert_healthy()
    assert llada.get("/v1/loads").json()["loads"][0]["num_used_tokens"] == 0


def test_waiting_requests_can_be_aborted(llada: Server) -> None:
    """More than the K/V pool and the request limit hold: the rest waits, and everything is aborted at once."""
    with ThreadPoolExecutor(64) as pool:
        bodies = [{**body(index), "rid": f"waiting-{index}"} for index in range(64)]
        pending = [pool.submit(llada.post, "/generate", one) for one in bodies]
        llada.post("/abort_request", {"abort_all": True})
        responses = [one.result() for one in pending]
    assert all(response.status_code in (200, 503) for response in responses)
    llada.assert_healthy()
