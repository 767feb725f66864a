"""Medians, intervals and ratios: every figure that a report shows goes through here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 95% interval over ``n`` samples."""

    value: float
    low: float
    high: float
    n: int

    def text(self, digits: int = 2, scale: float = 1.0, unit: str = "") -> str:
        if math.isnan(self.value):
            return "-"
        low, high = sorted((self.low * scale, self.high * scale))
        return f"{self.value * scale:.{digits}f}{unit} [{low:.{digits}f}, {high:.{digits}f}]"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def bootstrap(
    samples: Sequence[float] | np.ndarray, statistic: Callable[..., np.ndarray] = np.median, seed: int = 0
) -> Estimate:
    """``statistic`` (called with ``axis=``) of the samples, with a percentile bootstrap interval."""
    values = np.asarray(samples, dtype=np.float64)
    if not len(values):
        return Estimate(math.nan, math.nan, math.nan, 0)
    draws = np.random.default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))
    spread = statistic(values[draws], axis=1)
    low, high = np.quantile(spread, [0.025, 0.975])
    return Estimate(float(statistic(values, axis=0)), float(low), float(high), len(values))


def paired_ratio(above: Sequence[float], below: Sequence[float]) -> Estimate:
    """Median of ``above[i] / below[i]``, where round i of a run measured both."""
    return bootstrap(np.asarray(above, dtype=np.float64) / np.asarray(below, dtype=np.float64))


def mean_difference(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """Mean of ``first[i] - second[i]``, where both answered question i."""
    return bootstrap(np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64), np.mean)


def wilson(right: int, n: int, z: float = 1.96) -> Estimate:
    """A share of ``right`` out of ``n`` with its 95% Wilson interval."""
    if n == 0:
        return Estimate(math.nan, math.nan, math.nan, 0)
    share, spread = right / n, z * z / n
    middle = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / n + spread / (4 * n)) / (1 + spread)
    return Estimate(share, max(0.0, middle - half), min(1.0, middle + half), n)


def percentiles(samples: Sequence[float], points: Sequence[float] = (50, 95, 99)) -> dict[str, float]:
    """``{"p50": ..., "p95": ..., ...}``; empty for no samples."""
    if not samples:
        return {}
    values = np.percentile(np.asarray(samples, dtype=np.float64), points)
    return {f"p{point:g}": float(value) for point, value in zip(points, values, strict=True)}
