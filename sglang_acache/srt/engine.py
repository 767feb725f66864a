"""The diffusion runner: which requests are live, what a step forwards, what it commits.

It stands between SGLang's scheduler (queues, ``Req``, pools) and the core (canvas, plan, commit). A request is
admitted only when its whole canvas has slots; from then on nothing can take them away before it ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from sglang_acache.core.commit import select_commits
from sglang_acache.core.plan import build_plan, denoise_entry, row_sampling, within_budget
from sglang_acache.srt.live_request import LiveRequest
from sglang_acache.srt.worker import Choices, DiffusionStep


class DiffusionEngine:
    def __init__(
        self,
        *,
        req_to_token_pool: Any,
        allocator: Any,
        affix_cache: Any,
        mask_token_id: int,
        shift_logits: bool,
        step_tokens: int,
    ) -> None:
        self.req_to_token_pool = req_to_token_pool
        self.allocator = allocator
        self.affix_cache = affix_cache
        self.mask_token_id = mask_token_id
        self.shift_logits = shift_logits
        self.step_tokens = step_tokens
        self.live: list[LiveRequest] = []
        self.steps = 0
        self._stepping: list[LiveRequest] = []

    def try_admit(self, request: LiveRequest) -> bool:
        """Reserve a row and the slots of the whole canvas; False (and nothing reserved) where they do not fit."""
        tokens = request.canvas_tokens
        if tokens > self.allocator.available_size() or self.req_to_token_pool.available_size() == 0:
            return False
        slots = self.allocator.alloc(tokens)
        assert slots is not None
        self.req_to_token_pool.alloc([request.req])
        kv = request.req.kv
        kv.kv_allocated_len = kv.kv_committed_len = tokens
        self.req_to_token_pool.write((kv.req_pool_idx, slice(0, tokens)), slots.to(torch.int32))
        self.affix_cache.own(kv.req_pool_idx, slots)
        state = request.start(mask_token_id=self.mask_token_id, shift_logits=self.shift_logits)
        state.use_private_slots(slots.cpu().numpy())
        request.waiting_since = self.steps
        self.live.append(request)
        return True

    def retire(self, finished: Iterable[LiveRequest]) -> None:
        """Forget requests whose slots have been released."""
        gone = set(map(id, finished))
        self.live = [request for request in self.live if id(request) not in gone]

    def next_step(self) -> DiffusionStep | None:
        """The next ragged forward over the live requests, or None when there are none."""
        if not self.live:
            return None
        waiting = sorted(self.live, key=lambda request: request.waiting_since)
        by_state = {id(request.state): request for request in waiting}
        states = within_budget([request.state for request in waiting if request.state], self.step_tokens)
        self._stepping = [by_state[id(state)] for state in states]
        entries = [denoise_entry(state) for state in states]
        counts = [len(entry.logit_rows) for entry in entries]
        return DiffusionStep(
            plan=build_plan(entries),
            sampling=row_sampling(states, entries),
            top_logprobs=np.repeat([request.top_logprobs for request in self._stepping], counts),
        )

    @property
    def stepping(self) -> list[LiveRequest]:
        """The requests of the step that ``next_step`` returned last, in the order of its entries."""
        return self._stepping

    def apply(self, step: DiffusionStep, choices: Choices) -> list[tuple[LiveRequest, int]]:
        """Commit a step's choices; returns each stepped request with the number of tokens it can now send."""
        self.steps += 1
        indptr = step.plan.row_indptr
        rules = [request.state.commit_rule() for request in self._stepping if request.state]
        chosen = select_commits(choices.confidence, indptr, rules)
        advanced = []
        for index, request in enumerate(self._stepping):
            assert request.state is not None
            entry = step.plan.entries[index]
            rows = slice(int(indptr[index]), int(indptr[index + 1]))
            request.state.note_forward(len(entry.positions))
            request.waiting_since = self.steps
            advanced.append((request, request.commit(entry, chosen[rows], choices, rows)))
        return advanced
