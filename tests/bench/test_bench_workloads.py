"""Synthetic requests have the shape that their report says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_acache.bench.soak_requests import bad_payload, tiny_items
from sglang_acache.bench.workloads import POSITIONS, Shape, generate_payload, mixed_prompts, shared_prompts

SHAPES = st.builds(
    Shape,
    canvas=st.just(512),
    share=st.sampled_from([0.0, 0.25, 0.5, 0.75]),
    new_tokens=st.sampled_from([32, 64, 128]),
    position=st.sampled_from(POSITIONS),
)


@given(SHAPES, st.integers(0, 9))
def test_shared_prompts_hold_one_affix_where_they_say(shape: Shape, seed: int) -> None:
    prompts = shared_prompts(np.random.default_rng(seed), shape, 3, 1000)
    texts = []
    for prompt in prompts:
        assert prompt.span is not None
        start, stop = prompt.span
        tokens = [*prompt.left, *prompt.right]
        assert len(tokens) + shape.new_tokens == shape.canvas
        assert stop <= len(prompt.left) or start >= len(prompt.left)
        texts.append(tokens[start:stop])
    assert texts[0] == texts[1] == texts[2]
    assert len(texts[0]) == shape.affix


def test_mixed_prompts_share_two_texts_or_none() -> None:
    shape = Shape(canvas=256, share=0.5, new_tokens=32)
    prompts = mixed_prompts(np.random.default_rng(0), shape, 40, 1000)
    shared = {tuple(p.left[slice(*p.span)]) for p in prompts if p.span is not None}
    assert len(shared) == 2
    assert sum(prompt.span is None for prompt in prompts) == 10
    assert all(len(prompt.left) + 32 <= shape.canvas for prompt in prompts)


def test_a_shape_without_room_is_refused() -> None:
    with pytest.raises(SystemExit, match="no room for 128 new tokens"):
        Shape(canvas=256, share=0.75, new_tokens=128).check()


def test_reuse_is_switched_by_the_request() -> None:
    (prompt,) = shared_prompts(np.random.default_rng(0), Shape(canvas=128, new_tokens=32), 1, 100)
    without = generate_payload(prompt, "dual", None)["sampling_params"]["custom_params"]
    reused = generate_payload(prompt, "prefix", {"anchor_ratio": 0.3})["sampling_params"]["custom_params"]
    assert without["acache"] == {"enabled": False}
    assert reused["acache"] == {"spans": [[0, 96]], "anchor_ratio": 0.3}
    assert (without["cache"], reused["cache"], reused["steps"]) == ("dual", "prefix", 8)


@given(st.randoms(use_true_random=False))
def test_every_bad_request_is_refused_by_the_same_check_as_the_servers(rng) -> None:  # type: ignore[no-untyped-def]
    from types import SimpleNamespace

    from sglang_acache.core.params import DiffusionParams, ParamError
    from sglang_acache.core.reuse_params import ReuseParams
    from sglang_acache.srt.request_fields import RequestLimits, normalise_request

    item = tiny_items(3, 0)[rng.randrange(12)]
    limits = RequestLimits(DiffusionParams(), 256, 0.0, 4096, 256, False, reuse=ReuseParams())

    def check(payload: dict) -> None:
        normalise_request(SimpleNamespace(), payload["input_ids"], payload["sampling_params"], limits, None)

    check(item.payload("declared", 0))
    with pytest.raises(ParamError):
        check(bad_payload(item, rng))


def test_soak_items_span_their_facts_in_every_position() -> None:
    items = tiny_items(6, 0)
    assert len(items) == 24
    for item in items:
        tokens = [*item.left, *item.right]
        assert tokens[slice(*item.span)] == tokens[item.span[0] : item.span[1]] != []
    groups = {tuple([*item.left, *item.right][slice(*item.span)]) for item in items}
    assert len(groups) == 6
