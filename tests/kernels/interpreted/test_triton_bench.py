"""The GPU benchmark's script over the Triton kernels, static plans among them."""

import json
from pathlib import Path

import pytest
from acache_kernels import bench_gpu

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy: -inf - -inf in masked lanes


def test_the_smoke_run_covers_the_triton_kernels(tmp_path: Path) -> None:
    assert bench_gpu.main(["--smoke", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert {"triton", "triton, static plan"} <= {row["side"] for row in rows}
