"""The GPU benchmark's script runs, on a CPU in tiny sizes; what it measures there means nothing."""

import json
from pathlib import Path
from types import SimpleNamespace

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


@pytest.mark.parametrize(("launch_cycles", "tries"), [(1 << 20, 1), (1 << 23, 4), (1 << 40, 6)])
def test_a_time_is_of_launches_that_all_were_queued(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], launch_cycles: int, tries: int
) -> None:
    """Over a stand-in for CUDA; a side that cannot be queued gives a time all the same, and says so."""
    slept: list[int] = []
    event = SimpleNamespace(
        record=lambda: None,
        synchronize=lambda: None,
        query=lambda: slept[-1] <= launch_cycles,  # has the device begun before the host was done?
        elapsed_time=lambda _: 3.0,
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=4))
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: event)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: torch.zeros(8))
    runs: list[None] = []
    assert bench_gpu.cuda_clock()(lambda: runs.append(None)) == 3e-3
    assert len(runs) == tries
    assert slept == [bench_gpu.FEWEST_CYCLES << i for i in range(tries)]
    assert bool(capsys.readouterr().err) == (slept[-1] <= launch_cycles)
