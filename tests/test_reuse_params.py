"""``custom_params.acache``: checked field by field, over the server's defaults."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_acache.core.params import ParamError
from sglang_acache.core.reuse_params import ReuseParams, override_reuse

GIVEN = ReuseParams(anchor_ratio=0.3, coverage=0.8)


@pytest.mark.parametrize("values", [{}, {"anchor_ratio": None, "coverage": None, "spans": None}])
def test_nothing_given_keeps_the_defaults(values: dict[str, Any]) -> None:
    assert override_reuse(GIVEN, values, 10) == GIVEN


@pytest.mark.parametrize("selector", ["random", "first", "bottom"])
def test_coverage_needs_scores_that_fall(selector: str) -> None:
    with pytest.raises(ParamError, match=r"^acache\.coverage: has no meaning with selector"):
        override_reuse(ReuseParams(), {"selector": selector, "coverage": 0.5}, 10)
    assert override_reuse(GIVEN, {"selector": selector}, 10).coverage is None, "the server's own gives way"
    with pytest.raises(ParamError, match=r"^acache\.coverage"):
        override_reuse(ReuseParams(selector=selector), {"coverage": 0.5}, 10)


@pytest.mark.parametrize("selector", ["attention", "attention_affix", "kv_deviation", "drop_non_anchors"])
def test_coverage(selector: str) -> None:
    assert override_reuse(GIVEN, {"selector": selector}, 10).coverage == 0.8


@pytest.mark.parametrize(("span", "crosses"), [([0, 6], False), ([6, 10], False), ([5, 7], True), ([0, 10], True)])
def test_no_span_crosses_the_hole(span: list[int], crosses: bool) -> None:
    if crosses:
        with pytest.raises(ParamError, match=r"^acache\.spans: .* crosses the hole after token 6"):
            override_reuse(GIVEN, {"spans": [span]}, 10, hole_at=6)
    else:
        assert override_reuse(GIVEN, {"spans": [span]}, 10, hole_at=6).spans == (tuple(span),)
    assert override_reuse(GIVEN, {"spans": [span]}, 10).spans == (tuple(span),)
