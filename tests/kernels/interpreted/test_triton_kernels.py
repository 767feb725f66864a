"""Every Triton kernel against float64, and against torch where results must agree between implementations."""

import numpy as np
import pytest
import torch
from acache_kernels import RaggedLayout, get_attention_kernel, rebase_kv
from acache_kernels.importance import MODES
from acache_kernels.triton_ops import attention as triton_attention
from acache_kernels.triton_ops import choose as triton_choose
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_references import (
    AttentionCase,
    ChooseCase,
    ImportanceCase,
    attention_case,
    check_attention,
    check_choice,
    check_importance,
    reference_rotation,
)
from kernel_strategies import attention_cases, choose_cases, importance_cases

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy: -inf - -inf in masked lanes


@settings(max_examples=20)
@given(attention_cases(largest=40, dims=(32, 48, 80)))
def test_attention_equals_the_reference(case: AttentionCase) -> None:
    check_attention(case, "triton")


@pytest.mark.parametrize("head_dim", [96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_large_heads(head_dim: int, dtype: torch.dtype) -> None:
    check_attention(attention_case([(3, 40), (40, 9)], (2, 1, head_dim), dtype), "triton")


@pytest.mark.parametrize("heads", [(1, 1, 32), (7, 1, 32)])
def test_attention_with_split_keys(heads: tuple[int, int, int]) -> None:
    """Few queries over long keys: ranges, one short, one exactly full; beside a request of many tiles."""
    shapes = [(3, 1030), (0, 9), (2, 1024), (70, 40), (1, 513)]
    case = attention_case(shapes, heads, torch.bfloat16)
    plan = triton_attention.TritonAttention().plan(case.layout, **case.heads)
    assert sum(launch.num_parts for launch in plan.launches) > 3
    check_attention(case, "triton")


def test_attention_gives_the_same_bits_alone_and_in_any_batch() -> None:
    shapes = [(3, 600), (40, 20), (3, 9)]
    case = attention_case(shapes, (2, 1, 32), torch.bfloat16)
    out, _ = case.run("triton")
    row = key = 0
    for n, m in shapes:
        layout = RaggedLayout.build([n], [m], case.layout.kv_indices[key : key + m])
        alone = AttentionCase(layout, case.q[row : row + n], case.k_pool, case.v_pool, case.scale)
        assert torch.equal(alone.run("triton")[0], out[row : row + n])
        row, key = row + n, key + m


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 3000)), max_size=8),
    st.sampled_from([1, 4, 7]),
    st.sampled_from([64, 128]),
)
def test_work_lists_cover_every_row_and_key_once(shapes: list[tuple[int, int]], group: int, dim: int) -> None:
    """Without running a kernel: each (packed row, key) pair of each request is in one work item."""
    slots = torch.zeros(sum(m for _, m in shapes), dtype=torch.int64)
    layout = RaggedLayout.build([n for n, _ in shapes], [m for _, m in shapes], slots)
    plan = triton_attention.TritonAttention().plan(
        layout, num_q_heads=group, num_kv_heads=1, head_dim=dim, dtype=torch.bfloat16, device="cpu"
    )
    first_query = np.concatenate(([0], np.cumsum(layout.qo_lens)))
    pairs = np.zeros(len(shapes), dtype=np.int64)
    for launch in plan.launches:
        parts = [part for *_, first, count in launch.merges.tolist() for part in range(first, first + count)]
        assert sorted(parts) == list(range(launch.num_parts))
        written = []
        for query, rows, tile, key, keys, part in launch.work.tolist():
            owner = int(np.searchsorted(first_query, query, side="right")) - 1
            pairs[owner] += min(launch.shape.block_m, rows - tile) * keys
            assert key >= layout.kv_indptr[owner]
            assert key + keys <= layout.kv_indptr[owner + 1]
            written += [part] if part >= 0 else []
        assert sorted(written) == sorted(parts)
    assert pairs.tolist() == [n * group * m for n, m in shapes]


def test_attention_refuses_what_it_cannot_serve() -> None:
    layout = RaggedLayout.build([1], [1], torch.tensor([0]))
    kernel = get_attention_kernel("triton")
    for dim, dtype in ((257, torch.float32), (64, torch.float64)):
        with pytest.raises(ValueError, match="attention kernel 'triton'"):
            kernel.plan(layout, num_q_heads=1, num_kv_heads=1, head_dim=dim, dtype=dtype, device="cpu")


@settings(max_examples=12)
@given(importance_cases(largest=70), st.sampled_from(MODES))
def test_importance_equals_the_reference(case: ImportanceCase, mode: str) -> None:
    check_importance(case, mode, "triton")


@settings(max_examples=12)
@given(
    st.integers(-100_000, 100_000),
    st.integers(1, 5),
    st.sampled_from([(32, 16), (40, 16), (48, 24)]),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_rebase_equals_the_reference(delta: int, heads: int, dims: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(delta + 100_000)
    k, v = torch.randn(2, 3, 12, heads, dims[0], generator=generator).to(dtype)
    old_k, old_v = k.clone(), v.clone()
    inv_freq = 1.0 / 1e4 ** torch.linspace(0, 1, dims[1])
    src, dst = torch.tensor([7, 0, 3]), torch.tensor([1, 11, 5])
    deltas = torch.tensor([delta, 0, -delta])
    rebase_kv(list(k), list(v), src, dst, deltas, inv_freq=inv_freq, impl="triton")
    tolerance = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for layer in range(3):
        expected = reference_rotation(old_k[layer, src], deltas, inv_freq)
        torch.testing.assert_close(k[layer, dst].double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(v[:, dst], old_v[:, src])
    untouched = [i for i in range(12) if i not in dst.tolist()]
    assert torch.equal(k[:, untouched], old_k[:, untouched])
    assert torch.equal(v[:, untouched], old_v[:, untouched])


@settings(max_examples=10)
@given(choose_cases(most_rows=4, most_ids=40), st.booleans())
def test_choice_equals_the_reference_and_torch(case: ChooseCase, many_chunks: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if many_chunks:
            patch.setattr(triton_choose, "BLOCK", 8)
            patch.setattr(triton_choose, "CHUNK", 16)
        check_choice(case, "triton")
        mine, theirs = case.run("triton"), case.run("torch")
    assert torch.equal(mine.token, theirs.token)
    torch.testing.assert_close(mine.logprob, theirs.logprob, rtol=1e-4, atol=1e-5)
