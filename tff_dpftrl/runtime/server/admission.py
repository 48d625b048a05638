"""Admission of devices that check in: population, protocol version, attestation and plans."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import grpc

from tff_dpftrl.runtime.protocol import attestation as attestation_lib
from tff_dpftrl.runtime.protocol import noise_party as noise_party_lib
from tff_dpftrl.runtime.protocol import session_stream, wire_pb2
from tff_dpftrl.runtime.server import served_task
from tff_dpftrl.runtime.server.errors import Refused


def unknown_population() -> Refused:
    """Makes the refusal of a device of another population than the server's, or the session's."""
    return Refused(
        grpc.StatusCode.NOT_FOUND,
        "there is no such population here: correct its name, or the server's address",
        "unknown population",
    )


class Admission:
    """Checks of a check-in, up to the plans that the device can run."""

    def __init__(
        self,
        population: str,
        tasks: Mapping[str, served_task.ServedTask],
        attestation: attestation_lib.Attestation | None,
        server_names: Sequence[str],
    ):
        """Stores what check-ins are compared with.

        With `attestation` None, every connection counts as a device. Tokens are for one of
        `server_names`, the names under which devices may know the server.
        """
        self.population = population
        self._tasks = tasks
        self._attestation = attestation
        self._names = list(server_names)
        # A device may claim any version, but few exist.
        self._plans = functools.lru_cache(maxsize=64)(self._plans_for)

    def admit(self, check_in: wire_pb2.CheckIn, challenge: bytes) -> dict[str, bytes]:
        """Checks an untrusted check-in; returns the plans that the device can run, by task.

        It raises `Refused` if the device cannot take part.
        """
        self._check_version(check_in)
        self._attest(check_in.token, challenge)
        plans = self._plans(check_in.runtime_version)
        if not plans:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"no task has a plan for version {check_in.runtime_version} of the runtime: "
                "update the device",
                "no plan for its version",
            )
        return plans

    def admit_noise_party(self, check_in: wire_pb2.CheckIn, challenge: bytes) -> bytes:
        """Checks the untrusted check-in of a noise party, which has a key in place of a token.

        Returns the serialised plan of the party's task, for its version. It raises `Refused` if no
        task here names the party, or it has not signed.
        """
        self._check_version(check_in)
        party = check_in.noise_party
        task = self._tasks.get(party.task)
        if task is None or party.key not in task.task.noise_parties:
            raise Refused(
                grpc.StatusCode.NOT_FOUND,
                "no task here names this noise party: correct its task, or the server's address",
                "unknown noise party",
            )
        nonces = [
            session_stream.attested_nonce(challenge, name, self.population) for name in self._names
        ]
        if not noise_party_lib.is_signed(party, nonces):
            raise Refused(
                grpc.StatusCode.UNAUTHENTICATED,
                "the noise party has not signed the challenge of this server",
                "noise party not genuine",
            )
        plan = self._plans(check_in.runtime_version).get(party.task)
        if plan is None:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the task has no plan for version {check_in.runtime_version} of the runtime: "
                "update the noise party",
                "no plan for its version",
            )
        return plan

    def _check_version(self, check_in: wire_pb2.CheckIn) -> None:
        """Refuses a check-in for another population, or of another version of the protocol."""
        if check_in.population != self.population:
            raise unknown_population()
        if check_in.protocol_version not in session_stream.VERSIONS:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the server speaks versions {list(session_stream.VERSIONS)} of the protocol, "
                f"not {check_in.protocol_version}: update the device",
                "no common version",
            )

    def _plans_for(self, runtime_version: int) -> dict[str, bytes]:
        plans = {name: task.plan_for(runtime_version) for name, task in self._tasks.items()}
        return {name: plan for name, plan in plans.items() if plan is not None}

    def _attest(self, token: bytes, challenge: bytes) -> None:
        if self._attestation is None:
            return
        verdict = attestation_lib.Verdict.OTHER_NONCE
        for i, name in enumerate(self._names):
            nonce = session_stream.attested_nonce(challenge, name, self.population)
            verdict = self._attestation.verify(token, nonce)
            if verdict is attestation_lib.Verdict.GENUINE:
                if i:  # Most devices know the server by one name.
                    self._names.insert(0, self._names.pop(i))
                return
            if verdict is not attestation_lib.Verdict.OTHER_NONCE:
                break
        raise Refused(grpc.StatusCode.UNAUTHENTICATED, verdict.value, verdict.value)
