"""Recurring text is found by itself and reused, on the trained small model; declared text at launch; tenants apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import sglang

from integration_tests.conftest import DECLARED_AT_LAUNCH
from integration_tests.oracle.reference_acache import Affix
from integration_tests.reuse_cases import (
    Case,
    ReuseReference,
    account_of,
    ask,
    ask_together,
    assert_as_expected,
    known_spans,
    spans_usage,
)
from integration_tests.server import Server
from sglang_acache.tiny import fidelity, task, vocabulary

BLOCK_LENGTH = 4
LONG = 128
"""Four blocks of the model's default length, where nobody gives another: one block start would not pay for a probe."""


@pytest.fixture
def tiny(tiny_acache: Server) -> Iterator[Server]:
    """The server, healthy afterwards; what it has discovered stays known, so every test uses facts of its own."""
    yield tiny_acache
    tiny_acache.assert_healthy()
    usage = spans_usage(tiny_acache)
    assert usage["used"] == usage["evictable"] + usage["pinned"]


def case_of(item: task.Item, **changes: Any) -> Case:
    """The request of an item, whose spans are left for the server to find."""
    start, stop = item.affix_span
    shift = item.hole if item.right else 0
    left, right = vocabulary.encode(item.left), vocabulary.encode(item.right)
    fields: dict[str, Any] = {
        "spans": (Affix(start - shift, stop - shift),),
        "new_tokens": item.hole,
        "params": {"block_length": BLOCK_LENGTH, "steps": item.hole},
        "named": False,
    }
    return Case(left, right, **{**fields, **changes})


def as_read(item: task.Item, span: dict[str, Any]) -> Case:
    """The item's request with the span that an answer says was read."""
    start = span["start"] - (item.hole if item.right else 0)
    return case_of(item, spans=(Affix(start, start + span["length"]),))


def own_seed(base: int, layout: str) -> int:
    """Facts, updates and questions depend on the seed alone: two layouts of one seed have all their text in common."""
    return base + task.LAYOUTS.index(layout)


def cached(answer: dict[str, Any]) -> int:
    return int(answer["meta_info"]["cached_tokens"])


def right(answers: list[dict[str, Any]], items: list[task.Item]) -> int:
    return sum(answer["text"].split() == item.answer.split() for answer, item in zip(answers, items, strict=True))


class TestFound:
    @pytest.mark.parametrize("layout", task.LAYOUTS)
    def test_from_the_third_request_on(self, tiny: Server, layout: str) -> None:
        items = task.shared_requests(own_seed(100, layout), 8, layout)
        answers = [ask(tiny, case_of(item)) for item in items]
        assert [cached(answer) > 0 for answer in answers] == [False, False, *[True] * 6]
        length = len(items[0].affix.split())
        for answer, item in zip(answers[2:], items[2:], strict=True):
            account = account_of(answer)
            (span,) = account["spans"]
            assert span["source"] == "discovered"
            assert length <= span["length"] <= length + 4, "the facts, and words that happen to recur beside them"
            assert span["start"] <= item.affix_span[0] <= span["start"] + span["length"]
            assert account["affix_tokens"] - account["anchor_tokens"] == cached(answer)
        assert right(answers, items) >= 6

    def test_many_at_once(self, tiny: Server) -> None:
        """The same facts in three layouts, all at once: found once, copied to every other place."""
        items = [item for layout in task.LAYOUTS for item in task.shared_requests(110, 6, layout)]
        ask_together(tiny, map(case_of, items))
        answers = ask_together(tiny, map(case_of, items))
        assert all(cached(answer) > 0 for answer in answers)
        assert right(answers, items) >= len(items) * 3 // 4

    @pytest.mark.parametrize("layout", task.LAYOUTS)
    def test_as_if_it_had_been_named(self, tiny: Server, layout: str, tiny_reference: ReuseReference) -> None:
        """A span that was found answers as the reference does, and as when the request names it."""
        items = task.shared_requests(own_seed(120, layout), 4, layout)
        *_, last = (ask(tiny, case_of(item)) for item in items)
        (span,) = account_of(last)["spans"]
        found = as_read(items[-1], span)
        assert_as_expected(last, tiny_reference.expect(found))
        named = ask(tiny, replace(found, named=True))
        assert named["output_ids"] == last["output_ids"]
        assert account_of(named)["spans"][0]["source"] == "request"

    def test_not_when_switched_off_for_a_request(self, tiny: Server) -> None:
        items = task.shared_requests(130, 5, "prefix")
        answers = [ask(tiny, case_of(item, acache={"enabled": False})) for item in items]
        assert [cached(answer) for answer in answers] == [0] * 5
        assert cached(ask(tiny, case_of(items[0]))) == 0, "nor was it watched"


class TestTenants:
    @pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
    def test_never_share(self, tiny: Server, field: str) -> None:
        items = task.shared_requests(140 + len(field), 4, "infix")
        mine = [ask(tiny, case_of(item), **{field: "mine"}) for item in items]
        assert [cached(answer) > 0 for answer in mine] == [False, False, True, True]
        others = [ask(tiny, case_of(item), **{field: f"other-{index}"}) for index, item in enumerate(items)]
        nobody = [ask(tiny, case_of(item)) for item in items[:2]]
        assert [cached(answer) for answer in (*others, *nobody)] == [0] * 6
        assert cached(ask(tiny, case_of(items[0]), **{field: "mine"})) > 0


class TestDeclaredAtLaunch:
    def test_listed(self, tiny: Server) -> None:
        known = known_spans(tiny)
        for declared in DECLARED_AT_LAUNCH:
            span = known[declared["name"]]
            assert (span["source"], span["cache_salt"]) == ("declared", declared.get("cache_salt"))
            assert span["pinned"] == declared.get("pinned", False)
            if "ids" in declared:
                assert span["length"] == len(declared["ids"])
            else:  # words at the edges that other neighbours would spell otherwise are left out
                assert len(declared["text"].split()) - 2 <= span["length"] <= len(declared["text"].split())

    @pytest.mark.parametrize(("seed", "name"), [(71, "facts"), (72, "facts-by-ids")])
    @pytest.mark.parametrize("layout", task.LAYOUTS)
    def test_reused_at_once(
        self, tiny: Server, tiny_reference: ReuseReference, seed: int, name: str, layout: str
    ) -> None:
        """A prompt that has nothing else in common with earlier ones answers as if nothing were ever discovered."""
        item = task.shared_requests(seed, 4, layout)[own_seed(0, layout)]
        answer = ask(tiny, case_of(item))
        (span,) = account_of(answer)["spans"]
        assert (span["name"], span["source"]) == (name, "declared")
        assert_as_expected(answer, tiny_reference.expect(as_read(item, span)))

    def test_discovery_does_not_change_it(self, tiny: Server, tiny_reference: ReuseReference) -> None:
        """Other spans over the same tokens are found: parts of the facts, and the facts within other text."""
        facts = vocabulary.encode(str(DECLARED_AT_LAUNCH[0]["text"]))
        for seed in range(3):  # parts of it, and all of it with a common beginning, recur
            filler = vocabulary.encode(" ".join(vocabulary.FILLER[seed : seed + 9]))
            ask(tiny, Case([*filler, *facts[20:70], *filler[::-1]], named=False))
            ask(tiny, Case([*filler, *facts[:40], *filler[::-1]], named=False))
            ask(tiny, Case([*vocabulary.encode(" ".join(vocabulary.FILLER)), *facts, *filler], named=False))
        assert any(span["source"] == "discovered" for span in known_spans(tiny).values())
        item = task.shared_requests(71, 9, "infix")[8]
        answer = ask(tiny, case_of(item))
        (span,) = account_of(answer)["spans"]
        assert span["name"] == "facts"
        case = as_read(item, span)
        assert_as_expected(answer, tiny_reference.expect(case))
        assert_as_expected(ask(tiny, replace(case, named=True)), tiny_reference.expect(case))

    def test_text_found_right_behind_it_is_read_apart(self, tiny: Server, tiny_reference: ReuseReference) -> None:
        """The declared facts keep their own K/V and their own anchors; what follows them is a span beside them."""
        facts = vocabulary.encode(str(DECLARED_AT_LAUNCH[2]["text"]))
        recurring = vocabulary.encode(" ".join(vocabulary.FILLER[:40]))
        told = []
        for seed in range(4):
            question = vocabulary.encode(task.shared_requests(180, 4, "prefix")[seed].left)[-12:]
            case = Case([*facts, *recurring, *question], new_tokens=12, params={"block_length": 4, "steps": 12})
            answer = ask(tiny, replace(case, named=False), cache_salt="tenant")
            told.append((case, answer, account_of(answer)["spans"]))
        first, last = told[0][2], told[-1][2]
        assert [span["name"] for span in first] == ["tenant-facts"]
        declared, found = last
        assert declared == first[0]
        assert found["source"] == "discovered"
        edge, length = declared["start"] + declared["length"], found["length"]
        assert found["start"] == edge
        assert length >= len(recurring)
        case, answer, _ = told[-1]
        spans = (Affix(declared["start"], edge), Affix(edge, edge + length, root=declared["start"]))
        assert_as_expected(answer, tiny_reference.expect(replace(case, spans=spans)))

    def test_of_a_tenant(self, tiny: Server) -> None:
        item = task.shared_requests(71, 10, "prefix")[9]
        answer = ask(tiny, case_of(item), cache_salt="tenant")
        assert account_of(answer)["spans"][0]["name"] == "tenant-facts"
        assert cached(ask(tiny, case_of(item), cache_salt="another")) == 0


@pytest.fixture(scope="session")
def tiny_reference() -> ReuseReference:
    ids = vocabulary.TOKEN_IDS
    ends = (ids[vocabulary.EOS], ids[vocabulary.TURN_END])
    return ReuseReference(Path(fidelity.BUNDLED), len(ids), ends)


class TestPrograms:
    """SGLang's frontend: shared text before a fork, or at the head of a batch, needs no word about it."""

    @pytest.fixture
    def backend(self, tiny: Server) -> Any:
        return sglang.RuntimeEndpoint(tiny.url)

    @pytest.fixture
    def tell(self, tiny: Server) -> Callable[[], float]:
        """Tokens reused so far, from the metrics."""

        def reused() -> float:
            lines = tiny.get("/metrics").text.splitlines()
            return sum(float(line.split()[-1]) for line in lines if line.startswith("acache:tokens_reused_total"))

        return reused

    def test_a_batch(self, tiny: Server, backend: Any) -> None:
        items = task.shared_requests(150, 10, "prefix")
        facts = items[0].affix

        @sglang.function
        def program(s: Any, rest: str) -> None:
            s += facts
            s += rest
            s += sglang.gen("answer", max_tokens=LONG, temperature=0)

        questions = [{"rest": item.left.removeprefix(facts)} for item in items]
        states = program.run_batch(questions, backend=backend, num_threads=4)
        told = [state.get_meta_info("answer") for state in states]
        assert sum(meta["cached_tokens"] > 0 for meta in told) >= 5
        names = {span["source"] for meta in told for span in meta["acache"][0]["spans"]}
        assert names == {"discovered"}

    def test_a_fork(self, tiny: Server, backend: Any) -> None:
        items = task.shared_requests(151, 6, "prefix")
        facts = items[0].affix
        told: list[dict[str, Any]] = []

        @sglang.function
        def program(s: Any) -> None:
            s += facts
            forks = s.fork(len(items))
            for fork, item in zip(forks, items, strict=True):
                fork += item.left.removeprefix(facts)
                fork += sglang.gen("answer", max_tokens=LONG, temperature=0)
            forks.join()
            told.extend(fork.get_meta_info("answer") for fork in forks)

        program.run(backend=backend)
        program.run(backend=backend)
        assert all(meta["cached_tokens"] > 0 for meta in told[len(items) :])


class TestOpenAI:
    @pytest.fixture
    def client(self, tiny: Server) -> openai.OpenAI:
        return openai.OpenAI(base_url=tiny.url + "/v1", api_key="none", max_retries=0)

    def test_chats_that_share_a_system_prompt(self, client: openai.OpenAI) -> None:
        items = task.shared_requests(160, 5, "prefix")
        facts = items[0].affix
        details = []
        for item in items:
            answer = client.chat.completions.create(
                model="default",
                messages=[
                    {"role": "system", "content": facts},
                    {"role": "user", "content": item.left.removeprefix(facts).strip()},
                ],
                max_tokens=LONG,
            )
            assert answer.usage is not None
            details.append(answer.usage.prompt_tokens_details)
        found = [0 if one is None else one.cached_tokens or 0 for one in details]
        assert [tokens > 0 for tokens in found] == [False, False, True, True, True]
        assert min(found[2:]) >= 0.8 * (len(facts.split()) - 2)

    def test_completions(self, client: openai.OpenAI) -> None:
        items = task.shared_requests(161, 4, "suffix")
        found = []
        for item in items:
            answer = client.completions.create(
                model="default", prompt=item.left, suffix=item.right, max_tokens=LONG, temperature=0
            )
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == len(item.left.split()) + len(item.right.split())
            details = answer.usage.prompt_tokens_details
            found.append(0 if details is None else details.cached_tokens or 0)
        assert [tokens > 0 for tokens in found] == [False, False, True, True]


@pytest.mark.parametrize("probe", ["fused", "remembered"])
@pytest.mark.parametrize("layout", task.LAYOUTS)
def test_cheaper_probes_answer_too(tiny: Server, layout: str, probe: str) -> None:
    """A sanity check; what they cost in fidelity is measured by ``bench fidelity``."""
    items = task.shared_requests(170, 8, layout)
    whole = [ask(tiny, case_of(item, named=True, acache={"probe": "request"})) for item in items]
    cheap = [ask(tiny, case_of(item, named=True, acache={"probe": probe})) for item in items]
    rows = [account_of(answer)["recompute_tokens"] for answer in whole]
    assert all(account_of(answer)["recompute_tokens"] < row for answer, row in zip(cheap, rows, strict=True))
    assert right(whole, items) >= 6
    assert all(answer["text"] for answer in cheap)
