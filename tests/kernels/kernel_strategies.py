"""Hypothesis strategies for kernel cases; `largest` bounds their size."""

import torch
from acache_kernels.choose import RULES
from hypothesis import strategies as st
from kernel_references import (
    AttentionCase,
    ChooseCase,
    ImportanceCase,
    attention_case,
    importance_case,
)

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SEEDS = st.integers(0, 2**31)


@st.composite
def head_shapes(draw: st.DrawFn, dims: tuple[int, ...] = (32, 48, 64, 80, 128)) -> tuple[int, int, int]:
    kv_heads = draw(st.integers(1, 3))
    return kv_heads * draw(st.integers(1, 4)), kv_heads, draw(st.sampled_from(dims))


@st.composite
def attention_cases(draw: st.DrawFn, largest: int, dims: tuple[int, ...] = (32, 80)) -> AttentionCase:
    """Requests without queries, with one key, of equal and of different shapes."""
    sizes = st.one_of(st.integers(1, 4), st.integers(1, largest))
    asking = st.tuples(sizes, sizes)
    idle = st.tuples(st.just(0), st.integers(0, 5))
    shapes = draw(st.lists(st.one_of(asking, asking, idle, st.just((3, 17))), max_size=6))
    return attention_case(
        shapes,
        draw(head_shapes(dims)),
        draw(DTYPES),
        draw(st.sampled_from(["permuted", "repeated", "run"])),
        draw(SEEDS),
        draw(st.sampled_from([torch.int32, torch.int64])),
    )


@st.composite
def importance_cases(draw: st.DrawFn, largest: int, dims: tuple[int, ...] = (32, 80)) -> ImportanceCase:
    probes = draw(st.lists(st.tuples(st.integers(0, largest), st.integers(0, largest)), max_size=4))
    return importance_case(probes, draw(head_shapes(dims)), draw(DTYPES), draw(SEEDS))


@st.composite
def choose_cases(draw: st.DrawFn, most_rows: int, most_ids: int) -> ChooseCase:
    """Mixed rows; quantised logits make ties common."""
    rows, vocab = draw(st.integers(1, most_rows)), draw(st.integers(3, most_ids))
    limit = draw(st.integers(3, vocab))
    generator = torch.Generator().manual_seed(draw(SEEDS))
    logits = torch.randn(rows, vocab, generator=generator) * draw(st.sampled_from([0.1, 3.0, 30.0]))
    if draw(st.booleans()):
        logits = logits.round()

    def column(values: st.SearchStrategy) -> list:
        return draw(st.lists(values, min_size=rows, max_size=rows))

    return ChooseCase(
        logits.to(draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16]))),
        column(st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.5])),
        column(st.sampled_from([0, -1, 1, 2, 5, 10_000])),
        column(st.sampled_from([1.0, 1.0, 0.0, 0.3, 0.85])),
        column(st.integers(-(2**63), 2**63 - 1)),
        column(st.sampled_from(RULES)),
        draw(st.lists(st.integers(0, vocab + 3), max_size=2, unique=True)),
        limit,
    )
