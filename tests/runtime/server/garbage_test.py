import asyncio
import gc

import pytest

from tests.runtime.server import example_service as example
from tff_dpftrl.runtime.server import garbage


@pytest.fixture
def thresholds():
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)  # Python's own.
    yield gc.get_threshold()
    gc.set_threshold(*before)
    gc.unfreeze()


def test_what_is_alive_is_left_alone(thresholds, monkeypatch):
    collected = []
    with monkeypatch.context() as patch:  # All the modules of other tests took seconds.
        patch.setattr(gc, "collect", lambda: collected.append(gc.get_freeze_count()))
        garbage.settle()
    assert len(collected) == 1 and gc.get_freeze_count() > max(1000, collected[0])
    assert gc.get_threshold()[0] > thresholds[0]


@pytest.mark.slow
def test_sessions_leave_next_to_no_cycles_behind(tmp_path):
    """Which `settle` relies on: a server's memory would grow."""
    task = example.served(goal_count=20)

    async def story():
        store = example.store_with(task)
        async with example.running(tmp_path, [task], store) as server:
            async with example.channel_to(tmp_path, server.address) as channel:

                async def a_round(number):
                    got = await asyncio.gather(*(example.take_part(channel) for _ in range(20)))
                    assert all(answer.accepted for _, answer in got)
                    await example.until(lambda: len(example.totals(store)) == number)

                await a_round(1)
                gc.collect()
                gc.disable()
                await a_round(2)
                return gc.collect()

    try:
        num_objects = asyncio.run(asyncio.wait_for(story(), 60))
    finally:
        gc.enable()
    assert (
        num_objects < 20 * 8
    )  # The client's half included; a session in a cycle has more than 20.
