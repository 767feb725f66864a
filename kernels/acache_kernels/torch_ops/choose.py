"""Choosing tokens in plain torch, a block of rows at a time so that no copy of all logits is ever made."""

import torch

from acache_kernels import rng
from acache_kernels.choose import RULES, Choice, ChooseRequest

BLOCK_LOGITS = 1 << 21
"""Logits per block of rows; the block's float32 copy is reused by the next one."""
FIRST_TOP = 1024
"""Candidates looked at first when a row is filtered; a full sort follows only where they do not suffice."""

_LOW_CONFIDENCE, _MASKGIT_PLUS, _TOPK_MARGIN, _ENTROPY, _RANDOM, _ORIGIN = range(len(RULES))


def choose(request: ChooseRequest) -> Choice:
    """See `acache_kernels.choose.choose_tokens`."""
    rows, device = len(request.logits), request.logits.device
    choice = Choice(
        torch.empty(rows, dtype=torch.int64, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
    )
    step = max(1, BLOCK_LOGITS // request.vocab_limit)
    scratch = torch.empty(min(step, rows), request.vocab_limit, dtype=torch.float32, device=device)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        z = scratch[: part.stop - part.start]
        z.copy_(request.logits[part, : request.vocab_limit])
        z.index_fill_(1, _in_vocabulary(request), float("-inf"))
        for whole, block in zip(choice, _choose_block(z, part, request), strict=True):
            whole[part] = block
    return choice


def _in_vocabulary(request: ChooseRequest) -> torch.Tensor:
    ids = request.forbidden
    return ids[(ids >= 0) & (ids < request.vocab_limit)]


def _choose_block(z: torch.Tensor, part: slice, request: ChooseRequest) -> Choice:
    """The rows `part`, whose allowed float32 logits are z [m, V] (overwritten)."""
    temperature, seed, rule = request.temperature[part], request.seed[part], request.rule[part]
    top_k, top_p = request.top_k[part], request.top_p[part]
    best, token = z.max(dim=1)
    filtered = torch.nonzero((top_k < request.vocab_limit) | (top_p < 1)).flatten()
    sampled = torch.nonzero(temperature > 0).flatten()
    dream = torch.nonzero((rule >= _MASKGIT_PLUS) & (rule <= _ENTROPY)).flatten()
    drawn = torch.nonzero(rule >= _RANDOM).flatten()
    edge = torch.full_like(best, float("-inf"))  # smallest kept logit
    if len(filtered):
        scale = _scale(temperature[filtered])
        edge[filtered] = _edges(z[filtered], best[filtered], scale, top_k[filtered], top_p[filtered])
    if len(sampled):
        token[sampled] = _sample(z[sampled], edge[sampled], temperature[sampled], seed[sampled])
    chosen = z.gather(1, token.unsqueeze(1)).squeeze(1)
    confidence = torch.empty_like(best)
    if len(dream):
        kept = z[dream].masked_fill_(z[dream] < edge[dream].unsqueeze(1), float("-inf"))
        scale = _scale(temperature[dream])
        confidence[dream] = _dream_confidence(kept, chosen[dream], scale, rule[dream])
    logprob = chosen - best - z.sub_(best.unsqueeze(1)).exp_().sum(dim=1).log()
    confidence = torch.where(rule == _LOW_CONFIDENCE, logprob.exp(), confidence)
    if len(drawn):
        confidence[drawn] = rng.row_uniform(seed[drawn])
    return Choice(token, confidence, logprob)


def _scale(temperature: torch.Tensor) -> torch.Tensor:
    """What divides the logits: the temperature, 1 where it is 0."""
    return torch.where(temperature > 0, temperature, 1.0)


def _edges(
    z: torch.Tensor, best: torch.Tensor, scale: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """The smallest kept logit of each row [m]."""
    total = z.sub(best.unsqueeze(1)).div_(scale.unsqueeze(1)).exp_().sum(dim=1)
    count = min(FIRST_TOP, z.shape[1])
    edge, settled = _edges_among(z.topk(count, dim=1).values, best, scale, total, top_k, top_p)
    if count < z.shape[1] and not bool(settled.all()):
        rest = torch.nonzero(~settled).flatten()
        ordered = z[rest].sort(dim=1, descending=True).values
        edge[rest], _ = _edges_among(ordered, best[rest], scale[rest], total[rest], top_k[rest], top_p[rest])
    return edge


def _edges_among(
    ordered: torch.Tensor,
    best: torch.Tensor,
    scale: torch.Tensor,
    total: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The edges as far as the largest logits, [m, c] descending, tell, and whether they tell them."""
    count = ordered.shape[1]
    mass = ordered.sub(best.unsqueeze(1)).div_(scale.unsqueeze(1)).exp_()
    before = mass.cumsum(dim=1).sub_(mass)  # mass of the ids in front
    within_p = before <= (top_p * total).unsqueeze(1)
    within_p |= (top_p >= 1).unsqueeze(1)
    within_k = torch.arange(count, device=ordered.device) < top_k.unsqueeze(1)
    kept = (within_p & within_k).sum(dim=1).clamp_(min=1)
    return ordered.gather(1, kept.unsqueeze(1) - 1).squeeze(1), kept < count


def _sample(z: torch.Tensor, edge: torch.Tensor, temperature: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """Gumbel-max over the kept ids: int64 [m]."""
    noise = rng.gumbel(seed, torch.arange(z.shape[1], device=z.device))
    noise.mul_(temperature.unsqueeze(1)).add_(z)
    return noise.masked_fill_(z < edge.unsqueeze(1), float("-inf")).argmax(dim=1)


def _dream_confidence(
    kept: torch.Tensor, chosen: torch.Tensor, scale: torch.Tensor, rule: torch.Tensor
) -> torch.Tensor:
    """maskgit_plus, topk_margin or entropy [m] of the kept logits [m, V] (-inf where filtered)."""
    scaled = kept.div(scale.unsqueeze(1))
    log_p = scaled - torch.logsumexp(scaled, dim=1, keepdim=True)
    best = log_p.topk(min(2, log_p.shape[1]), dim=1).values.exp()
    margin = best[:, 0] - best[:, 1] if best.shape[1] > 1 else best[:, 0]
    chosen_p = (chosen / scale - torch.logsumexp(scaled, dim=1)).exp()
    p = log_p.exp()
    entropy = (p * torch.where(p > 0, log_p, 0.0)).sum(dim=1)
    return torch.where(rule == _ENTROPY, entropy, torch.where(rule == _TOPK_MARGIN, margin, chosen_p))
