"""Secure sums of a service over gRPC and TLS: exact, or lost whole; what is wrong is refused."""

from __future__ import annotations

import asyncio
import threading

import grpc
import pytest

from tests.runtime.server import example_secure_task
from tests.runtime.server import example_service as example
from tests.runtime.server.example_service import play, story
from tff_dpftrl.runtime.actors import events
from tff_dpftrl.runtime.protocol import session_stream, wire_pb2
from tff_dpftrl.runtime.server import limits
from tff_dpftrl.secure_sums import group, secure_sum_pb2

Status = grpc.StatusCode
NUMBERS = [(i, 100 * i, 999) for i in range(1, 5)]


def sum_of(*numbers):
    return [sum(column) % example_secure_task.MODULUS for column in zip(*numbers, strict=True)]


async def finish(devices):
    """All steps that devices have left, together; returns the answers."""
    return await asyncio.gather(*(device.finish() for device in devices))


async def all_are_accepted(devices):
    assert all(answer.accepted for answer in await finish(devices))


async def configured(channel, numbers=NUMBERS, demands=None):
    return await asyncio.gather(
        *(example_secure_task.configured(channel, each, demands) for each in numbers)
    )


async def one_step(devices):
    async def step(device):
        await device.send()
        assert not await device.receive()

    await asyncio.gather(*map(step, devices))


async def committed(store, count=1):
    await example.until(lambda: len(example.totals(store)) == count)
    return example.released(store)[-1]


async def round_goes_on(channel, store, *, done=0):
    """A round of honest devices is committed."""
    await all_are_accepted(await configured(channel))
    assert (await committed(store, done + 1))["total"] == sum_of(*NUMBERS)


@pytest.mark.parametrize("threat_model", [example_secure_task.HONEST, example_secure_task.ACTIVE])
def test_rounds_are_sums_of_groups(tmp_path, threat_model):
    numbers = [(i, 7 * i, 999 - i) for i in range(8)]
    served = example_secure_task.served(8, threat_model=threat_model, devices_per_aggregator=4)

    async def story(channel, notes, store):
        for done in (1, 2):
            devices = await configured(channel, numbers, example_secure_task.demanded(threat_model))
            sessions = {device.configuration.secure_sum_session for device in devices}
            assert len(sessions) == 2 and {device.configuration.task for device in devices} == {
                "sum"
            }
            assert all(answer.accepted and answer.turns for answer in await finish(devices))
            row = await committed(store, done)
            assert row["total"] == sum_of(*numbers)
            assert row["devices/reports"] == 8 and row["devices/summed_groups"] == 2
        assert notes.named("reported") == [("reported", "")] * 16

    play(tmp_path, story, served)


@pytest.mark.parametrize("step", range(4))
@story(example_secure_task.served())
async def test_a_device_that_goes_away_is_left_out_or_was_in_the_sum(channel, store, step):
    devices = await configured(channel)
    for _ in range(step):
        await one_step(devices)
    devices[1].stream.call.cancel()
    await all_are_accepted([device for device in devices if device is not devices[1]])
    row = await committed(store)
    left = NUMBERS if step == 3 else [NUMBERS[0], *NUMBERS[2:]]
    assert row["total"] == sum_of(*left) and row["devices/reports"] == len(left)
    await round_goes_on(channel, store, done=1)


@pytest.mark.parametrize("step", range(1, 4))
@story(example_secure_task.served())
async def test_with_fewer_than_the_least_number_the_group_is_lost_and_nothing_is_revealed(
    channel, notes, store, step
):
    devices = await configured(channel)
    for _ in range(step):
        await one_step(devices)
    for device in devices[:2]:
        device.stream.call.cancel()
    await example.until(lambda: notes.named("closed") == [("closed", "training")] * 2)
    answers = await finish(devices[2:])
    assert [(answer.accepted, answer.reason) for answer in answers] == [(False, "group lost")] * 2
    await example.until(lambda: notes.of(events.RoundLost))
    (lost,) = notes.of(events.RoundLost)
    assert lost.counts["lost_groups"] == 1 and lost.counts["reports"] == 0
    assert not example.totals(store)
    await round_goes_on(channel, store)


def of(**message):
    return secure_sum_pb2.ToServer(**message).SerializeToString()


@pytest.mark.parametrize(
    ("step", "content", "reason"),
    [
        (0, b"\xff\xff", "unusable: the message cannot be read"),
        (0, b"", "unusable: None, where the group is ADVERTISING."),
        (0, of(key_advertisement={}), "unusable: A public key"),
        (0, "replayed", "unusable: A key that occurs twice."),
        (1, of(shares={}), "unusable: Other than 3 shares"),
        (1, "again", "unusable: key_advertisement, where the group is SHARING."),
        (2, of(masked_vector={"content": b"\xff" * 10}), "unusable: No masked vector: "),
        (2, of(masked_vector={"content": b"12"}), "unusable: No masked vector: "),
        (2, "again", "unusable: shares, where the group is MASKING."),
        (3, "again", "unusable: masked_vector, where the group is REVEALING."),
        (3, of(revealed_shares={"of_mask_keys": [{"index": 1}]}), "unusable: Shares that were"),
    ],
)
@story(example_secure_task.served())
async def test_what_is_wrong_in_a_step_is_refused_by_name_and_the_round_goes_on(
    channel, store, step, content, reason
):
    first, bad, *others = devices = await configured(channel)
    sent = {}
    for _ in range(step):
        sent["again"] = bad.message.SerializeToString()
        await one_step(devices)
    await first.send()
    sent["replayed"] = first.message.SerializeToString()
    # Until the first one's message has arrived, which only a replay needs.
    await asyncio.sleep(1.0 if content == "replayed" else 0.0)
    await bad.stream.send(secure_sum=sent.get(content, content))
    answer = await bad.stream.receive()
    assert not answer.accepted and answer.reason.startswith(reason), answer.reason
    assert (await bad.stream.status())[0] is Status.OK

    async def go_on():
        return first.answer if await first.receive() else await first.finish()

    answers = [*await asyncio.gather(go_on(), *(device.finish() for device in others))]
    assert all(answer.accepted for answer in answers)
    row = await committed(store)
    left = NUMBERS if step == 3 else [NUMBERS[0], *NUMBERS[2:]]
    assert row["total"] == sum_of(*left) and row["devices/unusable"] == 1


async def with_one_of_another_session(channel, threat_model):
    demands = example_secure_task.demanded(threat_model)
    first, *others = await configured(channel, demands=demands)
    first.configuration.secure_sum_session = b"o" * 32
    other = example_secure_task.SecureDevice(first.stream, first.configuration, NUMBERS[0], demands)
    return await finish([other, *others])


@story(example_secure_task.served(threat_model=example_secure_task.ACTIVE))
async def test_keys_of_another_session_are_refused_where_they_are_signed(channel, store):
    replayed, *others = await with_one_of_another_session(channel, example_secure_task.ACTIVE)
    assert replayed.reason == "unusable: Keys that are not signed for this session."
    assert all(answer.accepted for answer in others)
    assert (await committed(store))["total"] == sum_of(*NUMBERS[1:])


@story(example_secure_task.served())
async def test_masks_of_another_session_are_a_lost_group_and_no_wrong_sum(channel, notes, store):
    answers = await with_one_of_another_session(channel, example_secure_task.HONEST)
    assert {answer.reason for answer in answers} == {"group lost"}
    await example.until(lambda: notes.of(events.RoundLost))
    await round_goes_on(channel, store)


@story(example_secure_task.served())
async def test_a_report_in_the_clear_is_refused_and_not_looked_at(channel, store):
    devices = await configured(channel)
    for device in devices[1:2]:
        await device.stream.report(device.configuration.attempt, b"1,2,3")
        answer = await device.stream.receive()
        assert (answer.accepted, answer.reason) == (False, "in the clear")
    await all_are_accepted([devices[0], *devices[2:]])
    row = await committed(store)
    assert row["total"] == sum_of(NUMBERS[0], *NUMBERS[2:])
    assert row["devices/in the clear"] == 1


@story(example.served())
async def test_a_secure_sum_is_unexpected_where_reports_are_in_the_clear(channel):
    stream = await example.connect(channel)
    await stream.check_in()
    other = asyncio.create_task(example.take_part(channel))
    configuration = await stream.receive()
    assert not configuration.secure_sum_session
    await stream.send(secure_sum=of(key_advertisement={}))
    assert await stream.status() == (Status.INVALID_ARGUMENT, "a report was expected")
    other.cancel()


@pytest.mark.parametrize(
    ("message", "code", "text"),
    [
        (
            {"secure_sum": bytes(limits.MESSAGE_MARGIN_BYTES + 1)},
            Status.RESOURCE_EXHAUSTED,
            "a secure-sum of more than 4096 bytes is too large",
        ),
        ({"update_part": b"12"}, Status.INVALID_ARGUMENT, "a secure-sum was expected"),
        ({"check_in": wire_pb2.CheckIn()}, Status.INVALID_ARGUMENT, "a secure-sum was expected"),
    ],
    ids=["oversized", "part", "check-in"],
)
@story(example_secure_task.served())
async def test_what_is_no_step_ends_the_session(channel, store, message, code, text):
    devices = await configured(channel)
    await devices[1].stream.send(**message)
    assert await devices[1].stream.status() == (code, text)
    await all_are_accepted([devices[0], *devices[2:]])
    row = await committed(store)
    assert row["total"] == sum_of(NUMBERS[0], *NUMBERS[2:])
    assert row["devices/dropped"] == 1


def test_shares_may_be_as_large_as_the_group_and_no_larger(tmp_path):
    most = limits.MESSAGE_MARGIN_BYTES + 4 * limits.PEER_BYTES
    numbers = [tuple([i] * 3000) for i in range(4)]

    async def story(channel, notes, store):
        devices = await configured(channel, numbers, example_secure_task.demanded(size=3000))
        await one_step(devices)
        await devices[1].stream.send(secure_sum=bytes(most))
        code, text = await devices[1].stream.status()
        assert code is Status.RESOURCE_EXHAUSTED and f"more than {most} bytes" in text
        await all_are_accepted([devices[0], *devices[2:]])

    play(tmp_path, story, example_secure_task.served(size=3000))


@story(example_secure_task.served(3, over_selection=4 / 3, step_timeout=2.0))
async def test_who_comes_too_late_is_told_so(channel, store):
    devices = await configured(channel)
    await one_step(devices[:3])  # The goal is reached.
    for late in devices[3:]:
        await late.send()
        await late.receive()
        assert (late.answer.accepted, late.answer.reason) == (False, "late")
    await one_step(devices[:3])
    await one_step(devices[:3])
    answers = [asyncio.create_task(device.finish()) for device in devices[:2]]
    # The third one is in the sum, and does not help to unmask it in time.
    assert (await committed(store))["total"] == sum_of(*NUMBERS[:3])
    assert all(answer.accepted for answer in await asyncio.gather(*answers))
    assert (await devices[2].finish()).accepted


def test_large_vectors_come_in_parts_and_take_their_room_until_they_are_added(tmp_path):
    size = session_stream.PART_BYTES
    numbers = [tuple([i] * size) for i in range(4)]
    # Room for one: the others wait until it is in the sum, not until the step is over.
    receiving = limits.Limits(receiving_bytes=2 * size + 100_000)

    async def story(channel, notes, store):
        answers = await finish(
            await configured(channel, numbers, example_secure_task.demanded(size=size))
        )
        assert all(answer.accepted for answer in answers)
        assert (await committed(store))["total"] == [6] * size

    play(tmp_path, story, example_secure_task.served(size=size), limits=receiving)


@story(example_secure_task.served())
async def test_parts_that_end_in_something_else_are_refused(channel, store):
    devices = await configured(channel)
    await one_step(devices)
    await one_step(devices)
    await devices[1].stream.send(update_part=b"1234")
    await devices[1].stream.send(secure_sum=of(shares={}))
    answer = await devices[1].stream.receive()
    assert answer.reason == "unusable: the message came in parts and is no masked vector"
    await all_are_accepted([devices[0], *devices[2:]])
    assert (await committed(store))["total"] == sum_of(NUMBERS[0], *NUMBERS[2:])


@pytest.mark.parametrize("step", range(4))
@pytest.mark.parametrize("killed", ["aggregator", "master"])
@story(example_secure_task.served())
async def test_who_waits_for_an_actor_that_is_gone_is_told_so(channel, notes, store, killed, step):
    devices = await configured(channel)
    for _ in range(step):
        await one_step(devices)
    await asyncio.gather(*(device.send() for device in devices[:3]))
    engine = notes.server._engine
    (aggregator,) = [name for name in engine._members if "/aggregator/" in name]
    address = {"aggregator": aggregator, "master": aggregator.partition("/aggregator")[0]}
    engine._lose(engine._members[address[killed]], "KilledByATest")
    for device in devices[:3]:
        assert await device.receive() and device.answer.reason == "late"
    assert (await devices[3].finish()).reason == "late"
    await example.until(lambda: notes.of(events.RoundLost))
    assert not example.totals(store)
    await round_goes_on(channel, store)


def test_others_go_on_while_a_sum_is_unmasked(tmp_path, monkeypatch):
    begun, may_end = threading.Event(), threading.Event()
    total = group.Group.total

    def slow(made):
        begun.set()
        assert may_end.wait(30)
        return total(made)

    monkeypatch.setattr(group.Group, "total", slow)

    async def story(channel, notes, store):
        answers = asyncio.create_task(finish(await configured(channel)))
        await example.until(begun.is_set)
        for _ in range(2):  # The Coordinator and the store.
            ends = store.lease(example.POPULATION).expires_at
            await example.until(lambda ends=ends: store.lease(example.POPULATION).expires_at > ends)
        waiting = len(notes.named("waiting"))
        stream = await example.connect(channel)  # The Selector.
        await stream.check_in()
        await example.until(lambda: len(notes.named("waiting")) == waiting + 1)
        assert not example.totals(store)
        may_end.set()
        assert all(answer.accepted for answer in await answers)
        assert (await committed(store))["total"] == sum_of(*NUMBERS)

    play(tmp_path, story, example_secure_task.served())
