"""SGLang's real scheduler in this process, driven one step at a time, with a clock around each part of a step.

No HTTP, no tokenizer and no detokenizer process: what is timed is what a step costs the scheduler process, where
the model's forward and everything around it (admission, planning, commits, streaming to the next process) happen.
A process holds one scheduler; ``in_fresh_process`` gives each measurement one of its own.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from sglang_acache.bench.workloads import Prompt, reuse_fields

MODEL_FLAGS = ("--skip-server-warmup", "--log-level", "error")


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the scheduler. ``seconds`` is all of it, ``forward_seconds`` the model runner's forward in it."""

    seconds: float
    forward_seconds: float
    rows: int
    pairs: int  # sum over entries of queries x keys
    logit_rows: int
    entries: int
    probes: int
    encodes: int
    used_slots: int  # of the K/V pool when the step was planned, shared ones included


class TimedRunner:
    """A model runner whose ``forward`` adds to ``seconds``."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        output = self.inner.forward(*args, **kwargs)
        _synchronize()
        self.seconds += time.perf_counter() - began
        return output


class InProcessScheduler:
    """Takes the same command-line flags as a server."""

    def __init__(self, model: str, flags: Sequence[str] = ()) -> None:
        from sglang.srt.plugins import load_plugins

        load_plugins()
        from sglang.srt.managers import scheduler as scheduler_module
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import PortArgs, prepare_server_args

        args = prepare_server_args(["--model", model, *MODEL_FLAGS, *flags])
        ports = PortArgs.init_new(args)
        self._outputs = _drain(ports.tokenizer_ipc_name, ports.detokenizer_ipc_name)
        publish(args, role="scheduler", ranks=SpawnRanks(gpu_id=0, world_rank=0, dp_rank=None))
        self.scheduler: Any = scheduler_module.Scheduler(args, ports)
        self.engine = self.scheduler.engine
        if self.engine is None:
            raise SystemExit(f"{model} is not a diffusion LLM that this package serves")
        self.runner = TimedRunner(self.scheduler.model_worker.runner)
        self.scheduler.model_worker.runner = self.runner
        self._names = itertools.count()

    def submit(self, prompt: Prompt, *, cache: str = "dual", reuse: dict[str, Any] | None = None) -> None:
        """Queue a greedy request; ``reuse`` as in ``workloads.generate_payload``."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        from sglang_acache.core.params import override
        from sglang_acache.core.reuse_params import ReuseParams, override_reuse
        from sglang_acache.srt.request_fields import RequestSpec

        shape, total = prompt.shape, len(prompt.left) + len(prompt.right)
        values = {"block_length": shape.block_length, "steps": shape.steps, "cache": cache}
        options = override_reuse(ReuseParams(), reuse_fields(prompt, reuse), total)
        spec = RequestSpec(override(self.scheduler.defaults, values), prompt.right, asdict(options))
        sampling = SamplingParams(
            max_new_tokens=shape.new_tokens, temperature=0.0, ignore_eos=True, custom_params=spec.to_wire()
        )
        sampling.normalize(None)
        request = TokenizedGenerateReqInput(
            rid=f"bench-{next(self._names)}",
            input_text=None,
            input_ids=array("q", prompt.left),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=sampling,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=True,
        )
        self.scheduler.process_input_requests([request])

    def run(self) -> list[Step]:
        """Step until every submitted request is finished."""
        steps: list[Step] = []
        while True:
            step = self.step()
            if step is None:
                return steps
            steps.append(step)

    def step(self) -> Step | None:
        """One turn of SGLang's normal event loop; None where there was nothing to run."""
        scheduler = self.scheduler
        self.runner.seconds = 0.0
        began = time.perf_counter()
        scheduler.ingest_requests()
        plan = scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)
        scheduler.running_batch = plan.running_batch
        batch = plan.batch_to_run
        used = 0 if batch is None else self.used_slots()
        if batch is not None:
            scheduler.process_batch_result(batch, scheduler.run_batch(batch))
        scheduler.last_batch = batch
        seconds = time.perf_counter() - began
        self._outputs()
        if batch is None:
            return None
        return _describe(batch.step.plan, self.engine, seconds, self.runner.seconds, used)

    def used_slots(self) -> int:
        return int(self.scheduler.max_total_num_tokens - self.scheduler.token_to_kv_pool_allocator.available_size())

    def flush(self) -> None:
        """Forget every shared span; nothing may be running."""
        if not self.scheduler.flush_cache(empty_cache=False):
            raise RuntimeError("the scheduler still has requests")


def in_fresh_process(threads: int, function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)`` in a new process with ``threads`` OpenMP threads; arguments and result are pickled."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(function, *args).result()
    finally:
        os.environ.pop("OMP_NUM_THREADS")
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before


def _describe(plan: Any, engine: Any, seconds: float, forward: float, used: int) -> Step:
    queries, keys = plan.qo_indptr[1:] - plan.qo_indptr[:-1], plan.kv_indptr[1:] - plan.kv_indptr[:-1]
    work = engine._work
    return Step(
        seconds=seconds,
        forward_seconds=forward,
        rows=len(plan.tokens),
        pairs=int((queries * keys).sum()),
        logit_rows=len(plan.logit_rows),
        entries=len(plan.entries),
        probes=len(work.probes),
        encodes=len(work.encodes),
        used_slots=used,
    )


def _drain(*addresses: str) -> Callable[[], None]:
    """Bind the sockets that the scheduler streams into; the returned function throws away what arrived."""
    import zmq

    context = zmq.Context()
    sockets = []
    for address in addresses:
        socket = context.socket(zmq.PULL)
        socket.bind(address)
        sockets.append(socket)

    def drain() -> None:
        for socket in sockets:
            while socket.poll(0):
                socket.recv()

    return drain


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
