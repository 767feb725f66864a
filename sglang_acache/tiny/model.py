"""The LLaDA architecture in its smallest form: RMSNorm, rotary full attention, SwiGLU, untied output.

Module names are chosen so that `state_dict()` has the published checkpoint's tensor names
(``model.transformer.blocks.0.q_proj.weight`` ...). A block is split into `project` and `finish` so that a
caller can put keys and values from elsewhere between the two.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from sglang_acache.tiny import vocabulary as words


@dataclass(frozen=True)
class TinyConfig:
    d_model: int = 128
    n_heads: int = 4
    n_layers: int = 3
    mlp_hidden_size: int = 384
    vocab_size: int = words.VOCAB_SIZE
    rope_theta: float = 500000.0
    rms_norm_eps: float = 1e-5
    max_sequence_length: int = 4096

    @property
    def d_head(self) -> int:
        return self.d_model // self.n_heads

    def published(self) -> dict:
        """The fields of the published LLaDA config.json."""
        ids = words.TOKEN_IDS
        return {
            "architectures": ["LLaDAModelLM"],
            "model_type": "llada",
            **asdict(self),
            "n_kv_heads": self.n_heads,
            "mlp_ratio": 4,
            "embedding_size": self.vocab_size,
            "bos_token_id": ids[words.BOS],
            "eos_token_id": ids[words.EOS],
            "pad_token_id": ids[words.EOS],
            "mask_token_id": ids[words.MASK],
            "default_block_length": DEFAULT_BLOCK_LENGTH,
            **_PUBLISHED_CONSTANTS,
        }


DEFAULT_BLOCK_LENGTH = 4
"""Ours, not the published layout's: the block length the model was trained for, which servers then default to."""

_PUBLISHED_CONSTANTS = {
    "activation_type": "silu",
    "alibi": False,
    "alibi_bias_max": 8.0,
    "attention_dropout": 0.0,
    "attention_layer_norm": False,
    "attention_layer_norm_with_affine": True,
    "bias_for_layer_norm": False,
    "block_group_size": 1,
    "block_type": "llama",
    "embedding_dropout": 0.0,
    "flash_attention": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "init_cutoff_factor": None,
    "init_device": "meta",
    "init_fn": "mitchell",
    "init_std": 0.02,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "multi_query_attention": None,
    "precision": "amp_bf16",
    "residual_dropout": 0.0,
    "rope": True,
    "rope_full_precision": True,
    "scale_logits": False,
    "torch_dtype": "float32",
    "use_cache": False,
    "weight_tying": False,
}


def rotary(config: TinyConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each [T, d_head], for `positions` [T]."""
    half = torch.arange(0, config.d_head, 2, dtype=torch.float32) / config.d_head
    angles = positions.float()[:, None] * (config.rope_theta**-half)[None]
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate `x` [..., T, d_head], pairing the first half of a head with the second, in float32."""
    cos, sin = cos_sin
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class Block(nn.Module):
    def __init__(self, config: TinyConfig):
        super().__init__()
        d, hidden = config.d_model, config.mlp_hidden_size
        self.n_heads, self.d_head = config.n_heads, config.d_head
        self.q_proj = nn.Linear(d, d, bias=False)
        self.k_proj = nn.Linear(d, d, bias=False)
        self.v_proj = nn.Linear(d, d, bias=False)
        self.attn_out = nn.Linear(d, d, bias=False)
        self.ff_proj = nn.Linear(d, hidden, bias=False)
        self.up_proj = nn.Linear(d, hidden, bias=False)
        self.ff_out = nn.Linear(hidden, d, bias=False)
        self.attn_norm = RMSNorm(d, config.rms_norm_eps)
        self.ff_norm = RMSNorm(d, config.rms_norm_eps)

    def project(self, x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, d] -> rotated q, rotated k, v, each [B, H, T, d_head]."""
        h = self.attn_norm(x)
        q, k, v = (
            proj(h).unflatten(-1, (self.n_heads, self.d_head)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotate(q, cos_sin), rotate(k, cos_sin), v

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Residual stream x [B, T, d] and attention result [B, H, T, d_head] -> next residual stream."""
        x = x + self.attn_out(mixed.transpose(1, 2).flatten(-2))
        h = self.ff_norm(x)
        return x + self.ff_out(F.silu(self.ff_proj(h)) * self.up_proj(h))


class Transformer(nn.Module):
    def __init__(self, config: TinyConfig):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.ln_f = RMSNorm(config.d_model, config.rms_norm_eps)
        self.ff_out = nn.Linear(config.d_model, config.vocab_size, bias=False)


class TinyLLaDA(nn.Module):
    def __init__(self, config: TinyConfig | None = None):
        super().__init__()
        self.config = config or TinyConfig()
        self.model = nn.ModuleDict({"transformer": Transformer(self.config)})

    @property
    def transformer(self) -> Transformer:
        return cast(Transformer, self.model["transformer"])

    @property
    def blocks(self) -> list[Block]:
        return [cast(Block, block) for block in self.transformer.blocks]

    def embed(self, ids: Tensor) -> Tensor:
        return self.transformer.wte(ids)

    def head(self, x: Tensor) -> Tensor:
        """Residual stream [..., d] -> logits [..., vocab]."""
        return self.transformer.ff_out(self.transformer.ln_f(x))

    def forward(self, ids: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """ids [B, T], every position seeing every other.

        Returns for each block the residual stream after it [B, T, d] and its attention weights [B, H, T, T].
        """
        cos_sin = rotary(self.config, torch.arange(ids.shape[1]))
        x, streams, weights = self.embed(ids), [], []
        for block in self.blocks:
            q, k, v = block.project(x, cos_sin)
            scores = q @ k.transpose(-1, -2) * self.config.d_head**-0.5
            weights.append(scores.float().softmax(-1))
            x = block.finish(x, weights[-1].to(v.dtype) @ v)
            streams.append(x)
        return streams, weights

    def logits(self, ids: Tensor) -> Tensor:
        """ids [B, T] -> logits [B, T, vocab]."""
        streams, _ = self(ids)
        return self.head(streams[-1])


def save(model: TinyLLaDA, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config.published(), indent=2, sort_keys=True) + "\n")
    tensors = {name: value.detach().float().contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load(folder: Path) -> TinyLLaDA:
    fields = json.loads((folder / "config.json").read_text())
    model = TinyLLaDA(TinyConfig(**{name: fields[name] for name in TinyConfig.__dataclass_fields__}))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval()
