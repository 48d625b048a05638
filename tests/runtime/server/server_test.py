import asyncio
import dataclasses

import grpc
import pytest

from tests.runtime.server import example_service as example
from tff_dpftrl.runtime.actors import events
from tff_dpftrl.runtime.protocol import wire_pb2
from tff_dpftrl.runtime.server import server
from tff_dpftrl.runtime.store import interface, sql
from verification import memory_store


async def a_round(folder, address, num_devices=2):
    async with example.channel_to(folder, address) as channel:
        return await asyncio.gather(*(example.take_part(channel) for _ in range(num_devices)))


def test_rounds_go_on_where_the_last_server_has_stopped(tmp_path):
    task = example.served()

    async def story():
        with sql.SqlStore(tmp_path / "store") as store:
            example.store_with(task, store=store)
            for i in range(2):  # The second one starts at once: the lease was given back.
                waits = []
                async with example.running(tmp_path, [task], store, progress=waits.append) as made:
                    for configuration, answer in await a_round(tmp_path, made.address):
                        assert configuration.round_index == i
                        assert int(configuration.broadcast) == i * 1002
                        assert answer.accepted and list(answer.turns) == [5.0, 9.0]
                    await example.until(lambda i=i: len(example.totals(store)) == i + 1)
                assert not waits
                assert store.lease(example.POPULATION).owner == ""
            assert example.totals(store) == [2, 2]

    asyncio.run(story())


def test_a_server_that_stops_sends_everybody_away(tmp_path):
    task = example.served(goal_count=2, over_selection=1.5)
    notes = example.Notes()

    async def story():
        store = example.store_with(task)
        async with example.running(tmp_path, [task], store, observer=notes) as made:
            async with example.channel_to(tmp_path, made.address) as channel:
                streams = [await example.connect(channel) for _ in range(5)]
                for stream in streams[:3]:
                    await stream.check_in()
                await example.until(lambda: len(notes.named("configured")) == 3)
                await streams[3].check_in()  # For the next round.
                await example.until(lambda: len(notes.named("waiting")) == 4)
                await made.stop()
                away = await streams[3].receive()
                statuses = [await stream.status() for stream in streams]
        assert isinstance(away, wire_pb2.ComeBack)
        assert away.reason == "the server stops" and list(away.turns) == [5.0, 9.0]
        assert sorted(code.name for code, _ in statuses) == ["OK"] + 4 * ["UNAVAILABLE"]
        assert store.history(example.POPULATION, "sum") == []
        assert store.lease(example.POPULATION).owner == ""

    asyncio.run(story())


def test_two_servers_do_not_lead_one_population(tmp_path):
    task = example.served()

    async def story():
        store = example.store_with(task)
        async with example.running(tmp_path, [task], store) as first:
            waits = []
            second = example.make(tmp_path, [task], store, progress=waits.append)
            with pytest.raises(server.ServerError, match="two servers for one population"):
                await second.start()
            assert len(waits) == 1
            assert all(answer.accepted for _, answer in await a_round(tmp_path, first.address))

    asyncio.run(story())


def test_a_server_waits_for_the_lease_of_one_that_has_crashed(tmp_path):
    task = example.served()

    async def story():
        store = example.store_with(task)
        example.certificate(tmp_path)  # Making it takes some of the lease's time.
        now = asyncio.get_running_loop().time
        store.acquire(example.POPULATION, "crashed", now=now(), duration=2.0)
        waits = []
        async with example.running(
            tmp_path, [task], store, progress=waits.append, clock=now
        ) as made:
            assert "crashed" in waits[0] and len(waits) == 1
            assert store.lease(example.POPULATION).epoch == 2
            assert all(answer.accepted for _, answer in await a_round(tmp_path, made.address))

    asyncio.run(story())


def test_a_port_in_use_is_one_line(tmp_path):
    task = example.served()

    async def story():
        async with example.running(tmp_path, [task], example.store_with(task)) as first:
            same = example.endpoint(tmp_path, address=first.address)
            second = example.make(tmp_path, [task], example.store_with(task), endpoint=same)
            with pytest.raises(server.ServerError, match=f"Cannot listen on {first.address}"):
                await second.start()

    asyncio.run(story())


class FailingStore(memory_store.MemoryStore):
    """A store that cannot be written while it is set to fail."""

    is_broken = False

    def _check(self):
        if self.is_broken:
            raise interface.StoreError("Cannot write to the store: the disk is full.")

    def acquire(self, *args, **keywords):
        self._check()
        return super().acquire(*args, **keywords)

    def commit(self, *args, **keywords):
        self._check()
        return super().commit(*args, **keywords)


def test_a_store_that_cannot_be_written_is_one_line(tmp_path):
    task = example.served()
    store = example.store_with(task, store=FailingStore())
    store.is_broken = True
    with pytest.raises(server.ServerError, match="the disk is full"):
        asyncio.run(example.make(tmp_path, [task], store).start())


def test_a_task_that_the_store_lacks_is_one_line(tmp_path):
    with pytest.raises(server.ServerError, match=r"no tasks \['sum'\]"):
        asyncio.run(example.make(tmp_path, [example.served()], memory_store.MemoryStore()).start())


def test_a_store_that_fails_in_the_middle_costs_one_round_that_is_skipped(tmp_path):
    task = example.served()
    notes = example.Notes()

    async def story():
        store = example.store_with(task, store=FailingStore())
        async with example.running(tmp_path, [task], store, observer=notes) as made:
            store.is_broken = True
            assert all(answer.accepted for _, answer in await a_round(tmp_path, made.address))
            await example.until(lambda: notes.of(events.RoundLost))
            store.is_broken = False
            again = await a_round(tmp_path, made.address)
            # The next round, from the same model.
            assert all(c.round_index == 1 and c.broadcast == b"0" for c, _ in again)
            await example.until(lambda: example.totals(store))
        assert notes.of(events.StoreFailed)[0].reason.endswith("the disk is full.")
        assert len(example.totals(store)) == 1

    asyncio.run(story())


def test_tasks_have_to_be_those_of_the_population(tmp_path):
    task = example.served()
    other = dataclasses.replace(task, task=dataclasses.replace(task.task, name="other"))
    made = example.make(tmp_path, [task], memory_store.MemoryStore())
    with pytest.raises(ValueError, match="must have those of the population"):
        server.Server.of(
            made._populations[0].population,
            {"sum": other},
            memory_store.MemoryStore(),
            endpoint=example.endpoint(tmp_path),
            pace=lambda *_: (0.0,),
        )
    with pytest.raises(ValueError, match="chmod 600"):
        (tmp_path / "server.key").chmod(0o644)
        example.make(tmp_path, [task], memory_store.MemoryStore())


def test_devices_trust_no_other_certificate(tmp_path):
    task = example.served()

    async def story():
        async with example.running(tmp_path, [task], example.store_with(task)) as made:
            (tmp_path / "other").mkdir()
            example.certificate(tmp_path / "other")
            async with example.channel_to(tmp_path / "other", made.address) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await example.connect(channel)
                assert raised.value.code() is grpc.StatusCode.UNAVAILABLE

    asyncio.run(story())
