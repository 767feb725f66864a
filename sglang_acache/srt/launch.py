"""From a command line to a configuration that a diffusion model can run on, or one clear error."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from sglang_acache.core.params import FIELDS, DiffusionParams, ParamError, check_integer, override
from sglang_acache.core.reuse_params import ReuseParams, override_reuse
from sglang_acache.models.defaults import MODEL_DEFAULTS
from sglang_acache.models.names import ensure_available, is_short_name, resolve_model
from sglang_acache.srt.affix_file import DeclarationChecker, SpanLimits, plain_encoder, read_affix_file

PREFIX = "diffusion_"
RADIX_CACHE_BACKEND = "acache"
ATTENTION_BACKENDS = ("acache_torch", "acache_triton", "acache_flashinfer")


class LaunchError(Exception):
    """A launch value that cannot be honoured; names the flag and the fix. Ends the launch with exit code 2."""


def is_ours(architectures: list[str] | None) -> bool:
    """Whether a checkpoint's ``architectures`` name a full-bidirectional diffusion LLM that we serve."""
    return bool(architectures) and architectures[0] in MODEL_DEFAULTS  # type: ignore[index]


def prepare(server_args: Any) -> None:
    """Before resolution: turn a short model name into its id or bundled folder, and check that it can be had."""
    name = server_args.model_path
    if not is_short_name(name):
        return
    try:
        server_args.model_path = ensure_available(resolve_model(name), server_args.revision)
    except ValueError as error:
        raise LaunchError(str(error)) from error
    if server_args.served_model_name is None:
        server_args.served_model_name = name


def validate(server_args: Any) -> None:
    """After resolution: our flags need our models, and our models refuse what they cannot do."""
    from sglang.srt.arg_groups.overrides import model_config_of, resolving_view

    view = resolving_view(server_args)
    if str(view.model_path).lower() in ("none", "dummy"):
        return
    model_config = model_config_of(server_args)
    architectures = getattr(model_config.hf_config, "architectures", None)
    if not is_ours(architectures):
        if server_args.enable_acache:
            raise LaunchError(
                f"--enable-acache needs a full-bidirectional diffusion LLM ({', '.join(MODEL_DEFAULTS)}); "
                f"{view.model_path} is {(architectures or ['unknown'])[0]}. Drop the flag, or choose such a model."
            )
        return
    _check_own_flags(server_args)
    for flag, refused, fix in _incompatible(view):
        if refused:
            raise LaunchError(f"{flag} does not work with diffusion LLMs; {fix}")
    if server_args.acache_affix_file is not None:
        _check_affix_file(server_args, view, model_config)
    os.environ.setdefault("SGLANG_EAGER_INPUT_NO_COPY", "1")  # a ragged step is built fresh: nothing to copy into


def _check_own_flags(server_args: Any) -> None:
    try:
        launch_params(server_args, DiffusionParams())
        launch_reuse(server_args)
        for name in ("diffusion_max_new_tokens", "diffusion_step_tokens", "acache_min_affix_tokens"):
            check_integer(name, getattr(server_args, name))
        if server_args.acache_max_shared_tokens is not None:
            check_integer("acache_max_shared_tokens", server_args.acache_max_shared_tokens)
    except ParamError as error:
        raise _flag_error(error) from error


def _flag_error(error: ParamError) -> LaunchError:
    return LaunchError(f"--{str(error).replace('_', '-', error.field.count('_'))}")


def _check_affix_file(server_args: Any, view: Any, model_config: Any) -> None:
    """Refuse a file with a span that could never be read, before the model is loaded."""
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    from sglang_acache.srt.limits import vocabulary_limit

    tokenizer = None
    if not view.skip_tokenizer_init:
        tokenizer = get_tokenizer(
            view.tokenizer_path,
            tokenizer_mode=view.tokenizer_mode,
            trust_remote_code=view.trust_remote_code,
            revision=view.revision,
            tokenizer_backend=view.tokenizer_backend,
        )
    checker = DeclarationChecker(
        plain_encoder(tokenizer),
        vocabulary_limit(tokenizer, model_config.hf_config),
        SpanLimits(
            server_args.acache_min_affix_tokens, model_config.context_len, server_args.acache_max_shared_tokens
        ),
    )
    try:
        read_affix_file(server_args.acache_affix_file, checker)
    except ParamError as error:
        raise _flag_error(error) from error


def launch_params(source: Any, defaults: DiffusionParams) -> DiffusionParams:
    """``defaults`` with the launch flags ``--diffusion-*`` applied; ``source`` is a ServerArgs or its config bag."""
    values = {name: getattr(source, PREFIX + name) for name in FIELDS}
    try:
        return override(defaults, {name: value for name, value in values.items() if value is not None})
    except ParamError as error:
        raise ParamError(PREFIX + error.field, str(error).removeprefix(error.field + ": ")) from error


def launch_reuse(source: Any) -> ReuseParams:
    """Reuse defaults from the flags ``--acache-*``; ``source`` is a ServerArgs or its config bag."""
    names = ("anchor_ratio", "selector", "coverage", "probe")
    values = {name: getattr(source, f"acache_{name}") for name in names}
    try:
        return override_reuse(ReuseParams(), values, prompt_tokens=0)
    except ParamError as error:
        raise ParamError(error.field.replace(".", "_"), str(error).removeprefix(error.field + ": ")) from error


def _incompatible(view: Any) -> list[tuple[str, bool, str]]:
    """(flag, whether it is set, what to do instead), for what this scheduler does not implement."""
    drop = "drop the flag"
    return [
        ("--pp-size", view.pp_size > 1, "use --tp-size"),
        ("--dp-size", view.dp_size > 1, "start several servers"),
        ("--enable-lora", bool(view.enable_lora or view.lora_paths), "merge the adapter into the weights"),
        ("--disaggregation-mode", view.disaggregation_mode != "null", drop),
        ("--enable-hierarchical-cache", bool(view.enable_hierarchical_cache), drop),
        ("--enable-lmcache", bool(view.enable_lmcache), drop),
        ("--enable-mixed-chunk", bool(view.enable_mixed_chunk), drop),
        ("--speculative-algorithm", view.speculative_algorithm is not None, drop),
        ("--dllm-algorithm", view.dllm_algorithm is not None, "this model's algorithm is chosen by itself"),
        ("--tokenizer-worker-num", view.tokenizer_worker_num > 1, "leave it at 1"),
        ("--kv-cache-dtype", view.kv_cache_dtype != "auto", "leave it at auto"),
        ("--is-embedding", bool(view.is_embedding), drop),
        (
            "--attention-backend",
            view.attention_backend not in ATTENTION_BACKENDS,
            f"choose one of {', '.join(ATTENTION_BACKENDS)}",
        ),
        ("--page-size", view.page_size != 1, "leave it unset: every position has a slot of its own"),
    ]


def default_attention_backend() -> str:
    return "acache_triton" if torch.cuda.is_available() else "acache_torch"


def model_overrides(server_args: Any, hf_config: Any) -> Mapping[str, Any]:
    """Fields that SGLang lets a model decide; registered for each of our architectures."""
    raw = getattr(server_args, "_raw_input", {})
    return {
        # A step's commits decide what the next step forwards, so nothing can be scheduled ahead.
        "disable_overlap_schedule": True,
        "attention_backend": raw.get("attention_backend") or default_attention_backend(),
        "page_size": raw.get("page_size") or 1,
    }


def resolve_diffusion(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Resolution hook around SGLang's dLLM step: the fields a model may not decide by itself."""
    from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of, resolving_view
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    previous(server_args)
    if not is_ours(getattr(model_config_of(server_args).hf_config, "architectures", None)):
        return
    graphs = resolving_view(server_args).cuda_graph_config
    sizes = [] if graphs.decode.backend == Backend.DISABLED else graphs.decode.bs
    for phase in (Phase.DECODE, Phase.PREFILL):
        graphs = with_phase(graphs, phase, backend=Backend.DISABLED)
    declare_resolution(
        server_args,
        "sglang_acache",
        radix_cache_backend=RADIX_CACHE_BACKEND,
        cuda_graph_config=graphs,  # SGLang captures none of its own: ours are in srt/graphs.py
        diffusion_graph_requests=list(sizes or []),
        chunked_prefill_size=-1,
    )
