"""Which of several parallel samples (``n`` > 1) a request is."""

from __future__ import annotations

from collections import OrderedDict

KEPT_GROUPS = 4096
"""Groups remembered: samples of a group arrive together, so older ones are complete."""


class SampleNumbers:
    """Counts the samples of a group from 0, in order of arrival, which is the order in which they are answered."""

    def __init__(self) -> None:
        self._next: OrderedDict[str, int] = OrderedDict()

    def take(self, group: str) -> int:
        """The number of the next sample of ``group``; 0 for a request that belongs to none ("")."""
        if not group:
            return 0
        number = self._next.pop(group, 0)
        self._next[group] = number + 1
        if len(self._next) > KEPT_GROUPS:
            self._next.popitem(last=False)
        return number
