"""Scores of answers, and rows of results from lm-eval's samples."""

import pytest

from sglang_acache.evals import scoring
from sglang_acache.evals.results import FULL, Cell, accuracy, plot, read_samples, table

GSM8K = {"answer": "So 1,000 + 250 = 1,250.\n#### 1,250"}
MBPP = {"test_list": ["assert add(1, 2) == 3"], "test_setup_code": ""}


@pytest.mark.parametrize(
    ("answer", "strict", "flexible"),
    [
        ("it is 1250\n#### 1250", 1, 1),
        ("#### 1,250.00", 1, 1),
        ("the total is $1,250.", 0, 1),
        ("1250 or 9", 0, 0),
        ("#### 1251", 0, 0),
        ("", 0, 0),
    ],
)
def test_gsm8k(answer, strict, flexible):
    assert scoring.gsm8k(GSM8K, [answer]) == {"strict": strict, "flexible": flexible}


@pytest.mark.parametrize(
    ("answer", "right"),
    [("barn", 1), (" The barn.\nQuestion", 1), ("cellar\nbarn", 0), ("barnyard", 0), ("", 0)],
)
def test_babilong_reads_whole_words_of_the_first_line(answer, right):
    assert scoring.babilong({"target": "Barn"}, [answer]) == {"accuracy": right}


@pytest.mark.parametrize(
    ("code", "right"),
    [
        ("def add(a, b):\n    return a + b\n[DONE] more", 1),
        ("```python\ndef add(a, b):\n    return a + b\n```", 1),
        ("def add(a, b):\n    return a - b", 0),
        ("def add(a, b:", 0),
        ("import sys; sys.exit(1)", 0),
        ("def add(a, b):\n    return a + b\n\0", 0),
    ],
)
def test_mbpp_runs_the_tests(code, right):
    assert scoring.mbpp(MBPP, [code]) == {"pass_at_1": right}


def test_mbpp_ends_a_program_that_does_not(monkeypatch):
    monkeypatch.setattr(scoring, "CODE_TIMEOUT_S", 0.5)
    assert scoring.mbpp(MBPP, ["while True: pass"]) == {"pass_at_1": 0}


def test_tiny_judges_the_whole_and_each_value_in_its_place():
    doc = {"answer": "one mill two barn"}
    assert scoring.tiny(doc, ["one mill two barn"]) == {"exact": 1, "parts": 1}
    assert scoring.tiny(doc, ["one barn two barn"]) == {"exact": 0, "parts": 0.5}
    assert scoring.tiny(doc, ["one mill"]) == {"exact": 0, "parts": 0.5}
    assert scoring.tiny(doc, [""]) == {"exact": 0, "parts": 0}


def sample(doc_id, exact, text):
    return {"doc_id": doc_id, "exact": exact, "parts": exact, "resps": [[text]]}


def test_samples_come_back_in_the_order_of_the_documents():
    scores, answers = read_samples([sample(1, 0.0, "b"), sample(0, 1.0, "a")], ["exact"])
    assert scores == {"exact": [1.0, 0.0]}
    assert answers == ["a", "b"]


def cell(ratio, scores, answers, position="prefix"):
    return Cell("tiny", position, ratio, 2.0, 3, {"exact": scores}, answers)


def test_the_table_compares_with_full_recompute_of_the_same_position():
    cells = [cell(0.2, [1.0, 0.0], ["a", "x"]), cell(FULL, [1.0, 1.0], ["a", "b"]), cell(0.2, [1.0], ["a"], "suffix")]
    text = table("tiny", cells).markdown()
    rows = [[part.strip() for part in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| pre")]
    assert rows[0][:3] == ["prefix", "0.2", "2"]
    assert rows[0][4].startswith("-0.50")
    assert rows[0][5:] == ["0.500", "3", "2"]
    assert rows[1][5] == "1.000"
    assert "| suffix | 0.2 | 1 |" in text
    assert [series.label for series in plot("tiny", cells).series] == ["prefix", "suffix"]


def test_intervals():
    assert accuracy([1.0] * 3 + [0.0]).value == 0.75
    assert accuracy([0.5, 0.75]).value == pytest.approx(0.625)
