"""A device talks to a server over gRPC and TLS: what it does, and what it does not put up with."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import random
import threading
import time
import weakref
import zlib

import grpc
import numpy as np
import pytest
import tensorflow as tf

from tests.runtime.device import wire_server
from tests.runtime.plans import plain_plans
from tff_dpftrl.runtime.device import (
    attester,
    device_runtime,
    eligibility,
    example_store,
    known_plans,
    loaded_plans,
    participation_timer,
    server_connection,
    session,
    watcher,
    wire_session,
)
from tff_dpftrl.runtime.plans import plan_pb2, rounded_updates, signing, tensor_values
from tff_dpftrl.runtime.protocol import attestation, session_stream, wire_pb2

_PARTICIPATION = plan_pb2.Participation(
    min_sep_rounds=2, min_sep_hours=1.0, stride_edges=[1, 2, 4], times_edges=[1, 2, 3]
)
_KEY = wire_server.ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
_OTHER = wire_server.ed25519.Ed25519PrivateKey.generate()
_NOW = 1_700_000_000.0
_UPDATE = [plan_pb2.Tensor(dtype="float32"), plan_pb2.Tensor(dtype="int32", shape=[1])]


def _clock():
    return _NOW


def _plan(*args, key=_KEY, **fields):
    plan = plain_plans.plan(*args, **({"participation": _PARTICIPATION} | fields))
    return signing.sign(plan, key).SerializeToString()


def _for_ever(examples, scale):
    count = tf.while_loop(lambda i: i < 10, lambda i: [(i + 1) % 10], [tf.size(examples)])
    return [scale, count[0]]


@pytest.fixture(name="plan", scope="module")
def _plan_fixture():
    return _plan()


def _configuration(plan, /, **fields):
    values = {
        "attempt": "a-1",
        "task": "plain",
        "round_index": 7,
        "broadcast": tensor_values.to_bytes(plain_plans.SCALE),
    }
    return wire_server.configuration(**({"plan": plan} | values | fields))


class _Device:
    """A device beside its server."""

    def __init__(self, folder, server, roots=None, **patience):
        self.folder = folder
        self.eligibility = eligibility.SettableEligibility()
        self.timer = participation_timer.ParticipationTimer.open(folder / "timer", clock=_clock)
        self.examples = example_store.SqliteExampleStore.open(folder / "examples", clock=_clock)
        self.examples.add("numbers", plain_plans.examples(1.0, 2.0, 4.0), recorded=_NOW - 90)
        self.plans = loaded_plans.LoadedPlans([_KEY.public_key()])
        self.known = known_plans.MemoryPlans()
        self.attester = attester.IssuingAttester(
            attestation.TokenIssuer(wire_server.ISSUER_KEY, clock=_clock)
        )
        self.connection = server_connection.ServerConnection(
            server.address,
            server.root_certificates if roots is None else roots,
            patience=server_connection.Patience(**patience),
            shared_watcher=watcher.Watcher(interval_s=0.02),
        )

    def steps(self, population="tests"):
        return wire_session.WireSession(
            self.connection,
            population,
            attester=self.attester,
            plans=self.plans,
            examples=self.examples,
            clock=_clock,
            check_rest=self.check_rest,
            known=self.known,
        )

    def check_rest(self, *which):
        if self.rule is not None:
            self.timer.check(*which, self.rule)

    def run(self, population="tests", steps=None):
        steps = steps or self.steps(population)
        return session.run(population, steps, self.timer, self.eligibility, clock=time.monotonic)

    rule = None  # What is known of it.

    def has_participated(self):
        rule = participation_timer.ParticipationRule(2, 3)
        try:
            self.timer.check("tests", "plain", 7, rule)
        except participation_timer.TimerRefusal:
            return True
        return False

    def close(self):
        self.connection.close()
        self.timer.close()
        self.examples.close()


@pytest.fixture(name="server", scope="module")
def _server():
    server = wire_server.WireServer(_clock)
    yield server
    server.stop()


@pytest.fixture(name="make_device")
def _make_device(tmp_path, server):
    devices = []

    def make(**options):
        devices.append(_Device(tmp_path, **({"server": server} | options)))
        return devices[-1]

    yield make
    for made in devices:
        made.close()


@pytest.fixture(name="device")
def _device(make_device):
    return make_device()


def _serve(server, *messages):
    """Checks in, then sends messages; a report is awaited before an answer. Returns what came."""
    came = []

    def script(served):
        came.append((yield from served.check_in()))
        for message in messages:
            if message.WhichOneof("message") == "report_answer":
                came.append(served.receive("report"))
            yield message

    server.script = script
    return came


def test_a_session_over_the_wire(server, device, plan):
    came = _serve(server, _configuration(plan), wire_server.answer(True, 60.0, 90.0))
    result = device.run()
    assert (result.outcome, result.report.shape) == (session.SessionOutcome.COMPLETED, "-v[]+^")
    assert result.turns == (60.0, 90.0)
    check_in, report = came
    assert (check_in.population, check_in.protocol_version) == ("tests", 2)
    assert report.attempt == "a-1"
    total, count = tensor_values.from_bytes(report.update, _UPDATE)
    assert (total, count.tolist()) == (np.float32(14.0), [3])
    assert (list(report.strides), list(report.times)) == ([1, 0, 0, 0], [1, 0, 0])
    assert device.has_participated()


def test_who_is_not_selected_is_told_when_to_come_back(server, device):
    _serve(server, wire_server.come_back(30.0, 45.5, reason="enough\n\x1b[31m devices"))
    result = device.run()
    assert result.outcome is session.SessionOutcome.NOT_SELECTED
    assert result.report.shape == "-#" and not device.has_participated()
    assert (result.turns, result.reason) == ((30.0, 45.5), "enough ?[31m devices")


def test_who_comes_after_the_last_round_is_told_so(server, device):
    _serve(server, wire_server.come_back(30.0, finished=True))
    assert device.run().outcome is session.SessionOutcome.FINISHED


def test_a_plan_is_loaded_once_for_many_sessions(server, device, plan, monkeypatch):
    from tff_dpftrl.runtime.plans import device_work

    loaded, load = [], device_work.load
    monkeypatch.setattr(device_work, "load", lambda *args: loaded.append(1) or load(*args))
    for round_index in (1, 2):
        evaluation = _plan(kind=plan_pb2.EVALUATION, participation=None)
        _serve(
            server, _configuration(evaluation, round_index=round_index), wire_server.answer(True)
        )
        assert device.run().outcome is session.SessionOutcome.COMPLETED
    assert len(loaded) == 1
    assert not device.has_participated()


def _offer(server, plan, *, answer=None, versions=(1, 2), **fields):
    """Names a plan by its hash, and sends it (or another answer) if it is wanted."""
    came = []
    content = session_stream.deflated_plan(plan) if answer is None else answer

    def script(served):
        yield wire_server.challenge_of(versions=versions)
        came.append(served.receive("check_in"))
        yield _configuration(b"", plan_sha256=_sha256(plan), **fields)
        came.append(served.next_message())
        if came[-1].WhichOneof("message") == "plan_wanted":
            yield wire_pb2.FromServer(plan=wire_pb2.Plan(deflated=content))
            came.append(served.next_message())
        yield wire_server.answer(True)

    server.script = script
    return came


def _sha256(plan):
    return plan_pb2.SignedPlan.FromString(plan).sha256


def _kinds(came):
    return [message.WhichOneof("message") for message in came[1:]]


def test_a_plan_is_sent_once_to_a_device(server, make_device, tmp_path):
    plan = _plan(kind=plan_pb2.EVALUATION, participation=None)
    for kinds in (["plan_wanted", "report"], ["report"]):
        device = make_device()  # The same files, as after a restart.
        device.known = known_plans.PlanFolder(tmp_path / "plans")
        came = _offer(server, plan)
        assert device.run().outcome is session.SessionOutcome.COMPLETED
        assert _kinds(came) == kinds
        # Which plans a device has had is not in what it says of itself.
        (check_in, *_) = came
        assert {field.name for field, _ in check_in.ListFields()} == {
            *("population", "protocol_version", "runtime_version", "token")
        }


@pytest.mark.parametrize(
    "altered",
    [
        lambda plan: plan[:-1] + bytes([plan[-1] ^ 1]),
        lambda plan: plan[: len(plan) // 2],
        lambda plan: b"",
        lambda plan: _plan(kind=plan_pb2.EVALUATION, participation=None, rounded=[0]),
    ],
    ids=["signature", "short", "empty", "other"],
)
def test_a_kept_plan_that_was_altered_is_fetched_anew(server, device, tmp_path, altered):
    plan = _plan(kind=plan_pb2.EVALUATION, participation=None)
    device.known = known_plans.PlanFolder(tmp_path / "plans")
    device.known.add("tests", _sha256(plan), plan)
    (file,) = (tmp_path / "plans").iterdir()
    file.write_bytes(altered(plan))
    came = _offer(server, plan)
    assert device.run().outcome is session.SessionOutcome.COMPLETED
    assert _kinds(came) == ["plan_wanted", "report"]
    assert file.read_bytes() == plan


def test_a_server_cannot_make_a_plan_that_a_device_is_known_by(server, device):
    """Approvals are beside what is signed: a server could write a device's number into them."""
    plan = _plan(kind=plan_pb2.EVALUATION, participation=None)
    marked = plan_pb2.SignedPlan.FromString(plan)
    marked.approvals.approvals.add(key=b"device 7", signature=b"no signature")
    for content, kinds in (
        (marked.SerializeToString(), ["plan_wanted", "report"]),
        (plan, ["report"]),
    ):
        came = _offer(server, content)
        assert device.run().outcome is session.SessionOutcome.COMPLETED
        assert _kinds(came) == kinds


def test_a_kept_plan_that_nobody_signed_is_refused(server, device, tmp_path):
    """Whoever can write the folder, and has the server name the hash, gets no further."""
    forged = _plan(key=_OTHER, kind=plan_pb2.EVALUATION, participation=None)
    device.known = known_plans.PlanFolder(tmp_path / "plans")
    device.known.add("tests", _sha256(forged), forged)
    _offer(server, forged)
    result = device.run()
    assert result.outcome is session.SessionOutcome.FAILED
    assert "The plan is signed with the key" in result.reason


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"no zlib", "The plan cannot be inflated."),
        (zlib.compress(b"another plan"), "another plan than the one whose hash it named"),
        (zlib.compress(bytes(33_000_000)), "The plan has more than 32000000 bytes"),
        (zlib.compress(b"half")[:-2], "it ends too early"),
        (zlib.compress(b"whole") + b"and more", "or too late"),
    ],
    ids=["garbage", "other", "bomb", "short", "long"],
)
def test_a_plan_that_is_not_the_one_named_is_refused(server, device, plan, answer, reason):
    _offer(server, plan, answer=answer)
    result = device.run()
    assert (result.outcome, result.report.shape) == (session.SessionOutcome.FAILED, "-*")
    assert reason in result.reason
    assert not device.has_participated()
    assert device.known.get("tests", _sha256(plan)) is None


def test_an_older_server_gets_what_it_knows(server, device):
    plan = _plan(rounded=[0])
    came = []

    def script(served):
        yield wire_server.challenge_of(versions=[1])
        came.append(served.receive("check_in"))
        yield _configuration(plan)
        came.append(served.receive("report"))
        yield wire_server.answer(True)

    server.script = script
    assert device.run().outcome is session.SessionOutcome.COMPLETED
    check_in, report = came
    assert (check_in.protocol_version, list(report.scales)) == (1, [])
    total, _ = tensor_values.from_bytes(report.update, _UPDATE)
    assert total == np.float32(14.0)


def test_an_update_is_rounded_if_its_plan_says_so(server, device):
    came = _serve(server, _configuration(_plan(rounded=[0])), wire_server.answer(True))
    assert device.run().outcome is session.SessionOutcome.COMPLETED
    plan = plan_pb2.ServerPlan(update=_UPDATE, rounded=[0])
    total, count = rounded_updates.read(came[1].update, came[1].scales, plan)
    assert 14 * (1 - 1e-6) < total <= 14
    assert count.tolist() == [3]


def test_a_plan_that_rounds_what_is_summed_securely_is_refused(server, device):
    _serve(server, _configuration(_plan(rounded=[1])))
    assert "The plan cannot be met: rounded names" in device.run().reason


def test_a_late_report_has_its_reason(server, device, plan):
    _serve(server, _configuration(plan), wire_server.answer(False, 5.0, reason="late"))
    result = device.run()
    assert (result.outcome, result.turns) == (session.SessionOutcome.REPORT_REFUSED, (5.0,))
    assert (result.report.shape, result.reason) == ("-v[]+#", "late")
    assert device.has_participated()


def test_a_device_that_rests_leaves(server, device, plan):
    _serve(server, _configuration(plan), wire_server.answer())
    device.run()
    _serve(server, _configuration(plan, round_index=8))
    result = device.run()
    assert (result.outcome, result.report.shape) == (session.SessionOutcome.RESTING, "-v!")


def test_a_device_that_knows_that_it_rests_does_not_check_in(server, device, plan):
    _serve(server, _configuration(plan), wire_server.answer())
    device.run()
    device.rule = participation_timer.ParticipationRule(2, 3)
    checked_in = []

    def script(stream):
        yield wire_server.challenge_of(task="plain", round_index=8)
        with contextlib.suppress(StopIteration):
            checked_in.append(stream.receive("check_in"))

    server.script = script
    result = device.run()
    assert (result.outcome, result.report.shape) == (session.SessionOutcome.RESTING, "-!")
    assert not checked_in


@pytest.mark.parametrize(
    ("fields", "sent", "reason"),
    [
        ({"key": _OTHER}, {}, "Refused: The plan is signed with the key"),
        ({"least_runtime_version": 999}, {}, "Refused: The plan needs runtime version 999"),
        ({"ops": ["ReadFile"]}, {}, "Refused: The plan declares other operations"),
        ({"population": "others"}, {}, "Refused: The plan is for the population 'others'"),
        ({}, {"task": "other"}, "Refused: The plan is for the task 'plain', and the server sent"),
        ({"participation": None}, {}, "Refused: The plan trains and has no participation limits"),
        (
            {"participation": plan_pb2.Participation(min_sep_rounds=1)},
            {},
            "Refused: The plan's participation limits are unusable: stride_edges",
        ),
        ({}, {"broadcast": b"\xff"}, "The server's model does not fit its plan: The model cannot"),
        ({}, {"plan": b"\xff"}, "Refused: The plan cannot be read"),
    ],
)
def test_bad_plans_are_one_line_and_nothing_runs(server, device, fields, sent, reason):
    _serve(server, _configuration(_plan(**fields), **sent))
    result = device.run()
    assert (result.outcome, result.report.shape) == (session.SessionOutcome.FAILED, "-*")
    assert result.reason.startswith(reason) and "\n" not in result.reason
    assert not device.has_participated()


def test_a_forbidden_operation_is_refused(server, device):
    def reads(examples, scale):
        return [
            scale * tf.size(tf.io.read_file("/etc/passwd"), tf.float32),
            tf.size(examples)[None],
        ]

    _serve(server, _configuration(_plan(reads)))
    assert "forbidden operations: ['ReadFile']" in device.run().reason


def test_work_that_cannot_be_done_is_no_participation(server, device, plan):
    device.examples.add("numbers", [b"my secret words"])
    _serve(server, _configuration(plan))
    result = device.run()
    assert (result.report.shape, result.reason) == (
        "-v[*",
        "The work failed: InvalidArgumentError.",
    )
    assert not device.has_participated()


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_a_model_that_is_not_finite_is_no_participation(server, device, plan, number):
    broadcast = tensor_values.to_bytes([np.float32(number)])
    _serve(server, _configuration(plan, broadcast=broadcast), wire_server.answer())
    result = device.run()
    assert (result.outcome, result.report.shape) == (session.SessionOutcome.FAILED, "-*")
    assert result.reason == (
        "The server's model does not fit its plan: The model, scale, has NaN or infinite numbers."
    )
    assert not device.has_participated()


def test_old_examples_are_left_out(server, device):
    day = plan_pb2.Selection(collection="numbers", max_examples=5, max_age_hours=24)
    device.examples.clear()
    device.examples.add("numbers", plain_plans.examples(8.0), recorded=_NOW - 25 * 3600)
    device.examples.add("numbers", plain_plans.examples(1.0), recorded=_NOW - 23 * 3600)
    came = _serve(server, _configuration(_plan(selection=day)), wire_server.answer())
    device.run()
    _, report = came
    assert tensor_values.from_bytes(report.update, _UPDATE)[1].tolist() == [1]


def test_a_large_update_goes_in_parts_and_in_order(server, device):
    def large(examples, scale):
        return [scale * tf.range(1_500_000, dtype=tf.float32), tf.size(examples)[None]]

    limits = plan_pb2.Limits(memory_bytes=100_000_000, seconds=60.0, upload_bytes=7_000_000)
    came = []

    def script(served):
        yield from served.check_in()
        yield _configuration(_plan(large, limits=limits))
        while not came or came[-1].WhichOneof("message") != "report":
            came.append(served.next_message())
        yield wire_server.answer()

    server.script = script
    assert device.run().outcome is session.SessionOutcome.COMPLETED
    *parts, last = came
    assert len(parts) > 1 and not last.report.update and last.report.attempt == "a-1"
    update = b"".join(part.update_part for part in parts)
    numbers = plan_pb2.Tensor(dtype="float32", shape=[1_500_000])
    total, _ = tensor_values.from_bytes(update, [numbers, _UPDATE[1]])
    np.testing.assert_array_equal(total, 2 * np.arange(1_500_000, dtype=np.float32))


def test_a_replayed_token_is_an_attestation_failure(server, device):
    token = device.attester.token(b"n" * 32)
    device.attester.token = lambda nonce: token
    _serve(server)
    result = device.run()
    assert (result.outcome, result.report.shape) == (
        session.SessionOutcome.ATTESTATION_FAILED,
        "-?",
    )
    assert result.reason.endswith("does not accept the token: token for another nonce")
    device.attester = attester.NoAttester()
    assert device.run().reason.endswith("malformed token")


def test_no_common_version_is_told(server, device):
    server.script = lambda served: iter([wire_server.challenge_of(versions=[7, 9])])
    assert "has the protocol versions [7, 9] and this device [1, 2]" in device.run().reason


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "The server ended the session without sending the challenge."),
        ([wire_server.answer()], "The server has sent a report_answer in place of a challenge."),
        ([wire_pb2.FromServer()], "The server has sent a None in place of a challenge."),
        (
            [wire_server.challenge_of(), wire_server.challenge_of()],
            "The server has sent a challenge in place of a configuration.",
        ),
        (
            [wire_server.challenge_of()],
            "The server ended the session without sending the configuration.",
        ),
    ],
)
def test_a_server_that_keeps_no_order_is_left(server, device, messages, reason):
    server.script = lambda served: iter(messages)
    assert device.run().reason == reason


def test_a_server_that_sends_for_ever_fills_no_memory(server, device):
    server.script = lambda served: itertools.repeat(wire_server.challenge_of())
    stream = device.connection.open_stream()
    for _ in range(8):  # Of a session with a secure sum that wanted the plan.
        stream.receive(lambda: None, seconds=30, wanted="challenge")
    with pytest.raises(session.StepFailed, match="more messages than a session has"):
        stream.receive(lambda: None, seconds=30, wanted="challenge")


def test_no_message_is_made_for_a_stream_that_has_ended(server, device):
    server.script = lambda served: iter([wire_server.challenge_of()])
    stream = device.connection.open_stream()
    stream.receive(lambda: None, seconds=30, wanted="challenge")
    with pytest.raises(session.StepFailed, match="ended the session"):
        stream.receive(lambda: None, seconds=30, wanted="configuration")
    messages = iter([wire_pb2.FromDevice()] * 9)
    stream._loop.submit(stream._write_each(messages)).result(30)
    assert len(list(messages)) == 8  # The first one was refused.


def test_what_the_server_says_when_it_ends_a_session_is_told(server, device):
    def script(served):
        yield wire_server.challenge_of()
        served.receive("check_in")  # Words of a server that ends while it is written to are lost.
        served.context.abort(grpc.StatusCode.NOT_FOUND, "There is no population 'tests'.")

    server.script = script
    result = device.run()
    assert result.outcome is session.SessionOutcome.FAILED
    assert result.reason.endswith("ended the session (not found): There is no population 'tests'.")


@pytest.mark.parametrize(
    ("silent_at", "patience", "seconds"),
    [
        ("challenge", "answer_s", 2.0),  # In which to connect, too.
        ("configuration", "selection_s", 0.2),
        ("report answer", "upload_s", 0.2),
    ],
)
def test_a_silent_server_is_left_in_the_end(
    server, make_device, plan, silent_at, patience, seconds
):
    device = make_device(**{patience: seconds})
    gone = threading.Event()

    def script(served):
        served.context.add_callback(gone.set)
        if silent_at != "challenge":
            yield from served.check_in()
        if silent_at == "report answer":
            yield _configuration(plan)
            served.receive("report")
        gone.wait(20)

    device.plans.load(plan)
    server.script = script
    result = device.run()
    assert result.reason == f"The server has not sent the {silent_at} in {seconds:g} s."
    assert gone.wait(20)
    assert device.has_participated() == (silent_at == "report answer")


def _waits_for_the_end(gone, once_checked_in=lambda: None):
    def script(served):
        served.context.add_callback(gone.set)
        yield from served.check_in()
        once_checked_in()
        gone.wait(20)

    return script


def test_waiting_for_selection_ends_with_eligibility(server, device):
    gone = threading.Event()
    end = functools.partial(setattr, device.eligibility, "charging", False)
    server.script = _waits_for_the_end(gone, end)
    result = device.run()
    assert (result.outcome, result.report.shape) == (session.SessionOutcome.INTERRUPTED, "-!")
    assert result.reason == "The device is no longer charging."
    assert gone.wait(20)


def test_training_ends_with_eligibility(server, device):
    gone = threading.Event()
    plan = _plan(_for_ever)
    device.plans.load(plan)

    def script(served):
        served.context.add_callback(gone.set)
        yield from served.check_in()
        yield _configuration(plan)
        gone.wait(20)

    steps = device.steps()
    train = steps.train

    def train_until_it_may_not(work, keep_going):
        threading.Timer(0.1, setattr, (device.eligibility, "idle", False)).start()
        return train(work, keep_going)

    steps.train = train_until_it_may_not
    server.script = script
    result = device.run(steps=steps)
    assert (result.outcome, result.report.shape) == (session.SessionOutcome.INTERRUPTED, "-v[!")
    assert not device.has_participated()
    assert gone.wait(20)


def test_training_that_takes_too_long_ends(server, device):
    limits = plan_pb2.Limits(memory_bytes=1_000_000, seconds=0.2, upload_bytes=1000)
    _serve(server, _configuration(_plan(_for_ever, limits=limits)))
    result = device.run()
    assert (result.report.shape, result.reason) == (
        "-v[*",
        "The work was interrupted, or took too long.",
    )


def test_a_server_that_vanishes_before_the_plan_came_loses_nothing(make_device):
    server = wire_server.WireServer(_clock)
    device = make_device(server=server)

    def script(served):
        yield from served.check_in()
        threading.Thread(target=server.stop).start()
        while served.context.is_active():
            time.sleep(0.01)
        yield _configuration(b"never arrives")

    server.script = script
    result = device.run()
    assert (result.outcome, result.report.shape) == (session.SessionOutcome.FAILED, "-*")
    assert server.address in result.reason and "\n" not in result.reason
    assert not device.has_participated()
    result = device.run()
    assert result.reason.startswith(f"{server.address} cannot be reached: ")


@pytest.mark.parametrize("names", [("127.0.0.1",), ("other.example",)])
def test_a_server_that_proves_nothing_is_told_nothing(make_device, names):
    """Neither with a certificate that nobody trusts, nor with another name."""
    server = wire_server.WireServer(_clock, names=names)
    sessions = _serve(server)
    roots = server.root_certificates
    if names == ("127.0.0.1",):
        _, roots = wire_server.certificate("127.0.0.1")
    result = make_device(server=server, roots=roots).run()
    server.stop()
    assert result.outcome is session.SessionOutcome.FAILED
    assert f"{server.address} does not prove that it is 127.0.0.1" in result.reason
    assert not sessions


def test_a_session_is_told_of_in_a_call_of_its_own(server, device):
    _serve(server, wire_server.come_back(1.0))
    server.told.clear()
    report = device.run().report
    device.connection.send_summary("tests", report).result(timeout=20)
    [told] = server.told
    assert (told.population, told.shape, told.seconds) == ("tests", "-#", report.seconds)
    assert dict(told.versions) == report.versions


def _completes(server, device, plan):
    _serve(server, _configuration(plan), wire_server.answer())


def _is_sent_away(server, device, plan):
    _serve(server, wire_server.come_back(1.0))


def _is_left(server, device, plan):
    _serve(server, _configuration(plan))


def _is_interrupted(server, device, plan):
    end = functools.partial(setattr, device.eligibility, "charging", False)
    server.script = _waits_for_the_end(threading.Event(), end)


@pytest.mark.parametrize(
    "prepare",
    [
        _completes,
        *(pytest.param(p, marks=pytest.mark.slow) for p in (_is_sent_away, _is_left)),
        _is_interrupted,
    ],
)
def test_a_session_leaves_no_circle_that_holds_a_model(server, device, plan, prepare):
    device.plans.load(plan)
    prepare(server, device, plan)
    gc.collect()
    gc.disable()
    try:
        steps = device.steps()
        seen = weakref.ref(steps)
        device.run(steps=steps)
        del steps
        end = time.monotonic() + 5  # Another thread may just be leaving it.
        while seen() is not None and time.monotonic() < end:
            time.sleep(0.01)
        assert seen() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("address", "roots", "message"),
    [
        ("example.org", b"", "address must be HOST:PORT"),
        ("https://example.org:443", b"", "address must be HOST:PORT"),
        ("example.org:0", b"", "address must be HOST:PORT"),
        ("example.org:443,", b"", "address must be HOST:PORT.*got ''"),
        ("example.org:443", b"no certificate", "holds no certificate"),
    ],
)
def test_bad_addresses_and_certificates_are_named(address, roots, message):
    with pytest.raises(ValueError, match=message):
        server_connection.ServerConnection(address, roots)


# Several addresses.


_DEAD = "127.0.0.1:1"


class _Servers:
    """Servers that send everybody away and count them, and a connection to all of them."""

    def __init__(self, stack, count):
        self.servers, self.sessions = [], [0] * count
        identity = wire_server.certificate("127.0.0.1")
        for i in range(count):
            server = wire_server.WireServer(_clock, identity=identity)
            stack.callback(server.stop)
            server.script = functools.partial(self._script, i)
            self.servers.append(server)
        self.addresses = [server.address for server in self.servers]
        self._stack = stack

    def _script(self, number, session_):
        yield from session_.check_in()
        self.sessions[number] += 1
        yield wire_server.come_back(5.0)

    def connect(self, *addresses, current_address=None):
        connection = server_connection.ServerConnection(
            ",".join(addresses or self.addresses),
            self.servers[0].root_certificates,
            current_address=current_address,
        )
        self._stack.callback(connection.close)
        return connection

    def told(self):
        return [len(server.told) for server in self.servers]


@pytest.fixture(name="servers")
def _two_servers():
    with contextlib.ExitStack() as stack:
        yield _Servers(stack, 2)


def _own_device(connection, seed, tmp_path):
    return device_runtime.DeviceRuntime(
        connection,
        loaded_plans.LoadedPlans([_KEY.public_key()]),
        example_store.SqliteExampleStore.open(tmp_path / "examples", clock=_clock),
        participation_timer.MemoryTimer(_clock),
        attester.IssuingAttester(attestation.TokenIssuer(wire_server.ISSUER_KEY, clock=_clock)),
        eligibility.SettableEligibility(),
        generator=random.Random(seed),
    )


def _run_sessions(connection, seeds, tmp_path):
    for seed in seeds:
        ended = _own_device(connection, seed, tmp_path).run_session("tests")
        ended.summary_sent.result(30)
        yield ended.result


def test_devices_are_spread_over_a_servers_addresses_by_their_own_randomness(servers, tmp_path):
    connection = servers.connect()
    results = list(_run_sessions(connection, range(60), tmp_path))
    assert {result.outcome for result in results} == {session.SessionOutcome.NOT_SELECTED}
    assert sum(servers.sessions) == 60 == sum(servers.told())
    assert 15 <= servers.sessions[0] <= 45  # 30, and four standard errors of 3.9.
    assert servers.told() == servers.sessions
    orders = {tuple(connection.addresses(random.Random(seed))) for seed in range(20)}
    assert orders == {tuple(servers.addresses), tuple(reversed(servers.addresses))}


def test_an_address_that_does_not_answer_is_left_for_another_one(servers, tmp_path):
    connection = servers.connect(_DEAD, *servers.addresses)
    results = list(_run_sessions(connection, range(12), tmp_path))
    assert {result.outcome for result in results} == {session.SessionOutcome.NOT_SELECTED}
    # From now on it is the last to be tried, until a minute is over.
    assert {connection.addresses(random.Random(s))[-1] for s in range(20)} == {_DEAD}
    servers.servers[0].stop()
    before = servers.sessions[1]
    results = list(_run_sessions(connection, range(6), tmp_path))
    assert {result.outcome for result in results} == {session.SessionOutcome.NOT_SELECTED}
    assert servers.sessions[1] == before + 6
    assert servers.told()[1] >= 6
    servers.servers[1].stop()
    (result,) = _run_sessions(connection, [0], tmp_path)
    assert result.outcome is session.SessionOutcome.FAILED
    assert result.reason.startswith("None of 3 addresses answers; the last: 127.0.0.1:")


def test_sessions_are_told_of_elsewhere_if_their_server_is_gone(servers, tmp_path):
    connection = servers.connect()
    (result,) = _run_sessions(connection, [0], tmp_path)
    servers.servers[0].stop()
    connection.send_summary("tests", result.report, servers.addresses[0]).result(30)
    assert servers.told()[1] >= 1


def test_a_refusal_is_final_at_all_addresses(servers, tmp_path):
    for server in servers.servers:
        server.tokens = attestation.SignedTokens([_KEY.public_key()], clock=_clock)
    (result,) = _run_sessions(servers.connect(), [0], tmp_path)
    assert result.outcome is session.SessionOutcome.ATTESTATION_FAILED
    assert result.report.shape == "-?"


def test_an_address_that_changes_is_followed(servers, tmp_path):
    places = [servers.addresses[0]]

    def look():
        if not places:
            raise ValueError("No server runs.")
        return places[0]

    connection = servers.connect(places[0], current_address=look)
    list(_run_sessions(connection, [0, 1], tmp_path))
    places[0] = servers.addresses[1]
    list(_run_sessions(connection, [0, 1, 2], tmp_path))
    places.clear()
    list(_run_sessions(connection, [0], tmp_path))
    assert servers.sessions == [2, 4]
