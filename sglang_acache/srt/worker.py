"""The forward of one step: a ragged batch through SGLang's model runner, then one token choice a masked row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from acache_kernels.choose import choose_tokens, rule_codes
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_context, get_parallel

from sglang_acache.core.plan import RowSampling, StepPlan
from sglang_acache.models.defaults import model_defaults
from sglang_acache.srt.flags import NAMESPACE
from sglang_acache.srt.launch import launch_params
from sglang_acache.srt.limits import default_params
from sglang_acache.srt.step import STATE_KEY, LayerObserver, StepTensors

ALTERNATIVE_ROWS = 64
"""Rows of logits whose alternatives are computed at once: 32 MB a copy at 126k tokens."""


class DiffusionBatch(ScheduleBatch):
    """A ``ScheduleBatch`` of one denoising step. ``step`` is set by the scheduler right after ``init_new``."""

    step: DiffusionStep


@dataclass(frozen=True, slots=True)
class DiffusionStep:
    """What the scheduler asks of the worker: the plan, how its rows are sampled, who watches the layers.

    ``top_logprobs`` int64 ``[M]``: how many alternatives to report for each row (0 = none).
    """

    plan: StepPlan
    sampling: RowSampling
    top_logprobs: np.ndarray
    observers: Sequence[LayerObserver] = ()


@dataclass(frozen=True, slots=True)
class Choices:
    """Per logits row of the step, on the host: arrays ``[M]``; the alternatives ``[M, k]`` where any were asked."""

    token: np.ndarray  # int64
    confidence: np.ndarray  # float32
    logprob: np.ndarray  # float32
    top_tokens: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None


@dataclass
class DiffusionResult(GenerationBatchResult):
    choices: Choices | None = None


class DiffusionWorker:
    """SGLang's ``TpModelWorker`` that also runs ``DiffusionBatch``; everything else passes through unchanged."""

    def __init__(self, inner: Any, *, mask_token_id: int, vocab_limit: int) -> None:
        self.inner = inner
        self.runner = inner.model_runner
        self.device = inner.model_runner.device
        self.forbidden = torch.tensor([mask_token_id], dtype=torch.int64, device=self.device)
        self.vocab_limit = vocab_limit
        if torch.device(self.device).type == "cuda":
            _install_graphs(self.runner)
        # Queries are flattened: SGLang's per-request lengths are never read, only have to exist.
        self._no_lengths = torch.zeros(0, dtype=torch.int64)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> GenerationBatchResult:
        if not isinstance(batch, DiffusionBatch):
            return self.inner.forward_batch_generation(batch, *args, **kwargs)
        step = batch.step
        output = self.runner.forward(self._forward_batch(step))
        choices = self._choose(step, output.logits_output.full_logits)
        return DiffusionResult(can_run_cuda_graph=output.can_run_graph, choices=choices)

    def _forward_batch(self, step: DiffusionStep) -> ForwardBatch:
        tensors = StepTensors.build(step.plan, self.device, step.observers)
        lengths = torch.from_numpy(np.diff(step.plan.kv_indptr))
        return ForwardBatch(
            forward_mode=ForwardMode.DLLM_EXTEND,
            batch_size=len(step.plan.entries),
            input_ids=tensors.tokens,
            positions=tensors.positions,
            out_cache_loc=tensors.write_slots,
            req_pool_indices=self._no_lengths,
            seq_lens=self._no_lengths,
            seq_lens_cpu=lengths,
            seq_lens_sum=len(step.plan.read_slots),
            extend_seq_lens_cpu=np.diff(step.plan.qo_indptr).tolist(),
            model_specific_states={STATE_KEY: tensors},
        )

    def _choose(self, step: DiffusionStep, logits: torch.Tensor | None) -> Choices:
        if logits is None or len(step.plan.logit_rows) == 0:
            nothing = np.empty(0, dtype=np.float32)
            return Choices(nothing.astype(np.int64), nothing, nothing)
        sampling = step.sampling
        choice = choose_tokens(
            logits,
            temperature=torch.from_numpy(sampling.temperature).to(self.device),
            top_k=torch.from_numpy(sampling.top_k).to(self.device),
            top_p=torch.from_numpy(sampling.top_p).to(self.device),
            seed=torch.from_numpy(sampling.seed).to(self.device),
            rule=rule_codes(sampling.rule, self.device),
            forbidden=self.forbidden,
            vocab_limit=self.vocab_limit,
        )
        token, confidence, logprob = self._agree(choice.token, choice.confidence, choice.logprob)
        widest = int(step.top_logprobs.max(initial=0))
        if widest == 0:
            return Choices(token.numpy(), confidence.numpy(), logprob.numpy())
        ids, values = self._alternatives(logits, step.top_logprobs, widest)
        return Choices(token.numpy(), confidence.numpy(), logprob.numpy(), ids, values)

    def _alternatives(self, logits: torch.Tensor, wanted: np.ndarray, widest: int) -> tuple[np.ndarray, np.ndarray]:
        """Likeliest tokens and their logprobs ``[M, k]``, under the distribution of the reported logprobs.

        Only rows that want any are computed, a few at a time: float32 copies of all rows would not fit beside a
        large batch at LLaDA's vocabulary.
        """
        count = min(widest, self.vocab_limit - 1)
        ids = np.zeros((len(logits), count), dtype=np.int64)
        values = np.zeros((len(logits), count), dtype=np.float32)
        rows = np.flatnonzero(wanted)
        for part in np.array_split(rows, max(1, -(-len(rows) // ALTERNATIVE_ROWS))):
            index = torch.from_numpy(part).to(logits.device)
            allowed = logits[index, : self.vocab_limit].float().index_fill_(1, self.forbidden, float("-inf"))
            best = torch.log_softmax(allowed, dim=-1).topk(count, dim=-1)
            ids[part], values[part] = best.indices.cpu().numpy(), best.values.cpu().numpy()
        return ids, values

    def _agree(self, *rows: torch.Tensor) -> list[torch.Tensor]:
        """Rows on the host; under tensor parallelism those of rank 0, so that every rank commits the same tokens."""
        group = get_parallel().tp_group
        if group.world_size == 1:
            return [row.cpu() for row in rows]
        packed = torch.stack([row.double().cpu() for row in rows])
        torch.distributed.broadcast(packed, src=group.ranks[0], group=group.cpu_group)
        return [part.to(row.dtype) for part, row in zip(packed, rows, strict=True)]


def _install_graphs(runner: Any) -> None:
    """Let steps inside blocks replay CUDA graphs, as the flags ask; blocks longer than the server's run eagerly."""
    from sglang_acache.srt.cuda_capture import CudaCapture
    from sglang_acache.srt.graphs import graph_sizes, install_graphs

    flags = get_context().config_bag(NAMESPACE)
    config = runner.model_config.hf_config
    defaults = model_defaults(config)
    block = launch_params(flags, default_params(defaults)).block_length
    rows = block + int(defaults.shift_logits)  # a shifted block also forwards the position before it
    sizes = graph_sizes(flags.diffusion_graph_requests or [], rows, runner.max_running_requests)
    install_graphs(runner, sizes, rows, CudaCapture(runner))
