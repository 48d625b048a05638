"""Two populations in one server: shares, rounds of both, and what is refused."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import grpc
import pytest

from tests.runtime.server import example_service as example
from tff_dpftrl.runtime.actors import events, population
from tff_dpftrl.runtime.protocol import session_stream, wire_pb2
from tff_dpftrl.runtime.server import limits as limits_lib
from tff_dpftrl.runtime.server import served_population, server
from tff_dpftrl.runtime.store import sql
from verification import memory_store

_TIMES = {"heartbeat_seconds": 0.1, "silence_seconds": 30.0, "lease_seconds": 60.0}


def _served(whose, notes=None, share=None, **changes):
    task = example.served(**changes)
    return served_population.ServedPopulation(
        population.Population(whose, (task.task,), **_TIMES),
        {task.task.name: task},
        lambda now, randomness: (5.0, 9.0),
        example.Notes() if notes is None else notes,
        share,
    )


async def _check_in(channel, name):
    stream = await example.connect(channel, name)
    await stream.check_in(population=name)
    return stream


async def _take_part(channel, name, update=b"1"):
    _, answer = await example.take_part(channel, update, population=name)
    return answer


def _play(folder, story, *populations, limits=None):
    """Runs a story of a channel, the store and the server."""
    store = memory_store.MemoryStore()
    for one in populations:
        example.store_with(*one.tasks.values(), store=store, population=one.name)

    async def run():
        endpoint = example.endpoint(folder, limits=limits or limits_lib.Limits())
        made = server.Server(populations, store, endpoint=endpoint, progress=lambda line: None)
        await made.start()
        try:
            async with example.channel_to(folder, made.address) as channel:
                await story(channel, store)
        finally:
            await made.stop()

    asyncio.run(asyncio.wait_for(run(), 60))
    return store


def _totals(store, name):
    return [row["total"] for row in store.history(name, "sum")]


def test_rounds_of_two_populations_are_committed_side_by_side(tmp_path):
    a, b = _served("a"), _served("b")

    async def story(channel, store):
        # Nobody selects the second device of "a": its sessions wait, and "b" goes on.
        waiting = await _check_in(channel, "a")
        for i in range(2):
            answers = [_take_part(channel, "b", b"10") for _ in range(2)]
            assert all(answer.accepted for answer in await asyncio.gather(*answers))
            await example.until(lambda i=i: len(_totals(store, "b")) == i + 1)
        assert not _totals(store, "a")
        later = asyncio.ensure_future(_take_part(channel, "a", b"1"))
        configuration = await waiting.receive()
        await waiting.report(configuration.attempt, b"2")
        assert (await waiting.receive()).accepted and (await later).accepted
        await example.until(lambda: a.observer.of(events.RoundReleased))
        assert not a.observer.of(events.RoundLost) and not b.observer.of(events.RoundLost)

    store = _play(tmp_path, story, a, b)
    # The tasks have the same name, and nothing else in common.
    assert (_totals(store, "a"), _totals(store, "b")) == ([3], [20, 20])
    leaders = {name: store.lease(name) for name in ("a", "b")}
    assert all(lease.epoch == 1 and not lease.owner for lease in leaders.values())
    for one, rounds in ((a, 1), (b, 2)):
        told = one.observer.of(events.RoundReleased)
        assert [event.round_index for event in told] == list(range(rounds))
        assert len(one.observer.named("configured")) == 2 * rounds


def test_the_challenge_names_the_round_of_the_populations_own_task(tmp_path):
    async def story(channel, store):
        for name, task in (("a", "sum"), ("b", "other")):

            async def opened(name=name):
                return (await example.connect(channel, name)).challenge

            for _ in range(200):
                challenge = await opened()
                if challenge.task:
                    break
                await asyncio.sleep(0.01)
            assert challenge.task == task

    other = _served("b", name="other")
    _play(tmp_path, story, _served("a"), other)


def test_a_flood_of_one_populations_devices_does_not_starve_the_other(tmp_path):
    a, b = _served("a", goal_count=1000), _served("b", share=0.25)
    limits = limits_lib.Limits(sessions=16, check_ins_per_second=1000.0)

    async def story(channel, store):
        held, refused = [], 0
        for _ in range(40):
            try:
                held.append(await _check_in(channel, "a"))
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                refused += 1
        # Four places are of "b", four of "a", and eight of whoever comes first.
        assert (len(held), refused) == (12, 28)
        answers = [_take_part(channel, "b") for _ in range(2)]
        assert all(answer.accepted for answer in await asyncio.gather(*answers))
        await example.until(lambda: _totals(store, "b"))

    _play(tmp_path, story, a, b, limits=limits)
    assert ("refused", "too many sessions") in a.observer.calls
    assert not b.observer.named("refused")


def test_check_ins_beyond_the_rate_of_one_population_do_not_starve_the_other(tmp_path):
    a, b = _served("a", goal_count=1000, share=0.5), _served("b", share=0.5)
    limits = limits_lib.Limits(check_ins_per_second=8.0)

    async def story(channel, store):
        streams = [await _check_in(channel, "a") for _ in range(12)]
        await example.until(lambda: ("sent away", "too many devices check in") in a.observer.calls)
        answers = [_take_part(channel, "b") for _ in range(2)]
        assert all(answer.accepted for answer in await asyncio.gather(*answers))
        assert streams

    _play(tmp_path, story, a, b, limits=limits)


@pytest.mark.parametrize("is_named", [True, False])
def test_a_device_of_an_unknown_population_is_told_so(tmp_path, is_named):
    async def story(channel, store):
        if is_named:
            stream = None
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                stream = await example.connect(channel, "c")
            assert stream is None
            assert raised.value.code() is grpc.StatusCode.NOT_FOUND
            assert raised.value.details().startswith("there is no such population here")
            stream = await example.connect(
                channel, "a"
            )  # And it may not say another one afterwards.
            await stream.check_in(population="b")
            assert (await stream.status())[0] is grpc.StatusCode.NOT_FOUND
            return
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await example.connect(channel)
        assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "several populations" in raised.value.details()

    _play(tmp_path, story, _served("a"), _served("b"))


def test_a_summary_counts_for_its_own_population(tmp_path):
    a, b = _served("a"), _served("b")

    async def story(channel, store):
        tell = channel.unary_unary(session_stream.TELL_METHOD)
        await example.connect(channel, "b")
        await tell(wire_pb2.SessionSummary(population="b", shape="-#").SerializeToString())
        with pytest.raises(grpc.aio.AioRpcError, match="there is no such population"):
            await tell(wire_pb2.SessionSummary(population="c", shape="-#").SerializeToString())

    _play(tmp_path, story, a, b)
    assert b.observer.named("session_summarized") and not a.observer.named("session_summarized")


def test_no_server_leads_a_population_of_another_one(tmp_path):
    a, b, other = _served("a"), _served("b"), _served("b")

    async def story(channel, store):
        second = server.Server(
            [other], store, endpoint=example.endpoint(tmp_path), progress=lambda line: None
        )
        with pytest.raises(server.ServerError, match="Another server leads the population 'b'"):
            await second.start()

    _play(tmp_path, story, a, b)


def test_of_two_servers_that_live_one_leads_all_populations(tmp_path):
    ahead = 0.0  # Seconds by which the clock of the second server is ahead.
    options = {"endpoint": example.endpoint(tmp_path), "progress": lambda line: None}

    def populations(silence):
        times = _TIMES | {"silence_seconds": silence}
        made = [_served(name) for name in ("b", "a")]
        return [
            dataclasses.replace(one, population=dataclasses.replace(one.population, **times))
            for one in made
        ]

    async def run(one_store, two_store):
        nonlocal ahead
        first = server.Server(populations(0.2), one_store, **options)
        second = server.Server(
            populations(30.0), two_store, clock=lambda: time.time() + ahead, **options
        )

        def leads(who, name):
            return who._engine.has_led(one_store.lease(name).owner)

        await first.start()
        try:
            assert leads(first, "a") and leads(first, "b")
            ahead = 100.0  # As if the first server had been stopped past its leases of 60 seconds.
            await second.start()
            assert leads(second, "a") and leads(second, "b")
            ahead = 0.0
            lost = one_store.lease("a")
            one_store.release("a", lost.owner, lost.epoch)
            await example.until(lambda: leads(first, "a"))
            await example.until(lambda: leads(first, "b"))
        finally:
            await second.stop()
            await first.stop()

    with sql.SqlStore(tmp_path / "store") as one, sql.SqlStore(tmp_path / "store") as two:
        for name in ("a", "b"):
            example.store_with(example.served(), store=one, population=name)
        asyncio.run(asyncio.wait_for(run(one, two), 60))


@pytest.mark.parametrize(
    ("shares", "names", "text"),
    [
        ((0.7, 0.4), "ab", "shares are 1.1 together"),
        ((1.0, 0.0), "ab", "shares leave nothing for 'b': lower the others"),
        ((1.2, None), "ab", "share of 'a' must be"),
        ((-0.1, None), "ab", "share of 'a' must be"),
        ((None, None), "aa", "must be distinct"),
        ((), "", "at least one"),
    ],
)
def test_populations_that_cannot_be_served_together_are_named(tmp_path, shares, names, text):
    populations = [_served(name, share=share) for name, share in zip(names, shares, strict=True)]
    with pytest.raises(ValueError, match=text):
        server.Server(populations, memory_store.MemoryStore(), endpoint=example.endpoint(tmp_path))


def test_shares_are_even_parts_of_one_half_unless_given():
    populations = [_served("a"), _served("b"), _served("c", share=0.5)]
    shares = served_population.shares(populations)
    assert shares == pytest.approx({"a": 1 / 6, "b": 1 / 6, "c": 0.5})
    assert served_population.shares(populations[:1]) == {"a": 0.0}
    with pytest.raises(ValueError, match="must have those of the population"):
        dataclasses.replace(populations[0], tasks={})
