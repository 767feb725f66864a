"""The benchmark of whole steps on a GPU, as far as it can be tested without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang_acache.bench import gpu_steps
from sglang_acache.bench.bounds import ModelCost
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
