"""Real server processes for tests: started, waited for, asked, stopped, and their log kept for the failure report."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import requests

from sglang_acache.server_process import MEMORY_CHECKS, ServerProcess, running

REQUEST_TIMEOUT_S = 300.0
FAULTS = ("leak", "Leak", "Traceback", "double free", "use-after-free")
"""Words that must not be in the log of a healthy server."""


class Server(ServerProcess):
    """A running server and what tests ask of it."""

    def get(self, path: str) -> requests.Response:
        return requests.get(self.url + path, timeout=REQUEST_TIMEOUT_S)

    def post(self, path: str, body: Mapping[str, Any]) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=REQUEST_TIMEOUT_S)

    def generate(self, prompt: str | Sequence[int], **sampling: Any) -> dict[str, Any]:
        """One answer of ``/generate``; ``sampling`` are its ``sampling_params``."""
        response = self.post("/generate", {**prompt_field(prompt), "sampling_params": sampling})
        assert response.status_code == 200, f"{response.status_code}: {response.text}\n{self.log_tail()}"
        return dict(response.json())

    def is_idle(self) -> bool:
        """Whether no request is running or waiting, as the metrics count them."""
        load = self.get("/v1/loads").json()["loads"]
        return all(rank["num_running_reqs"] == 0 and rank["num_waiting_reqs"] == 0 for rank in load)

    def wait_idle(self) -> None:
        """Wait until the server has nothing to do, which is when it checks its memory."""
        deadline = time.monotonic() + REQUEST_TIMEOUT_S
        while not self.is_idle():
            assert time.monotonic() < deadline, f"never idle\n{self.log_tail()}"
            time.sleep(0.1)

    def assert_healthy(self) -> None:
        """The server is alive, answers, is idle, and its log has no word of a fault."""
        assert self.alive, f"the server died\n{self.log_tail()}"
        self.wait_idle()
        assert self.get("/health_generate").status_code == 200, self.log_tail()
        self.assert_log_clean()

    def assert_log_clean(self) -> None:
        faults = [line for line in self.log_lines() if any(word in line for word in FAULTS)]
        assert not faults, "\n".join(faults) + self.log_tail()


def prompt_field(prompt: str | Sequence[int]) -> dict[str, Any]:
    """``/generate``'s field for a prompt that is a text or a list of token ids."""
    return {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}


def server_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without SGLang's settings, one OpenMP thread, memory checks, and ``extra``."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    return {**own, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **MEMORY_CHECKS, **(extra or {})}


@contextlib.contextmanager
def serve(model: str | Path, *flags: str, env: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A server of ``model`` on a free port, ready to answer; stopped at the end."""
    with running(str(model), flags, server_environment(env)) as server:
        yield Server(**vars(server))


def sse_events(response: requests.Response) -> Iterator[dict[str, Any]]:
    """The JSON events of a streamed answer."""
    for line in response.iter_lines():
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            yield json.loads(line.removeprefix(b"data: "))
