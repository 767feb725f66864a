"""The command: draws a frame every interval until interrupted."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

from sglang_acache.top.frame import render
from sglang_acache.top.source import ServerSource, Snapshot, Unreachable

_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # the other screen, without a cursor, and back


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base-url", default="http://127.0.0.1:30000", help="the server (default: %(default)s)")
    parser.add_argument("--interval", type=_seconds, default=1.0, help="seconds between frames (default: 1)")
    parser.add_argument("--once", action="store_true", help="print one frame and exit")
    parser.add_argument(
        "--api-key",
        default=os.environ.get("SGLANG_API_KEY"),
        help="the server's --admin-api-key, else its --api-key (default: $SGLANG_API_KEY)",
    )


def run_top(arguments: argparse.Namespace) -> int:
    """Exit code 1 where the server has nothing to show at the start; later failures are shown, and tried again."""
    source = ServerSource(arguments.base_url, arguments.api_key)
    try:
        first = source.snapshot()
    except Unreachable as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if arguments.once:
        size = shutil.get_terminal_size((120, 50))
        print("\n".join(render(first, None, base_url=source.base_url, width=size.columns, height=size.lines)))
        return 0
    return watch(source, first, arguments.interval, sys.stdout)


def watch(
    source: ServerSource, first: Snapshot, interval: float, out: TextIO, sleep: Callable[[float], None] = time.sleep
) -> int:
    """Draw frames until Ctrl-C; the terminal is left as it was."""
    before, now, trouble = None, first, ""
    out.write(_ENTER)
    try:
        while True:
            size = shutil.get_terminal_size((120, 50))
            lines = render(now, before, base_url=source.base_url, width=size.columns - 1, height=size.lines - 2)
            draw([*lines, trouble[: size.columns - 1]], out)
            sleep(interval)
            try:
                before, now, trouble = now, source.snapshot(), ""
            except Unreachable as error:
                trouble = f"{error} - trying again"
    except KeyboardInterrupt:
        return 0
    finally:
        out.write(_LEAVE)
        out.flush()


def draw(lines: list[str], out: TextIO) -> None:
    """Over the last frame, without a flicker."""
    out.write(_HOME + "".join(f"{line}{_CLEAR_LINE}\n" for line in lines) + _CLEAR_BELOW)
    out.flush()


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"must be seconds in [0.1, 3600], got {text!r}")
    return value
