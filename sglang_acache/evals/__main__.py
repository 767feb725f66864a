"""``python -m sglang_acache.evals COMMAND``: accuracy through lm-eval, by position of shared text and anchor ratio."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from sglang_acache.evals import sweep, tiny_data


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sglang_acache.evals", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    sweeping = commands.add_parser("sweep", help="run lm-eval for every position and anchor ratio; write a report")
    sweep.add_arguments(sweeping)
    commands.add_parser("tasks-path", help="print the folder of the task files, for lm_eval --include_path")
    data = commands.add_parser("tiny-data", help="write a JSONL data set for llada-tiny")
    data.add_argument("--out", type=Path, default=Path("tiny.jsonl"))
    data.add_argument("--count", type=int, default=256)
    data.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    if options.command == "tasks-path":
        print(sweep.TASK_FOLDER)
        return 0
    if options.command == "tiny-data":
        print(tiny_data.write(options.out, options.count, options.seed))
        return 0
    if importlib.util.find_spec("lm_eval") is None:
        print("lm_eval is not installed: pip install '.[eval]' in a clone of sglang-acache", file=sys.stderr)
        return 2
    return sweep.run(options)


if __name__ == "__main__":
    sys.exit(main())
