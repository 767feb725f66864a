"""SGLang's real ModelRunner in this process, fed with hand-built ragged batches."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from sglang_acache.server_process import free_port

POOL_TOKENS = 2048


@dataclass
class Query:
    """One request's share of a step.

    ``tokens`` and ``positions`` are what is forwarded, ``write_slots`` where its K/V goes, ``read_slots`` what it
    attends to; ``logit_rows`` are those of its rows whose logits are wanted.
    """

    tokens: Sequence[int]
    positions: Sequence[int]
    write_slots: Sequence[int]
    read_slots: Sequence[int]
    logit_rows: Sequence[int] = field(default_factory=list)


class SGLangRunner:
    """Loads a checkpoint as the server would, plugins included.

    A process holds one at a time: making one closes the last. Under tensor parallelism each rank is a process
    of its own and all share ``port``.
    """

    _live: ClassVar[SGLangRunner | None] = None

    def __init__(
        self,
        folder: Path,
        dtype: str = "float32",
        trust_remote_code: bool = False,
        rank: int = 0,
        tp_size: int = 1,
        port: int | None = None,
        attention_backend: str = "acache_torch",
    ) -> None:
        if SGLangRunner._live is not None:
            SGLangRunner._live.close()
        os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", "sglang_acache.models")
        os.environ.setdefault("SGLANG_EAGER_INPUT_NO_COPY", "1")  # as our launch does
        from sglang.srt.plugins import load_plugins

        load_plugins()
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.distributed import bootstrap
        from sglang.srt.model_executor.model_runner import ModelRunner
        from sglang.srt.runtime_context import SpawnRanks, get_device, publish
        from sglang.srt.server_args import ServerArgs

        args = ServerArgs(
            model_path=str(folder),
            dtype=dtype,
            attention_backend=attention_backend,
            max_total_tokens=POOL_TOKENS,
            max_running_requests=8,
            trust_remote_code=trust_remote_code,
            skip_tokenizer_init=True,
            tp_size=tp_size,
        )
        publish(args, role="scheduler", ranks=SpawnRanks(gpu_id=rank, world_rank=rank, dp_rank=None))
        config = ModelConfig.from_server_args(args)
        port = port or free_port()
        bootstrap.init_parallel_runtime(server_args=args, device=get_device().device, dist_port=port)
        SGLangRunner._live = self
        try:
            bootstrap.init_layer_runtime(model_config=config)
            self.runner = ModelRunner(
                model_config=config, mem_fraction_static=0.5, gpu_id=rank, nccl_port=port, server_args=args
            )
            self.runner.alloc_memory_pool()
            self.runner.init_attention_backends()
            self.runner.init_cuda_graphs()
        except BaseException:
            self.close()
            raise
        self.model: Any = self.runner.model

    def forward(self, queries: Sequence[Query]) -> torch.Tensor:
        """One ragged forward -> float32 ``[M, vocab_size]``, rows in the order of the queries."""
        return self.runner.forward(forward_batch(queries)).logits_output.full_logits

    def close(self) -> None:
        from sglang.srt.distributed import destroy_distributed_environment, destroy_model_parallel

        if SGLangRunner._live is self:
            SGLangRunner._live = None
            destroy_model_parallel()
            destroy_distributed_environment()


def save_logits(rank: int, folders: Sequence[Path], tokens: list[int], tp_size: int, port: int) -> None:
    """One rank of a tensor-parallel group: saves each checkpoint's logits of ``tokens`` there, as ``rank<i>.pt``."""
    for offset, folder in enumerate(folders):
        runner = SGLangRunner(folder, rank=rank, tp_size=tp_size, port=port + offset)
        torch.save(runner.forward([whole_canvas(tokens, 1)]), folder / f"rank{rank}.pt")
        runner.close()


def whole_canvas(tokens: Sequence[int], first_slot: int, rows: Sequence[int] | None = None) -> Query:
    """A query that forwards all of ``tokens`` into consecutive slots, and asks for ``rows`` (default all)."""
    length = len(tokens)
    slots = list(range(first_slot, first_slot + length))
    return Query(tokens, list(range(length)), slots, slots, list(range(length)) if rows is None else rows)


def forward_batch(queries: Sequence[Query]) -> Any:
    from acache_kernels.layout import RaggedLayout
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    from sglang_acache.srt.step import STATE_KEY, StepTensors

    lengths = [len(query.tokens) for query in queries]
    bases = np.cumsum([0, *lengths])
    rows = [base + row for base, query in zip(bases, queries, strict=False) for row in query.logit_rows]
    step = StepTensors(
        tokens=_flat(query.tokens for query in queries),
        positions=_flat(query.positions for query in queries),
        write_slots=_flat(query.write_slots for query in queries),
        logit_rows=torch.tensor(rows, dtype=torch.int64),
        layout=RaggedLayout.build(
            lengths,
            [len(query.read_slots) for query in queries],
            _flat(query.read_slots for query in queries),
        ),
    )
    nothing = torch.zeros(0, dtype=torch.int64)
    return ForwardBatch(
        forward_mode=ForwardMode.DLLM_EXTEND,
        batch_size=len(queries),
        input_ids=step.tokens,
        positions=step.positions,
        out_cache_loc=step.write_slots,
        req_pool_indices=nothing,
        seq_lens=nothing,
        seq_lens_cpu=torch.tensor([len(query.read_slots) for query in queries]),
        seq_lens_sum=sum(len(query.read_slots) for query in queries),
        extend_seq_lens_cpu=lengths,
        model_specific_states={STATE_KEY: step},
    )


def _flat(parts: Any) -> torch.Tensor:
    return torch.tensor([int(item) for part in parts for item in part], dtype=torch.int64)
