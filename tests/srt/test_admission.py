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


class TestDiscoveredBehindDeclared:
    """What was discovered right behind a declared span does not change how the declared one is read."""

    HEAD, TAIL, OWN = text(10, 60), text(11, 30), text(12, 10)

    @staticmethod
    def spans(request: LiveRequest) -> list[tuple[str, int, int]]:
        assert request.reuse is not None
        return [(str(one["source"]), one["start"], one["length"]) for one in request.reuse.stats.spans]  # type: ignore[misc]

    def serve(self, world: World, prompt: list[int], answer: int = 32) -> LiveRequest:
        request = reader("wanted", prompt, answer, named=False)
        serve_all(world, [request])
        return request

    def test_each_has_its_anchors(self) -> None:
        world = World(600)
        world.tree.declare(NAMESPACE, self.HEAD)
        world.tree.insert(NAMESPACE, self.HEAD + self.TAIL)
        request = self.serve(world, self.HEAD + self.TAIL + self.OWN)
        assert self.spans(request) == [("declared", 0, 60), ("discovered", 60, 30)]
        assert request.reuse is not None
        head, tail = request.reuse.reads
        assert [len(read.handle.anchors.positions) for read in (head, tail) if read.handle.anchors] == [12, 6]
        assert tail.handle.anchors is not None
        assert tail.handle.anchors.positions.min() >= 60
        assert request.reuse.private_needed == 132 - 90 + 18

    def test_the_probe_is_paid_by_the_declared_span(self) -> None:
        world = World(600)
        world.tree.declare(NAMESPACE, self.HEAD)
        world.tree.insert(NAMESPACE, self.HEAD + self.TAIL[:12])
        request = self.serve(world, self.HEAD + self.TAIL[:12] + self.OWN)
        assert self.spans(request) == [("declared", 0, 60), ("discovered", 60, 12)]

    def test_a_part_that_does_not_pay_is_left_out(self) -> None:
        world = World(600)
        world.tree.declare(NAMESPACE, self.HEAD)
        world.tree.insert(NAMESPACE, self.HEAD + self.TAIL[:1])
        request = self.serve(world, [*self.HEAD, self.TAIL[0], *self.OWN])
        assert self.spans(request) == [("declared", 0, 60)]

    @pytest.mark.parametrize("found", [False, True])
    def test_it_does_not_make_a_declared_span_pay(self, found: bool) -> None:
        """Alone the short declared span does not earn the probe; the long text behind it does, for itself."""
        world = World(600)
        world.tree.declare(NAMESPACE, self.TAIL)
        if found:
            world.tree.insert(NAMESPACE, self.TAIL + self.HEAD)
        request = self.serve(world, self.TAIL + self.HEAD + self.OWN, 8)
        if found:
            assert self.spans(request) == [("discovered", 30, 60)]
        else:
            assert request.reuse is None

    def test_it_takes_no_room_from_a_declared_span(self) -> None:
        world = World(400)  # at most 200 shared slots
        head, tail, other = text(13, 60), text(14, 100), text(15, 90)
        world.tree.declare(NAMESPACE, head)
        world.tree.declare(NAMESPACE, other)
        world.tree.insert(NAMESPACE, head + tail)
        request = self.serve(world, head + tail + self.OWN + other)
        assert self.spans(request) == [("declared", 0, 60), ("declared", 170, 90)]

    def test_room_is_counted_once(self) -> None:
        """Both parts hold the head's slots; a request that fits alone must wait for others, not read nothing."""
        world = World(400)
        world.tree.declare(NAMESPACE, self.HEAD)
        world.tree.insert(NAMESPACE, self.HEAD + text(16, 100))
        before = fake_request("before", text(17, 40), 20, ReuseParams(enabled=False))
        request = reader("wanted", self.HEAD + text(16, 100) + self.OWN, 150, named=False)
        serve_all(world, [before, request])
        assert affix_tokens(request) == 160


def test_a_hit_is_counted_once_and_where_tokens_are_read() -> None:
    world = World(600)
    head, tail = text(21, 30), text(22, 60)
    world.tree.declare(NAMESPACE, head, "head")
    world.tree.insert(NAMESPACE, head + tail)
    serve_all(world, [reader("both", head + tail, 64, named=False)])
    serve_all(world, [reader("tail alone: the head does not pay", head + tail + text(23, 10), 8, named=False)])
    assert {info.source: info.hits for info in world.tree.spans(NAMESPACE)} == {"declared": 1, "discovered": 2}


def test_a_hit_is_a_request_that_reads() -> None:
    world = World(400)
    world.tree.declare(NAMESPACE, text(18, 60), "one")
    before = fake_request("before", text(17, 40), 300, ReuseParams(enabled=False))
    assert world.engine.try_admit(before)
    request = reader("wanted", text(18, 60), 60, named=False)
    for _ in range(3):
        assert not world.engine.try_admit(request), "there is no room beside the other"
        world.engine._refused = None  # as if slots had come and gone
    serve_all(world, [request])
    (info,) = world.tree.spans(NAMESPACE, source="declared")
    assert info.hits == 1


@pytest.mark.parametrize("selector", ["attention", "kv_deviation", "random"])
def test_a_retracted_request_keeps_its_anchors(selector: str) -> None:
    """Put back in the queue without its K/V, it is admitted again and does not probe again."""
    world = World(400)
    request = fake_request("r", text(19, 60) + text(20, 5), 40, ReuseParams(spans=((0, 60),), selector=selector))
    assert world.engine.try_admit(request)
    for _ in range(5):
        world.step()
        world.check()
    chosen = anchors(request)
    assert len(chosen) == 12
    probed = world.affixes.counters.probe_tokens
    assert (probed > 0) == (selector != "random")
    world.release([request])
    world.check()
    world.tree.flush()
    serve_all(world, [request])
    assert anchors(request) == chosen
    assert world.affixes.counters.probe_tokens == probed


def anchors(request: LiveRequest) -> list[int]:
    assert request.reuse is not None
    (read,) = request.reuse.reads
    assert read.handle.anchors is not None
    return read.handle.anchors.positions.tolist()


def test_ratio_one_with_coverage_may_take_fewer() -> None:
    world = World(400)
    request = fake_request("r", text(9, 40), 8, ReuseParams(anchor_ratio=1.0, coverage=0.5, spans=((0, 40),)))
    serve_all(world, [request])
    assert request.reuse is not None
    assert 0 < request.reuse.stats.anchor_tokens < 40
