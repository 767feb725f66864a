"""A server to measure: started for the run and stopped after it, or one that is running already."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HOST = "127.0.0.1"
START_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 60.0
STRICT_MEMORY_CHECKS = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
}
"""SGLang's own accounting of K/V slots, made fatal: a slot lost or freed twice ends the server."""


class ServerFailed(RuntimeError):
    """The server did not start or died; the message ends with its log."""


@dataclass(frozen=True)
class Target:
    """Where requests go. ``process`` and ``log`` are None for a server that was running already."""

    url: str
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None

    @property
    def alive(self) -> bool:
        return self.process is None or self.process.poll() is None

    def log_tail(self, lines: int = 40) -> str:
        if self.log is None:
            return ""
        return "\n".join(["--- end of the server's log:", *self.log.read_text(errors="replace").splitlines()[-lines:]])


@contextlib.contextmanager
def serve(
    model: str | Path,
    flags: Sequence[str] = (),
    *,
    base_url: str | None = None,
    threads: int = 1,
    env: Mapping[str, str] | None = None,
) -> Iterator[Target]:
    """A ready server of ``model``; with ``base_url`` the one that runs there, whatever ``model`` and ``flags`` say."""
    if base_url is not None:
        yield Target(base_url.rstrip("/"))
        return
    port = _free_port()
    command = [sys.executable, "-W", "ignore", "-m", "sglang.launch_server", "--model", str(model)]
    command += ["--host", HOST, "--port", str(port), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **(env or {})}
    with tempfile.TemporaryDirectory(prefix="acache-bench-") as folder:
        log = Path(folder) / "server.txt"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command, stdout=sink, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        target = Target(f"http://{HOST}:{port}", process, log)
        try:
            _wait_ready(target)
            yield target
        finally:
            _stop(process)


def status(url: str, timeout: float = 30.0) -> int | None:
    """HTTP status of a GET; None where nothing answers."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def _wait_ready(target: Target) -> None:
    print("starting the server ...", file=sys.stderr, flush=True)
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if not target.alive:
            raise ServerFailed(f"the server did not start\n{target.log_tail()}")
        if status(target.url + "/health_generate") == 200:
            return
        time.sleep(0.5)
    raise ServerFailed(f"the server was not ready in {START_TIMEOUT_S:.0f} s\n{target.log_tail()}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the process group that the server leads."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(STOP_TIMEOUT_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
