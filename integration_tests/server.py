"""Real server processes for tests: started, waited for, asked, stopped, and their log kept for the failure report."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

HOST = "127.0.0.1"
START_TIMEOUT_S = 600.0  # generous: the two cores of a test machine are often shared
REQUEST_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0

_PR_SET_PDEATHSIG = 1

MEMORY_CHECKS = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}
"""SGLang's own accounting of K/V slots, made fatal: a slot lost or freed twice ends the server."""

FAULTS = ("leak", "Leak", "Traceback", "double free", "use-after-free")
"""Words that must not be in the log of a healthy server."""


@dataclass(frozen=True)
class Server:
    """A running server. ``log`` holds everything it printed."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]

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
        assert self.process.poll() is None, f"the server died\n{self.log_tail()}"
        self.wait_idle()
        assert self.get("/health_generate").status_code == 200, self.log_tail()
        self.assert_log_clean()

    def assert_log_clean(self) -> None:
        faults = [line for line in self.log.read_text().splitlines() if any(word in line for word in FAULTS)]
        assert not faults, "\n".join(faults) + self.log_tail()

    def log_tail(self, lines: int = 60) -> str:
        return tail(self.log, lines)


def prompt_field(prompt: str | Sequence[int]) -> dict[str, Any]:
    """``/generate``'s field for a prompt that is a text or a list of token ids."""
    return {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}


def server_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without SGLang's settings, one OpenMP thread, memory checks, and ``extra``."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    return {**own, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **MEMORY_CHECKS, **(extra or {})}


def launch_command(model: str, *flags: str) -> list[str]:
    return [sys.executable, "-W", "ignore", "-m", "sglang.launch_server", "--model", model, *flags]


@contextlib.contextmanager
def serve(model: str | Path, *flags: str, env: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A server of ``model`` on a free port, ready to answer; stopped at the end, by process id."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="server-") as folder:
        log = Path(folder) / "server.txt"
        command = launch_command(str(model), "--host", HOST, "--port", str(port), *flags)
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=server_environment(env),
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        server = Server(f"http://{HOST}:{port}", log, process)
        try:
            _wait_ready(server)
            yield server
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server that was started as the leader of a process group of its own, and everything it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(STOP_TIMEOUT_S)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def tail(log: Path, lines: int) -> str:
    return "\n".join(["--- end of the server's log:", *log.read_text(errors="replace").splitlines()[-lines:]])


def sse_events(response: requests.Response) -> Iterator[dict[str, Any]]:
    """The JSON events of a streamed answer."""
    for line in response.iter_lines():
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            yield json.loads(line.removeprefix(b"data: "))


def _end_with_parent() -> None:
    """In the new process: be ended when the test run is, even if that was killed (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_ready(server: Server) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert server.process.poll() is None, f"the server did not start\n{server.log_tail()}"
        with contextlib.suppress(requests.ConnectionError, requests.Timeout):
            if requests.get(server.url + "/health_generate", timeout=30).status_code == 200:
                return
        time.sleep(0.5)
    raise AssertionError(f"the server was not ready in {START_TIMEOUT_S:.0f} s\n{server.log_tail()}")
