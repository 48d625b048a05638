"""What those reach who have no key, no token and no file of the server, but its ports."""

from __future__ import annotations

import asyncio

import grpc

from tests.runtime.server import example_service as example
from tff_dpftrl.runtime.actors import population
from tff_dpftrl.runtime.protocol import session_stream, wire_pb2
from tff_dpftrl.runtime.status import observations


async def _tells(channel, shape):
    summary = wire_pb2.SessionSummary(population=example.POPULATION, shape=shape, seconds=1.0)
    try:
        await channel.unary_unary(session_stream.TELL_METHOD)(summary.SerializeToString())
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        return False
    return True


def test_no_more_sessions_are_told_of_than_there_were(tmp_path):
    """Whoever invents sessions displaces no more of them than devices have had."""
    tasks = (example.served(),)
    store = example.store_with(*tasks)

    async def scenario():
        members = tuple(task.task for task in tasks)
        seen = observations.Observations(population.Population(example.POPULATION, members))
        async with (
            example.running(tmp_path, tasks, store, observer=seen) as server,
            example.channel_to(tmp_path, server.address) as channel,
        ):
            invented = [await _tells(channel, shape) for shape in ("-v[*", "-#") for _ in range(50)]
            assert not any(invented) and seen.session_table.total == 0
            for told in (2, 4):
                await asyncio.gather(*(example.take_part(channel) for _ in range(2)))
                answers = [await _tells(channel, "-v[*") for _ in range(50)]
                assert sum(answers) == 2
                assert seen.session_table.rows() == [("-v[*", told, 100.0)]

    asyncio.run(asyncio.wait_for(scenario(), 60))
