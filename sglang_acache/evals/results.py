"""From lm-eval's results to rows: accuracy with its interval, and agreement with full recompute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sglang_acache.bench.report import Plot, Series, Table
from sglang_acache.bench.stats import Estimate, bootstrap, mean_difference, wilson

FULL = 1.0
"""The anchor ratio that recomputes everything: what the other ratios are compared with."""


@dataclass
class Cell:
    """One task, position and anchor ratio."""

    task: str
    position: str
    ratio: float
    seconds: float = 0.0
    hits: int = 0
    scores: dict[str, list[float]] = field(default_factory=dict)
    answers: list[str] = field(default_factory=list)


def read_samples(
    samples: Sequence[Mapping[str, Any]], metrics: Sequence[str]
) -> tuple[dict[str, list[float]], list[str]]:
    """Scores by metric and answers, in the order of the documents, from lm-eval's logged samples."""
    ordered = sorted(samples, key=lambda sample: sample["doc_id"])
    scores = {name: [float(sample[name]) for sample in ordered] for name in metrics}
    return scores, [str(sample["resps"][0][0]) for sample in ordered]


def accuracy(scores: Sequence[float]) -> Estimate:
    """Mean with a 95% interval: Wilson's for rights and wrongs, else a bootstrap's."""
    if set(scores) <= {0.0, 1.0}:
        return wilson(int(sum(scores)), len(scores))
    return bootstrap(scores, np.mean)


def table(task: str, cells: Sequence[Cell]) -> Table:
    metrics = list(cells[0].scores)
    columns = ["position", "ratio", "n", *metrics, f"{metrics[0]} - full", "answers as full", "span reads", "seconds"]
    made = Table(
        task,
        columns,
        note=f"Intervals: 95%. full: anchor ratio {FULL:g}, in the same position. Span reads: requests that read "
        "shared K/V, as the server counts them (0 at ratio 1: nothing is reused). Seconds: the whole run, lm-eval's "
        "own work included.",
    )
    for cell in cells:
        full = _full(cells, cell.position)
        difference = same = "-"
        if full is not None and len(full.answers) == len(cell.answers):
            difference = mean_difference(cell.scores[metrics[0]], full.scores[metrics[0]]).text()
            same = f"{np.mean([a == b for a, b in zip(cell.answers, full.answers, strict=True)]):.3f}"
        shown = [accuracy(cell.scores[name]).text(3) for name in metrics]
        row = [cell.position, f"{cell.ratio:g}", len(cell.answers), *shown, difference, same, cell.hits]
        made.rows.append([*row, f"{cell.seconds:.0f}"])
    return made


def plot(task: str, cells: Sequence[Cell]) -> Plot:
    metric = next(iter(cells[0].scores))
    series = []
    for position in dict.fromkeys(cell.position for cell in cells):
        mine = sorted((cell for cell in cells if cell.position == position), key=lambda cell: cell.ratio)
        estimates = [accuracy(cell.scores[metric]) for cell in mine]
        series.append(Series.of(position, [cell.ratio for cell in mine], estimates))
    return Plot(task, f"{task}: {metric} by anchor ratio", "anchor ratio", metric, series)


def _full(cells: Sequence[Cell], position: str) -> Cell | None:
    return next((cell for cell in cells if cell.position == position and cell.ratio == FULL), None)
