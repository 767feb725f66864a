"""A tiny random Llama as ``transformers`` writes it: nothing of ours, to see that SGLang is left alone."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from integration_tests.oracle.checkpoints import CheckpointSpec, build_tokenizer


def write_llama(folder: Path) -> Path:
    spec = CheckpointSpec()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden,
        intermediate_size=spec.inner,
        num_hidden_layers=2,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        max_position_embeddings=spec.max_positions,
        bos_token_id=spec.special("<|startoftext|>"),
        eos_token_id=spec.eos_id,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    build_tokenizer(spec).save_pretrained(folder)
    return folder
