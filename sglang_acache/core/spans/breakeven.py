"""When reusing a span pays.

The unit is the token-forward: one row through the whole model. A request with canvas T that makes N block
starts forwards N * T rows without reuse. With spans of lengths L_i and K_i anchors each it forwards

    N * (T - sum(L_i - K_i))  +  probe,      probe = T - sum(L_i) rows once

so a set of spans pays if  N * sum(L_i - K_i) > probe + encoding + re-basing + overhead.  The terms of the
single spans only add up, hence the best set is: every span of positive marginal value, or none when their sum
does not cover the probe. A span or a set that does not pay is bypassed: its tokens are ordinary prompt
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_acache.core.selector import Needs, Ratio, anchor_count


@dataclass(frozen=True)
class Costs:
    """Prices in token-forwards, to be calibrated on the machine and the model.

    probe_row: one row of the probe (< 1 when it runs fewer layers or shares the first recompute).
    encode_row: one row of a span's encoding. rebase_token: re-basing one token.
    span: fixed price of a span in a request: its orders, its part of the maps, one selection.
    """

    probe_row: float = 1.0
    encode_row: float = 1.0
    rebase_token: float = 0.02
    span: float = 4.0


DEFAULT_COSTS = Costs()


@dataclass(frozen=True)
class SpanCost:
    """A candidate: its length, tokens that must be encoded or re-based first, and over how many requests,
    this one included, the encoding is written off."""

    length: int
    encode: int = 0
    rebase: int = 0
    uses: float = 1.0


def span_value(
    span: SpanCost, block_starts: int, ratio: Ratio, costs: Costs = DEFAULT_COSTS, needs: Needs = "attention"
) -> float:
    """Token-forwards that the span saves in one request whose probe runs anyway."""
    saved = block_starts * (span.length - anchor_count(span.length, ratio))
    probe = costs.probe_row * span.length if needs in ("attention", "attention_affix") else 0.0
    once = costs.encode_row * span.encode / max(span.uses, 1.0) + costs.rebase_token * span.rebase
    return saved + probe - once - costs.span


def probe_price(canvas: int, costs: Costs = DEFAULT_COSTS, needs: Needs = "attention") -> float:
    """Price of a probe over all T rows; ``span_value`` credits the rows that a span spares it. ``kv_deviation``
    needs fresh K/V of the affix itself and is spared nothing; selectors that need nothing have no probe."""
    return 0.0 if needs == "none" else costs.probe_row * canvas


def choose_spans(
    canvas: int,
    spans: Sequence[SpanCost],
    block_starts: int,
    ratio: Ratio,
    costs: Costs = DEFAULT_COSTS,
    needs: Needs = "attention",
    *,
    probed: bool = False,
) -> list[bool]:
    """Which spans to use in a request with ``canvas`` positions that will make ``block_starts`` block starts.

    probed: other spans of the request have paid for its probe already.
    """
    values = [span_value(span, block_starts, ratio, costs, needs) for span in spans]
    total = sum(value for value in values if value > 0)
    pays = total > (0.0 if probed else probe_price(canvas, costs, needs))
    return [pays and value > 0 for value in values]


def break_even_length(
    canvas: int, block_starts: int, ratio: Ratio, costs: Costs = DEFAULT_COSTS, needs: Needs = "attention"
) -> int | None:
    """The shortest single, already encoded span that pays; None if not even the whole canvas would."""
    if not choose_spans(canvas, [SpanCost(canvas)], block_starts, ratio, costs, needs)[0]:
        return None
    low, high = 1, canvas  # the gain never falls with the length
    while low < high:
        middle = (low + high) // 2
        if choose_spans(canvas, [SpanCost(middle)], block_starts, ratio, costs, needs)[0]:
            high = middle
        else:
            low = middle + 1
    return low
