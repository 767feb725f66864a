"""Reports: files written, figures shown with their intervals, failures turned into exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_acache.bench import __main__ as command
from sglang_acache.bench.report import Plot, Report, Series, Table
from sglang_acache.bench.stats import Estimate


def test_a_report_leaves_json_markdown_and_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = Report("demo", tmp_path / "demo", {"out": tmp_path, "rounds": 3})
    report.add(Table("Ratios", ["case", "ratio"], [["a", Estimate(1.5, 1.25, 1.75, 3)]]))
    report.plots.append(Plot("line", "Title", "x", "y", [Series.of("a", [1, 2], [Estimate(1, 0, 2, 3)] * 2)]))
    assert report.write() == 0
    content = json.loads((tmp_path / "demo" / "report.json").read_text())
    assert content["tables"][0]["rows"] == [["a", {"value": 1.5, "low": 1.25, "high": 1.75, "n": 3}]]
    assert {"sglang", "torch", "device", "load_at_start", "load_at_end", "command"} <= content["conditions"].keys()
    assert content["conditions"]["parameters"] == {"rounds": 3}
    assert "| a | 1.50 [1.25, 1.75] |" in (tmp_path / "demo" / "report.md").read_text()
    assert (tmp_path / "demo" / "line.png").stat().st_size > 1000


def test_a_failure_ends_with_code_1(tmp_path: Path) -> None:
    report = Report("demo", tmp_path, {})
    report.fail("2 slots leaked")
    assert report.write() == 1
    assert "2 slots leaked" in (tmp_path / "report.md").read_text()


def test_admission_runs_without_a_server(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    command.main(["admission", "--quick", "--out", str(tmp_path)])
    cells = json.loads((tmp_path / "report.json").read_text())["data"]["cells"]
    assert {(cell["spans"], cell["tokens"]) for cell in cells} == {(10, 250), (10, 1000), (50, 250), (50, 1000)}
    assert all(len(cell["match"]) == 3 for cell in cells)


@pytest.mark.parametrize("name", command.SUBCOMMANDS)
def test_every_subcommand_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main([name, "--help"])
    assert ended.value.code == 0
    assert "--quick" in capsys.readouterr().out


def test_a_fault_is_shown_with_its_exception() -> None:
    from sglang_acache.bench.soak import fault

    lines = ["fine", "ERROR", "Traceback (most recent call last):", *["  call"] * 50, "KeyError: 'x'", "fine"]
    shown = fault(lines, 2)
    assert shown[:3] == ["fine", "ERROR", "Traceback (most recent call last):"]
    assert shown[-1] == "KeyError: 'x'"
    assert len(shown) < 25
