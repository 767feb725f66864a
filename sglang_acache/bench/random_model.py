"""Random checkpoints in the layouts published for LLaDA and Dream: what speed is measured on without weights.

Weights are drawn so that greedy answers are clear: logits spread enough that confidences fill (0, 1) and argmax
gaps stand far above float noise, and attention is peaked enough that what a mask becomes depends on its position
and its context. Everything follows from the seed.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

Tensors = dict[str, torch.Tensor]

LLADA, DREAM = "LLaDAModelLM", "DreamModel"

# The order of these is the order of their ids, which are the last ones of the vocabulary.
SPECIALS = ("<|unknown|>", "<|startoftext|>", "<|endoftext|>", "<|eot_id|>", "<|mdm_mask|>")

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }} <|eot_id|> {% endfor %}"
    "{% if add_generation_prompt %}<|startoftext|>{% endif %}"
)

_LLADA_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out",
    "post_attention_layernorm": "ff_norm",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}
_LLADA_OUTSIDE = {
    "model.embed_tokens": "model.transformer.wte",
    "model.norm": "model.transformer.ln_f",
    "lm_head": "model.transformer.ff_out",
}


@dataclass(frozen=True)
class CheckpointSpec:
    """Shape of one random checkpoint.

    ``embedding_rows`` above ``vocab_size`` are padding rows (LLaDA only). ``gain`` sets how far the logits
    spread. ``eos_token_id`` and ``mask_token_id`` default to the ids of their tokens in ``SPECIALS``.
    """

    architecture: str = LLADA
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 4
    layers: int = 3
    inner: int = 160
    vocab_size: int = 200
    embedding_rows: int | None = None
    max_positions: int = 1024
    rope_theta: float = 10000.0
    tied: bool = False
    qkv_bias: bool = False
    dtype: torch.dtype = torch.float32
    seed: int = 0
    gain: float = 8.0
    eos_token_id: int | None = None
    block_length: int | None = None

    def special(self, token: str) -> int:
        """Id of one of ``SPECIALS``."""
        return self.vocab_size - len(SPECIALS) + SPECIALS.index(token)

    @property
    def mask_id(self) -> int:
        return self.special("<|mdm_mask|>")

    @property
    def eos_id(self) -> int:
        return self.special("<|endoftext|>") if self.eos_token_id is None else self.eos_token_id

    @property
    def words(self) -> int:
        """Ordinary tokens: ids 0 .. words - 1, spelt w0, w1, ..."""
        return self.vocab_size - len(SPECIALS)


def dream_spec(**changes: object) -> CheckpointSpec:
    """Dream's: grouped queries, biases, a shift of the logits (which is the loop's business)."""
    return replace(CheckpointSpec(architecture=DREAM, kv_heads=2, qkv_bias=True), **changes)  # type: ignore[arg-type]


def compute_bound_spec(layers: int = 8, hidden: int = 512, **changes: object) -> CheckpointSpec:
    """A LLaDA-architecture model big enough that a step's time is the model's forward (25 M parameters)."""
    spec = CheckpointSpec(
        hidden=hidden,
        heads=hidden // 64,
        kv_heads=hidden // 64,
        layers=layers,
        inner=hidden * 11 // 4,
        vocab_size=4096,
        max_positions=4096,
    )
    return replace(spec, **changes)  # type: ignore[arg-type]


def write_checkpoint(folder: Path, spec: CheckpointSpec) -> Path:
    """Write config.json, model.safetensors and the tokenizer's files; returns ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    config = _llada_config(spec) if spec.architecture == LLADA else _dream_config(spec)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tensors = {published_name(spec.architecture, name): t for name, t in random_tensors(spec).items()}
    save_file({name: t.to(spec.dtype) for name, t in tensors.items()}, folder / "model.safetensors")
    build_tokenizer(spec).save_pretrained(folder)
    return folder


def random_tensors(spec: CheckpointSpec) -> Tensors:
    """Float32 weights under the names that ``transformers`` gives a Llama."""
    draw = torch.Generator().manual_seed(spec.seed)

    def normal(*shape: int, std: float) -> torch.Tensor:
        return torch.randn(*shape, generator=draw) * std

    def norm_weight() -> torch.Tensor:
        return 1.0 + normal(spec.hidden, std=0.1)

    rows, hidden, inner = spec.embedding_rows or spec.vocab_size, spec.hidden, spec.inner
    keys = hidden // spec.heads * spec.kv_heads
    unit, narrow = 1 / math.sqrt(hidden), 1 / math.sqrt(inner)
    tensors = {"model.embed_tokens.weight": normal(rows, hidden, std=1.0), "model.norm.weight": norm_weight()}
    tensors["model.embed_tokens.weight"][spec.mask_id] *= 0.1  # a mask is mostly what it attends to
    if not spec.tied:
        tensors["lm_head.weight"] = normal(rows, hidden, std=spec.gain * unit)
    for index in range(spec.layers):
        layer = {
            "input_layernorm.weight": norm_weight(),
            "self_attn.q_proj.weight": normal(hidden, hidden, std=2.0 * unit),
            "self_attn.k_proj.weight": normal(keys, hidden, std=2.0 * unit),
            "self_attn.v_proj.weight": normal(keys, hidden, std=1.5 * unit),
            "self_attn.o_proj.weight": normal(hidden, hidden, std=1.5 * unit),
            "post_attention_layernorm.weight": norm_weight(),
            "mlp.gate_proj.weight": normal(inner, hidden, std=unit),
            "mlp.up_proj.weight": normal(inner, hidden, std=unit),
            "mlp.down_proj.weight": normal(hidden, inner, std=1.5 * narrow),
        }
        if spec.qkv_bias:
            for part, size in (("q", hidden), ("k", keys), ("v", keys)):
                layer[f"self_attn.{part}_proj.bias"] = normal(size, std=0.3)
        tensors |= {f"model.layers.{index}.{name}": tensor for name, tensor in layer.items()}
    return tensors


def published_name(architecture: str, name: str) -> str:
    """The published checkpoint's name of the tensor that ``transformers`` calls ``name``."""
    if architecture == DREAM:
        return name
    stem, _, suffix = name.rpartition(".")
    if stem in _LLADA_OUTSIDE:
        return f"{_LLADA_OUTSIDE[stem]}.{suffix}"
    _, _, index, part = stem.split(".", 3)
    return f"model.transformer.blocks.{index}.{_LLADA_PARTS[part]}.{suffix}"


def build_tokenizer(spec: CheckpointSpec) -> PreTrainedTokenizerFast:
    """One token a word: ``w0 w1 ...``, separated by spaces; ids of the special tokens as in ``spec``."""
    vocabulary = {f"w{index}": index for index in range(spec.words)}
    vocabulary |= {token: spec.special(token) for token in SPECIALS}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIALS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=SPECIALS[0],
        bos_token="<|startoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        mask_token="<|mdm_mask|>",
        additional_special_tokens=["<|eot_id|>"],
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=spec.max_positions,
    )


def _llada_config(spec: CheckpointSpec) -> dict[str, object]:
    return {
        "activation_type": "silu",
        "alibi": False,
        "alibi_bias_max": 8.0,
        "architectures": [LLADA],
        "attention_dropout": 0.0,
        "attention_layer_norm": False,
        "attention_layer_norm_with_affine": True,
        "auto_map": {
            "AutoConfig": "configuration_llada.LLaDAConfig",
            "AutoModelForCausalLM": "modeling_llada.LLaDAModelLM",
            "AutoModel": "modeling_llada.LLaDAModelLM",
        },
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "block_type": "llama",
        "d_model": spec.hidden,
        "default_block_length": spec.block_length,
        "embedding_dropout": 0.0,
        "embedding_size": spec.embedding_rows or spec.vocab_size,
        "eos_token_id": spec.eos_id,
        "flash_attention": False,
        "include_bias": False,
        "include_qkv_bias": spec.qkv_bias,
        "init_device": "meta",
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "mask_token_id": spec.mask_id,
        "max_sequence_length": spec.max_positions,
        "mlp_hidden_size": spec.inner,
        "mlp_ratio": 4,
        "model_type": "llada",
        "multi_query_attention": None,
        "n_heads": spec.heads,
        "n_kv_heads": spec.kv_heads,
        "n_layers": spec.layers,
        "pad_token_id": spec.eos_id,
        "precision": "amp_bf16",
        "residual_dropout": 0.0,
        "rms_norm_eps": 1e-05,
        "rope": True,
        "rope_full_precision": True,
        "rope_theta": spec.rope_theta,
        "scale_logits": False,
        "torch_dtype": str(spec.dtype).removeprefix("torch."),
        "use_cache": False,
        "vocab_size": spec.vocab_size,
        "weight_tying": spec.tied,
    }


def _dream_config(spec: CheckpointSpec) -> dict[str, object]:
    if spec.embedding_rows not in (None, spec.vocab_size):
        raise ValueError("embedding_rows: Dream's layout has no padding rows of its own")
    return {
        "architectures": [DREAM],
        "attention_dropout": 0.0,
        "auto_map": {
            "AutoConfig": "configuration_dream.DreamConfig",
            "AutoModel": "modeling_dream.DreamModel",
        },
        "bos_token_id": spec.special("<|startoftext|>"),
        "default_block_length": spec.block_length,
        "eos_token_id": spec.eos_id,
        "hidden_act": "silu",
        "hidden_size": spec.hidden,
        "initializer_range": 0.02,
        "intermediate_size": spec.inner,
        "mask_token_id": spec.mask_id,
        "max_position_embeddings": spec.max_positions,
        "max_window_layers": 28,
        "model_type": "Dream",
        "num_attention_heads": spec.heads,
        "num_hidden_layers": spec.layers,
        "num_key_value_heads": spec.kv_heads,
        "pad_token_id": spec.eos_id,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": spec.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": spec.tied,
        "torch_dtype": str(spec.dtype).removeprefix("torch."),
        "use_cache": False,
        "use_sliding_window": False,
        "vocab_size": spec.vocab_size,
    }
