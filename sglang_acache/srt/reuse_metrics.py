"""Prometheus metrics of reuse, beside SGLang's own: same labels, same registry directory, same ``/metrics``.

Refreshed between steps, every 0.2 s at most and once when the scheduler runs out of work.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sglang_acache.core.reuse import Stage
from sglang_acache.srt.affixes import Affixes
from sglang_acache.srt.live_request import LiveRequest

INTERVAL_S = 0.2
_SHARE = 100  # a refresh that takes long is done rarely: at most one hundredth of the time
WAITING = "waiting"
PHASES = (WAITING, *(stage.value for stage in Stage))


@dataclass(frozen=True, slots=True)
class Metric:
    """``labels``: names besides those that SGLang puts on every metric."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    labels: tuple[str, ...] = ()


METRICS = (
    Metric(
        "acache:tokens_reused_total",
        "counter",
        "Prompt tokens read from shared K/V instead of being recomputed; once a request, as in cached_tokens.",
    ),
    Metric(
        "acache:tokens_recomputed_total",
        "counter",
        "Tokens forwarded at block starts by requests that read shared spans.",
    ),
    Metric(
        "acache:tokens_saved_total",
        "counter",
        "Tokens that those block starts did not forward; probes are not taken off.",
    ),
    Metric("acache:anchors_total", "counter", "Tokens of shared spans that requests recompute: their anchors."),
    Metric("acache:probe_tokens_total", "counter", "Tokens forwarded by probes, which choose the anchors."),
    Metric("acache:probe_seconds_total", "counter", "Seconds of the steps in which probes ran."),
    Metric("acache:encodings_total", "counter", "Pieces of spans encoded: one forward of the piece's tokens each."),
    Metric("acache:spans_evicted_total", "counter", "Encoded pieces of spans dropped to make room."),
    Metric("acache:spans_known", "gauge", "Spans known: declared names, and spans discovered or named by requests."),
    Metric("acache:spans_encoded", "gauge", "Encoded pieces of spans in memory; one more for every further offset."),
    Metric("acache:shared_slots_used", "gauge", "K/V slots held by shared spans."),
    Metric("acache:shared_slots_evictable", "gauge", "Of these, slots that nobody reads and nothing pins."),
    Metric("acache:shared_slots_pinned", "gauge", "Of these, slots of pinned spans."),
    Metric("acache:shared_slots_max", "gauge", "Most K/V slots that shared spans may hold."),
    Metric("acache:requests", "gauge", "Requests by phase.", ("phase",)),
)

Sample = tuple[str, tuple[str, ...]]  # a metric's name and the values of its own labels


def read(affixes: Affixes, live: Sequence[LiveRequest], waiting: int) -> dict[Sample, float]:
    """The present value of every metric."""
    counters, usage = affixes.counters, affixes.tree.usage()
    plain = {
        "acache:tokens_reused_total": counters.tokens_reused,
        "acache:tokens_recomputed_total": counters.tokens_recomputed,
        "acache:tokens_saved_total": counters.tokens_saved,
        "acache:anchors_total": counters.anchors,
        "acache:probe_tokens_total": counters.probe_tokens,
        "acache:probe_seconds_total": counters.probe_seconds,
        "acache:encodings_total": counters.spans_encoded,
        "acache:spans_evicted_total": usage.evictions,
        "acache:spans_known": usage.spans,
        "acache:spans_encoded": usage.placements,
        "acache:shared_slots_used": usage.used,
        "acache:shared_slots_evictable": usage.evictable,
        "acache:shared_slots_pinned": usage.pinned,
        "acache:shared_slots_max": affixes.tree.ledger.max_shared_tokens or 0,
    }
    phases = Counter(Stage.DENOISING if request.reuse is None else request.reuse.stage for request in live)
    by_phase = {WAITING: waiting, **{stage.value: phases[stage] for stage in Stage}}
    return {
        **{(name, ()): float(value) for name, value in plain.items()},
        **{("acache:requests", (phase,)): float(count) for phase, count in by_phase.items()},
    }


class ReuseMetrics:
    """Owns the Prometheus objects of one scheduler process. One a process: their names are taken for good."""

    def __init__(self, affixes: Affixes, labels: Mapping[str, Any], registry: Any = None) -> None:
        # prometheus_client looks for its multi-process directory when it is imported: not before SGLang set it.
        import prometheus_client

        self.affixes = affixes
        self.refreshed: dict[Sample, float] = {}
        self._due = 0.0
        self._busy = False
        where = {} if registry is None else {"registry": registry}
        self._children: dict[Sample, Any] = {}
        for metric in METRICS:
            names = [*labels, *metric.labels]
            if metric.kind == "counter":
                parent: Any = prometheus_client.Counter(metric.name, metric.help, names, **where)
            else:
                parent = prometheus_client.Gauge(
                    metric.name, metric.help, names, multiprocess_mode="mostrecent", **where
                )
            for values in _label_values(metric):
                own = dict(zip(metric.labels, values, strict=True))
                self._children[metric.name, values] = parent.labels(**labels, **own)

    def update(self, live: Sequence[LiveRequest], waiting: int, *, busy: bool) -> None:
        """Called before every step, and while idle. Cheap unless a refresh is due."""
        now = time.perf_counter()
        if now < self._due and (busy or not self._busy):
            return
        self._busy = busy
        self.publish(read(self.affixes, live, waiting))
        took = time.perf_counter() - now
        self._due = now + max(INTERVAL_S, _SHARE * took)

    def publish(self, values: Mapping[Sample, float]) -> None:
        """Set gauges, and add to counters what was added since the last time."""
        for sample, value in values.items():
            before = self.refreshed.get(sample)
            if before == value:
                continue
            child = self._children[sample]
            if sample[0].endswith("_total"):
                child.inc(value - (before or 0.0))
            else:
                child.set(value)
        self.refreshed = dict(values)


def _label_values(metric: Metric) -> Iterable[tuple[str, ...]]:
    return [(phase,) for phase in PHASES] if metric.labels else [()]


def build_reuse_metrics(scheduler: Any, affixes: Affixes | None) -> ReuseMetrics | None:
    """The metrics of a scheduler; None where SGLang itself publishes none, or where nothing is reused."""
    if affixes is None or not scheduler.metrics_reporter.current_scheduler_metrics_enabled:
        return None
    return ReuseMetrics(affixes, scheduler.metrics_collector.labels)
