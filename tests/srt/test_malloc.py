"""The C library is told to keep large blocks, in whichever way it can."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_acache.srt import malloc


@pytest.mark.parametrize(
    ("largest", "calls", "kept"),
    [
        (1 << 31, [(-3, 1 << 30), (-1, (1 << 31) - 1)], True),
        (1 << 25, [(-3, 1 << 30), (-3, 1 << 25), (-1, (1 << 31) - 1)], False),  # old glibc caps both
        (0, [(-3, 1 << 30), (-3, 1 << 25)], False),
    ],
)
def test_thresholds(monkeypatch: pytest.MonkeyPatch, largest: int, calls: list[Any], kept: bool) -> None:
    asked: list[tuple[int, int]] = []

    def mallopt(knob: int, value: int) -> int:
        asked.append((knob, value))
        return int(value <= largest)

    monkeypatch.setattr(malloc.ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    assert malloc.keep_large_blocks() == kept
    assert asked == calls


def test_a_library_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(malloc.ctypes, "CDLL", lambda name: SimpleNamespace())
    assert not malloc.keep_large_blocks()
