"""Figures of the benchmarks: medians, intervals and ratios."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_acache.bench.stats import bootstrap, mean_difference, paired_ratio, percentiles, wilson

SAMPLES = st.lists(st.floats(0.01, 100), min_size=1, max_size=20)


@given(SAMPLES)
def test_the_interval_of_a_median_holds_it_and_stays_inside_the_samples(samples: list[float]) -> None:
    found = bootstrap(samples)
    assert found.n == len(samples)
    assert found.value == pytest.approx(float(np.median(samples)))
    assert min(samples) <= found.low <= found.high <= max(samples)


@given(SAMPLES, st.floats(0.1, 10))
def test_a_constant_factor_between_rounds_is_found_whatever_the_rounds_cost(
    samples: list[float], factor: float
) -> None:
    found = paired_ratio([factor * sample for sample in samples], samples)
    assert (found.value, found.low, found.high) == pytest.approx((factor, factor, factor))


@given(st.integers(1, 500), st.data())
def test_wilson_interval_holds_the_share(n: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, n))
    found = wilson(right, n)
    assert 0 <= found.low <= found.value + 1e-12
    assert found.value - 1e-12 <= found.high <= 1


def test_known_values() -> None:
    assert (wilson(0, 4).high, wilson(4, 4).low) == pytest.approx((0.4899, 0.5101), abs=1e-4)
    assert mean_difference([1, 1, 0], [0, 1, 0]).value == pytest.approx(1 / 3)
    assert percentiles(range(101)) == {"p50": 50, "p95": 95, "p99": 99}


def test_no_samples_give_no_figure() -> None:
    assert np.isnan(bootstrap([]).value)
    assert np.isnan(wilson(0, 0).value)
    assert percentiles([]) == {}
