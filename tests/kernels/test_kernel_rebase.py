"""Re-basing and storing KV in torch."""

import pytest
import torch
from acache_kernels import rebase_kv, store_kv
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_references import reference_rotation

FREQUENCIES = 1.0 / 5e5 ** (torch.arange(0, 32, 2).float() / 32)


def pools(layers: int, dtype: torch.dtype, head_dim: int = 32) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    both = torch.randn(2, layers, 40, 3, head_dim, generator=generator).to(dtype)
    return list(both[0]), list(both[1])


@settings(max_examples=30)
@given(
    st.integers(-100_000, 100_000),
    st.integers(1, 6),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([32, 40]),
)
def test_rotates_keys_copies_values_and_touches_nothing_else(
    delta: int, count: int, dtype: torch.dtype, head_dim: int
) -> None:
    k_pools, v_pools = pools(2, dtype, head_dim)
    before = [pool.clone() for pool in (*k_pools, *v_pools)]
    order = torch.randperm(40, generator=torch.Generator().manual_seed(delta + 100_000))
    src, dst = order[:count], order[count : 2 * count]
    rebase_kv(k_pools, v_pools, src, dst, delta, inv_freq=FREQUENCIES, impl="torch")
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    for layer, (k, v) in enumerate(zip(k_pools, v_pools, strict=True)):
        old_k, old_v = before[layer], before[2 + layer]
        expected = reference_rotation(old_k[src], torch.full((count,), delta), FREQUENCIES)
        torch.testing.assert_close(k[dst].double(), expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(v[dst], old_v[src])
        rest = torch.ones(40, dtype=torch.bool)
        rest[dst] = False
        assert torch.equal(k[rest], old_k[rest])
        assert torch.equal(v[rest], old_v[rest])


def test_rotating_by_a_distance_equals_encoding_at_the_new_position() -> None:
    (k,), (v,) = pools(1, torch.float32)
    raw = k[:8].clone()
    start, target = torch.arange(8), torch.arange(8) + 1017
    k[:8] = reference_rotation(raw, start, FREQUENCIES).float()
    rebase_kv([k], [v], torch.arange(8), torch.arange(8) + 20, target - start, inv_freq=FREQUENCIES)
    torch.testing.assert_close(k[20:28].double(), reference_rotation(raw, target, FREQUENCIES), rtol=1e-5, atol=1e-5)


def test_distances_may_differ_by_slot_and_zero_is_a_copy() -> None:
    (k,), (v,) = pools(1, torch.bfloat16)
    delta = torch.tensor([0, -3, 12])
    rebase_kv([k], [v], torch.arange(3), torch.arange(3) + 10, delta, inv_freq=FREQUENCIES)
    assert torch.equal(k[10], k[0])
    expected = reference_rotation(k[:3], delta, FREQUENCIES)
    torch.testing.assert_close(k[10:13].double(), expected, rtol=2e-2, atol=2e-2)


def test_nothing_to_do_and_bad_arguments() -> None:
    k, v = pools(1, torch.float32)
    none = torch.zeros(0, dtype=torch.int64)
    rebase_kv(k, v, none, none, 3, inv_freq=FREQUENCIES)
    one = torch.tensor([0])
    with pytest.raises(ValueError, match="destination"):
        rebase_kv(k, v, one, none, 3, inv_freq=FREQUENCIES)
    with pytest.raises(ValueError, match="value pools"):
        rebase_kv(k, [], one, one + 1, 3, inv_freq=FREQUENCIES)
    with pytest.raises(ValueError, match="frequencies"):
        rebase_kv(k, v, one, one + 1, 3, inv_freq=torch.ones(17))
    with pytest.raises(ValueError, match="delta"):
        rebase_kv(k, v, one, one + 1, torch.tensor([1, 2]), inv_freq=FREQUENCIES)


def test_store_writes_its_slots_only() -> None:
    (k,), (v,) = pools(1, torch.bfloat16)
    before = k.clone()
    fresh = torch.randn(2, 3, 32)
    store_kv(k, v, torch.tensor([5, 1]), fresh, 2 * fresh)
    assert torch.equal(k[[5, 1]], fresh.bfloat16())
    assert torch.equal(v[[5, 1]], (2 * fresh).bfloat16())
    assert torch.equal(k[6:], before[6:])
