"""SGLang's frontend language against a diffusion LLM."""

from __future__ import annotations

from typing import Any

import pytest
import sglang

from integration_tests.prompts import prompt
from integration_tests.server import Server


@pytest.fixture
def backend(llada: Server) -> Any:
    return sglang.RuntimeEndpoint(llada.url)


@sglang.function
def two_answers(s: Any, question: str) -> None:
    s += question
    s += sglang.gen("first", max_tokens=8, temperature=0)
    s += " w1 w2"
    s += sglang.gen("second", max_tokens=8, temperature=0)


@sglang.function
def branches(s: Any, question: str, count: int) -> None:
    s += question
    forks = s.fork(count)
    for index, fork in enumerate(forks):
        fork += f" w{index}"
        fork += sglang.gen("branch", max_tokens=8, temperature=0)
    forks.join()
    s += "".join(fork["branch"] for fork in forks)
    s += sglang.gen("end", max_tokens=8, temperature=0)


def plain(server: Server, text: str, new_tokens: int = 8) -> str:
    return str(server.generate(text, max_new_tokens=new_tokens, temperature=0)["text"])


def test_gen(llada: Server, backend: Any) -> None:
    state = two_answers.run(question=prompt(10), backend=backend)
    first = plain(llada, prompt(10))
    assert state["first"] == first
    assert state["second"] == plain(llada, f"{prompt(10)}{first} w1 w2")
    assert state.text() == f"{prompt(10)}{first} w1 w2{state['second']}"


def test_fork(llada: Server, backend: Any) -> None:
    state = branches.run(question=prompt(10), count=3, backend=backend)
    parts = [plain(llada, f"{prompt(10)} w{index}") for index in range(3)]
    assert state["end"] == plain(llada, prompt(10) + "".join(parts))


def test_run_batch(llada: Server, backend: Any) -> None:
    questions = [prompt(5 + index, seed=index) for index in range(8)]
    states = two_answers.run_batch([{"question": one} for one in questions], backend=backend, num_threads=8)
    assert [state["first"] for state in states] == [plain(llada, one) for one in questions]


def test_streaming(llada: Server, backend: Any) -> None:
    state = two_answers.run(question=prompt(10), backend=backend, stream=True)
    pieces = list(state.text_iter())
    whole = two_answers.run(question=prompt(10), backend=backend)
    assert "".join(pieces) == whole.text()
    assert len(pieces) > 2


def test_a_choice_needs_input_logprobs_and_says_so(llada: Server, backend: Any) -> None:
    @sglang.function
    def choice(s: Any) -> None:
        s += prompt(10) + sglang.gen("pick", choices=[" w1", " w2"])

    state = choice.run(backend=backend)
    assert state.error() is not None
    llada.assert_healthy()
