"""One SGLang ``Req`` and its diffusion state, between admission and its last token."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sglang_acache.core.canvas import Canvas, canvas_length
from sglang_acache.core.plan import Entry
from sglang_acache.core.request import DiffusionRequest, Sampling
from sglang_acache.core.reuse import Reuse
from sglang_acache.core.reuse_params import ReuseParams
from sglang_acache.core.seeds import seed_from_text
from sglang_acache.core.spans import Segment
from sglang_acache.core.spans.types import as_tokens
from sglang_acache.srt.request_fields import RequestSpec
from sglang_acache.srt.worker import Choices


@dataclass(slots=True)
class OutputLogprobs:
    """Log-probability of every generated token at the step that committed it, by offset in the answer."""

    value: np.ndarray
    alternatives: dict[int, tuple[list[float], list[int]]] = field(default_factory=dict)


class LiveRequest:
    """``req`` is SGLang's; ``spec`` is what the client asked; ``state`` exists from admission on.

    ``sample``: which of the parallel samples of a prompt this is. Sample i draws as a request of seed + i would.
    """

    __slots__ = (
        "emitted",
        "logprobs",
        "namespace",
        "observed",
        "req",
        "reuse",
        "reuse_params",
        "sample",
        "scores",
        "segments",
        "spec",
        "state",
        "waiting_since",
    )

    def __init__(self, req: Any, spec: RequestSpec, reuse_params: ReuseParams, sample: int = 0) -> None:
        self.req = req
        self.sample = sample
        self.spec = spec
        self.reuse_params = reuse_params
        self.reuse: Reuse | None = None
        self.scores: dict[tuple[int, int], np.ndarray] = {}  # importance its probe found, by start and length of a read
        self.namespace = json.dumps([req.cache_salt, req.extra_key])  # tenants never share
        self.observed = False  # whether span discovery has seen this prompt
        self.segments = self._segments()
        self.state: DiffusionRequest | None = None
        self.emitted = 0  # generated tokens already in req.output_ids
        self.waiting_since = 0  # step counter of the last forward, for fairness
        self.logprobs: OutputLogprobs | None = None

    @property
    def left_context(self) -> np.ndarray:
        return np.asarray(self.req.origin_input_ids_unpadded, dtype=np.int64)

    def _segments(self) -> list[Segment]:
        """The text before and after the hole, at their canvas positions: no span crosses from one to the other."""
        left, right = self.left_context, np.asarray(self.spec.right_context, dtype=np.int64)
        return [Segment(as_tokens(left)), Segment(as_tokens(right), self.canvas_tokens - len(right))]

    @property
    def block_starts(self) -> int:
        """Forwards of the whole recompute set that this request makes at most: one a block under a cache."""
        generated = self.canvas_tokens - len(self.req.origin_input_ids_unpadded) - len(self.spec.right_context)
        blocks = generated // self.spec.params.block_length
        return max(blocks, self.spec.params.steps or 0) if self.spec.params.cache == "none" else blocks

    @property
    def canvas_tokens(self) -> int:
        return canvas_length(
            len(self.req.origin_input_ids_unpadded),
            len(self.spec.right_context),
            self.req.sampling_params.max_new_tokens,
            self.spec.params.block_length,
        )

    def start(self, *, mask_token_id: int, shift_logits: bool) -> DiffusionRequest:
        """Make the denoising state; a request that was put back in the queue keeps what it had committed."""
        if self.state is None:
            canvas = Canvas(
                self.left_context,
                np.asarray(self.spec.right_context, dtype=np.int64),
                max_new_tokens=self.req.sampling_params.max_new_tokens,
                block_length=self.spec.params.block_length,
                mask_token_id=mask_token_id,
            )
            self.state = DiffusionRequest(canvas, self.spec.params, self._sampling(), shift_logits=shift_logits)
            if self.req.return_logprob:
                self.logprobs = OutputLogprobs(np.zeros(canvas.gen_stop - canvas.gen_start, dtype=np.float32))
        return self.state

    def _sampling(self) -> Sampling:
        params = self.req.sampling_params
        given = params.sampling_seed
        seed = seed_from_text(self.req.rid) if given is None else (given + self.sample) % (1 << 63)
        if params.top_k == 1:  # SGLang turns temperature 0 into top_k 1
            return Sampling(seed=seed)
        top_k = 0 if params.top_k >= 1 << 30 else params.top_k
        return Sampling(params.temperature, top_k, params.top_p, seed)

    @property
    def top_logprobs(self) -> int:
        return self.req.logprob.top_logprobs_num if self.req.return_logprob else 0

    def commit(self, entry: Entry, chosen: np.ndarray, choices: Choices, rows: slice) -> int:
        """Make the ``chosen`` rows (bool, of this request's ``rows``) final; returns how many tokens can be sent."""
        assert self.state is not None
        canvas = self.state.canvas
        positions = entry.masked_positions[chosen]
        if self.logprobs is not None:
            self._record_logprobs(positions - canvas.gen_start, np.flatnonzero(chosen) + rows.start, choices)
        canvas.commit(positions, choices.token[rows][chosen])
        return self._emit()

    def _record_logprobs(self, offsets: np.ndarray, rows: np.ndarray, choices: Choices) -> None:
        assert self.logprobs is not None
        self.logprobs.value[offsets] = choices.logprob[rows]
        if not self.top_logprobs or choices.top_tokens is None or choices.top_logprobs is None:
            return
        for offset, row in zip(offsets.tolist(), rows.tolist(), strict=True):
            count = self.top_logprobs
            self.logprobs.alternatives[offset] = (
                choices.top_logprobs[row, :count].tolist(),
                choices.top_tokens[row, :count].tolist(),
            )

    def _emit(self) -> int:
        """Append the newly contiguous committed tokens to SGLang's ``output_ids``; returns their number."""
        assert self.state is not None
        canvas = self.state.canvas
        first, last = self.emitted, canvas.committed_prefix()
        tokens = canvas.tokens[canvas.gen_start + first : canvas.gen_start + last].tolist()
        self.req.output_ids.extend(tokens)
        self.emitted = last
        if self.logprobs is not None:
            out = self.req.logprob
            out.output_token_logprobs_val.extend(self.logprobs.value[first:last].tolist())
            out.output_token_logprobs_idx.extend(tokens)
            for offset in range(first, last):
                values, ids = self.logprobs.alternatives.pop(offset, ([], []))
                out.output_top_logprobs_val.append(values)
                out.output_top_logprobs_idx.append(ids)
                out.output_token_ids_logprobs_val.append([])
                out.output_token_ids_logprobs_idx.append([])
        return last - first
