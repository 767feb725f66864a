"""What a benchmark leaves behind: ``report.json`` (everything), ``report.md`` (tables) and PNG plots."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sglang_acache.bench.stats import Estimate

PACKAGES = ("sglang", "sglang-acache", "torch", "transformers", "numpy")
COLUMN_GAP = " | "


@dataclass
class Table:
    """``rows`` are cells in the order of ``columns``; an ``Estimate`` cell is shown with its interval."""

    title: str
    columns: Sequence[str]
    rows: list[list[Any]] = field(default_factory=list)
    note: str = ""

    def markdown(self) -> str:
        lines = [f"## {self.title}", ""]
        lines += [f"| {COLUMN_GAP.join(self.columns)} |", f"|{'---|' * len(self.columns)}"]
        lines += [f"| {COLUMN_GAP.join(cell_text(cell) for cell in row)} |" for row in self.rows]
        return "\n".join([*lines, "", *([self.note, ""] if self.note else [])])


@dataclass(frozen=True)
class Series:
    """One line of a plot. ``low`` and ``high`` draw an interval; ``style`` is matplotlib's format."""

    label: str
    x: Sequence[Any]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    style: str = "o-"

    @classmethod
    def of(cls, label: str, x: Sequence[Any], estimates: Sequence[Estimate], scale: float = 1.0) -> Series:
        """A line of estimates with their intervals."""
        value, low, high = (
            [scale * getattr(estimate, part) for estimate in estimates] for part in ("value", "low", "high")
        )
        return cls(label, x, value, low, high)


@dataclass(frozen=True)
class Plot:
    name: str
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False


class Report:
    """Collects tables, plots and raw data of one subcommand and writes them into ``folder``."""

    def __init__(self, name: str, folder: Path, parameters: Mapping[str, Any]) -> None:
        self.name = name
        self.folder = folder
        shown = {key: value for key, value in parameters.items() if key not in ("out", "command")}
        self.conditions = {**conditions(), "parameters": shown}
        self.tables: list[Table] = []
        self.plots: list[Plot] = []
        self.data: dict[str, Any] = {}
        self.failures: list[str] = []

    def add(self, table: Table) -> Table:
        self.tables.append(table)
        return table

    def fail(self, problem: str) -> None:
        """Something is wrong (not merely slow): the subcommand ends with a non-zero code."""
        self.failures.append(problem)

    def write(self) -> int:
        """Write all files and print the tables; returns the exit code."""
        self.conditions["load_at_end"] = _load()
        self.folder.mkdir(parents=True, exist_ok=True)
        content = {
            "benchmark": self.name,
            "conditions": self.conditions,
            "tables": [asdict(table) for table in self.tables],
            "data": self.data,
            "failures": self.failures,
        }
        (self.folder / "report.json").write_text(json.dumps(content, indent=1, default=_jsonable) + "\n")
        text = self.markdown()
        (self.folder / "report.md").write_text(text + "\n")
        for plot in self.plots:
            draw(plot, self.folder / f"{plot.name}.png")
        print(f"\n{text}\n\nwritten to {self.folder}")
        return 1 if self.failures else 0

    def markdown(self) -> str:
        lines = [f"# {self.name}", "", *(f"- {key}: {_plain(value)}" for key, value in self.conditions.items()), ""]
        lines += [table.markdown() for table in self.tables]
        lines += [f"![{plot.title}]({plot.name}.png)\n" for plot in self.plots]
        if self.failures:
            lines += ["## Failures", "", *(f"- {problem}" for problem in self.failures), ""]
        return "\n".join(lines).rstrip()


def conditions() -> dict[str, Any]:
    """Under what a figure was measured."""
    import torch

    return {
        "command": shlex.join(["python", "-m", "sglang_acache.bench", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else f"CPU: {_cpu_name()}",
        "cpus": os.cpu_count(),
        "load_at_start": _load(),
    }


def cell_text(cell: Any) -> str:
    if isinstance(cell, Estimate):
        return cell.text()
    if isinstance(cell, float):
        return f"{cell:.3g}" if abs(cell) < 10 else f"{cell:.1f}"
    return str(cell)


def draw(plot: Plot, path: Path) -> None:
    """Nothing is drawn, with a word why, where matplotlib is not installed: the figures are in the other files."""
    try:
        import matplotlib
    except ImportError:
        print(f"no {path.name}: plots need matplotlib (pip install '.[bench]')", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for line in plot.series:
        (drawn,) = axes.plot(line.x, line.y, line.style, label=line.label)
        if line.low is not None and line.high is not None:
            axes.fill_between(line.x, line.low, line.high, alpha=0.15, color=drawn.get_color())
    if plot.log_x:
        axes.set_xscale("log", base=2)
    axes.set(title=plot.title, xlabel=plot.x_label, ylabel=plot.y_label)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _plain(value: Any) -> str:
    return ", ".join(f"{key}={item}" for key, item in value.items()) if isinstance(value, dict) else str(value)


def _jsonable(value: Any) -> Any:
    if isinstance(value, Estimate):
        return value.as_dict()
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _load() -> str:
    return f"{os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else "unknown"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
