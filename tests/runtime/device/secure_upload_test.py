"""Devices sum their reports securely over gRPC and TLS; what a lying server asks is refused."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import threading
import time

import pytest
import tensorflow as tf
from cryptography.hazmat.primitives.asymmetric import ed25519

from tests.runtime.device import secure_rounds, wire_server
from tests.runtime.fleet import server_thread
from tests.runtime.plans import plain_plans
from tests.runtime.server import example_service
from tff_dpftrl.runtime.actors import population
from tff_dpftrl.runtime.device import (
    attester,
    device_runtime,
    eligibility,
    example_store,
    loaded_plans,
    participation_timer,
    secure_upload,
    server_connection,
    session,
    watcher,
)
from tff_dpftrl.runtime.plans import plan_pb2, secure_report, signing, tensor_values
from tff_dpftrl.runtime.protocol import attestation, session_stream
from tff_dpftrl.runtime.server import served_task, server
from tff_dpftrl.secure_sums import device as participant_lib
from tff_dpftrl.secure_sums import secure_sum_pb2, vectors
from verification import memory_store

_KEY = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
_ISSUER, _OTHER_ISSUER = wire_server.ISSUER_KEY, ed25519.Ed25519PrivateKey.generate()
_MODELS = {"honest-but-curious": 1, "active-server": 2}
_SESSION = b"s" * 32


def _sum_and_count(examples, scale):
    numbers = tf.io.parse_example(examples, {"x": tf.io.FixedLenFeature([], tf.float32)})["x"]
    total = tf.cast(tf.reduce_sum(numbers) * scale, tf.int32)
    return [total[None], tf.size(numbers)[None]]


def _sums_and_count(examples, scale):
    total, count = _sum_and_count(examples, scale)
    return [tf.repeat(total, 40), count]


def _plan(threat_model="honest-but-curious", function=_sum_and_count, **fields):
    wanted = plan_pb2.SecureAggregation(
        threat_model=_MODELS[threat_model], least_devices=3, most_devices=10
    )
    values = {
        "least_runtime_version": 2,
        "secure_sums": [plan_pb2.SecureSum(modulus=50), plan_pb2.SecureSum(largest_entry=5)],
        "secure_aggregation": wanted,
        "participation": plan_pb2.Participation(
            min_sep_rounds=2, stride_edges=[1, 2, 4], times_edges=[1, 2, 3]
        ),
    }
    return plain_plans.plan(function, **(values | fields))


class _Numbers(example_store.ExampleStore):
    def __init__(self, *numbers):
        self._examples = plain_plans.examples(*numbers)

    def select(self, collection, *, max_examples, recorded_since=None):
        return self._examples


class _NoServerSide(population.ServerStep):
    def apply(self, total, num_reports, model, state):
        return population.StepResult(b"", state, {"vector": total, "num_reports": num_reports})

    def skip(self, model, state):
        return population.StepResult(model, state, {population.SKIPPED: True})


class _Vectors(population.Summation):
    """Keeps a group's sum as it is; there is one group."""

    def zero(self):
        return None

    def accumulate(self, total, payload):
        raise AssertionError("No report is ever looked at.")

    def merge(self, total, other):
        return other

    def decode_group(self, vector, num_devices):
        return [segment.tolist() for segment in vector]


def _serve(folder, plan, store):
    demanded = secure_report.parameters_of(plan)
    task = population.Task(
        "plain",
        population.RoundSettings(
            3, 1.0, 1.0, selection_timeout=60.0, reporting_timeout=60.0, exchange_timeout=30.0
        ),
        _Vectors(),
        _NoServerSide(),
        secure_sum=demanded,
    )
    store.add_task("tests", "plain", model=tensor_values.to_bytes(plain_plans.SCALE), state=b"")
    signed = signing.sign(plan, _KEY).SerializeToString()
    served = served_task.ServedTask(
        task, lambda version: signed, vectors.packed_bytes(demanded.layout)
    )
    return server.Server.of(
        population.Population(
            "tests", (task,), heartbeat_seconds=0.1, silence_seconds=30, lease_seconds=60
        ),
        {"plain": served},
        store,
        endpoint=example_service.endpoint(
            folder,
            attestation.SignedTokens(
                [_ISSUER.public_key(), _OTHER_ISSUER.public_key()], clock=time.time
            ),
        ),
        pace=lambda now, randomness: (1.0,),
    )


def _device(connection, numbers, issuer=_ISSUER):
    return device_runtime.DeviceRuntime(
        connection,
        loaded_plans.LoadedPlans([_KEY.public_key()]),
        _Numbers(*numbers),
        participation_timer.MemoryTimer(time.time),
        attester.IssuingAttester(attestation.TokenIssuer(issuer, clock=time.time)),
        eligibility.SettableEligibility(),
        issuers=(_ISSUER.public_key(),),
    )


@contextlib.contextmanager
def _connected(folder, plan, store):
    """A connection to a server of the plan, which runs."""
    with server_thread.running(lambda: _serve(folder, plan, store)) as address:
        roots = (folder / "server.pem").read_bytes()
        connection = server_connection.ServerConnection(address, roots)
        yield connection
        connection.close()


def _run(connection, devices):
    with concurrent.futures.ThreadPoolExecutor(len(devices)) as threads:
        return list(threads.map(lambda own: own.run_session("tests").result, devices))


def _only_round(store):
    """Waits for the first round, which is committed after the devices' answers."""
    secure_rounds.until(lambda: store.history("tests", "plain"))
    (row,) = store.history("tests", "plain")
    return row


@pytest.mark.parametrize("threat_model", _MODELS)
def test_what_devices_send_adds_up_to_their_reports(tmp_path, threat_model):
    store = memory_store.MemoryStore()
    with _connected(tmp_path, _plan(threat_model), store) as connection:
        devices = [_device(connection, numbers) for numbers in ([1, 2], [3], [11, 5, 4])]
        results = _run(connection, devices)
        for own in devices:  # It is written down that they took part.
            with pytest.raises(participation_timer.TimerRefusal):
                rule = participation_timer.ParticipationRule(2, 3)
                own.timer.check("tests", "plain", 0, rule)
        row = _only_round(store)
    assert [result.report.shape for result in results] == ["-v[]+^"] * 3, results
    # One each, never before, and 2·(1 + 2 + 3 + 11 + 5 + 4) modulo 50 of six numbers.
    assert row["vector"] == [[3], [3, 0, 0, 0], [3, 0, 0], [2], [6]]
    assert row["num_reports"] == 3


def test_devices_believe_their_own_issuers_only(tmp_path):
    # The server believes issuers that the devices do not know.
    store = memory_store.MemoryStore()
    with _connected(tmp_path, _plan("active-server"), store) as connection:
        made_up = _device(connection, [1], issuer=_OTHER_ISSUER)
        results = _run(connection, [made_up, *(_device(connection, [i]) for i in (2, 3))])
    assert any("UnprovenIdentityError" in result.reason for result in results), results
    assert all(row.get(population.SKIPPED) for row in store.history("tests", "plain"))


def test_a_proof_for_another_key_is_refused_alone(tmp_path, monkeypatch):
    store = memory_store.MemoryStore()
    with _connected(tmp_path, _plan("active-server"), store) as connection:
        made_up, *others = (_device(connection, [i]) for i in (1, 2, 3))
        token, used = made_up.attester.token, []

        def replayed(nonce):
            used.append(token(nonce))
            return used[0]  # That of the check-in.

        monkeypatch.setattr(made_up.attester, "token", replayed)
        results = _run(connection, [made_up, *others])
    reasons = sorted(result.reason for result in results)
    unproven = "unusable: An identity key not proven to be a genuine device's."
    assert reasons == ["group lost", "group lost", unproven]  # Two are too few.


@pytest.mark.parametrize("version", [1, 2])
def test_masked_vectors_are_packed_bit_by_bit_for_servers_that_read_them(
    tmp_path, monkeypatch, version
):
    contents = []
    answer = participant_lib.Participant.answer

    def kept(self, message):
        sent = answer(self, message)
        contents.append(sent.masked_vector.content)
        return sent

    monkeypatch.setattr(participant_lib.Participant, "answer", kept)
    monkeypatch.setattr(session_stream, "VERSIONS", tuple(range(1, version + 1)))
    plan = _plan(function=_sums_and_count)
    store = memory_store.MemoryStore()
    with _connected(tmp_path, plan, store) as connection:
        results = _run(connection, [_device(connection, [i]) for i in (1, 2, 3)])
        row = _only_round(store)
    assert [result.report.shape for result in results] == ["-v[]+^"] * 3, results
    layout = secure_report.parameters_of(plan).layout
    wanted = vectors.packed_bytes(layout, in_bits=version == 2)
    assert [len(content) for content in contents if content] == [wanted] * 3
    assert vectors.packed_bytes(layout, in_bits=True) < vectors.packed_bytes(layout)
    assert row["vector"][3] == [12] * 40


# A server that lies.


@pytest.fixture(name="lying", scope="module")
def _lying():
    made = wire_server.WireServer(time.time)
    yield made
    made.stop()


@pytest.fixture(name="own")
def _own(lying):
    connection = server_connection.ServerConnection(lying.address, lying.root_certificates)
    yield _device(connection, [1, 2])
    connection.close()


def _script(server_, plan, *messages, **fields):
    """Configures a device and sends it messages; returns what it sent, and the end."""
    came = []

    def script(served):
        yield from served.check_in()
        yield wire_server.configuration(
            attempt="a-1",
            task="plain",
            plan=signing.sign(plan, _KEY).SerializeToString(),
            broadcast=tensor_values.to_bytes(plain_plans.SCALE),
            **({"secure_sum_session": _SESSION} | fields),
        )
        for message in messages:
            came.append(served.next_message())
            yield message(came) if callable(message) else message
        came.extend(served._requests)

    server_.script = script
    return came


def _secure(**message):
    content = secure_sum_pb2.ToDevice(**message).SerializeToString()
    return wire_server.wire_pb2.FromServer(secure_sum=content)


@pytest.mark.parametrize(
    ("plan", "fields", "reason"),
    [
        (
            _plan(),
            {"secure_sum_session": b""},
            "Refused: The plan asks for secure aggregation, and the server has named no session",
        ),
        (_plan(), {"secure_sum_session": b"short"}, "Refused: session must have 32 bytes, got 5"),
        (
            plain_plans.plan(participation=_plan().participation),
            {},
            "Refused: The server has named the session of a secure sum, and the plan asks for none",
        ),
    ],
    ids=["no session", "short", "plain"],
)
def test_plan_and_session_go_together_or_nothing_runs(lying, own, plan, fields, reason):
    came = _script(lying, plan, **fields)
    result = own.run_session("tests").result
    assert result.reason.startswith(reason), result.reason
    assert result.report.shape == "-*" and not came


def test_without_issuers_a_plan_that_does_not_trust_the_server_is_refused(lying, own):
    _script(lying, _plan("active-server"))
    own = dataclasses.replace(own, issuers=())
    result = own.run_session("tests").result
    assert "knows no issuer of other devices' tokens" in result.reason
    assert result.report.shape == "-*"


def test_who_is_vouched_for_by_nobody_leaves_before_it_says_anything(lying, own, monkeypatch):
    lying.tokens.verify = lambda token, nonce: attestation.Verdict.GENUINE
    monkeypatch.setattr(own.attester, "token", lambda nonce: None)
    came = _script(lying, _plan("active-server"))
    result = own.run_session("tests").result
    assert "this device has no attestation token" in result.reason and not came
    assert result.report.shape == "-v[]+*"


def _alone(came):
    """A directory with this device only."""
    keys = secure_sum_pb2.ToServer.FromString(came[0].secure_sum).key_advertisement
    return _secure(directory={"num_devices": 1, "members": [{"keys": keys}], "threshold": 1})


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (_secure(directory={"num_devices": 5}), "Refused: OwnKeysReplacedError: The directory"),
        (_alone, "Refused: TooFewDevicesError: A group of 1, where this device demands 3"),
        (_secure(survivors={"bitmap": b"\7"}), "Refused: OutOfOrderError: survivors"),
        (_secure(), "Refused: MalformedMessageError"),
        (
            wire_server.wire_pb2.FromServer(secure_sum=b"\xff"),
            "The server has sent a message of the secure sum that cannot be read",
        ),
        (wire_server.come_back(1.0), "The server has sent a come_back in place of a secure sum"),
    ],
    ids=["without it", "alone", "out of order", "empty", "unreadable", "come back"],
)
def test_what_the_protocol_refuses_ends_the_session_by_name(lying, own, message, reason):
    came = _script(lying, _plan(), message)
    result = own.run_session("tests").result
    assert result.reason.startswith(reason), result.reason
    assert result.report.shape == "-v[]+*"
    assert [sent.WhichOneof("message") for sent in came] == ["secure_sum"]


def test_an_answer_may_come_at_any_time_and_nothing_more_is_sent(lying, own):
    came = _script(lying, _plan(), wire_server.answer(False, 5.0, reason="group lost"))
    result = own.run_session("tests").result
    assert (result.report.shape, result.reason) == ("-v[]+#", "group lost")
    (sent,) = came
    assert not sent.secure_sum.count(b"\0\0\0\0") and len(sent.secure_sum) < 200


def test_an_update_out_of_range_is_never_sent(lying, own):
    came = _script(lying, _plan())
    result = dataclasses.replace(own, examples=_Numbers(30.0)).run_session("tests").result
    assert "sum, has integers outside [0, 49]" in result.reason and not came
    assert result.report.shape == "-v[]+*"


def test_a_server_that_falls_silent_is_left(lying):
    patience = server_connection.Patience(group_s=0.2)
    connection = server_connection.ServerConnection(
        lying.address,
        lying.root_certificates,
        patience=patience,
        shared_watcher=watcher.Watcher(interval_s=0.02),
    )
    is_left = threading.Event()

    def waits(came):
        is_left.wait(20)
        return wire_server.answer()

    _script(lying, _plan(), waits)
    result = _device(connection, [1]).run_session("tests").result
    is_left.set()
    connection.close()
    assert result.reason == "The server has not sent the secure sum in 0.2 s."


def test_between_messages_a_device_may_stop(lying, own, monkeypatch):
    forgotten = []
    participant = secure_upload.participant_lib.Participant
    forget = participant.forget
    monkeypatch.setattr(participant, "forget", lambda self: forgotten.append(self) or forget(self))

    def stops(came):
        own.eligibility.idle = False
        return _alone(came)

    came = _script(lying, _plan(), stops)
    result = own.run_session("tests").result
    assert result.outcome is session.SessionOutcome.INTERRUPTED and len(came) == 1
    assert len(forgotten) == 1  # Its secrets.


def test_a_token_is_for_one_session_population_and_key():
    def identity(population_="tests", name=_SESSION, issuer=_ISSUER):
        return secure_upload.AttestedIdentity(
            population_,
            name,
            attester.IssuingAttester(attestation.TokenIssuer(issuer, clock=time.time)),
            [_ISSUER.public_key()],
            time.time,
        )

    proof = identity().make_proof(b"key")
    assert identity().verify(b"key", proof)
    assert not identity().verify(b"other key", proof)
    assert not identity(name=b"t" * 32).verify(b"key", proof)
    assert not identity("others").verify(b"key", proof)
    assert not identity().verify(b"key", identity(issuer=_OTHER_ISSUER).make_proof(b"key"))
    twice = identity()
    assert twice.verify(b"key", proof) and not twice.verify(b"key", proof)


def test_a_token_of_the_beginning_of_reporting_holds_at_its_end():
    now = [1_700_000_000.0]
    made = secure_upload.AttestedIdentity(
        "tests",
        _SESSION,
        attester.IssuingAttester(attestation.TokenIssuer(_ISSUER, clock=lambda: now[0])),
        [_ISSUER.public_key()],
        lambda: now[0],
    )
    proof = made.make_proof(b"key")
    now[0] += 3600.0
    assert made.verify(b"key", proof)
