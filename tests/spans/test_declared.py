"""Discovery must not change what a declared span would have answered."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from span_world import Content, World

from sglang_acache.core.spans import Segment

LEAST = 3
TEXT = st.lists(st.integers(1, 3), min_size=1, max_size=12)
Answer = list[tuple[int, int, list[Content]]]


def answer(world: World, prompt: list[int], declared_only: bool) -> Answer:
    """Where declared spans are found and the K/V that is read for them."""
    found: Answer = []
    for match in world.tree.match("", [Segment(np.array(prompt))], declared_only=declared_only):
        handle = world.tree.acquire(match)
        assert handle is not None
        world.work(handle)
        assert handle.ready
        if match.declared >= LEAST:
            found.append((match.start, match.declared, world.read(handle)[: match.declared]))
        world.tree.release(handle)
        world.check()
    return found


@settings(max_examples=150, deadline=None)
@given(st.lists(TEXT, min_size=1, max_size=4), st.lists(TEXT, max_size=6), st.lists(TEXT, max_size=4), TEXT)
def test_same_spans_same_content(
    declared: list[list[int]], inserted: list[list[int]], others: list[list[int]], text: list[int]
) -> None:
    plain, busy = (World(slots=2000, min_tokens=LEAST) for _ in range(2))
    for tokens in declared[: len(declared) // 2]:
        busy.tree.declare("", tokens)
    for tokens in inserted:
        busy.tree.insert("", tokens)
    for prompt in others:  # other requests, which match in part and cut free edges
        answer(busy, prompt, declared_only=False)
    for tokens in declared[len(declared) // 2 :]:
        busy.tree.declare("", tokens)
    for tokens in reversed(declared):
        plain.tree.declare("", tokens)
    prompt = text + declared[0] + text[::-1] + declared[-1]
    expected = answer(plain, prompt, declared_only=True)
    assert answer(busy, prompt, declared_only=False) == expected
    busy.tree.evict(10)
    assert answer(busy, prompt, declared_only=True) == expected


@settings(max_examples=60, deadline=None)
@given(st.lists(TEXT, min_size=1, max_size=5), st.randoms(use_true_random=False), TEXT)
def test_order_of_declarations_does_not_matter(declared: list[list[int]], random: object, text: list[int]) -> None:
    first, second = (World(slots=2000, min_tokens=LEAST) for _ in range(2))
    for tokens in declared:
        first.tree.declare("", tokens)
    second.tree.declare("", text, "gone")
    for tokens in random.sample(declared, len(declared)):  # type: ignore[attr-defined]
        second.tree.declare("", tokens)
    second.tree.remove("", "gone")
    prompt = text + declared[0]
    assert answer(first, prompt, declared_only=True) == answer(second, prompt, declared_only=True)
