"""The questions that fidelity is measured on: the tiny model's own, or those of a task file.

A task file is JSONL, one request a line:

    {"left": "text before the hole", "right": "text after it", "spans": [[start, end]], "answer": "expected text",
     "parts": [1, 3], "group": "prefix", "max_new_tokens": 64}

``spans`` are half-open *character* offsets of the shared text in ``left + right``, none of which crosses from one to
the other; ``right``, ``parts``, ``group`` and ``max_new_tokens`` may be left out. ``parts`` are the words of the
answer that are judged one by one (default: all). ``group`` names a row of the report (default: where the first
span stands: prefix, infix or suffix).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_acache.tiny import task as tiny

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Question:
    """Token ids on both sides of the hole, the affix's token offsets in ``left + right``, and what is right."""

    left: list[int]
    right: list[int]
    spans: list[list[int]]
    answer: str
    parts: tuple[int, ...]
    group: str
    new_tokens: int

    def whole(self, text: str) -> bool:
        return text.split() == self.answer.split()

    def part_shares(self, text: str) -> float:
        """Share of the judged words that are right, each in its place."""
        got, want = text.split(), self.answer.split()
        right = [index < len(got) and got[index] == want[index] for index in self.parts]
        return sum(right) / len(right) if right else float(self.whole(text))


def tiny_questions(
    count: int, tasks: Sequence[str], encode: Encode, seed: int, readers: int = 1
) -> list[Question]:
    """Held-out requests of ``llada-tiny``'s own tasks, ``count`` a layout and task, ``readers`` over the same facts."""
    questions = []
    for at, layout in enumerate(tiny.LAYOUTS):
        for number, kind in enumerate(tasks):
            own_seed = (seed * len(tiny.LAYOUTS) + at) * len(tiny.TASKS) + number  # no puzzle is asked twice
            for item in _items(own_seed, count, layout, kind, readers):
                shift = item.hole if item.right else 0
                start, stop = item.affix_span
                left, right = encode(item.left), encode(item.right) if item.right else []
                span, parts = [start - shift, stop - shift], tuple(range(1, 2 * tiny.N_SLOTS, 2))
                questions.append(Question(left, right, [span], item.answer, parts, f"{layout}, {kind}", item.hole))
    return questions


def _items(seed: int, count: int, layout: str, kind: str, readers: int) -> list[tiny.Item]:
    if readers == 1:
        return tiny.held_out(seed, count, layout, kind)
    groups = -(-count // readers)
    found = [tiny.shared_requests(seed * groups + group, readers, layout, kind) for group in range(groups)]
    return [item for items in found for item in items][:count]


def read_task_file(path: Path, encode: Encode, new_tokens: int) -> list[Question]:
    """Questions of a task file. Raises SystemExit that names the line and what is wrong with it."""
    questions = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            try:
                questions.append(_question(json.loads(line), encode, new_tokens))
            except (KeyError, TypeError, ValueError) as error:
                raise SystemExit(f"{path}, line {number}: {type(error).__name__}: {error}") from error
    return questions


def _question(fields: dict[str, Any], encode: Encode, new_tokens: int) -> Question:
    left, right = fields["left"], fields.get("right", "")
    left_ids, left_spans = _tokenize(left, fields["spans"], 0, encode)
    right_ids, right_spans = _tokenize(right, fields["spans"], len(left), encode)
    spans = [*left_spans, *([start + len(left_ids), stop + len(left_ids)] for start, stop in right_spans)]
    if not spans:
        raise ValueError("spans: give at least one")
    answer = fields["answer"]
    parts = tuple(fields.get("parts") or range(len(answer.split())))
    group = fields.get("group") or _position(fields["spans"][0], len(left))
    return Question(left_ids, right_ids, spans, answer, parts, group, fields.get("max_new_tokens", new_tokens))


def _tokenize(
    text: str, spans: Sequence[Sequence[int]], base: int, encode: Encode
) -> tuple[list[int], list[list[int]]]:
    """Token ids of one side, each span tokenized on its own so that its tokens are the same in every request."""
    ids: list[int] = []
    found, at = [], 0
    for start, stop in sorted((start - base, stop - base) for start, stop in spans):
        if stop <= 0 or start >= len(text):
            continue
        if start < 0 or stop > len(text):
            raise ValueError(f"span [{start + base}, {stop + base}] crosses the hole")
        if start > at:
            ids += encode(text[at:start])
        shared = encode(text[start:stop])
        found.append([len(ids), len(ids) + len(shared)])
        ids += shared
        at = stop
    return ids + (encode(text[at:]) if at < len(text) else []), found


def _position(span: Sequence[int], left: int) -> str:
    if span[0] >= left:
        return "suffix"
    return "prefix" if span[0] == 0 else "infix"
