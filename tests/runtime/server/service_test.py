import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import time

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from tests.runtime.server import example_service as example
from tests.runtime.server.example_service import play
from tff_dpftrl.runtime.actors import events, messages
from tff_dpftrl.runtime.protocol import attestation, session_stream, wire_pb2
from tff_dpftrl.runtime.server import limits

Status = grpc.StatusCode


async def a_round(channel, *updates, **check_in):
    updates = updates or (b"1", b"1")
    return await asyncio.gather(
        *(example.take_part(channel, update, **check_in) for update in updates)
    )


async def round_goes_on(channel, store):
    """A round of two honest devices is committed."""
    done = len(example.totals(store))
    assert all(answer.accepted for _, answer in await a_round(channel))
    await example.until(lambda: len(example.totals(store)) == done + 1)
    assert example.totals(store)[-1] == 2


async def refused_at_check_in(channel, **check_in):
    stream = await example.connect(channel)
    await stream.check_in(**check_in)
    return await stream.status()


@pytest.mark.parametrize(
    ("check_in", "code", "text", "reason"),
    [
        ({"population": "dogs"}, Status.NOT_FOUND, "no such population", "unknown population"),
        (
            {"protocol_version": 7},
            Status.FAILED_PRECONDITION,
            "speaks versions [1, 2] of the protocol, not 7",
            "no common version",
        ),
        (
            {"runtime_version": 0},
            Status.FAILED_PRECONDITION,
            "no task has a plan for version 0",
            "no plan for its version",
        ),
        (
            {"token": bytes(limits.CHECK_IN_BYTES)},
            Status.RESOURCE_EXHAUSTED,
            "of more than 4096 bytes is too large",
            "message too large",
        ),
    ],
    ids=["population", "protocol", "runtime", "size"],
)
def test_a_check_in_that_cannot_be_served_is_one_line(tmp_path, check_in, code, text, reason):
    async def story(channel, notes, store):
        got, details = await refused_at_check_in(channel, **check_in)
        assert got is code and text in details and "\n" not in details
        assert notes.named("refused") == [("refused", reason)]
        await example.until(lambda: notes.named("closed") == [("closed", "refused")])
        await round_goes_on(channel, store)

    play(tmp_path, story)


@pytest.mark.parametrize(
    ("first", "text"),
    [
        (b"\xff\xff", "the check-in cannot be read"),
        (b"", "a check-in was expected"),
        (
            wire_pb2.FromDevice(report=wire_pb2.Report(attempt="a")).SerializeToString(),
            "a check-in was expected",
        ),
    ],
    ids=["unreadable", "empty", "report"],
)
def test_who_begins_with_something_else_is_told_so(tmp_path, first, text):
    async def story(channel, notes, store):
        stream = await example.connect(channel)
        await stream.call.write(first)
        assert await stream.status() == (Status.INVALID_ARGUMENT, text)
        await round_goes_on(channel, store)

    play(tmp_path, story)


def test_who_rests_leaves_after_the_challenge(tmp_path):
    async def story(channel, notes, store):
        await round_goes_on(channel, store)
        stream = await example.connect(channel)
        assert stream.challenge.task and stream.challenge.round_index == 1
        await stream.call.done_writing()
        assert (await stream.status())[0] is Status.OK
        assert ("sent away", "it has to rest") in notes.calls
        await round_goes_on(channel, store)

    play(tmp_path, story)


def test_a_method_that_there_is_not_is_refused(tmp_path):
    async def story(channel, notes, store):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await channel.unary_unary("/other/Method")(b"")
        assert raised.value.code() is Status.UNIMPLEMENTED
        await round_goes_on(channel, store)

    play(tmp_path, story)


def test_devices_get_the_plan_for_their_version(tmp_path):
    async def story(channel, notes, store):
        old, new = await asyncio.gather(
            example.take_part(channel, runtime_version=1), example.take_part(channel)
        )
        assert (old[0].plan, new[0].plan) == (example.PLAN_OF_OLD, example.PLAN_OF_NOW)
        assert old[0].attempt == new[0].attempt
        assert old[1].accepted and new[1].accepted

    play(tmp_path, story)


# Tokens.


def signed_tokens(key):
    return attestation.SignedTokens([key.public_key()], clock=time.time)


def test_only_genuine_devices_take_part_and_each_token_counts_once(tmp_path):
    key = ed25519.Ed25519PrivateKey.generate()
    genuine = attestation.TokenIssuer(key, clock=time.time)
    late = attestation.TokenIssuer(key, clock=lambda: time.time() - 10_000)
    other = attestation.TokenIssuer(ed25519.Ed25519PrivateKey.generate(), clock=time.time)
    used = []

    async def check_in(channel, issuer, host, population=example.POPULATION):
        stream = await example.connect(channel)
        nonce = session_stream.attested_nonce(stream.challenge.challenge, host, population)
        used.append(issuer.issue(nonce))
        await stream.check_in(token=used[-1])
        return stream

    async def take_part(channel, host):
        stream = await check_in(channel, genuine, host)
        configuration = await stream.receive()
        await stream.report(configuration.attempt, b"1")
        return await stream.receive()

    async def story(channel, notes, store):
        refused = {
            "malformed token": await refused_at_check_in(channel),
            "token of an unknown issuer": await (
                await check_in(channel, other, "localhost")
            ).status(),
            "expired token": await (await check_in(channel, late, "localhost")).status(),
            "token for another nonce": await (
                await check_in(channel, genuine, "example.org")
            ).status(),
        }
        for reason, status in refused.items():
            assert status == (Status.UNAUTHENTICATED, reason)
        # Whichever of the certificate's names they know the server by.
        for hosts in (("localhost", "127.0.0.1"), ("127.0.0.1", "localhost")):
            answers = await asyncio.gather(*(take_part(channel, host) for host in hosts))
            assert all(answer.accepted for answer in answers)
        again = await refused_at_check_in(channel, token=used[-1])
        assert again == (Status.UNAUTHENTICATED, "token for another nonce")

    notes = play(tmp_path, story, attestation=signed_tokens(key))
    assert ("refused", "expired token") in notes.calls


def test_challenges_differ(tmp_path):
    async def story(channel, notes, store):
        streams = [await example.connect(channel) for _ in range(5)]
        assert len({stream.challenge.challenge for stream in streams}) == 5
        assert all(list(s.challenge.protocol_versions) == [1, 2] for s in streams)

    play(tmp_path, story)


# Plans by their hash.


async def _offered(channel):
    """Checks in as a device that knows plans by their hash."""
    stream = await example.connect(channel)
    await stream.check_in(protocol_version=2)
    return stream, await stream.receive()


@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_plan_is_sent_if_it_is_wanted(tmp_path, is_wanted):
    async def story(channel, notes, store):
        streams = await asyncio.gather(*(_offered(channel) for _ in range(2)))
        for stream, configuration in streams:
            assert configuration.plan == b"" and configuration.broadcast == b"0"
            assert configuration.plan_sha256 == hashlib.sha256(b"plan of now").digest()
            if is_wanted:
                await stream.send(plan_wanted=wire_pb2.PlanWanted())
                plan = await stream.receive()
                assert session_stream.inflated_plan(plan.deflated, 100) == example.PLAN_OF_NOW
            await stream.report(configuration.attempt, b"1")
        for stream, _ in streams:
            assert (await stream.receive()).accepted

    notes = play(tmp_path, story)
    sizes = [num_bytes for _, _, num_bytes in notes.named("sent")]
    message = wire_pb2.Plan(deflated=session_stream.deflated_plan(example.PLAN_OF_NOW))
    assert sizes == [wire_pb2.FromServer(plan=message).ByteSize()] * (2 * is_wanted)


@pytest.mark.parametrize(("version", "questions"), [(1, 1), (2, 2)])
def test_a_plan_is_sent_once_and_to_who_may_ask(tmp_path, version, questions):
    async def story(channel, notes, store):
        stream = await example.connect(channel)
        other = await example.connect(channel)
        for one in (stream, other):
            await one.check_in(protocol_version=version)
        await stream.receive()
        for _ in range(questions):
            await stream.send(plan_wanted=wire_pb2.PlanWanted())
        code, details = await stream.status()
        assert (code, details) == (Status.INVALID_ARGUMENT, "a report was expected")

    play(tmp_path, story)


# Reports.


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"update": b"a million"}, "unusable: no integer"),
        ({"update": b"1", "attempt": "another"}, "wrong attempt"),
    ],
)
def test_a_report_that_does_not_count_is_refused_and_the_round_goes_on(tmp_path, bad, reason):
    async def story(channel, notes, store):
        streams = [await example.connect(channel) for _ in range(3)]
        for stream in streams:
            await stream.check_in()
        for i, stream in enumerate(streams):
            attempt = (await stream.receive()).attempt
            await stream.report(**{"attempt": attempt, "update": b"1", **(bad if i == 0 else {})})
        answers = [await stream.receive() for stream in streams]
        assert [answer.accepted for answer in answers] == [False, True, True]
        assert answers[0].reason == reason and list(answers[0].turns) == [5.0, 9.0]
        await example.until(lambda: example.totals(store) == [2])
        assert ("reported", reason.partition(":")[0]) in notes.calls

    play(tmp_path, story, example.served(goal_count=2, over_selection=1.5))


def report_of(num_bytes):
    report = wire_pb2.Report(attempt="a", update=bytes(num_bytes))
    return wire_pb2.FromDevice(report=report).SerializeToString()


@pytest.mark.parametrize(
    ("raw", "code", "text"),
    [
        (b"\xff\xff", Status.INVALID_ARGUMENT, "the report cannot be read"),
        (b"", Status.INVALID_ARGUMENT, "a report was expected"),
        (
            wire_pb2.FromDevice(check_in=wire_pb2.CheckIn()).SerializeToString(),
            Status.INVALID_ARGUMENT,
            "a report was expected",
        ),
        (None, Status.INVALID_ARGUMENT, "the stream ended without a report"),
        # Of this task, and of what the server receives at all.
        (report_of(6000), Status.RESOURCE_EXHAUSTED, "of more than 5096 bytes is too large"),
        (report_of(50_000), Status.RESOURCE_EXHAUSTED, "larger than max"),
    ],
    ids=["unreadable", "empty", "check-in", "end", "too large", "much too large"],
)
def test_what_is_no_report_ends_the_session_and_the_round_goes_on(tmp_path, raw, code, text):
    async def story(channel, notes, store):
        streams = [await example.connect(channel) for _ in range(3)]
        for stream in streams:
            await stream.check_in()
        configurations = [await stream.receive() for stream in streams]
        mine = next(i for i, c in enumerate(configurations) if c.task == "small")
        if raw is None:
            await streams[mine].call.done_writing()
        else:
            await streams[mine].call.write(raw)
        got, details = await streams[mine].status()
        assert got is code and text in details
        for i, stream in enumerate(streams):
            if i != mine:
                await stream.report(configurations[i].attempt, b"1")
                assert (await stream.receive()).accepted
        await example.until(lambda: example.totals(store, "small") == [2])

    small = example.served("small", goal_count=2, over_selection=1.5)
    large = example.served("large", goal_count=2, largest=20_000, weight=1e-6)
    play(tmp_path, story, small, large)


# Updates in parts.

MIB = 1 << 20


def long_number(num_bytes):
    return b"1".rjust(num_bytes)


async def configured(channel, count):
    """Streams of so many devices, and the attempt they are asked to take part in."""
    streams = [await example.connect(channel) for _ in range(count)]
    for stream in streams:
        await stream.check_in()
    return streams, [(await stream.receive()).attempt for stream in streams][0]


def test_a_large_update_comes_in_parts(tmp_path):
    async def story(channel, notes, store):
        streams, attempt = await configured(channel, 2)
        for stream in streams:
            report = wire_pb2.Report(attempt=attempt, update=long_number(2 * MIB + 5))
            sent = list(session_stream.report_messages(report))
            assert len(sent) == 4  # The first part is small, the report without an update.
            for message in sent:
                await stream.call.write(message.SerializeToString())
        for stream in streams:
            assert (await stream.receive()).accepted
            assert await stream.status() == (Status.OK, "")
        await example.until(lambda: example.totals(store) == [2])

    play(tmp_path, story, example.served(largest=3 * MIB))


@pytest.mark.parametrize(
    ("parts", "last", "code", "text"),
    [
        (
            [1000, MIB, MIB],
            wire_pb2.FromDevice(update_part=bytes(MIB)),
            Status.RESOURCE_EXHAUSTED,
            "a report of more than",
        ),
        (
            [],
            wire_pb2.FromDevice(update_part=bytes(2000)),
            Status.RESOURCE_EXHAUSTED,
            "a first part of more than 1024 bytes is too large",
        ),
        (
            [1000, MIB],
            wire_pb2.FromDevice(check_in=wire_pb2.CheckIn()),
            Status.INVALID_ARGUMENT,
            "a report was expected",
        ),
        (
            [1000, 1, MIB],
            wire_pb2.FromDevice(update_part=b""),
            Status.INVALID_ARGUMENT,
            "only the last part may have less than 1024 bytes",
        ),
        ([1000, MIB], None, Status.INVALID_ARGUMENT, "the stream ended without a report"),
    ],
    ids=["too large", "first too large", "check-in", "small", "end"],
)
def test_parts_that_make_no_update_end_the_session(tmp_path, parts, last, code, text):
    async def story(channel, notes, store):
        streams, attempt = await configured(channel, 3)
        for num_bytes in parts:
            await streams[0].send(update_part=bytes(num_bytes))
        if last is None:
            await streams[0].call.done_writing()
        else:
            await streams[0].call.write(last.SerializeToString())
        got, details = await streams[0].status()
        assert got is code and text in details
        for stream in streams[1:]:
            await stream.report(attempt, b"1")
            assert (await stream.receive()).accepted
        await example.until(lambda: example.totals(store) == [2])

    play(tmp_path, story, example.served(goal_count=2, over_selection=1.5, largest=5 * MIB // 2))


def test_an_aggregator_hears_who_has_begun_to_send(tmp_path):
    received = []

    async def story(channel, notes, store):
        deliver = notes.server._engine.deliver

        def listen(to, message):
            if type(message) in (messages.ReportBegun, messages.Report):
                received.append(type(message))
            deliver(to, message)

        notes.server._engine.deliver = listen
        streams, attempt = await configured(channel, 2)
        await streams[0].send(update_part=b"1")
        await streams[0].report(attempt, b"")
        assert (await streams[0].receive()).accepted
        await streams[1].report(attempt, b"1")
        await example.until(lambda: example.totals(store) == [2])

    play(tmp_path, story)
    assert received == [messages.ReportBegun, messages.Report, messages.Report]


def test_large_updates_wait_for_room_and_not_for_ever(tmp_path):
    async def story(channel, notes, store):
        streams, attempt = await configured(channel, 3)
        await streams[0].send(update_part=b"1")  # It takes all the room, and its time.
        for stream in streams[1:]:
            await stream.send(update_part=b"1")
            await stream.report(attempt, b"")
        answers = [await stream.receive() for stream in streams]
        assert [answer.reason for answer in answers] == ["late", "", ""]
        assert [closed for _, closed in notes.named("closed")].index("training") == 0
        await example.until(lambda: example.totals(store) == [2])

    limit = limits.Limits(receiving_bytes=MIB, transfer_seconds=2.0)
    play(tmp_path, story, example.served(over_selection=1.5, largest=3 * MIB), limits=limit)


def test_a_report_after_the_round_is_late(tmp_path):
    async def story(channel, notes, store):
        streams = [await example.connect(channel) for _ in range(3)]
        for stream in streams:
            await stream.check_in()
        attempts = [(await stream.receive()).attempt for stream in streams]
        for i, stream in enumerate(streams):
            await stream.report(attempts[i], b"1")
            answer = await stream.receive()
            if i < 2:
                assert answer.accepted
            else:
                assert not answer.accepted and answer.reason == "late"
                assert list(answer.turns) == [5.0, 9.0]
            await example.until(lambda i=i: example.totals(store) == [2] * (i > 0))

    play(tmp_path, story, example.served(goal_count=2, over_selection=1.5))


def test_who_never_reports_is_told_that_it_is_late(tmp_path):
    async def story(channel, notes, store):
        streams = [await example.connect(channel) for _ in range(2)]
        for stream in streams:
            await stream.check_in()
            await asyncio.sleep(0)
        for stream in streams:
            await stream.receive()
        for stream in streams:
            answer = await stream.receive()
            assert (answer.accepted, answer.reason) == (False, "late")
        assert notes.of(events.RoundLost)[0].reason == "too few reports"
        assert example.totals(store) == []

    quick = example.served(reporting_timeout=0.2, exchange_timeout=0.05)
    notes = play(tmp_path, story, quick)
    assert notes.named("closed") == [("closed", "training")] * 2


def test_a_second_report_is_not_read(tmp_path):
    async def story(channel, notes, store):
        streams = [await example.connect(channel) for _ in range(2)]
        for stream in streams:
            await stream.check_in()
        for stream in streams:
            attempt = (await stream.receive()).attempt
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                for _ in range(3):
                    await stream.report(attempt, b"1")
            assert (await stream.receive()).accepted
        await example.until(lambda: example.totals(store) == [2])
        await round_goes_on(channel, store)

    play(tmp_path, story)


# Devices that go away.


def test_who_goes_away_while_it_waits_is_not_selected(tmp_path):
    async def story(channel, notes, store):
        await example.connect(channel)  # And never checks in.
        stream = await example.connect(channel)
        await stream.check_in()
        await example.until(lambda: notes.named("waiting"))
        stream.call.cancel()
        await example.until(lambda: ("closed", "waiting") in notes.calls)
        await round_goes_on(channel, store)
        assert notes.of(events.RoundBegan)[0].devices == 2

    play(tmp_path, story)


def test_who_goes_away_while_it_trains_is_not_waited_for(tmp_path):
    async def story(channel, notes, store):
        streams = [await example.connect(channel) for _ in range(3)]
        for stream in streams:
            await stream.check_in()
        attempts = [(await stream.receive()).attempt for stream in streams]
        streams[0].call.cancel()
        await streams[1].report(attempts[1], b"5")
        # 30 seconds would be left to report.
        streams[2].call.cancel()
        await example.until(lambda: notes.of(events.RoundReleased) or notes.of(events.RoundLost))
        (lost,) = notes.of(events.RoundLost)
        assert lost.reason == "too few reports"
        assert lost.counts == {"reports": 1, "dropped": 2, "outstanding": 0, "lost_aggregators": 0}
        assert notes.named("closed").count(("closed", "training")) == 2

    play(tmp_path, story, example.served(goal_count=2, over_selection=1.5))


def test_who_goes_away_as_it_is_selected_is_not_waited_for(tmp_path):
    async def story(channel, notes, store):
        stream = await example.connect(channel)
        await stream.check_in()
        await example.until(lambda: notes.named("waiting"))
        # Both in one turn of the event loop: its session never comes to know the attempt.
        engine, sessions = notes.server._engine, notes.server._service._sessions
        (address,) = sessions
        gone = []
        engine.connect("sums", gone.append)
        engine.deliver(address, messages.Configure(address, "sums", "attempt", "sum", 0, b""))
        sessions[address]._coroutine.cancel()
        await example.until(lambda: gone)
        assert gone == [messages.DeviceGone(address)]

    play(tmp_path, story)


def test_who_does_not_read_its_configuration_makes_room_for_others(tmp_path, caplog):
    async def story(channel, notes, store):
        # A connection of its own, which holds less than the model.
        options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16)]
        async with example.channel_to(tmp_path, notes.server.address, options) as other:
            stream = await example.connect(other)
            await stream.check_in()
            await example.until(lambda: notes.named("waiting"))
            _, answer = await example.take_part(channel)
            assert answer.accepted
            await example.until(lambda: example.totals(store) == [1])
            await example.until(lambda: ("closed", "training") in notes.calls)

    limit = limits.Limits(sending_bytes=1, transfer_seconds=3.0)
    model = long_number(4 * MIB)
    play(tmp_path, story, example.served(least_fraction=0.5), model=model, limits=limit)
    assert not caplog.records  # As of gRPC, if it is to send a status while it still sends.


def test_who_does_not_check_in_is_sent_off(tmp_path):
    async def story(channel, notes, store):
        stream = await example.connect(channel)
        code, details = await stream.status()
        assert (code, details) == (Status.DEADLINE_EXCEEDED, "no check-in within 1 seconds")
        await round_goes_on(channel, store)

    notes = play(tmp_path, story, limits=limits.Limits(check_in_seconds=1.0))
    assert ("refused", "no check-in in time") in notes.calls


def test_nobody_waits_for_ever(tmp_path):
    async def story(channel, notes, store):
        stream = await example.connect(channel)
        await stream.check_in()
        away = await stream.receive()
        assert away.reason == "no round has begun" and list(away.turns) == [5.0, 9.0]
        assert await stream.status() == (Status.OK, "")
        await round_goes_on(channel, store)
        assert notes.of(events.RoundBegan)[0].devices == 2  # Not three.

    play(tmp_path, story, limits=limits.Limits(waiting_seconds=2.0))


# Floods.


def test_more_sessions_than_there_may_be_are_refused(tmp_path):
    async def story(channel, notes, store):
        streams = [await example.connect(channel) for _ in range(3)]
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await example.connect(channel)
        assert raised.value.code() is Status.RESOURCE_EXHAUSTED
        assert raised.value.details() == "too many sessions at a time: try again later"
        for stream in streams:
            stream.call.cancel()
        await example.until(lambda: len(notes.named("closed")) == 4)
        await round_goes_on(channel, store)

    play(tmp_path, story, limits=limits.Limits(sessions=3))


@pytest.mark.parametrize("what", ["address", "connection"])
def test_one_host_cannot_take_all_places(tmp_path, what):
    async def story(channel, notes, store):
        streams = [await example.connect(channel) for _ in range(2)]
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await example.connect(channel)
        assert raised.value.code() is Status.RESOURCE_EXHAUSTED
        assert raised.value.details() == (
            f"this {what} has 2 sessions open, which is the limit: close one, or try again later"
        )
        options = [("grpc.use_local_subchannel_pool", 1)]  # Otherwise channels share a connection.
        async with example.channel_to(tmp_path, notes.server.address, options) as another:
            if what == "connection":
                await example.connect(another)
            else:
                with pytest.raises(grpc.aio.AioRpcError):
                    await example.connect(another)
        for stream in streams:
            stream.call.cancel()
        await example.until(lambda: len(notes.named("closed")) == 4)
        await round_goes_on(channel, store)

    limit = limits.Limits(**{f"sessions_per_{what}": 2})
    notes = play(tmp_path, story, limits=limit)
    assert ("refused", f"too many sessions of one {what}") in notes.calls


def test_the_selector_is_told_a_hash_of_where_a_device_is(tmp_path):
    received = []

    async def story(channel, notes, store):
        deliver = notes.server._engine.deliver

        def listen(to, message):
            if type(message) is messages.CheckIn:
                received.append(message.peer)
            deliver(to, message)

        notes.server._engine.deliver = listen
        await round_goes_on(channel, store)

    play(tmp_path, story)
    assert len(received) > 1 and len(set(received)) == 1
    assert len(received[0]) == 32 and "127" not in bytes.fromhex(received[0]).decode("latin-1")


def test_more_check_ins_than_there_may_be_are_told_to_come_back(tmp_path):
    async def story(channel, notes, store):
        got = await a_round(channel, *[b"1"] * 20)
        away = [message for message, answer in got if answer is None]
        reasons = [message.reason for message in away]
        assert reasons.count("too many devices check in") >= 10
        assert all(list(message.turns) == [5.0, 9.0] for message in away)
        await example.until(lambda: example.totals(store))

    play(tmp_path, story, limits=limits.Limits(check_ins_per_second=4.0, waiting_seconds=1.0))


def test_who_comes_after_the_last_round_is_told_so(tmp_path):
    made = example.served()
    last = dataclasses.replace(made, task=dataclasses.replace(made.task, num_rounds=1))

    async def story(channel, notes, store):
        await round_goes_on(channel, store)
        ((message, answer),) = await a_round(channel, b"1")
        assert answer is None and message.finished and list(message.turns) == [5.0, 9.0]
        assert message.reason == "all rounds of all tasks are done"

    play(tmp_path, story, last)


# Actors that fail.


def test_a_failing_aggregator_costs_its_devices(tmp_path, caplog):
    async def story(channel, notes, store):
        streams = [await example.connect(channel) for _ in range(4)]
        for stream in streams:
            await stream.check_in()
        attempts = [(await stream.receive()).attempt for stream in streams]
        # One to each Aggregator, since groups are of one device.
        for i, stream in enumerate(streams):
            await stream.report(attempts[i], b"crash" if i == 0 else b"1")
            answer = await stream.receive()
            assert answer.accepted == (i > 0) and answer.reason == ("" if i else "late")
        await example.until(lambda: example.totals(store) == [3])

    rounds = {"over_selection": 4 / 3, "devices_per_aggregator": 1}
    play(tmp_path, story, example.served(goal_count=3, **rounds))
    assert "failed with ZeroDivisionError" in caplog.text and "secret" not in caplog.text


def test_a_failing_server_step_releases_nothing_and_the_round_is_skipped(tmp_path, caplog):
    async def story(channel, notes, store):
        got = await a_round(channel, b"-1", b"-1")
        assert all(answer.accepted for _, answer in got)
        await example.until(lambda: notes.of(events.RoundLost))
        assert notes.of(events.RoundLost)[0].reason == "its Master Aggregator is lost"
        assert example.totals(store) == []
        ((configuration, _), _) = await a_round(channel)
        assert (configuration.round_index, configuration.broadcast) == (1, b"0")
        await example.until(lambda: example.totals(store) == [2])
        assert [row["round"] for row in example.released(store)] == [1]

    play(tmp_path, story)
    assert "failed with ArithmeticError" in caplog.text and "secret" not in caplog.text


def test_devices_that_a_failed_selector_has_forgotten_come_back(tmp_path, monkeypatch):
    async def story(channel, notes, store):
        stream = await example.connect(channel)
        await stream.check_in()
        await example.until(lambda: notes.named("waiting"))
        monkeypatch.setattr("tff_dpftrl.runtime.server.engine._RESTART_SECONDS", 0.01)
        notes.server._engine.deliver("selector", "no message that it knows")
        away = await stream.receive()
        assert away.reason == "the server has lost its place"
        await asyncio.sleep(0.5)  # A Coordinator finds the new Selector at its next heartbeat.
        await round_goes_on(channel, store)

    play(tmp_path, story)


# Summaries that devices send.


def summary(**changes):
    given = {
        "population": example.POPULATION,
        "shape": "-v[]+^",
        "seconds": 12.0,
        "peak_memory_bytes": 10**9,
        "versions": {"tff_dpftrl": "0.9.1", "python": "3.11"},
    }
    return wire_pb2.SessionSummary(**{**given, **changes}).SerializeToString()


async def tell(channel, raw):
    try:
        await channel.unary_unary(session_stream.TELL_METHOD)(raw)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details()
    return Status.OK, ""


def test_summaries_of_sessions_are_counted_if_they_are_in_range(tmp_path):
    refused = [
        (b"\xff", Status.INVALID_ARGUMENT, "cannot be read"),
        (summary(population="dogs"), Status.NOT_FOUND, "no such population"),
        (summary(seconds=float("nan")), Status.INVALID_ARGUMENT, "seconds"),
        (summary(seconds=-1.0), Status.INVALID_ARGUMENT, "seconds"),
        (summary(seconds=1e9), Status.INVALID_ARGUMENT, "seconds"),
        (summary(peak_memory_bytes=2**60), Status.INVALID_ARGUMENT, "peak_memory_bytes"),
        (summary(versions={"a" * 33: "1"}), Status.INVALID_ARGUMENT, "short name"),
        (summary(versions={"a": "<b>"}), Status.INVALID_ARGUMENT, "short name"),
        (summary(versions={f"{i}": "1" for i in range(9)}), Status.INVALID_ARGUMENT, "too many"),
        (summary(shape="-" * 4500), Status.RESOURCE_EXHAUSTED, "too large"),
    ]

    async def story(channel, notes, store):
        for raw, code, text in refused:
            got, details = await tell(channel, raw)
            assert got is code and text in details
        assert not notes.named("session_summarized")
        await round_goes_on(channel, store)
        assert (await tell(channel, summary()))[0] is Status.OK
        assert (await tell(channel, summary(shape="<script>")))[0] is Status.OK
        assert notes.named("session_summarized") == [
            ("session_summarized", "-v[]+^"),
            ("session_summarized", "other"),
        ]

    play(tmp_path, story)


def test_more_summaries_than_there_may_be_are_dropped(tmp_path):
    async def story(channel, notes, store):
        for _ in range(2):
            await round_goes_on(channel, store)
        answers = [await tell(channel, summary()) for _ in range(4)]
        assert answers[:2] == [(Status.OK, "")] * 2
        too_many = "too many summaries at a time: do not try again"
        assert answers[2:] == [(Status.RESOURCE_EXHAUSTED, too_many)] * 2

    play(tmp_path, story, limits=limits.Limits(summaries_per_second=2.0))


def test_nothing_of_a_device_is_logged(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    word = "d67sentinel"

    async def story(channel, notes, store):
        await refused_at_check_in(channel, population=word)
        await refused_at_check_in(channel, token=word.encode() * 1000)
        await a_round(channel, word.encode(), b"crash")
        await tell(channel, summary(shape=word))
        await example.until(lambda: notes.of(events.RoundLost))
        assert word not in repr(notes.events)

    play(tmp_path, story)
    assert "failed with ZeroDivisionError" in caplog.text
    assert word not in caplog.text and "ipv4:" not in caplog.text
