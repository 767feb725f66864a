"""Synthetic requests of known shape: how much of the canvas is shared, where, and how many tokens a step commits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

POSITIONS = ("prefix", "infix", "suffix")


@dataclass(frozen=True)
class Shape:
    """A canvas of ``canvas`` tokens of which ``share`` are an affix and ``new_tokens`` are generated.

    ``per_step`` tokens are committed a step, by a fixed schedule: what a threshold does on a trained model, made
    the same for every mode that is compared.
    """

    canvas: int = 1024
    share: float = 0.75
    new_tokens: int = 128
    block_length: int = 32
    per_step: int = 4
    position: str = "prefix"

    @property
    def affix(self) -> int:
        return int(self.canvas * self.share)

    @property
    def own(self) -> int:
        """Prompt tokens that belong to the request alone."""
        return self.canvas - self.affix - self.new_tokens

    @property
    def steps(self) -> int:
        return max(self.new_tokens // self.per_step, -(-self.new_tokens // self.block_length))

    def check(self) -> Shape:
        if self.own < 0:
            raise SystemExit(
                f"canvas {self.canvas} with an affix of {self.affix} has no room for {self.new_tokens} new tokens"
            )
        return self


@dataclass(frozen=True)
class Prompt:
    """Token ids before and after the hole, and the affix's offsets in ``left + right``; none = nothing shared."""

    left: list[int]
    right: list[int]
    span: tuple[int, int] | None
    shape: Shape


def draw_tokens(rng: np.random.Generator, count: int, words: int) -> list[int]:
    """``count`` ordinary token ids; ids from ``words`` on are special."""
    return [int(token) for token in rng.integers(0, words, count)]


def place(shape: Shape, affix: Sequence[int], own: Sequence[int]) -> Prompt:
    """Lay an affix and a request's own tokens out."""
    length, half = len(affix), len(own) // 2
    if shape.position == "prefix":
        return Prompt([*affix, *own], [], (0, length), shape)
    if shape.position == "infix":
        return Prompt([*own[:half], *affix, *own[half:]], [], (half, half + length), shape)
    return Prompt(list(own), list(affix), (len(own), len(own) + length), shape)


def shared_prompts(rng: np.random.Generator, shape: Shape, count: int, words: int) -> list[Prompt]:
    """``count`` requests over one affix."""
    affix = draw_tokens(rng, shape.affix, words)
    return [place(shape, affix, draw_tokens(rng, shape.own, words)) for _ in range(count)]


def mixed_prompts(rng: np.random.Generator, shape: Shape, count: int, words: int) -> list[Prompt]:
    """Half of the requests share a prefix, a quarter another text inside the prompt, a quarter share nothing.

    Canvases are half as long to as long as ``shape``'s.
    """
    prefix, inside = (draw_tokens(rng, shape.affix // 2, words) for _ in range(2))
    prompts = []
    for index in range(count):
        room = shape.canvas - shape.new_tokens - len(prefix)
        own = draw_tokens(rng, int(rng.integers(max(room // 2, 1), max(room, 2))), words)
        if index % 4 == 3:
            prompts.append(Prompt([*draw_tokens(rng, len(prefix), words), *own], [], None, shape))
        else:
            where = replace(shape, position="infix" if index % 4 == 1 else "prefix")
            prompts.append(place(where, inside if index % 4 == 1 else prefix, own))
    return prompts


def generate_payload(prompt: Prompt, cache: str, reuse: dict[str, Any] | None) -> dict[str, Any]:
    """The body of a greedy ``/generate`` request.

    ``reuse``: None switches reuse off, else fields of ``custom_params.acache``.
    """
    shape = prompt.shape
    custom: dict[str, Any] = {"block_length": shape.block_length, "steps": shape.steps, "cache": cache}
    if prompt.right:
        custom["suffix_ids"] = prompt.right
    custom["acache"] = reuse_fields(prompt, reuse)
    sampling = {
        "max_new_tokens": shape.new_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "custom_params": custom,
    }
    return {"input_ids": prompt.left, "sampling_params": sampling}


def without_reuse_fields(payload: dict[str, Any]) -> dict[str, Any]:
    """The same request for a server without ``--enable-acache``, which refuses to be told of reuse."""
    payload["sampling_params"]["custom_params"].pop("acache", None)
    return payload


def reuse_fields(prompt: Prompt, reuse: dict[str, Any] | None) -> dict[str, Any]:
    if reuse is None:
        return {"enabled": False}
    declared = {"spans": [list(prompt.span)]} if prompt.span else {}
    return {**declared, **reuse}
