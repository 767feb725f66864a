"""Static plans of the Triton attention: the bits of an ordinary plan, by launches that never change."""

from typing import Any

import numpy as np
import pytest
import torch
from acache_kernels import get_attention_kernel
from acache_kernels.static_plan import StaticCapacity, StaticPlan
from acache_kernels.triton_ops import attention as triton_attention
from acache_kernels.triton_ops.attention import tile_shapes
from acache_kernels.triton_ops.static_plan import classes_in_use
from acache_kernels.triton_ops.work_lists import Requests, bounds, by_class, work_lists
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_references import AttentionCase, attention_case, padded

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy: -inf - -inf in masked lanes

Shapes = list[tuple[int, int]]


@st.composite
def capacities(draw: st.DrawFn, most: int, longest: int, keys: int) -> StaticCapacity:
    requests = draw(st.integers(1, most))
    rows = draw(st.integers(1, longest))
    queries = draw(st.integers(rows, requests * rows))
    each = draw(st.one_of(st.integers(1, 2), st.integers(1, keys)))
    return StaticCapacity(requests, queries, requests * each, rows)


def steps(capacity: StaticCapacity) -> st.SearchStrategy[Shapes]:
    """Shapes (queries, keys) of requests that fit, often to the brim, some of them idle."""

    def clipped(shapes: Shapes) -> Shapes:
        kept: Shapes = []
        queries, keys = capacity.queries, capacity.keys
        for n, m in shapes[: capacity.requests]:
            n, m = min(n, queries, capacity.longest), min(m, keys)
            kept.append((n if m else 0, m))
            queries, keys = queries - kept[-1][0], keys - m
        return kept

    queries = st.one_of(st.integers(0, capacity.longest), st.just(capacity.longest))
    keys = st.one_of(st.integers(1, capacity.keys), st.just(-(-capacity.keys // capacity.requests)))
    return st.lists(st.tuples(queries, keys), max_size=capacity.requests).map(clipped)


def poison(plan: StaticPlan) -> None:
    """What an earlier step may have left: part results of NaN, read slots outside any pool."""
    planned = plan.plan
    planned.kv_indices[:-1] = 2**31 - 1
    planned.part_out.fill_(float("nan"))
    planned.part_lse.fill_(float("nan"))
    for launch in planned.launches:
        launch.work.fill_(2**31 - 1)
        launch.merges.fill_(2**31 - 1)


class Launches:
    """Stands in for a Triton kernel: notes the grid, the addresses that must stay and the numbers of each launch."""

    def __init__(self, kernel: Any, moving: set[int], noted: list[tuple[Any, ...]]) -> None:
        self.kernel, self.moving, self.noted = kernel, moving, noted

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **sizes: Any) -> None:
            kept = [
                a.data_ptr() if isinstance(a, torch.Tensor) else a
                for i, a in enumerate(arguments)
                if i not in self.moving
            ]
            self.noted.append((grid, *kept, *sizes.values()))
            self.kernel[grid](*arguments, **sizes)

        return launch


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """q, the pools and the results belong to the layer; under a graph they are its own, and stay too."""
    noted: list[tuple[Any, ...]] = []
    for name, moving in (("attend_tiles", {0, 1, 2, 3, 4}), ("merge_parts", {2, 3})):
        kernel = getattr(triton_attention, name)
        monkeypatch.setattr(triton_attention, name, Launches(kernel, moving, noted))
    return noted


@settings(max_examples=12)
@given(st.data())
def test_a_static_plan_gives_the_bits_of_a_plan(data: st.DataObject) -> None:
    kernel = get_attention_kernel("triton")
    capacity = data.draw(capacities(most=4, longest=20, keys=60))
    heads = data.draw(st.sampled_from([(1, 1, 32), (7, 1, 32), (4, 2, 48)]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    sizes = {"num_q_heads": heads[0], "num_kv_heads": heads[1], "head_dim": heads[2], "dtype": dtype, "device": "cpu"}
    other = StaticCapacity(5, 40, 300, 9)
    static, _ = kernel.static_plans([capacity, other], **sizes)
    for seed in range(2):
        slots = data.draw(st.sampled_from(["permuted", "repeated"]))
        case = attention_case(data.draw(steps(capacity)), heads, dtype, slots, seed, padding_slot=True)
        expected, expected_lse = case.run(kernel)
        poison(static)
        static.update(case.layout)
        out, lse = padded(case, capacity).run_planned(kernel, static.plan)
        assert torch.equal(out[: len(expected)], expected)
        assert lse is not None
        assert expected_lse is not None
        assert torch.equal(lse[: len(expected)], expected_lse)
        assert torch.equal(out[len(expected) :].float(), padding_values(case, capacity))


def padding_values(case: AttentionCase, capacity: StaticCapacity) -> torch.Tensor:
    """What padding rows must be: the value of the padding slot, the only thing they attend to."""
    group = case.q.shape[1] // case.v_pool.shape[1]
    return case.v_pool[0].repeat_interleave(group, 0).expand(capacity.queries - len(case.q), -1, -1).float()


def test_launches_do_not_depend_on_the_step(launches: list[tuple[Any, ...]]) -> None:
    """Same grids, addresses and numbers for full, short, split, uneven and empty steps: what a graph repeats."""
    kernel = get_attention_kernel("triton")
    capacity = StaticCapacity(requests=3, queries=70, keys=2000, longest=33)
    seen = []
    sizes = {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 32, "dtype": torch.bfloat16, "device": "cpu"}
    (static,) = kernel.static_plans([capacity], **sizes)
    for shapes in ([(33, 600), (33, 700), (4, 700)], [(1, 1)], [], [(16, 1030), (33, 20)], [(0, 5), (17, 513)]):
        case = attention_case(shapes, (2, 1, 32), torch.bfloat16, padding_slot=True)
        expected, _ = case.run(kernel)
        launches.clear()
        static.update(case.layout)
        out, _ = padded(case, capacity).run_planned(kernel, static.plan)
        seen.append(list(launches))
        assert torch.equal(out[: len(expected)], expected)
    assert len(seen[0]) == 6  # three tile classes, attention and merge
    lists = [table for launch in static.plan.launches for table in (launch.work, launch.merges)]
    assert not any(table.data_ptr() % 16 for table in lists)
    assert all(one == seen[0] for one in seen)


@settings(max_examples=300)
@given(st.data(), st.sampled_from([1, 4, 7, 8]), st.sampled_from([64, 128, 256]))
def test_no_step_has_more_lines_than_its_plan(data: st.DataObject, group: int, dim: int) -> None:
    """Without running a kernel, over the shapes that are served: the bounds of every tile class hold."""
    capacity = data.draw(capacities(most=40, longest=300, keys=5000))
    shapes = data.draw(steps(capacity))
    queries, keys = np.array(shapes, dtype=np.int64).reshape(-1, 2).T
    blocks = [shape.block_m for shape in classes_in_use(tile_shapes(dim, torch.bfloat16), capacity.longest * group)]
    requests = Requests(np.cumsum(queries) - queries, queries * group, np.cumsum(keys) - keys, keys)
    classes = by_class(requests, blocks)
    padding = capacity.queries - int(queries.sum())
    classes[-1] = classes[-1].with_padding(padding, int(queries.sum()), group, capacity.keys)
    for block, members in zip(blocks, classes, strict=True):
        lists = work_lists(members, block)
        most = bounds(capacity, group, block, last=block == blocks[-1])
        assert all(n <= m for n, m in zip((len(lists.work), len(lists.merges), lists.num_parts), most, strict=True))


@pytest.mark.parametrize(
    ("capacity", "shapes", "lines"),
    [
        (StaticCapacity(1, 2, 1, 2), [(1, 1)], 2),  # a tile and one of padding: the bound itself
        (StaticCapacity(3, 33, 3, 11), [(1, 1)] * 3, 4),
        (StaticCapacity(2, 97, 1026, 32), [(32, 513), (32, 513)], 6),  # two ranges each, 33 rows of padding
    ],
)
def test_bounds_where_they_are_tight(capacity: StaticCapacity, shapes: Shapes, lines: int) -> None:
    queries, keys = np.array(shapes).T
    requests = Requests(np.cumsum(queries) - queries, queries, np.cumsum(keys) - keys, keys)
    padding = capacity.queries - int(queries.sum())
    lists = work_lists(requests.with_padding(padding, int(queries.sum()), 1, capacity.keys), 32)
    most = bounds(capacity, 1, 32, last=True)
    assert lines == len(lists.work) <= most.work
    assert lists.num_parts <= most.parts


@pytest.mark.parametrize("heads", [(28, 4, 128), (32, 32, 128), (2, 1, 80)])
def test_bytes_are_those_of_the_buffers(heads: tuple[int, int, int]) -> None:
    """Of the plan that needs most, without allocating them."""
    kernel = get_attention_kernel("triton")
    sizes = {"num_q_heads": heads[0], "num_kv_heads": heads[1], "head_dim": heads[2], "dtype": torch.bfloat16}
    made = [StaticCapacity(2, 66, 131_072, 33), StaticCapacity(4, 128, 9000, 32)]
    for few in (made, made[1:]):
        plan = kernel.static_plans(few, **sizes, device="meta")[-1].plan
        assert plan.part_out.nbytes + plan.part_lse.nbytes == max(kernel.static_bytes(one, **sizes) for one in few)


def test_steps_that_do_not_fit_are_refused() -> None:
    kernel = get_attention_kernel("triton")
    case = attention_case([(3, 9), (2, 4)], (1, 1, 32))
    fitting = StaticCapacity(2, 5, 13, 3)
    (static,) = kernel.static_plans([fitting], **case.heads)
    static.update(case.layout)
    for name in ("requests", "queries", "keys", "longest"):
        short = StaticCapacity(**{**vars(fitting), name: getattr(fitting, name) - 1})
        (static,) = kernel.static_plans([short], **case.heads)
        with pytest.raises(ValueError, match="does not fit"):
            static.update(case.layout)
    with pytest.raises(ValueError, match="no plans of a fixed size"):
        get_attention_kernel("torch").static_plans([fitting], **case.heads)
