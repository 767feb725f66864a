"""``/acache/spans``, reuse metrics, the debug line and ``top``, on a server that has an admin key."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from integration_tests.prompts import prompt_ids, text_of
from integration_tests.server import REQUEST_TIMEOUT_S, Server, serve
from sglang_acache.srt.reuse_metrics import METRICS
from sglang_acache.top.source import ServerSource, Snapshot

KEY = "admin-key"
DOCUMENT = prompt_ids(150, seed=901)
ANSWER = {"max_new_tokens": 128, "ignore_eos": True, "custom_params": {"threshold": 0.01}}


@pytest.fixture(scope="module")
def server(checkpoint: Callable[[str], Path]) -> Iterator[Server]:
    flags = ("--enable-acache", "--acache-debug", "--no-acache-discover", "--acache-min-affix-tokens", "16")
    model = checkpoint("llada")
    more = ("--enable-metrics", "--admin-api-key", KEY, "--log-level", "debug", "--max-total-tokens", "4096")
    with serve(model, *flags, *more) as running:
        yield running
        running.assert_healthy()


@pytest.fixture(autouse=True)
def clean(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test leaves no span and no slot behind."""
    yield
    if "server" in request.fixturenames:
        server = request.getfixturevalue("server")
        for span in spans(server):
            if span["source"] == "declared":
                ask(server, "DELETE", params={key: span[key] for key in ("name", "cache_salt", "extra_key")})
        server.wait_idle()
        assert flush(server).status_code == 200
        assert ask(server, "GET").json()["usage"]["used"] == 0


def ask(server: Server, method: str, key: str | None = KEY, **kwargs: Any) -> requests.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = f"{server.url}/acache/spans"
    return requests.request(method, url, headers=headers, timeout=REQUEST_TIMEOUT_S, **kwargs)


def flush(server: Server, key: str | None = KEY) -> requests.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return requests.post(f"{server.url}/flush_cache", headers=headers, timeout=REQUEST_TIMEOUT_S)


def declare(server: Server, **fields: Any) -> dict[str, Any]:
    response = ask(server, "POST", json=fields)
    assert response.status_code == 200, response.text
    return dict(response.json())


def spans(server: Server) -> list[dict[str, Any]]:
    return list(ask(server, "GET").json()["spans"])


def only_span(server: Server) -> dict[str, Any]:
    (span,) = spans(server)
    return span


def use(server: Server, before: int = 3, **fields: Any) -> dict[str, Any]:
    """A request that has the document after some tokens of its own; returns its ``meta_info``."""
    body = {"input_ids": [*prompt_ids(before, seed=before), *DOCUMENT], "sampling_params": ANSWER, **fields}
    response = server.post("/generate", body)
    assert response.status_code == 200, response.text
    return dict(response.json()["meta_info"])


def settled(server: Server, enough: Callable[[Snapshot], bool]) -> Snapshot:
    """The metrics once they say what is expected; they follow within a second."""
    deadline = time.monotonic() + 60
    while True:
        snapshot = ServerSource(server.url, KEY).snapshot()
        if enough(snapshot):
            return snapshot
        assert time.monotonic() < deadline, snapshot
        time.sleep(0.2)


class TestDeclare:
    @pytest.mark.parametrize("as_text", [False, True])
    def test_used_once_declared(self, server: Server, as_text: bool) -> None:
        given = {"text": text_of(DOCUMENT)} if as_text else {"ids": DOCUMENT}
        assert use(server)["cached_tokens"] == 0
        made = declare(server, name="doc", **given)
        assert (made["name"], made["pinned"], made["source"]) == ("doc", False, "declared")
        length = made["length"]
        assert 140 <= length <= 150
        assert (length == 150) or as_text
        assert only_span(server)["encoded_tokens"] == 0, "encoded by its first use"
        meta = use(server)
        (read,) = meta["acache"][0]["spans"]
        assert (read["name"], read["length"], read["source"]) == ("doc", length, "declared")
        assert meta["cached_tokens"] == length - meta["acache"][0]["anchor_tokens"] > 0
        span = only_span(server)
        assert (span["hits"], span["encoded_tokens"], span["readers"]) == (1, length, 0)

    def test_name_by_default(self, server: Server) -> None:
        assert declare(server, ids=DOCUMENT)["name"].startswith("span-")

    def test_declared_again(self, server: Server) -> None:
        declare(server, ids=DOCUMENT, name="doc")
        assert declare(server, ids=DOCUMENT, name="doc", pinned=True)["pinned"]
        assert only_span(server)["pinned"]
        taken = ask(server, "POST", json={"ids": DOCUMENT[:100], "name": "doc"})
        assert (taken.status_code, taken.json()["error"]["field"]) == (409, "name")

    def test_pinned_stays(self, server: Server) -> None:
        declare(server, ids=DOCUMENT, name="doc", pinned=True)
        use(server)
        for seed in range(4):  # each other span takes what it can get
            other = prompt_ids(800, seed=950 + seed)
            declare(server, ids=other, name=f"other-{seed}")
            body = {"input_ids": other, "sampling_params": ANSWER}
            assert server.post("/generate", body).status_code == 200
        held = {span["name"]: span["encoded_tokens"] for span in spans(server)}
        assert held["doc"] == len(DOCUMENT)
        assert held["other-0"] == 0

    def test_name_spaces(self, server: Server) -> None:
        declare(server, ids=DOCUMENT, name="doc", cache_salt="tenant-a")
        declare(server, ids=DOCUMENT, name="doc", cache_salt="tenant-b", extra_key="x")
        assert use(server)["cached_tokens"] == 0
        assert use(server, cache_salt="tenant-a")["cached_tokens"] > 0
        assert use(server, cache_salt="tenant-b")["cached_tokens"] == 0
        assert use(server, cache_salt="tenant-b", extra_key="x")["cached_tokens"] > 0


class TestDelete:
    def test_forgotten(self, server: Server) -> None:
        declare(server, ids=DOCUMENT, name="doc", pinned=True)
        assert use(server)["cached_tokens"] > 0
        assert ask(server, "DELETE", params={"name": "doc"}).json() == {"deleted": "doc"}
        assert spans(server) == []
        assert use(server)["cached_tokens"] == 0

    def test_unknown(self, server: Server) -> None:
        declare(server, ids=DOCUMENT, name="doc", cache_salt="tenant")
        for query in ({"name": "nothing"}, {"name": "doc"}, {"name": "doc", "extra_key": "tenant"}):
            response = ask(server, "DELETE", params=query)
            assert (response.status_code, response.json()["error"]["field"]) == (404, "name")

    def test_flush_keeps_declarations(self, server: Server) -> None:
        declare(server, ids=DOCUMENT, name="doc", pinned=True)
        use(server)
        assert flush(server).status_code == 200
        span = only_span(server)
        assert (span["encoded_tokens"], span["pinned"]) == (0, True)
        assert use(server)["cached_tokens"] > 0


class TestRefused:
    @pytest.mark.parametrize(
        ("body", "field"),
        [
            ({}, "text"),
            ({"ids": DOCUMENT, "text": "w1"}, "text"),
            ({"ids": []}, "ids"),
            ({"ids": [1, "2"]}, "ids"),
            ({"ids": [10**30] * 20}, "ids"),
            ({"ids": [-1] * 20}, "ids"),
            ({"ids": DOCUMENT[:5]}, "ids"),
            ({"ids": DOCUMENT * 20}, "ids"),
            ({"text": "w1"}, "text"),
            ({"text": ""}, "text"),
            ({"text": 3}, "text"),
            ({"text": "\ud800" * 20}, "text"),
            ({"ids": DOCUMENT, "name": 3}, "name"),
            ({"ids": DOCUMENT, "name": "n" * 600}, "name"),
            ({"ids": DOCUMENT, "pinned": "yes"}, "pinned"),
            ({"ids": DOCUMENT, "cache_salt": 1}, "cache_salt"),
            ({"ids": DOCUMENT, "length": 1}, "length"),
            ([DOCUMENT], "span"),
        ],
    )
    def test_body(self, server: Server, body: Any, field: str) -> None:
        response = ask(server, "POST", json=body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["field"] == field
        assert response.json()["error"]["message"].startswith(field)

    @pytest.mark.parametrize(("data", "status"), [("{", 400), ("", 400), ("[" * 99_999, 400), (b"x" * (5 << 20), 413)])
    def test_not_json(self, server: Server, data: Any, status: int) -> None:
        assert ask(server, "POST", data=data).status_code == status

    @pytest.mark.parametrize(
        ("method", "query", "field"),
        [
            ("GET", "limit=0", "limit"),
            ("GET", "limit=x", "limit"),
            ("GET", "source=mine", "source"),
            ("GET", "name=doc", "name"),
            ("GET", "limit=1&limit=2", "limit"),
            ("DELETE", "", "name"),
            ("DELETE", "name=", "name"),
            ("DELETE", "name=a&names=b", "names"),
        ],
    )
    def test_query(self, server: Server, method: str, query: str, field: str) -> None:
        response = ask(server, method, params=query)
        assert (response.status_code, response.json()["error"]["field"]) == (400, field)

    @pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
    @pytest.mark.parametrize("key", [None, "wrong"])
    def test_without_the_key(self, server: Server, method: str, key: str | None) -> None:
        assert ask(server, method, key).status_code == flush(server, key).status_code == 401


class TestSeen:
    def test_metrics(self, server: Server) -> None:
        declare(server, ids=DOCUMENT, name="doc", pinned=True)
        before = settled(server, lambda snapshot: snapshot["acache:spans_known"] == 1)
        assert {metric.name.partition("{")[0] for metric in METRICS} <= {
            name.partition("{")[0] for name in before.values
        }
        told = [use(server, before=length)["acache"][0] for length in (1, 2, 2)]
        reused = sum(meta["affix_tokens"] - meta["anchor_tokens"] for meta in told)

        def grown(snapshot: Snapshot, name: str) -> float:
            return snapshot[name] - before[name]

        after = settled(server, lambda snapshot: grown(snapshot, "acache:tokens_reused_total") == reused)
        assert grown(after, "acache:anchors_total") == sum(meta["anchor_tokens"] for meta in told)
        saved = grown(after, "acache:tokens_saved_total") - grown(after, "acache:probe_tokens_total")
        assert saved == sum(meta["recompute_tokens_saved"] for meta in told)
        forwarded = grown(after, "acache:tokens_recomputed_total") + grown(after, "acache:probe_tokens_total")
        assert forwarded == sum(meta["recompute_tokens"] for meta in told)
        assert grown(after, "acache:probe_seconds_total") > 0
        assert grown(after, "acache:encodings_total") == 1
        settled(server, lambda snapshot: snapshot["acache:requests{denoising}"] == 0)
        assert after["acache:spans_encoded"] == 2, "the home, and a copy at another offset"
        assert after["acache:shared_slots_used"] == 2 * len(DOCUMENT)
        assert after["acache:shared_slots_pinned"] == len(DOCUMENT)
        assert after["acache:shared_slots_evictable"] == len(DOCUMENT)

    def test_debug_line(self, server: Server) -> None:
        declare(server, ids=DOCUMENT, name="doc")
        meta = use(server, rid="told-in-the-log")
        (line,) = [line for line in server.log.read_text().splitlines() if "finished rid=told-in-the-log" in line]
        stats = meta["acache"][0]
        for part in (
            f"canvas={meta['diffusion'][0]['canvas_tokens']}",
            f"affix={stats['affix_tokens']}",
            f"anchors={stats['anchor_tokens']}",
            f"recomputed={stats['recompute_tokens']}",
            f"saved={stats['recompute_tokens_saved']}",
            f"passes={stats['forward_passes']}",
        ):
            assert part in line.split()

    def test_top(self, server: Server) -> None:
        declare(server, ids=DOCUMENT, name="doc", pinned=True)
        use(server)
        done = run_top(server.url, "--api-key", KEY)
        assert done.returncode == 0, done.stderr
        row = next(line for line in done.stdout.splitlines() if line.startswith("doc")).split()
        assert row[1:] == ["declared", "150", "0", "1", "150", "150", "yes"]

    def test_top_without_the_key(self, server: Server) -> None:
        done = run_top(server.url)
        assert (done.returncode, done.stdout) == (1, "")
        assert "--api-key" in done.stderr


class TestOff:
    def test_route(self, llada: Server) -> None:
        for method in ("GET", "POST", "DELETE"):
            response = ask(llada, method, None)
            assert response.status_code == 400
            assert "--enable-acache" in response.json()["error"]["message"]
        assert "acache:" not in llada.get("/metrics").text

    def test_top(self, llada: Server) -> None:
        done = run_top(llada.url)
        assert (done.returncode, done.stdout) == (1, "")
        assert "--enable-acache" in done.stderr


def run_top(url: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sglang_acache", "top", "--once", "--base-url", url, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=REQUEST_TIMEOUT_S)
