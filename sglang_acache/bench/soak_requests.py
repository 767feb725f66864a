"""The requests of a soak: what is sent, what is right for each, and what the server must refuse."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang_acache.bench.client import Answer, Payload
from sglang_acache.bench.workloads import Shape, shared_prompts
from sglang_acache.tiny import task as tiny
from sglang_acache.tiny import vocabulary as tiny_words

REQUESTS_AN_AFFIX = 4

MODES = ("plain", "declared", "discovered", "sampled")
"""Reuse off; reuse of a span that the request declares; whatever the server found by itself; a temperature."""
CHECKED = ("plain", "declared")
"""Modes whose answer is fixed by the request alone, whatever else the server does: greedy, in float32."""

SCHEDULES: tuple[dict[str, Any], ...] = ({"steps": 12}, {"threshold": 0.9}, {"factor": 1.0}, {"threshold": 0.6})
CACHES = ("dual", "dual", "prefix", "none")


@dataclass
class Item:
    """A prompt with its fixed schedule. ``expected`` is filled in one request at a time, before the soak."""

    left: list[int]
    right: list[int]
    span: tuple[int, int]
    new_tokens: int
    params: dict[str, Any]
    expected: dict[str, list[int]]

    def payload(self, mode: str, seed: int, rid: str | None = None) -> Payload:
        reuse: dict[str, Any] = {"enabled": mode != "plain"}
        if mode == "declared":
            reuse["spans"] = [list(self.span)]
        custom: dict[str, Any] = {**self.params, "acache": reuse}
        if self.right:
            custom["suffix_ids"] = self.right
        sampling: dict[str, Any] = {"max_new_tokens": self.new_tokens, "temperature": 0.0, "custom_params": custom}
        if mode == "sampled":
            sampling |= {"temperature": 0.8, "top_p": 0.9, "sampling_seed": seed}
        body: Payload = {"input_ids": self.left, "sampling_params": sampling}
        return body if rid is None else {**body, "rid": rid}

    def problem(self, mode: str, answer: Answer, *, cut: bool) -> str | None:
        """What is wrong with a successful answer; ``cut`` answers may be any beginning of the right one."""
        if not cut and not 0 < len(answer.token_ids) <= self.new_tokens:
            return f"{len(answer.token_ids)} tokens instead of 1 to {self.new_tokens}"
        expected = self.expected.get(mode)
        if expected is None:
            return None
        got = answer.token_ids
        right = got == expected[: len(got)] if cut else got == expected
        return None if right else f"expected {expected}, got {got}"


def tiny_items(affixes: int, seed: int) -> list[Item]:
    """Held-out requests of ``llada-tiny``: several affixes, each read by several requests, in every position."""
    rng = random.Random(seed)
    items = []
    for index in range(affixes):
        layout = tiny.LAYOUTS[index % len(tiny.LAYOUTS)]
        for request in tiny.shared_requests(seed * 1000 + index, REQUESTS_AN_AFFIX, layout):
            shift = request.hole if request.right else 0
            start, stop = request.affix_span
            params = {"block_length": rng.choice((4, 6, 12)), "cache": rng.choice(CACHES), **rng.choice(SCHEDULES)}
            left, right = tiny_words.encode(request.left), tiny_words.encode(request.right) if request.right else []
            items.append(Item(left, right, (start - shift, stop - shift), request.hole, params, {}))
    return items


def random_items(affixes: int, seed: int, words: int) -> list[Item]:
    """The same for any model: prompts of random tokens."""
    rng, draw = random.Random(seed), np.random.default_rng(seed)
    items = []
    for index in range(affixes):
        shape = Shape(256, 0.5, 64, 32, position=("prefix", "infix", "suffix")[index % 3])
        for prompt in shared_prompts(draw, shape, REQUESTS_AN_AFFIX, words):
            assert prompt.span is not None
            params = {"block_length": 32, "cache": rng.choice(CACHES), "steps": 16}
            items.append(Item(prompt.left, prompt.right, prompt.span, shape.new_tokens, params, {}))
    return items


def bad_payload(item: Item, rng: random.Random) -> Payload:
    """A request that must be refused with status 400."""
    payload = item.payload("plain", 0)
    sampling = payload["sampling_params"]
    custom = sampling["custom_params"] = dict(sampling["custom_params"])
    prompt = len(item.left) + len(item.right)
    changes: tuple[Callable[[], object], ...] = (
        lambda: custom.update(no_such_parameter=1),
        lambda: custom.update(block_length=-1),
        lambda: custom.update(block_length="wide"),
        lambda: custom.update(threshold=0.9, factor=1.0),
        lambda: custom.update(threshold=2.0, steps=None, factor=None),
        lambda: custom.update(acache={"spans": [[0, prompt + 1]]}),
        lambda: custom.update(acache={"spans": [[0, 8], [4, 12]]}),
        lambda: custom.update(acache={"anchor_ratio": -0.1}),
        lambda: custom.update(acache={"selector": "none such"}),
        lambda: custom.update(suffix_ids=[10**9]),
        lambda: sampling.update(max_new_tokens=-1),
        lambda: sampling.update(max_new_tokens=10**6),
        lambda: sampling.update(frequency_penalty=0.5),
        lambda: sampling.update(logit_bias={"1": 5.0}),
        lambda: sampling.update(json_schema="{}"),
        lambda: payload.update(input_ids=[10**8]),
        lambda: payload.update(input_ids=[], sampling_params={**sampling, "custom_params": {}}),
    )
    rng.choice(changes)()
    return payload
