"""Times the torch implementations on this machine's CPU: `python -m acache_kernels.bench_cpu`.

Every attention figure is a ratio to dense scaled-dot-product attention over the same queries and keys that were
gathered beforehand, contiguous, outside the clock. Both sides run alternately in this process; medians.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from acache_kernels import RaggedLayout, get_attention_kernel

POOL_SLOTS = 24_000


@dataclass(frozen=True)
class Load:
    name: str
    qo_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]


def loads() -> list[Load]:
    rng = np.random.default_rng(0)
    queries = tuple(int(n) for n in rng.choice([4, 8, 16, 32], 16))
    keys = tuple(int(m) for m in rng.integers(128, 1100, 16))
    return [
        Load("16 x 4-32 q, 128-1100 keys", queries, keys),
        Load("16 x 16 q, 512 keys", (16,) * 16, (512,) * 16),
        Load("16 x 32 q, 1024 keys", (32,) * 16, (1024,) * 16),
        Load("1 x 1024 q, 1024 keys", (1024,), (1024,)),
        Load("16 x 256 q, 1024 keys", (256,) * 16, (1024,) * 16),
        Load("16 x 1024 q, 1024 keys", (1024,) * 16, (1024,) * 16),
    ]


def read_maps(load: Load, kind: str) -> torch.Tensor:
    """Slots of all requests: `run` one ascending run each, `affix` 60% shared run with 20% of it replaced by
    private slots, `random` any slots."""
    rng = np.random.default_rng(1)
    parts = []
    private = POOL_SLOTS // 4
    for m in load.kv_lens:
        if kind == "random":
            parts.append(rng.permutation(POOL_SLOTS)[:m])
            continue
        slots = np.arange(private, private + m)
        private += m
        if kind == "affix":
            shared = int(0.6 * m)
            slots[:shared] = np.where(rng.random(shared) < 0.2, slots[:shared], np.arange(shared))
        parts.append(slots)
    return torch.from_numpy(np.concatenate(parts))


def medians(sides: list[Callable[[], object]], seconds: float) -> list[float]:
    """Median seconds of each side, run in turn for about `seconds` in all (at least 5 rounds)."""
    samples: list[list[float]] = [[] for _ in sides]
    for side in sides:
        side()
    began = time.perf_counter()
    while len(samples[0]) < 5 or time.perf_counter() - began < seconds:
        for side, sample in zip(sides, samples, strict=True):
            start = time.perf_counter()
            side()
            sample.append(time.perf_counter() - start)
    return [statistics.median(sample) for sample in samples]


def dense_side(
    load: Load, slots: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Callable[[], object]:
    """SDPA over gathered, contiguous [B, H, n, D] tensors: one call when all shapes are equal, else one each."""
    equal = len(set(load.qo_lens)) == len(set(load.kv_lens)) == 1
    batch = len(load.qo_lens) if equal else 1
    calls = []
    row = key = 0
    for n, m in list(zip(load.qo_lens, load.kv_lens, strict=True))[:: batch if equal else 1]:
        rows, part = q[row : row + batch * n], slots[key : key + batch * m]
        row, key = row + batch * n, key + batch * m
        heads = (batch, -1, *q.shape[1:])
        calls.append([x.view(heads).transpose(1, 2).contiguous() for x in (rows, k[part], v[part])])
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: [attend(*call) for call in calls]


def attention_row(load: Load, kind: str, heads: int, dim: int, dtype: torch.dtype, seconds: float) -> str:
    slots = read_maps(load, kind)
    layout = RaggedLayout.build(load.qo_lens, load.kv_lens, slots)
    q = torch.randn(layout.num_queries, heads, dim).to(dtype)
    k, v = (torch.randn(POOL_SLOTS, heads, dim).to(dtype) for _ in range(2))
    kernel = get_attention_kernel("torch")

    def plan() -> object:
        return kernel.plan(
            layout, num_q_heads=heads, num_kv_heads=heads, head_dim=dim, dtype=dtype, device="cpu"
        )

    planned = plan()
    ours, dense, planning = medians(
        [
            lambda: kernel.run(planned, q, k, v, scale=dim**-0.5, return_lse=True),
            dense_side(load, slots, q, k, v),
            plan,
        ],
        seconds,
    )
    name = str(dtype).removeprefix("torch.")
    cells = [load.name, kind, f"{heads} x {dim}", name, f"{ours * 1e3:.2f}", f"{dense * 1e3:.2f}"]
    return "| " + " | ".join([*cells, f"{ours / dense:.2f}", f"{planning * 1e3:.2f}"]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="measuring time per row")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(f"{platform.machine()}, {args.threads} thread(s), torch {torch.__version__}\n")
    print("| load | slots | heads | dtype | ms | dense ms | ratio | plan ms |")
    print("|---|---|---|---|---|---|---|---|")
    for heads, dim in ((4, 32), (12, 64)):
        for dtype in (torch.float32, torch.bfloat16):
            for load in loads():
                for kind in ("run", "affix", "random"):
                    print(attention_row(load, kind, heads, dim, dtype, args.seconds), flush=True)


if __name__ == "__main__":
    main()
