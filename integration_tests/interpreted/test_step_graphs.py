"""Steps inside blocks through static buffers, in SGLang's own ModelRunner, against the same steps run eagerly.

What stands in for a CUDA graph runs the captured body again, over whatever the buffers hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang.srt.runtime_context import get_context

from integration_tests.oracle.checkpoints import CheckpointSpec, write_checkpoint
from integration_tests.oracle.sglang_runner import Query, SGLangRunner, forward_batch, whole_canvas
from sglang_acache.srt import cuda_capture, worker
from sglang_acache.srt.flags import NAMESPACE, flag_values
from sglang_acache.srt.graphs import StepGraphs, install_graphs
from sglang_acache.srt.step import STATE_KEY

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy: -inf - -inf in masked lanes

SPEC = CheckpointSpec(hidden=64, heads=4, kv_heads=2, layers=2, inner=96, max_positions=64)
BLOCK, CANVAS, CANVASES = 4, 24, 5


class World:
    """A model, its pool with the K/V of some canvases, and graphs of up to three requests."""

    def __init__(self, folder: Any) -> None:
        self.sglang = SGLangRunner(write_checkpoint(folder, SPEC), attention_backend="acache_triton")
        draw = np.random.default_rng(0)
        self.texts = [draw.integers(0, SPEC.words, CANVAS).tolist() for _ in range(CANVASES)]
        self.sglang.forward([whole_canvas(text, self.slot(i, 0), []) for i, text in enumerate(self.texts)])
        self.graphs = install_graphs(self.sglang.runner, [1, 2, 3], BLOCK, lambda body: body)

    @staticmethod
    def slot(canvas: int, position: int) -> int:
        return 1 + canvas * CANVAS + position

    def block(self, canvas: int, start: int, rows: int, logits: list[int]) -> Query:
        """A step inside a block of one canvas, which reads the tokens of another before it: a shared affix."""
        shared = [self.slot((canvas + 1) % CANVASES, position) for position in range(6)]
        positions = list(range(start, start + rows))
        slots = [self.slot(canvas, position) for position in range(CANVAS)]
        return Query(
            [self.texts[canvas][position] for position in positions],
            positions,
            slots[start : start + rows],
            shared + slots[6:],
            [row for row in logits if row < rows],
        )

    def pool(self) -> torch.Tensor:
        """[layer, 2, slots, heads, size], a copy."""
        pool = self.sglang.runner.token_to_kv_pool
        layers = [torch.stack(pool.get_kv_buffer(layer)) for layer in range(SPEC.layers)]
        return torch.stack(layers).clone()

    def restore(self, values: torch.Tensor) -> None:
        pool = self.sglang.runner.token_to_kv_pool
        for layer, (k, v) in enumerate(values):
            keys, vals = pool.get_kv_buffer(layer)
            keys.copy_(k)
            vals.copy_(v)

    def poison(self) -> None:
        """The worst that earlier steps may have left in the static buffers."""
        assert self.graphs is not None
        self.graphs._rows.fill_(2**40)
        self.graphs._hidden.fill_(float("nan"))
        for batch in self.graphs._batches:
            plan = batch.attention.plan
            plan.kv_indices[:-1] = 2**31 - 1
            plan.part_out.fill_(float("nan"))
            for launch in plan.launches:
                launch.work.fill_(2**31 - 1)
                launch.merges.fill_(2**31 - 1)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("graphs"))
    yield world
    world.sglang.close()


@pytest.fixture
def replaying(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """SGLang asks our graphs on a CPU too, as it does on CUDA; lists the rows of each replayed bucket."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    monkeypatch.setattr(ForwardMode, "is_cpu_graph", ForwardMode.is_cuda_graph)
    rows: list[int] = []
    execute = StepGraphs.execute

    def counted(self: StepGraphs, batch: Any, pp_proxy_tensors: Any = None) -> Any:
        bucket = self._bucket(batch.model_specific_states[STATE_KEY])
        assert bucket is not None
        rows.append(self._batches[bucket].attention.capacity.queries)
        return execute(self, batch, pp_proxy_tensors)

    monkeypatch.setattr(StepGraphs, "execute", counted)
    return rows


STEPS = st.lists(
    st.tuples(
        st.integers(0, CANVASES - 1), st.integers(0, 4), st.integers(1, BLOCK), st.lists(st.integers(0, BLOCK - 1))
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda step: step[0],
)


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_a_replayed_step_is_the_eager_step(world: World, replaying: list[int], steps: list[Any]) -> None:
    queries = [world.block(canvas, BLOCK * block, rows, sorted(set(logits))) for canvas, block, rows, logits in steps]
    before = world.pool()
    replaying.clear()
    world.poison()
    logits = world.sglang.forward(queries)
    assert len(replaying) == 1
    after = world.pool()

    written = [slot for query in queries for slot in query.write_slots]
    others = np.setdiff1d(np.arange(1, before.shape[2]), written)
    assert torch.equal(after[:, :, others], before[:, :, others])

    world.restore(before)
    padding = replaying[0] - len(written)
    padded = [*queries, Query([0] * padding, [0] * padding, [0] * padding, [0])] if padding else queries
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepGraphs, "can_run_graph", lambda *_: False)
        assert torch.equal(world.sglang.forward(padded), logits)
        assert torch.equal(world.pool()[:, :, 1:], after[:, :, 1:])
        world.restore(before)
        unpadded = world.sglang.forward(queries)  # fewer rows: other blocks in matrix products, perhaps
    assert_near(unpadded, logits)
    assert_near(world.pool()[:, :, written], after[:, :, written])


def assert_near(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.shape == expected.shape
    if got.numel():
        assert float((got - expected).abs().max() / expected.abs().max()) < 1e-5


def test_the_worker_installs_what_the_flags_ask_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens on CUDA when a worker is made, all but the recording."""
    bag = get_context().config_bag(NAMESPACE)
    flags = SimpleNamespace(**{**flag_values(bag), "diffusion_graph_requests": [1, 2, 16]})
    monkeypatch.setattr(worker, "get_context", lambda: SimpleNamespace(config_bag=lambda _: flags))
    monkeypatch.setattr(cuda_capture, "CudaCapture", lambda _: lambda body: body)
    for name in ("decode_cuda_graph_runner", "init_decode_cuda_graph"):
        monkeypatch.setattr(world.sglang.runner, name, None)
    worker._install_graphs(world.sglang.runner)
    installed = world.sglang.runner.decode_cuda_graph_runner
    capacities = [batch.attention.capacity for batch in installed._batches]
    assert [one.requests for one in capacities] == [1, 2, 8]  # of --max-running-requests 8
    assert {one.longest for one in capacities} == {32}
    assert capacities[-1].keys == 8 * SPEC.max_positions


def test_sglangs_recapture_leaves_steps_on_graphs(world: World, replaying: list[int]) -> None:
    """``recapture_cuda_graph`` of a weight update; SGLang's own decode graphs are switched off."""
    query = world.block(0, 4, BLOCK, [0, 2])
    before = world.sglang.forward([query])
    world.sglang.runner.recapture_decode_cuda_graph()
    assert world.sglang.runner.decode_cuda_graph_runner not in (None, world.graphs)
    assert torch.equal(world.sglang.forward([query]), before)
    assert replaying == [BLOCK, BLOCK]
    world.graphs = world.sglang.runner.decode_cuda_graph_runner


def test_what_does_not_fit_runs_eagerly(world: World, replaying: list[int]) -> None:
    """More requests, rows or keys than a bucket holds, a block that is longer, and steps that someone watches."""
    fitting = world.block(0, 4, BLOCK, [0])
    long_block = world.block(0, 4, BLOCK + 1, [0])
    many_keys = replace(fitting, read_slots=fitting.read_slots * 10)
    for queries in ([world.block(i, 4, 1, []) for i in range(4)], [long_block], [many_keys]):
        world.sglang.forward(queries)
    assert not replaying

    class Watcher:
        layers = 0

        def observe(self, attention: Any) -> None:
            self.layers += 1

    watcher = Watcher()
    batch = forward_batch([fitting])
    batch.model_specific_states[STATE_KEY] = replace(batch.model_specific_states[STATE_KEY], observers=[watcher])
    world.sglang.runner.forward(batch)
    assert (watcher.layers, replaying) == (SPEC.layers, [])
    world.sglang.forward([fitting])
    assert replaying == [BLOCK]
