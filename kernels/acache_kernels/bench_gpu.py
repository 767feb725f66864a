"""Times every kernel on this machine's GPU: `python -m acache_kernels.bench_gpu [--out FOLDER]`.

Not run on hardware so far; `--smoke` runs all of it on a CPU, in tiny sizes over the torch kernels, and its figures
mean nothing. Writes `report.md` and `report.json`. Without CUDA (and without `--smoke`) it ends with exit code 2.

    attention    against dense flash attention over the same keys, gathered outside the clock: equal reads
    importance   against the attention of the same probe
    choose       against softmax and argmax alone
    re-basing    against an indexed copy of the same slots, and against the bandwidth of one large copy

A time is the device's, between two CUDA events; before each run the L2 cache is overwritten and the device kept busy
until the host has launched all of it, so that neither a warm cache nor the host's speed is measured. All sides of a row
run in turn.
"""

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from acache_kernels import (
    AttentionKernel,
    ImportanceTargets,
    RaggedLayout,
    accumulate_importance,
    choose_tokens,
    get_attention_kernel,
    rebase_kv,
)
from acache_kernels.bench_cpu import Load, Side, cpu_seconds, dense_side, read_maps, samples
from acache_kernels.choose import rule_codes
from acache_kernels.static_plan import StaticCapacity

SHARE, ANCHORS = 0.75, 0.2
"""Of a request's keys that are shared, and of those that a block start recomputes."""
PARTS = ("attention", "importance", "choose", "rebase")


@dataclass(frozen=True)
class Sizes:
    """What is measured, and on what."""

    device: str
    dtype: torch.dtype
    impl: str  # of importance, choose and re-basing
    kernels: tuple[str, ...]
    heads: int = 32
    head_dim: int = 128
    batch: int = 16
    block: int = 32
    keys: tuple[int, ...] = (1024, 2048, 4096, 8192)
    vocab: int = 126_464
    rows: tuple[int, ...] = (64, 512)
    layers: int = 32
    slots: tuple[int, ...] = (512, 4096)


def smoke_sizes() -> Sizes:
    """On the torch kernels; in Triton's interpreter (TRITON_INTERPRET=1) on the Triton ones too."""
    kernels = ("triton", "torch") if os.environ.get("TRITON_INTERPRET") == "1" else ("torch",)
    small: dict[str, Any] = {"heads": 2, "head_dim": 32, "batch": 2, "block": 4, "keys": (32,), "vocab": 300}
    return Sizes("cpu", torch.float32, kernels[0], kernels, **small, rows=(4,), layers=2, slots=(16,))


@dataclass
class Bench:
    """Sizes, a clock and the rows measured so far."""

    sizes: Sizes
    seconds: float
    time_one: Callable[[Side], float]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def compare(self, part: str, case: str, sides: dict[str, Side], base: str) -> None:
        """Add a row for each side: its median, and the median of its ratios to `base`, round by round."""
        taken = dict(zip(sides, samples(list(sides.values()), self.seconds, self.time_one), strict=True))
        for name, times in taken.items():
            ratios = [one / other for one, other in zip(times, taken[base], strict=True)]
            row = {"part": part, "case": case, "side": name, "ms": statistics.median(times) * 1e3, "base": base}
            self.rows.append({**row, "ratio": statistics.median(ratios), "rounds": len(times)})
            print(markdown_row(self.rows[-1]), flush=True)


FEWEST_CYCLES, MOST_CYCLES = 1 << 21, 1 << 26
"""How long the device is kept busy before a run: from about a millisecond, twice as long until it is long enough."""


def cuda_clock() -> Callable[[Side], float]:
    """Device seconds of a run that finds a cold L2 cache and all its launches queued.

    A run that waits for the device by itself never is: it is timed with the host's part, which is said on stderr.
    """
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    flush = torch.empty(2 * properties.L2_cache_size, dtype=torch.uint8, device="cuda")
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def time_one(side: Side) -> float:
        cycles = FEWEST_CYCLES
        while True:
            flush.zero_()
            torch.cuda._sleep(cycles)
            begin.record()
            side()
            end.record()
            all_queued = not begin.query()  # the device is still kept busy
            end.synchronize()
            if not all_queued and cycles < MOST_CYCLES:
                cycles *= 2
                continue
            if not all_queued:
                print("not all launches were queued: a time of the next rows has the host's part", file=sys.stderr)
            return begin.elapsed_time(end) / 1e3

    return time_one


# ── attention ─────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class AttentionData:
    load: Load
    layout: RaggedLayout
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def make(cls, sizes: Sizes, queries: int, keys: int) -> "AttentionData":
        """Every request reads SHARE of its keys from the same slots, the rest from its own."""
        load = Load("", (queries,) * sizes.batch, (keys,) * sizes.batch)
        pool = 2 * sizes.batch * keys
        slots = read_maps(load, "affix", pool, SHARE, 0.0).to(sizes.device)
        shape = (sizes.heads, sizes.head_dim)
        q, k, v = (
            torch.randn(n, *shape, dtype=sizes.dtype, device=sizes.device)
            for n in (queries * sizes.batch, pool, pool)
        )
        return cls(load, RaggedLayout.build(load.qo_lens, load.kv_lens, slots), q, k, v)

    def heads(self) -> dict[str, Any]:
        count, dim = self.q.shape[1:]
        shape = {"num_q_heads": count, "num_kv_heads": count, "head_dim": dim}
        return {**shape, "dtype": self.q.dtype, "device": self.q.device}

    def runs(self, kernel: AttentionKernel, plan: Any, return_lse: bool = False) -> Side:
        scale = self.q.shape[2] ** -0.5
        return lambda: kernel.run(plan, self.q, self.k, self.v, scale=scale, return_lse=return_lse)


def attention(bench: Bench) -> None:
    sizes = bench.sizes
    for keys in sizes.keys:
        start = keys - int(SHARE * keys) + int(ANCHORS * SHARE * keys)  # rows of a block start
        for step, queries in (("in-block", sizes.block), ("block start", start)):
            data = AttentionData.make(sizes, queries, keys)
            sides: dict[str, Side] = {}
            for name in sizes.kernels:
                kernel = get_attention_kernel(name)
                sides[name] = data.runs(kernel, kernel.plan(data.layout, **data.heads()))
                if step == "in-block" and kernel.has_static_plans:
                    sides[f"{name}, static plan"] = data.runs(kernel, static_plan(kernel, data))
            sides |= dict(dense_sides(data))
            bench.compare("attention", f"{sizes.batch} x {queries} q, {keys} keys, {step}", sides, "dense SDPA")


def static_plan(kernel: AttentionKernel, data: AttentionData) -> Any:
    """What a CUDA graph would replay, with room for four times the keys: the cost of idle programs."""
    queries, keys = len(data.q), len(data.layout.kv_indices)
    capacity = StaticCapacity(data.layout.batch_size, queries, 4 * keys, int(data.layout.qo_lens.max()))
    (static,) = kernel.static_plans([capacity], **data.heads())
    static.update(data.layout)
    return static.plan


def dense_sides(data: AttentionData) -> Iterator[tuple[str, Side]]:
    """Flash attention over the same keys, gathered and contiguous: torch's, and FlashInfer's where it is installed."""
    run = dense_side(data.load, data.layout.kv_indices, data.q, data.k, data.v)
    if data.q.device.type != "cuda":
        yield "dense SDPA", run
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def flash() -> object:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return run()

    yield "dense SDPA", flash
    try:
        import flashinfer
    except ImportError:
        return
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=data.q.device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    heads, dim = data.q.shape[1:]
    pointers = (data.layout.qo_indptr, data.layout.kv_indptr)
    wrapper.plan(*pointers, heads, heads, dim, causal=False, q_data_type=data.q.dtype, kv_data_type=data.q.dtype)
    gathered = [pool[data.layout.kv_indices] for pool in (data.k, data.v)]
    yield "dense FlashInfer", lambda: wrapper.run(data.q, *gathered)


# ── the other operations ──────────────────────────────────────────────────


def importance(bench: Bench) -> None:
    """One probe a request: all its mask queries, about the shared part of its keys."""
    sizes = bench.sizes
    for keys in sizes.keys:
        data = AttentionData.make(sizes, sizes.block, keys)
        asked = int(SHARE * keys)
        case = f"{sizes.batch} x {sizes.block} q, {asked} of {keys} keys"
        bench.compare("importance", case, importance_sides(sizes, data, asked), "attention")


def importance_sides(sizes: Sizes, data: AttentionData, asked: int) -> dict[str, Side]:
    kernel = get_attention_kernel(sizes.kernels[0])
    plan = kernel.plan(data.layout, **data.heads())
    scale = sizes.head_dim**-0.5
    _, lse = kernel.run(plan, data.q, data.k, data.v, scale=scale, return_lse=True)
    targets = ImportanceTargets.build(
        torch.arange(len(data.q), device=sizes.device),
        [sizes.block] * sizes.batch,
        data.layout.kv_indices.view(sizes.batch, -1)[:, :asked].flatten(),
        [asked] * sizes.batch,
    )
    scores = torch.zeros(targets.num_keys, device=sizes.device)
    return {
        "importance": lambda: accumulate_importance(
            scores, data.q, data.k, lse, targets, scale=scale, impl=sizes.impl
        ),
        "attention": data.runs(kernel, plan, return_lse=True),
    }


def choose(bench: Bench) -> None:
    for count in bench.sizes.rows:
        logits = torch.randn(count, bench.sizes.vocab, device=bench.sizes.device) * 3
        sides = choose_sides(bench.sizes, logits)
        bench.compare("choose", f"{count} x {bench.sizes.vocab}", sides, "softmax + argmax")


def choose_sides(sizes: Sizes, logits: torch.Tensor) -> dict[str, Side]:
    count, device = len(logits), sizes.device
    arguments: dict[str, Any] = {
        "top_k": torch.zeros(count, dtype=torch.int32, device=device),
        "seed": torch.arange(count, device=device),
        "forbidden": torch.tensor([sizes.vocab - 1], device=device),
        "vocab_limit": sizes.vocab,
        "rule": rule_codes(["low_confidence"], device).expand(count),  # a name would be copied to the device, waiting
        "impl": sizes.impl,
    }

    def chooser(temperature: float, top_p: float) -> Side:
        rows = {"temperature": temperature, "top_p": top_p}
        drawn: dict[str, Any] = {name: torch.full((count,), value, device=device) for name, value in rows.items()}
        return lambda: choose_tokens(logits, **drawn, **arguments)

    return {
        "greedy": chooser(0.0, 1.0),
        "sampled": chooser(1.0, 1.0),
        "top-p 0.9": chooser(1.0, 0.9),
        "softmax + argmax": lambda: torch.softmax(logits, dim=-1).max(dim=-1),
    }


def rebase(bench: Bench) -> None:
    sizes = bench.sizes
    for count in sizes.slots:
        values = count * sizes.heads * sizes.head_dim * 2 * sizes.layers
        megabytes = values * sizes.dtype.itemsize / 1e6
        case = f"{count} slots, {sizes.layers} layers, {megabytes:.4g} MB read and written"
        bench.compare("rebase", case, rebase_sides(sizes, count), "one copy")


def rebase_sides(sizes: Sizes, count: int) -> dict[str, Side]:
    shape = (2 * count, sizes.heads, sizes.head_dim)
    pools = [torch.randn(shape, dtype=sizes.dtype, device=sizes.device) for _ in range(2 * sizes.layers)]
    keys, values = pools[: sizes.layers], pools[sizes.layers :]
    src = torch.arange(count, device=sizes.device)
    dst = src + count
    half = torch.arange(0, sizes.head_dim, 2, device=sizes.device).float()
    inv_freq = 1.0 / 1e4 ** (half / sizes.head_dim)
    flat = torch.cat([pool[:count].flatten() for pool in pools])
    into = torch.empty_like(flat)
    return {
        "re-base": lambda: rebase_kv(keys, values, src, dst, 100, inv_freq=inv_freq, impl=sizes.impl),
        "indexed copy": lambda: [pool.index_copy_(0, dst, pool.index_select(0, src)) for pool in pools],
        "one copy": lambda: into.copy_(flat),
    }


# ── report ────────────────────────────────────────────────────────────────

COLUMNS = ("part", "case", "side", "ms", "ratio", "base")


def markdown_row(row: dict[str, Any]) -> str:
    cells = [f"{row[name]:.4g}" if isinstance(row[name], float) else str(row[name]) for name in COLUMNS]
    return "| " + " | ".join(cells) + " |"


def markdown_head() -> str:
    return "| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS)


def conditions(sizes: Sizes) -> dict[str, Any]:
    """The device and the versions that the figures belong to."""
    import triton

    found: dict[str, Any] = {"torch": torch.__version__, "triton": triton.__version__, "host": platform.machine()}
    if sizes.device == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found |= {"gpu": properties.name, "capability": f"{properties.major}.{properties.minor}"}
    try:
        import flashinfer

        found["flashinfer"] = flashinfer.__version__
    except ImportError:
        found["flashinfer"] = None
    return {**found, "sizes": {**asdict(sizes), "dtype": str(sizes.dtype)}}


def write(folder: Path, bench: Bench, smoke: bool) -> None:
    where = conditions(bench.sizes)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps({"smoke": smoke, **where, "rows": bench.rows}, indent=1))
    title = "Kernels on the CPU: a smoke run, its figures mean nothing" if smoke else f"Kernels on {where['gpu']}"
    versions = ", ".join(f"{name} {where[name]}" for name in ("torch", "triton", "flashinfer"))
    lines = [f"# {title}", "", versions, "", markdown_head(), *map(markdown_row, bench.rows), ""]
    (folder / "report.md").write_text("\n".join(lines))
    print(f"\nwritten: {folder / 'report.md'} and report.json")


def installed_kernels() -> tuple[str, ...]:
    try:
        import flashinfer  # noqa: F401
    except ImportError:
        return ("triton",)
    return ("triton", "flashinfer")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m acache_kernels.bench_gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/kernels-gpu"), help="folder (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="measuring time of a comparison")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU: does the script run?")
    options = parser.parse_args(argv)
    if options.smoke:
        bench = Bench(smoke_sizes(), 0.0, cpu_seconds)
    elif torch.cuda.is_available():
        sizes = Sizes("cuda", torch.bfloat16, "triton", installed_kernels())
        bench = Bench(sizes, options.seconds, cuda_clock())
    else:
        print("error: no CUDA device here; --smoke runs this script in tiny sizes on the CPU", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    print(markdown_head())
    for part in options.parts:
        {"attention": attention, "importance": importance, "choose": choose, "rebase": rebase}[part](bench)
    write(options.out, bench, options.smoke)
    return 0


if __name__ == "__main__":
    sys.exit(main())
