"""Recording a forward as a CUDA graph, in SGLang's graph memory pool and on its capture stream.

**Not run on hardware so far**, and not testable without it: kept apart from ``graphs.py``, and as small as it can be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

WARM_UPS = 2
"""Eager runs before the recording: kernels are compiled and loaded, workspaces and communicators made."""


class CudaCapture:
    """A ``graphs.Capture``. Every rank of a tensor-parallel group must capture the same bodies in the same order."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
        from sglang.srt.distributed.device_communicators.pynccl_allocator import set_graph_pool_id
        from sglang.srt.distributed.parallel_state import graph_capture
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
        from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode
        from sglang.srt.model_executor.runner_utils.pool import (
            get_or_create_global_graph_capture_stream,
            get_or_create_global_graph_memory_pool,
            graph_pool_capture_scope,
            graph_pool_replay_scope,
        )
        from sglang.srt.runtime_context import get_parallel

        pool = get_or_create_global_graph_memory_pool(torch.cuda)
        set_graph_pool_id(pool)
        graph = torch.cuda.CUDAGraph()
        with (
            model_capture_mode(),
            forward_context(ForwardContext(attn_backend=self._runner.attn_backend)),
            graph_capture(stream=get_or_create_global_graph_capture_stream()) as capture,
        ):
            for _ in range(WARM_UPS):
                torch.cuda.synchronize()
                get_parallel().tp_group.barrier()
                body()
            torch.cuda.synchronize()
            with graph_pool_capture_scope(), torch.cuda.graph(cuda_graph=graph, pool=pool, stream=capture.stream):
                body()

        def replay() -> None:
            with graph_pool_replay_scope():
                graph.replay()

        return replay
