"""Dream (``DreamModel``): Dream-v0-Base-7B and -Instruct-7B, Dream-Coder, DiffuCoder."""

from typing import ClassVar

from sglang_acache.models.diffusion_lm import DiffusionLM
from sglang_acache.models.weights import WeightNames


class DreamModel(DiffusionLM):
    """Dream's tensor names, which are Qwen2's."""

    packed_modules_mapping: ClassVar = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    weight_names = WeightNames(
        layer_prefix="model.layers",
        in_layer={
            "input_layernorm": ("input_layernorm", None),
            "self_attn.q_proj": ("self_attn.qkv_proj", "q"),
            "self_attn.k_proj": ("self_attn.qkv_proj", "k"),
            "self_attn.v_proj": ("self_attn.qkv_proj", "v"),
            "self_attn.o_proj": ("self_attn.o_proj", None),
            "post_attention_layernorm": ("post_attention_layernorm", None),
            "mlp.gate_proj": ("mlp.gate_up_proj", 0),
            "mlp.up_proj": ("mlp.gate_up_proj", 1),
            "mlp.down_proj": ("mlp.down_proj", None),
        },
        outside={
            "model.embed_tokens": "model.embed_tokens",
            "model.norm": "model.norm",
            "lm_head": "lm_head",
        },
        head="lm_head",
    )


EntryClass = DreamModel
