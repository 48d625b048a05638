"""A noise party's sessions with the server, one for each attempt at a round.

    server  Challenge
    party   CheckIn, signed with its key, and with the next round whose noise it has not given
    server  ComeBack; or Configuration of an attempt
    party   NoisePartyKeys of the secure sum
    server  NoiseRequest, when the sum is ready but for the noise
    party   MaskedVector, after the ledger has the round
    server  ReportAnswer

What the server asks for is checked first: a request that the ledger or the promise forbids ends the
session, and no noise is sent.
"""

from __future__ import annotations

import dataclasses
import enum
import random
import time
from collections.abc import Callable

from cryptography.hazmat.primitives.asymmetric import ed25519
from google.protobuf import message as protobuf_message

from tff_dpftrl.runtime.device import backoff, server_connection, session
from tff_dpftrl.runtime.noise_party import ledger as ledger_lib
from tff_dpftrl.runtime.noise_party import promise as promise_lib
from tff_dpftrl.runtime.noise_party import rows as rows_lib
from tff_dpftrl.runtime.plans import allowed_ops, plan_pb2
from tff_dpftrl.runtime.protocol import noise_party as noise_party_protocol
from tff_dpftrl.runtime.protocol import session_stream, wire_pb2
from tff_dpftrl.secure_sums import noise_party as noise_party_lib
from tff_dpftrl.secure_sums import parameters as parameters_lib
from tff_dpftrl.secure_sums import refusals, secure_sum_pb2, vectors

_LARGEST_ATTEMPT = 200  # Characters of an attempt's name.
_LONGEST_ROUND_INDEX = 2**31 - 1
_LONGEST_TURN_S = 60.0
_SHORTEST_TURN_S = 1.0

WAITS = backoff.Waits(after_failure_s=2.0, longest_s=60.0)
"""Back-off of a party, short because rounds wait for it."""


class Ending(enum.Enum):
    """Kind of the end of a session; the value says it in words."""

    SUMMED = "the noise is in the sum"
    NOT_SUMMED = "the noise was given, and is in no sum"
    NOT_ASKED = "no noise was asked for"
    FINISHED = "all rounds are done"


@dataclasses.dataclass(frozen=True)
class Ended:
    """End of a session."""

    ending: Ending  # How it ended.
    reason: str  # Sentence for the operator.
    wait_s: float = 0.0  # Seconds after which to check in again.


class Party:
    """Noise party of one task; for one thread."""

    def __init__(
        self,
        connection: server_connection.ServerConnection,
        promise: promise_lib.Promise,
        ledger: ledger_lib.Ledger,
        rows: rows_lib.Rows,
        key: ed25519.Ed25519PrivateKey,
        *,
        clock: Callable[[], float] = time.time,
        generator: random.Random | None = None,
    ):
        """Begins without a session; `key` is the private key of the party.

        `clock` is that of the ledger, in seconds since 1970. `generator` draws the order of
        addresses and the jitter.
        """
        self._connection, self._promise, self._ledger = connection, promise, ledger
        self._rows, self._key, self._clock = rows, key, clock
        self._generator = random.SystemRandom() if generator is None else generator
        self._plans = promise_lib.plan_hashes(promise.task)
        self._row: int | None = None  # Row of this session, once it is in the ledger.

    def run(
        self,
        *,
        wait: Callable[[float], None],
        should_stop: Callable[[], bool] = lambda: False,
        progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Has sessions until the task is finished; failures are followed by a back-off.

        `wait` sleeps for a number of seconds. `should_stop` is called before each session. It
        raises OSError or ValueError if the ledger cannot be used, or is damaged.
        """
        failures, said = 0, ""
        while not should_stop():
            # Also when all noise is given: a server that has lost the last round skips it then.
            is_given = self._ledger.next_row >= self._promise.num_rounds
            try:
                ended = self.run_session()
            except (
                session.StepFailed,
                session.AttestationFailed,
                ledger_lib.NoiseRefusedError,
            ) as error:
                refused = isinstance(error, ledger_lib.NoiseRefusedError)
                last = self._ledger.last()
                is_summed = last is not None and last.outcome == ledger_lib.SUMMED
                if is_given and is_summed and not refused:
                    progress(f"The noise of all rounds was given, and the server is gone: {error}")
                    return
                failures += 1
                line = f"Refused: {error}" if refused else str(error)
                if self._row is not None:
                    line += f" The noise of round {self._row} was given: it is used up."
                seconds = WAITS.back_off_s(failures, self._generator)
                if line != said:  # Not each time, while the server is away.
                    progress(f"{line} (again in {seconds:.0f} s)")
                said = line
            else:
                failures, seconds = 0, ended.wait_s
                if ended.ending is not Ending.NOT_ASKED or ended.reason != said:
                    progress(ended.reason)
                said = ended.reason
                if ended.ending is Ending.FINISHED:
                    return
            if seconds:
                wait(seconds)

    def run_session(self) -> Ended:
        """Has one session with the server, and returns how it ended.

        It raises `StepFailed` if the server cannot be reached or breaks the protocol,
        `AttestationFailed` if the server does not accept the party, and `NoiseRefusedError` if the
        server asks for noise that must not be given.
        """
        first = self._ledger.next_row
        if first < self._promise.num_rounds:
            self._rows.prepare()
        self._row = None
        stream: server_connection.Stream | None = None
        reason = "the server has no address."
        for address in self._connection.addresses(self._generator):
            stream = self._connection.open_stream(address, self._promise.task.terms.population)
            try:
                challenge = self._receive(
                    stream, ("challenge",), self._connection.patience.answer_s
                )
            except session.StepFailed as error:
                reason = str(error)
                stream.close()
                self._connection.avoid(address)
                continue
            try:
                return self._converse(stream, challenge, first)
            finally:
                stream.close()
        raise session.StepFailed(reason)

    def _converse(
        self, stream: server_connection.Stream, challenge: wire_pb2.Challenge, first: int
    ) -> Ended:
        patience = self._connection.patience
        version = max(set(challenge.protocol_versions) & set(session_stream.VERSIONS), default=0)
        if not version:
            raise session.StepFailed(
                f"The server has the protocol versions {sorted(challenge.protocol_versions)[:10]} "
                f"and this party {list(session_stream.VERSIONS)}: update the older one."
            )
        terms = self._promise.task.terms
        nonce = session_stream.attested_nonce(
            challenge.challenge, stream.server_name, terms.population
        )
        check_in = wire_pb2.CheckIn(
            population=terms.population,
            protocol_version=version,
            runtime_version=allowed_ops.RUNTIME_VERSION,
            noise_party=noise_party_protocol.announcement(self._key, nonce, terms.task, first),
        )
        stream.send(wire_pb2.FromDevice(check_in=check_in))
        kinds = ("configuration", "come_back")
        answer = self._receive(stream, kinds, patience.selection_s)
        if isinstance(answer, wire_pb2.ComeBack):
            stream.finish()
            return self._sent_away(answer)
        return self._answer_attempt(stream, answer, first, session_stream.sends_less(version))

    def _sent_away(self, answer: wire_pb2.ComeBack) -> Ended:
        reason = server_connection.one_line(answer.reason)
        if answer.finished:
            return Ended(Ending.FINISHED, f"All rounds are done: {reason}")
        turn = min(answer.turns, default=_LONGEST_TURN_S)
        wait_s = min(max(turn, _SHORTEST_TURN_S), _LONGEST_TURN_S)
        return Ended(Ending.NOT_ASKED, f"The server asks for no noise now: {reason}", wait_s)

    def _answer_attempt(
        self,
        stream: server_connection.Stream,
        configuration: wire_pb2.Configuration,
        first: int,
        packs_bits: bool,
    ) -> Ended:
        row = configuration.round_index
        attempt, session_name = self._check(configuration)
        asked = self._promise.attempt(configuration.broadcast)
        self._promise.check_clip_norm(row, asked.clip_norm, self._ledger.last())
        integers, count, entropy = self._rows.integers(row, asked.round_seed)
        vector = self._promise.vector(integers, count)
        num_devices = 0

        def give() -> vectors.Vector:
            now = self._clock()
            given = ledger_lib.Given(
                row, attempt, session_name, asked.clip_norm, num_devices, now, entropy
            )
            self._ledger.give(given, first)
            self._row = row
            return vector

        party = noise_party_lib.NoiseParty(
            self._promise.parameters,
            session_name,
            self._key,
            give,
            context=session_stream.secure_sum_context(
                configuration.task, row, configuration.broadcast
            ),
            packs_bits=packs_bits,
        )
        try:
            self._send(stream, party.advertise())
            while True:
                seconds = self._connection.patience.group_s
                answer = self._receive(stream, ("secure_sum", "report_answer"), seconds)
                if isinstance(answer, wire_pb2.ReportAnswer):
                    stream.finish()
                    return self._ended(row, num_devices, answer)
                request = _parsed(answer)
                num_devices = len(request.noise_request.devices)
                self._send(stream, party.answer(request))
        except refusals.ProtocolRefusedError as error:
            raise ledger_lib.NoiseRefusedError(f"{type(error).__name__}: {error}") from None
        finally:
            party.forget()

    def _check(self, configuration: wire_pb2.Configuration) -> tuple[str, bytes]:
        """Returns attempt and session; refuses another task, or what the ledger forbids."""
        task, row = self._promise.task.name, configuration.round_index
        if configuration.task != task:
            other = server_connection.one_line(configuration.task)
            raise ledger_lib.NoiseRefusedError(
                f"the server asks for noise of the task {other!r}, and this is for {task!r}."
            )
        plan = configuration.plan_sha256
        if configuration.plan:
            plan = _hash_in(configuration.plan)
        if plan and plan not in self._plans:
            raise ledger_lib.NoiseRefusedError(
                f"the server has a plan {plan.hex()[:16]} of the task {task!r}, and this party "
                f"knows {', '.join(sorted(known.hex()[:16] for known in self._plans))}."
            )
        attempt = configuration.attempt
        if not 0 < len(attempt) <= _LARGEST_ATTEMPT or not attempt.isprintable():
            raise ledger_lib.NoiseRefusedError("the server names no attempt.")
        if row >= self._promise.num_rounds or row > _LONGEST_ROUND_INDEX:
            raise ledger_lib.NoiseRefusedError(
                f"the server asks for the noise of round {row}, and the task has "
                f"{self._promise.num_rounds} rounds."
            )
        try:
            session_name = parameters_lib.check_session(configuration.secure_sum_session)
        except ValueError as error:
            raise ledger_lib.NoiseRefusedError(f"{error}") from None
        self._ledger.check(row, attempt, session_name)
        return attempt, session_name

    def _ended(self, row: int, num_devices: int, answer: wire_pb2.ReportAnswer) -> Ended:
        reason = server_connection.one_line(answer.reason)
        if self._row is None:
            return Ended(
                Ending.NOT_ASKED,
                f"Round {row}: the attempt ended without the noise, which is kept: {reason}",
            )
        outcome = ledger_lib.SUMMED if answer.accepted else reason or "refused"
        self._ledger.note(row, outcome)
        if answer.accepted:
            return Ended(
                Ending.SUMMED, f"Round {row}: noise given to the sum of {num_devices} devices."
            )
        return Ended(
            Ending.NOT_SUMMED,
            f"Round {row}: noise given, and the attempt failed ({outcome}). It is used up: the "
            f"next one is that of round {row + 1}.",
        )

    def _send(self, stream: server_connection.Stream, message: secure_sum_pb2.ToServer) -> None:
        for part in session_stream.secure_sum_messages(message):
            stream.send(part)

    def _receive(self, stream: server_connection.Stream, kinds: tuple[str, ...], seconds: float):
        wanted = kinds[0].replace("_", " ")
        message = stream.receive(lambda: None, seconds=seconds, wanted=wanted)
        kind = message.WhichOneof("message")
        if kind not in kinds:
            raise session.StepFailed(f"The server has sent a {kind} in place of a {wanted}.")
        return getattr(message, kind)


def _parsed(content: bytes) -> secure_sum_pb2.ToDevice:
    try:
        return secure_sum_pb2.ToDevice.FromString(content)
    except protobuf_message.DecodeError:
        raise session.StepFailed(
            "The server has sent a message of the secure sum that cannot be read."
        ) from None


def _hash_in(content: bytes) -> bytes:
    """Returns the hash in a serialised `SignedPlan`; one that no plan has if it cannot be read."""
    try:
        return plan_pb2.SignedPlan.FromString(content).sha256 or b"?"
    except protobuf_message.DecodeError:
        return b"?"
