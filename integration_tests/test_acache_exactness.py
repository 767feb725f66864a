"""Greedy answers with reuse equal the plain reference of the method, token for token, alone and in batches.

The reference also counts: every answer's ``meta_info.acache`` is compared with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from integration_tests.conftest import LLADA_SPEC, REUSING
from integration_tests.oracle.reference_acache import Affix
from integration_tests.prompts import prompt_ids
from integration_tests.reuse_cases import (
    Case,
    ReuseReference,
    account_of,
    ask,
    ask_together,
    assert_as_expected,
    declare,
    document_case,
    flush,
    forget,
    known_spans,
)
from integration_tests.server import Server

World = tuple[Server, ReuseReference]

SPECIAL = [LLADA_SPEC.mask_id, LLADA_SPEC.eos_id, LLADA_SPEC.mask_id, *range(30), LLADA_SPEC.mask_id]

LAYOUTS: dict[str, Case] = {
    "prefix": Case(prompt_ids(60, 1), spans=(Affix(0, 45),)),
    "prefix-to-the-answer": Case(prompt_ids(50, 2), spans=(Affix(0, 50),)),
    "infix": Case(prompt_ids(70, 3), spans=(Affix(9, 58),)),
    "suffix": Case(prompt_ids(15, 4), prompt_ids(50, 5), (Affix(18, 65),)),
    "suffix-from-the-answer": Case(prompt_ids(12, 6), prompt_ids(40, 7), (Affix(12, 52),)),
    "several": Case(prompt_ids(80, 8), prompt_ids(40, 9), (Affix(0, 30), Affix(37, 72), Affix(85, 118))),
    "touching": Case(prompt_ids(64, 10), spans=(Affix(0, 30), Affix(30, 60))),
    "everything": Case(prompt_ids(40, 11), prompt_ids(30, 12), (Affix(0, 40), Affix(40, 70))),
    "one-token": Case(prompt_ids(20, 13), spans=(Affix(7, 8),)),
    "last-token": Case(prompt_ids(20, 14), spans=(Affix(19, 20),)),
    "special-tokens": Case([5, *SPECIAL, 9, 8], SPECIAL, (Affix(1, 1 + len(SPECIAL)),)),
}
"""Where spans stand. Under the shift the last prompt token is never shared: the span of it alone is empty."""

POLICIES: dict[str, tuple[dict[str, Any], str]] = {
    "default": ({}, "dual"),
    "half": ({"anchor_ratio": 0.5}, "prefix"),
    "direct": ({"anchor_ratio": 0.0}, "dual"),
    "direct-prefix": ({"anchor_ratio": 0}, "prefix"),
    "all": ({"anchor_ratio": 1.0}, "dual"),
    "affix": ({"selector": "attention_affix"}, "prefix"),
    "affix-half": ({"selector": "attention_affix", "anchor_ratio": 0.5}, "dual"),
    "uncached": ({}, "none"),
    "first": ({"selector": "first"}, "dual"),
    "bottom": ({"selector": "bottom", "anchor_ratio": 0.5}, "prefix"),
    "random": ({"selector": "random", "seed": 7}, "dual"),
    "deviation": ({"selector": "kv_deviation"}, "dual"),
    "dropped": ({"selector": "drop_non_anchors"}, "prefix"),
    "coverage": ({"coverage": 0.4, "anchor_ratio": 0.5}, "dual"),
    "coverage-alone": ({"coverage": 0.6, "anchor_ratio": 1.0}, "dual"),
    "fused": ({"probe": "fused"}, "dual"),
    "fused-half": ({"probe": "fused", "anchor_ratio": 0.5, "selector": "attention_affix"}, "prefix"),
    "fused-direct": ({"probe": "fused", "anchor_ratio": 0.0}, "dual"),
}
"""``custom_params.acache`` and the cache inside the request."""


def cases_of(layout: str) -> list[Case]:
    base = LAYOUTS[layout]
    return [replace(base, acache=acache, params={"cache": cache}) for acache, cache in POLICIES.values()]


@pytest.fixture(scope="session")
def references(checkpoint: Callable[[str], Path]) -> Callable[[str], ReuseReference]:
    made: dict[str, ReuseReference] = {}

    def of(kind: str) -> ReuseReference:
        if kind not in made:
            made[kind] = ReuseReference.of_spec(checkpoint(kind), REUSING[kind].spec)
        return made[kind]

    return of


@pytest.fixture
def world(reusing: tuple[str, Server], references: Callable[[str], ReuseReference]) -> Iterator[World]:
    """A server with nothing in its cache, and the reference for its checkpoint."""
    kind, server = reusing
    flush(server)
    yield server, references(kind)
    for span in known_spans(server).values():
        if span["source"] == "declared":
            forget(server, span["name"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_policy_in_one_batch(world: World, layout: str) -> None:
    server, reference = world
    cases = cases_of(layout)
    answers = ask_together(server, cases)
    for case, answer in zip(cases, answers, strict=True):
        assert_as_expected(answer, reference.expect(case))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_alone(world: World, layout: str) -> None:
    server, reference = world
    for case in cases_of(layout)[:: 1 + len(LAYOUTS) // 3]:
        assert_as_expected(ask(server, case), reference.expect(case))


def test_reuse_changes_answers(world: World) -> None:
    """Or the tests above would prove nothing."""
    _, reference = world
    changed = [
        reference.expect(case).output != reference.plain(case)
        for layout in ("prefix", "infix", "suffix", "several")
        for case in cases_of(layout)[:3]
    ]
    assert sum(changed) > len(changed) // 2


DOCUMENT = prompt_ids(60, seed=400)


def nested(before: int, cuts: tuple[int, ...], **changes: Any) -> Case:
    case = document_case(DOCUMENT, before, 9, seed=401, **changes)
    (span,) = case.spans
    return replace(case, spans=(replace(span, cuts=tuple(before + cut for cut in cuts)),))


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("cuts", [(20,), (17, 40)])
def test_a_declared_span_inside_another(world: World, cuts: tuple[int, ...], named: bool) -> None:
    server, reference = world
    for cut in (len(DOCUMENT), *cuts):  # the order does not matter
        declare(server, ids=DOCUMENT[:cut], name=f"first-{cut}")
    cases = [nested(before, cuts, named=named) for before in (5, 0, 11)]
    for case in cases:
        answer = ask(server, case)
        assert_as_expected(answer, reference.expect(case))
        (span,) = account_of(answer)["spans"]
        assert (span["source"], span["name"]) == ("declared", f"first-{len(DOCUMENT)}")
    for case, answer in zip(cases, ask_together(server, cases), strict=True):
        assert_as_expected(answer, reference.expect(case))


def test_the_nodes_of_nested_spans_matter(world: World) -> None:
    _, reference = world
    assert reference.expect(nested(5, (20,))).output != reference.expect(nested(5, ())).output


def test_a_named_span_does_not_see_what_else_is_declared(world: World) -> None:
    server, reference = world
    alone = nested(5, ())
    declare(server, ids=DOCUMENT[:20], name="part")
    answer = ask(server, alone)
    assert_as_expected(answer, reference.expect(alone))
    assert account_of(answer)["spans"][0]["source"] == "request"


@pytest.mark.parametrize("together", [False, True])
def test_one_span_at_many_offsets(world: World, together: bool) -> None:
    server, reference = world
    cases = [document_case(DOCUMENT, before, 6, seed=410 + before) for before in (8, 0, 31, 8, 3)]
    suffix = Case(prompt_ids(10, 420), [*prompt_ids(4, 421), *DOCUMENT], (Affix(14, 74),))
    cases.append(suffix)
    answers = ask_together(server, cases) if together else [ask(server, case) for case in cases]
    for case, answer in zip(cases, answers, strict=True):
        assert_as_expected(answer, reference.expect(case))
    rebased = [account_of(answer)["spans"][0]["rebased"] for answer in answers]
    if together:
        assert 4 <= sum(rebased) < len(cases), "encoded once, copied to every other offset"
    else:
        assert rebased == [False, True, True, False, True, True]


def test_nothing_is_found_without_discovery(world: World) -> None:
    server, reference = world
    case = replace(document_case(DOCUMENT, 8, 6, seed=430), spans=(), new_tokens=24)
    for _ in range(4):
        answer = ask(server, case)
        assert answer["meta_info"]["cached_tokens"] == 0
        assert_as_expected(answer, reference.expect(case))


def test_remembered_importance(world: World) -> None:
    """The first request probes; later ones of the same span take its importance, and skip the probe."""
    server, _ = world
    case = document_case(DOCUMENT, 8, 6, seed=440, acache={"probe": "remembered"})
    first, second = ask(server, case), ask(server, case)
    assert first["output_ids"] == second["output_ids"], "the same request remembers its own importance"
    probe = case.canvas_tokens - len(DOCUMENT)
    told = [account_of(answer) for answer in (first, second)]
    assert told[0]["recompute_tokens"] - told[1]["recompute_tokens"] == probe
    assert told[1]["recompute_tokens_saved"] - told[0]["recompute_tokens_saved"] == probe
    assert told[0]["anchor_tokens"] == told[1]["anchor_tokens"] == 12
    assert told[1]["probe_ms"] == 0.0 < told[0]["probe_ms"]
