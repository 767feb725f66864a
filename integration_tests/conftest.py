"""Servers that tests share: each kind starts once in a run, and only one is alive at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from integration_tests.oracle.checkpoints import CheckpointSpec, dream_spec, write_checkpoint
from integration_tests.server import Server, serve

LLADA_SPEC = CheckpointSpec(embedding_rows=256, kv_heads=2)
DREAM_SPEC = dream_spec()
BLOCK_LENGTH = 32

torch.set_num_threads(1)  # small models, and the servers want the cores


@dataclass(frozen=True)
class ServerKind:
    """A checkpoint and the flags it is served with. ``KV_TOKENS`` slots make requests queue in the crowd test."""

    spec: CheckpointSpec
    flags: tuple[str, ...] = ()


KINDS = {
    "llada": ServerKind(LLADA_SPEC, ("--enable-metrics", "--max-total-tokens", "8192", "--max-running-requests", "24")),
    "dream": ServerKind(DREAM_SPEC, ("--max-total-tokens", "8192")),
}
"""Servers by the name of the fixture that gives them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one server run together, so that each kind starts once; tests without one run first."""
    order = list(KINDS)

    def kind(item: pytest.Item) -> int:
        parameters = getattr(item, "callspec", None)
        names = {*getattr(item, "fixturenames", ()), parameters and parameters.params.get("served")}
        return max((order.index(name) for name in names & KINDS.keys()), default=-1)

    items.sort(key=kind)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of the checkpoint that a kind of server has."""
    root = tmp_path_factory.mktemp("checkpoints")

    def folder(kind: str) -> Path:
        path = root / kind
        return path if path.exists() else write_checkpoint(path, KINDS[kind].spec)

    return folder


@pytest.fixture(scope="session")
def start(checkpoint: Callable[[str], Path]) -> Iterator[Callable[[str], Server]]:
    """Gives the running server of a kind; starting one ends the one before."""
    with contextlib.ExitStack() as running:
        servers: dict[str, Server] = {}

        def started(kind: str) -> Server:
            if kind not in servers:
                stop_all()
                servers[kind] = running.enter_context(serve(checkpoint(kind), *KINDS[kind].flags))
            return servers[kind]

        def stop_all() -> None:
            running.close()
            servers.clear()

        yield started


@pytest.fixture()
def llada(start: Callable[[str], Server]) -> Server:
    """A server of a random LLaDA checkpoint."""
    return start("llada")


@pytest.fixture()
def dream(start: Callable[[str], Server]) -> Server:
    """A server of a random Dream checkpoint."""
    return start("dream")


@pytest.fixture(params=KINDS)
def served(request: pytest.FixtureRequest, start: Callable[[str], Server]) -> tuple[str, Server]:
    """Every kind of server in turn, with its name."""
    return request.param, start(request.param)
