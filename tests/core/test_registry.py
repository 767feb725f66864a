"""The name -> implementation table."""

from __future__ import annotations

import pytest

from sglang_acache.core.policy import CACHE_POLICIES
from sglang_acache.core.registry import Registry


def test_names_in_order_of_registration() -> None:
    table: Registry[int] = Registry("number")
    table.register("two", 2)
    table.register("one", 1)
    assert table.names() == list(table) == ["two", "one"]
    assert table["one"] == 1
    assert "one" in table
    assert "three" not in table


@pytest.mark.parametrize("name", ["three", None, ["one"], 5])
def test_an_unknown_name_is_answered_with_the_known_ones(name: object) -> None:
    table: Registry[int] = Registry("number")
    table.register("one", 1)
    table.register("two", 2)
    with pytest.raises(ValueError, match="number must be one of one, two; got "):
        table[name]  # type: ignore[index]


def test_a_name_is_registered_once() -> None:
    table: Registry[int] = Registry("number")
    table.register("one", 1)
    with pytest.raises(ValueError, match="'one' is registered twice"):
        table.register("one", 2)


def test_only_the_cache_none_is_exact() -> None:
    assert [name for name in CACHE_POLICIES if CACHE_POLICIES[name].exact] == ["none"]
