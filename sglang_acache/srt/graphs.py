"""Steps inside blocks, replayed as CUDA graphs: the same small forward again and again, without its launch overhead.

**Not run on hardware so far.** What is tested on a CPU is everything but the recording itself (``cuda_capture.py``),
by running the captured body again over the static buffers, whatever is left in them. It gives the bits of an eager
step that is padded in the same way, and the numbers of the eager step as it is to 1e-5 of the largest (float32): with
other rows beside them, matrix products may add up in another order.

A bucket is a size that is captured once: so many requests, rows and keys. A step is copied into the static buffers of
the smallest bucket that holds it and padded::

    tokens, positions      step's rows | 0 0 ..      padding rows are token 0 at position 0: they store to slot 0,
    write_slots            step's rows | 0 0 ..      which SGLang reserves for padding, and attend to slot 0 alone
    attention plan         updated in place          (acache_kernels/static_plan.py)
                              | replay
    hidden, residual       step's rows | padding     the output head runs eagerly, on the step's logits rows only

Any step that fits may take this way, not only one inside a block: it is the same forward. Most block starts, encodings
and probes are too long, and steps with observers are left to the eager path, which hands them every layer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from acache_kernels.layout import RaggedLayout
from acache_kernels.static_plan import StaticCapacity, StaticPlan
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.runner.base_cuda_graph_runner import freeze_gc
from sglang.srt.runtime_context import get_exec

from sglang_acache.srt.step import STATE_KEY, StepTensors, step_of

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]
"""Runs a body that reads and writes only tensors that stay where they are, and returns what does it again."""

FIRST_KEYS, KEY_STEP = 1024, 4
"""Keys a request has in a bucket: so many, and so many times as many in each further one. Unused ones cost idle
programs, further buckets cost captures."""

READS_PER_SLOT = 4
"""A step reads at most so many times the slots of the pool, or runs eagerly. A slot that several requests share is
read by each: fewer than 4 times as many reads as slots, where all share the same three quarters of their canvases."""

PART_BYTES = 256 << 20
"""Most memory of a bucket's partial attention results; all buckets share it, and larger ones are left out. The K/V pool
is sized before, so this comes out of what SGLang leaves for activations, a few GB: at Dream's sizes 56 requests with
the whole context would take 7.6 GB."""

MOST_ROWS = 2048
"""No larger buckets: such a step keeps the device busy while the host launches, and its partial results are large."""

logger = logging.getLogger(__name__)


def graph_sizes(asked: Sequence[int], rows: int, most_requests: int) -> list[int]:
    """Numbers of requests to capture: those of SGLang's flags, as far as they can occur and are worth it."""
    return sorted({min(count, most_requests) for count in asked if min(count, most_requests) * rows <= MOST_ROWS})


def key_sizes(longest: int) -> list[int]:
    """Keys a request, ascending: from ``FIRST_KEYS`` up to the longest canvas."""
    sizes, size = [], FIRST_KEYS
    while size < longest:
        sizes.append(size)
        size *= KEY_STEP
    return [*sizes, longest]


def buckets(requests: Sequence[int], rows: int, canvas: int, slots: int) -> list[StaticCapacity]:
    """Capacities in the order in which a step tries them: ``rows`` queries a request, keys as above.

    ``requests`` ascend; ``canvas``: the longest that the model takes; ``slots`` of the K/V pool, which holds a whole
    canvas of any request that is admitted.
    """
    sizes = key_sizes(min(canvas, slots))
    return [
        StaticCapacity(count, count * rows, keys, rows)
        for count in requests
        for keys in sorted({min(count * size, READS_PER_SLOT * slots) for size in sizes})
    ]


@dataclass(frozen=True, slots=True)
class StaticBatch:
    """A bucket's buffers. ``rows`` int64 ``[3, queries]``: tokens, positions and write slots."""

    rows: torch.Tensor
    attention: StaticPlan

    def load(self, step: StepTensors) -> None:
        """Take a step's place in the buffers. Nothing that an earlier step left can be seen afterwards."""
        count = len(step.tokens)
        self.rows[:, count:].zero_()  # write slots too: PADDING_SLOT
        for row, values in zip(self.rows, (step.tokens, step.positions, step.write_slots), strict=True):
            row[:count].copy_(values)
        self.attention.update(step.layout)

    def forward_batch(self, layout: RaggedLayout) -> ForwardBatch:
        """What the model is called with, over the buffers; ``layout`` only stands in for that of the later steps."""
        tokens, positions, write_slots = self.rows
        step = StepTensors(tokens, positions, write_slots, tokens[:0], layout, plan=self.attention.plan)
        nothing = torch.zeros(0, dtype=torch.int64)
        return ForwardBatch(
            forward_mode=ForwardMode.DLLM_EXTEND,
            batch_size=self.attention.capacity.requests,
            input_ids=tokens,
            positions=positions,
            out_cache_loc=write_slots,
            req_pool_indices=nothing,
            seq_lens=nothing,
            seq_lens_cpu=nothing,
            seq_lens_sum=0,
            model_specific_states={STATE_KEY: step},
        )


class StepGraphs:
    """Sits where SGLang keeps the graph runner of decode steps, which it also asks for diffusion steps.

    ``model`` is a ``DiffusionLM``, ``plans`` are in the order in which a step tries them. Captures everything at once,
    the largest first, so that the smaller ones find room in its memory.
    """

    def __init__(
        self, model: Any, plans: Sequence[StaticPlan], capture: Capture, begin_forward: Callable[[Any], None]
    ) -> None:
        """``begin_forward`` is the attention backend's ``init_forward_metadata``."""
        self._model = model
        self._begin_forward = begin_forward
        most = max(plan.capacity.queries for plan in plans)
        weight = model.model.norm.weight
        hidden = (2, most, model.config.hidden_size)
        self._chosen: tuple[StepTensors, int] | None = None
        self._rows = torch.zeros((3, most), dtype=torch.int64, device=weight.device)
        self._hidden = torch.zeros(hidden, dtype=weight.dtype, device=weight.device)  # output, and residual
        self._batches = [StaticBatch(self._rows[:, : plan.capacity.queries], plan) for plan in plans]
        self._replays = [self._captured(batch, capture) for batch in reversed(self._batches)][::-1]

    def can_run_graph(self, forward_batch: Any) -> bool:
        states = forward_batch.model_specific_states
        if not states or STATE_KEY not in states:
            return False
        step = step_of(forward_batch)
        bucket = self._bucket(step)
        self._chosen = None if bucket is None else (step, bucket)
        return bucket is not None

    @torch.no_grad()
    def execute(self, forward_batch: Any, pp_proxy_tensors: Any = None) -> LogitsProcessorOutput:
        """The step that ``can_run_graph`` allowed last; the result is that of ``DiffusionLM.forward``."""
        assert self._chosen is not None
        (step, bucket), self._chosen = self._chosen, None
        assert step is step_of(forward_batch)
        self._batches[bucket].load(step)
        self._replays[bucket]()
        hidden_states, residual = self._hidden.unbind()
        logits = self._model.compute_logits(hidden_states, residual, forward_batch)
        return LogitsProcessorOutput(next_token_logits=None, full_logits=logits)

    def _bucket(self, step: StepTensors) -> int | None:
        """Index of the first bucket that holds the step; None where it must run eagerly."""
        if step.observers:
            return None
        fitting = (i for i, batch in enumerate(self._batches) if batch.attention.capacity.fits(step.layout))
        return next(fitting, None)

    def _captured(self, batch: StaticBatch, capture: Capture) -> Replay:
        empty = empty_step(self._rows.device)
        batch.load(empty)  # so that what runs during the capture stores to slot 0 only
        forward_batch = batch.forward_batch(empty.layout)
        count = batch.rows.shape[1]

        @torch.no_grad()
        def body() -> None:
            self._begin_forward(forward_batch)
            outputs = self._model.model(forward_batch.input_ids, forward_batch.positions, forward_batch, None)
            for index, output in enumerate(outputs):
                self._hidden[index, :count].copy_(output)

        return capture(body)


def empty_step(device: torch.device | str) -> StepTensors:
    """A step of no requests."""
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    return StepTensors(nothing, nothing, nothing, nothing, RaggedLayout.build([], [], nothing))


def install_graphs(runner: Any, requests: Sequence[int], rows: int, capture: Capture) -> StepGraphs | None:
    """Give SGLang's ``ModelRunner`` graphs of steps of these numbers of requests; None where it gets none.

    ``requests`` ascend. ``rows``: most queries of a request inside a block. A kernel without static plans gets none.
    Where SGLang would capture its decode graphs again (a weight update may ask for that), ours are.
    """
    kernel = runner.attn_backend.kernel
    if not requests or not kernel.has_static_plans:
        return None
    layer = runner.model.model.layers[0].self_attn.attn
    heads = {
        "num_q_heads": layer.tp_q_head_num,
        "num_kv_heads": layer.tp_k_head_num,
        "head_dim": layer.qk_head_dim,
        "dtype": runner.dtype,
    }
    sizes = buckets(requests, rows, runner.model_config.context_len, runner.max_total_num_tokens)
    affordable = [one for one in sizes if kernel.static_bytes(one, **heads) <= PART_BYTES]
    if not affordable:
        return None
    plans = kernel.static_plans(affordable, **heads, device=runner.device)

    def record() -> StepGraphs:
        logger.info("Capturing %d CUDA graphs of steps inside blocks, of up to %d requests", len(plans), requests[-1])
        runner.decode_cuda_graph_runner = None  # those of the last recording leave their memory to this one
        with freeze_gc(get_exec().graph.enable_cudagraph_gc):
            graphs = StepGraphs(runner.model, plans, capture, runner.attn_backend.init_forward_metadata)
        runner.decode_cuda_graph_runner = graphs
        return graphs

    runner.init_decode_cuda_graph = record
    return record()
