"""Row operations: the C++ ones and plain torch against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from acache_kernels import rows, store_kv
from acache_kernels.torch_ops import native_library, native_rows
from hypothesis import given, settings
from hypothesis import strategies as st

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 2e-3}
DTYPES = tuple(TOLERANCE)


@pytest.fixture(params=["native", "plain"], autouse=True, scope="module")
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test runs through both; float16 is plain torch's in either."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "plain":
            patch.setattr(native_rows, "load_library", lambda name: None)
        elif native_library.load_library("cpu_rows") is None:
            pytest.skip("no C++ compiler")
        yield request.param


def draw(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype in TOLERANCE
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


SHAPES = {"rows": st.integers(0, 40), "width": st.integers(1, 150), "dtype": st.sampled_from(DTYPES)}


@settings(max_examples=60, deadline=None)
@given(**SHAPES, with_residual=st.booleans(), seed=st.integers(0, 9))
def test_add_rms_norm(rows: int, width: int, dtype: torch.dtype, with_residual: bool, seed: int) -> None:
    from acache_kernels.rows import add_rms_norm

    x, weight = draw(rows, width, dtype=dtype, seed=seed), draw(width, dtype=dtype, seed=seed + 1)
    residual = draw(rows, width, dtype=dtype, seed=seed + 2) if with_residual else None
    before = x.clone()
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    wide = x.double() + (0 if residual is None else residual.double())
    close(total, wide)
    close(normed, wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.double())
    assert torch.equal(x, before)


@settings(max_examples=60, deadline=None)
@given(**SHAPES, seed=st.integers(0, 9), scale=st.sampled_from([1.0, 30.0, 1000.0]))
def test_silu_mul(rows: int, width: int, dtype: torch.dtype, seed: int, scale: float) -> None:
    from acache_kernels.rows import silu_mul

    gate, up = draw(rows, width, dtype=dtype, seed=seed) * scale, draw(rows, width, dtype=dtype, seed=seed + 1)
    expected = gate.double() * torch.sigmoid(gate.double()) * up.double()
    close(silu_mul(torch.cat([gate, up], dim=-1)), expected)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 40),
    heads=st.integers(1, 5),
    half=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 9),
)
def test_rotate_in_place_within_wider_rows(rows: int, heads: int, half: int, dtype: torch.dtype, seed: int) -> None:
    from acache_kernels.rows import rotate

    width = heads * 2 * half
    wide = draw(rows, width + 7, dtype=dtype, seed=seed)
    before = wide.clone()
    positions = torch.randint(0, 50, (rows,), generator=torch.Generator().manual_seed(seed))
    turn = torch.arange(50, dtype=torch.float64)[:, None] * torch.rand(half, dtype=torch.float64)
    angles = torch.cat([turn.cos(), turn.sin()], dim=-1)
    rotate(wide[:, :width].view(rows, heads, 2 * half), positions, angles.float())
    pairs = torch.complex(*before[:, :width].double().view(rows, heads, 2, half).unbind(2))
    turned = pairs * torch.polar(torch.ones(rows, 1, half, dtype=torch.float64), turn[positions].unsqueeze(1))
    close(wide[:, :width], torch.stack([turned.real, turned.imag], dim=2).flatten(1))
    assert torch.equal(wide[:, width:], before[:, width:])


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(0, 30), heads=st.integers(1, 4), dim=st.integers(1, 40), dtype=st.sampled_from(DTYPES))
def test_store_writes_its_slots_alone(rows: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    pools = [torch.full((64, heads, dim), float("nan"), dtype=dtype) for _ in range(2)]
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(rows))[:rows]
    wide = draw(rows, 2, heads, dim, dtype=dtype, seed=dim)  # keys and values side by side: rows are strided
    store_kv(*pools, slots, wide[:, 0], wide[:, 1])
    for pool, part in zip(pools, wide.unbind(1), strict=True):
        assert torch.equal(pool[slots], part)
        untouched = torch.ones(64, dtype=torch.bool)
        untouched[slots] = False
        assert pool[untouched].isnan().all()


@pytest.mark.parametrize("rows_count", [1, 7])
def test_a_row_is_the_same_in_any_batch(rows_count: int) -> None:
    """Among others on two threads, or with few on one."""
    x, weight = draw(300, 256, dtype=torch.float32, seed=1), draw(256, dtype=torch.float32, seed=2)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        whole, _ = rows.add_rms_norm(x, x, weight, 1e-6)
        products = rows.silu_mul(x)
        torch.set_num_threads(1)
        part, _ = rows.add_rms_norm(x[:rows_count], x[:rows_count], weight, 1e-6)
        assert torch.equal(whole[:rows_count], part)
        assert torch.equal(products[:rows_count], rows.silu_mul(x[:rows_count]))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 40, 1500])
def test_strided_inputs(count: int) -> None:
    """Columns of a wider tensor, transposed ones, repeated ones: what they hold counts, not how they lie."""
    wide = draw(count, 512, dtype=torch.float32, seed=3)
    x, residual, weight = wide[:, ::2], draw(256, count, dtype=torch.float32, seed=4).T, torch.ones(1).expand(256)
    normed, total = rows.add_rms_norm(x, residual, weight, 1e-6)
    plain = rows.add_rms_norm(x.contiguous(), residual.contiguous(), weight.contiguous(), 1e-6)
    torch.testing.assert_close(normed, plain[0])
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(rows.silu_mul(x), rows.silu_mul(x.contiguous()))
    heads = draw(count, 64, 4, dtype=torch.float32, seed=5).transpose(1, 2)
    same, positions, angles = heads.contiguous(), torch.arange(count).flip(0), torch.randn(count, 64)
    rows.rotate(heads, positions, angles)
    rows.rotate(same, positions, angles)
    torch.testing.assert_close(heads, same)
    pool = torch.zeros(2 * count, 64, 4)
    store_kv(pool, pool.clone(), torch.arange(2 * count)[::2], heads.transpose(1, 2), heads.transpose(1, 2))
    assert torch.equal(pool[::2], heads.transpose(1, 2))
    assert not pool[1::2].any()


@pytest.mark.parametrize("number", [-1, 10, 1 << 40])
def test_numbers_outside_are_refused(number: int, implementation: str) -> None:
    """The C++ ones look before they write."""
    pool, x = torch.zeros(10, 2, 4), torch.ones(3, 2, 4)
    numbers = torch.tensor([0, number, 1])
    with pytest.raises((IndexError, RuntimeError)):
        store_kv(pool, pool, numbers, x, x)
    with pytest.raises((IndexError, RuntimeError)):
        rows.rotate(x, torch.tensor([0, 10, 1]), torch.zeros(10, 4))
    assert implementation == "plain" or (not pool.any() and bool((x == 1).all()))


@pytest.mark.parametrize(
    "call",
    [
        lambda: rows.add_rms_norm(torch.ones(2, 3, 4), None, torch.ones(4), 1e-6),
        lambda: rows.add_rms_norm(torch.ones(2, 4), torch.ones(3, 4), torch.ones(4), 1e-6),
        lambda: rows.add_rms_norm(torch.ones(2, 4), None, torch.ones(5), 1e-6),
        lambda: rows.silu_mul(torch.ones(2, 5)),
        lambda: rows.rotate(torch.ones(2, 1, 4), torch.zeros(2, dtype=torch.int32), torch.ones(9, 4)),
        lambda: rows.rotate(torch.ones(2, 1, 4), torch.zeros(3, dtype=torch.int64), torch.ones(9, 4)),
        lambda: rows.rotate(torch.ones(2, 1, 4), torch.zeros(2, dtype=torch.int64), torch.ones(9, 6)),
        lambda: store_kv(*[torch.ones(9, 1, 4)] * 2, torch.zeros(2, dtype=torch.int32), *[torch.ones(2, 1, 4)] * 2),
        lambda: store_kv(*[torch.ones(9, 1, 4)] * 2, torch.zeros(2, dtype=torch.int64), *[torch.ones(3, 1, 4)] * 2),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"must be|do not fit|cannot take"):
        call()
