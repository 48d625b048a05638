import asyncio
import random
import threading

import pytest

from tests.runtime import stories
from tests.runtime.server import example_service as example
from tff_dpftrl.runtime.actors import actor, events, factory, messages, population, roles
from tff_dpftrl.runtime.server import engine
from tff_dpftrl.runtime.store import holders

TASK = example.served().task
SERVED = population.Population(
    example.POPULATION, (TASK,), heartbeat_seconds=0.1, silence_seconds=0.3, lease_seconds=1.0
)


class Scripted(actor.Actor):
    """Calls its messages, which are functions, and records the threads."""

    def __init__(self, address, begin=lambda me: None):
        super().__init__(address)
        self.threads = set()
        self.is_stepping = False
        self._on_begin = begin

    def _begin(self):
        self._on_begin(self)

    def _receive(self, message):
        assert not self.is_stepping
        self.is_stepping = True
        self.threads.add(threading.get_ident())
        if not isinstance(message, messages.Lost):
            message(self)
        self.is_stepping = False


class Stage(factory.ActorFactory):
    """Scripted actors in all places; roles are functions that begin."""

    def __init__(self):
        super().__init__(SERVED, selectors=("selector",), pace=lambda *_: (0.0,))
        self.made = {}
        self.starts = []

    def _make(self, address, begin=lambda me: None):
        self.starts.append(address)
        self.made[address] = Scripted(address, begin)
        return self.made[address]

    def selector(self, address, randomness):
        return self._make(address)

    def store_actor(self, store):
        return self._make("store")

    def build(self, address, role, randomness):
        if role is None:
            raise MemoryError("secret words")
        return self._make(address, role if callable(role) else lambda me: None)


def play(_, story, **changes):
    """Runs a story of a stage, an engine and the list of all that devices receive."""

    async def run():
        stage = Stage()
        received = []
        made = engine.Engine(
            [stage],
            example.store_with(),
            on_event=lambda now, event, population: received.append(event),
            **changes,
        )
        made.start()
        try:
            await story(stage, made, received)
        finally:
            await made.stop(1.0)

    asyncio.run(asyncio.wait_for(run(), 60))


story = stories.played_by(play, "stage", "made", "received")


async def spawn(stage, made, address, role=lambda me: None):
    """Has the Selector spawn an actor."""
    made.deliver("selector", lambda me: me.spawn(address, role))
    await example.until(lambda: address in stage.made)


@pytest.mark.parametrize("where", ["selector", "store", "attempt"])
@story()
async def test_an_actor_handles_one_message_after_the_other_in_order(stage, made, received, where):
    if where == "attempt":
        await spawn(stage, made, where)
    for i in range(1000):
        made.deliver(where, lambda me, i=i: me.send(events.OBSERVER, i))
        if i % 300 == 0:
            await asyncio.sleep(0.01)
    await example.until(lambda: len(received) == 1000)
    assert received == list(range(1000))
    # Only Selectors are so quick that they need no thread.
    is_on_loop = stage.made[where].threads == {threading.get_ident()}
    assert is_on_loop == (where == "selector")


@story()
async def test_effects_are_carried_out_after_the_step_in_which_they_were_said(made, received):
    made.connect("device", received.append)

    def step(me):
        me.send("device", 1)
        assert not received
        me.send("device", 2)

    made.deliver("selector", step)
    await example.until(lambda: received)
    assert received == [1, 2]


@story()
async def test_timers_ring_and_are_forgotten_with_their_actor(stage, made, received):
    def begin(me):
        me.after(0.02, lambda me: me.send(events.OBSERVER, "rang"))
        me.after(0.1, lambda me: me.send(events.OBSERVER, "rang too late"))
        me.after(0.05, lambda me: me.stop(me.address))

    await spawn(stage, made, "attempt", begin)
    await example.until(lambda: received)
    await asyncio.sleep(0.2)
    assert received == ["rang"]
    made.deliver("attempt", lambda me: me.send(events.OBSERVER, "is there"))
    await asyncio.sleep(0.02)
    assert received == ["rang"]


@story()
async def test_nothing_is_handled_after_an_actor_has_stopped_itself(stage, made, received):
    await spawn(stage, made, "attempt")
    made.deliver("attempt", lambda me: me.stop(me.address))
    made.deliver("attempt", lambda me: me.send(events.OBSERVER, "after the end"))
    await asyncio.sleep(0.05)
    assert received == []


def fail(me):
    me.send(events.OBSERVER, "said before it failed")
    raise RuntimeError("secret words")


@story()
async def test_the_parent_of_an_actor_that_fails_is_notified(stage, made, received, caplog):
    await spawn(stage, made, "attempt", lambda me: me.spawn("attempt/sum", lambda me: None))
    await example.until(lambda: "attempt/sum" in stage.made)
    stage.made["attempt"]._receive = received.append
    made.deliver("attempt/sum", fail)
    await example.until(lambda: received)
    assert received == [messages.Lost("attempt/sum")]
    assert "attempt/sum failed with RuntimeError" in caplog.text
    assert "secret" not in caplog.text


@story()
async def test_the_parent_of_an_actor_that_cannot_be_built_is_notified(
    stage, made, received, caplog
):
    await spawn(stage, made, "attempt")
    stage.made["attempt"]._receive = lambda m: (
        m(stage.made["attempt"]) if callable(m) else (received.append(m))
    )
    made.deliver("attempt", lambda me: me.spawn("attempt/sum", None))
    await example.until(lambda: received)
    assert received == [messages.Lost("attempt/sum")]
    assert "MemoryError" in caplog.text and "secret" not in caplog.text


@story()
async def test_selectors_hear_of_a_coordinator_that_fails(stage, made, received):
    await spawn(stage, made, "leader", roles.CoordinatorRole())
    stage.made["selector"]._receive = received.append
    made.deliver("leader", fail)
    await example.until(lambda: received)
    assert received == [messages.Lost("leader")]


def test_selector_and_store_actor_come_back_when_they_fail(monkeypatch):
    monkeypatch.setattr(engine, "_RESTART_SECONDS", 0.05)
    lost = []

    async def story(stage, made, received):
        made.deliver("selector", fail)
        made.deliver("store", fail)
        await example.until(lambda: len(stage.starts) == 4)
        assert sorted(stage.starts) == ["selector", "selector", "store", "store"]
        assert lost == ["selector"]  # Its list of devices is lost.
        made.deliver("selector", lambda me: me.send(events.OBSERVER, "is back"))
        await example.until(lambda: received == ["is back"])

    play(None, story, on_selector_lost=lost.append)


@story()
async def test_a_report_to_an_actor_that_is_gone_is_late(stage, made, received):
    made.connect("device", received.append)
    report = messages.Report("device", "attempt", "numbers")
    late = messages.ReportRefused("device", "attempt", messages.Refusal.LATE)
    made.deliver("nobody", report)
    assert received == [late]
    # Also of those that wait in the mailbox of an actor that stops or fails.
    for i, end in enumerate([lambda me: me.stop(me.address), fail]):
        await spawn(stage, made, f"sum {i}")
        made.deliver(f"sum {i}", end)
        made.deliver(f"sum {i}", report)
        await example.until(lambda i=i: len(received) == i + 2)
    # And the one that it has failed at.
    await spawn(stage, made, "sum 2")
    stage.made["sum 2"]._receive = lambda message: fail(stage.made["sum 2"])
    made.deliver("sum 2", report)
    await example.until(lambda: len([m for m in received if m == late]) == 4)


@story()
async def test_answers_of_an_actor_that_another_one_has_stopped_still_arrive(stage, made, received):
    made.connect("device", received.append)
    await spawn(stage, made, "sum")
    begun, go_on = threading.Event(), threading.Event()

    def step(me):
        begun.set()
        assert go_on.wait(5)
        me.send("device", "in the sum")
        me.after(0.0, "never")
        me.spawn("child", lambda me: None)

    made.deliver("sum", step)
    await asyncio.get_running_loop().run_in_executor(None, begun.wait)
    made.deliver("selector", lambda me: me.stop("sum"))
    await asyncio.sleep(0.02)
    go_on.set()
    await example.until(lambda: received)
    assert received == ["in the sum"] and "child" not in stage.made


@story()
async def test_a_device_that_is_gone_before_its_configuration_is_not_waited_for(
    stage, made, received
):
    await spawn(stage, made, "sum")
    stage.made["sum"]._receive = received.append
    made.deliver("device", messages.Configure("device", "sum", "attempt", "task", 0, b""))
    await example.until(lambda: received)
    assert received == [messages.DeviceGone("device")]


@story()
async def test_devices_that_are_forwarded_to_an_actor_that_is_gone_are_sent_away(made, received):
    for device in ("one", "other"):
        made.connect(device, received.append)
    made.deliver("attempt", messages.DevicesForwarded("selector", ("one", "other")))
    assert [(type(message), message.device) for message in received] == [
        (messages.ComeBack, "one"),
        (messages.ComeBack, "other"),
    ]


class FakeRemote(engine.RemoteActors):
    """Where all addresses that begin with "far" are."""

    def __init__(self):
        self.received = []

    def send(self, to, message):
        self.received.append((to, message))
        return to.startswith("far")

    def spawn(self, parent, address, role):
        self.received.append((parent, address))
        return address.startswith("far")

    def end(self, address):
        self.received.append(("end", address))


def test_what_is_not_here_is_left_to_who_has_it():
    remote = FakeRemote()

    async def story(stage, made, received):
        made.connect("device", received.append)
        report = messages.Report("device", "attempt", "numbers")
        made.deliver("far/sum", report)
        assert remote.received == [("far/sum", report)] and received == []
        made.deliver("sum", report)  # It would be here.
        assert [message.refusal for message in received] == [messages.Refusal.LATE]
        remote.received.clear()

        def step(me):
            me.spawn("far/attempt", None)
            me.spawn("attempt", lambda me: None)
            me.stop("far/attempt")

        made.deliver("selector", step)
        await example.until(lambda: made.has("attempt"))
        assert remote.received == [
            ("selector", "far/attempt"),
            ("selector", "attempt"),
            ("end", "far/attempt"),
        ]
        assert "store" not in stage.made
        # Of a lost parent's children, those that are here end.
        made.spawn("attempt/sum", lambda me: None, "far/attempt")
        made.end_children(lambda parent: parent.startswith("far"))
        assert made.has("attempt") and not made.has("attempt/sum")

    play(None, story, remote=remote, permanent=("selector",))


@story()
async def test_only_the_last_count_of_a_hop_is_delivered(stage, made, received):
    made.connect("attempt", received.append)
    await spawn(stage, made, "sum")

    def count(me, i):
        me.send("attempt", f"answer {i}")
        me.send("attempt", messages.ReportsCounted("sum", i, 0))

    begun, go_on = threading.Event(), threading.Event()
    made.deliver("sum", lambda me: (begun.set(), go_on.wait(5)))
    await asyncio.get_running_loop().run_in_executor(None, begun.wait)
    for i in range(3):
        made.deliver("sum", lambda me, i=i: count(me, i))
    go_on.set()
    last = messages.ReportsCounted("sum", 2, 0)
    await example.until(lambda: last in received)
    answers = [message for message in received if isinstance(message, str)]
    assert answers == ["answer 0", "answer 1", "answer 2"]
    assert len(received) - len(answers) < 3


def test_an_observer_that_fails_stops_nothing(caplog):
    def on_event(now, event, population):
        raise RuntimeError("secret words")

    async def run():
        stage = Stage()
        made = engine.Engine([stage], example.store_with(), on_event=on_event)
        made.start()
        received = []
        made.connect("device", received.append)
        made.deliver("selector", lambda me: me.send(events.OBSERVER, "event"))
        made.deliver("selector", lambda me: me.send("device", "goes on"))
        await example.until(lambda: received)
        await made.stop(1.0)

    asyncio.run(run())
    assert "RuntimeError" in caplog.text and "secret" not in caplog.text


def test_a_lease_that_was_granted_to_a_lost_coordinator_is_released():
    store = example.store_with(example.served())

    async def run():
        real = factory.ActorFactory(SERVED, selectors=("selector",), pace=lambda *_: (0.0,))
        made = engine.Engine([real], store, on_event=lambda *_: None, randomness=random.Random(0))
        made.start()
        await example.until(lambda: made._coordinators)
        (leader,) = made._coordinators
        holder = holders.name_of(leader)
        await example.until(lambda: getattr(store.lease(example.POPULATION), "owner", "") == holder)
        made._end(made._members[leader])  # It has no chance to give it back by itself.
        await made.stop(1.0)

    asyncio.run(run())
    lease = store.lease(example.POPULATION)
    assert lease.owner == "" and lease.epoch == 1
