import sys

import pytest

from tff_dpftrl.runtime.server import limits


def test_a_bucket_lets_so_many_pass_in_a_second():
    now = [0.0]
    bucket = limits.TokenBucket(5, lambda: now[0])
    assert [bucket.take() for _ in range(7)] == [True] * 5 + [False] * 2
    now[0] = 0.4
    assert [bucket.take() for _ in range(3)] == [True, True, False]
    now[0] = 100.0  # No more than a second's worth is saved.
    assert sum(bucket.take() for _ in range(20)) == 5


def test_a_slow_bucket_lets_one_pass_now_and_then():
    now = [0.0]
    bucket = limits.TokenBucket(0.1, lambda: now[0])
    assert [bucket.take(), bucket.take()] == [True, False]
    now[0] = 9.0
    assert not bucket.take()
    now[0] = 10.5
    assert bucket.take()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sessions", 0),
        ("sending_bytes", 0),
        ("check_ins_per_second", 0.0),
        ("check_in_seconds", float("nan")),
        ("keepalive_seconds", -1.0),
    ],
)
def test_senseless_limits_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        limits.Limits(**{name: value})


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
