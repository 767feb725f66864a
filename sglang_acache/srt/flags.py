"""Our launch flags, as fields of SGLang's own ``ServerArgs``.

A subclass installed by a REPLACE hook reaches ``launch_server``, ``sglang serve``, ``sglang.Engine``, ``--config``
files, ``/server_info`` and every spawned process. This module must not postpone its annotations: msgspec reads them.
"""

# ruff: noqa: UP045
import argparse
import sys
from typing import Any, Optional

from sglang.srt.arg_groups.arg_utils import NS, A, Arg
from sglang.srt.server_args import ServerArgs

from sglang_acache.core.reuse_params import PROBES, SELECTORS

NAMESPACE = "acache"
_NS = NS(NAMESPACE)


class AcacheServerArgs(ServerArgs, kw_only=True, dict=True):  # type: ignore[call-arg,misc]
    """``ServerArgs`` plus the flags of this package; unset values fall back to the model's defaults table."""

    diffusion_block_length: A[
        Optional[int], Arg(help="Diffusion LLMs: tokens of one denoising block. Default: the model's."), _NS
    ] = None
    diffusion_steps: A[
        Optional[int],
        Arg(help="Diffusion LLMs: fixed denoising steps over the whole answer, instead of a threshold."),
        _NS,
    ] = None
    diffusion_threshold: A[
        Optional[float],
        Arg(help="Diffusion LLMs: commit every token at least this confident. Default: the model's."),
        _NS,
    ] = None
    diffusion_factor: A[
        Optional[float], Arg(help="Diffusion LLMs: Fast-dLLM's factor rule, instead of a threshold."), _NS
    ] = None
    diffusion_remasking: A[
        Optional[str], Arg(help="Diffusion LLMs: confidence rule. Default: the model's."), _NS
    ] = None
    diffusion_cache: A[
        Optional[str], Arg(help="Diffusion LLMs: K/V cache inside a request: none, prefix or dual (default)."), _NS
    ] = None
    diffusion_max_new_tokens: A[
        int, Arg(help="Diffusion LLMs: answer length in tokens where the client gives none."), _NS
    ] = 256
    diffusion_step_tokens: A[
        int, Arg(help="Diffusion LLMs: most tokens that one step forwards; a larger canvas goes alone."), _NS
    ] = 8192
    enable_acache: A[
        bool, Arg(help="Reuse the K/V of text that requests share (ACache), on diffusion LLMs."), _NS
    ] = False

    diffusion_graph_requests: A[
        Optional[list[int]], Arg(no_cli=True, resolvable=True), _NS
    ] = None  # sizes of the CUDA graphs of steps inside blocks, from SGLang's own flags for decode graphs

    acache_anchor_ratio: A[
        float, Arg(help="ACache: share of each reused span that every request recomputes, 0 to 1."), _NS
    ] = 0.2
    acache_selector: A[
        str, Arg(help="ACache: how the recomputed tokens are chosen.", choices=list(SELECTORS)), _NS
    ] = "attention"
    acache_coverage: A[
        Optional[float],
        Arg(help="ACache: recompute only until this share of the importance is covered, capped by the ratio."),
        _NS,
    ] = None
    acache_probe: A[
        str,
        Arg(help="ACache: how importance is found: request, fused (cheaper) or remembered.", choices=list(PROBES)),
        _NS,
    ] = "request"
    acache_min_affix_tokens: A[int, Arg(help="ACache: shortest span that is reused, in tokens."), _NS] = 32
    acache_max_shared_tokens: A[
        Optional[int], Arg(help="ACache: most K/V slots that shared spans may hold. Default: half the pool."), _NS
    ] = None
    acache_affix_file: A[
        Optional[str],
        Arg(help="ACache: JSONL file of spans to declare at launch: text or ids, name, pinned, cache_salt, extra_key."),
        _NS,
    ] = None
    acache_discover: A[
        bool,
        Arg(help="ACache: find recurring spans in prompts by itself.", action=argparse.BooleanOptionalAction),
        _NS,
    ] = True
    acache_debug: A[
        bool, Arg(help="ACache: hash shared K/V and fail when one changes after its encoding (slow)."), _NS
    ] = False

    def resolve_once(self) -> None:
        from sglang_acache.srt import launch

        if getattr(self, "_resolution_finished", False):
            return
        try:
            launch.prepare(self)
            super().resolve_once()
            launch.validate(self)
        except launch.LaunchError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)


def flag_values(source: Any) -> dict[str, Any]:
    """Our fields of a ``ServerArgs`` or of its published config bag, by name."""
    own = AcacheServerArgs.__annotations__
    return {name: getattr(source, name) for name in own}
