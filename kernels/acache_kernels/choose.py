"""Choosing a token, with its confidence, for each row of logits."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from acache_kernels.registry import Registry, default_impl

RULES = ("low_confidence", "maskgit_plus", "topk_margin", "entropy", "random", "origin")
"""Confidence rules; a rule's code is its index here."""


class Choice(NamedTuple):
    token: torch.Tensor  # int64 [M]
    confidence: torch.Tensor  # float32 [M], larger commits first
    logprob: torch.Tensor  # float32 [M], log-softmax of the unscaled logits over allowed ids


class ChooseRequest(NamedTuple):
    """What an implementation gets: everything checked, every per-row parameter a tensor."""

    logits: torch.Tensor  # [M, V]
    temperature: torch.Tensor  # float32 [M]
    top_k: torch.Tensor  # int64 [M], vocab_limit where unlimited
    top_p: torch.Tensor  # float32 [M]
    seed: torch.Tensor  # int64 [M]
    rule: torch.Tensor  # int64 [M], codes
    forbidden: torch.Tensor  # int64 [F]
    vocab_limit: int


_REGISTRY: Registry[Callable[[ChooseRequest], Choice]] = Registry(
    "choose implementation",
    {
        "torch": "acache_kernels.torch_ops.choose:choose",
        "triton": "acache_kernels.triton_ops.choose:choose",
    },
)


def rule_codes(names: Sequence[str], device: torch.device | str = "cpu") -> torch.Tensor:
    """int64 codes of rule names. Raises ValueError that lists the valid names."""
    unknown = sorted(set(names) - set(RULES))
    if unknown:
        raise ValueError(f"unknown confidence rule {unknown[0]!r}; valid rules: {', '.join(RULES)}")
    return torch.tensor([RULES.index(name) for name in names], dtype=torch.int64, device=device)


def choose_tokens(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seed: torch.Tensor,
    rule: str | torch.Tensor,
    forbidden: torch.Tensor,
    vocab_limit: int,
    impl: str | None = None,
) -> Choice:
    """One token per row, never a forbidden id and never an id >= vocab_limit.

    logits: [M, V] float; temperature, top_p: float32 [M]; top_k: int [M]; seed: int64 [M]; rule: one name, or
    codes int64 [M] (`rule_codes`); forbidden: int64 ids. Rows may all differ; a row's result does not depend on
    the other rows. With z the logits in float32 over the allowed ids and t = temperature:

    - kept ids (`top_k` <= 0 and `top_p` >= 1 keep all): id i is kept when fewer than top_k ids have a larger
      logit and the ids with a larger logit hold at most top_p of softmax(z / t)'s mass (z itself at t = 0). Ties
      at the edge are kept together; the best id always is.
    - token: argmax of z + t * gumbel(seed, id) over the kept ids (`acache_kernels.rng`), ties to the lowest id;
      so t = 0 is the argmax and t > 0 an exact sample of the kept part of softmax(z / t).
    - logprob: log softmax(z) at the token: unscaled, unfiltered.
    - confidence, with p = the renormalised kept part of softmax(z / t) (of softmax(z) at t = 0):
        low_confidence  softmax(z) at the token        (LLaDA, Fast-dLLM)
        maskgit_plus    p at the token                 (Dream)
        topk_margin     largest p - second largest p   (Dream)
        entropy         sum of p log p                 (Dream)
        random, origin  uniform in (0, 1) from the seed alone

    Raises ValueError for wrong shapes, an unknown rule, or when no id may be allowed.
    """
    rows, vocab = logits.shape
    if not 0 < vocab_limit <= vocab:
        raise ValueError(f"vocab_limit {vocab_limit} outside 1..{vocab}")
    if forbidden.numel() >= vocab_limit:
        raise ValueError(f"{forbidden.numel()} forbidden ids leave none of {vocab_limit}")
    for name, column in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p), ("seed", seed)):
        if column.shape != (rows,):
            raise ValueError(f"{name} has shape {tuple(column.shape)}, expected ({rows},)")
    if isinstance(rule, str):
        rule = rule_codes([rule], logits.device).expand(rows)
    elif rule.shape != (rows,):
        raise ValueError(f"rule has shape {tuple(rule.shape)}, expected ({rows},)")
    wide_k = top_k.to(torch.int64)
    wide_k = torch.where(wide_k > 0, wide_k.clamp(max=vocab_limit), vocab_limit)
    request = ChooseRequest(
        logits, temperature.float(), wide_k, top_p.float(), seed, rule.to(torch.int64), forbidden, vocab_limit
    )
    return _REGISTRY.get(impl or default_impl(logits.device.type))(request)
