"""An SGLang server as a child process: started, waited for, its log kept, ended with everything it started."""

from __future__ import annotations

import contextlib
import ctypes
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
START_TIMEOUT_S = 900.0  # generous: a machine of two cores is often busy with something else
STOP_TIMEOUT_S = 60.0
MEMORY_CHECKS = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}
"""SGLang's own accounting of K/V slots, made fatal: a slot lost or freed twice ends the server."""

_PR_SET_PDEATHSIG = 1


class ServerFailed(RuntimeError):
    """The server did not start or died; the message ends with its log."""


@dataclass(frozen=True)
class ServerProcess:
    """A running server. ``log`` holds everything it printed."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def log_lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()

    def log_tail(self, lines: int = 60) -> str:
        return "\n".join(["--- end of the server's log:", *self.log_lines()[-lines:]])


def launch_command(model: str, *flags: str) -> list[str]:
    return [sys.executable, "-W", "ignore", "-m", "sglang.launch_server", "--model", model, *flags]


@contextlib.contextmanager
def running(model: str, flags: Sequence[str], environment: Mapping[str, str]) -> Iterator[ServerProcess]:
    """A server of ``model`` on a free port, ready to answer; stopped at the end, by process id.

    ``environment`` is all of it, not an addition. Raises ServerFailed.
    """
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="acache-server-") as folder:
        log = Path(folder) / "server.txt"
        command = launch_command(model, "--host", HOST, "--port", str(port), *flags)
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        server = ServerProcess(f"http://{HOST}:{port}", process, log)
        try:
            _wait_ready(server)
            yield server
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server that leads a process group of its own, and everything it started."""
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


def status(url: str, timeout: float = 30.0) -> int | None:
    """HTTP status of a GET; None where nothing answers."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def _wait_ready(server: ServerProcess) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if not server.alive:
            raise ServerFailed(f"the server did not start\n{server.log_tail()}")
        if status(server.url + "/health_generate") == 200:
            return
        time.sleep(0.5)
    raise ServerFailed(f"the server was not ready in {START_TIMEOUT_S:.0f} s\n{server.log_tail()}")


def _end_with_parent() -> None:
    """In the new process: be ended when the thread that started it is, even if that was killed (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
