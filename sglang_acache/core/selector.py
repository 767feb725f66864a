"""Which tokens of an affix a request recomputes: its anchors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sglang_acache.core.params import ParamError
from sglang_acache.core.registry import Registry

Needs = Literal["none", "attention", "attention_affix", "kv_deviation"]
Scores = npt.NDArray[np.float64]
Positions = npt.NDArray[np.int64]
Ratio = float | str | Decimal | Fraction


@dataclass(frozen=True)
class Selector:
    """A named way to choose K of L affix tokens.

    needs: which scores the caller must supply ("none": no probe has to run). rank(scores, length, seed) gives int64[L],
    all positions, most wanted first. falling: it prefers high scores, so that ``coverage`` has a meaning.
    """

    name: str
    needs: Needs
    rank: Callable[[Scores, int, Sequence[int]], Positions]
    falling: bool = True


SELECTORS: Registry[Selector] = Registry("selector")


def _highest(scores: Scores, length: int, seed: Sequence[int]) -> Positions:
    return np.argsort(-scores, kind="stable")  # stable: ties to the lower index; NaN last


def _lowest(scores: Scores, length: int, seed: Sequence[int]) -> Positions:
    return np.argsort(scores, kind="stable")


def _first(scores: Scores, length: int, seed: Sequence[int]) -> Positions:
    return np.arange(length)


def _random(scores: Scores, length: int, seed: Sequence[int]) -> Positions:
    return np.random.default_rng(seed).permutation(length)


for _selector in (
    Selector("attention", "attention", _highest),
    Selector("attention_affix", "attention_affix", _highest),
    Selector("bottom", "attention", _lowest, falling=False),
    Selector("kv_deviation", "kv_deviation", _highest),
    Selector("random", "none", _random, falling=False),
    Selector("first", "none", _first, falling=False),
):
    SELECTORS.register(_selector.name, _selector)


def exact_ratio(ratio: Ratio, field: str = "anchor_ratio") -> Fraction:
    """The ratio as its decimal text says, so that 0.07 of 100 is 7 and not 7.000000000000001.
    ParamError unless it is a number in [0, 1]."""
    try:
        if isinstance(ratio, bool):
            raise ValueError
        exact = ratio if isinstance(ratio, Fraction) else _fraction(str(ratio))
    except (ValueError, ZeroDivisionError):
        raise ParamError(field, f"must be a number between 0 and 1, got {ratio!r}") from None
    if not 0 <= exact <= 1:
        raise ParamError(field, f"must be between 0 and 1, got {ratio!r}")
    return exact


@lru_cache(maxsize=256)
def _fraction(text: str) -> Fraction:
    return Fraction(text)


def anchor_count(length: int, ratio: Ratio) -> int:
    """K = min(ceil(ratio * length), length), in exact arithmetic."""
    return math.ceil(exact_ratio(ratio) * length)


@dataclass(frozen=True)
class AnchorPolicy:
    """How a request chooses its anchors, for its whole life.

    The budget is per span: each span of length L gets its own K = min(ceil(ratio * L), L), never a share of
    another span's.

    coverage: take only as many of the K as are needed for their scores to sum to this part of the span's
    total.
    drop_non_anchors: an ablation for the runner: affix entries that are no anchors are left out of attention.
    seed: of the request, used by ``random`` only, together with where the span starts.
    Raises ValueError naming the field, as requests spell it, when made with bad values.
    """

    selector: str = "attention"
    ratio: Ratio = 0.2
    coverage: Ratio | None = None
    drop_non_anchors: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        selector = SELECTORS[self.selector]
        exact_ratio(self.ratio)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise ParamError("seed", f"must be an integer >= 0, got {self.seed!r}")
        if self.coverage is not None:
            exact_ratio(self.coverage, "coverage")
            if not selector.falling:
                raise ParamError("coverage", f"has no meaning with selector {self.selector!r}")

    @property
    def needs(self) -> Needs:
        """Scores that have to be computed. None at ratio 0 and 1, where the answer is known beforehand,
        unless coverage may take fewer."""
        fixed = exact_ratio(self.ratio) == 0 or (exact_ratio(self.ratio) == 1 and self.coverage is None)
        return "none" if fixed else SELECTORS[self.selector].needs

    def select(self, length: int, scores: npt.ArrayLike | None = None, start: int = 0) -> Positions:
        """int64[K], ascending positions within the span.

        scores: [length], importance by position, required when ``needs`` is not "none". NaN ranks last: a model
        that computes it is broken, the server is not. start: canvas position of the span.
        """
        budget = anchor_count(length, self.ratio)
        values = self._values(length, scores)
        order = SELECTORS[self.selector].rank(values, length, (self.seed, start))
        if self.coverage is not None and self.needs != "none":
            budget = min(budget, _covering(values[order], exact_ratio(self.coverage)))
        return np.sort(order[:budget]).astype(np.int64)

    def _values(self, length: int, scores: npt.ArrayLike | None) -> Scores:
        if self.needs == "none":
            return np.zeros(length)
        if scores is None:
            raise ValueError(f"selector {self.selector!r} needs {self.needs} scores")
        values: npt.NDArray[Any] = np.asarray(scores, np.float64)
        if values.shape != (length,):
            raise ValueError(f"scores must have shape ({length},), not {values.shape}")
        return values


def _covering(falling: Scores, part: Fraction) -> int:
    """Smallest K whose first K scores sum to ``part`` of the total; negative scores and NaN count nothing."""
    sums = np.cumsum(np.clip(np.where(np.isnan(falling), 0.0, falling), 0.0, 1e30))
    if not len(sums) or sums[-1] == 0 or part == 0:
        return 0
    return int(np.searchsorted(sums, float(part) * sums[-1], side="left")) + 1
