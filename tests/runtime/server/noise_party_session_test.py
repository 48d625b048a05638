"""Sessions of a noise party over gRPC and TLS: no device, and no round without it."""

from __future__ import annotations

import asyncio
import dataclasses

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from tests.runtime.server import example_secure_task
from tests.runtime.server import example_service as example
from tests.runtime.server.example_service import play
from tff_dpftrl.runtime.actors import events
from tff_dpftrl.runtime.protocol import noise_party as noise_party_lib
from tff_dpftrl.runtime.protocol import session_stream, wire_pb2
from tff_dpftrl.runtime.server import limits
from tff_dpftrl.secure_sums import noise_party, secure_sum_pb2

KEY = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(32))
NUMBERS = [(i, 100 * i, 999) for i in range(1, 5)]
NOISE = (5, 900, 17)
NOISED = [sum(column) % 1000 for column in zip(*NUMBERS, NOISE, strict=True)]


def _served(size=3, **changes):
    made = example_secure_task.served(len(NUMBERS), size=size, **changes)
    task = made.task
    demanded = dataclasses.replace(
        task.secure_sum, noise_parties=(KEY.public_key().public_bytes_raw(),)
    )
    return dataclasses.replace(made, task=dataclasses.replace(task, secure_sum=demanded)), demanded


class _Party:
    """A noise party of a few lines: its session, up to what it waits for."""

    def __init__(self, demanded, noise=NOISE):
        self._demanded, self._noise, self.given = demanded, noise, []

    async def check_in(self, channel, next_round=0, key=KEY, task="sum"):
        self.stream = await example.connect(channel)
        nonce = session_stream.attested_nonce(
            self.stream.challenge.challenge, "127.0.0.1", example.POPULATION
        )
        announced = noise_party_lib.announcement(key, nonce, task, next_round)
        await self.stream.check_in(noise_party=announced)
        return self

    async def join(self):
        """Waits for an attempt and sends its keys; returns the configuration."""
        told = await self.stream.receive()
        assert isinstance(told, wire_pb2.Configuration)
        self._half = noise_party.NoiseParty(
            self._demanded,
            told.secure_sum_session,
            KEY,
            lambda: example_secure_task.vector(self._noise, count=0),
            context=session_stream.secure_sum_context("sum", told.round_index, told.broadcast),
        )
        await self.stream.send(secure_sum=self._half.advertise().SerializeToString())
        return told

    async def give(self):
        """Answers the request for noise; returns the answer of the server."""
        asked = secure_sum_pb2.ToDevice.FromString(await self.stream.receive())
        for message in session_stream.secure_sum_messages(self._half.answer(asked)):
            await self.stream.call.write(message.SerializeToString())
        return await self.stream.receive()


async def _devices(channel, demanded, numbers=NUMBERS):
    take_part = example_secure_task.take_part
    return await asyncio.gather(*(take_part(channel, each, demanded) for each in numbers))


def test_a_round_waits_for_its_noise_party_and_has_its_noise(tmp_path):
    served, demanded = _served()

    async def story(channel, notes, store):
        devices = asyncio.ensure_future(_devices(channel, demanded))
        await example.until(lambda: events.PartyAway("sum", 1, 1) in notes.events)
        await example.until(lambda: len(notes.named("waiting")) == 4)
        assert not notes.of(events.RoundBegan)
        for done in (1, 2):
            party = await _Party(demanded).check_in(channel, next_round=done - 1)
            told = await party.join()
            assert (told.task, told.round_index, told.plan) == ("sum", done - 1, b"secure plan")
            answer = await party.give()
            assert answer.accepted and list(answer.turns) == [0.0]
            assert all(one.accepted for one in await devices)
            await example.until(lambda done=done: len(example.totals(store)) == done)
            row = example.released(store)[-1]
            assert row["total"] == NOISED and row["devices/reports"] == 4
            devices = asyncio.ensure_future(_devices(channel, demanded))
        devices.cancel()

    notes = play(tmp_path, story, served)
    # Nothing but devices is counted.
    assert len(notes.named("reported")) == len(notes.named("configured")) == 8
    assert notes.calls.count(("closed", "noise party")) == 2


def test_noise_that_comes_in_parts_is_added(tmp_path, monkeypatch):
    monkeypatch.setattr(session_stream, "PART_BYTES", 4096)
    size = session_stream.PART_BYTES  # Of two bytes each.
    served, demanded = _served(size)
    numbers = [[i] * size for i in range(1, 5)]

    async def story(channel, notes, store):
        party = await _Party(demanded, [7] * size).check_in(channel)
        devices = asyncio.ensure_future(_devices(channel, demanded, numbers))
        await party.join()
        assert (await party.give()).accepted and all(one.accepted for one in await devices)
        await example.until(lambda: example.totals(store))
        assert example.totals(store) == [[17] * size]

    play(tmp_path, story, served)


def test_an_attempt_that_its_noise_party_leaves_costs_its_round(tmp_path):
    served, demanded = _served()

    async def story(channel, notes, store):
        party = await _Party(demanded).check_in(channel)
        devices = asyncio.ensure_future(_devices(channel, demanded))
        await party.join()
        party.stream.call.cancel()
        # Late is who has not joined yet when the attempt ends.
        assert {one.reason for one in await devices} <= {"group lost", "late"}
        await example.until(lambda: len(store.history(example.POPULATION, "sum")) == 1)
        assert not example.released(store)  # Skipped.
        party = await _Party(demanded).check_in(channel, next_round=0)
        devices = asyncio.ensure_future(_devices(channel, demanded))
        assert (await party.join()).round_index == 1
        await party.give()
        assert all(one.accepted for one in await devices)
        await example.until(lambda: example.totals(store) == [NOISED])

    play(tmp_path, story, served)


def test_rounds_whose_noise_was_given_are_skipped(tmp_path):
    served, demanded = _served()

    async def story(channel, notes, store):
        party = await _Party(demanded).check_in(channel, next_round=2)
        devices = asyncio.ensure_future(_devices(channel, demanded))
        assert (await party.join()).round_index == 2
        await party.give()
        assert all(one.accepted for one in await devices)
        await example.until(lambda: example.totals(store) == [NOISED])
        assert len(notes.of(events.RoundSkipped)) == 2

    play(tmp_path, story, served)


def test_a_noise_party_waits_as_long_as_the_limits_allow(tmp_path):
    served, demanded = _served()

    async def story(channel, notes, store):
        party = await _Party(demanded).check_in(channel)
        away = await party.stream.receive()
        assert list(away.turns) == [0.0] and away.reason == "no round has begun"
        assert not notes.named("sent away")

    play(tmp_path, story, served, limits=limits.Limits(waiting_seconds=0.1))


@pytest.mark.parametrize(
    ("change", "code", "details"),
    [
        ({"task": "other"}, grpc.StatusCode.NOT_FOUND, "no task here names this noise party"),
        (
            {"key": ed25519.Ed25519PrivateKey.from_private_bytes(bytes([1]) * 32)},
            grpc.StatusCode.NOT_FOUND,
            "no task here names this noise party",
        ),
    ],
)
def test_a_stranger_is_no_noise_party(tmp_path, change, code, details):
    served, demanded = _served()

    async def story(channel, notes, store):
        party = await _Party(demanded).check_in(channel, **change)
        found, text = await party.stream.status()
        assert found is code and text.startswith(details)

    notes = play(tmp_path, story, served)
    assert notes.named("refused") == [("refused", "unknown noise party")]


def test_a_noise_party_must_have_signed_this_challenge(tmp_path):
    served, demanded = _served()

    async def story(channel, notes, store):
        stream = await example.connect(channel)
        announced = noise_party_lib.announcement(KEY, b"n" * 32, "sum", 0)
        await stream.check_in(noise_party=announced)
        assert (await stream.status())[0] is grpc.StatusCode.UNAUTHENTICATED

    play(tmp_path, story, served)
