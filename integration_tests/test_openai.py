"""The ``openai`` client against a diffusion LLM: completions, infilling, chat, streams, log-probabilities, usage."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from integration_tests.prompts import prompt, text_of
from integration_tests.server import Server

BLOCKS = {"custom_params": {"block_length": 8}}


@pytest.fixture
def client(llada: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=llada.url + "/v1", api_key="none", max_retries=0)


def complete(client: openai.OpenAI, **arguments: Any) -> Any:
    return client.completions.create(model="m", **{"prompt": prompt(12), "extra_body": BLOCKS, **arguments})


def chat(client: openai.OpenAI, **arguments: Any) -> Any:
    messages = [{"role": "user", "content": prompt(12)}]
    return client.chat.completions.create(model="m", **{"messages": messages, "extra_body": BLOCKS, **arguments})


def test_a_completion_is_what_generate_gives(client: openai.OpenAI, llada: Server) -> None:
    native = llada.generate(prompt(12), max_new_tokens=24, temperature=0, **BLOCKS)
    answer = complete(client, max_tokens=24)
    assert answer.choices[0].text == native["text"]
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (12, 24)


def test_a_completion_without_max_tokens_uses_the_servers_default(client: openai.OpenAI) -> None:
    answer = complete(client, extra_body={**BLOCKS, "ignore_eos": True})
    assert answer.usage.completion_tokens == 256


def test_suffix_is_the_text_after_the_hole(client: openai.OpenAI, llada: Server) -> None:
    after = prompt(9, seed=1)
    custom = {**BLOCKS["custom_params"], "suffix": after}
    native = llada.generate(prompt(12), max_new_tokens=16, temperature=0, custom_params=custom)
    answer = complete(client, suffix=after, max_tokens=16)
    assert answer.choices[0].text == native["text"]
    assert answer.usage.prompt_tokens == 21
    assert answer.choices[0].text != complete(client, max_tokens=16).choices[0].text


def test_several_prompts_and_several_samples(client: openai.OpenAI) -> None:
    prompts = [prompt(12), prompt(7, seed=2)]
    answer = complete(client, prompt=prompts, n=2, max_tokens=24, temperature=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in answer.choices}) == 4
    greedy = complete(client, prompt=prompts, max_tokens=8)
    assert [choice.text for choice in greedy.choices] == [
        complete(client, prompt=one, max_tokens=8).choices[0].text for one in prompts
    ]


def test_parallel_samples_of_a_seed(client: openai.OpenAI) -> None:
    """Different, the same every time, and each what its own seed gives alone."""
    options: dict[str, Any] = {"max_tokens": 16, "temperature": 1.5}
    drawn = [[choice.text for choice in complete(client, n=3, seed=11, **options).choices] for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 3
    assert drawn[0] == [complete(client, seed=seed, **options).choices[0].text for seed in (11, 12, 13)]


def test_seed_and_temperature(client: openai.OpenAI) -> None:
    first, again, other = (
        complete(client, max_tokens=16, temperature=1.5, seed=seed).choices[0].text for seed in (3, 3, 4)
    )
    assert first == again != other


@pytest.mark.parametrize("create", [complete, chat])
def test_a_stream_adds_up_to_the_whole_answer(client: openai.OpenAI, create: Any) -> None:
    whole = create(client, max_tokens=40)
    choice = whole.choices[0]
    chunks = list(create(client, max_tokens=40, stream=True, stream_options={"include_usage": True}))
    last = chunks[-1]
    parts = [chunk.choices[0] for chunk in chunks if chunk.choices]
    if create is chat:
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
    else:
        assert "".join(part.text for part in parts) == choice.text
    assert parts[-1].finish_reason == choice.finish_reason
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 40


def test_a_chat_answer(client: openai.OpenAI, llada: Server) -> None:
    rendered = f"{prompt(12)} <|eot_id|> <|startoftext|>"
    native = llada.generate(rendered, max_new_tokens=24, temperature=0, **BLOCKS)
    answer = chat(client, max_completion_tokens=24)
    assert answer.choices[0].message.content == native["text"]
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens == 14


def test_a_chat_answer_without_a_length_or_temperature(client: openai.OpenAI) -> None:
    first, again = (chat(client, extra_body={**BLOCKS, "ignore_eos": True}) for _ in range(2))
    assert first.usage.completion_tokens == 256
    assert first.choices[0].message.content == again.choices[0].message.content, "greedy where nothing is said"


def test_stop_strings(client: openai.OpenAI) -> None:
    words = complete(client, max_tokens=40).choices[0].text.split()
    stop = next(word for index, word in enumerate(words) if index > 8 and word not in words[:index])
    answer = complete(client, max_tokens=40, stop=[f" {stop}", "never"])
    assert answer.choices[0].text.split() == words[: words.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_completion_logprobs(client: openai.OpenAI) -> None:
    choice = complete(client, max_tokens=16, logprobs=2).choices[0]
    assert text_of([int(token.strip()[1:]) for token in choice.logprobs.tokens]).split() == choice.text.split()
    assert all(value <= 0 for value in choice.logprobs.token_logprobs)
    for value, alternatives in zip(choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True):
        assert len(alternatives) == 2
        assert max(alternatives.values()) == pytest.approx(value, abs=1e-4)


def test_chat_logprobs(client: openai.OpenAI) -> None:
    choice = chat(client, max_tokens=16, logprobs=True, top_logprobs=3).choices[0]
    assert [entry.token for entry in choice.logprobs.content] == choice.message.content.split()
    assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)
    assert all(entry.top_logprobs[0].token == entry.token for entry in choice.logprobs.content)


def test_the_model_list(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.object == "model"
