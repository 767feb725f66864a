"""The torch attention kernel and the interface all attention kernels share."""

from collections.abc import Iterator

import pytest
import torch
from acache_kernels import (
    AttentionKernel,
    RaggedLayout,
    attention_kernel_names,
    default_attention_kernel,
    get_attention_kernel,
)
from acache_kernels.torch_ops import attention as torch_attention
from acache_kernels.torch_ops.native import HEAD_DIMS, load_native
from acache_kernels.torch_ops.native_library import load_library
from hypothesis import HealthCheck, given, settings
from kernel_references import AttentionCase, attention_case, check_attention, reference_attention
from kernel_strategies import attention_cases


@pytest.fixture(params=["native", "plain"])
def kernel(request: pytest.FixtureRequest) -> AttentionKernel:
    """The torch kernel with and without its C++ part."""
    if request.param == "native" and load_native() is None:
        pytest.skip("no C++ compiler")
    return torch_attention.TorchAttention(native=request.param == "native")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(attention_cases(largest=150, dims=(32, 48, 80, 128)))
def test_equals_the_float64_reference(kernel: AttentionKernel, case: AttentionCase) -> None:
    check_attention(case, kernel)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_head_size_of_the_native_kernel(head_dim: int, dtype: torch.dtype) -> None:
    """1 to 8, 9 to 16 and 17 to 32 packed rows take different vectors; 48 keys are a block."""
    shapes = [(1, 48), (3, 49), (4, 1), (8, 96), (9, 47), (33, 200), (16, 5)]
    check_attention(attention_case(shapes, (4, 2, head_dim), dtype), "torch")


def test_threads_do_not_change_the_bits(kernel: AttentionKernel) -> None:
    case = attention_case([(5, 300), (40, 200), (530, 90)], (4, 2, 64))
    out, _ = case.run(kernel)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(case.run(kernel)[0], out)
    finally:
        torch.set_num_threads(before)


def test_scores_far_apart_and_rows_that_see_one_key(kernel: AttentionKernel) -> None:
    case = attention_case([(6, 120), (2, 1)], (2, 2, 32))
    case.q *= 100
    out, lse = case.run(kernel)
    expected, expected_lse = reference_attention(case)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
    assert lse is not None
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-3)


def test_without_a_compiler_plain_torch_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    load_library.cache_clear()
    try:
        check_attention(attention_case([(3, 40)], (2, 1, 32)), "torch")
        assert "no C++ compiler" in caplog.text
    finally:
        load_library.cache_clear()


def test_the_native_kernel_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACACHE_KERNELS_NATIVE", "0")
    load_library.cache_clear()
    try:
        assert load_native() is None
    finally:
        load_library.cache_clear()


def test_the_literal_formula_of_other_devices_equals_the_cpu_path() -> None:
    q, k, v = torch.randn(2, 6, 5, 16), torch.randn(2, 3, 9, 16), torch.randn(2, 3, 9, 16)
    out, lse = torch_attention._attend_literally(q, k, v, 0.2)
    expected, expected_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=0.2)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize("shapes", [[], [(0, 0)], [(0, 4), (0, 0)]])
def test_steps_without_queries_give_empty_results(shapes: list[tuple[int, int]]) -> None:
    out, lse = attention_case(shapes, (4, 2, 32)).run("torch")
    assert out.shape == (0, 4, 32)
    assert lse is not None
    assert lse.shape == (0, 4)


def test_lse_only_on_request() -> None:
    out, lse = attention_case([(3, 7)], (4, 2, 32)).run("torch", return_lse=False)
    assert out.shape == (3, 4, 32)
    assert lse is None


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("slots", ["permuted", "run"])
def test_a_request_gives_the_same_alone_and_in_any_batch(kernel: AttentionKernel, slots: str, threads: int) -> None:
    """The same bits; plain torch on several threads only to rounding, since it splits a lone request differently."""
    exact = threads == 1 or kernel._native is not None  # type: ignore[attr-defined]
    tolerance = 0.0 if exact else 1e-5
    shapes = [(5, 700), (3, 9), (5, 700), (530, 700), (5, 12), (3, 9)]
    case = attention_case(shapes, (4, 4, 64), slots=slots)
    out, lse = case.run(kernel)
    assert lse is not None
    row = key = 0
    for n, m in shapes:
        maps = case.layout.kv_indices[key : key + m]
        alone = AttentionCase(
            RaggedLayout.build([n], [m], maps), case.q[row : row + n], case.k_pool, case.v_pool, case.scale
        )
        alone_out, alone_lse = alone.run(kernel)
        torch.testing.assert_close(alone_out, out[row : row + n], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(alone_lse, lse[row : row + n], rtol=tolerance, atol=tolerance)
        row, key = row + n, key + m


def test_slot_numbers_do_not_change_the_bits(kernel: AttentionKernel) -> None:
    shapes = [(5, 300), (530, 40), (9, 40)]
    scattered = attention_case(shapes, (4, 2, 64), slots="permuted")
    slots = scattered.layout.kv_indices
    k_pool, v_pool = (torch.zeros_like(pool) for pool in (scattered.k_pool, scattered.v_pool))
    k_pool[: len(slots)], v_pool[: len(slots)] = scattered.k_pool[slots], scattered.v_pool[slots]
    layout = RaggedLayout.build([n for n, _ in shapes], [m for _, m in shapes], torch.arange(len(slots)))
    packed = AttentionCase(layout, scattered.q, k_pool, v_pool, scattered.scale)
    assert torch.equal(scattered.run(kernel)[0], packed.run(kernel)[0])


def test_one_plan_serves_every_layer() -> None:
    case = attention_case([(4, 30), (4, 30), (1, 5)], (4, 2, 32))
    kernel = get_attention_kernel("torch")
    plan = kernel.plan(case.layout, **case.heads)
    first = [kernel.run(plan, case.q, x, case.v_pool, scale=0.2, return_lse=False)[0] for x in 2 * [case.k_pool]]
    assert torch.equal(*first)
    other, _ = kernel.run(plan, case.q, 2 * case.k_pool, case.v_pool, scale=0.1, return_lse=False)
    torch.testing.assert_close(other, first[0])


def test_strided_pools_are_read_in_place(kernel: AttentionKernel) -> None:
    case = attention_case([(6, 40), (2, 300)], (4, 4, 32))
    fused = torch.cat((case.k_pool, case.v_pool), dim=-1)
    views = AttentionCase(case.layout, case.q, fused[..., :32], fused[..., 32:], case.scale)
    torch.testing.assert_close(views.run(kernel)[0], case.run(kernel)[0])


def test_queries_without_keys_are_refused_at_plan_time() -> None:
    case = attention_case([(2, 3), (1, 0)], (4, 2, 32))
    with pytest.raises(ValueError, match=r"requests \[1\] have queries but no keys"):
        case.run("torch")


def test_heads_that_do_not_divide_are_refused() -> None:
    layout = RaggedLayout.build([1], [1], torch.tensor([0]))
    with pytest.raises(ValueError, match="cannot share"):
        get_attention_kernel("torch").plan(
            layout, num_q_heads=5, num_kv_heads=2, head_dim=32, dtype=torch.float32, device="cpu"
        )


def test_tensors_that_do_not_fit_the_plan_are_refused() -> None:
    case = attention_case([(2, 3)], (4, 2, 32))
    kernel = get_attention_kernel("torch")
    plan = kernel.plan(case.layout, **case.heads)
    for q, k in ((case.q[:1], case.k_pool), (case.q, case.k_pool[:, :1]), (case.q.half(), case.k_pool)):
        with pytest.raises(ValueError, match=r"planned|but q is"):
            kernel.run(plan, q, k, case.v_pool, scale=1.0, return_lse=False)


def test_unknown_kernel_names_the_valid_ones() -> None:
    with pytest.raises(ValueError, match="valid names: torch, triton, flashinfer"):
        get_attention_kernel("tensorrt")
    assert attention_kernel_names() == ("torch", "triton", "flashinfer")
    assert default_attention_kernel("cpu") == "torch"
    assert default_attention_kernel("cuda:1") == "triton"


def test_layouts_whose_parts_disagree_are_refused() -> None:
    with pytest.raises(ValueError, match="kv_indices has shape"):
        RaggedLayout.build([1], [3], torch.tensor([0]))
    with pytest.raises(ValueError, match="negative"):
        RaggedLayout.build([-1], [1], torch.tensor([0]))
    with pytest.raises(ValueError, match="query lengths"):
        RaggedLayout.build([1, 1], [1], torch.tensor([0]))
    with pytest.raises(ValueError, match="int32 or int64"):
        RaggedLayout.build([1], [1], torch.tensor([0.0]))
