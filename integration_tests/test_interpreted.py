"""Runs the tests over Triton kernels in a process of its own: the interpreter must be chosen before Triton loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from integration_tests.server import server_environment

TESTS = Path(__file__).parent / "interpreted"


def test_the_model_over_triton_kernels() -> None:
    environment = server_environment({"TRITON_INTERPRET": "1"})
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(TESTS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
