"""Hooks on SGLang's front end: they act only when the served model is a diffusion LLM."""

from __future__ import annotations

import functools
from typing import Any

from sglang_acache.core.params import ParamError
from sglang_acache.srt.launch import is_ours
from sglang_acache.srt.request_fields import RequestLimits, normalise_request


def validate_one_request(manager: Any, obj: Any, input_ids: list[int] | None) -> None:
    """BEFORE ``TokenizerManager._validate_one_request``: fill in defaults, refuse what cannot be honoured."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    if not is_ours(manager.model_config.hf_config.architectures) or not isinstance(obj, GenerateReqInput):
        return
    given = obj.sampling_params or {}
    if not isinstance(given, dict):
        raise ParamError("sampling_params", "must be one object for one prompt, a list only for a list of prompts")
    sampling = {**(manager.preferred_sampling_params or {}), **given}
    obj.sampling_params = normalise_request(
        obj, input_ids or [], sampling, _limits(manager), _tokenize(manager.tokenizer)
    )


def build_completion_sampling_params(result: dict[str, Any], serving: Any, request: Any) -> dict[str, Any]:
    """AFTER ``OpenAIServingCompletion._build_sampling_params``: ``suffix``, and our defaults for what was left out.

    The OpenAI schema's own defaults (16 tokens, temperature 1) are indistinguishable from a client's values once
    they are in the dict, so the fields the client really set decide.
    """
    if not is_ours(serving.tokenizer_manager.model_config.hf_config.architectures):
        return result
    for field, key in (("max_tokens", "max_new_tokens"), ("temperature", "temperature")):
        if field not in request.model_fields_set:
            result[key] = None
    if request.suffix:
        custom = dict(result.get("custom_params") or {})
        custom.setdefault("suffix", request.suffix)
        result["custom_params"] = custom
    return result


def default_sampling_params(result: dict[str, Any], model_config: Any) -> dict[str, Any]:
    """AFTER ``ModelConfig.get_default_sampling_params``: chat requests without a temperature are greedy."""
    if not is_ours(model_config.hf_config.architectures):
        return result
    from sglang_acache.models.defaults import model_defaults

    return {"temperature": model_defaults(model_config.hf_config).temperature, **result}


def name_contract_field(result: str | None, body: Any) -> str | None:
    """AFTER ``generate_contract_error``: SGLang's schema error says what is wrong, this says in which field."""
    if result is None or not isinstance(body, dict) or not _serves_ours():
        return result
    from sglang.api.v1.api_types import GenerateRequest, JsonContractError

    sampling = body.get("sampling_params")
    fields = [(key, {key: value}) for key, value in body.items() if key != "sampling_params"]
    if isinstance(sampling, dict):
        fields += [(key, {"sampling_params": {key: value}}) for key, value in sampling.items()]
    for key, alone in fields:
        try:
            GenerateRequest.from_json_value(alone)
        except JsonContractError as error:
            return f"{key}: {error}"
    return result


def _serves_ours() -> bool:
    """Whether this HTTP process serves one of our models."""
    from sglang.srt.entrypoints import http_server

    state = http_server._global_state
    return state is not None and is_ours(state.tokenizer_manager.model_config.hf_config.architectures)


def _limits(manager: Any) -> RequestLimits:
    limits = getattr(manager, "_acache_limits", None)
    if limits is None:
        from sglang.srt.runtime_context import get_context

        from sglang_acache.srt.flags import NAMESPACE
        from sglang_acache.srt.limits import request_limits

        flags = get_context().config_bag(NAMESPACE)
        limits = manager._acache_limits = request_limits(flags, manager.model_config, manager.tokenizer)
    return limits


def _tokenize(tokenizer: Any) -> Any:
    return None if tokenizer is None else functools.partial(tokenizer.encode, add_special_tokens=False)
