"""One frame of the view, as lines of plain text."""

from __future__ import annotations

import math
from typing import Any

from sglang_acache.top.source import Snapshot

PHASES = ("waiting", "encoding", "probing", "denoising")
_BAR = 30
_COLUMNS = (("SOURCE", 11), ("TOKENS", 7), ("READERS", 8), ("HITS", 8), ("ENCODED", 8), ("SLOTS", 8), ("PIN", 4))
_RIGHT = sum(width for _, width in _COLUMNS)


def render(now: Snapshot, before: Snapshot | None, *, base_url: str, width: int, height: int) -> list[str]:
    """At most ``height`` lines of at most ``width`` characters; rates where there is an earlier snapshot."""
    head = [*_head(now, before, base_url), "", *_totals(now, before), "", *_slots(now)]
    room = max(0, height - len(head) - 2)
    lines = [*head, "", *_spans(now.spans, width, room)]
    return [line[:width].rstrip() for line in lines[:height]]


def rate(now: Snapshot, before: Snapshot | None, name: str) -> float | None:
    """Growth a second; None without an earlier snapshot. A server that started anew counts from zero."""
    if before is None or now.taken <= before.taken:
        return None
    grown = now[name] - before[name]
    return (grown if grown >= 0 else now[name]) / (now.taken - before.taken)


def printable(text: str) -> str:
    """Names come from clients: nothing in them may move the cursor."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _head(now: Snapshot, before: Snapshot | None, base_url: str) -> list[str]:
    phases = "   ".join(f"{phase} {now[f'acache:requests{{{phase}}}']:,.0f}" for phase in PHASES)
    generated = rate(now, before, "sglang:generation_tokens_total")
    speed = "" if generated is None else f"   answers {generated:,.0f} tokens/s"
    return [f"sglang-acache top   {printable(base_url)}   {printable(now.model)}", f"requests   {phases}{speed}"]


def _totals(now: Snapshot, before: Snapshot | None) -> list[str]:
    def count(name: str) -> str:
        speed = rate(now, before, name)
        return f"{now[name]:,.0f}" + ("" if speed is None else f" (+{speed:,.0f}/s)")

    saved, forwarded = now["acache:tokens_saved_total"], now["acache:tokens_recomputed_total"]
    share = f"{saved / (saved + forwarded):.0%}" if saved + forwarded else "-"
    return [
        f"tokens     reused {count('acache:tokens_reused_total')}   anchors {count('acache:anchors_total')}",
        f"forwards   recomputed {count('acache:tokens_recomputed_total')}   "
        f"saved {count('acache:tokens_saved_total')}   share saved {share}",
        f"probes     {now['acache:probe_tokens_total']:,.0f} tokens   {now['acache:probe_seconds_total']:,.1f} s",
        f"spans      known {now['acache:spans_known']:,.0f}   pieces encoded {now['acache:spans_encoded']:,.0f}   "
        f"encodings {count('acache:encodings_total')}   evicted {count('acache:spans_evicted_total')}",
    ]


def _slots(now: Snapshot) -> list[str]:
    used, most = now["acache:shared_slots_used"], now["acache:shared_slots_max"]
    idle, pinned = now["acache:shared_slots_evictable"], now["acache:shared_slots_pinned"]
    full = min(1.0, used / most) if most else 0.0
    held = math.ceil(_BAR * min(1.0, max(0.0, used - idle) / most)) if most else 0
    bar = "#" * held + "+" * (math.ceil(_BAR * full) - held)
    return [
        f"slots      [{bar:<{_BAR}}] {used:,.0f} of {most:,.0f} shared",
        f"           # read or pinned {used - idle:,.0f}   + evictable {idle:,.0f}   pinned {pinned:,.0f}",
    ]


def _spans(spans: list[dict[str, Any]], width: int, room: int) -> list[str]:
    """A header and ``room`` spans, the names as wide as the terminal leaves."""
    name = max(12, min(40, width - _RIGHT))
    title = "NAME".ljust(name) + "".join(label.rjust(size) for label, size in _COLUMNS)
    return [title, *[_span(span, name) for span in spans[: max(0, room)]]]


def _span(span: dict[str, Any], width: int) -> str:
    label = printable(str(span["name"]))
    if span.get("cache_salt") or span.get("extra_key"):
        label += " *"  # of a name space of its own
    label = label if len(label) < width else label[: width - 2] + "~"
    values = (
        span["source"],
        f"{span['length']:,}",
        f"{span['readers']:,}",
        f"{span['hits']:,}",
        f"{span['encoded_tokens']:,}",
        f"{span['slots']:,}",
        "yes" if span["pinned"] else "",
    )
    cells = [value.rjust(size) for value, (_, size) in zip(values, _COLUMNS, strict=True)]
    return label.ljust(width) + "".join(cells)
