"""The GPU benchmark's script runs, on a CPU in tiny sizes; what it measures there means nothing."""

import json
from pathlib import Path

import pytest
import torch
from acache_kernels import bench_gpu


def test_the_smoke_run_reports_every_part(tmp_path: Path) -> None:
    assert bench_gpu.main(["--smoke", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["smoke"]
    assert {row["part"] for row in report["rows"]} == set(bench_gpu.PARTS)
    assert all(row["ms"] > 0 and row["ratio"] > 0 and row["rounds"] >= 5 for row in report["rows"])
    assert len((tmp_path / "report.md").read_text().splitlines()) == len(report["rows"]) + 6


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_gpu.main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_block_starts_and_steps_read_the_same_keys() -> None:
    sizes = bench_gpu.smoke_sizes()
    data = bench_gpu.AttentionData.make(sizes, 3, 32)
    maps = data.layout.kv_indices.view(sizes.batch, 32)
    assert torch.equal(maps[0, :24], maps[1, :24])
    assert not set(maps[0, 24:].tolist()) & set(maps[1, 24:].tolist())
