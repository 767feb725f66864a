"""The ``check`` command: versions, device, and every pin of ``hooks.PINS`` against the installed SGLang."""

from __future__ import annotations

import importlib.metadata
import platform
import sys

from sglang_acache import __version__
from sglang_acache.srt import hooks


def run_check() -> int:
    """Print the report; 0 where everything matches, else 2."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu ({platform.machine()})"
    print(f"sglang-acache {__version__}   python {platform.python_version()}   device {device}")
    for name in ("sglang", "torch", "transformers", "triton"):
        print(f"  {name:<13}{_version(name)}")
    for pin in hooks.PINS:
        mark = "ok " if hooks.check_pin(pin) is None else "BAD"
        print(f"  {mark} {pin.hook or 'uses':<8}{pin.target.removeprefix('sglang.srt.')}  ({pin.why})")
    problems = hooks.mismatches()
    if problems:
        print(hooks.mismatch_report(problems), file=sys.stderr)
        return 2
    print("all pins match")
    return 0


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
