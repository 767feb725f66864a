"""What a client may ask of a diffusion LLM: defaults filled in, everything else refused by name.

Runs in the tokenizer manager, before a request is tokenized into SGLang's wire format. The diffusion part travels to
the scheduler as one JSON string inside ``custom_params``, which SGLang carries untouched: its wire format allows
no nested values there.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from sglang_acache.core.canvas import canvas_length
from sglang_acache.core.params import FIELDS as DIFFUSION_FIELDS
from sglang_acache.core.params import DiffusionParams, ParamError, check_integer, override
from sglang_acache.core.reuse_params import ReuseParams, override_reuse

WIRE_KEY = "diffusion"
TEXT_FIELDS = ("suffix", "suffix_ids")
REUSE_FIELD = "acache"


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request's diffusion part, as it travels: parameters and the token ids after the hole."""

    params: DiffusionParams
    right_context: list[int] = field(default_factory=list)
    cache_options: dict[str, Any] = field(default_factory=dict)
    group: str = field(default="", compare=False)
    """The same for all parallel samples (``n``) of one prompt, which are not evidence that its text recurs."""

    def to_wire(self) -> dict[str, str]:
        return {WIRE_KEY: json.dumps(asdict(self))}

    @classmethod
    def from_wire(cls, custom_params: Mapping[str, Any] | None, defaults: DiffusionParams) -> RequestSpec:
        """The spec of a request; one that never passed the tokenizer manager gets ``defaults``."""
        if not custom_params or WIRE_KEY not in custom_params:
            return cls(defaults)
        fields = json.loads(custom_params[WIRE_KEY])
        return cls(**{**fields, "params": DiffusionParams(**fields["params"])})


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What the server's launch fixed for every request."""

    defaults: DiffusionParams
    max_new_tokens: int
    temperature: float
    context_length: int
    vocab_limit: int
    needs_left_context: bool
    stop_token_ids: tuple[int, ...] = ()
    reuse: ReuseParams | None = None
    """Defaults of ``custom_params.acache``; None where the server was started without --enable-acache."""


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "min_p": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "min_new_tokens": (None, 0),
    "logit_bias": (None, {}),
    "json_schema": (None, ""),
    "regex": (None, ""),
    "ebnf": (None, ""),
    "structural_tag": (None, ""),
    "beam_width": (None, 1),
    "watermark": (None,),
}
"""Sampling fields that a parallel denoiser cannot honour, with the values that ask for nothing."""

_REFUSED_INPUTS = (
    "bootstrap_host",
    "bootstrap_room",
    "audio_data",
    "custom_logit_processor",
    "decode_tp_size",
    "image_data",
    "input_embeds",
    "lora_path",
    "max_thinking_tokens",
    "multi_item_delimiter_indices",
    "positional_embed_overrides",
    "return_entropy",
    "return_hidden_states",
    "return_indexer_topk",
    "return_routed_experts",
    "return_sampling_mask",
    "session_id",
    "session_params",
    "token_ids_logprob",
    "token_indices_to_pool",
    "video_data",
    "watermark",
)
"""Request fields that a parallel denoiser cannot honour; None, False and what is empty ask for nothing."""

_OPENAI_NAMES = {"json_schema": "response_format / json_schema", "min_new_tokens": "min_tokens / min_new_tokens"}


def refuse_unsupported(request: Any, sampling: Mapping[str, Any]) -> None:
    """Raise ParamError for the first field that a diffusion LLM cannot honour."""
    for name, neutral in _NEUTRAL.items():
        if sampling.get(name) not in neutral:
            raise ParamError(_OPENAI_NAMES.get(name, name), "not supported by diffusion LLMs; leave it out")
    for name in _REFUSED_INPUTS:
        value = getattr(request, name, None)
        if value and not (isinstance(value, list) and not any(value)):
            raise ParamError(name, "not supported by diffusion LLMs; leave it out")
    if getattr(request, "return_logprob", False):
        _check_logprobs(request)


def _check_logprobs(request: Any) -> None:
    start = getattr(request, "logprob_start_len", None)
    if start is not None and start != -1:
        raise ParamError(
            "logprob_start_len", "input logprobs do not exist for a masked denoiser; leave it at -1 (output only)"
        )
    check_integer("top_logprobs_num", getattr(request, "top_logprobs_num", None) or 0, minimum=0)


def normalise_request(
    request: Any,
    left_context: list[int],
    sampling: Mapping[str, Any],
    limits: RequestLimits,
    tokenize: Callable[[str], list[int]] | None,
) -> dict[str, Any]:
    """The sampling parameters SGLang shall carry on with: defaults filled in, the diffusion part on the wire.

    Args:
        request: SGLang's ``GenerateReqInput`` of one request.
        left_context: its prompt's token ids.
        sampling: its sampling parameters, with the server's preferred ones underneath.
        tokenize: text to token ids without special tokens; None when the server has no tokenizer.

    Raises:
        ParamError: names the field and the fix; SGLang answers it with status 400.
    """
    out = dict(sampling)
    if out.get("n") is not None:
        check_integer("n", out["n"])
    if out.get("max_new_tokens") is None:
        out["max_new_tokens"] = limits.max_new_tokens
    check_integer("max_new_tokens", out["max_new_tokens"], minimum=0)
    if out.get("temperature") is None:
        out["temperature"] = limits.temperature
    out["stop_token_ids"] = [*_token_ids("stop_token_ids", out.get("stop_token_ids")), *limits.stop_token_ids]
    refuse_unsupported(request, out)
    spec = _parse_spec(out.get("custom_params"), len(left_context), limits, tokenize)
    _check_prompt(left_context, spec, limits)
    _check_canvas(len(left_context), spec, out["max_new_tokens"], limits)
    out["custom_params"] = spec.to_wire()
    return out


def _parse_spec(
    custom: Any, left: int, limits: RequestLimits, tokenize: Callable[[str], list[int]] | None
) -> RequestSpec:
    if custom is None:
        custom = {}
    if not isinstance(custom, dict):
        raise ParamError("custom_params", f"must be an object, got {type(custom).__name__}")
    values = {key: value for key, value in custom.items() if key not in (*TEXT_FIELDS, REUSE_FIELD)}
    params = override(limits.defaults, values, known=(*DIFFUSION_FIELDS, *TEXT_FIELDS, REUSE_FIELD))
    right = _right_context(custom, limits, tokenize)
    reuse = _reuse(custom.get(REUSE_FIELD), left, len(right), limits)
    return RequestSpec(params, right, reuse, group=uuid.uuid4().hex)


def _reuse(values: Any, left: int, right: int, limits: RequestLimits) -> dict[str, Any]:
    """The request's reuse parameters, as they travel; empty = the server's defaults."""
    if values is None:
        return {}
    reuse = override_reuse(limits.reuse or ReuseParams(), values, left + right, hole_at=left)
    if limits.reuse is None and reuse.enabled:
        raise ParamError(REUSE_FIELD, "this server reuses nothing; start it with --enable-acache")
    return asdict(reuse)


def _right_context(
    custom: Mapping[str, Any], limits: RequestLimits, tokenize: Callable[[str], list[int]] | None
) -> list[int]:
    text, ids = custom.get("suffix"), custom.get("suffix_ids")
    if text is not None and ids is not None:
        raise ParamError("suffix_ids", "cannot be combined with suffix")
    if ids is not None:
        valid = isinstance(ids, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
        if not valid or any(not 0 <= i < limits.vocab_limit for i in ids):
            raise ParamError("suffix_ids", f"must be a list of token ids in [0, {limits.vocab_limit})")
        return list(ids)
    if text is None:
        return []
    if not isinstance(text, str):
        raise ParamError("suffix", f"must be a string, got {type(text).__name__}")
    if tokenize is None:
        raise ParamError("suffix", "this server has no tokenizer; give suffix_ids")
    return tokenize(text)


def _token_ids(name: str, value: Any) -> list[int]:
    ids = [] if value is None else value
    if not isinstance(ids, list | tuple | set) or not all(isinstance(i, int) and i >= 0 for i in ids):
        raise ParamError(name, f"must be a list of token ids, got {value!r}")
    return list(ids)


def _check_prompt(left_context: list[int], spec: RequestSpec, limits: RequestLimits) -> None:
    if not left_context and (limits.needs_left_context or not spec.right_context):
        raise ParamError("prompt", "is empty; give at least one token")
    for token in left_context:
        if not 0 <= token < limits.vocab_limit:
            raise ParamError("input_ids", f"token id {token} is outside the vocabulary [0, {limits.vocab_limit})")


def _check_canvas(left: int, spec: RequestSpec, max_new_tokens: int, limits: RequestLimits) -> None:
    params, right = spec.params, len(spec.right_context)
    tokens = canvas_length(left, right, max_new_tokens, params.block_length)
    blocks = (tokens - left - right) // params.block_length
    if tokens > limits.context_length:
        raise ParamError(
            "max_new_tokens",
            f"the canvas of {left} prompt + {tokens - left - right} generated (max_new_tokens {max_new_tokens} in "
            f"blocks of {params.block_length}) + {right} suffix = {tokens} tokens is over the context length of "
            f"{limits.context_length}; shorten the prompt, max_new_tokens or block_length",
        )
    if params.steps is not None and params.steps < blocks:
        raise ParamError("steps", f"must be >= the number of blocks, {blocks}; got {params.steps}")
