"""A server to measure: started for the run and stopped after it, or one that is running already."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_acache.server_process import ServerProcess, running


@dataclass(frozen=True)
class Target:
    """Where requests go. ``own`` is None for a server that was running already."""

    url: str
    own: ServerProcess | None = None

    @property
    def alive(self) -> bool:
        return self.own is None or self.own.alive

    def log_tail(self) -> str:
        return "" if self.own is None else self.own.log_tail()


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
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **(env or {})}
    print("starting the server ...", file=sys.stderr, flush=True)
    with running(str(model), flags, environment) as server:
        yield Target(server.url, server)
