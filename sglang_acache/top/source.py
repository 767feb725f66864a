"""Where the view's numbers come from: ``/metrics`` and ``/acache/spans`` of a running server."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import requests
from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_S = 10.0
LISTED = 200


class Unreachable(Exception):
    """The server did not answer, or has nothing to show; the message says what to do."""


@dataclass(frozen=True)
class Snapshot:
    """One look at a server. ``values``: metrics by name, or ``name{phase}``, summed over all other labels."""

    taken: float
    values: dict[str, float]
    model: str = ""
    spans: list[dict[str, Any]] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> float:
        return self.values.get(name, 0.0)


class ServerSource:
    """Asks one server. ``api_key``: what ``/flush_cache`` needs, the admin key where the server has one."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        self.base_url = base_url.rstrip("/")
        self.session = requests.Session()
        if api_key:
            self.session.headers["Authorization"] = f"Bearer {api_key}"

    def snapshot(self) -> Snapshot:
        """Raises Unreachable."""
        spans = self._get("/acache/spans", {"limit": str(LISTED)})
        if spans.status_code != 200:
            raise Unreachable(refusal(self.base_url, spans.status_code, spans.text))
        body = self._get("/metrics", {})
        if body.status_code != 200:
            raise Unreachable(f"{self.base_url} publishes no metrics; start it with --enable-metrics")
        values, model = parse_metrics(body.text)
        if not any(name.startswith("acache:") for name in values):
            raise Unreachable(f"{self.base_url} publishes no acache metrics yet; try again in a second")
        listing = spans.json()
        return Snapshot(time.monotonic(), values, model, listing["spans"], listing["usage"])

    def _get(self, path: str, query: dict[str, str]) -> requests.Response:
        try:
            return self.session.get(self.base_url + path, params=query, timeout=TIMEOUT_S)
        except requests.RequestException as error:
            reason = "timed out" if isinstance(error, requests.Timeout) else "refused or failed"
            if isinstance(error, requests.exceptions.InvalidSchema | requests.exceptions.MissingSchema):
                reason = "is not a URL like http://127.0.0.1:30000"
            raise Unreachable(f"cannot reach {self.base_url} ({reason}); is the server up? see --base-url") from error


def refusal(base_url: str, status: int, body: str) -> str:
    """What an answer other than 200 from ``/acache/spans`` means."""
    if status in (401, 403):
        return f"{base_url} wants its key; give --api-key (the admin key, where the server has one)"
    if status == 404:
        return f"{base_url} has no /acache/spans: it serves no diffusion LLM through sglang-acache"
    if status == 400 and "--enable-acache" in body:
        return f"{base_url} reuses nothing; start it with --enable-acache"
    return f"{base_url}/acache/spans answers {status}: {body[:200]}"


def parse_metrics(text: str) -> tuple[dict[str, float], str]:
    """Prometheus text to values, and the name of the model. Ranks and engines are added up."""
    values: dict[str, float] = {}
    model = ""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            phase = sample.labels.get("phase")
            key = sample.name if phase is None else f"{sample.name}{{{phase}}}"
            values[key] = values.get(key, 0.0) + sample.value
            model = model or sample.labels.get("model_name", "")
    return values, model
