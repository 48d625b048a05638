"""Hosts of a server in one process, on a network that can be cut."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses

import pytest

from tests.runtime import stories
from tests.runtime.cluster import example_cluster
from tests.runtime.server import example_secure_task
from tests.runtime.server import example_service as example
from tff_dpftrl.runtime.actors import events, messages, roles
from tff_dpftrl.runtime.cluster import host as host_lib
from tff_dpftrl.runtime.cluster import (
    host_kinds,
    mail,
    observed,
    sealing,
    selector_host,
    transport,
    worker_host,
)
from tff_dpftrl.runtime.protocol import wire_pb2
from tff_dpftrl.runtime.store import sql

FOR_EVER = 3000.0  # Longer than a test: what waits for it fails.
QUICK = {"heartbeat_seconds": 0.2, "silence_seconds": 0.5, "lease_seconds": 1.0}
SLOW = {"reporting_timeout": FOR_EVER, "selection_timeout": FOR_EVER}


class Network:
    """Carries what hosts say; a host that is cut off is dead."""

    def __init__(self, deployed):
        self.deployed = deployed
        self.hosts = {}
        self.ends = {}
        self.carried = []
        self.kept = {}
        self.started = []
        self.all = []  # The dead, too.

    async def start(self, name):
        made = host_kinds.make(name, self.deployed, Wire(self, name))
        self.hosts[name], self.ends[made.life] = made, asyncio.Event()
        self.all.append(made)
        self.started.append(name)
        await made.start()
        return made

    async def cut(self, name):
        host = self.hosts.pop(name)
        self.ends[host.life].set()
        for member in list(host._engine._members.values()):
            host._engine._end(member)
        if isinstance(host, selector_host.SelectorHost):
            await host._grpc.stop(0)
        return host

    def address(self, i):
        return self.hosts[f"selector-{i}"].status().address


class Wire(transport.Transport):
    """The network as one host has it."""

    def __init__(self, network, own):
        self._network, self._own = network, own
        self._host = None

    def _check(self, host):
        network = self._network
        own = [one for one in network.all if one._transport is self]
        if host not in network.hosts or (own and network.ends[own[0].life].is_set()):
            raise mail.Unreachable

    async def call(self, host, sealed):
        self._check(host)
        self._network.carried.append((self._own, host, sealed))
        return await self._network.hosts[host].take(sealed)

    async def watch(self, host, life):
        self._check(host)
        if self._network.hosts[host].life == life:
            await self._network.ends[life].wait()

    async def start_coordinator(self):
        if "coordinator" not in self._network.hosts:
            await self._network.start("coordinator")

    async def restart(self, host):
        await self._network.cut(host)

    async def leave(self):
        await self._network.cut(self._own)

    def node_address(self):
        return "127.0.0.1"

    def remember(self, name, value):
        self._network.kept[name] = value

    def remembered(self, name):
        return self._network.kept.get(name, "")


@contextlib.asynccontextmanager
async def running(deployed):
    network = Network(deployed)
    for name in deployed.placement.permanent:
        await network.start(name)
    selectors = [network.hosts[name] for name in deployed.placement.selectors]
    await example.until(
        lambda: all(desk.opening.task for one in selectors for desk in one._service._desks.values())
    )
    try:
        yield network
    finally:
        for host in network.all:  # Selectors first, or they would start another Coordinator.
            await host.stop()


def play(folder, story, *args, make=example_cluster.deployment, **options):
    """Runs a story of a network, channels to its Selectors, and the deployment."""
    deployed = make(folder, *args, **options)

    async def run():
        async with running(deployed) as network, contextlib.AsyncExitStack() as stack:
            channels = [
                await stack.enter_async_context(example.channel_to(folder, network.address(i)))
                for i in range(deployed.placement.num_selectors)
            ]
            await story(network, channels, deployed)
        return network

    return asyncio.run(asyncio.wait_for(run(), 120))


story = stories.played_by(play, "network", "channels", "deployed")


async def take_part_until_committed(deployed, channels, rounds):
    while len(rows(deployed)) < rounds:
        await asyncio.gather(*(example.take_part(one, b"5") for one in channels))


async def checked_in(channel):
    stream = await example.connect(channel)
    await stream.check_in()
    return stream


async def configured(*channels):
    """Devices that take part in one attempt, and have not reported."""
    streams = [await checked_in(channel) for channel in channels]
    told = [await stream.receive() for stream in streams]
    assert all(isinstance(one, wire_pb2.Configuration) for one in told), told
    assert len({one.attempt for one in told}) == 1
    return streams, told[0].attempt


def rows(deployed):
    with sql.SqlStore(deployed.store) as store:
        return example.released(store)


def test_rounds_go_over_hosts_and_nothing_of_a_device_is_in_the_clear(tmp_path):
    sentinel = b"7777777777777"

    async def story(network, channels, deployed):
        for _ in range(2):
            answers = await asyncio.gather(*(example.take_part(one, sentinel) for one in channels))
            assert all(answer.accepted for _, answer in answers)
        await example.until(lambda: len(rows(deployed)) == 2)
        assert [row["total"] for row in rows(deployed)] == [2 * int(sentinel)] * 2

    network = play(tmp_path, story, ({"devices_per_aggregator": 1},))
    assert network.started.count("coordinator") == 1
    senders = {(sender, to) for sender, to, _ in network.carried}
    assert ("selector-0", "worker-0") in senders and ("worker-0", "worker-1") in senders
    assert not any(sentinel in sealed for _, _, sealed in network.carried)


MERGED = {"goal_count": 4, "devices_per_aggregator": 1, "max_fan_in": 2}


def members(network, kind):
    """Returns the host of each Aggregator, or of each merger, that lives."""
    found = {}
    for name, host in network.hosts.items():
        found.update({one: name for one in host._engine._members if f"/{kind}/" in one})
    return found


@story((MERGED,), num_workers=3)
async def test_sums_are_merged_on_several_hosts_and_their_actors_end_with_the_attempt(
    network, channels, deployed
):
    streams, attempt = await configured(*channels, *channels)
    assert len(members(network, "aggregator")) == 4
    hosts = members(network, "merger")
    assert set(hosts.values()) == set(deployed.placement.workers) - {
        deployed.placement.host_of(attempt)
    }
    for i, stream in enumerate(streams):
        await stream.report(attempt, str(10**i).encode())
        assert (await stream.receive()).accepted
    await example.until(lambda: rows(deployed))
    for kind in ("aggregator", "merger"):
        await example.until(lambda kind=kind: not members(network, kind))
    assert rows(deployed)[0]["total"] == 1111


@story(({**MERGED, "least_fraction": 0.25, **SLOW},), num_workers=4)
async def test_a_merger_is_lost_with_all_that_is_below_it_and_with_nothing_else(
    network, channels, deployed
):
    streams, attempt = await configured(*channels, *channels)
    hosts = {**members(network, "aggregator"), **members(network, "merger")}
    lost = hosts[f"{attempt}/merger/1"]
    assert hosts[f"{attempt}/aggregator/1"] == lost  # It is below the other merger.
    await network.cut(lost)
    await example.until(lambda: len(members(network, "aggregator")) == 1)
    answers = []
    for stream in streams:
        await stream.report(attempt, b"1")
        answers.append(await stream.receive())
    assert sorted((one.accepted, one.reason) for one in answers) == [
        *[(False, "late")] * 3,
        (True, ""),
    ]
    await example.until(lambda: rows(deployed))
    (row,) = rows(deployed)
    assert (row["total"], row["devices/lost_aggregators"]) == (1, 2)


@story(({**MERGED, **SLOW},), num_workers=3)
async def test_aggregators_on_other_hosts_end_with_an_attempt_that_is_abandoned(
    network, channels, deployed
):
    _, attempt = await configured(*channels, *channels)
    for kind in ("aggregator", "merger"):
        assert members(network, kind)
    master = network.hosts[deployed.placement.host_of(attempt)]
    master._engine.deliver(attempt, "no message that it knows")
    for kind in ("aggregator", "merger"):
        await example.until(lambda kind=kind: not members(network, kind))


@story(({"devices_per_aggregator": 1},), times=QUICK, populations=("a", "b"))
async def test_populations_share_hosts_and_both_go_on_when_their_coordinators_are_lost(
    network, channels, deployed
):
    def done(name):
        with sql.SqlStore(deployed.store) as store:
            return [row["total"] for row in example.released(store, whose=name)]

    async def rounds(number):
        for name, update in (("a", b"1"), ("b", b"20")):
            while len(done(name)) < number:
                parts = (example.take_part(one, update, population=name) for one in channels)
                await asyncio.gather(*parts)

    await rounds(2)
    leaders = network.hosts["selector-0"].status().leader
    assert {roles.population_of(one) for one in leaders.split(",")} == {"a", "b"}
    await network.cut("coordinator")
    await rounds(3)
    seen = network.hosts["selector-1"].take_observed()
    for name in ("a", "b"):
        timed = [item for item in seen[name].items if isinstance(item, observed.TimedEvent)]
        assert events.RoundReleased in {type(item.named.event) for item in timed}
    assert done("a")[:3] == [2] * 3 and done("b")[:3] == [40] * 3


@story(make=example_cluster.secure_deployment)
async def test_secure_sums_go_over_hosts(channels, deployed):
    answers = await asyncio.gather(
        *(example_secure_task.take_part(channels[i % 2], (i, 0, 1)) for i in range(6))
    )
    assert all(answer.accepted for answer in answers)
    await example.until(lambda: rows(deployed))
    assert rows(deployed)[0]["total"] == [15, 0, 6]


@story((SLOW,), num_workers=3)
async def test_an_attempt_whose_worker_is_lost_is_made_again_at_once(network, channels, deployed):
    streams, attempt = await configured(*channels)
    placement = deployed.placement
    # Its Aggregator goes: the devices are told, and nobody waits for them.
    lost = placement.host_of(f"{attempt}/aggregator/0")
    await network.cut(lost)
    for stream in streams:
        await stream.report(attempt, b"1")
        answer = await stream.receive()
        assert (answer.accepted, answer.reason) == (False, "late")
    await network.start(lost)
    # Its Master Aggregator goes.
    streams, attempt = await configured(*channels)
    lost = placement.host_of(attempt)
    assert lost != placement.host_of(f"{attempt}/aggregator/0")
    await network.cut(lost)
    for stream in streams:
        await stream.report(attempt, b"1")
        assert not (await stream.receive()).accepted
    await network.start(lost)
    await take_part_until_committed(deployed, channels, 1)
    assert rows(deployed)[0]["total"] == 10


@story((SLOW,))
async def test_devices_do_not_wait_for_an_aggregator_that_cannot_be_made(
    network, channels, deployed
):
    lost = deployed.placement.host_of("toys/coordinator/0/round/1/aggregator/0")
    await network.cut(lost)
    for told, answer in await asyncio.gather(*(example.take_part(one) for one in channels)):
        assert told.reason == "the round was abandoned" and answer is None
    await network.start(lost)
    await take_part_until_committed(deployed, channels, 1)


@story(({"goal_count": 4, "least_fraction": 0.5, **SLOW},))
async def test_devices_of_a_selector_that_is_lost_are_not_waited_for(network, channels, deployed):
    streams, attempt = await configured(*channels, *channels)
    await network.cut("selector-1")
    for stream in streams[::2]:
        await stream.report(attempt, b"1")
        assert (await stream.receive()).accepted
    await example.until(lambda: rows(deployed))
    again = await network.start("selector-1")
    assert again.status().address == "127.0.0.1:" + network.kept["selector-1"]
    # It is told what devices are chosen for although that was said before.
    await example.until(lambda: again._service._first.opening == events.SelectionOpened("sum", 1))
    (row,) = rows(deployed)
    assert (row["total"], row["devices/dropped"]) == (2, 2)


@story()
async def test_a_selector_that_comes_back_has_its_port_again(network):
    before = network.address(0)
    await network.cut("selector-0")
    await network.start("selector-0")
    assert network.address(0) == before
    # Somebody else may have taken it.
    taken = network.kept["selector-0"] = network.address(1).rpartition(":")[2]
    await network.cut("selector-0")
    await network.start("selector-0")
    assert network.address(0).rpartition(":")[2] not in ("0", taken)


@story(times=QUICK)
async def test_another_coordinator_comes_when_the_first_is_lost(network, channels, deployed):
    await take_part_until_committed(deployed, channels, 1)
    former = await network.cut("coordinator")
    leader = network.hosts["selector-0"].status().leader
    await example.until(lambda: network.hosts["selector-0"].status().leader != leader)
    await example.until(lambda: "coordinator" in network.hosts)
    assert network.hosts["coordinator"].life > former.life
    await take_part_until_committed(deployed, channels, len(rows(deployed)) + 1)
    epochs = [row["epoch"] for row in rows(deployed)]
    assert epochs == sorted(epochs) and epochs[0] < epochs[-1]
    assert {row["total"] for row in rows(deployed)} == {10}


@story()
async def test_a_coordinator_that_stops_tells_new_selectors_nothing(network):
    coordinator = network.hosts["coordinator"]
    coordinator._is_stopping = True
    await network.cut("selector-0")
    life = (await network.start("selector-0")).life
    await example.until(lambda: not coordinator._outbox._queues)
    for _ in range(2):  # Each answer would have it told again.
        coordinator._note_process("selector-0", life)
        assert not coordinator._outbox._queues


@story()
async def test_devices_that_are_forwarded_before_who_waits_for_them_is_made(
    network, deployed, monkeypatch
):
    monkeypatch.setattr(worker_host, "_AHEAD_SECONDS", 0.5)
    worker = network.hosts["worker-0"]
    heard = []
    worker._engine.connect("device", heard.append)
    early = messages.DevicesForwarded("selector-0", ("device",))
    worker._deliver("toys/coordinator/0/round/2", early)
    assert heard == []
    # Nobody comes: the device is sent away, and tries again.
    await example.until(lambda: heard)
    assert isinstance(heard[0], messages.ComeBack) and heard[0].turns == (0.0,)
    # Somebody comes.
    worker._deliver("toys/coordinator/0/round/4", early)
    with sql.SqlStore(deployed.store) as store:
        commit = store.last_commit(example.POPULATION, "sum")
    both = frozenset({"selector-0", "selector-1"})
    role = roles.MasterAggregatorRole("toys/coordinator/0", 1, commit, b"0", both)
    worker._begin_actor(mail.Begin("toys/coordinator/0/round/4", role, "toys/coordinator/0"))
    master = worker._engine._members["toys/coordinator/0/round/4"]
    await example.until(lambda: master.actor is not None and master.actor._devices)
    assert len(heard) == 1


@story()
async def test_a_host_takes_nothing_that_is_not_sealed_for_it(network):
    to_worker = [sealed for _, to, sealed in network.carried if to == "selector-0"]
    assert to_worker
    with pytest.raises(sealing.NotSealed):
        await network.hosts["worker-0"].take(to_worker[0])


def test_what_hosts_have_said_is_not_heard_again(tmp_path, monkeypatch):
    handed_out = []

    async def story(network, channels, deployed):
        await take_part_until_committed(deployed, channels, 2)

        def hand_out(host, batch):
            handed_out.append((host.name, batch.number))

        carried = [one for one in network.carried if one[1] in network.hosts]
        monkeypatch.setattr(host_lib.Host, "_hand_out", hand_out)
        refused = collections.Counter()
        for _, to, sealed in carried:
            host = network.hosts[to]
            batch = host._seal.open(sealed, to)
            if batch.receiver == host.life:
                with pytest.raises(mail.Replayed, match=f"batch {batch.number} of {batch.sender}"):
                    await host.take(sealed)
            else:  # The sender had not met it yet.
                assert (batch.receiver, await host.take(sealed)) == ("", host.life)
            refused[bool(batch.receiver)] += 1
        assert refused[True] > refused[False] > 0

    play(tmp_path, story)
    again = [one for one, count in collections.Counter(handed_out).items() if count > 1]
    assert not again  # What was new while the others were sent again came once.


@story()
async def test_what_was_for_a_former_process_of_a_host_is_not_heard(network, channels, deployed):
    await take_part_until_committed(deployed, channels, 2)
    former = await network.cut("worker-0")
    present = await network.start("worker-0")
    seen = []
    present._hand_out = lambda batch: seen.append(batch.receiver)
    for sealed in [sealed for _, to, sealed in network.carried if to == "worker-0"]:
        if present._seal.open(sealed, "worker-0").receiver == former.life:
            assert await present.take(sealed) == present.life
            seen.append("taken")
    assert "taken" in seen and former.life not in seen


@story()
async def test_mail_for_a_host_that_was_started_anew_is_sealed_again(network):
    sender = network.hosts["selector-0"]
    await sender._carry("worker-0", [], 0)
    former = sender._receivers["worker-0"]
    await network.cut("worker-0")
    present = await network.start("worker-0")
    await sender._carry("worker-0", [], 0)
    assert sender._receivers["worker-0"] == present.life != former
    assert present._received[sender.life] > 0

    async def somebody_else(host, sealed):
        return "another life each time, " + sealed.hex()[:8]

    sender._transport.call = somebody_else
    with pytest.raises(mail.Unreachable):
        await sender._carry("worker-0", [], 0)


@story(num_workers=1)
async def test_a_host_that_has_read_other_tasks_takes_part_in_nothing(
    network, channels, deployed, tmp_path
):
    await network.cut("selector-1")
    changed = {**deployed.options, "digest": "of other tasks"}
    network.deployed = dataclasses.replace(deployed, options=changed)
    other = await network.start("selector-1")
    for _ in range(2):  # The others go on, and one round is enough for it to be told of.
        answers = await asyncio.gather(*(example.take_part(channels[0], b"5") for _ in range(2)))
        assert all(answer.accepted for _, answer in answers)
    assert other.status().leader == "" and not other._service._first.opening.task
    assert other.status().tasks != network.hosts["worker-0"].status().tasks
    async with example.channel_to(tmp_path, network.address(1)) as channel:
        told, answer = await example.take_part(channel, b"5")
        assert told.reason == "no round is waiting for devices" and answer is None
    to_it = [sealed for _, to, sealed in network.carried if to == "selector-1"]
    with pytest.raises(mail.OtherTasks, match="worker-0|coordinator"):
        other._hand_out(other._seal.open(to_it[-1], "selector-1"))
    assert {row["total"] for row in rows(deployed)} == {10}


@story((SLOW,), answer_seconds=0.5)
async def test_a_host_that_does_not_answer_is_started_anew(network, channels, deployed):
    streams, attempt = await configured(*channels)
    hung = network.hosts[deployed.placement.host_of(f"{attempt}/aggregator/0")]

    async def take(sealed):
        await asyncio.sleep(FOR_EVER)

    hung.take = take
    for stream in streams:
        await stream.report(attempt, b"1")
        assert (await stream.receive()).reason == "late"
    assert hung not in network.hosts.values()
    assert rows(deployed) == []


@story(answer_seconds=5.0)
async def test_a_host_that_has_to_start_has_more_time_to_answer_at_its_second_start_too(
    network, channels, deployed
):
    await take_part_until_committed(deployed, channels, 2)  # An attempt on each worker.
    selector = network.hosts["selector-0"]
    assert selector._patience("worker-0") == 5.0
    await network.cut("worker-0")
    await example.until(lambda: selector._patience("worker-0") == 20.0)


@story()
async def test_mail_that_fails_while_a_host_starts_is_not_forgotten(network, deployed):
    await network.cut("selector-0")
    await network.cut("worker-0")
    starting = host_kinds.make("selector-0", deployed, Wire(network, "selector-0"))
    network.all.append(starting)
    network.ends[starting.life] = asyncio.Event()
    bind, heard = starting._bound, []

    def bound(parts):
        server = bind(parts)
        start = server.start

        async def late():
            starting._engine.connect("device", heard.append)
            forwarded = messages.DevicesForwarded("selector-0", ("device",))
            starting.send("toys/coordinator/0/round/2", forwarded)
            await example.until(lambda: heard)
            assert not starting.status().is_serving
            await start()

        server.start = late
        return server

    starting._bound = bound
    await starting.start()
    assert isinstance(heard[0], messages.ComeBack) and starting.status().is_serving


@story(({"devices_per_aggregator": 1},))
async def test_a_host_remembers_no_attempt_that_is_over(network, channels, deployed):
    await take_part_until_committed(deployed, channels, 6)
    kept = [len(each) for host in network.all for each in host._children.values()]
    # The Coordinator, of whoever has asked for it, its attempt, and that one's Aggregators.
    assert 1 <= sum(kept) <= 2 + 1 + 2


def test_a_host_says_what_it_lacks(tmp_path):
    deployed = example_cluster.deployment(tmp_path, builder="no.such.module:build")

    async def start():
        await Network(deployed).start("worker-0")

    with pytest.raises(ValueError, match="no.such.module:build.*cannot be imported"):
        asyncio.run(start())
