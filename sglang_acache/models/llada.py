"""LLaDA (``LLaDAModelLM``): LLaDA-8B-Base, -Instruct, LLaDA-1.5, llada-tiny."""

from typing import ClassVar

from sglang_acache.models.diffusion_lm import DiffusionLM
from sglang_acache.models.weights import WeightNames


class LLaDAModelLM(DiffusionLM):
    """LLaDA's tensor names: ``ff_proj`` is the MLP's gated half, the top-level ``ff_out`` the output head."""

    packed_modules_mapping: ClassVar = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["ff_proj", "up_proj"],
    }
    weight_names = WeightNames(
        layer_prefix="model.transformer.blocks",
        in_layer={
            "attn_norm": ("input_layernorm", None),
            "q_proj": ("self_attn.qkv_proj", "q"),
            "k_proj": ("self_attn.qkv_proj", "k"),
            "v_proj": ("self_attn.qkv_proj", "v"),
            "attn_out": ("self_attn.o_proj", None),
            "ff_norm": ("post_attention_layernorm", None),
            "ff_proj": ("mlp.gate_up_proj", 0),
            "up_proj": ("mlp.gate_up_proj", 1),
            "ff_out": ("mlp.down_proj", None),
        },
        outside={
            "model.transformer.wte": "model.embed_tokens",
            "model.transformer.ln_f": "model.norm",
            "model.transformer.ff_out": "lm_head",
        },
        head="model.transformer.ff_out",
    )


EntryClass = LLaDAModelLM
