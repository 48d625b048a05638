import asyncio

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


def test_a_population_has_its_share_and_the_rest_is_for_whoever_comes_first():
    quota = limits.Quota(10, 20.0, {"a": 0.2, "b": 0.5}, lambda: 0.0)
    assert [quota.take_place("a") for _ in range(7)] == [True] * 5 + [False] * 2  # Two, and three.
    assert [quota.take_place("b") for _ in range(6)] == [True] * 5 + [False]
    quota.give_back_place("a")  # One of the common places.
    assert quota.take_place("b") and not quota.take_place("a")
    quota.give_back_place("b")
    assert quota.take_place("a")
    # Of the check-ins in a second, 4 are of "a", 10 of "b", and 6 of both.
    assert [quota.arrives("a") for _ in range(11)] == [True] * 10 + [False]
    assert [quota.arrives("b") for _ in range(11)] == [True] * 10 + [False]


def test_a_population_alone_has_all_places():
    quota = limits.Quota(3, 2.0, {"a": 0.0}, lambda: 0.0)
    assert [quota.take_place("a") for _ in range(4)] == [True] * 3 + [False]
    assert [quota.arrives("a") for _ in range(3)] == [True] * 2 + [False]


def test_shares_of_a_whole_leave_nothing_in_common():
    quota = limits.Quota(4, 4.0, {"a": 0.5, "b": 0.5}, lambda: 0.0)
    assert [quota.take_place("a") for _ in range(3)] == [True] * 2 + [False]
    assert [quota.arrives("b") for _ in range(3)] == [True] * 2 + [False]


def test_room_is_given_in_order_and_to_nobody_who_is_gone():
    async def story():
        room = limits.Room(10)
        got = []

        async def take(name, num_bytes):
            await room.take(num_bytes)
            got.append(name)

        await take("a", 6)
        waiting = [asyncio.ensure_future(take(*who)) for who in (("b", 100), ("c", 3), ("d", 1))]
        await asyncio.sleep(0)
        assert got == ["a"]  # "c" would have room, and comes after "b", who takes all there is.
        waiting[0].cancel()
        await asyncio.gather(*waiting[1:])
        assert got == ["a", "c", "d"]
        waiting = [asyncio.ensure_future(take("e", 100))]
        for num_bytes in (6, 3):
            room.give_back(num_bytes)
            await asyncio.sleep(0)
            assert "e" not in got
        room.give_back(1)
        await asyncio.gather(*waiting)
        # Whose turn has come in the moment in which it goes gives it back.
        waiting = asyncio.ensure_future(take("f", 10))
        await asyncio.sleep(0)
        room.give_back(100)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await take("g", 10)
        assert got[-2:] == ["e", "g"]

    asyncio.run(asyncio.wait_for(story(), 10))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sessions", 0),
        ("sessions_per_address", 0),
        ("sessions_per_connection", -1),
        ("sending_bytes", 0),
        ("check_ins_per_second", 0.0),
        ("check_in_seconds", float("nan")),
        ("keepalive_seconds", -1.0),
    ],
)
def test_senseless_limits_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        limits.Limits(**{name: value})
