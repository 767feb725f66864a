"""Where the shared text of a request stands: before its own text, inside it, or after the hole.

A request's own words are the same in every position; only their order changes, so that accuracies can be compared:

  prefix  shared, head, tail |hole|
  infix   head, shared, tail |hole|
  suffix  head, tail |hole| shared
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

POSITIONS = ("prefix", "infix", "suffix")
Doc = Mapping[str, Any]

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_BABILONG_RULES = (
    "The text below hides facts about where people are. Answer the question from these facts only; if a person was in "
    "several places, the latest one counts. Answer with one word, the place."
)


@dataclass(frozen=True)
class Prompt:
    """Text before the hole and after it."""

    left: str
    right: str = ""


@dataclass(frozen=True)
class Format:
    """How a dataset's documents become text.

    Attributes:
        own: a document's own text, cut in two: head and tail. The answer follows the tail.
        target: the answer as an example shows it.
        joint: between head and tail where they stand together.
        gap: between shared text and own text, and between examples.
        rules: instructions that stand at the head of the shared text.
        shared: a document's shared text where it is not made of examples.
    """

    own: Callable[[Doc], tuple[str, str]]
    target: Callable[[Doc], str]
    joint: str = " "
    gap: str = "\n\n"
    rules: str = ""
    shared: Callable[[Doc], str] | None = None

    def example(self, doc: Doc) -> str:
        head, tail = self.own(doc)
        space = "" if tail.endswith("\n") else " "
        return f"{self.joint.join(part for part in (head, tail) if part)}{space}{self.target(doc)}"

    def shared_text(self, doc: Doc, examples: Sequence[Doc]) -> str:
        if self.shared is not None:
            return self.shared(doc)
        return self.gap.join([*([self.rules] if self.rules else []), *map(self.example, examples)])


def place(form: Format, position: str, doc: Doc, examples: Sequence[Doc]) -> Prompt:
    """The prompt of one document. Raises ValueError for an unknown position."""
    head, tail = form.own(doc)
    shared = form.shared_text(doc, examples)
    own = form.joint.join(part for part in (head, tail) if part)
    if not shared:
        return Prompt(own)
    if position == "prefix":
        return Prompt(f"{shared}{form.gap}{own}")
    if position == "infix":
        return Prompt(form.gap.join(part for part in (head, shared, tail) if part))
    if position == "suffix":
        return Prompt(own, f"{form.gap}{shared}".lstrip(" "))
    raise ValueError(f"unknown position {position!r}; choose one of {', '.join(POSITIONS)}")


def _gsm8k(doc: Doc) -> tuple[str, str]:
    story, asked = halves(doc["question"].strip())
    return f"Question: {story}", f"{asked}\nAnswer:"


def halves(text: str) -> tuple[str, str]:
    """Cut before the last sentence; a single sentence in its middle."""
    sentences = _SENTENCE_END.split(text)
    if len(sentences) > 1:
        last = sentences[-1]
        return text[: len(text) - len(last)].rstrip(), last
    words = text.split()
    middle = len(words) // 2
    return " ".join(words[:middle]), " ".join(words[middle:])


def _mbpp(doc: Doc) -> tuple[str, str]:
    tests = "\n".join(doc["test_list"])
    task = f"You are an expert Python programmer, and here is your task: {doc['text'].strip()}"
    return task, f"Your code should pass these tests:\n\n{tests}\n[BEGIN]\n"


def _mbpp_target(doc: Doc) -> str:
    code = doc["code"].replace("\r\n", "\n").strip()
    return f"{code}\n[DONE]"


FORMATS: Mapping[str, Format] = {
    "gsm8k": Format(own=_gsm8k, target=lambda doc: doc["answer"].strip()),
    "mbpp": Format(own=_mbpp, target=_mbpp_target),
    "babilong": Format(
        own=lambda doc: (doc["input"].strip(), f"Question: {doc['question'].strip()}\nAnswer:"),
        target=lambda doc: doc["target"].strip(),
        joint="\n",
        rules=_BABILONG_RULES,
    ),
    "tiny": Format(
        own=lambda doc: (doc["updates"], doc["question"]),
        target=lambda doc: doc["answer"],
        gap=" ",
        shared=lambda doc: str(doc["facts"]),
    ),
}


def format_named(name: str) -> Format:
    """Raises ValueError that lists the known names."""
    if name not in FORMATS:
        raise ValueError(f"unknown format {name!r}; choose one of {', '.join(FORMATS)}")
    return FORMATS[name]
