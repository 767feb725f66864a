"""Runs the Triton tests in a process of their own, because the interpreter must be chosen before Triton loads."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent / "interpreted"


def test_triton_kernels_under_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(TESTS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
