"""Training batches: requests as the server will see them, with some of the answer masked.

Every batch has one shape (number of facts, hole, text around the request), so no padding is needed; tasks and
layouts are mixed inside it.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_acache.tiny import task
from sglang_acache.tiny import vocabulary as words

TASK_SHARES = {"hop": 0.5, "kv": 0.2, "upd": 0.15, "echo": 0.15}
HOLES = (12, 12, 12, 16, 16, 20, 24)
BLOCK_LENGTHS = (4, 4, 4, 2, 8, 0)  # 0: the whole hole is one block
LATER_WEIGHT = 0.5  # loss weight of masks after the current block
ALL_MASKED, ANYWHERE = 0.25, 0.1  # shares of requests with nothing committed, and with masks anywhere
ANSWER = 2 * task.N_SLOTS


@dataclass(frozen=True)
class Shape:
    """What all requests of one batch share."""

    n_facts: int
    n_names: int
    hole: int
    before: list[int]  # token ids in front of the left context
    after: list[int]  # token ids between the left context and the hole
    block_length: int


@dataclass
class Batch:
    """ids [B, T] with masks in place; holes [B, n] the hole's positions; targets and weights [B, n].

    The rest locates the auxiliary targets. Rows are (batch index, position) pairs [2, N].
    """

    ids: Tensor
    holes: Tensor
    targets: Tensor
    weights: Tensor
    probes: dict[str, Tensor]  # task -> [B, n], masked values whose slot is visible
    names_at: Tensor  # rows of the facts' name tokens
    names_object: Tensor
    names_place: Tensor
    masks_at: Tensor  # rows of masked values that need the facts
    masks_object: Tensor
    masks_fact: Tensor  # position of the asked fact's name


def draw_shape(rng: random.Random, n_facts: int, n_names: int) -> Shape:
    filler = [words.TOKEN_IDS[w] for w in rng.choices(words.FILLER, k=rng.randint(1, 16))]
    ids = words.TOKEN_IDS

    def turn(role: str) -> list[int]:
        return [ids[words.HEADER_OPEN], ids[role], ids[words.HEADER_CLOSE]]

    kind = rng.choices(("plain", "filler", "bos", "chat", "system"), (0.4, 0.1, 0.15, 0.2, 0.15))[0]
    close = [ids[words.TURN_END]]
    before, after = {
        "plain": ([], []),
        "filler": (filler, []),
        "bos": ([ids[words.BOS]], []),
        "chat": ([ids[words.BOS], *turn("user")], [*close, *turn("assistant")]),
        "system": (
            [ids[words.BOS], *turn("system"), *filler, *close, *turn("user")],
            [*close, *turn("assistant")],
        ),
    }[kind]
    hole = rng.choice(HOLES)
    return Shape(n_facts, n_names, hole, before, after, rng.choice(BLOCK_LENGTHS) or hole)


def draw_masks(rng: random.Random, shape: Shape, untouched: float) -> list[float]:
    """Loss weight of each hole position; 0 means committed (visible).

    `untouched` is the share of requests, of those met at some block, that are met at the block's first step.
    """
    kind = rng.random()
    if kind < ALL_MASKED:
        return [1.0] * shape.hole
    weights, block, start = [0.0] * shape.hole, shape.hole, 0
    if kind >= ALL_MASKED + ANYWHERE:
        block = shape.block_length
        start = rng.randrange(0, shape.hole if rng.random() < 0.15 else ANSWER, block)
    share, slots_visible = rng.random(), rng.random() < 0.5
    if untouched and rng.random() < untouched:
        share, slots_visible = 1.0, False
    for i in range(start, shape.hole):
        if i >= start + block:
            weights[i] = LATER_WEIGHT
        elif rng.random() < share and not (slots_visible and i < ANSWER and i % 2 == 0):
            weights[i] = 1.0
    if not any(weights):
        weights[min(start + 1, shape.hole - 1)] = 1.0
    return weights


def lay_out_ids(puzzle: task.Puzzle, shape: Shape, layout: str) -> tuple[list[int], int, int]:
    """The solved canvas, the hole's start and the affix's start."""
    item = task.lay_out(puzzle, layout, shape.hole)
    left = [*shape.before, *words.encode(item.left), *shape.after]
    answer = words.encode(item.answer) + [words.TOKEN_IDS[words.EOS]] * (shape.hole - ANSWER)
    affix = item.affix_span[0] + len(shape.before) + (len(shape.after) if layout == "suffix" else 0)
    return left + answer + words.encode(item.right), len(left), affix


def draw_batch(rng: random.Random, stream: Iterator[task.Puzzle], shape: Shape, size: int, untouched: float) -> Batch:
    ids, holes, weights = [], [], []
    probes: dict[str, list[list[bool]]] = {name: [] for name in task.TASKS}
    names: list[tuple[int, int, int, int]] = []  # batch index, position, object, place
    asked: list[tuple[int, int, int, int]] = []  # batch index, position, object, position of the fact's name
    for b in range(size):
        puzzle = next(stream)
        canvas, hole, affix = lay_out_ids(puzzle, shape, rng.choice(task.LAYOUTS))
        masks = draw_masks(rng, shape, untouched)
        name_at = [affix + 1 + task.FACT_WORDS * j + 2 for j in range(shape.n_facts)]
        place_of, facts = dict(puzzle.updates), puzzle.facts
        for j, (thing, name) in enumerate(zip(facts.objects, facts.names, strict=True)):
            names.append((b, name_at[j], words.TOKEN_IDS[thing], words.TOKEN_IDS[place_of[name]]))
        if puzzle.task in ("hop", "kv"):
            for slot, thing in enumerate(puzzle.asked):
                if masks[2 * slot + 1]:
                    fact = name_at[facts.objects.index(thing)]
                    asked.append((b, hole + 2 * slot + 1, words.TOKEN_IDS[thing], fact))
        seen = [i < ANSWER and i % 2 == 1 and masks[i] == 1.0 and not masks[i - 1] for i in range(shape.hole)]
        for name in probes:
            probes[name].append(seen if name == puzzle.task else [False] * shape.hole)
        ids.append(canvas)
        holes.append(list(range(hole, hole + shape.hole)))
        weights.append(masks)
    solved, at, w = torch.tensor(ids), torch.tensor(holes), torch.tensor(weights)
    targets = solved.gather(1, at)
    masked = solved.scatter(1, at, torch.where(w > 0, words.TOKEN_IDS[words.MASK], targets))
    name_rows = torch.tensor(names, dtype=torch.long).T
    asked_rows = torch.tensor(asked, dtype=torch.long).reshape(-1, 4).T
    return Batch(
        masked, at, targets, w, {name: torch.tensor(rows) for name, rows in probes.items()},
        name_rows[:2], name_rows[2], name_rows[3], asked_rows[:2], asked_rows[2], asked_rows[3],
    )  # fmt: skip
