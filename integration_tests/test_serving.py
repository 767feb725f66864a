"""What operators use: health, metrics, server info, cache flush, aborts, and a log without faults."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import requests

from integration_tests.conftest import LLADA_SPEC
from integration_tests.prompts import prompt
from integration_tests.server import REQUEST_TIMEOUT_S, Server, sse_events

SLOW = {"max_new_tokens": 256, "temperature": 0, "ignore_eos": True, "custom_params": {"steps": 256, "cache": "none"}}
"""Two hundred and fifty-six forwards of the whole canvas: there is time to abort it."""


def test_health(llada: Server) -> None:
    for path in ("/health", "/health_generate"):
        assert llada.get(path).status_code == 200


def test_metrics_count_requests_and_tokens(llada: Server) -> None:
    def counted() -> dict[str, float]:
        lines = [line for line in llada.get("/metrics").text.splitlines() if line and not line.startswith("#")]
        totals: dict[str, float] = {}
        for line in lines:
            name, value = line.split("{")[0], float(line.rsplit(" ", 1)[1])
            totals[name] = totals.get(name, 0.0) + value
        return totals

    before = counted()
    llada.generate(prompt(10), max_new_tokens=16, temperature=0, ignore_eos=True)
    after = counted()
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert grown["sglang:num_requests_total"] == 1
    assert grown["sglang:prompt_tokens_total"] == 10
    assert grown["sglang:generation_tokens_total"] == 16


def test_server_info_shows_our_flags(llada: Server) -> None:
    info = llada.get("/server_info").json()
    assert info["diffusion_max_new_tokens"] == 256
    assert info["attention_backend"].startswith("acache_")
    assert info["disable_overlap_schedule"] is True
    assert llada.get("/model_info").status_code == 200


def test_flush_cache(llada: Server) -> None:
    llada.wait_idle()
    before = llada.generate(prompt(10), max_new_tokens=8)["output_ids"]
    llada.wait_idle()
    assert llada.post("/flush_cache", {}).status_code == 200
    assert llada.generate(prompt(10), max_new_tokens=8)["output_ids"] == before


def start_slow(server: Server, rid: str, answers: dict[str, Any]) -> threading.Thread:
    def ask() -> None:
        body = {"text": prompt(10), "rid": rid, "sampling_params": SLOW}
        answers[rid] = server.post("/generate", body).json()

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def wait_running(server: Server, count: int) -> None:
    deadline = time.monotonic() + REQUEST_TIMEOUT_S
    while server.get("/v1/loads").json()["loads"][0]["num_running_reqs"] < count:
        assert time.monotonic() < deadline, server.log_tail()
        time.sleep(0.02)


def test_abort_ends_one_request_and_no_other(llada: Server) -> None:
    answers: dict[str, Any] = {}
    threads = [start_slow(llada, rid, answers) for rid in ("kept", "dropped")]
    wait_running(llada, 2)
    llada.post("/abort_request", {"rid": "dropped"})
    for thread in threads:
        thread.join()
    assert answers["dropped"]["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(answers["dropped"]["output_ids"]) < 256
    assert len(answers["kept"]["output_ids"]) == 256
    assert answers["kept"]["output_ids"][: len(answers["dropped"]["output_ids"])] == answers["dropped"]["output_ids"]
    llada.assert_healthy()


def test_abort_all(llada: Server) -> None:
    answers: dict[str, Any] = {}
    threads = [start_slow(llada, f"request-{index}", answers) for index in range(4)]
    wait_running(llada, 4)
    llada.post("/abort_request", {"abort_all": True})
    for thread in threads:
        thread.join()
    assert all(answer["meta_info"]["finish_reason"]["type"] == "abort" for answer in answers.values())
    llada.assert_healthy()


def test_a_client_that_hangs_up_frees_its_slots(llada: Server) -> None:
    body: dict[str, Any] = {"text": prompt(10), "sampling_params": SLOW, "stream": True}
    with requests.post(llada.url + "/generate", json=body, stream=True, timeout=REQUEST_TIMEOUT_S) as response:
        next(sse_events(response))
    llada.assert_healthy()
    assert llada.get("/v1/loads").json()["loads"][0]["num_used_tokens"] == 0


@pytest.mark.parametrize("length", [1, LLADA_SPEC.max_positions - 32])
def test_shortest_and_longest_prompt(llada: Server, length: int) -> None:
    assert len(llada.generate(prompt(length), max_new_tokens=32, ignore_eos=True)["output_ids"]) == 32


def test_pause_and_continue(llada: Server) -> None:
    """A weight update's pause: nothing is lost, and the answer is the same."""
    expected = llada.generate(prompt(10), **SLOW)["output_ids"]
    for mode in ("in_place", "retract"):
        answers: dict[str, Any] = {}
        thread = start_slow(llada, f"paused-{mode}", answers)
        wait_running(llada, 1)
        assert llada.post("/pause_generation", {"mode": mode}).status_code == 200
        assert llada.post("/continue_generation", {}).status_code == 200
        thread.join()
        assert answers[f"paused-{mode}"]["output_ids"] == expected
    llada.assert_healthy()
