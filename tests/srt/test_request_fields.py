"""Requests as the tokenizer manager sees them: defaults, refusals, and the trip over the wire."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_acache.core.params import DiffusionParams, ParamError
from sglang_acache.srt.request_fields import WIRE_KEY, RequestLimits, RequestSpec, normalise_request

LIMITS = RequestLimits(
    defaults=DiffusionParams(),
    max_new_tokens=64,
    temperature=0.0,
    context_length=256,
    vocab_limit=100,
    needs_left_context=False,
    stop_token_ids=(98,),
)
WIRE_DEFAULTS = DiffusionParams(block_length=1)  # must not be used: everything travels


def tokenize(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def normalise(
    sampling: dict[str, Any] | None = None,
    left: tuple[int, ...] = (1, 2, 3),
    limits: RequestLimits = LIMITS,
    **request: Any,
) -> tuple[dict[str, Any], RequestSpec]:
    out = normalise_request(SimpleNamespace(**request), list(left), sampling or {}, limits, tokenize)
    return out, RequestSpec.from_wire(out["custom_params"], WIRE_DEFAULTS)


def test_defaults_are_filled_in() -> None:
    out, spec = normalise()
    assert (out["max_new_tokens"], out["temperature"], out["stop_token_ids"]) == (64, 0.0, [98])
    assert spec == RequestSpec(DiffusionParams())


def test_what_a_client_gives_is_kept() -> None:
    given_params = {"max_new_tokens": 5, "temperature": 0.7, "stop_token_ids": [4], "top_p": 0.5, "n": 2}
    out, spec = normalise({**given_params, "custom_params": {"steps": 7, "cache": "none"}})
    assert {name: out[name] for name in ("max_new_tokens", "temperature", "top_p", "n")} == {
        "max_new_tokens": 5, "temperature": 0.7, "top_p": 0.5, "n": 2,
    }  # fmt: skip
    assert out["stop_token_ids"] == [4, 98]
    assert spec.params == DiffusionParams(steps=7, threshold=None, cache="none")


def test_the_clients_own_objects_are_left_alone() -> None:
    """A batch shares one dictionary: the first of its requests must not change it for the others."""
    sampling = {"custom_params": {"suffix": "1 2"}, "stop_token_ids": [4]}
    before = json.dumps(sampling)
    normalise(sampling)
    assert json.dumps(sampling) == before


def test_the_wire_is_flat() -> None:
    out, spec = normalise({"custom_params": {"suffix_ids": [4, 5]}})
    assert list(out["custom_params"]) == [WIRE_KEY]
    assert isinstance(out["custom_params"][WIRE_KEY], str)
    assert spec.right_context == [4, 5]


def test_a_request_that_never_passed_here_gets_the_servers_defaults() -> None:
    assert RequestSpec.from_wire(None, LIMITS.defaults) == RequestSpec(LIMITS.defaults)


@pytest.mark.parametrize("custom", [{"suffix": "4 5"}, {"suffix_ids": [4, 5]}])
def test_infilling(custom: dict[str, Any]) -> None:
    assert normalise({"custom_params": custom}, left=())[1].right_context == [4, 5]


SAMPLING = {
    "min_p": 0.1,
    "frequency_penalty": 0.1,
    "presence_penalty": -0.1,
    "repetition_penalty": 1.1,
    "min_new_tokens": 1,
    "logit_bias": {"1": 1},
    "json_schema": "{}",
    "regex": "a",
    "ebnf": "a",
    "structural_tag": "a",
    "beam_width": 2,
    "watermark": {"on": True},
    "n": 0,
    "max_new_tokens": -1,
    "custom_params": [],
}


@pytest.mark.parametrize(("field", "value"), SAMPLING.items())
def test_a_sampling_field_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ParamError, match=field):
        normalise({field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("return_hidden_states", True),
        ("return_hidden_states", "last"),
        ("token_ids_logprob", [1]),
        ("positional_embed_overrides", [1]),
        ("image_data", ["x"]),
        ("input_embeds", [[0.1]]),
        ("lora_path", "x"),
        ("session_params", {"id": "x"}),
        ("custom_logit_processor", "x"),
    ],
)
def test_a_request_field_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ParamError, match=field):
        normalise(**{field: value})


@pytest.mark.parametrize("nothing", [None, False, [], [None], {}])
def test_a_field_that_asks_for_nothing_is_no_reason(nothing: Any) -> None:
    normalise(image_data=nothing, session_params=nothing, token_ids_logprob=nothing, return_hidden_states=nothing)


@pytest.mark.parametrize(("start", "allowed"), [(None, True), (-1, True), (0, False), (4, False), (-2, False)])
def test_input_logprobs_are_refused(start: int | None, allowed: bool) -> None:
    normalise(return_logprob=False, logprob_start_len=start)
    if allowed:
        normalise(return_logprob=True, logprob_start_len=start, top_logprobs_num=2)
    else:
        with pytest.raises(ParamError, match="logprob_start_len"):
            normalise(return_logprob=True, logprob_start_len=start)


@pytest.mark.parametrize(
    ("custom", "field"),
    [
        ({"suffix": 5}, "suffix"),
        ({"suffix_ids": [100]}, "suffix_ids"),
        ({"suffix_ids": [True]}, "suffix_ids"),
        ({"suffix_ids": [-1]}, "suffix_ids"),
        ({"suffix": "1", "suffix_ids": [1]}, "suffix_ids"),
        ({WIRE_KEY: "{}"}, WIRE_KEY),
        ({"anything": 1}, "anything"),
        ({"steps": 1}, "steps"),
        ({"block_length": 300}, "max_new_tokens"),
    ],
    ids=str,
)
def test_custom_params_are_refused_by_name(custom: dict[str, Any], field: str) -> None:
    with pytest.raises(ParamError, match=f"^{field}: "):
        normalise({"custom_params": custom})


@pytest.mark.parametrize("token", [-1, 100, 10**12])
def test_prompt_tokens_outside_the_vocabulary(token: int) -> None:
    with pytest.raises(ParamError, match="input_ids"):
        normalise(left=(1, token))


def test_an_empty_prompt() -> None:
    with pytest.raises(ParamError, match="prompt"):
        normalise(left=())
    with pytest.raises(ParamError, match="prompt"):
        normalise({"custom_params": {"suffix": "1"}}, left=(), limits=replace(LIMITS, needs_left_context=True))


@given(st.integers(1, 300), st.integers(0, 300), st.integers(0, 300), st.integers(1, 300))
def test_a_canvas_fits_the_context_or_is_refused(left: int, right: int, new_tokens: int, block: int) -> None:
    sampling = {"max_new_tokens": new_tokens, "custom_params": {"block_length": block, "suffix_ids": [1] * right}}
    fits = left + -(-new_tokens // block) * block + right <= LIMITS.context_length
    if fits:
        normalise(sampling, left=(1,) * left)
    else:
        with pytest.raises(ParamError, match=r"^max_new_tokens: "):
            normalise(sampling, left=(1,) * left)
