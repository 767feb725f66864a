"""Accuracy by position of the shared text and anchor ratio: lm-eval, once for each pair, against one server."""

from __future__ import annotations

import argparse
import importlib.metadata
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_acache.bench.options import REUSE_FLAGS, names, numbers
from sglang_acache.bench.report import Report
from sglang_acache.bench.server import serve
from sglang_acache.evals.prompts import POSITIONS
from sglang_acache.evals.results import FULL, Cell, plot, read_samples, table
from sglang_acache.evals.spans import declared, hits

TASKS = ("gsm8k", "mbpp", "babilong_qa1", "tiny")
RATIOS = (0.0, 0.1, 0.2, 0.3, 0.5, FULL)
TASK_FOLDER = Path(__file__).parent / "tasks"
CLIENTS = {False: ("local-completions", "/v1/completions"), True: ("local-chat-completions", "/v1/chat/completions")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tasks", type=names, default=["tiny"], help=f"of {', '.join(TASKS)} (default: tiny)")
    parser.add_argument("--positions", type=names, default=list(POSITIONS))
    parser.add_argument("--ratios", type=numbers, default=list(RATIOS), help="anchor ratios (default: the paper's)")
    parser.add_argument("--base-url", help="a running server with --enable-acache (default: start one)")
    parser.add_argument("--model", default="llada-tiny", help="model of the server (default: %(default)s)")
    parser.add_argument("--server-flags", type=shlex.split, default=[], help="further flags of sglang.launch_server")
    parser.add_argument("--chat", action="store_true", help="/v1/chat/completions: for instruct models")
    parser.add_argument("--shots", type=int, help="examples (default: the task's)")
    parser.add_argument("--limit", type=int, help="documents of each task (default: all)")
    parser.add_argument("--selector", help="how anchors are chosen (default: the server's)")
    parser.add_argument("--clients", type=int, default=16, help="requests in flight (default: %(default)s)")
    parser.add_argument("--data-file", help="JSONL for the task tiny (default: drawn)")
    parser.add_argument("--run-model-code", action="store_true", help="mbpp runs code that the model wrote; say yes")
    parser.add_argument("--out", type=Path, default=Path("results/evals"), help="(default: %(default)s)")


def run(options: argparse.Namespace) -> int:
    report = Report("evals", options.out, vars(options))
    report.conditions["command"] = shlex.join(["python", "-m", "sglang_acache.evals", *sys.argv[1:]])
    report.conditions["lm_eval"] = importlib.metadata.version("lm_eval")
    with serve(
        options.model, [*REUSE_FLAGS, "--no-acache-discover", *options.server_flags], base_url=options.base_url
    ) as target:
        for task in options.tasks:
            cells = list(_cells(task, options, target.url))
            report.add(table(task, cells))
            report.plots.append(plot(task, cells))
            report.data[task] = [vars(cell) for cell in cells]
    return report.write()


def _cells(task: str, options: argparse.Namespace, url: str) -> Iterator[Cell]:
    for position in options.positions:
        loaded = _load(f"acache_{task}_{position}", options)
        with declared(url, _shared_texts(loaded, options.limit)) as spans:
            for ratio in options.ratios:
                print(f"{task}, {position}, anchor ratio {ratio:g}", file=sys.stderr, flush=True)
                before, began = hits(url, spans), time.perf_counter()
                found = _evaluate(loaded, options, url, ratio)
                cell = Cell(task, position, ratio, time.perf_counter() - began, hits(url, spans) - before)
                metrics = list(loaded.aggregation())
                cell.scores, cell.answers = read_samples(found["samples"][loaded.config.task], metrics)
                yield cell


def _load(name: str, options: argparse.Namespace) -> Any:
    from lm_eval.tasks import TaskManager

    metadata = {"data_file": options.data_file} if options.data_file else {}
    manager = TaskManager(include_path=TASK_FOLDER, include_defaults=False, metadata=metadata)
    loaded = manager.load([name])["tasks"][name]
    if options.shots is not None:
        loaded.set_config("num_fewshot", options.shots)
    return loaded


def _shared_texts(task: Any, limit: int | None) -> Iterator[str]:
    for _, doc in task.doc_iterator(limit=limit):
        yield task.shared_text(doc)


def _evaluate(task: Any, options: argparse.Namespace, url: str, ratio: float) -> Any:
    import lm_eval

    client, path = CLIENTS[options.chat]
    return lm_eval.simple_evaluate(
        model=client,
        model_args=client_arguments(url + path, options.model, options.clients),
        tasks=[task],
        limit=options.limit,
        gen_kwargs={"custom_params": {**task.config.metadata["decoding"], "acache": reuse(ratio, options.selector)}},
        apply_chat_template=options.chat,
        bootstrap_iters=0,
        confirm_run_unsafe_code=options.run_model_code,
    )


def client_arguments(url: str, model: str, clients: int) -> dict[str, Any]:
    """``model_args`` of lm-eval's API clients: text is sent, the server tokenizes it."""
    return {
        "model": model,
        "base_url": url,
        "num_concurrent": clients,
        "tokenizer_backend": None,
        "tokenized_requests": False,
        "max_retries": 3,
        "timeout": 3600,
    }


def reuse(ratio: float, selector: str | None) -> dict[str, Any]:
    """``custom_params.acache`` of a request."""
    return {"anchor_ratio": ratio, **({"selector": selector} if selector else {})}
