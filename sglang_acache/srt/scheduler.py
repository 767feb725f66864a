"""SGLang's ``Scheduler``, which for a diffusion LLM steps the whole live set instead of prefilling and decoding."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req, ScheduleBatch
from sglang.srt.managers.schedule_batch import NextBatchPlan as BatchPlan
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.observability.req_time_stats import set_time_batch
from sglang.srt.runtime_context import get_context

from sglang_acache.core.params import DiffusionParams
from sglang_acache.core.reuse_params import ReuseParams
from sglang_acache.models.defaults import mask_token_id, model_defaults
from sglang_acache.srt.affix_setup import build_affixes
from sglang_acache.srt.engine import DiffusionEngine
from sglang_acache.srt.flags import NAMESPACE
from sglang_acache.srt.kv_device import AllocatorPool
from sglang_acache.srt.launch import is_ours, launch_params, launch_reuse
from sglang_acache.srt.limits import default_params, vocabulary_limit
from sglang_acache.srt.live_request import LiveRequest
from sglang_acache.srt.malloc import keep_large_blocks
from sglang_acache.srt.request_fields import RequestSpec
from sglang_acache.srt.request_log import log_finished
from sglang_acache.srt.reuse_metrics import ReuseMetrics, build_reuse_metrics
from sglang_acache.srt.sample_numbers import SampleNumbers
from sglang_acache.srt.span_control import SpanControl
from sglang_acache.srt.streamer import DiffusionOutputStreamer
from sglang_acache.srt.worker import DiffusionBatch, DiffusionWorker

_IS_DIFFUSION = object()
"""Stands in ``ScheduleBatch.dllm_config``: routes a batch's result to ``process_batch_result_dllm``."""


class DiffusionScheduler(Scheduler):
    """With any other model every override defers to SGLang's own method at once."""

    engine: DiffusionEngine | None = None
    reuse_metrics: ReuseMetrics | None = None
    defaults: DiffusionParams

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.model_config.hf_config
        if not is_ours(config.architectures):
            return
        if self.device == "cpu":
            keep_large_blocks()
        flags = get_context().config_bag(NAMESPACE)
        defaults = model_defaults(config)
        self.defaults = launch_params(flags, default_params(defaults))
        slots = AllocatorPool(self.token_to_kv_pool_allocator)
        self.reuse_defaults = launch_reuse(flags)
        self.sample_numbers = SampleNumbers()
        vocab_limit = vocabulary_limit(self.tokenizer, config)
        affixes = build_affixes(
            flags, slots, self.tp_worker.model_runner, self.max_total_num_tokens, self.tokenizer, vocab_limit
        )
        if affixes is not None:
            self.tree_cache.tree = affixes.tree
            self.tree_cache.before_flush = affixes.before_flush
        self.engine = DiffusionEngine(
            req_to_token_pool=self.req_to_token_pool,
            slots=slots,
            affix_cache=self.tree_cache,
            mask_token_id=mask_token_id(config),
            shift_logits=defaults.shift_logits,
            step_tokens=flags.diffusion_step_tokens,
            affixes=affixes,
        )
        self.model_worker = DiffusionWorker(
            self.tp_worker,
            mask_token_id=mask_token_id(config),
            vocab_limit=vocab_limit,
        )
        self.reuse_metrics = build_reuse_metrics(self, affixes)
        if affixes is not None:
            control = SpanControl(affixes, vocab_limit=vocab_limit, context_tokens=self.model_config.context_len)
            self._request_dispatcher += control.dispatcher

    def get_output_streamer_class(self) -> type:
        if not is_ours(self.model_config.hf_config.architectures):
            return super().get_output_streamer_class()
        return DiffusionOutputStreamer

    # ── requests coming in ────────────────────────────────────────────────

    def validate_dllm_request(self, req: Req) -> str | None:
        """Attach the request's diffusion part; a string refuses it with status 400."""
        if self.engine is None:
            return super().validate_dllm_request(req)
        spec = RequestSpec.from_wire(req.sampling_params.custom_params, self.defaults)
        reuse = ReuseParams(**spec.cache_options) if spec.cache_options else self.reuse_defaults
        # SGLang asks for no tokens once, ahead of parallel samples: that request is none of them.
        sample = self.sample_numbers.take(spec.group) if req.sampling_params.max_new_tokens else 0
        live = req.diffusion = LiveRequest(req, spec, reuse, sample)
        if spec.right_context:
            # Usage counts the whole prompt; detokenizing continues from the left context alone.
            req.origin_input_ids = req.origin_input_ids_unpadded + type(req.origin_input_ids)("q", spec.right_context)
        if live.canvas_tokens > self.max_total_num_tokens:
            return (
                f"max_new_tokens: the canvas of {live.canvas_tokens} tokens is over the K/V pool of "
                f"{self.max_total_num_tokens}; shorten the prompt or max_new_tokens, or start the server with a "
                f"larger --max-total-tokens"
            )
        return None

    def init_req_max_new_tokens(self, req: Req) -> None:
        # SGLang clips the answer to what a growing sequence could reach; a canvas is checked whole, and refused.
        if self.engine is None or req.sampling_params.max_new_tokens is None:
            super().init_req_max_new_tokens(req)

    def pause_generation(self, recv_req: Any) -> None:
        if self.engine is not None:
            self.last_batch = None  # its requests are all in running_batch too: SGLang would release them twice
        super().pause_generation(recv_req)
        if self.engine is not None:
            self._drop_retracted()  # now, not at the next step: a flush may come while paused

    # ── one step ──────────────────────────────────────────────────────────

    def get_next_batch_to_run(
        self, running_batch: ScheduleBatch, last_batch: ScheduleBatch | None
    ) -> BatchPlan:
        if self.engine is None:
            return super().get_next_batch_to_run(running_batch, last_batch)
        self._drop_retracted()
        self._finish_aborted()
        self._admit()
        running_batch.reqs = [request.req for request in self.engine.live]
        running_batch.batch_is_full = bool(self.waiting_queue)
        step = self.engine.next_step()
        if self.reuse_metrics is not None:
            self.reuse_metrics.update(self.engine.live, len(self.waiting_queue), busy=step is not None)
        if step is None:
            return BatchPlan(batch_to_run=None, running_batch=running_batch)
        batch = DiffusionBatch.init_new(
            [request.req for request in self.engine.batch_requests],
            self.req_to_token_pool,
            self.token_to_kv_pool_allocator,
            self.tree_cache,
            self.model_config,
            self.enable_overlap,
            self.spec_algorithm,
            dllm_config=_IS_DIFFUSION,
        )
        batch.step = step
        batch.forward_mode = ForwardMode.DLLM_EXTEND
        batch.input_ids = torch.empty(0, dtype=torch.int64, device=self.device)
        batch.return_logprob = False  # SGLang would cut prompt logprobs; ours are attached on commit
        batch.extend_num_tokens = len(step.plan.tokens)
        return BatchPlan(batch_to_run=batch, running_batch=running_batch)

    def process_batch_result_dllm(self, batch: ScheduleBatch, result: Any) -> None:
        if self.engine is None:
            super().process_batch_result_dllm(batch, result)
            return
        assert isinstance(batch, DiffusionBatch)
        sendable, finished, generated = [], [], 0
        for request, new_tokens in self.engine.apply(batch.step, result.choices):
            req = request.req
            if new_tokens or req.to_finish:
                req.update_finish_state(new_accepted_len=new_tokens)
            generated += new_tokens
            if req.finished():
                finished.append(request)
            # A request that sent nothing yet and has nothing to send must not be streamed: SGLang emits
            # non-streaming requests at every multiple of 50 tokens, and 0 is one.
            if new_tokens or req.finished():
                sendable.append(req)
        self._report(generated, result.can_run_cuda_graph)
        self._release(finished)
        self._stream(sendable)

    def _report(self, generated: int, graph: bool) -> None:
        """SGLang's own periodic log line and load metrics, which count a denoising step as a decode step."""
        reporter = self.metrics_reporter
        reporter.num_generated_tokens += generated
        reporter.forward_ct_decode += 1
        reporter.report_decode_stats(graph, running_batch=self.running_batch, num_generated_tokens=generated)

    def _admit(self) -> None:
        """Admit waiting requests in order while slots last; the first that does not fit holds the queue."""
        assert self.engine is not None
        self.policy.calc_priority(self.waiting_queue, self.running_batch)
        admitted = []
        while self.waiting_queue and len(self.engine.live) < self.max_running_requests:
            req = self.waiting_queue[0]
            if req.to_finish or req.sampling_params.max_new_tokens == 0:
                self.waiting_queue.pop(0)
                self._finish_unstarted(req)
                continue
            if not self.engine.try_admit(req.diffusion):
                if not self.engine.idle:
                    break
                self.waiting_queue.pop(0)
                req.set_finish_with_abort(self._no_room(req.diffusion), status_code=HTTPStatus.SERVICE_UNAVAILABLE)
                self._finish_unstarted(req)
                continue
            self.waiting_queue.pop(0)
            admitted.append(req)
        set_time_batch(admitted, "set_forward_entry_time")

    def _no_room(self, request: LiveRequest) -> str:
        return (
            f"the canvas of {request.canvas_tokens} tokens does not fit the K/V pool beside pinned shared spans; "
            "unpin or delete some (DELETE /acache/spans), shorten the request, or raise --max-total-tokens"
        )

    def _drop_retracted(self) -> None:
        """Forget requests that SGLang put back in the queue, without their K/V; they keep what they committed."""
        assert self.engine is not None
        self.engine.retire([request for request in self.engine.live if not request.req.kv.holds_kv])

    def _finish_unstarted(self, req: Req) -> None:
        """End a request that needs no forward: refused after queueing, or asked for no tokens."""
        req.update_finish_state(new_accepted_len=0)
        if not req.finished():
            req.finished_reason = FINISH_LENGTH(length=0)
        req.time_stats.set_quick_finish_time()
        self._stream([req])

    def _finish_aborted(self) -> None:
        """End live requests that a client aborted, whether or not they took part in the last step."""
        assert self.engine is not None
        aborted = [request for request in self.engine.live if request.req.to_finish]
        for request in aborted:
            request.req.update_finish_state(new_accepted_len=0)
        self._release(aborted)
        self._stream([request.req for request in aborted])

    def _release(self, finished: list[LiveRequest]) -> None:
        assert self.engine is not None
        for request in finished:
            release_kv_cache(request.req, self.tree_cache, checkpoint=False)
            request.req.time_stats.set_completion_time()
            if self.metrics_reporter.is_stats_logging_rank:
                log_finished(request)
        self.engine.retire(finished)

    def _stream(self, reqs: list[Req]) -> None:
        if reqs:
            self.output_streamer.stream_output(reqs, any(req.return_logprob for req in reqs))
