"""What cannot be honoured about reuse is refused with the field's or the line's name, and the fix."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from integration_tests.prompts import prompt_ids, text_of
from integration_tests.reuse_cases import account_of
from integration_tests.server import Server, server_environment
from sglang_acache.core.reuse_params import PROBES, SELECTORS

LAUNCH_LIMIT_S = 600.0
PROMPT = prompt_ids(20, seed=1)
SUFFIX = prompt_ids(5, seed=2)


def request_of(acache: Any) -> dict[str, Any]:
    custom = {"block_length": 8, "suffix_ids": SUFFIX, "acache": acache}
    sampling = {"max_new_tokens": 8, "temperature": 0, "custom_params": custom}
    return {"input_ids": PROMPT, "sampling_params": sampling}


@pytest.mark.parametrize(
    ("acache", "field", "fix"),
    [
        (5, "acache", "anchor_ratio"),
        ([], "acache", "object"),
        ("on", "acache", "object"),
        ({"ratio": 0.2}, "acache.ratio", "anchor_ratio"),
        ({"enabled": 1}, "acache.enabled", "true or false"),
        ({"enabled": "no"}, "acache.enabled", "true or false"),
        ({"anchor_ratio": 1.01}, "acache.anchor_ratio", "1"),
        ({"anchor_ratio": -0.1}, "acache.anchor_ratio", "0"),
        ({"anchor_ratio": "0.2"}, "acache.anchor_ratio", "number"),
        ({"anchor_ratio": True}, "acache.anchor_ratio", "number"),
        ({"selector": "best"}, "acache.selector", SELECTORS[0]),
        ({"selector": ["attention"]}, "acache.selector", SELECTORS[0]),
        ({"probe": "none"}, "acache.probe", PROBES[0]),
        ({"coverage": 2}, "acache.coverage", "1"),
        ({"coverage": 0.5, "selector": "random"}, "acache.coverage", "random"),
        ({"coverage": 0.5, "selector": "first"}, "acache.coverage", "first"),
        ({"seed": -1}, "acache.seed", "0"),
        ({"seed": 1.5}, "acache.seed", "integer"),
        ({"spans": 3}, "acache.spans", "[start, end]"),
        ({"spans": [3]}, "acache.spans", "[start, end]"),
        ({"spans": [[0, 5, 9]]}, "acache.spans", "[start, end]"),
        ({"spans": [["0", 5]]}, "acache.spans", "integer"),
        ({"spans": [[0, 5.0]]}, "acache.spans", "integer"),
        ({"spans": [[-1, 5]]}, "acache.spans", "0"),
        ({"spans": [[5, 5]]}, "acache.spans", "start < end"),
        ({"spans": [[9, 5]]}, "acache.spans", "start < end"),
        ({"spans": [[0, 26]]}, "acache.spans", "25"),
        ({"spans": [[0, 9], [8, 12]]}, "acache.spans", "overlap"),
        ({"spans": [[15, 22]]}, "acache.spans", "hole"),
    ],
    ids=str,
)
def test_fields(llada_acache: Server, acache: Any, field: str, fix: str) -> None:
    response = llada_acache.post("/generate", request_of(acache))
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    assert message.startswith(f"{field}: "), message
    assert fix in message
    llada_acache.assert_log_clean()


def test_the_server_goes_on(llada_acache: Server) -> None:
    accepted = {"spans": [[0, 20], [20, 25]], "anchor_ratio": 0.5, "selector": None, "coverage": None, "seed": 3}
    response = llada_acache.post("/generate", request_of(accepted))
    assert response.status_code == 200, response.text
    assert account_of(response.json())["anchor_tokens"] == 10 + 3
    llada_acache.assert_healthy()


def test_a_server_without_reuse_names_the_flag(llada: Server) -> None:
    for acache in ({}, {"anchor_ratio": 0.5}, {"spans": [[0, 9]]}, {"enabled": True}):
        response = llada.post("/generate", request_of(acache))
        assert response.status_code == 400
        assert "--enable-acache" in response.json()["error"]["message"]
    assert llada.post("/generate", request_of({"enabled": False})).status_code == 200
    wrong = llada.post("/generate", request_of({"selector": "best"}))
    assert wrong.json()["error"]["message"].startswith("acache.selector: ")


GOOD_LINE = json.dumps({"ids": prompt_ids(40, seed=3), "name": "good"})
BAD_LINES: dict[str, tuple[str, str]] = {
    "not-json": ("{", "line 3"),
    "deep": ("[" * 99_999, "line 3"),
    "no-object": ("[1, 2]", "object"),
    "nothing": ("{}", "exactly one of text and ids"),
    "both": (json.dumps({"ids": [1] * 40, "text": "w1"}), "exactly one of text and ids"),
    "unknown": (json.dumps({"ids": [1] * 40, "pin": True}), "pin"),
    "ids": (json.dumps({"ids": ["w1"] * 40}), "ids"),
    "outside": (json.dumps({"ids": [10**6] * 40}), "ids"),
    "short": (json.dumps({"ids": prompt_ids(5)}), "--acache-min-affix-tokens"),
    "short-text": (json.dumps({"text": text_of(prompt_ids(5))}), "--acache-min-affix-tokens"),
    "long": (json.dumps({"ids": prompt_ids(2000)}), "ids"),
    "name": (json.dumps({"ids": prompt_ids(40, seed=4), "name": "good"}), "name"),
    "pinned": (json.dumps({"ids": prompt_ids(40), "pinned": "yes"}), "pinned"),
}
"""The third line of a file, and words of the message."""


@pytest.fixture(scope="module")
def launches(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Exit code and output of a launch with every file, from one interpreter."""
    folder = tmp_path_factory.mktemp("files")
    lines = []
    for name, (line, _) in BAD_LINES.items():
        file = folder / f"{name}.jsonl"
        file.write_text(f"{GOOD_LINE}\n\n{line}\n{GOOD_LINE}\n")
        lines.append(file)
    lines.append(folder / "missing.jsonl")
    model = str(checkpoint("llada"))
    arguments = [["--model", model, "--enable-acache", "--acache-affix-file", str(file)] for file in lines]
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "integration_tests.many_launches"],
        input=json.dumps(arguments),
        env=server_environment(),
        capture_output=True,
        text=True,
        timeout=LAUNCH_LIMIT_S,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return dict(zip([*BAD_LINES, "missing"], json.loads(run.stdout), strict=True))


@pytest.mark.parametrize("name", [*BAD_LINES, "missing"])
def test_affix_files(launches: dict[str, dict[str, Any]], name: str) -> None:
    code, output = launches[name]["rc"], launches[name]["err"]
    assert code == 2, output
    assert "Traceback" not in output
    (line,) = [line for line in output.splitlines() if "error:" in line]
    words = ("missing.jsonl",) if name == "missing" else ("line 3", f"{name}.jsonl", BAD_LINES[name][1])
    assert all(word in line for word in ("--acache-affix-file", *words)), line
