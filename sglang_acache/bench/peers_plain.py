"""LLaDA's published loop over a ``transformers`` Llama: no cache, the whole canvas at every step, padded batches.

Depends on torch and transformers only: ``peers_worker`` loads it by path, in whatever interpreter it runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

Tensors = dict[str, torch.Tensor]

_OUTSIDE = {
    "model.transformer.wte": "model.embed_tokens",
    "model.transformer.ln_f": "model.norm",
    "model.transformer.ff_out": "lm_head",
}
_INSIDE = {
    "attn_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_norm": "post_attention_layernorm",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}
_LAYERS = "model.transformer.blocks."


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Callable[[list[list[int]], dict[str, Any]], torch.Tensor]:
    """A function of prompts and the run's parameters that gives the answers ``[B, new_tokens]``."""
    config = json.loads((folder / "config.json").read_text())
    model = build(config, read_tensors(folder)).to(dtype)

    def answer(prompts: list[list[int]], order: dict[str, Any]) -> torch.Tensor:
        return generate(
            model, prompts, order["new_tokens"], order["block_length"], order["steps"], config["mask_token_id"]
        )

    return answer


def build(config: dict[str, Any], tensors: Tensors) -> LlamaForCausalLM:
    """The checkpoint as a Llama; its bidirectional mask is given at every call."""
    theta = config["rope_theta"]
    made = LlamaConfig(
        vocab_size=config["embedding_size"],
        hidden_size=config["d_model"],
        intermediate_size=config["mlp_hidden_size"],
        num_hidden_layers=config["n_layers"],
        num_attention_heads=config["n_heads"],
        num_key_value_heads=config["n_kv_heads"] or config["n_heads"],
        max_position_embeddings=config["max_sequence_length"],
        rms_norm_eps=config["rms_norm_eps"],
        tie_word_embeddings=config["weight_tying"],
        attn_implementation="sdpa",
    )
    made.rope_theta = theta  # transformers 4
    made.rope_parameters = {"rope_type": "default", "rope_theta": theta}  # transformers 5
    model = LlamaForCausalLM(made)
    missing, unexpected = model.load_state_dict({llama_name(name): t for name, t in tensors.items()}, strict=False)
    absent = [name for name in missing if not (name == "lm_head.weight" and config["weight_tying"])]
    if absent or unexpected:
        raise ValueError(f"the checkpoint does not fit a Llama: missing {absent[:3]}, unexpected {unexpected[:3]}")
    return model.eval().requires_grad_(False)


def llama_name(name: str) -> str:
    """``transformers``' name of a published LLaDA tensor."""
    stem, _, suffix = name.rpartition(".")
    if stem in _OUTSIDE:
        return f"{_OUTSIDE[stem]}.{suffix}"
    index, _, part = stem.removeprefix(_LAYERS).partition(".")
    return f"model.layers.{index}.{_INSIDE[part]}.{suffix}"


def read_tensors(folder: Path) -> Tensors:
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return {name: tensor.float() for name, tensor in tensors.items()}


def pad(prompts: list[list[int]], new_tokens: int, mask_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Canvases ``[B, T]``, answers all in the same columns, and which tokens are real."""
    longest = max(map(len, prompts))
    canvas = torch.full((len(prompts), longest + new_tokens), mask_id)
    real = torch.ones_like(canvas, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        start = longest - len(prompt)
        canvas[row, :start], real[row, :start] = 0, False
        canvas[row, start:longest] = torch.tensor(prompt, dtype=canvas.dtype)
    return canvas, real


@torch.no_grad()
def generate(
    model: LlamaForCausalLM, prompts: list[list[int]], new_tokens: int, block_length: int, steps: int, mask_id: int
) -> torch.Tensor:
    """Blocks left to right; each step commits the surest of the block's masks, as many as the schedule says."""
    canvas, real = pad(prompts, new_tokens, mask_id)
    first = canvas.shape[1] - new_tokens
    positions = (real.cumsum(1) - 1).clamp(min=0)
    attention = torch.zeros(real.shape, dtype=model.dtype).masked_fill(~real, torch.finfo(model.dtype).min)
    attention = attention[:, None, None, :].expand(-1, 1, canvas.shape[1], -1)  # [B, 1, T, T]: all see all
    masked = torch.zeros_like(real)
    masked[:, first:] = True
    blocks = new_tokens // block_length
    for block in range(blocks):
        start = first + block * block_length
        for count in schedule(block_length, steps // blocks):
            logits = model(
                input_ids=canvas, attention_mask=attention, position_ids=positions, use_cache=False
            ).logits  # [B, T, V]
            probability, token = logits.double().softmax(-1).max(-1)
            open_here = masked.clone()
            open_here[:, :start] = False
            open_here[:, start + block_length :] = False
            chosen = probability.masked_fill(~open_here, -1.0).topk(count, dim=1).indices
            canvas.scatter_(1, chosen, token.gather(1, chosen))
            masked.scatter_(1, chosen, False)
    return canvas[:, first:]


def schedule(masks: int, steps: int) -> list[int]:
    """How many tokens each step of a block commits; the remainder goes to the first steps."""
    base, more = divmod(masks, steps)
    return [base + (step < more) for step in range(steps)]
