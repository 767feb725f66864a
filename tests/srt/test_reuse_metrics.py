"""Prometheus metrics of reuse, and the debug line of a finished request."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import prometheus_client
import pytest

from sglang_acache.core.reuse import ReuseStats, Stage
from sglang_acache.core.spans import Encode
from sglang_acache.srt import reuse_metrics
from sglang_acache.srt.live_request import LiveRequest
from sglang_acache.srt.request_log import finished_line
from sglang_acache.srt.reuse_metrics import METRICS, PHASES, ReuseMetrics, build_reuse_metrics
from tests.srt.test_span_control import IDS, affixes

LABELS = {"model_name": "m", "tp_rank": 0}
DOCS = Path(__file__).parents[2] / "docs"


class World:
    """Metrics of spans that the test drives, in a registry of their own; the clock is the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(reuse_metrics.time, "perf_counter", lambda: self.now)
        self.registry = prometheus_client.CollectorRegistry()
        self.affixes = affixes()
        self.metrics = ReuseMetrics(self.affixes, LABELS, self.registry)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, {"model_name": "m", "tp_rank": "0", **labels})


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def request(stage: Stage | None) -> LiveRequest:
    reuse = None if stage is None else SimpleNamespace(stage=stage)
    return cast(LiveRequest, SimpleNamespace(reuse=reuse))


class TestMetrics:
    def test_phases(self, world: World) -> None:
        live = [request(stage) for stage in (None, Stage.DENOISING, Stage.PROBING, Stage.ENCODING, Stage.PROBING)]
        world.metrics.update(live, 7, busy=True)
        found = {phase: world.value("acache:requests", phase=phase) for phase in PHASES}
        assert found == {"waiting": 7, "encoding": 1, "probing": 2, "denoising": 2}

    def test_counters_grow_by_what_is_new(self, world: World) -> None:
        world.affixes.counters.tokens_reused = 5
        world.metrics.update([], 0, busy=True)
        world.affixes.counters.tokens_reused = 12
        world.affixes.counters.probe_seconds = 0.5
        world.now += 1
        world.metrics.update([], 0, busy=True)
        world.now += 1
        world.metrics.update([], 0, busy=True)
        assert world.value("acache:tokens_reused_total") == 12
        assert world.value("acache:probe_seconds_total") == 0.5

    def test_spans(self, world: World) -> None:
        tree = world.affixes.tree
        tree.declare("s", IDS, "doc", pinned=True)
        match = tree.locate("s", IDS)
        assert match is not None
        handle = tree.acquire(match)
        assert handle is not None
        for order in tree.begin_work(handle):
            assert isinstance(order, Encode)
            tree.mark_ready(order)
        tree.release(handle)
        world.metrics.update([], 0, busy=False)
        names = ("spans_known", "spans_encoded", *(f"shared_slots_{k}" for k in ("used", "pinned", "evictable", "max")))
        assert [world.value(f"acache:{name}") for name in names] == [1, 1, 50, 50, 0, 200]

    def test_at_most_every_interval(self, world: World) -> None:
        world.metrics.update([], 1, busy=True)
        world.now += 0.1
        world.metrics.update([], 2, busy=True)
        assert world.value("acache:requests", phase="waiting") == 1
        world.now += 0.11
        world.metrics.update([], 3, busy=True)
        assert world.value("acache:requests", phase="waiting") == 3

    def test_at_once_when_work_ends(self, world: World) -> None:
        world.metrics.update([], 1, busy=True)
        world.metrics.update([], 0, busy=False)
        assert world.value("acache:requests", phase="waiting") == 0
        world.metrics.update([], 5, busy=False)
        assert world.value("acache:requests", phase="waiting") == 0, "idle is told once"

    def test_a_slow_refresh_is_rare(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        def slow(*args: Any) -> dict[Any, float]:
            world.now += 0.05
            return {}

        monkeypatch.setattr(reuse_metrics, "read", slow)
        world.metrics.update([], 0, busy=True)
        assert world.metrics._due == pytest.approx(105.0)

    @pytest.mark.parametrize(("enabled", "reuse"), [(False, True), (True, False)])
    def test_not_built(self, enabled: bool, reuse: bool) -> None:
        reporter = SimpleNamespace(current_scheduler_metrics_enabled=enabled)
        scheduler = SimpleNamespace(metrics_reporter=reporter, metrics_collector=SimpleNamespace(labels=LABELS))
        assert build_reuse_metrics(scheduler, affixes() if reuse else None) is None


class TestDocuments:
    def test_every_metric_is_in_the_table(self) -> None:
        rows = re.findall(r"^\| `(acache:[^`{]+)", (DOCS / "operations.md").read_text(), re.MULTILINE)
        assert sorted(rows) == sorted(metric.name for metric in METRICS)

    def test_dashboard(self) -> None:
        board = json.loads((DOCS / "grafana-dashboard.json").read_text())
        panels = [panel for panel in board["panels"] if panel["type"] != "row"]
        assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
        assert all(panel["title"] for panel in board["panels"])
        assert board["templating"]["list"][0]["type"] == "datasource"
        assert all(panel["datasource"]["uid"] == "${datasource}" for panel in panels)
        text = " ".join(target["expr"] for panel in panels for target in panel["targets"])
        used = set(re.findall(r"acache:\w+", text))
        assert used == {metric.name for metric in METRICS}


class TestLine:
    def test_with_reuse(self) -> None:
        stats = ReuseStats(affix_tokens=90, anchor_tokens=18, recompute_tokens=60, recompute_tokens_saved=40)
        stats.probe_ms = 3.14159
        live = SimpleNamespace(
            req=SimpleNamespace(rid="r1", finished_reason=SimpleNamespace(to_json=lambda: {"type": "stop"})),
            canvas_tokens=122,
            reuse=SimpleNamespace(stats=stats),
            state=SimpleNamespace(forward_passes=5, forwarded_tokens=77),
        )
        assert finished_line(cast(LiveRequest, live)) == (
            "finished rid=r1 reason=stop canvas=122 affix=90 anchors=18 recomputed=60 saved=40 forwarded=77 "
            "passes=5 probe_ms=3.1"
        )
