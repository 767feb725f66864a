"""Command-line options that several subcommands share, and the model they measure."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RANDOM_MODEL = "random"
REUSE_FLAGS = ("--enable-acache", "--acache-min-affix-tokens", "16")


def add_common(parser: argparse.ArgumentParser, model: str | None = RANDOM_MODEL, server: bool = True) -> None:
    """``model`` None: the subcommand serves no model. ``server``: it measures over HTTP."""
    parser.add_argument("--out", type=Path, help="folder of the results (default: results/<subcommand>)")
    parser.add_argument("--quick", action="store_true", help="a smoke run of a minute or two; its figures mean nothing")
    parser.add_argument("--seed", type=int, default=0)
    if model is None:
        return
    parser.add_argument(
        "--model",
        default=model,
        help=f"a folder, hub id or short name; {RANDOM_MODEL!r} is a compute-bound LLaDA with random weights "
        "(default: %(default)s)",
    )
    parser.add_argument("--layers", type=int, default=8, help="layers of the random model (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=512, help="width of the random model (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="OpenMP threads of the model (default: %(default)s)")
    parser.add_argument("--server-flags", type=shlex.split, default=[], help="further flags of sglang.launch_server")
    if server:
        parser.add_argument("--base-url", help="measure a running server instead of starting one")


def add_shape(parser: argparse.ArgumentParser, canvas: int = 1024, new_tokens: int = 128) -> None:
    parser.add_argument("--canvas", type=int, default=canvas, help="tokens of a request (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=new_tokens, help="of which generated (default: %(default)s)")
    parser.add_argument("--block-length", type=int, default=32)


def integers(text: str) -> list[int]:
    """``1,4,16`` as an argparse type."""
    return [int(item) for item in text.split(",") if item]


def numbers(text: str) -> list[float]:
    return [float(item) for item in text.split(",") if item]


def names(text: str) -> list[str]:
    return [item for item in text.split(",") if item]


def dtype_flags(dtype: str) -> list[str]:
    return ["--dtype", dtype]


@contextlib.contextmanager
def model_folder(options: argparse.Namespace) -> Iterator[str]:
    """What ``--model`` names: a random checkpoint is written for the time of the run."""
    if options.model != RANDOM_MODEL:
        from sglang_acache.models.names import ensure_available, resolve_model

        try:
            yield ensure_available(resolve_model(options.model))
        except ValueError as error:
            raise SystemExit(f"error: {error}") from error
        return
    from sglang_acache.bench.random_model import compute_bound_spec, write_checkpoint

    layers, hidden = (2, 128) if options.quick else (options.layers, options.hidden)
    with tempfile.TemporaryDirectory(prefix="acache-model-") as folder:
        yield str(write_checkpoint(Path(folder), compute_bound_spec(layers, hidden)))


def read_config(model: str) -> dict[str, Any]:
    """``config.json`` of a folder or hub id."""
    from transformers.utils import cached_file

    path = Path(model) / "config.json"
    found = path if path.is_file() else cached_file(model, "config.json")
    config: dict[str, Any] = json.loads(Path(str(found)).read_text())
    return config


def ordinary_words(model: str) -> int:
    """Ids below this are ordinary tokens of the checkpoint: synthetic prompts are drawn from them."""
    config = read_config(model)
    special = [config.get(name) for name in ("mask_token_id", "eos_token_id", "bos_token_id")]
    return max(min(config["vocab_size"], *(token for token in special if token is not None)) - 4, 1)
