"""Servers that tests share: each kind starts once in a run, and only one is alive at a time."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from integration_tests.oracle.checkpoints import CheckpointSpec, dream_spec, write_checkpoint
from integration_tests.server import Server, serve
from sglang_acache.tiny import task, vocabulary

LLADA_SPEC = CheckpointSpec(embedding_rows=256, kv_heads=2)
DREAM_SPEC = dream_spec()
BLOCK_LENGTH = 32
_FACTS = [item.affix for seed in (71, 72) for item in task.shared_requests(seed, 1, "prefix")]
DECLARED_AT_LAUNCH: tuple[dict[str, Any], ...] = (
    {"name": "facts", "text": _FACTS[0]},
    {"name": "facts-by-ids", "ids": vocabulary.encode(_FACTS[1]), "pinned": True},
    {"name": "tenant-facts", "text": _FACTS[0], "cache_salt": "tenant"},
)
"""Spans of the server ``tiny_acache``: facts of ``task.shared_requests`` with seeds 71 and 72."""

torch.set_num_threads(1)  # small models, and the servers want the cores


@dataclass(frozen=True)
class ServerKind:
    """A checkpoint and how it is served: a random one of ``spec``, or the bundled ``model``.

    ``declared``: spans in the file of ``--acache-affix-file``.
    """

    spec: CheckpointSpec = LLADA_SPEC
    flags: tuple[str, ...] = ()
    model: str | None = None
    env: tuple[tuple[str, str], ...] = ()
    declared: tuple[dict[str, Any], ...] = ()


KINDS = {
    "llada": ServerKind(LLADA_SPEC, ("--enable-metrics", "--max-total-tokens", "8192", "--max-running-requests", "24")),
    "dream": ServerKind(DREAM_SPEC, ("--max-total-tokens", "8192")),
}
"""Servers that reuse nothing, by the name of the fixture that gives them."""

_REUSE = ("--enable-acache", "--acache-debug", "--acache-min-affix-tokens", "16", "--enable-cache-report")
_SMALL = ("--max-total-tokens", "4096", "--max-running-requests", "24", "--enable-metrics")
REUSING = {
    "llada_acache": ServerKind(LLADA_SPEC, (*_REUSE, *_SMALL, "--no-acache-discover")),
    "dream_acache": ServerKind(DREAM_SPEC, (*_REUSE, *_SMALL, "--no-acache-discover")),
}
"""Servers that reuse what requests or clients declare, and watch their shared slots; half of 4,096 may be shared."""

INTERPRETED = {
    "dream_triton": ServerKind(
        DREAM_SPEC,
        (*_REUSE, *_SMALL, "--no-acache-discover", "--attention-backend", "acache_triton"),
        env=(("TRITON_INTERPRET", "1"),),
    ),
}
"""The server ``dream_acache`` over the Triton kernels, in Triton's interpreter: slow. Follows it in the order."""

MORE = {
    "impatient": ServerKind(LLADA_SPEC, (*_REUSE, *_SMALL), env=(("SGLANG_REQ_RUNNING_TIMEOUT", "4"),)),
    "tiny_acache": ServerKind(flags=(*_REUSE, *_SMALL), model="llada-tiny", declared=DECLARED_AT_LAUNCH),
}
"""Servers that find recurring text by themselves."""

ALL_KINDS = {**KINDS, **REUSING, **INTERPRETED, **MORE}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one server run together, so that each kind starts once; tests without one run first."""
    order = list(ALL_KINDS)

    def kind(item: pytest.Item) -> int:
        parameters = getattr(item, "callspec", None)
        chosen = [parameters.params.get(name) for name in ("served", "reusing")] if parameters else []
        names = {*getattr(item, "fixturenames", ()), *chosen}
        return max((order.index(name) for name in names & ALL_KINDS.keys()), default=-1)

    items.sort(key=kind)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of the checkpoint that a kind of server has."""
    root = tmp_path_factory.mktemp("checkpoints")

    def folder(kind: str) -> Path:
        path = root / kind
        return path if path.exists() else write_checkpoint(path, ALL_KINDS[kind].spec)

    return folder


@pytest.fixture(scope="session")
def start(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Server]]:
    """Gives the running server of a kind; starting one ends the one before."""
    with contextlib.ExitStack() as running:
        servers: dict[str, Server] = {}

        def started(kind: str) -> Server:
            if kind not in servers:
                stop_all()
                how = ALL_KINDS[kind]
                flags = list(how.flags)
                if how.declared:
                    file = tmp_path_factory.mktemp("spans") / "spans.jsonl"
                    file.write_text("\n".join(json.dumps(span) for span in how.declared))
                    flags += ["--acache-affix-file", str(file)]
                server = serve(how.model or checkpoint(kind), *flags, env=dict(how.env))
                servers[kind] = running.enter_context(server)
            return servers[kind]

        def stop_all() -> None:
            running.close()
            servers.clear()

        yield started


@pytest.fixture
def llada(start: Callable[[str], Server]) -> Server:
    """A server of a random LLaDA checkpoint."""
    return start("llada")


@pytest.fixture
def dream(start: Callable[[str], Server]) -> Server:
    """A server of a random Dream checkpoint."""
    return start("dream")


@pytest.fixture
def llada_acache(start: Callable[[str], Server]) -> Server:
    """A server of a random LLaDA checkpoint that reuses what is declared."""
    return start("llada_acache")


@pytest.fixture
def impatient(start: Callable[[str], Server]) -> Server:
    """A server that reuses text and ends requests which run for some seconds."""
    return start("impatient")


@pytest.fixture
def tiny_acache(start: Callable[[str], Server]) -> Server:
    """A server of the trained small model that finds recurring text, with ``DECLARED_AT_LAUNCH``."""
    return start("tiny_acache")


@pytest.fixture(params=REUSING)
def reusing(request: pytest.FixtureRequest, start: Callable[[str], Server]) -> tuple[str, Server]:
    """Every kind of server that reuses declared text in turn, with its name."""
    return request.param, start(request.param)


@pytest.fixture(params=KINDS)
def served(request: pytest.FixtureRequest, start: Callable[[str], Server]) -> tuple[str, Server]:
    """Every kind of server in turn, with its name."""
    return request.param, start(request.param)
