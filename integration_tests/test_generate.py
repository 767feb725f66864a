"""``/generate`` on a diffusion LLM: every field that is honoured, and what is reported back."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from integration_tests.conftest import LLADA_SPEC
from integration_tests.oracle.transformers_oracle import TransformersOracle
from integration_tests.prompts import prompt, prompt_ids, text_of
from integration_tests.server import REQUEST_TIMEOUT_S, Server, sse_events

ENDING = {"block_length": 16, "steps": 64, "cache": "none"}
"""With these the answer to ``prompt(23, seed=1)`` ends by itself, at its 42nd token, with <|eot_id|>."""


def greedy(server: Server, text: str | list[int], new_tokens: int, **params: Any) -> dict[str, Any]:
    return server.generate(text, max_new_tokens=new_tokens, temperature=0, custom_params=params)


def test_an_answer_and_what_is_reported_of_it(llada: Server) -> None:
    answer = greedy(llada, prompt(10), 12, block_length=8, threshold=0.6, cache="prefix")
    assert len(answer["output_ids"]) == 12
    assert answer["text"].split() == text_of(answer["output_ids"]).split()
    meta = answer["meta_info"]
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (10, 12)
    assert meta["finish_reason"] == {"type": "length", "length": 12}
    (diffusion,) = meta["diffusion"]
    assert diffusion["max_new_tokens"] == 12
    assert (diffusion["block_length"], diffusion["cache"], diffusion["canvas_tokens"]) == (8, "prefix", 10 + 16)
    assert 2 <= diffusion["forward_passes"] <= 16


def test_token_ids_and_text_are_the_same_prompt(llada: Server) -> None:
    ids = prompt_ids(14, seed=3)
    assert greedy(llada, ids, 8)["output_ids"] == greedy(llada, text_of(ids), 8)["output_ids"]


def test_a_list_of_prompts_with_parameters_of_their_own(llada: Server) -> None:
    texts = [prompt(9, seed=4), prompt(30, seed=5)]
    sampling: list[dict[str, Any]] = [
        {"max_new_tokens": 8, "temperature": 0},
        {"max_new_tokens": 5, "temperature": 0, "custom_params": {"block_length": 4, "steps": 2}},
    ]
    answers = llada.post("/generate", {"text": texts, "sampling_params": sampling}).json()
    alone = [llada.generate(text, **params) for text, params in zip(texts, sampling, strict=True)]
    assert [answer["output_ids"] for answer in answers] == [answer["output_ids"] for answer in alone]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0, "custom_params": {"block_length": 24}}, None])
def test_the_default_answer_length_is_used_and_reported(llada: Server, sampling: dict[str, Any] | None) -> None:
    body = {"text": prompt(5), **({} if sampling is None else {"sampling_params": sampling})}
    (diffusion,) = llada.post("/generate", body).json()["meta_info"]["diffusion"]
    assert diffusion["max_new_tokens"] == 256


def test_the_default_is_greedy(llada: Server) -> None:
    text = prompt(12, seed=6)
    assert llada.generate(text, max_new_tokens=16)["output_ids"] == greedy(llada, text, 16)["output_ids"]


def test_no_new_tokens(llada: Server) -> None:
    answer = greedy(llada, prompt(5), 0)
    assert (answer["output_ids"], answer["text"]) == ([], "")
    assert answer["meta_info"]["finish_reason"]["type"] == "length"


# ── streaming ─────────────────────────────────────────────────────────────


def stream(server: Server, body: dict[str, Any]) -> list[dict[str, Any]]:
    streamed = {**body, "stream": True}
    response = requests.post(server.url + "/generate", json=streamed, stream=True, timeout=REQUEST_TIMEOUT_S)
    return list(sse_events(response))


@pytest.mark.parametrize(
    "params",
    [{"block_length": 8, "threshold": 0.9}, {"block_length": 16, "steps": 20, "cache": "none"}, {"block_length": 64}],
    ids=str,
)
def test_a_stream_grows_and_never_takes_back(llada: Server, params: dict[str, Any]) -> None:
    sampling = {"max_new_tokens": 48, "temperature": 0, "custom_params": params}
    body = {"text": prompt(20, seed=7), "sampling_params": sampling}
    whole = llada.generate(prompt(20, seed=7), **sampling)
    events = stream(llada, body)
    assert len(events) > 1
    for key in ("text", "output_ids"):
        parts = [event[key] for event in events]
        assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(parts))
        assert parts[-1] == whole[key]
    lengths = [len(event["output_ids"]) for event in events]
    assert min(lengths) > 0
    assert [event["meta_info"]["finish_reason"] is None for event in events] == [True] * (len(events) - 1) + [False]


def test_a_streamed_answer_ends_where_it_would(llada: Server) -> None:
    sampling = {"max_new_tokens": 64, "temperature": 0, "custom_params": ENDING}
    body = {"text": prompt(23, seed=1), "sampling_params": sampling}
    whole, events = llada.generate(prompt(23, seed=1), **sampling), stream(llada, body)
    assert events[-1]["text"] == whole["text"]
    assert not any("<|" in event["text"] for event in events)


# ── where an answer ends ──────────────────────────────────────────────────


def test_end_of_turn_ends_an_answer_and_ignore_eos_does_not(llada: Server) -> None:
    text, sampling = prompt(23, seed=1), {"max_new_tokens": 64, "temperature": 0, "custom_params": ENDING}
    ended = llada.generate(text, **sampling)
    end = LLADA_SPEC.special("<|eot_id|>")
    assert len(ended["output_ids"]) == 42
    assert ended["output_ids"][-1] == end
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": end}
    assert ended["meta_info"]["diffusion"][0]["forward_passes"] < 64, "blocks after the end were run"
    ignored = llada.generate(text, **sampling, ignore_eos=True)
    assert len(ignored["output_ids"]) == 64
    assert ignored["output_ids"][:42] == ended["output_ids"]


@pytest.mark.parametrize("trim", [True, False])
def test_a_stop_string_ends_an_answer(llada: Server, trim: bool) -> None:
    text, params = prompt(20, seed=7), {"block_length": 8}
    words = greedy(llada, text, 48, **params)["text"].split()
    stop = next(word for index, word in enumerate(words) if index > 10 and word not in words[:index])
    answer = llada.generate(
        text, max_new_tokens=48, temperature=0, stop=[f" {stop}"], no_stop_trim=not trim, custom_params=params
    )
    assert answer["text"].split() == words[: words.index(stop) + (not trim)]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": f" {stop}"}


def test_a_stop_token_ends_an_answer(llada: Server) -> None:
    text, params = prompt(20, seed=7), {"block_length": 8}
    tokens = greedy(llada, text, 48, **params)["output_ids"]
    stop = next(token for index, token in enumerate(tokens) if index > 10 and token not in tokens[:index])
    answer = llada.generate(text, max_new_tokens=48, temperature=0, stop_token_ids=[stop], custom_params=params)
    assert answer["output_ids"] == tokens[: tokens.index(stop) + 1]
    assert answer["text"].split() == text_of(tokens[: tokens.index(stop)]).split()


# ── sampling, each request its own ────────────────────────────────────────

MIXED: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.7, "sampling_seed": 1},
    {"temperature": 1.5, "sampling_seed": 1},
    {"temperature": 1.5, "sampling_seed": 2},
    {"temperature": 1.5, "top_p": 0.5, "sampling_seed": 2},
    {"temperature": 1.5, "top_k": 2, "sampling_seed": 2},
    {"temperature": 1.0, "top_k": 1, "sampling_seed": 3},
    {"temperature": 1.0, "sampling_seed": -5, "custom_params": {"remasking": "random", "steps": 8}},
    {"temperature": 0, "sampling_seed": 4, "custom_params": {"remasking": "origin", "steps": 8}},
)


def test_a_mixed_batch_gives_each_request_what_it_gets_alone(llada: Server) -> None:
    text = prompt(16, seed=8)

    def ask(sampling: dict[str, Any]) -> list[int]:
        return list(llada.generate(text, max_new_tokens=32, **sampling)["output_ids"])

    alone = [ask(sampling) for sampling in MIXED]
    with ThreadPoolExecutor(2 * len(MIXED)) as pool:
        together = list(pool.map(ask, [*MIXED, *MIXED]))
    assert together == [*alone, *alone]
    greedy_answer, *sampled = alone
    assert alone[6] == greedy_answer, "top_k 1 is greedy"
    assert len({tuple(answer) for answer in sampled[:5]}) == 5, "seed, temperature, top_p and top_k all matter"


def test_samples_differ_without_a_seed_and_greedy_ones_do_not(llada: Server) -> None:
    for temperature, distinct in ((2.0, 4), (0, 1)):
        body = {"text": prompt(8), "sampling_params": {"n": 4, "max_new_tokens": 16, "temperature": temperature}}
        answers = llada.post("/generate", body).json()
        assert len(answers) == 4
        assert len({tuple(answer["output_ids"]) for answer in answers}) == distinct


# ── infilling ─────────────────────────────────────────────────────────────


def test_a_suffix_as_text_or_as_ids(llada: Server) -> None:
    left, right = prompt(10, seed=9), prompt_ids(12, seed=10)
    by_text = greedy(llada, left, 8, suffix=text_of(right))
    by_ids = greedy(llada, left, 8, suffix_ids=right)
    assert by_text["output_ids"] == by_ids["output_ids"]
    assert by_text["output_ids"] != greedy(llada, left, 8)["output_ids"]
    assert by_text["meta_info"]["prompt_tokens"] == 22


def test_a_hole_at_the_very_beginning(llada: Server) -> None:
    response = llada.post(
        "/generate", {"text": "", "sampling_params": {"max_new_tokens": 8, "custom_params": {"suffix": prompt(12)}}}
    )
    assert response.status_code == 200, response.text
    assert len(response.json()["output_ids"]) == 8


# ── log-probabilities ─────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def oracle(checkpoint: Callable[[str], Path]) -> TransformersOracle:
    return TransformersOracle(checkpoint("llada"))


def test_logprobs_are_those_of_the_committing_step(llada: Server, oracle: TransformersOracle) -> None:
    """One step commits the whole answer, so the oracle's forward of prompt and masks gives every logprob."""
    left, new = prompt_ids(23, seed=1), 6
    sampling = {"max_new_tokens": new, "temperature": 0, "custom_params": {"block_length": new, "steps": 1}}
    body = {"input_ids": left, "return_logprob": True, "top_logprobs_num": 3, "sampling_params": sampling}
    meta = llada.post("/generate", body).json()["meta_info"]
    logits = oracle.logits(torch.tensor([*left, *[LLADA_SPEC.mask_id] * new]))[len(left) :]
    logits[:, LLADA_SPEC.mask_id] = -torch.inf
    values, ids = torch.log_softmax(logits, dim=-1).topk(3)
    assert [token for _, token, _ in meta["output_token_logprobs"]] == ids[:, 0].tolist()
    assert [value for value, _, _ in meta["output_token_logprobs"]] == pytest.approx(values[:, 0].tolist(), abs=1e-4)
    for row, alternatives in enumerate(meta["output_top_logprobs"]):
        assert [token for _, token, _ in alternatives] == ids[row].tolist()
        assert [value for value, _, _ in alternatives] == pytest.approx(values[row].tolist(), abs=1e-4)


def test_logprobs_of_some_requests_of_a_batch(llada: Server) -> None:
    def ask(wanted: int) -> dict[str, Any]:
        sampling = {"max_new_tokens": 24, "temperature": 0, "custom_params": {"block_length": 8}}
        body: dict[str, Any] = {"text": prompt(20, seed=11), "sampling_params": sampling}
        if wanted:
            body |= {"return_logprob": True, "top_logprobs_num": wanted}
        return dict(llada.post("/generate", body).json())

    with ThreadPoolExecutor(9) as pool:
        answers = list(pool.map(ask, [0, 1, 5] * 3))
    assert len({tuple(answer["output_ids"]) for answer in answers}) == 1
    for answer, wanted in zip(answers, [0, 1, 5] * 3, strict=True):
        meta = answer["meta_info"]
        assert ("output_token_logprobs" in meta) == bool(wanted)
        if wanted:
            assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]
            assert {len(row) for row in meta["output_top_logprobs"]} == {wanted}


# ── the prompt is kept as it is ───────────────────────────────────────────


def test_the_mask_tokens_text_in_a_prompt_is_ordinary_text(llada: Server) -> None:
    ids = [*prompt_ids(5, seed=12), LLADA_SPEC.mask_id, *prompt_ids(5, seed=13)]
    text = f"{prompt(5, seed=12)} <|mdm_mask|> {prompt(5, seed=13)}"
    answers = [greedy(llada, form, 16, block_length=8) for form in (ids, text)]
    assert answers[0]["output_ids"] == answers[1]["output_ids"]
    assert answers[0]["meta_info"]["prompt_tokens"] == 11
    assert LLADA_SPEC.mask_id not in answers[0]["output_ids"]
