"""The transformer that LLaDA and Dream share: a Llama block with full attention, on SGLang's parallel layers.

The models differ in the names of their tensors and in a bias; see ``llada.py`` and ``dream.py``.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.logits_processor import LogitsMetadata, LogitsProcessor, LogitsProcessorOutput
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils import add_prefix
from torch import nn

from sglang_acache.models.configs import DiffusionLMConfig
from sglang_acache.models.packed_linear import pack_linear_layers
from sglang_acache.models.rope import RotaryPositions
from sglang_acache.models.row_layers import DiffusionRMSNorm, DiffusionSiluAndMul
from sglang_acache.models.weights import WeightNames, load_checkpoint, tensor_shapes


class DiffusionMLP(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``, x ``[N, hidden]``."""

    def __init__(self, config: DiffusionLMConfig, quant_config: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.mlp_width
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden,
            [inner] * 2,
            bias=False,
            quant_config=quant_config,
            prefix=add_prefix("gate_up_proj", prefix),
        )
        self.down_proj = RowParallelLinear(
            inner, hidden, bias=False, quant_config=quant_config, prefix=add_prefix("down_proj", prefix)
        )
        self.act_fn = DiffusionSiluAndMul()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        gate_up, _ = self.gate_up_proj(hidden_states)
        output, _ = self.down_proj(self.act_fn(gate_up))
        return output


class DiffusionAttention(nn.Module):
    """Grouped-query attention in which every position sees every position of its canvas."""

    def __init__(
        self,
        config: DiffusionLMConfig,
        layer_id: int,
        rotary_emb: RotaryPositions,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        heads, kv_heads = config.query_heads, config.key_heads
        head_dim = config.hidden_size // heads
        tp_size = get_parallel().tp_size
        if heads % tp_size or max(kv_heads, tp_size) % min(kv_heads, tp_size):
            raise ValueError(f"{heads} query and {kv_heads} key heads do not divide over --tp-size {tp_size}")
        local_heads, local_kv_heads = heads // tp_size, max(1, kv_heads // tp_size)
        self.q_size, self.kv_size = local_heads * head_dim, local_kv_heads * head_dim
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            head_dim,
            heads,
            kv_heads,
            bias=config.attention_bias,
            quant_config=quant_config,
            prefix=add_prefix("qkv_proj", prefix),
        )
        self.o_proj = RowParallelLinear(
            heads * head_dim,
            config.hidden_size,
            bias=False,
            quant_config=quant_config,
            prefix=add_prefix("o_proj", prefix),
        )
        self.rotary_emb = rotary_emb
        self.attn = RadixAttention(
            local_heads,
            head_dim,
            head_dim**-0.5,
            num_kv_heads=local_kv_heads,
            layer_id=layer_id,
            quant_config=quant_config,
            attn_type=AttentionType.ENCODER_ONLY,
            prefix=add_prefix("attn", prefix),
        )

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, k = self.rotary_emb(positions, q, k)
        output, _ = self.o_proj(self.attn(q, k, v, forward_batch))
        return output


class DiffusionLayer(nn.Module):
    """One pre-norm block. Carries ``(hidden, residual)``: the sum of the two is the block's output."""

    def __init__(
        self,
        config: DiffusionLMConfig,
        layer_id: int,
        rotary_emb: RotaryPositions,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self.input_layernorm = DiffusionRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = DiffusionAttention(config, layer_id, rotary_emb, quant_config, add_prefix("self_attn", prefix))
        self.post_attention_layernorm = DiffusionRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = DiffusionMLP(config, quant_config, add_prefix("mlp", prefix))

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        forward_batch: ForwardBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions, hidden_states, forward_batch)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class DiffusionBackbone(nn.Module):
    """Embedding, blocks and final norm."""

    def __init__(self, config: DiffusionLMConfig, quant_config: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            config.embedding_rows,
            config.hidden_size,
            quant_config=quant_config,
            prefix=add_prefix("embed_tokens", prefix),
        )
        self.rotary_emb = RotaryPositions(
            config.hidden_size // config.query_heads,
            max(config.max_position_embeddings, getattr(config, "context_len", 0)),  # --context-length may ask for more
            config.rope_theta,
        )
        self.layers = nn.ModuleList(
            DiffusionLayer(config, index, self.rotary_emb, quant_config, add_prefix(f"layers.{index}", prefix))
            for index in range(config.num_hidden_layers)
        )
        self.norm = DiffusionRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        input_embeds: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output of the last block before the final norm, as ``(hidden, residual)``, each ``[N, hidden]``."""
        hidden_states = self.embed_tokens(input_ids) if input_embeds is None else input_embeds
        residual: torch.Tensor | None = None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual, forward_batch)
        assert residual is not None  # a config has at least one layer
        return hidden_states, residual


class DiffusionLM(nn.Module):
    """A full-bidirectional language model that computes logits only where they are asked for.

    ``forward_batch.model_specific_states["acache"].logit_rows`` (int64 ``[M]``, rows of this ragged batch)
    names the rows whose logits are needed; M = 0 skips the output head. Without that key every row gets its
    logits.
    """

    weight_names: WeightNames

    def __init__(
        self, config: DiffusionLMConfig, quant_config: QuantizationConfig | None = None, prefix: str = ""
    ) -> None:
        super().__init__()
        if get_parallel().pp_size > 1:
            raise ValueError(f"--pp-size: pipeline parallelism is not supported for {type(self).__name__}")
        self.config = config
        self.quant_config = quant_config
        self.model = DiffusionBackbone(config, quant_config, add_prefix("model", prefix))
        if config.tie_word_embeddings:
            self.lm_head = self.model.embed_tokens
        else:
            self.lm_head = ParallelLMHead(
                config.embedding_rows,
                config.hidden_size,
                quant_config=quant_config,
                prefix=add_prefix("lm_head", prefix),
            )
        self.logits_processor = LogitsProcessor(config)
        self._loaded = False

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        input_embeds: torch.Tensor | None = None,
    ) -> LogitsProcessorOutput:
        """Run one ragged step.

        Args:
            input_ids: int64 ``[N]``. positions: int64 ``[N]``, absolute.

        Returns:
            ``full_logits`` float32 ``[M, vocab_size]`` in the order of ``logit_rows``.
        """
        hidden_states, residual = self.model(input_ids, positions, forward_batch, input_embeds)
        logits = self.compute_logits(hidden_states, residual, forward_batch)
        return LogitsProcessorOutput(next_token_logits=None, full_logits=logits)

    def compute_logits(
        self, hidden_states: torch.Tensor, residual: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """float32 ``[M, vocab_size]`` from the backbone's outputs, of which a step's rows are the first."""
        rows = _logit_rows(forward_batch)
        if rows is not None:
            hidden_states, residual = hidden_states[rows], residual[rows]
        if not len(hidden_states):
            return hidden_states.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        hidden_states, _ = self.model.norm(hidden_states, residual)
        metadata = LogitsMetadata.from_forward_batch(forward_batch)
        return self.logits_processor._get_logits(hidden_states, self.lm_head, metadata)

    def get_inv_freq(self) -> torch.Tensor:
        """Angles per position of the rotary embedding, float32 ``[head_dim / 2]``."""
        return self.model.rotary_emb.inv_freq

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint by its published tensor names; returns the names of the parameters loaded.

        The first call must bring every tensor; later ones may update some.

        Raises:
            ValueError: a tensor is unexpected, given twice, missing, or of the wrong shape; names it.
        """
        shapes = tensor_shapes(self.config) if self.quant_config is None else None
        tied, complete = self.config.tie_word_embeddings, not self._loaded
        loaded = load_checkpoint(self, self.weight_names, weights, shapes, tied=tied, complete=complete)
        self._loaded = True
        pack_linear_layers(self)
        return loaded


def _logit_rows(forward_batch: ForwardBatch) -> torch.Tensor | None:
    states = forward_batch.model_specific_states
    step = states.get("acache") if states else None
    return None if step is None else step.logit_rows
