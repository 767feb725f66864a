"""What cannot be honoured is refused with status 400 and the field's name, and the server goes on serving."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from integration_tests.conftest import LLADA_SPEC
from integration_tests.prompts import prompt, prompt_ids
from integration_tests.server import Server

GOOD = {"max_new_tokens": 8, "temperature": 0, "custom_params": {"block_length": 8}}


@pytest.fixture
def serving(llada: Server) -> Iterator[Server]:
    """The server, which must answer as before when the test is over."""
    before = llada.generate(prompt(9), **GOOD)["output_ids"]
    yield llada
    assert llada.process.poll() is None, llada.log_tail()
    assert llada.generate(prompt(9), **GOOD)["output_ids"] == before
    llada.assert_log_clean()


def assert_refused(server: Server, field: str, body: dict[str, Any], also_streamed: bool = True) -> None:
    response = server.post("/generate", body)
    assert response.status_code == 400, response.text
    assert field in response.text, response.text
    if also_streamed:
        assert field in server.post("/generate", {**body, "stream": True}).text


SAMPLING: tuple[tuple[str, Any], ...] = (
    ("min_p", 0.1),
    ("frequency_penalty", 0.5),
    ("presence_penalty", -0.5),
    ("repetition_penalty", 1.2),
    ("min_new_tokens", 3),
    ("logit_bias", {"1": 2.0}),
    ("json_schema", '{"type": "object"}'),
    ("regex", "a+"),
    ("ebnf", 'root ::= "a"'),
    ("structural_tag", "{}"),
    ("beam_width", 2),
    ("temperature", -1),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_k", -7),
    ("n", 0),
    ("n", -1),
    ("max_new_tokens", -1),
    ("max_new_tokens", 5000),
    ("custom_params", 5),
    ("custom_params", ["block_length"]),
    ("no_such_field", 1),
)


@pytest.mark.parametrize(("field", "value"), SAMPLING, ids=str)
def test_sampling_fields(serving: Server, field: str, value: Any) -> None:
    sampling = {**GOOD, "temperature": 0.5, field: value}
    assert_refused(serving, field, {"text": prompt(9), "sampling_params": sampling})


REQUEST_FIELDS: tuple[tuple[str, Any], ...] = (
    ("return_hidden_states", True),
    ("token_ids_logprob", [1]),
    ("custom_logit_processor", "x"),
    ("session_params", {"id": "x"}),
    ("session_id", "x"),
    ("image_data", ["x"]),
    ("return_sampling_mask", True),
    ("return_routed_experts", True),
    ("return_entropy", True),
    ("max_thinking_tokens", 4),
    ("positional_embed_overrides", [1]),
    ("multi_item_delimiter_indices", [1]),
    ("logprob_start_len", 0),
    ("logprob_start_len", 3),
    ("top_logprobs_num", -2),
)


@pytest.mark.parametrize(("field", "value"), REQUEST_FIELDS, ids=str)
def test_request_fields(serving: Server, field: str, value: Any) -> None:
    body = {"text": prompt(9), "sampling_params": GOOD, "return_logprob": "logprob" in field, field: value}
    assert_refused(serving, field, body)


def test_input_embeddings(serving: Server) -> None:
    body = {"input_embeds": [[0.1] * LLADA_SPEC.hidden] * 3, "sampling_params": GOOD}
    response = serving.post("/generate", body)
    assert response.status_code == 400
    assert "input_embeds" in response.text or "radix cache" in response.text


CUSTOM: tuple[tuple[str, dict[str, Any]], ...] = (
    ("block_length", {"block_length": 0}),
    ("block_length", {"block_length": -8}),
    ("block_length", {"block_length": "8"}),
    ("block_length", {"block_length": 8.0}),
    ("block_length", {"block_length": True}),
    ("block_length", {"block_length": 5000}),
    ("steps", {"steps": 0}),
    ("steps", {"steps": -1}),
    ("steps", {"steps": 1, "block_length": 4}),
    ("threshold", {"threshold": 1.5}),
    ("threshold", {"threshold": -0.1}),
    ("threshold", {"threshold": "0.9"}),
    ("threshold", {"threshold": 0.9, "steps": 8}),
    ("factor", {"factor": 0}),
    ("factor", {"factor": -1.0}),
    ("factor", {"factor": 1.0, "steps": 8}),
    ("remasking", {"remasking": "best"}),
    ("remasking", {"remasking": 1}),
    ("cache", {"cache": "both"}),
    ("cache", {"cache": ["dual"]}),
    ("suffix", {"suffix": 5}),
    ("suffix_ids", {"suffix_ids": ["w1"]}),
    ("suffix_ids", {"suffix_ids": [LLADA_SPEC.vocab_size]}),
    ("suffix_ids", {"suffix_ids": [-1]}),
    ("suffix_ids", {"suffix": "w1", "suffix_ids": [1]}),
    ("blocklength", {"blocklength": 8}),
    ("diffusion", {"diffusion": "{}"}),
    ("diffusion", {"diffusion": {"params": [1, {"a": []}]}}),
    ("thinking_budget", {"thinking_budget": 3}),
)


@pytest.mark.parametrize(("field", "custom"), CUSTOM, ids=str)
def test_custom_params(serving: Server, field: str, custom: dict[str, Any]) -> None:
    assert_refused(serving, field, {"text": prompt(9), "sampling_params": {**GOOD, "custom_params": custom}})


PROMPTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("prompt", {"text": ""}),
    ("prompt", {"text": ["w1", ""]}),
    ("input_ids", {"input_ids": [-1]}),
    ("input_ids", {"input_ids": [LLADA_SPEC.vocab_size]}),  # a padding row of the embedding
    ("input_ids", {"input_ids": [10**12]}),
    ("max_new_tokens", {"input_ids": prompt_ids(LLADA_SPEC.max_positions - 1)}),
    ("max_new_tokens", {"text": prompt(LLADA_SPEC.max_positions + 1)}),
    ("max_new_tokens", {"text": "w1 " * 350_000}),  # a megabyte
)


@pytest.mark.parametrize(("field", "body"), PROMPTS, ids=lambda value: str(value)[:40])
def test_prompts(serving: Server, field: str, body: dict[str, Any]) -> None:
    assert_refused(serving, field, {**body, "sampling_params": GOOD})


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("input_ids", {"input_ids": []}),
        ("input_ids", {"input_ids": ["w1"]}),
        ("input_ids", {"input_ids": [1.5]}),
        ("text", {"text": 5}),
        ("text", {}),
    ],
    ids=str,
)
def test_prompts_that_sglang_itself_refuses(serving: Server, field: str, body: dict[str, Any]) -> None:
    """Not streamed: SGLang 0.5.23 then logs a traceback of its own, after the answer."""
    assert_refused(serving, field, {**body, "sampling_params": GOOD}, also_streamed=False)


def test_a_list_of_parameters_for_one_prompt(serving: Server) -> None:
    assert_refused(serving, "sampling_params", {"text": prompt(9), "sampling_params": [GOOD]})


def test_a_canvas_that_just_fits_and_one_that_does_not(serving: Server) -> None:
    length = LLADA_SPEC.max_positions - 8
    assert len(serving.generate(prompt_ids(length), ignore_eos=True, **GOOD)["output_ids"]) == 8
    assert_refused(serving, "max_new_tokens", {"input_ids": prompt_ids(length + 1), "sampling_params": GOOD})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", "8"),
        ("max_new_tokens", 1.5),
        ("temperature", "warm"),
        ("stop", 5),
        ("stop_token_ids", ["w1"]),
        ("sampling_seed", 1.5),
        ("ignore_eos", "yes"),
    ],
)
def test_wrong_types(serving: Server, field: str, value: Any) -> None:
    """SGLang's own schema of ``/generate`` refuses these, with the value and the type; the field's name is added."""
    response = serving.post("/generate", {"text": prompt(9), "sampling_params": {**GOOD, field: value}})
    assert response.status_code == 400
    assert f"{field}: invalid type" in response.text


OPENAI: tuple[tuple[str, dict[str, Any]], ...] = (
    ("frequency_penalty", {"frequency_penalty": 1.0}),
    ("presence_penalty", {"presence_penalty": 1.0}),
    ("logit_bias", {"logit_bias": {"5": 10}}),
    ("min_tokens", {"extra_body": {"min_tokens": 3}}),
    ("min_p", {"extra_body": {"min_p": 0.2}}),
    ("regex", {"extra_body": {"regex": "a+"}}),
    ("repetition_penalty", {"extra_body": {"repetition_penalty": 1.3}}),
    ("response_format", {"extra_body": {"response_format": {"type": "json_object"}}}),
    ("block_length", {"extra_body": {"custom_params": {"block_length": -1}}}),
    ("max_new_tokens", {"max_tokens": 100_000}),
)


@pytest.mark.parametrize(("field", "arguments"), OPENAI, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("stream", [False, True])
def test_openai_clients_get_a_bad_request_error(
    serving: Server, field: str, arguments: dict[str, Any], stream: bool
) -> None:
    client = openai.OpenAI(base_url=serving.url + "/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.APIError, match=field):
        list(client.completions.create(model="m", prompt=prompt(9), stream=stream, **arguments))
    messages: Any = [{"role": "user", "content": prompt(9)}]
    with pytest.raises(openai.APIError, match=field):
        list(client.chat.completions.create(model="m", messages=messages, stream=stream, **arguments))


def test_echo_with_logprobs_asks_for_input_logprobs(serving: Server) -> None:
    client = openai.OpenAI(base_url=serving.url + "/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="logprob_start_len"):
        client.completions.create(model="m", prompt=prompt(9), max_tokens=4, echo=True, logprobs=1)


def test_bad_requests_between_good_ones(serving: Server) -> None:
    good = {"text": prompt(9), "sampling_params": GOOD}
    bad = [{"text": "", "sampling_params": GOOD}, {"text": prompt(9), "sampling_params": {"regex": "a"}}, {"text": 1}]
    expected = serving.generate(prompt(9), **GOOD)["output_ids"]
    with ThreadPoolExecutor(16) as pool:
        responses = list(pool.map(lambda body: serving.post("/generate", body), [*bad, good, good] * 6))
    assert [response.status_code for response in responses] == [400, 400, 400, 200, 200] * 6
    assert all(response.json()["output_ids"] == expected for response in responses if response.status_code == 200)
