"""SGLang attention backends over ``acache_kernels``: store, then attend through the read-slot map."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from acache_kernels.attention import get_attention_kernel
from acache_kernels.store import store_kv
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_acache.srt.step import LayerAttention, StepTensors, step_of


class AcacheAttentionBackend(AttentionBackend):
    """Full attention of ragged queries over slot-indirected keys.

    ``init_forward_metadata`` does the step's index work once; every layer then stores its K/V to the write slots and
    attends through the read slots. A step never writes a slot that another request of the same step reads, except
    a span's slots that this very step encodes, which nobody reads before the step is over.
    """

    def __init__(self, runner: Any, kernel_name: str) -> None:
        super().__init__()
        self.kernel = get_attention_kernel(kernel_name)
        self.pool = runner.token_to_kv_pool
        self._plan: Any = None
        self._step: StepTensors | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self._step = step_of(forward_batch)
        self._plan = self._step.plan  # None: made by the first layer, which knows the head counts and sizes

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """q ``[N, Hq * D]``, k and v ``[N, Hkv * D]`` -> ``[N, Hq * D]``."""
        step = self._step
        assert step is not None
        heads, kv_heads, dim = layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim
        query = q.view(-1, heads, dim)
        key, value = k.view(-1, kv_heads, dim), v.view(-1, kv_heads, dim)
        keys, values = self.pool.get_kv_buffer(layer.layer_id)
        if save_kv_cache and keys.device.type == "cpu" and keys.dtype == key.dtype:
            store_kv(keys, values, forward_batch.out_cache_loc, key, value)
        elif save_kv_cache:
            self.pool.set_kv_buffer(layer, forward_batch.out_cache_loc, key, value)
        if self._plan is None:
            self._plan = self.kernel.plan(
                step.layout,
                num_q_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=dim,
                dtype=query.dtype,
                device=query.device,
            )
        observers = step.observers
        out, lse = self.kernel.run(
            self._plan, query, keys, values, scale=layer.scaling, return_lse=bool(observers)
        )
        if observers:
            attention = LayerAttention(query, key, value, keys, values, lse, layer.scaling)
            for observer in observers:
                observer.observe(attention)
        return out.reshape(-1, heads * dim)

    forward_decode = forward_extend

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1


def backend_factory(kernel_name: str) -> Callable[[Any], AcacheAttentionBackend]:
    """The factory SGLang's attention registry wants for one kernel implementation."""

    def create(runner: Any) -> AcacheAttentionBackend:
        return AcacheAttentionBackend(runner, kernel_name)

    return create
