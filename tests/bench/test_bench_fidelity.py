"""How answers are scored, and how task files are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_acache.bench.fidelity import FULL, Policy, Score, agreement, recovery
from sglang_acache.bench.fidelity_tasks import Question, read_task_file, tiny_questions
from sglang_acache.tiny import vocabulary as words


def encode(text: str) -> list[int]:
    """One token a character."""
    return [ord(letter) for letter in text]


def write(folder: Path, *lines: dict) -> Path:
    path = folder / "tasks.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    return path


def test_spans_are_character_offsets_of_both_sides(tmp_path: Path) -> None:
    line = {"left": "ask: FACTS now", "right": " MORE.", "spans": [[5, 10], [15, 19]], "answer": "yes it is"}
    (question,) = read_task_file(write(tmp_path, line), encode, new_tokens=32)
    both = "".join(map(chr, [*question.left, *question.right]))
    assert both == "ask: FACTS now MORE."
    assert [both[start:stop] for start, stop in question.spans] == ["FACTS", "MORE"]
    assert (question.group, question.parts, question.new_tokens) == ("infix", (0, 1, 2), 32)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"left": "abc", "answer": "x"}, "spans"),
        ({"left": "abc", "spans": [], "answer": "x"}, "at least one"),
        ({"left": "abc", "right": "def", "spans": [[1, 5]], "answer": "x"}, "crosses the hole"),
        ({"left": "abc", "spans": [[0, 2]]}, "answer"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: dict, problem: str) -> None:
    with pytest.raises(SystemExit, match=rf"line 1: .*{problem}"):
        read_task_file(write(tmp_path, line), encode, 32)


def test_tiny_questions_mark_the_facts_in_every_position() -> None:
    questions = tiny_questions(2, ["hop"], words.encode, seed=0)
    assert [question.group for question in questions[::2]] == ["prefix, hop", "infix, hop", "suffix, hop"]
    for question in questions:
        (span,) = question.spans
        tokens = [*question.left, *question.right]
        assert tokens[span[0]] == words.TOKEN_IDS[words.FACTS_OPEN]
        assert tokens[span[1] - 1] == words.TOKEN_IDS[words.FACTS_CLOSE]
    assert len({tuple(question.left) for question in questions}) == len(questions)


def test_tiny_questions_may_share_their_facts() -> None:
    questions = tiny_questions(5, ["hop"], words.encode, seed=0, readers=2)
    facts = [tuple([*q.left, *q.right][q.spans[0][0] : q.spans[0][1]]) for q in questions]
    assert [len(set(facts[at : at + 5])) for at in (0, 5, 10)] == [3, 3, 3]
    assert facts[0] == facts[1] != facts[2] == facts[3]
    assert len({(tuple(q.left), tuple(q.right)) for q in questions}) == len(questions)


def test_whole_answers_and_parts() -> None:
    question = Question([1], [], [[0, 1]], "one attic two cellar", (1, 3), "prefix", 4)
    assert question.whole(" one attic two cellar ")
    assert not question.whole("one attic two")
    assert question.part_shares("one attic two harbor") == 0.5
    assert question.part_shares("") == 0.0


def test_agreement_counts_missing_tokens_as_different() -> None:
    assert agreement([1, 2, 3], [1, 2, 3]) == 1.0
    assert agreement([1, 2], [1, 2, 3, 4]) == 0.5
    assert agreement([], []) == 1.0


def test_recovery_is_the_part_of_the_loss_won_back() -> None:
    full, direct = Score([], [1.0] * 8, []), Score([], [0.2] * 8, [])
    assert recovery(full, direct, Score([], [0.8] * 8, [])).value == pytest.approx(0.75)
    assert recovery(full, direct, direct).value == 0
    assert recovery(full, full, direct).text() == "-", "nothing was lost"


def test_policies_say_what_they_ask_for() -> None:
    assert FULL.fields == {"enabled": False}
    assert Policy("first", 0.2).fields == {"anchor_ratio": 0.2, "selector": "first", "probe": "request"}
    assert [Policy(ratio=0.0).label, Policy(ratio=0.2, probe="fused").label] == [
        "direct reuse",
        "attention 0.2, fused probe",
    ]
