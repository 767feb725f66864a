"""Where shared text stands, and that a request's own words are the same in every position."""

import pytest

from sglang_acache.evals.prompts import FORMATS, POSITIONS, Prompt, format_named, halves, place
from sglang_acache.evals.tiny_data import rows
from sglang_acache.tiny import task as tiny

SHOT = {"question": "Ann has 2 pens. She buys 3. How many?", "answer": "2 + 3 = 5\n#### 5"}
ASKED = {"question": "Bo has 7 hats. He loses 4. How many are left?", "answer": "#### 3"}
MBPP = {
    "text": "Write a function to add two numbers.",
    "code": "def add(a, b):\r\n  return a + b",
    "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"],
}
STORY = {"input": "Ann went to the barn.", "question": "Where is Ann?", "target": "barn"}
EXAMPLE = "Question: Ann has 2 pens. She buys 3. How many?\nAnswer: 2 + 3 = 5\n#### 5"


def test_gsm8k_in_three_positions():
    form = FORMATS["gsm8k"]
    assert form.shared_text(ASKED, [SHOT]) == EXAMPLE
    left = {position: place(form, position, ASKED, [SHOT]) for position in POSITIONS}
    own = "Question: Bo has 7 hats. He loses 4. How many are left?\nAnswer:"
    assert left["prefix"] == Prompt(f"{EXAMPLE}\n\n{own}")
    assert left["infix"] == Prompt(f"Question: Bo has 7 hats. He loses 4.\n\n{EXAMPLE}\n\nHow many are left?\nAnswer:")
    assert left["suffix"] == Prompt(own, f"\n\n{EXAMPLE}")


@pytest.mark.parametrize("name", ["gsm8k", "mbpp", "babilong"])
@pytest.mark.parametrize("position", POSITIONS)
def test_the_shared_text_is_whole_and_the_own_words_are_kept(name, position):
    form, docs = FORMATS[name], {"gsm8k": (ASKED, SHOT), "mbpp": (MBPP, MBPP), "babilong": (STORY, STORY)}
    doc, shot = docs[name]
    prompt, shared = place(form, position, doc, [shot, shot]), form.shared_text(doc, [shot, shot])
    whole = prompt.left + prompt.right
    assert whole.count(shared) == 1
    assert bool(prompt.right) == (position == "suffix")
    assert whole.replace(shared, " ").split() == " ".join(form.own(doc)).split()
    start = whole.index(shared)
    assert {"prefix": start == 0, "infix": 0 < start < len(prompt.left), "suffix": start >= len(prompt.left)}[position]


def test_no_examples_is_the_document_alone():
    for position in POSITIONS:
        assert place(FORMATS["gsm8k"], position, ASKED, []) == place(FORMATS["gsm8k"], "prefix", ASKED, [])


def test_mbpp_is_the_published_prompt():
    prompt = place(FORMATS["mbpp"], "prefix", MBPP, [MBPP])
    assert prompt.left == (
        "You are an expert Python programmer, and here is your task: Write a function to add two numbers. "
        "Your code should pass these tests:\n\nassert add(1, 2) == 3\nassert add(0, 0) == 0\n[BEGIN]\n"
        "def add(a, b):\n  return a + b\n[DONE]\n\n"
        "You are an expert Python programmer, and here is your task: Write a function to add two numbers. "
        "Your code should pass these tests:\n\nassert add(1, 2) == 3\nassert add(0, 0) == 0\n[BEGIN]\n"
    )


def test_a_question_of_one_sentence_is_cut_in_its_middle():
    assert halves("One. Two? Three!") == ("One. Two?", "Three!")
    assert halves("How many are left?") == ("How many", "are left?")
    assert halves("3.5 pies cost $7.00 each. Total?") == ("3.5 pies cost $7.00 each.", "Total?")


@pytest.mark.parametrize("position", POSITIONS)
def test_tiny_documents_are_the_models_own_layouts(position):
    doc = rows(1, seed=4)[0]
    prompt = place(FORMATS["tiny"], position, doc, [])
    parts = {
        "prefix": (["facts", "updates", "question"], []),
        "infix": (["updates", "facts", "question"], []),
        "suffix": (["updates", "question"], ["facts"]),
    }
    left, right = parts[position]
    assert prompt == Prompt(" ".join(doc[part] for part in left), " ".join(doc[part] for part in right))


def test_tiny_rows_share_facts_in_groups_that_no_training_has_seen():
    found = rows(20, seed=1, requests_a_group=8)
    assert [len({row["facts"] for row in found[start : start + 8]}) for start in (0, 8, 16)] == [1, 1, 1]
    assert len({row["facts"] for row in found}) == 3
    assert len({row["question"] for row in found}) == 20
    assert found == rows(20, seed=1, requests_a_group=8)
    assert all(len(row["answer"].split()) == 2 * tiny.N_SLOTS for row in found)


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="choose one of gsm8k, mbpp, babilong, tiny"):
        format_named("mmlu")
    with pytest.raises(ValueError, match="choose one of prefix, infix, suffix"):
        place(FORMATS["gsm8k"], "middle", ASKED, [SHOT])
