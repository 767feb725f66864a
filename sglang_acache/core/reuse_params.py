"""How one request reuses shared text: what a client may set under ``custom_params.acache``, and its defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from sglang_acache.core.params import ParamError, check_choice, check_fraction, check_integer
from sglang_acache.core.selector import SELECTORS as RANKINGS

SELECTORS = ("attention", "attention_affix", "random", "bottom", "first", "kv_deviation", "drop_non_anchors")
"""Names a client may give; ``drop_non_anchors`` is ``attention`` with the other affix entries left out."""

PROBES = ("request", "fused", "remembered")
"""``request``: a forward of the request's own positions, then block starts as ever. ``fused``: the first block start
forwards only the anchors and its block, since the probe has stored the rest. ``remembered``: importance that another
request's probe found for the same span is used where there is one; answers then depend on who came before."""


@dataclass(frozen=True, slots=True)
class ReuseParams:
    """Reuse of one request (method section 4).

    ``spans``: half-open offsets of shared text in prompt + suffix, declared by this request. ``coverage``: None, or
    the fraction of the total importance the anchors must hold, capped by the ratio.
    """

    enabled: bool = True
    anchor_ratio: float = 0.2
    selector: str = "attention"
    coverage: float | None = None
    probe: str = "request"
    spans: tuple[tuple[int, int], ...] = ()
    seed: int = 0


FIELDS = ("enabled", "anchor_ratio", "selector", "coverage", "probe", "spans", "seed")
_NAME = "acache"
_WITHOUT_COVERAGE = tuple(name for name in RANKINGS if not RANKINGS[name].falling)


def override_reuse(
    defaults: ReuseParams, values: Any, prompt_tokens: int, hole_at: int | None = None
) -> ReuseParams:
    """``defaults`` with a client's object applied.

    Args:
        values: the JSON object under ``custom_params.acache``.
        prompt_tokens: length of prompt + suffix, for checking ``spans``.
        hole_at: length of the prompt, where the hole cuts prompt + suffix; no span may cross it.

    Raises:
        ParamError: names the field (``acache.anchor_ratio``, ...) and the fix.
    """
    if not isinstance(values, Mapping):
        raise ParamError(_NAME, f"must be an object with {', '.join(FIELDS)}, got {values!r}")
    for key in values:
        if key not in FIELDS:
            raise ParamError(f"{_NAME}.{key}", f"unknown parameter; known are {', '.join(FIELDS)}")
    checked: dict[str, Any] = {}
    for key, value in values.items():
        if value is not None:
            checked[key] = _check(key, value, prompt_tokens, hole_at)
    params = replace(defaults, **checked)
    if params.selector not in _WITHOUT_COVERAGE:
        return params
    if "coverage" in checked:
        fix = "leave it out, or choose 'attention'"
        raise ParamError(f"{_NAME}.coverage", f"has no meaning with selector {params.selector!r}; {fix}")
    return replace(params, coverage=None)


def _check(key: str, value: Any, prompt_tokens: int, hole_at: int | None) -> Any:
    field = f"{_NAME}.{key}"
    if key == "enabled":
        if not isinstance(value, bool):
            raise ParamError(field, f"must be true or false, got {value!r}")
        return value
    if key in ("anchor_ratio", "coverage"):
        return check_fraction(field, value)
    if key == "selector":
        return check_choice(field, value, SELECTORS)
    if key == "probe":
        return check_choice(field, value, PROBES)
    if key == "seed":
        return check_integer(field, value, minimum=0)
    return _check_spans(field, value, prompt_tokens, hole_at)


def _check_spans(
    field: str, value: Any, prompt_tokens: int, hole_at: int | None
) -> tuple[tuple[int, int], ...]:
    if not isinstance(value, list | tuple):
        raise ParamError(field, f"must be a list of [start, end] pairs, got {value!r}")
    spans = []
    for item in value:
        if not isinstance(item, list | tuple) or len(item) != 2:
            raise ParamError(field, f"each span must be a pair [start, end], got {item!r}")
        start, end = (check_integer(field, offset, minimum=0) for offset in item)
        if not start < end <= prompt_tokens:
            raise ParamError(field, f"[{start}, {end}] must satisfy start < end <= {prompt_tokens} (prompt + suffix)")
        if hole_at is not None and start < hole_at < end:
            raise ParamError(field, f"[{start}, {end}] crosses the hole after token {hole_at}; give one span a side")
        spans.append((start, end))
    spans.sort()
    for (_, end), (start, _) in pairwise(spans):
        if start < end:
            raise ParamError(field, f"spans overlap at token {start}")
    return tuple(spans)
