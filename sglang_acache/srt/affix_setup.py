"""From launch flags to the shared spans of a scheduler."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel

from sglang_acache.core.spans import Discovery, PromotionRule, SpanTree
from sglang_acache.srt.affix_file import SpanDeclaration, plain_encoder, read_affix_file
from sglang_acache.srt.affixes import Affixes
from sglang_acache.srt.kv_device import AllocatorPool, KvDevice


def build_affixes(
    flags: Any, slots: AllocatorPool, model_runner: Any, pool_tokens: int, tokenizer: Any, vocab_limit: int
) -> Affixes | None:
    """The spans of one scheduler, those of ``--acache-affix-file`` declared; None without ``--enable-acache``.

    Raises ParamError where a declared span has no tokens.
    """
    if not flags.enable_acache:
        return None
    tree = SpanTree(
        slots,
        min_tokens=flags.acache_min_affix_tokens,
        max_shared_tokens=flags.acache_max_shared_tokens or pool_tokens // 2,
    )
    discovery = None
    if flags.acache_discover:
        rule = PromotionRule(ratio=str(flags.acache_anchor_ratio))
        discovery = Discovery(min_tokens=flags.acache_min_affix_tokens, rule=rule)
    device = KvDevice(model_runner.token_to_kv_pool, model_runner.model.get_inv_freq())
    affixes = Affixes(tree, discovery, device, reduce_scores=_sum_over_ranks, debug=flags.acache_debug)
    if flags.acache_affix_file:
        for declaration in read_affix_file(flags.acache_affix_file):
            declare(affixes, declaration, tokenizer, vocab_limit)
    return affixes


def declare(affixes: Affixes, declaration: SpanDeclaration, tokenizer: Any, vocab_limit: int) -> str:
    """Make a declared span known; returns its name. Raises ParamError or SpanNameTaken."""
    tokens = declaration.tokens(plain_encoder(tokenizer), vocab_limit)
    name = affixes.tree.declare(declaration.namespace, tokens, declaration.name, declaration.pinned)
    affixes.seed(declaration.namespace, tokens)
    return name


def _sum_over_ranks(scores: torch.Tensor) -> torch.Tensor:
    """Every tensor-parallel rank then chooses the same anchors."""
    group = get_parallel().tp_group
    return scores if group.world_size == 1 else group.all_reduce(scores)
