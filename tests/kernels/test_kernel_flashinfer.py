"""FlashInfer's kernel against a recording fake that follows FlashInfer's documented contract. Not run on hardware.

Documented (flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper): NHD pages [pages, page_size, heads, dim], index
pointers int32, page indices int32, 1 <= last page length <= page_size, plan once for many runs, log-sum-exp base 2.
In CUDA-graph mode: the number of requests is that of the buffers for good, rows are at most those of the first plan,
and a run reads the buffers that were given, which `plan` fills.
"""

import inspect
import math
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from acache_kernels import RaggedLayout, get_attention_kernel
from acache_kernels.flashinfer_ops.attention import Planner
from acache_kernels.static_plan import StaticCapacity
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_references import AttentionCase, attention_case, padded, reference_attention


class FakeWrapper:
    """Checks every call and computes what FlashInfer would, from the arrays it was planned with."""

    made: int = 0
    plans: int = 0

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        *,
        backend: str = "auto",
    ):
        type(self).made += 1
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"
        self.planned: dict[str, Any] = {}
        self.most_rows: int | None = None
        buffers = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        self.buffers: list[torch.Tensor] = [buffer for buffer in buffers if buffer is not None]
        assert len(self.buffers) == (4 if use_cuda_graph else 0)
        if use_cuda_graph:
            assert all(buffer.dtype == torch.int32 for buffer in self.buffers)
            assert len(self.buffers[0]) == len(self.buffers[1]) == len(self.buffers[3]) + 1

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        assert float_workspace_buffer.dtype == int_workspace_buffer.dtype == torch.uint8

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        type(self).plans += 1
        batch = len(qo_indptr) - 1
        for indptr in (qo_indptr, paged_kv_indptr):
            assert indptr.dtype == torch.int32
            assert indptr.device.type == "cpu"
            assert indptr.shape == (batch + 1,)
            assert bool((indptr.diff() >= (0 if self.buffers else 1)).all()), "a request without queries or pages"
        assert paged_kv_indices.dtype == torch.int32
        assert len(paged_kv_indices) == int(paged_kv_indptr[-1])
        assert paged_kv_last_page_len.tolist() == [1] * batch
        assert page_size == 1
        assert not causal
        assert q_data_type == kv_data_type
        if self.buffers:
            self._fill(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self.planned = {
            "qo": qo_indptr.diff().tolist(),
            "kv": paged_kv_indptr.diff().tolist(),
            "indices": paged_kv_indices.long(),
            "heads": (num_qo_heads, num_kv_heads, head_dim_qk),
            "scale": sm_scale,
        }

    def _fill(self, *arrays: torch.Tensor) -> None:
        rows = int(arrays[0][-1])
        self.most_rows = self.most_rows or rows
        assert rows <= self.most_rows
        assert len(arrays[0]) == len(self.buffers[0])
        assert len(arrays[2]) <= len(self.buffers[2])
        for buffer, array in zip(self.buffers, arrays, strict=True):
            buffer[: len(array)].copy_(array)

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, return_lse: bool = False
    ) -> Any:
        k, v = paged_kv_cache
        if self.buffers:
            qo, kv, indices, _ = self.buffers
            self.planned |= {"qo": qo.diff().tolist(), "kv": kv.diff().tolist(), "indices": indices[: kv[-1]].long()}
        num_q_heads, num_kv_heads, head_dim = self.planned["heads"]
        assert q.shape == (sum(self.planned["qo"]), num_q_heads, head_dim)
        assert k.shape == v.shape == (len(k), 1, num_kv_heads, head_dim)
        layout = RaggedLayout.build(self.planned["qo"], self.planned["kv"], self.planned["indices"])
        out, lse = reference_attention(AttentionCase(layout, q, k[:, 0], v[:, 0], self.planned["scale"]))
        return (out.to(q.dtype), (lse / math.log(2)).float()) if return_lse else out.to(q.dtype)


@pytest.fixture(autouse=True)
def fake_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=FakeWrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    monkeypatch.setattr("acache_kernels.flashinfer_ops.attention.WORKSPACE_BYTES", 64)
    FakeWrapper.made = FakeWrapper.plans = 0


SHAPES = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 20)), max_size=5)


@settings(max_examples=25)
@given(SHAPES, st.sampled_from([(4, 2, 32), (7, 1, 64)]), st.sampled_from([torch.int32, torch.int64]))
def test_results_and_natural_lse(
    shapes: list[tuple[int, int]], heads: tuple[int, int, int], index_dtype: torch.dtype
) -> None:
    case = attention_case(shapes, heads, torch.bfloat16, index_dtype=index_dtype)
    out, lse = case.run("flashinfer")
    expected, expected_lse = reference_attention(case)
    torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=1e-2)
    assert lse is not None
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


def test_one_plan_serves_every_layer_and_one_wrapper_every_step() -> None:
    case = attention_case([(2, 9), (0, 3), (1, 4)], (4, 2, 32), torch.bfloat16)
    kernel = get_attention_kernel("flashinfer")
    for _ in range(2):
        plan = kernel.plan(case.layout, **case.heads)
        for _ in range(3):
            out, lse = kernel.run(plan, case.q, case.k_pool, case.v_pool, scale=case.scale, return_lse=False)
            assert lse is None
            assert out.shape == case.q.shape
    assert (FakeWrapper.made, FakeWrapper.plans) == (1, 2)


def test_a_plan_waits_until_the_last_one_has_left_its_page_locked_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    event = SimpleNamespace(record=lambda: calls.append("record"), synchronize=lambda: calls.append("wait"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    pointers = torch.tensor([0, 1], dtype=torch.int32)
    planner = Planner(SimpleNamespace(plan=lambda *_, **__: calls.append("plan")))
    for _ in range(3):
        planner.plan((pointers, pointers, SimpleNamespace(is_cuda=True)), (1, 1, 32), torch.bfloat16)
    assert calls == ["plan", "record", *["wait", "plan", "record"] * 2]


def test_static_plans_of_one_wrapper_wait_for_each_other() -> None:
    kernel = get_attention_kernel("flashinfer")
    capacity = StaticCapacity(requests=2, queries=8, keys=100, longest=4)
    heads = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 32, "dtype": torch.bfloat16, "device": "cpu"}
    capacities = [replace(capacity, keys=10), capacity, replace(capacity, queries=9)]
    small, large, other = kernel.static_plans(capacities, **heads)
    assert small._planner is large._planner is not other._planner


@settings(max_examples=25)
@given(st.lists(SHAPES, min_size=1, max_size=3))
def test_a_static_plan_gives_what_a_plan_gives(steps: list[list[tuple[int, int]]]) -> None:
    """Steps of any shape through one wrapper, padded; the padding slot holds something, other unread slots NaN."""
    kernel = get_attention_kernel("flashinfer")
    capacity = StaticCapacity(requests=6, queries=32, keys=100, longest=5)
    heads = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 32, "dtype": torch.bfloat16, "device": "cpu"}
    small, static = kernel.static_plans([replace(capacity, keys=10), capacity], **heads)
    assert small.plan is static.plan
    for index, shapes in enumerate(steps):
        case = attention_case(shapes, (4, 2, 32), torch.bfloat16, seed=index, padding_slot=True)
        expected, expected_lse = case.run("flashinfer")
        made = FakeWrapper.made
        static.update(case.layout)
        out, lse = padded(case, capacity).run_planned(kernel, static.plan)
        assert FakeWrapper.made == made
        assert torch.equal(out[: len(expected)], expected)
        assert torch.equal(lse[: len(expected)], expected_lse)
        assert torch.isfinite(out).all()


def test_what_it_cannot_serve_is_refused() -> None:
    case = attention_case([(2, 9)], (4, 2, 32), torch.bfloat16)
    kernel = get_attention_kernel("flashinfer")
    with pytest.raises(ValueError, match="cannot serve"):
        kernel.plan(case.layout, **{**case.heads, "dtype": torch.float32})
    plan = kernel.plan(case.layout, **case.heads)
    with pytest.raises(ValueError, match="planned for scale"):
        kernel.run(plan, case.q, case.k_pool, case.v_pool, scale=1.0, return_lse=False)


def test_calls_bind_to_the_installed_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every parameter we pass exists under that name or place in the real class, where it can be imported."""
    monkeypatch.delitem(sys.modules, "flashinfer")
    prefill = pytest.importorskip("flashinfer.prefill", exc_type=ImportError)
    real = prefill.BatchPrefillWithPagedKVCacheWrapper
    names = list(inspect.signature(FakeWrapper.plan).parameters)
    assert list(inspect.signature(real.plan).parameters)[:9] == names[:9]
    assert set(names) <= set(inspect.signature(real.plan).parameters)
    assert "return_lse" in inspect.signature(real.run).parameters
    assert set(inspect.signature(FakeWrapper.__init__).parameters) <= set(inspect.signature(real.__init__).parameters)
    assert list(inspect.signature(real.reset_workspace_buffer).parameters)[1:] == [
        "float_workspace_buffer",
        "int_workspace_buffer",
    ]
