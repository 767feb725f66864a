"""From an answer's text to its score: lm-eval's ``process_results`` of each task."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

Doc = Mapping[str, Any]
Scores = dict[str, float]

CODE_TIMEOUT_S = 10.0
_MARKED_NUMBER = re.compile(r"#### *(-?[0-9.,]+)")
_NUMBER = re.compile(r"-?\$?[0-9][0-9.,]*")
_WORD = re.compile(r"[a-z]+")


def gsm8k(doc: Doc, results: Sequence[str]) -> Scores:
    """``strict``: the number after ``####``; ``flexible``: the last number of the answer."""
    gold = _value(_MARKED_NUMBER.findall(doc["answer"])[-1])
    marked, numbers = _MARKED_NUMBER.search(results[0]), _NUMBER.findall(results[0])
    strict = marked is not None and _value(marked.group(1)) == gold
    return {"strict": float(strict), "flexible": float(bool(numbers) and _value(numbers[-1]) == gold)}


def _value(number: str) -> str:
    """Digits alone: ``$1,250.00`` and ``1250`` are the same answer."""
    plain = number.replace(",", "").replace("$", "").rstrip(".")
    return re.sub(r"\.0+$", "", plain)


def babilong(doc: Doc, results: Sequence[str]) -> Scores:
    """Whether the answer's first line names the place that was asked for."""
    lines = results[0].strip().splitlines()
    words = _WORD.findall(lines[0].lower()) if lines else []
    return {"accuracy": float(doc["target"].strip().lower() in words)}


def mbpp(doc: Doc, results: Sequence[str]) -> Scores:
    """Whether the code passes the document's tests, run in a Python process of its own.

    The code is a model's and is run as it is: the tasks are marked ``unsafe_code``, so that lm-eval asks first.
    """
    code = results[0].split("[DONE]")[0].replace("```python", "").replace("```", "")
    program = "\n".join([doc.get("test_setup_code") or "", code, *doc["test_list"]])
    return {"pass_at_1": float(_runs(program))}


def _runs(program: str) -> bool:
    with tempfile.TemporaryDirectory(prefix="acache-mbpp-") as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", program],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=CODE_TIMEOUT_S,
            )
        except (subprocess.TimeoutExpired, ValueError):  # ValueError: a null byte in the answer
            return False
    return done.returncode == 0


def tiny(doc: Doc, results: Sequence[str]) -> Scores:
    """``exact``: all words of the answer; ``parts``: share of the questions answered right, each in its place."""
    got, want = results[0].split(), doc["answer"].split()
    values = range(1, len(want), 2)  # slot value slot value ...
    right = [index < len(got) and got[index] == want[index] for index in values]
    return {"exact": float(got == want), "parts": sum(right) / len(right)}
