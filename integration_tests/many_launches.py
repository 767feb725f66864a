"""Several launches of SGLang's server that must fail, from one interpreter that has imported it once.

``python -m integration_tests.many_launches`` reads a JSON list of argument lists from stdin and writes a JSON list of
``{"rc", "err"}`` to stdout. Each launch is a fork that runs ``python -m sglang.launch_server`` as itself.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import tempfile
from pathlib import Path

LIMIT_S = 120
"""A launch that does not fail by then is ended by a signal."""


def launch(arguments: list[str], err: Path) -> int:
    """Exit code of one launch, whose output goes to the file ``err``; negative where a signal ended it."""
    child = os.fork()
    if child == 0:
        signal.alarm(LIMIT_S)
        sink = os.open(err, os.O_WRONLY | os.O_CREAT)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        sys.argv = ["sglang.launch_server", *arguments]
        code = 0
        try:
            runpy.run_module("sglang.launch_server", run_name="__main__")
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.scheduler
    import sglang.srt.server_args  # noqa: F401

    results = []
    with tempfile.TemporaryDirectory() as folder:
        for index, arguments in enumerate(json.load(sys.stdin)):
            err = Path(folder) / f"{index}.txt"
            rc = launch(arguments, err)
            results.append({"rc": rc, "err": err.read_text()})
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
