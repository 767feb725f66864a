"""What the loaded model and the launch fix for every request."""

from __future__ import annotations

from typing import Any

from sglang_acache.core.params import DiffusionParams
from sglang_acache.models.defaults import ModelDefaults, model_defaults
from sglang_acache.srt.launch import launch_params, launch_reuse
from sglang_acache.srt.request_fields import RequestLimits


def default_params(defaults: ModelDefaults) -> DiffusionParams:
    """The model table's row as request parameters: threshold decoding over the dual cache."""
    return DiffusionParams(
        block_length=defaults.block_length, threshold=defaults.threshold, remasking=defaults.remasking
    )


def vocabulary_limit(tokenizer: Any, config: Any) -> int:
    """Ids below this can be generated. Embedding rows past the tokenizer's last id are padding, never a token."""
    return config.vocab_size if tokenizer is None else min(len(tokenizer), config.vocab_size)


def request_limits(flags: Any, model_config: Any, tokenizer: Any) -> RequestLimits:
    """The limits the tokenizer manager checks requests against; ``flags`` is our config bag."""
    defaults = model_defaults(model_config.hf_config)
    return RequestLimits(
        defaults=launch_params(flags, default_params(defaults)),
        max_new_tokens=flags.diffusion_max_new_tokens,
        temperature=defaults.temperature,
        context_length=model_config.context_len,
        vocab_limit=vocabulary_limit(tokenizer, model_config.hf_config),
        needs_left_context=defaults.shift_logits,
        stop_token_ids=_stop_token_ids(tokenizer, defaults),
        reuse=launch_reuse(flags) if flags.enable_acache else None,
    )


def _stop_token_ids(tokenizer: Any, defaults: ModelDefaults) -> tuple[int, ...]:
    """Ids of the model's further stop texts, as far as its tokenizer has each as one token."""
    known = {} if tokenizer is None else tokenizer.get_vocab()
    return tuple(known[text] for text in defaults.stop_texts if text in known)
