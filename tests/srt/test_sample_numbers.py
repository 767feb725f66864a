"""Parallel samples are numbered in order of arrival, by group."""

from sglang_acache.srt.sample_numbers import KEPT_GROUPS, SampleNumbers


def test_by_group() -> None:
    numbers = SampleNumbers()
    assert [numbers.take(group) for group in ("a", "b", "a", "", "a", "", "b")] == [0, 0, 1, 0, 2, 0, 1]


def test_old_groups_are_forgotten() -> None:
    numbers = SampleNumbers()
    numbers.take("old")
    for index in range(KEPT_GROUPS):
        numbers.take(str(index))
    assert len(numbers._next) == KEPT_GROUPS
    assert numbers.take("old") == 0
