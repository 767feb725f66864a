"""The benchmark of whole steps on a GPU, as far as it can be tested without one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_acache.bench import gpu_steps
from sglang_acache.bench.bounds import ModelCost
from sglang_acache.bench.in_process import Step
from sglang_acache.bench.options import ordinary_words, read_config


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_steps.main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_model_has_the_published_sizes(tmp_path: Path) -> None:
    folder = str(gpu_steps.write_shapes(tmp_path / "model", tiny=False))
    cost = ModelCost.of(read_config(folder))
    assert (cost.hidden, cost.heads, cost.kv_heads, cost.layers) == (4096, 32, 32, 32)
    parameters = cost.row() / 2 + 2 * cost.vocab * cost.hidden
    assert parameters == pytest.approx(8.0e9, rel=0.01)
    assert ordinary_words(folder) > 126_000
    assert not list((tmp_path / "model").glob("*.safetensors"))


def step(rows: int, seconds: float) -> Step:
    return Step(seconds, seconds / 2, rows, 0, 0, 1, 0, 0, 0)


def test_a_side_that_ran_the_other_way_is_no_measurement() -> None:
    steps = [step(90, 9.0), step(4, 1.0), step(4, 3.0), step(4, 2.0)]
    assert gpu_steps.inner_step(steps, [False, True, True, True], graph=True) == (2.0, 1.0)
    assert gpu_steps.inner_step(steps, [False] * 4, graph=False) == (2.0, 1.0)
    mixed = [False, True, False, True]
    for replayed, graph in (([False] * 4, True), ([True] * 4, False), (mixed, True), (mixed, False)):
        with pytest.raises(RuntimeError, match="a step inside a block"):
            gpu_steps.inner_step(steps, replayed, graph=graph)


def test_what_was_replayed_is_what_sglang_dispatched() -> None:
    outputs = [SimpleNamespace(can_run_graph=way) for way in (True, False)]
    runner = SimpleNamespace(forward=lambda index: outputs[index])
    replayed = gpu_steps.note_replays(runner)
    assert [runner.forward(index) for index in (1, 0)] == outputs[::-1]
    assert replayed == [False, True]
