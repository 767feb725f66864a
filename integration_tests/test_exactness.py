"""Greedy answers of a real server equal the plain reference loop over the ``transformers`` oracle, token for token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from integration_tests.conftest import BLOCK_LENGTH, KINDS
from integration_tests.oracle.cached_transformer import CachedTransformer
from integration_tests.oracle.checkpoints import DREAM, LLADA, CheckpointSpec
from integration_tests.oracle.reference_loop import Decoding, generate, predictor_for
from integration_tests.oracle.transformers_oracle import TransformersOracle
from integration_tests.prompts import prompt_ids
from integration_tests.server import Server

DEFAULT_RULE = {"llada": "low_confidence", "dream": "maskgit_plus"}
END_TOKENS: dict[str, Callable[[CheckpointSpec], tuple[int, ...]]] = {
    LLADA: lambda spec: (spec.eos_id, spec.special("<|eot_id|>")),
    DREAM: lambda spec: (spec.eos_id,),
}
"""What ends an answer besides a request's own stop tokens."""


@dataclass(frozen=True)
class Case:
    """One request: prompt and hole, and its ``custom_params``."""

    left: Sequence[int]
    new_tokens: int
    params: dict[str, Any]
    right: Sequence[int] = ()
    stop: tuple[int, ...] = ()


@dataclass
class Reference:
    """The same request, decoded plainly."""

    spec: CheckpointSpec
    rule: str
    oracle: TransformersOracle
    cached: CachedTransformer = field(init=False)

    def __post_init__(self) -> None:
        self.cached = CachedTransformer(self.oracle)

    def answer(self, case: Case) -> list[int]:
        params = {"cache": "dual", **case.params}
        if not params.keys() & {"steps", "threshold", "factor"}:
            params["threshold"] = 0.9
        how = Decoding(
            mask_id=self.spec.mask_id,
            vocab_size=self.spec.vocab_size,
            block_length=params.get("block_length", BLOCK_LENGTH),
            steps=params.get("steps"),
            threshold=params.get("threshold"),
            factor=params.get("factor"),
            rule=params.get("remasking", self.rule),
            shift=self.spec.architecture == DREAM,
            eos_ids=(*END_TOKENS[self.spec.architecture](self.spec), *case.stop),
        )
        predictor = predictor_for(params["cache"], self.cached, self.oracle.logits)
        return generate(predictor, case.left, case.new_tokens, how, case.right).output


@pytest.fixture(scope="session")
def reference(checkpoint: Callable[[str], Path]) -> Callable[[str], Reference]:
    made: dict[str, Reference] = {}

    def of(kind: str) -> Reference:
        if kind not in made:
            made[kind] = Reference(KINDS[kind].spec, DEFAULT_RULE[kind], TransformersOracle(checkpoint(kind)))
        return made[kind]

    return of


def assert_equal(server: Server, reference: Reference, case: Case) -> None:
    custom = {**case.params, **({"suffix_ids": list(case.right)} if case.right else {})}
    answer = server.generate(
        case.left,
        max_new_tokens=case.new_tokens,
        temperature=0,
        stop_token_ids=list(case.stop),
        no_stop_trim=True,
        custom_params=custom,
    )
    assert answer["output_ids"] == reference.answer(case)


CACHES = ("none", "prefix", "dual")
SCHEDULES: tuple[dict[str, Any], ...] = (
    {"threshold": 0.6},
    {"threshold": 1.0},
    {"factor": 1.0},
    {"steps": 4},
    {"steps": 11},
    {"steps": 64},
    {},
)
RULES = ("low_confidence", "maskgit_plus", "topk_margin", "entropy")


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("cache", CACHES)
def test_every_cache_and_schedule(
    served: tuple[str, Server], reference: Callable[[str], Reference], cache: str, schedule: dict[str, Any]
) -> None:
    kind, server = served
    params = {"block_length": 16, "cache": cache, **schedule}
    assert_equal(server, reference(kind), Case(prompt_ids(23, seed=1), 64, params))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("rule", RULES)
def test_every_greedy_rule(
    served: tuple[str, Server], reference: Callable[[str], Reference], rule: str, cache: str
) -> None:
    kind, server = served
    params = {"block_length": 8, "steps": 12, "remasking": rule, "cache": cache}
    assert_equal(server, reference(kind), Case(prompt_ids(17, seed=2), 24, params))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(("left", "new_tokens", "block", "right"), [(1, 1, 1, 0), (5, 13, 5, 3), (40, 33, 32, 0)])
def test_odd_lengths(
    served: tuple[str, Server],
    reference: Callable[[str], Reference],
    left: int,
    new_tokens: int,
    block: int,
    right: int,
    cache: str,
) -> None:
    kind, server = served
    params = {"block_length": block, "cache": cache}
    case = Case(prompt_ids(left, seed=3), new_tokens, params, prompt_ids(right, seed=4))
    assert_equal(server, reference(kind), case)


@pytest.mark.parametrize("cache", CACHES)
def test_infilling(served: tuple[str, Server], reference: Callable[[str], Reference], cache: str) -> None:
    kind, server = served
    case = Case(prompt_ids(12, seed=5), 16, {"block_length": 8, "cache": cache}, prompt_ids(20, seed=6))
    assert_equal(server, reference(kind), case)
    without = server.generate(case.left, max_new_tokens=16, temperature=0, custom_params=case.params)
    assert without["output_ids"] != reference(kind).answer(case), "the suffix does not matter: no test of it"


def test_prompts_that_hold_the_mask_and_other_special_tokens(
    served: tuple[str, Server], reference: Callable[[str], Reference]
) -> None:
    kind, server = served
    spec = KINDS[kind].spec
    left = [*prompt_ids(6, seed=7), spec.mask_id, spec.eos_id, spec.mask_id, *prompt_ids(4, seed=8), spec.mask_id]
    right = [spec.mask_id, *prompt_ids(5, seed=9), spec.mask_id]
    assert_equal(server, reference(kind), Case(left, 16, {"block_length": 8}, right))


def test_an_answer_ends_at_its_first_stop_token(
    served: tuple[str, Server], reference: Callable[[str], Reference]
) -> None:
    kind, server = served
    free = Case(prompt_ids(23, seed=1), 64, {"block_length": 16, "threshold": 0.6})
    tokens = reference(kind).answer(free)
    stop = next(token for index, token in enumerate(tokens) if index >= 20 and token not in tokens[:20])
    stopped = Case(free.left, free.new_tokens, free.params, stop=(stop,))
    assert reference(kind).answer(stopped) == tokens[: tokens.index(stop) + 1]
    assert_equal(server, reference(kind), stopped)
