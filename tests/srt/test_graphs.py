"""Which steps replay a graph, in which bucket, and over which buffers; the model and the kernel are stand-ins.

With the real ones: ``integration_tests/interpreted/test_step_graphs.py``.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from acache_kernels.attention import get_attention_kernel
from acache_kernels.layout import RaggedLayout
from acache_kernels.static_plan import StaticCapacity, StaticPlan
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.model_executor.cuda_graph_config import Backend, CudaGraphConfig, PhaseConfig

from sglang_acache.core.plan import RowSampling, build_plan, silent_entry
from sglang_acache.srt import graphs as graphs_module
from sglang_acache.srt import launch
from sglang_acache.srt.cuda_capture import CudaCapture
from sglang_acache.srt.graphs import PART_BYTES, StepGraphs, buckets, empty_step, graph_sizes, install_graphs
from sglang_acache.srt.step import STATE_KEY, StepTensors
from sglang_acache.srt.worker import DiffusionBatch, DiffusionStep, DiffusionWorker

HIDDEN, BLOCK, CANVAS = 4, 4, 40


class RecordedPlan(StaticPlan):
    """Keeps the layouts it was updated with."""

    def __init__(self, capacity: Any) -> None:
        super().__init__(capacity, SimpleNamespace())
        self.layouts: list[RaggedLayout] = []

    def _update(self, layout: RaggedLayout) -> None:
        self.layouts.append(layout)


class Model:
    """A "model" whose output row is a function of token, position and write slot; logits are its first column."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(hidden_size=HIDDEN)
        norm = SimpleNamespace(weight=torch.ones(HIDDEN))
        self.stored: list[int] = []

        def backbone(tokens: torch.Tensor, positions: torch.Tensor, batch: Any, _: Any) -> tuple[torch.Tensor, ...]:
            self.stored = batch.out_cache_loc.tolist()
            value = (tokens + 100 * positions + 10_000 * batch.out_cache_loc).float()[:, None]
            return value.expand(-1, HIDDEN), -value.expand(-1, HIDDEN)

        self.model: Any = backbone
        self.model.norm = norm

    @staticmethod
    def compute_logits(hidden: torch.Tensor, residual: torch.Tensor, batch: Any) -> torch.Tensor:
        rows = batch.model_specific_states[STATE_KEY].logit_rows
        assert torch.equal(hidden, -residual) or bool(hidden.isnan().any())
        return hidden[rows, :1]


def plans(*requests: int) -> list[StaticPlan]:
    """Of a quarter of the canvas and of all of it a request."""
    sizes = [(count, keys) for count in requests for keys in (CANVAS // 4, CANVAS)]
    return [RecordedPlan(StaticCapacity(count, count * BLOCK, count * keys, BLOCK)) for count, keys in sizes]


def graphs() -> StepGraphs:
    return StepGraphs(Model(), plans(1, 2, 4), lambda body: body, lambda _: None)


def step(queries: list[int], keys: list[int], observers: tuple[Any, ...] = ()) -> Any:
    """A forward batch of random rows."""
    draw = torch.Generator().manual_seed(sum(queries) + 1000 * sum(keys))
    tokens, positions, slots = torch.randint(1, 90, (3, sum(queries)), generator=draw)
    reads = torch.randint(1, 90, (sum(keys),), generator=draw)
    rows = torch.randperm(sum(queries), generator=draw)[: sum(queries) // 2]
    tensors = StepTensors(tokens, positions, slots, rows, RaggedLayout.build(queries, keys, reads), observers)
    return SimpleNamespace(model_specific_states={STATE_KEY: tensors})


def test_buckets_are_tried_from_the_smallest() -> None:
    found = buckets([1, 4], rows=33, canvas=5000, slots=10_000)
    assert [(one.requests, one.queries, one.keys, one.longest) for one in found] == [
        (1, 33, 1024, 33),
        (1, 33, 4096, 33),
        (1, 33, 5000, 33),
        (4, 132, 4096, 33),
        (4, 132, 16384, 33),
        (4, 132, 20_000, 33),
    ]


@pytest.mark.parametrize(
    ("requests", "canvas", "slots", "keys"),
    [
        (1, 131_072, 10**6, [1024, 4096, 16_384, 65_536, 131_072]),
        (1, 600, 10**6, [600]),
        (1, 131_072, 3000, [1024, 3000]),  # no longer canvas is admitted
        (8, 131_072, 3000, [8 * 1024, 4 * 3000]),  # each slot is read by four
    ],
)
def test_no_bucket_for_keys_that_the_pool_cannot_hold(requests: int, canvas: int, slots: int, keys: list[int]) -> None:
    assert [one.keys for one in buckets([requests], 32, canvas, slots)] == keys


@pytest.mark.parametrize(
    ("asked", "rows", "most", "sizes"),
    [
        ([1, 2, 4, 8], 32, 100, [1, 2, 4, 8]),
        ([1, 2, 4, 8], 32, 3, [1, 2, 3]),  # no more requests than ever run
        ([8, 64, 72], 32, 100, [8, 64]),  # 2,048 rows
        ([], 32, 100, []),
    ],
)
def test_sizes_that_are_captured(asked: list[int], rows: int, most: int, sizes: list[int]) -> None:
    assert graph_sizes(asked, rows, most) == sizes


@pytest.mark.parametrize(
    ("queries", "keys", "bucket"),
    [
        ([4], [10], (1, 10)),
        ([4], [11], (1, 40)),
        ([4], [41], (2, 80)),  # more keys than one canvas has: two requests' room
        ([4, 1], [5, 5], (2, 20)),
        ([1, 1, 1], [10, 10, 20], (4, 40)),
        ([4, 4, 4, 4], [40, 40, 40, 40], (4, 160)),
    ],
)
def test_a_step_takes_the_smallest_bucket_that_holds_it(
    queries: list[int], keys: list[int], bucket: tuple[int, int]
) -> None:
    ours, batch = graphs(), step(queries, keys)
    assert ours.can_run_graph(batch)
    index = ours._bucket(batch.model_specific_states[STATE_KEY])
    assert index is not None
    capacity = ours._batches[index].attention.capacity
    assert (capacity.requests, capacity.keys) == bucket


@pytest.mark.parametrize(
    "batch",
    [
        step([5], [10]),  # a longer block, or a block start
        step([1] * 5, [1] * 5),
        step([4, 4], [160, 1]),
        step([4], [10], observers=(object(),)),
        SimpleNamespace(model_specific_states=None),
        SimpleNamespace(model_specific_states={"of": "another model"}),
    ],
)
def test_what_runs_eagerly(batch: Any) -> None:
    assert not graphs().can_run_graph(batch)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, BLOCK), st.integers(1, CANVAS)), min_size=1, max_size=4), min_size=1))
def test_buffers_hold_the_step_and_padding_stores_to_slot_0(steps: list[list[tuple[int, int]]]) -> None:
    """Over any run of steps through the same buffers, which hold anything before."""
    ours = graphs()
    for shapes in steps:
        batch = step([n for n, _ in shapes], [m for _, m in shapes])
        tensors = batch.model_specific_states[STATE_KEY]
        ours._rows.fill_(2**40)
        ours._hidden.fill_(float("nan"))
        assert ours.can_run_graph(batch)
        logits = ours.execute(batch).full_logits
        rows = tensors.logit_rows
        expected = tensors.tokens + 100 * tensors.positions + 10_000 * tensors.write_slots
        assert torch.equal(logits[:, 0], expected[rows].float())
        count = len(tensors.tokens)
        stored = ours._model.stored
        assert stored[:count] == tensors.write_slots.tolist()
        assert not any(stored[count:])
        plan = ours._batches[ours._bucket(tensors)].attention  # type: ignore[index]
        assert plan.layouts[-1] is tensors.layout  # type: ignore[attr-defined]


def test_a_capture_touches_slot_0_only() -> None:
    seen: list[list[int]] = []
    model = Model()

    def capture(body: Any) -> Any:
        body()
        seen.append(model.stored)
        return body

    StepGraphs(model, plans(1, 3), capture, lambda _: None)
    assert [len(stored) for stored in seen] == [12, 12, 4, 4]  # the largest first
    assert not any(sum(stored) for stored in seen)


def test_the_order_of_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over stand-ins for CUDA: warmed up on the capture stream, then recorded there in SGLang's pool, then replayed."""
    from sglang.srt import runtime_context
    from sglang.srt.distributed import parallel_state
    from sglang.srt.distributed.device_communicators import pynccl_allocator
    from sglang.srt.model_executor.forward_context import get_attn_backend, has_forward_context
    from sglang.srt.model_executor.runner_utils import pool
    from sglang.srt.model_executor.runner_utils.capture_mode import get_is_capture_mode

    calls: list[Any] = []

    @contextlib.contextmanager
    def scope(name: str, stream: str, **given: Any) -> Iterator[Any]:
        calls.append((name, stream, *given.values()))
        yield SimpleNamespace(stream=f"{stream} of {name}")
        calls.append(f"end of {name}")

    graph = SimpleNamespace(replay=lambda: calls.append("replay"))
    group = SimpleNamespace(barrier=lambda: calls.append("barrier"))
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(tp_group=group))
    monkeypatch.setattr(parallel_state, "graph_capture", lambda stream: scope("capture", stream))
    monkeypatch.setattr(pynccl_allocator, "set_graph_pool_id", lambda id: calls.append(("collectives", id)))
    monkeypatch.setattr(pool, "get_or_create_global_graph_memory_pool", lambda module: (module, "pool"))
    monkeypatch.setattr(pool, "get_or_create_global_graph_capture_stream", lambda: "stream")
    monkeypatch.setattr(pool, "graph_pool_capture_scope", lambda: scope("pool", "captures"))
    monkeypatch.setattr(pool, "graph_pool_replay_scope", lambda: scope("pool", "replays"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(
        torch.cuda, "graph", lambda *, cuda_graph, pool, stream: scope("record", stream, pool=pool, graph=cuda_graph)
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def body() -> None:
        assert get_attn_backend() == "backend"
        assert get_is_capture_mode()
        calls.append("body")

    replay = CudaCapture(SimpleNamespace(attn_backend="backend"))(body)
    assert calls == [
        ("collectives", (torch.cuda, "pool")),
        ("capture", "stream"),
        *["barrier", "body"] * 2,
        ("pool", "captures"),
        ("record", "stream of capture", (torch.cuda, "pool"), graph),
        "body",
        "end of record",
        "end of pool",
        "end of capture",
    ]
    assert not has_forward_context()
    assert not get_is_capture_mode()
    calls.clear()
    replay()
    assert calls == [("pool", "replays"), "replay", "end of pool"]


def test_nothing_is_installed_where_nothing_can_be() -> None:
    for sizes, static in (([], True), ([1], False)):
        kernel = SimpleNamespace(has_static_plans=static)
        runner = SimpleNamespace(attn_backend=SimpleNamespace(kernel=kernel), decode_cuda_graph_runner=None)
        assert install_graphs(runner, sizes, BLOCK, lambda body: body) is None
        assert runner.decode_cuda_graph_runner is None


DREAM = {"heads": (28, 4), "context": 131_072, "rows": 33, "slots": 1_000_000}
LLADA = {"heads": (32, 32), "context": 4096, "rows": 32, "slots": 110_000}
"""The published models at their own context lengths; slots of a card of 80 GB."""


def model_runner(heads: tuple[int, int], context: int, slots: int) -> Any:
    """What SGLang's has that graphs need, over the Triton kernel and tensors without memory."""
    backend = SimpleNamespace(kernel=get_attention_kernel("triton"), init_forward_metadata=lambda _: None)
    attention = SimpleNamespace(tp_q_head_num=heads[0], tp_k_head_num=heads[1], qk_head_dim=128)
    layers = [SimpleNamespace(self_attn=SimpleNamespace(attn=attention))]
    norm = SimpleNamespace(weight=torch.ones(HIDDEN, dtype=torch.bfloat16, device="meta"))
    model = SimpleNamespace(model=SimpleNamespace(layers=layers, norm=norm), config=SimpleNamespace(hidden_size=HIDDEN))
    return SimpleNamespace(
        attn_backend=backend,
        model=model,
        model_config=SimpleNamespace(context_len=context),
        max_total_num_tokens=slots,
        dtype=torch.bfloat16,
        device="meta",
        decode_cuda_graph_runner=None,
    )


@pytest.fixture
def published_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = SimpleNamespace(graph=SimpleNamespace(enable_cudagraph_gc=False))
    monkeypatch.setattr(graphs_module, "get_exec", lambda: flags)


@pytest.mark.parametrize(("model", "most_programs"), [(DREAM, 3200), (LLADA, 8400)])
@pytest.mark.usefixtures("published_flags")
def test_memory_and_idle_programs_of_the_published_models(model: dict[str, Any], most_programs: int) -> None:
    """For as many requests as SGLang's flags may ask for; programs of a layer where canvases are short."""
    requests = graph_sizes([1, 2, 4, *range(8, 257, 8)], model["rows"], 256)
    runner = model_runner(model["heads"], model["context"], model["slots"])
    ours = install_graphs(runner, requests, model["rows"], lambda body: body)
    assert ours is not None
    kept = [batch.attention for batch in ours._batches]
    for plan in kept:
        buffers = (plan.plan.part_out, plan.plan.part_lse)
        assert sum(buffer.nbytes for buffer in buffers) <= PART_BYTES
        assert plan.plan.kv_indices.nbytes + plan._table.nbytes < 4 << 20  # type: ignore[attr-defined]
    smallest = {plan.capacity.requests: plan for plan in reversed(kept)}
    assert list(smallest)[::-1] == requests
    assert all(plan.capacity.keys == 1024 * count for count, plan in smallest.items())
    lines = sum(len(launch.work) for launch in smallest[requests[-1]].plan.launches)
    assert lines * model["heads"][1] < most_programs

    everyone = step([1] * 56, [model["context"]] * 56)
    assert ours.can_run_graph(everyone) == (model is LLADA)  # at Dream's length they would not fit the memory
    assert ours.can_run_graph(step([1], [model["context"]]))


@pytest.mark.usefixtures("published_flags")
def test_captures_find_the_collector_frozen_and_sglangs_recapture_is_ours() -> None:
    frozen: list[int] = []

    def capture(body: Any) -> Any:
        frozen.append(gc.get_freeze_count())
        assert runner.decode_cuda_graph_runner is None
        return body

    runner = model_runner((4, 2), 4096, 10_000)
    before = gc.get_freeze_count()
    first = install_graphs(runner, [1, 2], 32, capture)
    assert runner.decode_cuda_graph_runner is first
    assert len(frozen) == 4
    runner.init_decode_cuda_graph()  # by SGLang, after a weight update that asks for it
    second = runner.decode_cuda_graph_runner
    assert isinstance(second, StepGraphs)
    assert second is not first
    assert [batch.attention for batch in second._batches] == [batch.attention for batch in first._batches]
    assert len(frozen) == 8
    assert min(frozen) > before == gc.get_freeze_count()


@pytest.mark.parametrize("replayed", [True, False])
def test_the_worker_reports_what_sglang_dispatched(replayed: bool) -> None:
    logits = SimpleNamespace(full_logits=torch.empty((0, 9)))
    output = SimpleNamespace(logits_output=logits, can_run_graph=replayed)
    forwarded: list[Any] = []
    runner = SimpleNamespace(device="cpu", forward=lambda batch: forwarded.append(batch) or output)
    worker = DiffusionWorker(SimpleNamespace(model_runner=runner), mask_token_id=8, vocab_limit=9)
    nothing = np.zeros(0, dtype=np.int64)
    plan = build_plan([silent_entry(np.arange(2), np.arange(2), np.arange(1, 3), np.arange(1, 3))])
    batch = DiffusionBatch.__new__(DiffusionBatch)
    batch.step = DiffusionStep(plan, RowSampling(nothing, nothing, nothing, nothing, []), nothing)
    assert worker.forward_batch_generation(batch).can_run_cuda_graph is replayed
    assert forwarded[0].model_specific_states[STATE_KEY].tokens.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("decode", "sizes"),
    [
        (PhaseConfig(backend=Backend.FULL, bs=[1, 2, 8]), [1, 2, 8]),
        (PhaseConfig(backend=Backend.DISABLED, bs=[1, 2, 8]), []),  # --disable-cuda-graph
        (PhaseConfig(backend=Backend.FULL, bs=None), []),
    ],
)
def test_sglangs_flags_for_decode_graphs_are_ours(
    monkeypatch: pytest.MonkeyPatch, decode: PhaseConfig, sizes: list[int]
) -> None:
    from sglang.srt.arg_groups import overrides

    declared: dict[str, Any] = {}
    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=["LLaDAModelLM"]))
    view = SimpleNamespace(cuda_graph_config=CudaGraphConfig(decode=decode))
    monkeypatch.setattr(overrides, "model_config_of", lambda _: config)
    monkeypatch.setattr(overrides, "resolving_view", lambda _: view)
    monkeypatch.setattr(overrides, "declare_resolution", lambda *_, **fields: declared.update(fields))
    launch.resolve_diffusion(SimpleNamespace(), lambda _: None)
    assert declared["diffusion_graph_requests"] == sizes
    assert declared["cuda_graph_config"].decode.backend == Backend.DISABLED  # SGLang makes none of its own


def test_an_empty_step_has_no_rows() -> None:
    assert empty_step("cpu").layout.num_queries == 0
