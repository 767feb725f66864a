"""An ordinary Llama is served as if this package were not installed.

A plain CPU needs our platform entry point, so "without" means: ``SGLANG_PLUGINS`` names the platform alone, and the
plugin that registers models, flags, hooks and the scheduler is never loaded.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from integration_tests.ordinary_model import write_llama
from integration_tests.prompts import prompt_ids
from integration_tests.server import Server, serve

WITHOUT_PLUGIN = {"SGLANG_PLUGINS": "sglang_acache_cpu"}
FLAGS = ("--max-total-tokens", "8192")

SAMPLING: tuple[dict[str, Any], ...] = (
    {"max_new_tokens": 24, "temperature": 0},
    {"max_new_tokens": 24, "temperature": 0, "frequency_penalty": 0.7, "logit_bias": {"3": 2.0}},
    {"max_new_tokens": 12, "temperature": 0, "regex": "( ?w1[0-9])+", "min_new_tokens": 4},
)


def answers(server: Server) -> list[Any]:
    """Everything a client can see of a few requests, but for times and ids; the second round hits the prefix cache."""
    logprobs = {"return_logprob": True, "logprob_start_len": 0}
    bodies = [
        {"input_ids": prompt_ids(length, seed=length), "sampling_params": one, **logprobs}
        for length in (5, 40, 300)
        for one in SAMPLING
    ]
    with ThreadPoolExecutor(len(bodies)) as pool:
        together = list(pool.map(lambda body: server.post("/generate", body).json(), bodies))
    alone = [server.post("/generate", body).json() for body in bodies]
    server.assert_healthy()
    return [
        (one["output_ids"], one["text"], one["meta_info"]["finish_reason"], one["meta_info"]["prompt_tokens"])
        for one in [*together, *alone]
    ]


def test_the_same_answers_with_and_without_the_plugin(tmp_path: Path) -> None:
    llama = write_llama(tmp_path / "llama")
    with serve(llama, *FLAGS) as server:
        ours = answers(server)
        assert "diffusion_cache" in server.get("/server_info").json()
    with serve(llama, *FLAGS, env=WITHOUT_PLUGIN) as server:
        theirs = answers(server)
        assert "diffusion_cache" not in server.get("/server_info").json()
    assert ours == theirs
    assert len({tuple(tokens) for tokens, *_ in ours}) >= 6
