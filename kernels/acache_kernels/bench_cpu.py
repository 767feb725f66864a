"""Times the torch implementations on this machine's CPU: `python -m acache_kernels.bench_cpu`.

Every attention figure is a ratio to dense scaled-dot-product attention over the same queries and keys that were
gathered beforehand, contiguous, outside the clock. Both sides run alternately in this process; medians. With one
thread the clock is the thread's processor time, so that other programs on the machine disturb it less.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from acache_kernels import (
    ImportanceTargets,
    RaggedLayout,
    accumulate_importance,
    choose_tokens,
    get_attention_kernel,
    rebase_kv,
)
from acache_kernels.rows import add_rms_norm, rotate, silu_mul

POOL_SLOTS = 24_000
Side = Callable[[], object]
"""One of the things that are compared: a run of it."""


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


def read_maps(
    load: Load, kind: str, pool_slots: int = POOL_SLOTS, share: float = 0.6, replaced: float = 0.2
) -> torch.Tensor:
    """Slots of all requests: `run` one ascending run each, `affix` a shared run of `share` of the keys with
    `replaced` of it replaced by private slots, `random` any slots."""
    rng = np.random.default_rng(1)
    parts = []
    private = pool_slots // 4
    for m in load.kv_lens:
        if kind == "random":
            parts.append(rng.permutation(pool_slots)[:m])
            continue
        slots = np.arange(private, private + m)
        private += m
        if kind == "affix":
            shared = int(share * m)
            slots[:shared] = np.where(rng.random(shared) < replaced, slots[:shared], np.arange(shared))
        parts.append(slots)
    return torch.from_numpy(np.concatenate(parts))


def cpu_seconds(side: Side) -> float:
    """Of one run; processor time of this thread where torch uses no other."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    side()
    return clock() - start


def samples(
    sides: Sequence[Side], seconds: float, time_one: Callable[[Side], float] = cpu_seconds
) -> list[list[float]]:
    """Seconds of each side's runs: in turn, for about `seconds` in all, at least 5 rounds after one that warms up."""
    taken: list[list[float]] = [[] for _ in sides]
    for side in sides:
        side()
    began = time.perf_counter()
    while len(taken[0]) < 5 or time.perf_counter() - began < seconds:
        for side, times in zip(sides, taken, strict=True):
            times.append(time_one(side))
    return taken


def medians(sides: Sequence[Side], seconds: float) -> list[float]:
    """Median seconds of each side."""
    return [statistics.median(times) for times in samples(sides, seconds)]


def dense_side(
    load: Load, slots: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Callable[[], object]:
    """SDPA over gathered, contiguous [B, H, n, D] tensors: one call when all shapes are equal, else one each."""
    equal = len(set(load.qo_lens)) == len(set(load.kv_lens)) == 1
    batch = len(load.qo_lens) if equal else 1
    calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    row = key = 0
    for n, m in list(zip(load.qo_lens, load.kv_lens, strict=True))[:: batch if equal else 1]:
        rows, part = q[row : row + batch * n], slots[key : key + batch * m]
        row, key = row + batch * n, key + batch * m
        heads = (batch, -1, *q.shape[1:])
        packed = [x.view(heads).transpose(1, 2).contiguous() for x in (rows, k[part], v[part])]
        calls.append((packed[0], packed[1], packed[2]))
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: [attend(*call) for call in calls]


def attention_row(load: Load, kind: str, heads: int, dim: int, dtype: torch.dtype, seconds: float) -> str:
    slots = read_maps(load, kind)
    layout = RaggedLayout.build(load.qo_lens, load.kv_lens, slots)
    q = torch.randn(layout.num_queries, heads, dim).to(dtype)
    k, v = (torch.randn(POOL_SLOTS, heads, dim).to(dtype) for _ in range(2))
    kernel = get_attention_kernel("torch")

    def plan() -> object:
        return kernel.plan(layout, num_q_heads=heads, num_kv_heads=heads, head_dim=dim, dtype=dtype, device="cpu")

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


def choose_row(rows: int, vocab: int, kind: str, seconds: float) -> str:
    """Against softmax and argmax of the same logits, which is what greedy decoding with a confidence needs."""
    logits = torch.randn(rows, vocab) * 3
    sampled = kind != "greedy"
    arguments: dict[str, Any] = {
        "temperature": torch.full((rows,), float(sampled)),
        "top_k": torch.zeros(rows, dtype=torch.int32),
        "top_p": torch.full((rows,), 0.9 if kind == "top-p 0.9" else 1.0),
        "seed": torch.arange(rows),
        "forbidden": torch.tensor([vocab - 1]),
        "vocab_limit": vocab,
    }
    ours, plain = medians(
        [
            lambda: choose_tokens(logits, rule="low_confidence", impl="torch", **arguments),
            lambda: torch.softmax(logits, dim=-1).max(dim=-1),
        ],
        seconds,
    )
    cells = [f"{rows} x {vocab}", kind, f"{ours * 1e3:.2f}", f"{plain * 1e3:.2f}", f"{ours / plain:.2f}"]
    return "| " + " | ".join(cells) + " |"


def rebase_row(dtype: torch.dtype, seconds: float) -> str:
    """Against an indexed copy of the same keys and values."""
    layers, heads, dim, count = 8, 12, 64, 512
    k_pools, v_pools = ([torch.randn(4096, heads, dim).to(dtype) for _ in range(layers)] for _ in range(2))
    src, dst = torch.arange(count), torch.arange(count) + 2048
    inv_freq = 1.0 / 1e4 ** (torch.arange(0, dim, 2).float() / dim)

    def copy() -> None:
        for pool in (*k_pools, *v_pools):
            pool.index_copy_(0, dst, pool.index_select(0, src))

    ours, plain = medians(
        [lambda: rebase_kv(k_pools, v_pools, src, dst, 100, inv_freq=inv_freq, impl="torch"), copy], seconds
    )
    name = str(dtype).removeprefix("torch.")
    return f"| {name} | {ours * 1e3:.2f} | {plain * 1e3:.2f} | {ours / plain:.2f} |"


def importance_row(heads: int, dim: int, seconds: float) -> str:
    """Against the attention of the same probe, whose log-sum-exp it uses."""
    queries, keys = 64, 512
    layout = RaggedLayout.build([queries], [2 * keys], torch.arange(2 * keys))
    q = torch.randn(queries, heads, dim)
    k, v = (torch.randn(4096, heads, dim) for _ in range(2))
    kernel = get_attention_kernel("torch")
    plan = kernel.plan(layout, num_q_heads=heads, num_kv_heads=heads, head_dim=dim, dtype=q.dtype, device="cpu")
    scale = dim**-0.5
    _, lse = kernel.run(plan, q, k, v, scale=scale, return_lse=True)
    targets = ImportanceTargets.build(torch.arange(queries), [queries], torch.arange(keys), [keys])
    scores = torch.zeros(keys)
    ours, attention = medians(
        [
            lambda: accumulate_importance(scores, q, k, lse, targets, scale=scale, impl="torch"),
            lambda: kernel.run(plan, q, k, v, scale=scale, return_lse=True),
        ],
        seconds,
    )
    return f"| {heads} x {dim} | {ours * 1e3:.2f} | {attention * 1e3:.2f} | {ours / attention:.2f} |"


def row_operation_rows(rows: int, width: int, dtype: torch.dtype, seconds: float) -> list[str]:
    """Against the shortest plain torch for the same."""
    x, residual, gate_up = (torch.randn(rows, n).to(dtype) for n in (width, width, 2 * width))
    weight, heads = torch.ones(width).to(dtype), x.view(rows, -1, 64)
    positions, turn = torch.arange(rows), torch.arange(rows)[:, None] * torch.rand(32)
    angles = torch.cat([turn.cos(), turn.sin()], dim=-1)

    def plain_norm() -> object:
        total = x + residual
        return torch.nn.functional.rms_norm(total, (width,), weight, 1e-5), total

    def plain_silu() -> object:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def plain_rotate() -> object:
        cos, sin = angles[positions].to(dtype).unsqueeze(1).chunk(2, dim=-1)
        first, second = heads.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    operations: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "add + RMS norm": (lambda: add_rms_norm(x, residual, weight, 1e-5), plain_norm),
        "SiLU x up": (lambda: silu_mul(gate_up), plain_silu),
        "rotate": (lambda: rotate(heads, positions, angles), plain_rotate),
    }
    lines = []
    for name, sides in operations.items():
        ours, plain = medians(list(sides), seconds)
        times = [f"{ours * 1e6:.0f}", f"{plain * 1e6:.0f}", f"{ours / plain:.2f}"]
        lines.append("| " + " | ".join([name, f"{rows} x {width}", str(dtype).removeprefix("torch."), *times]) + " |")
    return lines


def linear_row(rows: int, dtype: torch.dtype, seconds: float) -> str:
    """A linear layer of packed weights against torch's own; eight layers in turn, so that weights come from memory."""
    weights = [torch.randn(2816, 512).to(dtype) for _ in range(8)]
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, None) for weight in weights]
    x = torch.randn(rows, 512).to(dtype)
    ours, plain = medians(
        [
            lambda: [torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "") for weight in packed],
            lambda: [torch.nn.functional.linear(x, weight) for weight in weights],
        ],
        seconds,
    )
    cells = [str(rows), str(dtype).removeprefix("torch."), f"{ours / 8 * 1e3:.2f}", f"{plain / 8 * 1e3:.2f}"]
    return "| " + " | ".join([*cells, f"{ours / plain:.2f}"]) + " |"


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
    print("\n| choose: rows x vocabulary | kind | ms | softmax + max ms | ratio |\n|---|---|---|---|---|")
    for rows, vocab in ((512, 600), (64, 126_464)):
        for kind in ("greedy", "sampled", "top-p 0.9"):
            print(choose_row(rows, vocab, kind, args.seconds), flush=True)
    print("\n| linear 512 to 2816: rows | dtype | ms | torch ms | ratio |\n|---|---|---|---|---|")
    for rows in (4, 32, 288, 1024):
        for dtype in (torch.float32, torch.bfloat16):
            print(linear_row(rows, dtype, args.seconds), flush=True)
    print("\n| row operation | rows x width | dtype | us | plain torch us | ratio |\n|---|---|---|---|---|---|")
    for rows in (32, 1024):
        for dtype in (torch.float32, torch.bfloat16):
            print("\n".join(row_operation_rows(rows, 512, dtype, args.seconds)), flush=True)
    print("\n| re-base 512 slots, 8 layers, 12 x 64 | ms | indexed copy ms | ratio |\n|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16):
        print(rebase_row(dtype, args.seconds), flush=True)
    print("\n| importance, 64 rows, 512 of 1024 keys | ms | attention ms | ratio |\n|---|---|---|---|")
    for heads, dim in ((4, 32), (12, 64)):
        print(importance_row(heads, dim, args.seconds), flush=True)


if __name__ == "__main__":
    main()
