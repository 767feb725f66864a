"""A launch that cannot work ends at once, with exit code 2 and one line that names the flag and the fix."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from integration_tests.ordinary_model import write_llama
from integration_tests.server import server_environment
from sglang_acache.server_process import launch_command

LIMIT_S = 600.0
LLADA, LLAMA = "<llada>", "<llama>"


@dataclass(frozen=True)
class Refusal:
    """A command line, and words of the message it must give."""

    arguments: tuple[str, ...]
    words: tuple[str, ...]
    model: str = LLADA


def flag(name: str, value: str, *words: str) -> Refusal:
    return Refusal((name, value), (name, *words))


REFUSALS = (
    flag("--diffusion-block-length", "0"),
    flag("--diffusion-block-length", "eight"),
    flag("--diffusion-steps", "-1"),
    flag("--diffusion-threshold", "1.5"),
    flag("--diffusion-factor", "0"),
    flag("--diffusion-remasking", "best", "low_confidence"),
    flag("--diffusion-cache", "both", "dual"),
    flag("--diffusion-max-new-tokens", "0"),
    flag("--diffusion-step-tokens", "-5"),
    flag("--diffusion-blok-length", "8"),
    flag("--pp-size", "2"),
    flag("--page-size", "16"),
    flag("--attention-backend", "torch_native", "acache_torch"),
    Refusal(("--diffusion-steps", "8", "--diffusion-factor", "1.0"), ("--diffusion-factor", "steps")),
    Refusal(("--enable-acache",), ("--enable-acache", "LlamaForCausalLM"), LLAMA),
    Refusal((), ("--model", "download"), "llada"),
    Refusal((), ("--model", "download"), "dream-base"),
)


@pytest.fixture(scope="module")
def outcomes(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str]]:
    """Exit code and output of every launch, made in one interpreter: importing SGLang is what takes the time."""
    folder = tmp_path_factory.mktemp("launches")
    models = {LLADA: str(checkpoint("llada")), LLAMA: str(write_llama(folder / "llama"))}
    lines = [["--model", models.get(one.model, one.model), *one.arguments] for one in REFUSALS]
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "integration_tests.many_launches"],
        input=json.dumps(lines),
        env=server_environment({"HF_HOME": str(folder)}),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return [(result["rc"], result["err"]) for result in json.loads(run.stdout)]


@pytest.mark.parametrize(
    "index", range(len(REFUSALS)), ids=[" ".join(one.arguments) or one.model for one in REFUSALS]
)
def test_refused_with_one_clear_error(outcomes: list[tuple[int, str]], index: int) -> None:
    code, output = outcomes[index]
    assert code == 2, output
    assert "Traceback" not in output
    (line,) = [line for line in output.splitlines() if "error:" in line]
    assert all(word in line for word in REFUSALS[index].words), line


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(
        command, env=server_environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def test_a_whole_process_exits_with_two(checkpoint: Callable[[str], Path]) -> None:
    run = python(*launch_command(str(checkpoint("llada")), "--diffusion-cache", "both")[3:])
    assert run.returncode == 2, run.stderr
    assert "--diffusion-cache" in run.stderr


CHECKS = """
import dataclasses, sys
from sglang_acache.__main__ import main
from sglang_acache.srt import hooks, plugin
print("rc", main(["check"]))
pin = dataclasses.replace(hooks.PINS[1], parameters=("moved",))
hooks.PINS = (pin,)
hooks.mismatches.__defaults__ = ((pin,),)
print("rc", main(["check"]))
plugin.register()
"""


def test_check_passes_and_a_pin_that_does_not_match_stops_it_and_the_server() -> None:
    run = python("-c", CHECKS)
    assert run.returncode == 2, run.stderr
    assert [line for line in run.stdout.splitlines() if line.startswith("rc")] == ["rc 0", "rc 2"]
    assert "all pins match" in run.stdout
    assert run.stderr.count("expected ('moved',)") == 2
    assert "fix: pip install" in run.stderr
