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
from tests.runtime.server.example_service import play, story
from tff_dpftrl.runtime.actors import events, messages
from tff_dpftrl.runtime.protocol import attestation, session_stream, wire_pb2
from tff_dpftrl.runtime.server import limits

Status = grpc.StatusCode


async def a_round(channel, *updates, **check_in):
    updates = updates or (b"1", b"1")
    return await asyncio.gather(
        *(example.take_part(channel, update, **check_in) for update in updates)
    )


async def checked_in(channel, count, **check_in):
    """Streams of so many devices."""
    streams = [await example.connect(channel) for _ in range(count)]
    for stream in streams:
        await stream.check_in(**check_in)
    return streams


async def configured(channel, count):
    """Streams of so many devices, and the attempt they are asked to take part in."""
    streams = await checked_in(channel, count)
    return streams, [(await stream.receive()).attempt for stream in streams][0]


async def all_are_accepted(streams, attempt):
    for stream in streams:
        await stream.report(attempt, b"1")
        assert (await stream.receive()).accepted


async def round_goes_on(channel, store):
    """A round of two honest devices is committed."""
    done = len(example.totals(store))
    assert all(answer.accepted for _, answer in await a_round(channel))
    await example.until(lambda: len(example.totals(store)) == done + 1)
    assert example.totals(store)[-1] == 2


def report_of(num_bytes):
    report = wire_pb2.Report(attempt="a", update=bytes(num_bytes))
    return wire_pb2.FromDevice(report=report).SerializeToString()


CHECK_IN = wire_pb2.FromDevice(check_in=wire_pb2.CheckIn()).SerializeToString()


async def refused_at_check_in(channel, **check_in):
    (stream,) = await checked_in(channel, 1, **check_in)
    return await stream.status()


@pytest.mark.parametrize(
    ("check_in", "code", "text", "reason"),
    [
        ({"population": "dogs"}, "NOT_FOUND", "no such population", "unknown population"),
        ({"protocol_version": 7}, "FAILED", "speaks versions [1, 2] of the", "no common version"),
        (
            {"runtime_version": 0},
            "FAILED",
            "no task has a plan for versi",
            "no plan for its version",
        ),
        (
            {"token": bytes(4096)},
            "EXHAUSTED",
            "of more than 4096 bytes is too",
            "message too large",
        ),
    ],
)
@story()
async def test_a_check_in_that_cannot_be_served_is_one_line(
    channel, notes, store, check_in, code, text, reason
):
    got, details = await refused_at_check_in(channel, **check_in)
    assert code in got.name and text in details and "\n" not in details
    assert notes.named("refused") == [("refused", reason)]
    await example.until(lambda: notes.named("closed") == [("closed", "refused")])
    await round_goes_on(channel, store)


@pytest.mark.parametrize(
    ("first", "text"),
    [
        (b"\xff\xff", "the check-in cannot be read"),
        (b"", "a check-in was expected"),
        (report_of(0), "a check-in was expected"),
    ],
    ids=["unreadable", "empty", "report"],
)
@story()
async def test_who_begins_with_something_else_is_told_so(channel, store, first, text):
    stream = await example.connect(channel)
    await stream.call.write(first)
    assert await stream.status() == (Status.INVALID_ARGUMENT, text)
    await round_goes_on(channel, store)


@story()
async def test_who_rests_leaves_after_the_challenge(channel, notes, store):
    await round_goes_on(channel, store)
    stream = await example.connect(channel)
    assert stream.challenge.task and stream.challenge.round_index == 1
    await stream.call.done_writing()
    assert (await stream.status())[0] is Status.OK
    assert ("sent away", "it has to rest") in notes.calls
    await round_goes_on(channel, store)


@story()
async def test_a_method_that_there_is_not_is_refused(channel, store):
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await channel.unary_unary("/other/Method")(b"")
    assert raised.value.code() is Status.UNIMPLEMENTED
    await round_goes_on(channel, store)


@story()
async def test_devices_get_the_plan_for_their_version(channel):
    old, new = await asyncio.gather(
        example.take_part(channel, runtime_version=1), example.take_part(channel)
    )
    assert (old[0].plan, new[0].plan) == (example.PLAN_OF_OLD, example.PLAN_OF_NOW)
    assert old[0].attempt == new[0].attempt
    assert old[1].accepted and new[1].accepted


# Tokens.


KEY = ed25519.Ed25519PrivateKey.generate()


@story(attestation=attestation.SignedTokens([KEY.public_key()], clock=time.time))
async def test_only_genuine_devices_take_part_and_each_token_counts_once(channel, notes):
    genuine = attestation.TokenIssuer(KEY, clock=time.time)
    late = attestation.TokenIssuer(KEY, clock=lambda: time.time() - 10_000)
    other = attestation.TokenIssuer(ed25519.Ed25519PrivateKey.generate(), clock=time.time)
    used = []

    async def check_in(issuer, host):
        stream = await example.connect(channel)
        nonce = session_stream.attested_nonce(stream.challenge.challenge, host, example.POPULATION)
        used.append(issuer.issue(nonce))
        await stream.check_in(token=used[-1])
        return stream

    async def take_part(host):
        stream = await check_in(genuine, host)
        configuration = await stream.receive()
        await stream.report(configuration.attempt, b"1")
        return await stream.receive()

    assert await refused_at_check_in(channel) == (Status.UNAUTHENTICATED, "malformed token")
    for issuer, host, reason in (
        (other, "localhost", "token of an unknown issuer"),
        (late, "localhost", "expired token"),
        (genuine, "example.org", "token for another nonce"),
    ):
        status = await (await check_in(issuer, host)).status()
        assert status == (Status.UNAUTHENTICATED, reason)
    # Whichever of the certificate's names they know the server by.
    for hosts in (("localhost", "127.0.0.1"), ("127.0.0.1", "localhost")):
        answers = await asyncio.gather(*map(take_part, hosts))
        assert all(answer.accepted for answer in answers)
    again = await refused_at_check_in(channel, token=used[-1])
    assert again == (Status.UNAUTHENTICATED, "token for another nonce")
    assert ("refused", "expired token") in notes.calls


@story()
async def test_challenges_differ(channel):
    streams = [await example.connect(channel) for _ in range(5)]
    assert len({stream.challenge.challenge for stream in streams}) == 5
    assert all(list(s.challenge.protocol_versions) == [1, 2] for s in streams)


# Plans by their hash.


@pytest.mark.parametrize("is_wanted", [True, False])
@story()
async def test_a_plan_is_sent_if_it_is_wanted(channel, notes, is_wanted):
    streams = await checked_in(channel, 2, protocol_version=2)
    for stream in streams:
        configuration = await stream.receive()
        assert configuration.plan == b"" and configuration.broadcast == b"0"
        assert configuration.plan_sha256 == hashlib.sha256(b"plan of now").digest()
        if is_wanted:
            await stream.send(plan_wanted=wire_pb2.PlanWanted())
            plan = await stream.receive()
            assert session_stream.inflated_plan(plan.deflated, 100) == example.PLAN_OF_NOW
        await stream.report(configuration.attempt, b"1")
    for stream in streams:
        assert (await stream.receive()).accepted
    message = wire_pb2.Plan(deflated=session_stream.deflated_plan(example.PLAN_OF_NOW))
    size = wire_pb2.FromServer(plan=message).ByteSize()
    assert [num_bytes for _, _, num_bytes in notes.named("sent")] == [size] * (2 * is_wanted)


@pytest.mark.parametrize(("version", "questions"), [(1, 1), (2, 2)])
@story()
async def test_a_plan_is_sent_once_and_to_who_may_ask(channel, version, questions):
    stream, _ = await checked_in(channel, 2, protocol_version=version)
    await stream.receive()
    for _ in range(questions):
        await stream.send(plan_wanted=wire_pb2.PlanWanted())
    assert await stream.status() == (Status.INVALID_ARGUMENT, "a report was expected")


# Reports.

THREE_FOR_TWO = example.served(over_selection=1.5)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"update": b"a million"}, "unusable: no integer"),
        ({"update": b"1", "attempt": "another"}, "wrong attempt"),
    ],
)
@story(THREE_FOR_TWO)
async def test_a_report_that_does_not_count_is_refused_and_the_round_goes_on(
    channel, notes, store, bad, reason
):
    streams, attempt = await configured(channel, 3)
    await streams[0].report(**{"attempt": attempt, **bad})
    answer = await streams[0].receive()
    assert not answer.accepted and answer.reason == reason and list(answer.turns) == [5.0, 9.0]
    await all_are_accepted(streams[1:], attempt)
    await example.until(lambda: example.totals(store) == [2])
    assert ("reported", reason.partition(":")[0]) in notes.calls


@pytest.mark.parametrize(
    ("raw", "code", "text"),
    [
        (b"\xff\xff", Status.INVALID_ARGUMENT, "the report cannot be read"),
        (b"", Status.INVALID_ARGUMENT, "a report was expected"),
        (CHECK_IN, Status.INVALID_ARGUMENT, "a report was expected"),
        (None, Status.INVALID_ARGUMENT, "the stream ended without a report"),
        # Of this task, and of what the server receives at all.
        (report_of(6000), Status.RESOURCE_EXHAUSTED, "of more than 5096 bytes is too large"),
        (report_of(50_000), Status.RESOURCE_EXHAUSTED, "larger than max"),
    ],
    ids=["unreadable", "empty", "check-in", "end", "too large", "much too large"],
)
@story(
    example.served("small", over_selection=1.5),
    example.served("large", largest=20_000, weight=1e-6),
)
async def test_what_is_no_report_ends_the_session_and_the_round_goes_on(
    channel, store, raw, code, text
):
    streams = await checked_in(channel, 3)
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
            await all_are_accepted([stream], configurations[i].attempt)
    await example.until(lambda: example.totals(store, "small") == [2])


# Updates in parts.

MIB = 1 << 20


@story(example.served(largest=3 * MIB))
async def test_a_large_update_comes_in_parts(channel, store):
    streams, attempt = await configured(channel, 2)
    for stream in streams:
        report = wire_pb2.Report(attempt=attempt, update=b"1".rjust(2 * MIB + 5))
        sent = list(session_stream.report_messages(report))
        assert len(sent) == 4  # The first part is small, the report without an update.
        for message in sent:
            await stream.call.write(message.SerializeToString())
    for stream in streams:
        assert (await stream.receive()).accepted
        assert await stream.status() == (Status.OK, "")
    await example.until(lambda: example.totals(store) == [2])


@pytest.mark.parametrize(
    ("parts", "last", "code", "text"),
    [
        ([1000, MIB, MIB], {"update_part": bytes(MIB)}, "EXHAUSTED", "a report of more than"),
        ([], {"update_part": bytes(2000)}, "EXHAUSTED", "a first part of more than 1024 bytes is"),
        ([1000, MIB], {"check_in": wire_pb2.CheckIn()}, "INVALID", "a report was expected"),
        ([1000, 1, MIB], {"update_part": b""}, "INVALID", "only the last part may have less than "),
        ([1000, MIB], None, "INVALID", "the stream ended without a report"),
    ],
    ids=["too large", "first too large", "check-in", "small", "end"],
)
@story(example.served(over_selection=1.5, largest=5 * MIB // 2))
async def test_parts_that_make_no_update_end_the_session(channel, store, parts, last, code, text):
    (bad, *others), attempt = await configured(channel, 3)
    for num_bytes in parts:
        await bad.send(update_part=bytes(num_bytes))
    if last is None:
        await bad.call.done_writing()
    else:
        await bad.send(**last)
    got, details = await bad.status()
    assert code in got.name and text in details
    await all_are_accepted(others, attempt)
    await example.until(lambda: example.totals(store) == [2])


def listen(notes, *kinds):
    """A list of the messages of some kinds that actors get from now on."""
    received, deliver = [], notes.server._engine.deliver

    def heard(to, message):
        if type(message) in kinds:
            received.append(message)
        deliver(to, message)

    notes.server._engine.deliver = heard
    return received


@story()
async def test_an_aggregator_hears_who_has_begun_to_send(channel, notes, store):
    received = listen(notes, messages.ReportBegun, messages.Report)
    streams, attempt = await configured(channel, 2)
    await streams[0].send(update_part=b"1")
    await streams[0].report(attempt, b"")
    assert (await streams[0].receive()).accepted
    await streams[1].report(attempt, b"1")
    await example.until(lambda: example.totals(store) == [2])
    expected = [messages.ReportBegun, messages.Report, messages.Report]
    assert [type(message) for message in received] == expected


@story(
    example.served(over_selection=1.5, largest=3 * MIB),
    limits=limits.Limits(receiving_bytes=MIB, transfer_seconds=2.0),
)
async def test_large_updates_wait_for_room_and_not_for_ever(channel, notes, store):
    streams, attempt = await configured(channel, 3)
    await streams[0].send(update_part=b"1")  # It takes all the room, and its time.
    for stream in streams[1:]:
        await stream.send(update_part=b"1")
        await stream.report(attempt, b"")
    answers = [await stream.receive() for stream in streams]
    assert [answer.reason for answer in answers] == ["late", "", ""]
    assert [closed for _, closed in notes.named("closed")].index("training") == 0
    await example.until(lambda: example.totals(store) == [2])


@story(THREE_FOR_TWO)
async def test_a_report_after_the_round_is_late(channel, store):
    (*first, late), attempt = await configured(channel, 3)
    await all_are_accepted(first, attempt)
    await example.until(lambda: example.totals(store) == [2])
    await late.report(attempt, b"1")
    answer = await late.receive()
    assert not answer.accepted and answer.reason == "late" and list(answer.turns) == [5.0, 9.0]
    assert example.totals(store) == [2]


@story(example.served(reporting_timeout=0.2, exchange_timeout=0.05))
async def test_who_never_reports_is_told_that_it_is_late(channel, notes, store):
    streams, _ = await configured(channel, 2)
    for stream in streams:
        answer = await stream.receive()
        assert (answer.accepted, answer.reason) == (False, "late")
    assert notes.of(events.RoundLost)[0].reason == "too few reports"
    assert example.totals(store) == []
    await example.until(lambda: notes.named("closed") == [("closed", "training")] * 2)


@story()
async def test_a_second_report_is_not_read(channel, store):
    streams, attempt = await configured(channel, 2)
    for stream in streams:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for _ in range(3):
                await stream.report(attempt, b"1")
        assert (await stream.receive()).accepted
    await example.until(lambda: example.totals(store) == [2])
    await round_goes_on(channel, store)


# Devices that go away.


@story()
async def test_who_goes_away_while_it_waits_is_not_selected(channel, notes, store):
    await example.connect(channel)  # And never checks in.
    (stream,) = await checked_in(channel, 1)
    await example.until(lambda: notes.named("waiting"))
    stream.call.cancel()
    await example.until(lambda: ("closed", "waiting") in notes.calls)
    await round_goes_on(channel, store)
    assert notes.of(events.RoundBegan)[0].devices == 2


@story(THREE_FOR_TWO)
async def test_who_goes_away_while_it_trains_is_not_waited_for(channel, notes):
    streams, attempt = await configured(channel, 3)
    streams[0].call.cancel()
    await streams[1].report(attempt, b"5")
    streams[2].call.cancel()  # 30 seconds would be left to report.
    await example.until(lambda: notes.of(events.RoundReleased) or notes.of(events.RoundLost))
    (lost,) = notes.of(events.RoundLost)
    assert lost.reason == "too few reports"
    assert lost.counts == {"reports": 1, "dropped": 2, "outstanding": 0, "lost_aggregators": 0}
    assert notes.named("closed").count(("closed", "training")) == 2


@story()
async def test_who_goes_away_as_it_is_selected_is_not_waited_for(channel, notes):
    await checked_in(channel, 1)
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


def test_who_does_not_read_its_configuration_makes_room_for_others(tmp_path, caplog):
    async def story(channel, notes, store):
        # A connection of its own, which holds less than the model.
        options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16)]
        async with example.channel_to(tmp_path, notes.server.address, options) as other:
            await checked_in(other, 1)
            await example.until(lambda: notes.named("waiting"))
            _, answer = await example.take_part(channel)
            assert answer.accepted
            await example.until(lambda: example.totals(store) == [1])
            await example.until(lambda: ("closed", "training") in notes.calls)

    limit = limits.Limits(sending_bytes=1, transfer_seconds=3.0)
    model = b"1".rjust(4 * MIB)
    play(tmp_path, story, example.served(least_fraction=0.5), model=model, limits=limit)
    assert not caplog.records  # As of gRPC, if it is to send a status while it still sends.


@story(limits=limits.Limits(check_in_seconds=1.0))
async def test_who_does_not_check_in_is_sent_off(channel, notes, store):
    stream = await example.connect(channel)
    assert await stream.status() == (Status.DEADLINE_EXCEEDED, "no check-in within 1 seconds")
    await round_goes_on(channel, store)
    assert ("refused", "no check-in in time") in notes.calls


@story(limits=limits.Limits(waiting_seconds=2.0))
async def test_nobody_waits_for_ever(channel, notes, store):
    (stream,) = await checked_in(channel, 1)
    away = await stream.receive()
    assert away.reason == "no round has begun" and list(away.turns) == [5.0, 9.0]
    assert await stream.status() == (Status.OK, "")
    await round_goes_on(channel, store)
    assert notes.of(events.RoundBegan)[0].devices == 2  # Not three.


# Floods.


@story(limits=limits.Limits(sessions=3))
async def test_more_sessions_than_there_may_be_are_refused(channel, notes, store):
    streams = [await example.connect(channel) for _ in range(3)]
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await example.connect(channel)
    assert raised.value.code() is Status.RESOURCE_EXHAUSTED
    assert raised.value.details() == "too many sessions at a time: try again later"
    for stream in streams:
        stream.call.cancel()
    await example.until(lambda: len(notes.named("closed")) == 4)
    await round_goes_on(channel, store)


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


@story()
async def test_the_selector_is_told_a_hash_of_where_a_device_is(channel, notes, store):
    received = listen(notes, messages.CheckIn)
    await round_goes_on(channel, store)
    (peer,) = {message.peer for message in received}
    assert len(received) > 1
    assert len(peer) == 32 and "127" not in bytes.fromhex(peer).decode("latin-1")


@story(limits=limits.Limits(check_ins_per_second=4.0, waiting_seconds=1.0))
async def test_more_check_ins_than_there_may_be_are_told_to_come_back(channel, store):
    away = [message for message, answer in await a_round(channel, *[b"1"] * 20) if answer is None]
    assert [message.reason for message in away].count("too many devices check in") >= 10
    assert all(list(message.turns) == [5.0, 9.0] for message in away)
    await example.until(lambda: example.totals(store))


SERVED = example.served()
LAST = dataclasses.replace(SERVED, task=dataclasses.replace(SERVED.task, num_rounds=1))


@story(LAST)
async def test_who_comes_after_the_last_round_is_told_so(channel, store):
    await round_goes_on(channel, store)
    ((message, answer),) = await a_round(channel, b"1")
    assert answer is None and message.finished and list(message.turns) == [5.0, 9.0]
    assert message.reason == "all rounds of all tasks are done"


# Actors that fail.


@story(example.served(goal_count=3, over_selection=4 / 3, devices_per_aggregator=1))
async def test_a_failing_aggregator_costs_its_devices(channel, store, caplog):
    (first, *others), attempt = await configured(channel, 4)
    await first.report(attempt, b"crash")  # To an Aggregator of its own.
    answer = await first.receive()
    assert not answer.accepted and answer.reason == "late"
    await all_are_accepted(others, attempt)
    await example.until(lambda: example.totals(store) == [3])
    assert "failed with ZeroDivisionError" in caplog.text and "secret" not in caplog.text


@story()
async def test_a_failing_server_step_releases_nothing_and_the_round_is_skipped(
    channel, notes, store, caplog
):
    assert all(answer.accepted for _, answer in await a_round(channel, b"-1", b"-1"))
    await example.until(lambda: notes.of(events.RoundLost))
    assert notes.of(events.RoundLost)[0].reason == "its Master Aggregator is lost"
    assert example.totals(store) == []
    ((configuration, _), _) = await a_round(channel)
    assert (configuration.round_index, configuration.broadcast) == (1, b"0")
    await example.until(lambda: example.totals(store) == [2])
    assert [row["round"] for row in example.released(store)] == [1]
    assert "failed with ArithmeticError" in caplog.text and "secret" not in caplog.text


@story()
async def test_devices_that_a_failed_selector_has_forgotten_come_back(
    channel, notes, store, monkeypatch
):
    (stream,) = await checked_in(channel, 1)
    await example.until(lambda: notes.named("waiting"))
    monkeypatch.setattr("tff_dpftrl.runtime.server.engine._RESTART_SECONDS", 0.01)
    notes.server._engine.deliver("selector", "no message that it knows")
    away = await stream.receive()
    assert away.reason == "the server has lost its place"
    await asyncio.sleep(0.5)  # A Coordinator finds the new Selector at its next heartbeat.
    await round_goes_on(channel, store)


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


@story()
async def test_summaries_of_sessions_are_counted_if_they_are_in_range(channel, notes, store):
    for raw, code, text in (
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
    ):
        got, details = await tell(channel, raw)
        assert got is code and text in details
    assert not notes.named("session_summarized")
    await round_goes_on(channel, store)
    for shape in ("-v[]+^", "<script>"):
        assert await tell(channel, summary(shape=shape)) == (Status.OK, "")
    assert [shape for _, shape in notes.named("session_summarized")] == ["-v[]+^", "other"]


@story(limits=limits.Limits(summaries_per_second=2.0))
async def test_more_summaries_than_there_may_be_are_dropped(channel, store):
    for _ in range(2):
        await round_goes_on(channel, store)
    answers = [await tell(channel, summary()) for _ in range(4)]
    assert answers[:2] == [(Status.OK, "")] * 2
    too_many = "too many summaries at a time: do not try again"
    assert answers[2:] == [(Status.RESOURCE_EXHAUSTED, too_many)] * 2


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
