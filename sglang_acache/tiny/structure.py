"""A starting point from which the small model learns two hops in minutes instead of hours.

The residual stream [d] is divided into one orthonormal frame [d_head, d] per head. Layer 0 looks at fixed
distances and writes what it reads, turned by a fixed rotation, into the frame of the head. Later layers
match: a head's query is a token itself, or the token at a distance that layer 0 wrote; its key is the token
at a distance. All of it is only where training starts; every weight is trained.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_acache.tiny import vocabulary as words
from sglang_acache.tiny.model import Block, TinyLLaDA, rotary, rotate

OFFSETS = (-1, -2, 1)  # what the first heads of layer 0 look at; the remaining head is free
MARGIN = 5.0  # logit by which a head of layer 0 prefers its offset to the neighbours
SHARP = 6  # rotary pairs that tell near positions apart; content is matched by the others
MATCH = 2.0  # scale of content matching
OUTPUT = 0.1  # scale of the output head


@dataclass(frozen=True)
class Match:
    """A head that compares its query's `query_frame` (turned if `itself`) with the keys' `key_frame`."""

    itself: bool
    query_frame: int
    key_frame: int
    value_frame: int


# Frame 0 holds the previous token, frame 1 the one before it.
LAYERS = (
    (Match(True, 0, 0, 0), Match(True, 0, 0, 2), Match(False, 0, 0, 1), Match(False, 0, 0, 3)),
    (Match(True, 1, 1, 0), Match(True, 1, 1, 2), Match(True, 1, 1, 1), Match(True, 0, 0, 3)),
)


@dataclass(frozen=True)
class Frames:
    shared: Tensor  # [d], the direction that all embeddings have in common
    basis: Tensor  # [H, d_head, d]
    turn: Tensor  # [d_head, d_head], applied to what layer 0 writes


def orthogonal(generator: torch.Generator, size: int) -> Tensor:
    q, _ = torch.linalg.qr(torch.randn(size, size, generator=generator))
    return q


def draw_frames(generator: torch.Generator, d: int, n_heads: int) -> Frames:
    shared = torch.randn(d, generator=generator).sign()
    columns = torch.cat([shared[:, None], torch.randn(d, d, generator=generator)], dim=1)
    basis = torch.linalg.qr(columns)[0].T  # row 0 is the shared direction
    basis = torch.cat([basis[1:], torch.zeros(1, d)])
    return Frames(shared, basis.unflatten(0, (n_heads, d // n_heads)), orthogonal(generator, d // n_heads))


def positional_query(model: TinyLLaDA, offset: int) -> tuple[Tensor, Tensor]:
    """A query and a key, each [d_head], whose rotated product peaks with the key `offset` after the query."""
    config = model.config
    half = config.d_head // 2
    frequencies = config.rope_theta ** (-torch.arange(half) / half)
    key = torch.zeros(config.d_head)
    drop = (1 - frequencies[:SHARP].cos()).sum()
    key[:SHARP] = (MARGIN * config.d_head**0.5 / drop) ** 0.5
    return rotate(key[None], rotary(config, torch.tensor([offset])))[0], key


def structure_offsets(model: TinyLLaDA, frames: Frames) -> None:
    block, d_head = model.blocks[0], model.config.d_head
    for head, basis in enumerate(frames.basis):
        at = slice(head * d_head, (head + 1) * d_head)
        block.v_proj.weight[at] = basis * 2**0.5
        block.attn_out.weight[:, at] = (frames.turn @ basis).T if head < len(OFFSETS) else basis.T * 0.1
        if head < len(OFFSETS):
            query, key = positional_query(model, OFFSETS[head])
            block.q_proj.weight[at] = torch.outer(query, frames.shared) * 2**0.5 / frames.shared.shape[0]
            block.k_proj.weight[at] = torch.outer(key, frames.shared) * 2**0.5 / frames.shared.shape[0]


def structure_matches(block: Block, matches: tuple[Match, ...], frames: Frames, generator: torch.Generator) -> None:
    d_head = block.d_head
    for head, match in enumerate(matches):
        at = slice(head * d_head, (head + 1) * d_head)
        compare = orthogonal(generator, d_head) * MATCH
        compare.unflatten(0, (2, -1))[:, :SHARP] = 0  # these pairs turn too fast to match over a distance
        written = frames.turn.T if match.itself else torch.eye(d_head)
        block.q_proj.weight[at] = compare @ written.T @ frames.basis[match.query_frame]
        block.k_proj.weight[at] = compare @ frames.basis[match.key_frame]
        block.v_proj.weight[at] = frames.basis[match.value_frame] * 2**0.5
        block.attn_out.weight[:, at] = frames.basis[match.value_frame].T


@torch.no_grad()
def initialise(model: TinyLLaDA, seed: int) -> None:
    """Fill every weight from `seed`."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    frames = draw_frames(generator, config.d_model, config.n_heads)
    rows = torch.randn(config.vocab_size, config.d_model, generator=generator)
    rows[words.TOKEN_IDS[words.MASK]] = 0  # a mask holds nothing but what it reads
    model.transformer.wte.weight.copy_(rows + frames.shared)
    model.transformer.ff_out.weight.copy_(rows * OUTPUT)
    for block in model.blocks:
        for linear in (block.q_proj, block.k_proj, block.ff_proj, block.up_proj, block.ff_out):
            out, columns = linear.weight.shape
            linear.weight.copy_(torch.randn(out, columns, generator=generator) * 0.3 * columns**-0.5)
    structure_offsets(model, frames)
    for block, matches in zip(model.blocks[1:], LAYERS, strict=True):
        structure_matches(block, matches, frames, generator)
