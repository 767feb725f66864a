"""How much of the answers survives when an affix's keys and values are reused: the method on one page.

Requests of one layout have equal lengths, so they are decoded as a batch: B requests, canvas of T tokens,
hole of n masks, affix [l, r). Keys and values live in one cache; a forward of some positions stores theirs
first and then attends to all T.

    python -m sglang_acache.tiny.fidelity --checkpoint DIR
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sglang_acache.tiny import task
from sglang_acache.tiny import vocabulary as words
from sglang_acache.tiny.model import TinyLLaDA, load, rotary, rotate

BUNDLED = Path(__file__).parent / "llada-tiny"
MASK, EOS = words.TOKEN_IDS[words.MASK], words.TOKEN_IDS[words.EOS]
NEVER = [MASK, *range(len(words.TOKEN_IDS), words.VOCAB_SIZE)]  # ids that are never committed


@dataclass(frozen=True)
class Policy:
    """`selector` None recomputes everything; ratio 0 reuses the affix as it is."""

    selector: str | None = None
    ratio: float = 0.0
    drop_others: bool = False

    @property
    def label(self) -> str:
        if self.selector is None:
            return "full recompute"
        if self.ratio == 0:
            return "direct reuse"
        return f"{'drop_non_anchors' if self.drop_others else self.selector} {self.ratio:g}"


@dataclass(frozen=True)
class Canvases:
    """ids [B, T] with masks in the hole; the same hole and affix span for all."""

    ids: Tensor
    hole: range
    affix: range

    def positions(self, keep: Callable[[int], bool]) -> Tensor:
        """[B, Q]: the positions that `keep` names, the same for every request."""
        chosen = torch.tensor([i for i in range(self.ids.shape[1]) if keep(i)], dtype=torch.long)
        return chosen.expand(self.ids.shape[0], -1)


@dataclass
class Cache:
    """Rotated keys and values [layers, B, H, T, d_head], and which positions may be attended to [B, T]."""

    keys: Tensor
    values: Tensor
    visible: Tensor


def canvases(items: list[task.Item], before: list[int] | None = None, after: list[int] | None = None) -> Canvases:
    """`before` and `after` are token ids around the left context, for example a chat template's."""
    before, after = before or [], after or []
    rows = [[*before, *words.encode(i.left), *after, *[MASK] * i.hole, *words.encode(i.right)] for i in items]
    first = items[0]
    start = len(before) + len(first.left.split()) + len(after)
    shift = len(before) + (len(after) if first.layout == "suffix" else 0)
    left, right = first.affix_span
    return Canvases(torch.tensor(rows), range(start, start + first.hole), range(shift + left, shift + right))


def empty_cache(model: TinyLLaDA, c: Canvases) -> Cache:
    batch, length = c.ids.shape
    shape = (model.config.n_layers, batch, model.config.n_heads, length, model.config.d_head)
    return Cache(torch.zeros(shape), torch.zeros(shape), torch.ones(batch, length, dtype=torch.bool))


def forward(
    model: TinyLLaDA, c: Canvases, at: Tensor, cache: Cache,
    watch: Callable[[Tensor, Tensor], None] | None = None,
) -> Tensor:  # fmt: skip
    """Forward positions `at` [B, Q]: store their keys and values, attend to every visible position.

    Returns the residual stream [B, Q, d]. `watch(q, k)` sees each layer's queries [B, H, Q, d_head] and all
    keys [B, H, T, d_head].
    """
    cos, sin = rotary(model.config, torch.arange(c.ids.shape[1]))
    cos_sin = cos[at][:, None], sin[at][:, None]
    slots = at[:, None, :, None].expand(-1, model.config.n_heads, -1, model.config.d_head)
    hidden = torch.zeros(cache.visible.shape).masked_fill(~cache.visible, -math.inf)[:, None, None]
    x = model.embed(c.ids.gather(1, at))
    for layer, block in enumerate(model.blocks):
        q, k, v = block.project(x, cos_sin)
        cache.keys[layer].scatter_(2, slots, k)
        cache.values[layer].scatter_(2, slots, v)
        scores = q @ cache.keys[layer].transpose(-1, -2) * model.config.d_head**-0.5
        if watch is not None:
            watch(q, cache.keys[layer])
        x = block.finish(x, (scores + hidden).softmax(-1) @ cache.values[layer])
    return x


def encode_alone(model: TinyLLaDA, c: Canvases) -> tuple[Tensor, Tensor]:
    """Shared keys and values [layers, B, H, L, d_head]: the affix forwarded alone, keys re-based."""
    affix = Canvases(c.ids[:, c.affix.start : c.affix.stop], range(0), range(len(c.affix)))
    cache = empty_cache(model, affix)
    forward(model, affix, affix.positions(lambda _: True), cache)
    shift = rotary(model.config, torch.tensor([c.affix.start]))
    return rotate(cache.keys, shift), cache.values


def with_shared(model: TinyLLaDA, c: Canvases, shared: tuple[Tensor, Tensor]) -> Cache:
    cache = empty_cache(model, c)
    cache.keys[..., c.affix.start : c.affix.stop, :] = shared[0]
    cache.values[..., c.affix.start : c.affix.stop, :] = shared[1]
    return cache


def attention_importance(model: TinyLLaDA, c: Canvases, cache: Cache, affix_only: bool) -> Tensor:
    """[B, L]: attention that the hole's masks pay to each affix token, over layers and heads, in a probe.

    The softmax runs over all keys, or with `affix_only` over the affix's own.
    """
    at = c.positions(lambda i: i not in c.affix)
    first = int((at[0] == c.hole.start).nonzero())
    total = torch.zeros(c.ids.shape[0], len(c.affix))

    def watch(q: Tensor, k: Tensor) -> None:
        queries = q[:, :, first : first + len(c.hole)]
        scores = queries @ k.transpose(-1, -2) * model.config.d_head**-0.5
        span = slice(c.affix.start, c.affix.stop)
        paid = scores[..., span].softmax(-1) if affix_only else scores.softmax(-1)[..., span]
        total.add_(paid.sum((1, 2)))

    forward(model, c, at, cache, watch)
    return total


def importance(model: TinyLLaDA, c: Canvases, policy: Policy, shared: tuple[Tensor, Tensor]) -> Tensor:
    """[B, L] scores by the policy's selector."""
    batch, length = c.ids.shape[0], len(c.affix)
    if policy.selector in ("attention", "attention_affix"):
        cache = with_shared(model, c, shared)
        return attention_importance(model, c, cache, policy.selector == "attention_affix")
    if policy.selector == "bottom":
        return -attention_importance(model, c, with_shared(model, c, shared), False)
    if policy.selector == "random":
        return torch.rand(batch, length, generator=torch.Generator().manual_seed(0))
    if policy.selector == "first":
        return -torch.arange(length).float().expand(batch, -1)
    if policy.selector == "kv_deviation":
        fresh = empty_cache(model, c)
        forward(model, c, c.positions(lambda _: True), fresh)
        span = slice(c.affix.start, c.affix.stop)
        moved = ((fresh.keys[..., span, :] - shared[0]) ** 2).sum((0, 2, 4))
        return moved + ((fresh.values[..., span, :] - shared[1]) ** 2).sum((0, 2, 4))
    raise ValueError(f"unknown selector {policy.selector!r}")


def recompute_set(
    model: TinyLLaDA, c: Canvases, policy: Policy, shared: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Cache]:
    """Positions that each block start forwards [B, |R|], and the cache they are forwarded into."""
    if policy.selector is None or shared is None:
        return c.positions(lambda _: True), empty_cache(model, c)
    cache = with_shared(model, c, shared)
    others = c.positions(lambda i: i not in c.affix)
    n_anchors = min(math.ceil(round(policy.ratio * len(c.affix), 9)), len(c.affix))
    if n_anchors == 0:
        return others, cache
    scores = importance(model, c, policy, shared)
    anchors = scores.sort(dim=1, descending=True, stable=True).indices[:, :n_anchors] + c.affix.start
    if policy.drop_others:
        cache.visible[:, c.affix.start : c.affix.stop] = False
        cache.visible.scatter_(1, anchors, True)
    return torch.cat([others, anchors], dim=1).sort(dim=1).values, cache


def commit(logits: Tensor, tokens: Tensor, threshold: float | None) -> Tensor:
    """One denoising step on a block: logits [B, b, vocab], tokens [B, b] -> tokens with some masks replaced.

    Commits every mask whose confidence reaches `threshold`, and always the most confident one.
    """
    logits = logits.double()
    logits[..., NEVER] = -math.inf
    confidence, choice = logits.softmax(-1).max(-1)
    confidence = confidence.masked_fill(tokens != MASK, -1)
    best = torch.zeros_like(tokens, dtype=torch.bool).scatter_(1, confidence.argmax(1, keepdim=True), True)
    chosen = best if threshold is None else best | (confidence >= threshold)
    return torch.where(chosen & (tokens == MASK), choice, tokens)


@torch.no_grad()
def decode(
    model: TinyLLaDA, c: Canvases, policy: Policy, block_length: int = 4, threshold: float | None = None
) -> Tensor:
    """Decode all requests; returns the hole's tokens [B, n]. `threshold` None commits one token per step."""
    c = Canvases(c.ids.clone(), c.hole, c.affix)
    shared = None if policy.selector is None else encode_alone(model, c)
    redo, cache = recompute_set(model, c, policy, shared)
    for start in range(c.hole.start, c.hole.stop, block_length):
        stop = min(start + block_length, c.hole.stop)
        stream = forward(model, c, redo, cache)
        where = (redo == start).nonzero()[:, 1]
        window = where[:, None] + torch.arange(stop - start)
        stream = stream.gather(1, window[..., None].expand(-1, -1, stream.shape[-1]))
        block_at = torch.arange(start, stop).expand(c.ids.shape[0], -1)
        while True:
            c.ids[:, start:stop] = commit(model.head(stream), c.ids[:, start:stop], threshold)
            if not (c.ids[:, start:stop] == MASK).any():
                break
            stream = forward(model, c, block_at, cache)
    return c.ids[:, c.hole.start : c.hole.stop]


@dataclass(frozen=True)
class Score:
    """Right answers out of n, whole and by question."""

    whole: int
    questions: int
    n: int

    @property
    def percent(self) -> str:
        """Questions right / whole answers right."""
        return f"{100 * self.questions / self.n / task.N_SLOTS:.1f}/{100 * self.whole / self.n:.1f}"

    def __add__(self, other: "Score") -> "Score":
        return Score(self.whole + other.whole, self.questions + other.questions, self.n + other.n)


def score(tokens: Tensor, items: list[task.Item]) -> Score:
    """Whole: all tokens right, and nothing but end-of-sequence after them."""
    want = torch.tensor([words.encode(i.answer) + [EOS] * (i.hole - 2 * task.N_SLOTS) for i in items])
    right = tokens == want
    values = right[:, 1 : 2 * task.N_SLOTS : 2]
    return Score(int(right.all(1).sum()), int(values.sum()), len(items))


def wilson(right: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """95% interval of a share."""
    share, spread = right / n, z * z / n
    middle = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / n + spread / (4 * n)) / (1 + spread)
    return middle - half, middle + half


def evaluate(model: TinyLLaDA, policy: Policy, layout: str, kind: str, n: int, split: str, hole: int = 12) -> Score:
    items = task.held_out(0, n, layout, kind, split, hole)
    return score(decode(model, canvases(items), policy), items)


POLICIES = (
    Policy(),
    Policy("attention", 0.0),
    *(Policy("attention", ratio) for ratio in (0.05, 0.1, 0.2, 0.3, 0.5, 1.0)),
    *(Policy("attention_affix", ratio) for ratio in (0.05, 0.1, 0.2, 0.3, 0.5)),
    Policy("random", 0.2),
    Policy("first", 0.2),
    Policy("bottom", 0.2),
    Policy("kv_deviation", 0.2),
    Policy("attention", 0.2, drop_others=True),
)


def report(model: TinyLLaDA, n: int, split: str) -> None:
    """Headline suite: one-hop (`kv`) and two-hop (`hop`) questions half and half; then two-hop alone.

    Each cell is the share of questions right / the share of whole answers right, in percent.
    """
    print(f"{'policy':24}" + "".join(f"{'mixed ' + name:>16}" for name in task.LAYOUTS), end="")
    print("".join(f"{'hop ' + name:>16}" for name in task.LAYOUTS))
    for policy in POLICIES:
        hop = [evaluate(model, policy, layout, "hop", n, split) for layout in task.LAYOUTS]
        kv = [evaluate(model, policy, layout, "kv", n, split) for layout in task.LAYOUTS]
        mixed = [a + b for a, b in zip(hop, kv, strict=True)]
        print(f"{policy.label:24}" + "".join(f"{s.percent:>16}" for s in mixed + hop), flush=True)
    for layout in task.LAYOUTS:
        for kind in task.TASKS:
            found = evaluate(model, Policy(), layout, kind, n, split)
            low, high = wilson(found.whole, found.n)
            print(f"{layout} {kind}: {found.whole}/{found.n} whole answers right ({low:.1%} to {high:.1%})")


def main() -> None:
    parser = argparse.ArgumentParser(description="Fidelity of affix reuse on a tiny checkpoint.")
    parser.add_argument("--checkpoint", type=Path, default=BUNDLED)
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--split", choices=("validation", "test"), default="test")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report(load(arguments.checkpoint), arguments.requests, arguments.split)


if __name__ == "__main__":
    main()
