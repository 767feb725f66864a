"""What a request reads does not depend on who else is there: it waits for room rather than pass a span over."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_acache.core.reuse_params import ReuseParams
from sglang_acache.srt.live_request import LiveRequest
from tests.srt.fakes import WORDS, World, fake_request

NAMESPACE = "[null, null]"


def text(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, WORDS, length).tolist()


def reader(rid: str, span: list[int], answer: int = 8, *, named: bool = True) -> LiveRequest:
    spans = ((0, len(span)),) if named else ()
    return fake_request(rid, span, answer, ReuseParams(spans=spans))


def affix_tokens(request: LiveRequest) -> int:
    return 0 if request.reuse is None else request.reuse.affix_tokens


def serve_all(world: World, requests: list[LiveRequest]) -> None:
    """As the scheduler does: the head of the queue is admitted or holds the queue."""
    waiting = list(requests)
    for _ in range(500):
        while waiting and (world.engine.try_admit(waiting[0])):
            waiting.pop(0)
        if not waiting and world.engine.idle:
            return
        assert not (waiting and world.engine.idle), "refused though nothing else is there"
        world.step()
        world.check()
    raise AssertionError("never done")


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(
    ("slots", "length"),
    [
        (400, 120),  # two spans are over the cap of half the pool
        (300, 140),  # one span and its request leave no room for another request
    ],
)
def test_spans_that_do_not_fit_beside_others_are_waited_for(slots: int, length: int, named: bool) -> None:
    world = World(slots)
    texts = [text(seed, length) for seed in range(5)]
    if not named:
        for one in texts:
            world.tree.declare(NAMESPACE, one)
    requests = [reader(f"r{index}", one, 8, named=named) for index, one in enumerate(texts)]
    serve_all(world, requests)
    assert [affix_tokens(request) for request in requests] == [length] * 5


def test_what_never_fits_is_not_waited_for() -> None:
    world = World(400)
    long, other = reader("long", text(1, 220)), reader("other", text(2, 20))
    assert world.engine.try_admit(other)
    assert world.engine.try_admit(long), "its span is over the cap whoever is there"
    assert (affix_tokens(long), affix_tokens(other)) == (0, 20)


def test_a_pinned_span_leaves_less_room_to_everyone() -> None:
    world = World(400)
    world.tree.declare(NAMESPACE, text(3, 100), "pinned", pinned=True)
    serve_all(world, [reader("first", text(3, 100))])
    running, wanted = reader("running", text(4, 30)), reader("wanted", text(5, 120))
    assert world.engine.try_admit(running)
    assert world.engine.try_admit(wanted), "beside the pinned span there is never room for it"
    assert affix_tokens(wanted) == 0
    assert world.engine.try_admit(reader("again", text(3, 100))), "the pinned span itself takes no room"


def test_a_discovered_span_is_not_waited_for() -> None:
    world = World(400)
    found = text(6, 120)
    world.tree.insert(NAMESPACE, found)
    assert world.engine.try_admit(reader("holds", text(7, 120)))
    request = reader("wanted", found, named=False)
    assert world.engine.try_admit(request)
    assert affix_tokens(request) == 0


@pytest.mark.parametrize("answer", [4, 8, 16, 64])
def test_a_declared_span_is_read_whatever_is_encoded(answer: int) -> None:
    """Whether it pays is judged by lengths alone."""
    told = []
    for warm in (False, True):
        world = World(600)
        world.tree.declare(NAMESPACE, text(8, 60))
        if warm:
            serve_all(world, [reader("before", text(8, 60), 64, named=False)])
        request = reader("wanted", text(8, 60), answer, named=False)
        serve_all(world, [request])
        told.append(affix_tokens(request))
    assert told[0] == told[1]


def test_ratio_one_with_coverage_may_take_fewer() -> None:
    world = World(400)
    request = fake_request("r", text(9, 40), 8, ReuseParams(anchor_ratio=1.0, coverage=0.5, spans=((0, 40),)))
    serve_all(world, [request])
    assert request.reuse is not None
    assert 0 < request.reuse.stats.anchor_tokens < 40
