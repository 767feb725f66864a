"""Per-request parameters: what is applied, what is refused and by which name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_acache.core.params import FIELDS, DiffusionParams, ParamError, check_fraction, check_integer, override

DEFAULTS = DiffusionParams(block_length=16)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
)


@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=6), anything, max_size=3))
def test_any_input_is_applied_or_refused_by_name(values: dict[str, Any]) -> None:
    refusal = None
    try:
        params = override(DEFAULTS, values)
    except ParamError as error:
        refusal = error
    if refusal is not None:
        assert refusal.field in values
        assert str(refusal).startswith(refusal.field)
        return
    schedule = (params.steps, params.threshold, params.factor)
    assert sum(one is not None for one in schedule) == 1
    for name, value in values.items():
        assert value is None or getattr(params, name) == value


@pytest.mark.parametrize("schedule", [{"steps": 8}, {"factor": 2.0}, {"threshold": 0.5}], ids=str)
def test_a_schedule_replaces_the_default_one(schedule: dict[str, Any]) -> None:
    params = override(DEFAULTS, schedule)
    expected = {"steps": None, "threshold": None, "factor": None, **schedule}
    assert {name: getattr(params, name) for name in expected} == expected
    assert params.block_length == 16


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"block_length": 0}, "block_length"),
        ({"block_length": True}, "block_length"),
        ({"block_length": 8.0}, "block_length"),
        ({"steps": -1}, "steps"),
        ({"threshold": 1.01}, "threshold"),
        ({"threshold": float("nan")}, "threshold"),
        ({"factor": float("inf")}, "factor"),
        ({"factor": 0}, "factor"),
        ({"remasking": "Random"}, "remasking"),
        ({"cache": ["dual"]}, "cache"),
        ({"steps": 4, "factor": 1.0}, "factor"),
        ({"block_len": 4}, "block_len"),
    ],
    ids=str,
)
def test_refusals(values: dict[str, Any], field: str) -> None:
    with pytest.raises(ParamError, match=f"^{field}: "):
        override(DEFAULTS, values)


def test_limits_are_inclusive() -> None:
    assert check_integer("n", 1) == 1
    assert [check_fraction("p", value) for value in (0, 1, 0.5)] == [0.0, 1.0, 0.5]
