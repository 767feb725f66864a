"""What reuse must never do (method section 6): depend on who else is there, lose a slot, disturb a reader."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests

from integration_tests.conftest import REUSING
from integration_tests.oracle.reference_acache import Affix, budget
from integration_tests.prompts import prompt_ids
from integration_tests.reuse_cases import (
    PLAIN_ACCOUNT,
    Case,
    ReuseReference,
    account_of,
    ask,
    ask_together,
    declare,
    document_case,
    flush,
    forget,
    known_spans,
    spans_usage,
)
from integration_tests.server import REQUEST_TIMEOUT_S, Server, sse_events
from integration_tests.test_acache_exactness import LAYOUTS, POLICIES, cases_of

DOCUMENT = prompt_ids(100, seed=500)
SLOW = {"steps": 192, "cache": "none"}
"""With 192 new tokens: as many forwards of the recompute set, time to do something to the request."""


@pytest.fixture
def server(reusing: tuple[str, Server]) -> Iterator[Server]:
    """A server that starts and ends with no span, holds no slot in the end, and has had no fault."""
    _, running = reusing
    flush(running)
    yield running
    assert_settled(running)
    for span in known_spans(running).values():
        if span["source"] == "declared":
            forget(running, span["name"])
    flush(running)
    assert used_tokens(running) == 0


def used_tokens(server: Server) -> int:
    """Slots that are neither free nor evictable."""
    return int(server.get("/v1/loads").json()["loads"][0]["num_used_tokens"])


def assert_settled(server: Server) -> None:
    """Idle: every slot is free or held by a span that nobody reads, and SGLang's own checks found nothing."""
    server.assert_healthy()
    server.wait_idle()
    usage = spans_usage(server)
    assert usage["used"] == usage["evictable"] + usage["pinned"]
    assert (usage["detached"], used_tokens(server)) == (0, usage["pinned"])
    assert all(span["readers"] == 0 for span in known_spans(server).values())


def outputs(answers: Sequence[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def read_by_many(server: Server, document: Sequence[int], offsets: Sequence[int] = (0, 3, 11, 40, 7)) -> None:
    """Other requests read the document, at other offsets, of other lengths, with other budgets, at once."""
    cases = [
        document_case(
            document, before, 5 + index, seed=600 + index, acache={"anchor_ratio": ratio}, new_tokens=9 + 8 * index
        )
        for index, (before, ratio) in enumerate(zip(offsets, (0.0, 0.1, 0.2, 0.5, 0.9), strict=True))
    ]
    ask_together(server, cases)


def push_out(server: Server, document: Sequence[int]) -> None:
    """Read other spans until nothing of the document is encoded."""
    before = spans_usage(server)["evictions"]
    for seed in range(8):
        ask(server, document_case(prompt_ids(500, seed=700 + seed), 2, 2, seed=710, new_tokens=1))
    assert spans_usage(server)["evictions"] > before
    held = [span for span in known_spans(server).values() if span["length"] == len(document)]
    assert all(span["encoded_tokens"] == 0 for span in held)


class TestNoReuse:
    """Invariant 1."""

    @pytest.mark.parametrize("layout", ["prefix-to-the-answer", "infix", "several"])
    def test_ratio_one_and_nothing_to_read(
        self, reusing: tuple[str, Server], server: Server, checkpoint: Callable[[str], Path], layout: str
    ) -> None:
        base = LAYOUTS[layout]
        nothing: list[Case] = [
            replace(base, acache={"anchor_ratio": 1}),
            replace(base, acache={"enabled": False}),
            replace(base, named=False),
            replace(base, named=False, acache={"spans": []}),
        ]
        kind, _ = reusing
        plain = ReuseReference.of_spec(checkpoint(kind), REUSING[kind].spec).plain(base)
        for answer in ask_together(server, nothing):
            assert answer["output_ids"] == plain
            account = account_of(answer)
            assert {name: account[name] for name in PLAIN_ACCOUNT} == PLAIN_ACCOUNT
            assert answer["meta_info"]["cached_tokens"] == 0
        body = base.body()
        del body["sampling_params"]["custom_params"]["acache"]
        assert server.post("/generate", body).json()["output_ids"] == plain


class TestIndependence:
    """Invariant 3, and: an answer depends neither on who else reads a span nor on what was evicted."""

    @pytest.mark.parametrize("named", [True, False])
    def test_of_readers_and_eviction(self, server: Server, named: bool) -> None:
        if not named:
            declare(server, ids=DOCUMENT, name="document")
        wanted = document_case(DOCUMENT, 20, 10, seed=510, named=named, new_tokens=32)
        first = ask(server, wanted)
        assert account_of(first)["affix_tokens"] == len(DOCUMENT)
        flush(server)
        read_by_many(server, DOCUMENT)
        rebased = ask(server, wanted)
        assert account_of(rebased)["spans"][0]["rebased"]
        assert not account_of(first)["spans"][0]["rebased"]
        push_out(server, DOCUMENT)
        encoded_again = ask(server, wanted)
        with ThreadPoolExecutor(1) as pool:
            others = pool.submit(read_by_many, server, DOCUMENT)
            among_others = ask_together(server, [wanted] * 4)
            others.result()
        assert outputs([rebased, encoded_again, *among_others]) == [first["output_ids"]] * 6

    @pytest.mark.parametrize("new_tokens", [8, 16])
    def test_of_what_is_encoded_when_the_answer_is_short(self, server: Server, new_tokens: int) -> None:
        """Whether a declared span pays is judged without looking at who encoded it before."""
        declare(server, ids=DOCUMENT, name="document")
        wanted = document_case(DOCUMENT, 20, 10, seed=520, named=False, new_tokens=new_tokens)
        before = ask(server, wanted)
        ask(server, replace(wanted, new_tokens=64))
        after = ask(server, wanted)
        elsewhere = document_case(DOCUMENT, 33, 10, seed=520, named=False, new_tokens=new_tokens)
        moved = [ask(server, elsewhere), ask(server, elsewhere)]
        for one, other in ((before, after), (moved[0], moved[1])):
            assert account_of(one)["affix_tokens"] == account_of(other)["affix_tokens"]
            assert one["output_ids"] == other["output_ids"]

    def test_of_memory_that_others_hold(self, server: Server) -> None:
        """Spans that do not fit beside those being read are waited for, not passed over."""
        documents = [prompt_ids(600, seed=530 + index) for index in range(6)]
        cases = [document_case(each, 3, 4, seed=540, new_tokens=32) for each in documents]
        alone = [ask(server, case) for case in cases]
        together = ask_together(server, cases)
        assert outputs(together) == outputs(alone)
        assert [account_of(answer)["affix_tokens"] for answer in together] == [600] * 6

    def test_in_a_crowd(self, server: Server) -> None:
        """All layouts and policies at once, in random order, twice: as alone in their own batches."""
        cases = [case for layout in LAYOUTS for case in cases_of(layout)]
        expected = {repr(case): ask(server, case)["output_ids"] for case in cases[:: len(POLICIES) // 3]}
        wanted = cases * 2
        random.Random(0).shuffle(wanted)
        with ThreadPoolExecutor(48) as pool:
            answers = list(pool.map(lambda case: ask(server, case), wanted))
        seen: dict[str, list[int]] = dict(expected)
        for case, answer in zip(wanted, answers, strict=True):
            assert answer["output_ids"] == seen.setdefault(repr(case), answer["output_ids"]), case


def slow_case(index: int, **changes: Any) -> Case:
    fields = {"new_tokens": 192, "params": SLOW, "ignore_eos": True, **changes}
    return document_case(DOCUMENT, index, 4, seed=800 + index, **fields)


@contextlib.contextmanager
def streaming(server: Server, case: Case, **fields: Any) -> Iterator[Iterator[dict[str, Any]]]:
    """A streamed request that has sent its first token; closing it is hanging up."""
    body = case.body(stream=True, **fields)
    with requests.post(server.url + "/generate", json=body, stream=True, timeout=REQUEST_TIMEOUT_S) as response:
        events = sse_events(response)
        next(events)
        yield events


class TestDepartures:
    """Invariant 5: whatever is aborted, left or timed out, no slot is lost and no reader disturbed."""

    def test_aborts_and_disconnects(self, server: Server) -> None:
        staying = [slow_case(index, new_tokens=40, params={}) for index in range(6)]
        alone = outputs([ask(server, case) for case in staying])

        def abort(index: int) -> None:
            with streaming(server, slow_case(10 + index), rid=f"aborted-{index}") as events:
                server.post("/abort_request", {"rid": f"aborted-{index}"})
                last = list(events)[-1]
            assert last["meta_info"]["finish_reason"]["type"] == "abort"

        def hang_up(index: int) -> None:
            with streaming(server, slow_case(20 + index)):
                pass

        def lose_patience(index: int) -> None:
            body = slow_case(30 + index).body()
            with contextlib.suppress(requests.Timeout):
                requests.post(server.url + "/generate", json=body, timeout=0.2 * (index + 1))

        with ThreadPoolExecutor(24) as pool:
            leaving = [pool.submit(leave, index) for index in range(4) for leave in (abort, hang_up, lose_patience)]
            together = outputs(list(pool.map(lambda case: ask(server, case), staying)))
            for one in leaving:
                one.result()
        assert together == alone
        server.post("/abort_request", {"abort_all": True})
        assert_settled(server)

    def test_everything_is_aborted_at_once(self, server: Server) -> None:
        """Some encode, some probe, some denoise, some wait: readers of ten spans, most of them new."""
        cases = [
            replace(slow_case(index % 7), left=[*prompt_ids(index, 1), *prompt_ids(150, 810 + index % 10)],
                    spans=(Affix(index, index + 150),), acache=dict(list(POLICIES.values())[index % len(POLICIES)][0]))
            for index in range(48)
        ]  # fmt: skip
        with ThreadPoolExecutor(len(cases)) as pool:
            pending = [pool.submit(server.post, "/generate", case.body()) for case in cases]
            for _ in range(20):
                time.sleep(0.1)
                server.post("/abort_request", {"abort_all": True})
            answers = [one.result() for one in pending]
        assert {answer.status_code for answer in answers} <= {200, 503}
        assert_settled(server)

    def test_flush_and_forgetting_while_it_is_read(self, server: Server) -> None:
        """Readers keep what they read, whatever happens to the span."""
        declare(server, ids=DOCUMENT, name="document", pinned=True)
        wanted = slow_case(5, named=False)
        alone = ask(server, wanted)["output_ids"]
        done = threading.Event()

        def disturb() -> None:
            while not done.is_set():
                server.post("/flush_cache", {})
                forget(server, "document")
                declare(server, ids=DOCUMENT[:60], name="part")  # another tree over the same tokens
                ask(server, slow_case(9, new_tokens=8, params={}, spans=(Affix(9, 69),)))
                forget(server, "part")
                declare(server, ids=DOCUMENT, name="document", pinned=True)

        with streaming(server, wanted) as events, ThreadPoolExecutor(1) as pool:
            disturbing = pool.submit(disturb)
            last = list(events)[-1]
            done.set()
            disturbing.result()
        assert last["output_ids"] == alone
        assert account_of(last)["affix_tokens"] == len(DOCUMENT)

    @pytest.mark.parametrize("mode", ["retract", "in_place"])
    def test_pause(self, server: Server, mode: str) -> None:
        """Requests that SGLang puts back in the queue give up what they read, and read it again, though it was flushed.

        Those that stay where they are keep it: a flush is refused.
        """
        cases = [slow_case(index, new_tokens=64, params={"steps": 64, "cache": "none"}) for index in range(4)]
        with ThreadPoolExecutor(len(cases)) as pool:
            pending = [pool.submit(ask, server, case) for case in cases]
            flushed = []
            for _ in range(3):
                time.sleep(0.3)
                assert server.post("/pause_generation", {"mode": mode}).status_code == 200
                flushed.append(server.post("/flush_cache", {}).status_code == 200)
                assert server.post("/continue_generation", {}).status_code == 200
            answers = [one.result() for one in pending]
        assert flushed[0] == (mode == "retract")
        assert [len(answer["output_ids"]) for answer in answers] == [64] * 4
        assert all(account_of(answer)["affix_tokens"] == len(DOCUMENT) for answer in answers)


def test_time_outs(impatient: Server) -> None:
    """The server itself ends what runs for too long."""
    quick = slow_case(3, new_tokens=8, params={})
    alone = ask(impatient, quick)["output_ids"]
    endless = {"steps": 2048, "cache": "none"}
    cases = [slow_case(index, new_tokens=800, params=endless) for index in range(4)]
    with ThreadPoolExecutor(len(cases)) as pool:
        answers = list(pool.map(lambda case: impatient.post("/generate", case.body()), cases))
    for answer in answers:
        assert answer.status_code == 503
        assert "timeout" in answer.text
    assert_settled(impatient)
    assert ask(impatient, quick)["output_ids"] == alone


class TestMemory:
    @pytest.mark.parametrize(("ratio", "acache"), [(0.2, {}), (0.5, {"selector": "attention_affix"})])
    def test_sixteen_requests_over_one_prefix(self, server: Server, ratio: float, acache: dict[str, Any]) -> None:
        """Each request holds r L + (T - L) slots of its own, and all of them together L shared ones."""
        prefix, own, hole = prompt_ids(120, seed=900), 8, 96
        cases = [
            Case(
                [*prefix, *prompt_ids(own, seed=901 + index)],
                spans=(Affix(0, len(prefix)),),
                new_tokens=hole,
                params={"steps": hole, "cache": "none"},
                ignore_eos=True,
                acache={"anchor_ratio": ratio, **acache},
            )
            for index in range(16)
        ]
        private = budget(ratio, len(prefix)) + cases[0].canvas_tokens - len(prefix)
        assert held_together(server, cases) == 16 * private + len(prefix)
        whole = [replace(case, acache={"enabled": False}) for case in cases]
        assert held_together(server, whole) == 16 * cases[0].canvas_tokens

    def test_fresh_keys_to_compare_cost_slots_for_a_moment_only(self, server: Server) -> None:
        """``kv_deviation`` needs the whole canvas until its anchors are chosen; then it gives back the rest."""
        case = slow_case(2, acache={"selector": "kv_deviation"})
        with streaming(server, case):
            expected = budget(0.2, len(DOCUMENT)) + case.canvas_tokens
            assert used_tokens(server) == expected


def held_together(server: Server, cases: Sequence[Case]) -> int:
    """Slots in use while all of the requests run; then they are left."""
    flush(server)
    with contextlib.ExitStack() as running, ThreadPoolExecutor(len(cases)) as pool:
        list(pool.map(lambda case: running.enter_context(streaming(server, case)), cases))
        load = server.get("/v1/loads").json()["loads"][0]
        assert load["num_running_reqs"] == len(cases), "one is done before another has begun: make them longer"
    return int(load["num_used_tokens"])
