"""Per-request diffusion parameters: what a client may set, how it is checked, what it defaults to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sglang_acache.core.policy import CACHE_POLICIES

REMASKING_RULES = ("low_confidence", "random", "maskgit_plus", "topk_margin", "entropy", "origin")


class ParamError(ValueError):
    """A request or launch value that cannot be honoured; names the field and the fix."""

    def __init__(self, field: str, problem: str) -> None:
        self.field = field
        super().__init__(f"{field}: {problem}")


@dataclass(frozen=True, slots=True)
class DiffusionParams:
    """How one request is denoised (method sections 1-3).

    Exactly one of ``steps`` (denoising steps over the whole generation region), ``threshold`` and ``factor`` is set.
    """

    block_length: int = 32
    steps: int | None = None
    threshold: float | None = 0.9
    factor: float | None = None
    remasking: str = "low_confidence"
    cache: str = "dual"


FIELDS = ("block_length", "steps", "threshold", "factor", "remasking", "cache")
_SCHEDULE = ("steps", "threshold", "factor")


def override(
    defaults: DiffusionParams, values: Mapping[str, Any], known: Sequence[str] = FIELDS
) -> DiffusionParams:
    """``defaults`` with a client's ``values`` (keys of ``FIELDS``) checked and applied.

    Naming one of steps / threshold / factor replaces the default schedule; naming two is an error. ``known`` is what
    the error for an unknown key lists.

    Raises:
        ParamError: unknown key, wrong type or range, or two schedules.
    """
    for key in values:
        if key not in FIELDS:
            raise ParamError(str(key), f"unknown parameter; known are {', '.join(known)}")
    checked = {key: _CHECKS[key](key, value) for key, value in values.items() if value is not None}
    schedules = [key for key in _SCHEDULE if key in checked]
    if len(schedules) > 1:
        raise ParamError(schedules[1], f"cannot be combined with {schedules[0]}; give one of {', '.join(_SCHEDULE)}")
    if schedules:
        checked = {**dict.fromkeys(_SCHEDULE), **checked}
    return replace(defaults, **checked)


def check_integer(field: str, value: Any, minimum: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParamError(field, f"must be an integer >= {minimum}, got {value!r}")
    if value < minimum:
        raise ParamError(field, f"must be >= {minimum}, got {value}")
    return value


def check_number(field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ParamError(field, f"must be a finite number, got {value!r}")
    return float(value)


def check_fraction(field: str, value: Any) -> float:
    number = check_number(field, value)
    if not 0.0 <= number <= 1.0:
        raise ParamError(field, f"must be between 0 and 1, got {value!r}")
    return number


def check_choice(field: str, value: Any, choices: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise ParamError(field, f"must be one of {', '.join(choices)}, got {value!r}")
    return value


def _check_factor(field: str, value: Any) -> float:
    number = check_number(field, value)
    if number <= 0:
        raise ParamError(field, f"must be > 0, got {value!r}")
    return number


_CHECKS: dict[str, Any] = {
    "block_length": check_integer,
    "steps": check_integer,
    "threshold": check_fraction,
    "factor": _check_factor,
    "remasking": lambda field, value: check_choice(field, value, REMASKING_RULES),
    "cache": lambda field, value: check_choice(field, value, tuple(CACHE_POLICIES.names())),
}
