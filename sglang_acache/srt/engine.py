"""The diffusion runner: which requests are live, what a step forwards, what it commits.

It stands between SGLang's scheduler (queues, ``Req``, pools) and the core (canvas, plan, commit). A request is
admitted only when every slot it will ever need is reserved; from then on nothing can take them away before it ends.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sglang_acache.core.commit import select_commits
from sglang_acache.core.plan import build_plan, denoise_entry, indptr, row_sampling, within_budget
from sglang_acache.core.reuse import Stage
from sglang_acache.srt.affix_cache import AffixCache
from sglang_acache.srt.affixes import Affixes, AffixWork
from sglang_acache.srt.kv_device import AllocatorPool
from sglang_acache.srt.live_request import LiveRequest
from sglang_acache.srt.worker import Choices, DiffusionStep


class DiffusionEngine:
    """``affixes`` is None where nothing is reused across requests."""

    def __init__(
        self,
        *,
        req_to_token_pool: Any,
        slots: AllocatorPool,
        affix_cache: AffixCache,
        mask_token_id: int,
        shift_logits: bool,
        step_tokens: int,
        affixes: Affixes | None = None,
    ) -> None:
        self.req_to_token_pool = req_to_token_pool
        self.slots = slots
        self.affix_cache = affix_cache
        self.mask_token_id = mask_token_id
        self.shift_logits = shift_logits
        self.step_tokens = step_tokens
        self.affixes = affixes
        self.live: list[LiveRequest] = []
        self.steps = 0
        self.stepping: list[LiveRequest] = []  # requests that denoise in the step being run, in order of its entries
        self._work = AffixWork()
        self._refused: tuple[LiveRequest, int] | None = None  # the last refused admission, slots then within reach

    # ── slots ─────────────────────────────────────────────────────────────

    def try_admit(self, request: LiveRequest) -> bool:
        """Reserve a row and every slot of the request; False (and nothing reserved) where they do not fit.

        A request that was refused is looked at again only when other slots are within reach.
        """
        refused, within_reach = self._refused or (None, 0)
        if refused is request and within_reach == self._slots_within_reach():
            return False
        if self.req_to_token_pool.available_size() == 0 or not self._reserve(request):
            self._refused = (request, self._slots_within_reach())
            return False
        request.waiting_since = self.steps
        self.live.append(request)
        return True

    def _slots_within_reach(self) -> int:
        return self.slots.available() + (0 if self.affixes is None else self.affixes.tree.evictable)

    @property
    def idle(self) -> bool:
        """Whether nothing is live or under way that could give slots back."""
        return not self.live and not (self.affixes is not None and self.affixes.has_background_work)

    def _reserve(self, request: LiveRequest) -> bool:
        tokens = request.canvas_tokens
        reuse = None
        if self.affixes is not None:
            no_share = len(request.left_context) - 1 if self.shift_logits else None
            reuse, waits = self.affixes.open(request, tokens, request.block_starts, no_share)
            if waits and not self.idle:
                if reuse is not None:
                    self.affixes.close(reuse)
                return False
        slots = self._allocate(tokens if reuse is None else reuse.private_needed)
        if slots is None and reuse is not None and self.affixes is not None:
            # The spans and the request do not fit together; without them it may. Where they would fit if the request
            # were alone, it waits: its answer must not depend on who else is there.
            waits = self.affixes.fits_alone(reuse) and not self.idle
            self.affixes.close(reuse)
            if waits:
                return False
            reuse = None
            slots = self._allocate(tokens)
        if slots is None:
            return False
        state = request.start(mask_token_id=self.mask_token_id, shift_logits=self.shift_logits)
        request.reuse = reuse
        if reuse is None:
            state.use_private_slots(slots)
        else:
            reuse.begin(state, slots)
        self._take_row(request, slots)
        return True

    def _allocate(self, count: int) -> np.ndarray | None:
        """``count`` private slots, evicting shared ones that nobody reads where the pool is short."""
        missing = count - self.slots.available()
        if missing > 0 and self.affixes is not None and missing <= self.affixes.tree.evictable:
            self.affixes.tree.evict(missing)  # only where it helps: what is evicted must be encoded again
        return self.slots.alloc(count)

    def _take_row(self, request: LiveRequest, slots: np.ndarray) -> None:
        self.req_to_token_pool.alloc([request.req])
        kv = request.req.kv
        kv.kv_allocated_len = kv.kv_committed_len = request.canvas_tokens
        self._own(request, slots)

    def _own(self, request: LiveRequest, slots: np.ndarray) -> None:
        """Tell SGLang which slots are the request's own and what its row reads now."""
        kv = request.req.kv
        kv.cache_protected_len = request.canvas_tokens - len(slots)  # its memory check counts the rest as private
        self.affix_cache.own(kv.req_pool_idx, slots)
        self._write_row(request)

    def _write_row(self, request: LiveRequest) -> None:
        assert request.state is not None
        row = torch.from_numpy(request.state.read_slot_map.astype(np.int32))
        self.req_to_token_pool.write(
            (request.req.kv.req_pool_idx, slice(0, len(row))), row.to(self.req_to_token_pool.device)
        )

    def retire(self, finished: list[LiveRequest]) -> None:
        """Forget requests whose private slots SGLang has released; give back the spans they read."""
        for request in finished:
            if request.reuse is not None and self.affixes is not None and not request.reuse.closed:
                self.affixes.close(request.reuse)
        gone = set(map(id, finished))
        self.live = [request for request in self.live if id(request) not in gone]

    # ── one step ──────────────────────────────────────────────────────────

    def next_step(self) -> DiffusionStep | None:
        """The next ragged forward: encodings and probes of shared spans, then denoising; None when idle."""
        self._work = AffixWork() if self.affixes is None else self.affixes.prepare(self.live, self.step_tokens)
        for request, released in self._work.selected:
            self._after_selection(request, released)
        ready = [request for request in self.live if request.reuse is None or request.reuse.stage is Stage.DENOISING]
        ready.sort(key=lambda request: request.waiting_since)
        by_state = {id(request.state): request for request in ready}
        states = within_budget(
            [request.state for request in ready if request.state], self.step_tokens, self._work.tokens
        )
        self.stepping = [by_state[id(state)] for state in states]
        denoise = [denoise_entry(state) for state in states]
        entries = [*self._work.entries, *denoise]
        if not entries:
            return None
        return DiffusionStep(
            plan=build_plan(entries),
            sampling=row_sampling(states, denoise),
            top_logprobs=np.repeat(
                np.array([request.top_logprobs for request in self.stepping], dtype=np.int64),
                [len(entry.logit_rows) for entry in denoise],
            ),
            observers=self._work.scorers,
        )

    @property
    def batch_requests(self) -> list[LiveRequest]:
        """Requests that take part in the step being run, probes first."""
        return [*self._work.probes, *self.stepping]

    def apply(self, step: DiffusionStep, choices: Choices) -> list[tuple[LiveRequest, int]]:
        """Commit a step's choices; returns each denoised request with the number of tokens it can now send."""
        self.steps += 1
        if self.affixes is not None:
            for request, released in self.affixes.finish(self._work):
                self._after_selection(request, released)
        entries = step.plan.entries[len(self._work.entries) :]
        bounds = indptr(len(entry.logit_rows) for entry in entries)
        rules = [request.state.commit_rule() for request in self.stepping if request.state]
        chosen = select_commits(choices.confidence, bounds, rules)
        advanced = []
        for index, (request, entry) in enumerate(zip(self.stepping, entries, strict=True)):
            assert request.state is not None
            rows = slice(int(bounds[index]), int(bounds[index + 1]))
            self._note_forward(request, len(entry.positions))
            advanced.append((request, request.commit(entry, chosen[rows], choices, rows)))
        return advanced

    def _after_selection(self, request: LiveRequest, released: np.ndarray) -> None:
        assert request.state is not None
        if len(released):
            owned = self.affix_cache.private_slots[request.req.kv.req_pool_idx].cpu().numpy()
            self._own(request, np.setdiff1d(owned, released))
            self.slots.free(released)
        else:
            self._write_row(request)

    def _note_forward(self, request: LiveRequest, rows: int) -> None:
        state, reuse = request.state, request.reuse
        assert state is not None
        if reuse is not None and state.at_block_start:
            reuse.note_recompute(rows)
            if self.affixes is not None:
                self.affixes.counters.tokens_recomputed += rows
                self.affixes.counters.tokens_saved += reuse.canvas_tokens - rows
        state.note_forward(rows)
        request.waiting_since = self.steps
