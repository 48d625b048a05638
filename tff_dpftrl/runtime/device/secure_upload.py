"""The device's side of secure aggregation, over the stream of its session.

The plan decides, whatever the server sends: a report of such a plan is never sent in the clear.
A message that the protocol refuses (`secure_sums.refusals`) ends the session, which names the
refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ed25519
from google.protobuf import message as protobuf_message
from typing_extensions import override

from tff_dpftrl.runtime.device import attester as attester_lib
from tff_dpftrl.runtime.device import server_connection, session
from tff_dpftrl.runtime.plans import plan_pb2, secure_report, signing
from tff_dpftrl.runtime.protocol import attestation, session_stream, wire_pb2
from tff_dpftrl.secure_sums import device as participant_lib
from tff_dpftrl.secure_sums import parameters as parameters_lib
from tff_dpftrl.secure_sums import refusals, secure_sum_pb2

# Other devices' tokens are verified after reporting is closed, and may date from its beginning.
# Each is bound to one session and one key, so that an old token is of no use.
_MAX_REPORTING_S = 24 * 3600.0


class AttestedIdentity(participant_lib.Identity):
    """Identity whose key is attested: each device proves to the others that it is genuine."""

    def __init__(
        self,
        population: str,
        session_name: bytes,
        attester: attester_lib.Attester,
        issuers: Iterable[ed25519.Ed25519PublicKey],
        clock: Callable[[], float],
    ):
        """Creates the identity of one session of a secure sum.

        A token from one of `issuers` (not empty) proves that another device is genuine.
        """
        self._population, self._session, self._attester = population, session_name, attester
        self._tokens = attestation.SignedTokens(issuers, clock=clock, clock_skew_s=_MAX_REPORTING_S)

    def _nonce(self, identity_key: bytes) -> bytes:
        return session_stream.identity_nonce(self._session, self._population, identity_key)

    @override
    def make_proof(self, identity_key: bytes) -> bytes:
        """Requests a token that is bound to this device's raw public key, or fails the step."""
        token = self._attester.token(self._nonce(identity_key))
        if token is None:
            raise session.StepFailed(
                "The plan does not trust the server, and this device has no attestation token for "
                "other devices: give it an attester."
            )
        return token

    @override
    def verify(self, identity_key: bytes, proof: bytes) -> bool:
        """Returns whether another device's token is bound to its key and from a trusted issuer."""
        verdict = self._tokens.verify(proof, self._nonce(identity_key))
        return verdict is attestation.Verdict.GENUINE


class SecureUpload:
    """One upload by secure aggregation."""

    def __init__(
        self,
        plan: plan_pb2.DevicePlan,
        session_name: bytes,
        *,
        context: bytes,
        attester: attester_lib.Attester,
        issuers: Iterable[ed25519.Ed25519PublicKey],
        clock: Callable[[], float],
        packs_bits: bool = False,
    ):
        """Checks plan and session, before the device trains.

        `plan` is verified and asks for secure aggregation; `session_name` is untrusted. `context`
        is the digest of the configuration that all devices of the sum must share
        (`session_stream.secure_sum_context`). With `packs_bits`, masked vectors are packed bit by
        bit.

        It raises `signing.PlanRefusedError` if the plan or the session name is invalid, or the plan
        does not trust the server and there are no issuers.
        """
        self._plan, self._session, self._context = plan, session_name, context
        self._packs_bits = packs_bits
        self._identity = None
        try:
            self._parameters = secure_report.parameters_of(plan)
            parameters_lib.check_session(session_name)
        except ValueError as error:
            raise signing.PlanRefusedError(f"{error}") from None
        if self._parameters.threat_model is parameters_lib.ThreatModel.ACTIVE_SERVER:
            issuers = tuple(issuers)
            if not issuers:
                raise signing.PlanRefusedError(
                    "The plan does not trust the server, and this device knows no issuer of other "
                    "devices' tokens: give the issuers' public keys."
                )
            self._identity = AttestedIdentity(
                plan.population, session_name, attester, issuers, clock
            )

    @property
    def num_messages(self) -> int:
        """Number of messages that the device sends: keys, shares, masked vector, unmasking shares.

        An active server's protocol has a fifth one, a signature over the survivors.
        """
        return 4 if self._identity is None else 5

    def run(
        self,
        stream: server_connection.Stream,
        update: list[np.ndarray],
        participation: tuple[np.ndarray, np.ndarray],
        keep_going: session.KeepGoing,
        *,
        seconds: float,
    ) -> wire_pb2.ReportAnswer:
        """Sums the device's report with those of its group; returns the server's answer.

        `keep_going` is called between messages and while waiting; it raises to end the upload. Each
        message of the server may take `seconds`. It raises `session.StepFailed` if the update is
        out of the range of its sums, or the protocol refuses a message.
        """
        try:
            vector = secure_report.vector_of(self._plan, update, participation)
        except ValueError as error:
            raise session.StepFailed(f"The update cannot be summed securely: {error}") from None
        participant = participant_lib.Participant(
            self._parameters,
            self._session,
            vector,
            identity=self._identity,
            context=self._context,
            packs_bits=self._packs_bits,
        )
        del vector
        try:
            return self._converse(participant, stream, keep_going, seconds)
        finally:
            participant.forget()  # Also after an exception.

    def _converse(
        self,
        participant: participant_lib.Participant,
        stream: server_connection.Stream,
        keep_going: session.KeepGoing,
        seconds: float,
    ) -> wire_pb2.ReportAnswer:
        message, step = participant.advertise(), 0
        while True:
            keep_going()
            self.send(stream, step, message)
            answer = stream.receive(keep_going, seconds=seconds, wanted="secure sum")
            kind = answer.WhichOneof("message")
            if kind == "report_answer":
                return answer.report_answer
            if kind != "secure_sum":
                raise session.StepFailed(f"The server has sent a {kind} in place of a secure sum.")
            keep_going()
            try:
                asked = secure_sum_pb2.ToDevice.FromString(answer.secure_sum)
                message, step = participant.answer(asked), step + 1
            except refusals.ProtocolRefusedError as error:
                raise session.StepFailed(f"Refused: {type(error).__name__}: {error}") from None
            except protobuf_message.DecodeError:
                raise session.StepFailed(
                    "The server has sent a message of the secure sum that cannot be read."
                ) from None

    def send(
        self, stream: server_connection.Stream, step: int, message: secure_sum_pb2.ToServer
    ) -> None:
        """Sends the message of a step (from 0), in parts if it is large."""
        del step
        for part in session_stream.secure_sum_messages(message):
            stream.send(part)
