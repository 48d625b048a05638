import sys

import pytest

from tff_dpftrl.runtime.status import bounded_counts


def test_only_so_many_labels_get_a_place():
    counts = bounded_counts.BoundedCounts(["known"], room=2)
    for label in ("a", "b", "c", "known", "a", "d" * 61):
        counts.add(label)
    assert counts.items() == [("a", 2), ("other", 2), ("b", 1), ("known", 1)]
    assert counts.total() == 6


def test_long_labels_take_no_place():
    counts = bounded_counts.BoundedCounts(room=1)
    counts.add("x" * 1000)
    counts.add("other")
    counts.add("short")
    assert counts.items() == [("other", 2), ("short", 1)]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
