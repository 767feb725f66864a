import pytest

from sglang_acache.tiny import task
from sglang_acache.tiny import vocabulary as words


def solve(item: task.Item) -> str:
    """The answer read off the text alone."""
    tokens = [*item.left.split(), *item.right.split()]

    def section(opening: str, size: int) -> list[list[str]]:
        rest = tokens[tokens.index(opening) + 1 :]
        end = next((i for i, word in enumerate(rest) if word.endswith((":", "."))), len(rest))
        return [rest[i : i + size] for i in range(0, end, size)]

    name_of = {thing: name for thing, _, name in section(words.FACTS_OPEN, 3)}
    place_of = dict(section(words.UPDATES_OPEN, 2))
    asked = dict(section(words.QUESTION_WORDS[item.task], 2))
    step = {
        "echo": lambda thing: thing,
        "kv": lambda thing: name_of[thing],
        "upd": lambda name: place_of[name],
        "hop": lambda thing: place_of[name_of[thing]],
    }[item.task]
    return " ".join(f"{slot} {step(asked[slot])}" for slot in words.SLOTS)


@pytest.mark.parametrize("layout", task.LAYOUTS)
@pytest.mark.parametrize("kind", task.TASKS)
def test_answers_follow_from_the_text(layout, kind):
    for item in task.held_out(1, 20, layout, kind):
        assert item.answer == solve(item)
        assert len(item.answer.split()) == 12


def test_same_seed_same_items():
    assert task.held_out(5, 4, "infix") == task.held_out(5, 4, "infix")
    assert task.held_out(5, 4, "infix") != task.held_out(6, 4, "infix")


def test_splits_are_disjoint_whatever_the_seed():
    def affixes(split):
        return {i.affix for seed in range(3) for i in task.held_out(seed, 20, "prefix", split=split)}

    train, validation, test = (affixes(split) for split in ("train", "validation", "test"))
    assert not train & validation
    assert not train & test
    assert not validation & test


@pytest.mark.parametrize("layout", task.LAYOUTS)
@pytest.mark.parametrize("hole", [12, 16])
def test_affix_span_points_at_the_affix(layout, hole):
    for item in task.held_out(2, 5, layout, hole=hole):
        canvas = [*item.left.split(), *["_"] * hole, *item.right.split()]
        start, end = item.affix_span
        assert " ".join(canvas[start:end]) == item.affix


@pytest.mark.parametrize("layout", task.LAYOUTS)
def test_shared_requests_share_only_the_affix(layout):
    items = task.shared_requests(3, 5, layout)
    assert len({(i.affix, i.affix_span) for i in items}) == 1
    assert len({i.left for i in items}) == 5


def test_suffix_puts_the_facts_after_the_hole():
    item = task.held_out(0, 1, "suffix")[0]
    assert item.right == item.affix
    assert item.left.endswith(words.ANSWER_OPEN)


def test_unknown_layout_names_the_valid_ones():
    with pytest.raises(ValueError, match="prefix, infix, suffix"):
        task.held_out(0, 1, "middle")
