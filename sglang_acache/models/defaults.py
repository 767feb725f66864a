"""How each architecture is decoded unless the launch flags or the request say otherwise: one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_acache.models.configs import DiffusionLMConfig


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """Decoding defaults of one architecture.

    ``shift_logits``: the prediction for position i is read at position i - 1. ``steps`` is the published
    fixed schedule, per block of ``block_length`` tokens (one token a step), unused while ``threshold`` is in
    force. ``stop_texts`` are special tokens that end an answer besides the end-of-sequence token, where the
    tokenizer knows them.
    """

    shift_logits: bool
    remasking: str
    block_length: int = 32
    threshold: float = 0.9
    temperature: float = 0.0
    steps: int = 32
    stop_texts: tuple[str, ...] = ()


MODEL_DEFAULTS: Mapping[str, ModelDefaults] = {
    "LLaDAModelLM": ModelDefaults(shift_logits=False, remasking="low_confidence", stop_texts=("<|eot_id|>",)),
    # Dream is published with fixed steps and the rule `entropy`; a threshold (Fast-dLLM) wants a probability
    # to compare with, which is `maskgit_plus`.
    "DreamModel": ModelDefaults(shift_logits=True, remasking="maskgit_plus", stop_texts=("<|im_end|>",)),
}


def model_defaults(config: DiffusionLMConfig) -> ModelDefaults:
    """The defaults of a checkpoint: its architecture's, with the block length its config.json names, if any.

    Raises:
        ValueError: the architecture is not in the table.
    """
    names: list[Any] = list(config.architectures or [])
    known = [name for name in names if name in MODEL_DEFAULTS]
    if not known:
        raise ValueError(f"architectures={names!r} is not supported; supported: {', '.join(MODEL_DEFAULTS)}")
    defaults = MODEL_DEFAULTS[known[0]]
    if config.default_block_length is None:
        return defaults
    return replace(defaults, block_length=config.default_block_length, steps=config.default_block_length)


def mask_token_id(config: DiffusionLMConfig) -> int:
    """The token that stands for "not generated yet": ``mask_token_id`` of config.json, always present."""
    assert config.mask_token_id is not None  # DiffusionLMConfig refuses a config without it
    return config.mask_token_id
