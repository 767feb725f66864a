"""Questions about a shared list of facts, in words.

A *puzzle* is: facts ``object verb name``, updates ``name place``, and six questions ``slot object``. The
answer to the main task (``hop``) takes one step in the facts and one in the updates: the place of the name
that has the object. Requests share the facts (the affix); updates and questions are the request's own.

Tasks:
  hop   slot -> object -> name (facts) -> place (updates)
  kv    slot -> object -> name (facts): one hop inside the affix
  upd   slot -> name -> place (updates): one hop inside the request
  echo  slot -> object: no hop

Layouts, where ``|hole|`` is the generation region:
  prefix  facts, updates, question |hole|
  infix   updates, facts, question |hole|
  suffix  updates, question |hole| facts

Questions are listed in a random order of the slots, answers in the order ``one`` .. ``six``, so no fixed
distance leads from an answer to its question.

Plain prompts (completions, generate) carry no ``<|startoftext|>``: the tokenizer adds none, and the model is
trained both without (mostly) and with it. The chat template writes one.

Splits are disjoint: a hash of the facts' text says whether they belong to training, validation or test.
"""

import random
import zlib
from dataclasses import dataclass

from sglang_acache.tiny import vocabulary as words

LAYOUTS = ("prefix", "infix", "suffix")
TASKS = tuple(words.QUESTION_WORDS)
N_FACTS, N_NAMES, N_SLOTS = 24, 6, len(words.SLOTS)
FACT_WORDS = 3  # object verb name


@dataclass(frozen=True)
class Facts:
    """The shared part: fact i reads ``objects[i] verbs[i] names[i]``."""

    objects: tuple[str, ...]
    verbs: tuple[str, ...]
    names: tuple[str, ...]

    @property
    def text(self) -> str:
        body = " ".join(f"{o} {v} {n}" for o, v, n in zip(self.objects, self.verbs, self.names, strict=True))
        return f"{words.FACTS_OPEN} {body} {words.FACTS_CLOSE}"


@dataclass(frozen=True)
class Puzzle:
    """One request's content before it is laid out. `asked[i]` is the question of slot i."""

    facts: Facts
    updates: tuple[tuple[str, str], ...]
    asked: tuple[str, ...]
    slot_order: tuple[int, ...]
    task: str

    @property
    def updates_text(self) -> str:
        return " ".join([words.UPDATES_OPEN, *(f"{name} {place}" for name, place in self.updates)])

    @property
    def question_text(self) -> str:
        pairs = (f"{words.SLOTS[i]} {self.asked[i]}" for i in self.slot_order)
        return " ".join([words.QUESTION_WORDS[self.task], *pairs, words.ANSWER_OPEN])

    @property
    def values(self) -> tuple[str, ...]:
        """The answer of every slot."""
        if self.task == "echo":
            return self.asked
        place_of = dict(self.updates)
        if self.task == "upd":
            return tuple(place_of[name] for name in self.asked)
        name_of = dict(zip(self.facts.objects, self.facts.names, strict=True))
        names = tuple(name_of[thing] for thing in self.asked)
        return names if self.task == "kv" else tuple(place_of[name] for name in names)

    @property
    def answer(self) -> str:
        return " ".join(f"{slot} {value}" for slot, value in zip(words.SLOTS, self.values, strict=True))


@dataclass(frozen=True)
class Item:
    """One request in words.

    `affix_span` is the half-open token span of the affix in the canvas ``left | hole | right`` with a hole of
    `hole` tokens, no text around it; for prefix and infix it does not depend on the hole.
    """

    left: str
    right: str
    affix: str
    affix_span: tuple[int, int]
    answer: str
    task: str
    layout: str
    hole: int


def lay_out(puzzle: Puzzle, layout: str, hole: int = 2 * N_SLOTS) -> Item:
    affix, updates, question = puzzle.facts.text, puzzle.updates_text, puzzle.question_text
    parts = {
        "prefix": ([affix, updates, question], [], []),
        "infix": ([updates, affix, question], [updates], []),
        "suffix": ([updates, question], [updates, question], [affix]),
    }
    if layout not in parts:
        raise ValueError(f"unknown layout {layout!r}; choose one of {', '.join(LAYOUTS)}")
    left, before, right = parts[layout]
    start = sum(len(part.split()) for part in before) + (hole if right else 0)
    span = (start, start + len(affix.split()))
    return Item(" ".join(left), " ".join(right), affix, span, puzzle.answer, puzzle.task, layout, hole)


def split_of(facts: Facts) -> str:
    """The split a list of facts belongs to, whatever seed met it: 80% train, 10% validation, 10% test."""
    bucket = zlib.crc32(facts.text.encode()) % 10
    return "test" if bucket == 9 else "validation" if bucket == 8 else "train"


def draw_facts(rng: random.Random, n_facts: int, n_names: int, split: str) -> Facts:
    while True:
        people = rng.sample(words.NAMES, n_names)
        facts = Facts(
            tuple(rng.sample(words.OBJECTS, n_facts)),
            tuple(rng.choices(words.VERBS, k=n_facts)),
            tuple(rng.choices(people, k=n_facts)),
        )
        if split_of(facts) == split:
            return facts


def draw_puzzle(rng: random.Random, facts: Facts, n_names: int, task: str) -> Puzzle:
    """A request about `facts`: every name of the facts gets a place, extra names fill up to `n_names`."""
    present = sorted(set(facts.names))
    absent = [name for name in words.NAMES if name not in present]
    names = present + rng.sample(absent, n_names - len(present))
    rng.shuffle(names)
    updates = tuple(zip(names, rng.sample(words.PLACES, n_names), strict=True))
    pool = names if task == "upd" else facts.objects
    asked = rng.sample(pool, N_SLOTS) if len(pool) >= N_SLOTS else rng.choices(pool, k=N_SLOTS)
    return Puzzle(facts, updates, tuple(asked), tuple(rng.sample(range(N_SLOTS), N_SLOTS)), task)


def held_out(
    seed: int, n: int, layout: str, task: str = "hop", split: str = "test", hole: int = 2 * N_SLOTS,
    n_facts: int = N_FACTS,
) -> list[Item]:  # fmt: skip
    """`n` requests whose facts no training run has seen. `split="validation"` is for decisions."""
    rng = random.Random(f"{split}-{seed}")

    def draw() -> Puzzle:
        return draw_puzzle(rng, draw_facts(rng, n_facts, N_NAMES, split), N_NAMES, task)

    return [lay_out(draw(), layout, hole) for _ in range(n)]


def shared_requests(
    seed: int, n_requests: int, layout: str, task: str = "hop", split: str = "test", hole: int = 2 * N_SLOTS,
    n_facts: int = N_FACTS,
) -> list[Item]:  # fmt: skip
    """`n_requests` requests with one affix: the same facts, each with its own updates and question."""
    rng = random.Random(f"shared-{split}-{seed}")
    facts = draw_facts(rng, n_facts, N_NAMES, split)
    return [lay_out(draw_puzzle(rng, facts, N_NAMES, task), layout, hole) for _ in range(n_requests)]
