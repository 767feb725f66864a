"""``python -m sglang_acache check``: does the installed SGLang match, and what is attached to it."""

from __future__ import annotations

import argparse
import sys


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sglang_acache", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="print versions, device, registries and hooks; exit 2 on a mismatch")
    parser.parse_args(argv)
    from sglang_acache.srt.check import run_check

    return run_check()


if __name__ == "__main__":
    sys.exit(main())
