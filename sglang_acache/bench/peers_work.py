"""What all peers answer: one checkpoint and greedy requests over one shared prefix, committed by a fixed schedule.

The fixed schedule is what every peer can do: the same tokens a step, and so, but for rounding and caches, the same
answers. Special tokens of random checkpoints never win, so that no loop ends early or commits a mask.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.torch import load_file, save_file

from sglang_acache.bench.random_model import CheckpointSpec, compute_bound_spec, published_name, write_checkpoint
from sglang_acache.bench.workloads import draw_tokens
from sglang_acache.models.names import TINY_MODEL
from sglang_acache.tiny import task as tiny

TINY, RANDOM, PUBLISHED_IDS = "llada-tiny", "random", "published-ids"
MODELS = (TINY, RANDOM, PUBLISHED_IDS)
PUBLISHED_MASK = 126336
"""LLaDA's mask token; servers that have it built in can load no other checkpoint."""
PUBLISHED_ROWS = 126464


@dataclass(frozen=True)
class Request:
    """``ids`` is the prompt as every peer sees it; ``user`` the text that a chat server's template turns into it."""

    ids: list[int]
    user: str | None = None


@dataclass(frozen=True)
class Work:
    """One checkpoint with its requests' shape. ``shared`` tokens at the head of every prompt are the same."""

    name: str
    model: Path
    shared: int
    new_tokens: int
    block_length: int
    steps: int
    mask_id: int
    words: int
    own: int
    spec: CheckpointSpec | None = None

    def requests(self, count: int, seed: int) -> list[Request]:
        """``count`` requests; the shared text depends on the work only, the rest on ``seed``."""
        if self.spec is None:
            return _tiny_requests(self.model, count, seed)
        shared = draw_tokens(np.random.default_rng(0), self.shared, self.words)
        rng = np.random.default_rng([1, seed])
        end = [self.spec.special("<|eot_id|>"), self.spec.special("<|startoftext|>")]  # as the chat template ends
        found = []
        for _ in range(count):
            ids = [*shared, *draw_tokens(rng, self.own, self.words)]
            found.append(Request([*ids, *end], " ".join(f"w{token}" for token in ids)))
        return found


@contextlib.contextmanager
def open_work(name: str, options: argparse.Namespace) -> Iterator[Work]:
    """Random checkpoints are written for the time of the run. Raises ValueError for an unknown name."""
    if name == TINY:
        yield _tiny_work(options.per_step)
        return
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; choose one of {', '.join(MODELS)}")
    spec = random_spec(name, options)
    blocks = -(-options.new_tokens // options.block_length)
    with tempfile.TemporaryDirectory(prefix="acache-llada-") as folder:
        model = write_checkpoint(Path(folder) / f"llada-{name}", spec)
        silence_specials(model, spec)
        shared = int(options.canvas * options.share)
        yield Work(
            name=name,
            model=model,
            shared=shared,
            new_tokens=blocks * options.block_length,
            block_length=options.block_length,
            steps=max(blocks, blocks * (options.block_length // options.per_step)),
            mask_id=spec.mask_id,
            words=spec.words,
            own=max(options.canvas - shared - options.new_tokens - 2, 1),
            spec=spec,
        )


def random_spec(name: str, options: argparse.Namespace) -> CheckpointSpec:
    if name == RANDOM:
        return compute_bound_spec(options.layers, options.hidden)
    small = max(options.hidden // 4, 64)  # the published vocabulary alone makes the head the larger part
    rows = {"vocab_size": PUBLISHED_MASK + 1, "embedding_rows": PUBLISHED_ROWS}
    return compute_bound_spec(max(options.layers // 2, 1), small, **rows)


def silence_specials(model: Path, spec: CheckpointSpec) -> None:
    """Zero the output head's rows of special and padding tokens: their logits are 0, far below the best."""
    file = model / "model.safetensors"
    tensors = load_file(file)
    head = published_name(spec.architecture, "lm_head.weight")
    tensors[head][spec.words :] = 0.0
    save_file(tensors, file)


def read_words(text: str) -> list[int]:
    """Ids of an answer in a random checkpoint's words, ``w17 w4 ...``; what is no word is -1."""
    return [int(word[1:]) if word[:1] == "w" and word[1:].isdigit() else -1 for word in text.split()]


def _tiny_work(per_step: int) -> Work:
    config = json.loads((TINY_MODEL / "config.json").read_text())
    new_tokens, block = 2 * tiny.N_SLOTS, 4
    return Work(
        name=TINY,
        model=TINY_MODEL,
        shared=tiny.N_FACTS * tiny.FACT_WORDS + 2,
        new_tokens=new_tokens,
        block_length=block,
        steps=new_tokens // min(per_step, 2),
        mask_id=config["mask_token_id"],
        words=config["mask_token_id"],
        own=0,
    )


def _tiny_requests(model: Path, count: int, seed: int) -> list[Request]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model))
    items = tiny.shared_requests(seed, count, "prefix")
    return [Request(tokenizer.encode(item.left, add_special_tokens=False)) for item in items]
