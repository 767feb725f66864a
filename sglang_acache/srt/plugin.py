"""Entry point of ``sglang.srt.plugins``: attaches this package to SGLang, in every process, or ends it with exit 2."""

from __future__ import annotations

import os
import sys
import traceback

MODEL_PACKAGE = "sglang_acache.models"


def register() -> None:
    """Register models, backends and hooks. SGLang swallows exceptions of plugins, so a failure exits instead."""
    from sglang_acache.srt import hooks

    problems = hooks.mismatches()
    if problems:
        print(hooks.mismatch_report(problems), file=sys.stderr)
        sys.exit(2)
    try:
        _register_models()
        _register_backends()
        hooks.register()
    except Exception:
        traceback.print_exc()
        print("error: sglang-acache could not attach itself; run `python -m sglang_acache check`", file=sys.stderr)
        sys.exit(2)


def _register_models() -> None:
    from sglang.srt.arg_groups.overrides import register_model_override
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    from sglang_acache.models.configs import register_configs
    from sglang_acache.models.defaults import MODEL_DEFAULTS
    from sglang_acache.srt.launch import model_overrides, resolve_diffusion

    package = os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", MODEL_PACKAGE)
    if package != MODEL_PACKAGE:
        print(
            f"warning: SGLANG_EXTERNAL_MODEL_PACKAGE is {package}, so LLaDA and Dream are not registered; "
            "unset it to serve them",
            file=sys.stderr,
        )
    register_configs()
    for architecture in MODEL_DEFAULTS:
        register_model_override(architecture)(model_overrides)
    register_resolution_hook("handle_dllm_inference")(resolve_diffusion)


def _register_backends() -> None:
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.mem_cache.registry import register_radix_cache_backend
    from sglang.srt.server_args import add_attention_backend_choices

    from sglang_acache.srt import launch
    from sglang_acache.srt.affix_cache import build_affix_cache
    from sglang_acache.srt.attention_backend import backend_factory

    add_attention_backend_choices(list(launch.ATTENTION_BACKENDS))
    for name in launch.ATTENTION_BACKENDS:
        register_attention_backend(name)(backend_factory(name.removeprefix("acache_")))
    register_radix_cache_backend(launch.RADIX_CACHE_BACKEND, build_affix_cache)
