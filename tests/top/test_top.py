"""The live view: metrics text in, lines out."""

from __future__ import annotations

import io
from typing import Any

import pytest

from sglang_acache import __main__ as command
from sglang_acache.top import run
from sglang_acache.top.frame import printable, rate, render
from sglang_acache.top.source import ServerSource, Snapshot, Unreachable, parse_metrics, refusal

URL = "http://127.0.0.1:30000"
METRICS = """
# HELP acache:requests Requests by phase.
# TYPE acache:requests gauge
acache:requests{model_name="tiny",phase="waiting",tp_rank="0"} 3.0
acache:requests{model_name="tiny",phase="encoding",tp_rank="0"} 0.0
acache:requests{model_name="tiny",phase="probing",tp_rank="0"} 1.0
acache:requests{model_name="tiny",phase="denoising",tp_rank="0"} 12.0
# TYPE acache:tokens_reused_total counter
acache:tokens_reused_total{model_name="tiny",tp_rank="0"} 1200000.0
acache:tokens_reused_total{model_name="tiny",tp_rank="1"} 34567.0
# TYPE acache:tokens_recomputed_total counter
acache:tokens_recomputed_total{model_name="tiny"} 250.0
# TYPE acache:tokens_saved_total counter
acache:tokens_saved_total{model_name="tiny"} 750.0
# TYPE acache:shared_slots_used gauge
acache:shared_slots_used 100.0
# TYPE acache:shared_slots_evictable gauge
acache:shared_slots_evictable 60.0
# TYPE acache:shared_slots_max gauge
acache:shared_slots_max 200.0
"""
SPAN = {
    "name": "doc",
    "source": "declared",
    "length": 1500,
    "pinned": True,
    "readers": 4,
    "hits": 1234,
    "placements": 2,
    "encoded_tokens": 1500,
    "slots": 3000,
    "cache_salt": None,
    "extra_key": None,
}


def snapshot(taken: float = 0.0, spans: list[dict[str, Any]] | None = None, **more: float) -> Snapshot:
    values, model = parse_metrics(METRICS)
    return Snapshot(taken, {**values, **{f"acache:{name}": value for name, value in more.items()}}, model, spans or [])


def frame(now: Snapshot, before: Snapshot | None = None, width: int = 110, height: int = 40) -> list[str]:
    return render(now, before, base_url=URL, width=width, height=height)


class TestFrame:
    def test_whole(self) -> None:
        assert frame(snapshot(spans=[SPAN])) == [
            "sglang-acache top   http://127.0.0.1:30000   tiny",
            "requests   waiting 3   encoding 0   probing 1   denoising 12",
            "",
            "tokens     reused 1,234,567   anchors 0",
            "forwards   recomputed 250   saved 750   share saved 75%",
            "probes     0 tokens   0.0 s",
            "spans      known 0   pieces encoded 0   encodings 0   evicted 0",
            "",
            "slots      [######+++++++++               ] 100 of 200 shared",
            "           # read or pinned 40   + evictable 60   pinned 0",
            "",
            "NAME                                         SOURCE TOKENS READERS    HITS ENCODED   SLOTS PIN",
            "doc                                        declared  1,500       4   1,234   1,500   3,000 yes",
        ]

    def test_rates(self) -> None:
        lines = frame(snapshot(12.0, tokens_reused_total=1500), snapshot(10.0, tokens_reused_total=500))
        assert "tokens     reused 1,500 (+500/s)   anchors 0 (+0/s)" in lines
        assert lines[1].endswith("answers 0 tokens/s")

    def test_rate_after_a_restart(self) -> None:
        assert rate(snapshot(12.0, anchors_total=8), snapshot(10.0, anchors_total=5000), "acache:anchors_total") == 4
        assert rate(snapshot(12.0), None, "acache:anchors_total") is None
        assert rate(snapshot(12.0), snapshot(12.0), "acache:anchors_total") is None

    @pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 8), (20, 3), (1, 1), (300, 100)])
    def test_fits(self, width: int, height: int) -> None:
        lines = frame(snapshot(spans=[{**SPAN, "name": "n" * 200}] * 90), width=width, height=height)
        assert len(lines) <= height
        assert max(map(len, lines)) <= width

    def test_nothing_shared(self) -> None:
        empty = Snapshot(0.0, {})
        assert "forwards   recomputed 0   saved 0   share saved -" in frame(empty)

    def test_names_cannot_steer_the_terminal(self) -> None:
        (row,) = [line for line in frame(snapshot(spans=[{**SPAN, "name": "a\x1b[2J\nb"}])) if "a?" in line]
        assert row.startswith("a?[2J?b")
        assert printable("é 中") == "é 中"

    def test_name_spaces_are_marked(self) -> None:
        assert frame(snapshot(spans=[{**SPAN, "cache_salt": "t"}]))[-1].startswith("doc *")


class TestSource:
    def test_metrics(self) -> None:
        values, model = parse_metrics(METRICS)
        assert (values["acache:requests{denoising}"], model) == (12, "tiny")
        assert values["acache:tokens_reused_total"] == 1_234_567, "ranks are added up"

    @pytest.mark.parametrize(
        ("status", "body", "fix"),
        [
            (401, "", "--api-key"),
            (403, "", "--api-key"),
            (404, "", "serves no diffusion LLM"),
            (400, "start it with --enable-acache", "--enable-acache"),
            (500, "oops", "answers 500: oops"),
        ],
    )
    def test_refusals(self, status: int, body: str, fix: str) -> None:
        assert fix in refusal(URL, status, body)

    @pytest.mark.parametrize("url", ["http://127.0.0.1:1", "127.0.0.1:30000", "nonsense"])
    def test_out_of_reach(self, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert command.main(["top", "--once", "--base-url", url]) == 1
        assert f"error: cannot reach {url}" in capsys.readouterr().err

    def test_key_is_sent(self) -> None:
        assert ServerSource(URL, "k").session.headers["Authorization"] == "Bearer k"

    @pytest.mark.parametrize("interval", ["0", "x", "nan", "1e9"])
    def test_interval_refused(self, interval: str) -> None:
        with pytest.raises(SystemExit):
            command.main(["top", "--interval", interval])


class TestWatch:
    def test_survives_a_restart_of_the_server(self) -> None:
        """Trouble is told below the last frame; Ctrl-C ends it and gives the screen back."""
        answers: list[Snapshot | Unreachable] = [Unreachable("cannot reach it"), snapshot(5.0)]

        class Scripted(ServerSource):
            def snapshot(self) -> Snapshot:
                if not answers:
                    raise KeyboardInterrupt
                answer = answers.pop(0)
                if isinstance(answer, Unreachable):
                    raise answer
                return answer

        out = io.StringIO()
        assert run.watch(Scripted(URL), snapshot(1.0), 1.0, out, sleep=lambda seconds: None) == 0
        assert "cannot reach it - trying again" in out.getvalue()
        assert "(+0/s)" in out.getvalue()
        assert out.getvalue().endswith(run._LEAVE)
