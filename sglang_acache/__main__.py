"""``python -m sglang_acache``: ``check`` the installation, run the ``demo``, watch a server with ``top``."""

from __future__ import annotations

import argparse
import sys

from sglang_acache.top.run import add_arguments, run_top


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sglang_acache", description="ACache for SGLang")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="print versions, device, registries and hooks; exit 2 on a mismatch")
    demo = commands.add_parser(
        "demo", help="serve the bundled model, send requests that share text, print what was reused"
    )
    demo.add_argument(
        "--exit", action="store_true", help="stop the server after the table (default without a terminal)"
    )
    add_arguments(commands.add_parser("top", help="live view of a server: requests, reuse, shared spans"))
    arguments = parser.parse_args(argv)
    if arguments.command == "top":
        return run_top(arguments)
    if arguments.command == "demo":
        from sglang_acache.demo import run_demo

        return run_demo(stay=not arguments.exit and sys.stdout.isatty())
    from sglang_acache.srt.check import run_check

    return run_check()


if __name__ == "__main__":
    sys.exit(main())
