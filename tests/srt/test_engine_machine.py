"""Requests that share text come, are denoised, aborted, put back; spans are declared, evicted, flushed; any order."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_acache.core.reuse_params import SELECTORS, ReuseParams
from tests.srt.fakes import WORDS, World, fake_request

TEXTS = [[(7 * i + 13 * k * k + k) % WORDS for k in range(n)] for i, n in enumerate((12, 20, 33, 20))]
RATIOS = (0.0, 0.2, 0.5, 1.0)


class EngineMachine(RuleBasedStateMachine):
    shift_logits = False

    def __init__(self) -> None:
        super().__init__()
        self.world = World(slots=260, shift_logits=self.shift_logits)
        self.count = 0

    @rule(
        parts=st.lists(st.sampled_from(range(len(TEXTS))), min_size=1, max_size=3),
        own=st.lists(st.integers(0, WORDS - 1), max_size=6),
        right=st.sampled_from([None, *range(len(TEXTS))]),
        answer=st.integers(1, 14),
        ratio=st.sampled_from(RATIOS),
        selector=st.sampled_from(SELECTORS),
        probe=st.sampled_from(["request", "fused", "remembered"]),
        enabled=st.booleans(),
    )
    def arrive(self, parts, own, right, answer, ratio, selector, probe, enabled) -> None:  # type: ignore[no-untyped-def]
        self.count += 1
        tokens = [token for part in parts for token in TEXTS[part]] + own
        reuse = ReuseParams(enabled=enabled, anchor_ratio=ratio, selector=selector, probe=probe)
        suffix = None if right is None else TEXTS[right]
        self.world.engine.try_admit(fake_request(f"r{self.count}", tokens, answer, reuse, right=suffix))

    @rule(times=st.integers(1, 6))
    def run(self, times: int) -> None:
        for _ in range(times):
            self.world.step()
            self.world.check()

    @precondition(lambda self: self.world.engine.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.world.release([data.draw(st.sampled_from(self.world.engine.live))])

    @precondition(lambda self: self.world.engine.live)
    @rule(data=st.data())
    def retract(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.world.engine.live))
        committed = request.state.canvas.committed_prefix()
        self.world.release([request])
        if self.world.engine.try_admit(request):
            assert request.state.canvas.committed_prefix() == committed
            assert request.state.at_block_start

    @rule(text=st.sampled_from(range(len(TEXTS))), pinned=st.booleans())
    def declare(self, text: int, pinned: bool) -> None:
        self.world.tree.declare("[null, null]", TEXTS[text], f"text{text}", pinned)

    @rule(tokens=st.integers(1, 200))
    def evict(self, tokens: int) -> None:
        self.world.tree.evict(tokens)

    @rule()
    def flush(self) -> None:
        """SGLang flushes only when no request runs; encodings in the background may be under way."""
        if self.world.engine.live:
            self.world.tree.flush()
        else:
            self.world.cache.reset()

    @invariant()
    def adds_up(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.release(list(self.world.engine.live))
        for _ in range(3):
            self.world.step()  # background encodings end
        self.world.tree.flush()
        assert self.world.allocator.available_size() == self.world.allocator.size, "slots leaked"
        assert len(self.world.rows.free_slots) == 8


class ShiftedEngineMachine(EngineMachine):
    """Dream: the position before the answer must never be read from a shared slot."""

    shift_logits = True

    @invariant()
    def last_prompt_position_is_forwarded(self) -> None:
        for request in self.world.engine.live:
            before = request.state.canvas.gen_start - 1
            assert request.state.write_slot_map[before] >= 0


def test_parallel_samples_are_no_evidence_that_text_recurs() -> None:
    world = World(slots=260)
    for sample in range(3):
        request = fake_request(f"r{sample}", TEXTS[2], 4, ReuseParams(), group="one prompt")
        assert world.engine.try_admit(request)
    assert not world.affixes.has_background_work


def test_encodings_and_probes_keep_to_the_budget() -> None:
    world = World(slots=2000)
    world.tree.declare("[null, null]", TEXTS[2])
    requests = [fake_request(f"r{index}", TEXTS[2] + [index] * 40, 24, ReuseParams()) for index in range(6)]
    for request in requests:
        assert world.engine.try_admit(request)
    world.engine.step_tokens = 100
    while world.engine.live:
        assert world.step() <= 100 + requests[0].canvas_tokens  # the longest waiting block start goes whatever its size
    assert all(request.reuse is not None and request.reuse.stats.anchor_tokens for request in requests)


def test_a_refused_admission_evicts_nothing_in_vain() -> None:
    world = World(slots=200)
    world.tree.declare("[null, null]", TEXTS[2])
    first = fake_request("first", TEXTS[2] + [1, 2, 3], 4, ReuseParams())
    assert world.engine.try_admit(first)
    while world.engine.live:
        world.step()
    kept = world.tree.evictable
    assert kept == len(TEXTS[2])
    assert not world.engine.try_admit(fake_request("huge", [5] * 300, 4, ReuseParams()))
    assert world.tree.evictable == kept


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestShiftedEngine = ShiftedEngineMachine.TestCase
TestShiftedEngine.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
