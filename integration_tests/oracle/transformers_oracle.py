"""A published-layout checkpoint as a ``transformers`` Llama or Qwen2 with a full attention mask, in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from integration_tests.oracle.checkpoints import LLADA, published_name


class TransformersOracle:
    """Logits of a whole canvas, every position seeing every position.

    Attributes:
        vocab_size: real tokens; ``logits`` has no more columns.
        model: the ``transformers`` module, whose weights other oracles may take.
    """

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        config = json.loads((folder / "config.json").read_text())
        tensors = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors |= load_file(file)
        architecture = config["architectures"][0]
        self.model = _llama(config) if architecture == LLADA else _qwen2(config)
        self.model.load_state_dict(_mapped(self.model, architecture, tensors))
        self.model.to(dtype).eval().requires_grad_(False)
        self.vocab_size: int = config["vocab_size"]
        self.mask_id: int = config["mask_token_id"]
        self.eos_id: int = config["eos_token_id"]

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens int64 ``[T]`` -> ``[T, vocab_size]``."""
        length = len(tokens)
        everything = torch.zeros(1, 1, length, length, dtype=self.model.dtype)
        output = self.model(input_ids=tokens[None], attention_mask=everything, use_cache=False)
        return output.logits[0, :, : self.vocab_size]


def _llama(config: dict[str, Any]) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config["embedding_size"],
            hidden_size=config["d_model"],
            intermediate_size=config["mlp_hidden_size"],
            num_hidden_layers=config["n_layers"],
            num_attention_heads=config["n_heads"],
            num_key_value_heads=config["n_kv_heads"],
            max_position_embeddings=config["max_sequence_length"],
            rms_norm_eps=config["rms_norm_eps"],
            rope_parameters={"rope_type": "default", "rope_theta": config["rope_theta"]},
            attention_bias=config["include_qkv_bias"],
            tie_word_embeddings=config["weight_tying"],
            attn_implementation="eager",
        )
    )


def _qwen2(config: dict[str, Any]) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_hidden_layers=config["num_hidden_layers"],
            num_attention_heads=config["num_attention_heads"],
            num_key_value_heads=config["num_key_value_heads"],
            max_position_embeddings=config["max_position_embeddings"],
            rms_norm_eps=config["rms_norm_eps"],
            rope_parameters={"rope_type": "default", "rope_theta": config["rope_theta"]},
            tie_word_embeddings=config["tie_word_embeddings"],
            attn_implementation="eager",
        )
    )


def _mapped(model: torch.nn.Module, architecture: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The checkpoint under the model's own names; every tensor of it must be used."""
    state = {}
    used = set()
    for name, own in model.state_dict().items():
        theirs = published_name(architecture, name)
        if theirs not in tensors and name == "lm_head.weight":  # tied
            theirs = published_name(architecture, "model.embed_tokens.weight")
        used.add(theirs)
        # Llama's attention_bias adds one to the output projection too, which LLaDA has not.
        state[name] = torch.zeros_like(own) if name.endswith("o_proj.bias") else tensors[theirs].float()
    unused = sorted(tensors.keys() - used)
    if unused:
        raise ValueError(f"checkpoint tensors without a place: {unused}")
    return state
