"""Spans of tokens that several requests share: which are known, where a prompt has them, who holds their K/V."""

from sglang_acache.core.spans.breakeven import Costs, break_even_length, choose_spans
from sglang_acache.core.spans.discovery import Discovery, Promotion, PromotionRule
from sglang_acache.core.spans.handle import SpanHandle
from sglang_acache.core.spans.interior import stable_interior
from sglang_acache.core.spans.pool import ListSlotPool, SlotPool
from sglang_acache.core.spans.tree import SpanTree
from sglang_acache.core.spans.types import (
    Encode,
    Rebase,
    Segment,
    SpanInfo,
    SpanMatch,
    SpanNameTaken,
    SpanPart,
    State,
    Usage,
    WorkOrder,
)

__all__ = [
    "Costs",
    "Discovery",
    "Encode",
    "ListSlotPool",
    "Promotion",
    "PromotionRule",
    "Rebase",
    "Segment",
    "SlotPool",
    "SpanHandle",
    "SpanInfo",
    "SpanMatch",
    "SpanNameTaken",
    "SpanPart",
    "SpanTree",
    "State",
    "Usage",
    "WorkOrder",
    "break_even_length",
    "choose_spans",
    "stable_interior",
]
