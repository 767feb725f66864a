"""The HTTP side of ``/acache/spans``, over a fake tokenizer manager whose scheduler is in the same process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.entrypoints import http_server
from sglang.srt.utils.auth import add_api_key_middleware
from sglang.utils import TypeBasedDispatcher

from sglang_acache.srt.span_control import SpanControl
from sglang_acache.srt.spans_routes import MAX_BODY_BYTES, PATH, install
from tests.srt.test_span_control import affixes

TEXT = " ".join(f"w{i}" for i in range(60))
OURS, OTHER = "LLaDAModelLM", "LlamaForCausalLM"


class Tokenizer:
    """One token a word."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [int(word[1:]) if word[1:].isdigit() else 999 for word in text.split()]

    def __len__(self) -> int:
        return 1000


TOKENIZER = Tokenizer()


class Manager:
    """Answers a message in the next turn of the event loop, as the real one does when the scheduler's reply is in."""

    def __init__(self, architecture: str, tokenizer: Tokenizer | None) -> None:
        self.model_config = SimpleNamespace(hf_config=SimpleNamespace(architectures=[architecture], vocab_size=1000))
        self.tokenizer = tokenizer
        self._result_dispatcher = TypeBasedDispatcher([])
        self.control = SpanControl(affixes(), vocab_limit=1000, context_tokens=400).dispatcher

    def _dispatch_to_scheduler(self, message: Any) -> None:
        asyncio.get_running_loop().call_soon(self._result_dispatcher, self.control(message))

    def auto_create_handle_loop(self) -> None:
        pass


def serve(
    monkeypatch: pytest.MonkeyPatch,
    *,
    architecture: str = OURS,
    enabled: bool = True,
    tokenizer: Tokenizer | None = TOKENIZER,
    api_key: str | None = None,
    admin_api_key: str | None = None,
) -> TestClient:
    app = FastAPI()
    monkeypatch.setattr(http_server, "app", app)
    install(SimpleNamespace(enable_acache=enabled), Manager(architecture, tokenizer), None, None, [])
    add_api_key_middleware(app, api_key=api_key, admin_api_key=admin_api_key)
    return TestClient(app)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    with serve(monkeypatch) as client:
        yield client


class TestRoute:
    def test_round_trip(self, client: TestClient) -> None:
        made = client.post(PATH, json={"text": TEXT, "name": "doc"}).json()
        assert (made["name"], made["length"]) == ("doc", 58), "the first and last word may merge with what is around"
        assert [span["name"] for span in client.get(PATH).json()["spans"]] == ["doc"]
        assert client.delete(PATH, params={"name": "doc"}).json() == {"deleted": "doc"}
        assert client.get(PATH).json()["spans"] == []

    def test_statuses(self, client: TestClient) -> None:
        client.post(PATH, json={"text": TEXT, "name": "doc"})
        taken = client.post(PATH, json={"ids": list(range(20)), "name": "doc"})
        assert (taken.status_code, taken.json()["error"]["field"]) == (409, "name")
        short = client.post(PATH, json={"text": "w1 w2"})
        assert (short.status_code, short.json()["error"]["field"]) == (400, "text")
        assert client.delete(PATH, params={"name": "dog"}).status_code == 404
        assert client.get(PATH, params={"limit": "many"}).status_code == 400
        assert client.post(PATH, content=b"{").status_code == 400
        assert client.post(PATH, content=b"x" * (MAX_BODY_BYTES + 1)).status_code == 413
        assert client.put(PATH).status_code == 405

    def test_not_enabled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with serve(monkeypatch, enabled=False) as client:
            response = client.get(PATH)
        assert response.status_code == 400
        assert "--enable-acache" in response.json()["error"]["message"]

    def test_other_models_have_no_route(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with serve(monkeypatch, architecture=OTHER) as client:
            assert client.get(PATH).status_code == 404

    def test_no_tokenizer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with serve(monkeypatch, tokenizer=None) as client:
            refused = client.post(PATH, json={"text": TEXT})
            assert (refused.status_code, refused.json()["error"]["field"]) == (400, "text")
            assert client.post(PATH, json={"ids": list(range(20))}).status_code == 200


class TestKeys:
    @pytest.mark.parametrize(
        ("api_key", "admin_api_key", "right", "wrong"),
        [("user", None, "user", "admin"), (None, "admin", "admin", "user"), ("user", "admin", "admin", "user")],
    )
    @pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
    def test_as_flush_cache(
        self,
        monkeypatch: pytest.MonkeyPatch,
        api_key: str | None,
        admin_api_key: str | None,
        right: str,
        wrong: str,
        method: str,
    ) -> None:
        with serve(monkeypatch, api_key=api_key, admin_api_key=admin_api_key) as client:
            for key in (None, wrong):
                headers = {} if key is None else {"Authorization": f"Bearer {key}"}
                assert client.request(method, PATH, headers=headers).status_code == 401
            assert client.request(method, PATH, headers={"Authorization": f"Bearer {right}"}).status_code in (200, 400)
