"""Whole steps at LLaDA-8B's shapes, random weights, on a GPU: ``python -m sglang_acache.bench.gpu_steps``.

Not run on hardware so far; ``--smoke`` runs it on a CPU with a tiny model, whose figures mean nothing. Without CUDA
(and without ``--smoke``) it ends with exit code 2.

    block starts     with and without anchors, against the bounds of counts: the subcommand ``recompute``, these shapes
    in-block steps   replayed as CUDA graphs against the same steps run eagerly, in turn in one process
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sglang_acache.bench import recompute
from sglang_acache.bench.in_process import InProcessScheduler, Step, in_fresh_process
from sglang_acache.bench.options import dtype_flags, integers, ordinary_words
from sglang_acache.bench.random_model import CheckpointSpec, write_checkpoint
from sglang_acache.bench.report import Report, Table
from sglang_acache.bench.stats import bootstrap, paired_ratio
from sglang_acache.bench.workloads import Shape, shared_prompts

LLADA_8B = {
    "d_model": 4096,
    "n_heads": 32,
    "n_kv_heads": 32,
    "n_layers": 32,
    "mlp_hidden_size": 12_288,
    "max_sequence_length": 4096,
    "rope_theta": 500_000.0,
    "torch_dtype": "bfloat16",
}
"""Sizes of the published ``config.json``; its vocabulary is ``VOCABULARY``."""
VOCABULARY = 126_464
BLOCK = 32


@dataclass(frozen=True)
class Plan:
    """Everything a measuring process needs."""

    model: str
    flags: list[str]
    canvas: int
    batches: list[int]
    rounds: int


@dataclass
class Samples:
    """By round, of one batch size: median seconds of a step inside a block, and of the model's forward in it."""

    graph: list[float] = field(default_factory=list)
    eager: list[float] = field(default_factory=list)
    graph_forward: list[float] = field(default_factory=list)
    eager_forward: list[float] = field(default_factory=list)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sglang_acache.bench.gpu_steps", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/gpu-steps"), help="folder (default: %(default)s)")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU: does the script run?")
    parser.add_argument("--canvases", type=integers, default=[1024, 2048])
    parser.add_argument("--batches", type=integers, default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(argv)
    import torch

    if not options.smoke and not torch.cuda.is_available():
        print("error: no CUDA device here; --smoke runs this script with a tiny model on the CPU", file=sys.stderr)
        return 2
    if options.smoke:
        options.canvases, options.batches, options.rounds = [128], [1, 2], 1
    with tempfile.TemporaryDirectory(prefix="acache-model-") as folder:
        model = str(write_shapes(Path(folder), tiny=options.smoke))
        failed = [_block_starts(model, options, canvas) for canvas in options.canvases]
        return max(*failed, _in_block(model, options))


def write_shapes(folder: Path, *, tiny: bool) -> Path:
    """A checkpoint folder without weights: SGLang draws them itself (``--load-format dummy``)."""
    write_checkpoint(folder, CheckpointSpec(vocab_size=256 if tiny else VOCABULARY, layers=1))
    (folder / "model.safetensors").unlink()
    if not tiny:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | LLADA_8B))
    return folder


def _flags(smoke: bool) -> list[str]:
    return ["--load-format", "dummy", *dtype_flags("float32" if smoke else "bfloat16")]


def _block_starts(model: str, options: argparse.Namespace, canvas: int) -> int:
    """Half and three quarters shared, anchor ratio 0.2, against the bounds of rows and of operations."""
    parser = argparse.ArgumentParser()
    recompute.add_arguments(parser)
    asked = parser.parse_args([])
    asked.out = options.out / f"block-start-{canvas}"
    asked.model, asked.canvas, asked.batches, asked.rounds = model, canvas, options.batches, max(2, options.rounds)
    asked.shares, asked.ratios = [0.5, 0.75], [0.2]
    asked.dtypes, asked.server_flags = _flags(options.smoke)[-1:], _flags(options.smoke)[:2]
    return recompute.run(asked)


def _in_block(model: str, options: argparse.Namespace) -> int:
    report = Report("gpu_steps", options.out / "in-block", vars(options))
    for canvas in options.canvases:
        most = max(options.batches)
        flags = [*_flags(options.smoke), "--max-total-tokens", str(canvas * (most + 1))]
        flags += ["--max-running-requests", str(most), "--diffusion-step-tokens", str(canvas * most)]
        plan = Plan(model, flags, canvas, options.batches, options.rounds)
        samples = in_fresh_process(1, measure, plan)
        report.add(_table(canvas, samples))
        report.data[f"in-block-{canvas}"] = {str(batch): vars(one) for batch, one in samples.items()}
    return report.write()


def measure(plan: Plan) -> dict[int, Samples]:
    """In a process of its own. Within a round graph and eager take turns; the first round warms up."""
    import torch

    scheduler = InProcessScheduler(plan.model, plan.flags)
    runner, words = scheduler.runner.inner, ordinary_words(plan.model)
    graphs, replayed = runner.decode_cuda_graph_runner, note_replays(scheduler.runner)
    has_graphs = torch.cuda.is_available()
    samples = {batch: Samples() for batch in plan.batches}
    for turn in range(-1, plan.rounds):
        for batch, sample in samples.items():
            rng, shape = np.random.default_rng(turn + 1), Shape(plan.canvas, new_tokens=BLOCK)
            prompts = shared_prompts(rng, shape.check(), batch, words)
            for name in ("graph", "eager") if turn % 2 else ("eager", "graph"):
                runner.decode_cuda_graph_runner = graphs if name == "graph" else None
                replayed.clear()
                steps = _run(scheduler, prompts)
                seconds, forward = inner_step(steps, replayed, graph=has_graphs and name == "graph")
                if turn >= 0:
                    getattr(sample, name).append(seconds)
                    getattr(sample, f"{name}_forward").append(forward)
    return samples


def note_replays(runner: Any) -> list[bool]:
    """A list to which each later forward of the runner adds whether it replayed a graph."""
    replayed: list[bool] = []
    forward = runner.forward

    def noting(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        replayed.append(output.can_run_graph)
        return output

    runner.forward = noting
    return replayed


def _run(scheduler: InProcessScheduler, prompts: list[Any]) -> list[Step]:
    for prompt in prompts:
        scheduler.submit(prompt)
    return scheduler.run()


def inner_step(steps: list[Step], replayed: list[bool], *, graph: bool) -> tuple[float, float]:
    """Median seconds of a step inside a block, and of its forward; RuntimeError where one ran the other way."""
    fewest = min(step.rows for step in steps)
    ways = {way for step, way in zip(steps, replayed, strict=True) if step.rows == fewest}
    if ways != {graph}:
        raise RuntimeError("a step inside a block " + ("replayed no graph" if graph else "replayed a graph"))
    inner = [step for step in steps if step.rows == fewest]
    return float(np.median([s.seconds for s in inner])), float(np.median([s.forward_seconds for s in inner]))


def _table(canvas: int, samples: dict[int, Samples]) -> Table:
    table = Table(
        f"Steps inside a block, canvas {canvas}",
        ["batch", "graph ms", "eager ms", "eager / graph", "forward alone"],
        note="Medians over rounds of a round's median step; ratios are of the two sides of a round.",
    )
    for batch, sample in samples.items():
        whole = paired_ratio(sample.eager, sample.graph)
        forward = paired_ratio(sample.eager_forward, sample.graph_forward)
        times = [bootstrap(np.asarray(side) * 1e3).text(2) for side in (sample.graph, sample.eager)]
        table.rows.append([batch, *times, whole.text(2), forward.text(2)])
    return table


if __name__ == "__main__":
    sys.exit(main())
