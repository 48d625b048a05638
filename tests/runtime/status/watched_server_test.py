"""A real server, over gRPC, tells observations what there is to see."""

import asyncio

import tornado.httpclient

from tests.runtime.server import example_service as example
from tff_dpftrl.runtime.actors import population
from tff_dpftrl.runtime.protocol import session_stream, wire_pb2
from tff_dpftrl.runtime.status import observations, page


def levels(seen):
    return tuple(int(seen.series.total(name)) for name in observations.LEVELS)


def test_what_devices_do_is_seen_and_what_they_leave_is_nothing(tmp_path):
    task = example.served(goal_count=3, over_selection=2.0, least_fraction=1.0)
    seen = observations.Observations(population.Population(example.POPULATION, (task.task,)))
    figures = seen.tasks["sum"]

    async def story():
        store = example.store_with(task)
        async with example.running(tmp_path, [task], store, observer=seen) as made:
            async with example.channel_to(tmp_path, made.address) as channel:
                stranger = await example.connect(channel)
                await stranger.check_in(population="elsewhere")
                await stranger.status()
                silent = await example.connect(channel)
                streams = [await example.connect(channel) for _ in range(6)]
                for stream in streams[:5]:
                    await stream.check_in()
                await example.until(lambda: levels(seen)[:2] == (7, 5))
                assert levels(seen) == (7, 5, 0)
                await streams[5].check_in()
                attempt = (await streams[0].receive()).attempt
                for stream in streams[1:]:
                    await stream.receive()
                await example.until(lambda: levels(seen) == (7, 0, 6))
                assert figures.phase == "reporting"
                assert figures.attempt.devices == 6
                silent.call.cancel()
                streams[0].call.cancel()
                await streams[1].report("another attempt", b"1")
                await streams[2].report(attempt, b"no integer")
                for stream in streams[3:]:
                    await stream.report(attempt, b"1")
                await example.until(lambda: figures.committed == 1)
                for stream in streams[1:]:
                    await stream.status()
                tell = channel.unary_unary(session_stream.TELL_METHOD)
                summary = wire_pb2.SessionSummary(
                    population=example.POPULATION, shape="-v[]+^", seconds=2.0
                )
                await tell(summary.SerializeToString())
                await example.until(lambda: levels(seen) == (0, 0, 0))
                shown = page.Shown(
                    seen,
                    privacy=lambda name: None,
                    history=lambda name: store.history(example.POPULATION, name),
                )
                status = page.StatusServer([shown])
                await status.start()  # Beside the server, on its loop.
                try:
                    client = tornado.httpclient.AsyncHTTPClient(force_instance=True)
                    answer = await client.fetch(status.address)
                    client.close()
                finally:
                    await status.stop()
                return answer.body.decode()

    text = asyncio.run(story())
    assert seen.series.total("sessions") == 8
    assert seen.refused_sessions.items() == [("unknown population", 1)]
    assert seen.series.total("dropped_participating") == 1
    assert figures.reports["accepted"] == 3
    assert figures.reports["wrong attempt"] == figures.reports["unusable"] == 1
    assert figures.rounds_done == 1
    assert "lease epoch 1" in text
    assert '<th scope="row">-v[]+^</th><td>1</td><td>100.0 %</td>' in text
    assert figures.bytes_sent > 6 * len(example.PLAN_OF_NOW)
    assert figures.bytes_received > 0


def test_who_is_sent_away_by_a_server_that_stops_has_left(tmp_path):
    task = example.served(goal_count=9)
    seen = observations.Observations(population.Population(example.POPULATION, (task.task,)))

    async def story():
        async with example.running(
            tmp_path, [task], example.store_with(task), observer=seen
        ) as made:
            async with example.channel_to(tmp_path, made.address) as channel:
                streams = [await example.connect(channel) for _ in range(3)]
                for stream in streams[:2]:
                    await stream.check_in()
                await example.until(lambda: levels(seen) == (3, 2, 0))
                await made.stop()
                for stream in streams:
                    await stream.status()

    asyncio.run(story())
    assert levels(seen) == (0, 0, 0)
    assert seen.series.total("sent_away") == 2
