"""What secure sums cost where the server may be active, over where it follows the protocol.

    PYTHONPATH=. python benchmarks/secure_threat_models.py [--devices 50 100] [--size 100000]
        [--drop-outs 0 10] [--repetitions 3]

Processor time in this process, without any network; all devices are neighbours of each other,
and make and verify attestation tokens where the server may be active. Medians over repetitions of
the median device, and of the server's whole work. Bytes are over those of the plain vector.
"""

from __future__ import annotations

import argparse
import collections
import statistics
import time

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ed25519

from tff_dpftrl.runtime.device import attester, secure_upload
from tff_dpftrl.runtime.protocol import attestation, session_stream
from tff_dpftrl.secure_sums import device as device_lib
from tff_dpftrl.secure_sums import group as group_lib
from tff_dpftrl.secure_sums import parameters, vectors

_POPULATION = "benchmark"


class _Attester(attester.Attester):
    """An issuer that vouches for everybody."""

    def __init__(self, issuer: attestation.TokenIssuer):
        self._issuer = issuer

    def token(self, nonce: bytes) -> bytes:
        return self._issuer.issue(nonce)


def run(
    threat_model: parameters.ThreatModel, num_devices: int, num_dropped: int, size: int
) -> tuple[float, float, float, float]:
    """Makes one sum; some devices drop out after they have sent shares.

    Args:
      threat_model: What the server may do.
      num_devices: Devices in the group.
      num_dropped: How many of them drop out.
      size: Entries of a vector, modulo 2³².

    Returns:
      Milliseconds of a device and of the server, and the bytes that a device sends and gets
      over those of the plain vector.
    """
    layout = (vectors.Segment(size, 2**32),)
    demanded = parameters.Parameters(layout, threat_model, least_devices=2)
    session, key = parameters.new_session(), ed25519.Ed25519PrivateKey.generate()
    issuer = attestation.TokenIssuer(key, clock=time.time)
    server_tokens = attestation.SignedTokens([key.public_key()], clock=time.time)
    rng = np.random.default_rng(0)

    def verify_proof(identity_key: bytes, proof: bytes) -> bool:
        nonce = session_stream.identity_nonce(session, _POPULATION, identity_key)
        return server_tokens.verify(proof, nonce) is attestation.Verdict.GENUINE

    def participant() -> device_lib.Participant:
        identity = None
        if threat_model is parameters.ThreatModel.ACTIVE_SERVER:
            identity = secure_upload.AttestedIdentity(
                _POPULATION, session, _Attester(issuer), [key.public_key()], time.time
            )
        vector = [rng.integers(0, 2**32, size, np.uint32)]
        return device_lib.Participant(demanded, session, vector, identity=identity)

    spent: collections.Counter[int] = collections.Counter()
    up: collections.Counter[int] = collections.Counter()
    down: collections.Counter[int] = collections.Counter()
    server_seconds = 0.0
    group = group_lib.Group(demanded, session, verify_proof=verify_proof)
    devices = [participant() for _ in range(num_devices)]
    waiting = dict.fromkeys(range(num_devices))
    while waiting:
        for index, message in waiting.items():
            if message is not None and message.WhichOneof("message") == "received_shares":
                if index >= num_devices - num_dropped:
                    group.drop(index)
                    continue
            begin = time.process_time()
            own = devices[index]
            answer = own.advertise() if message is None else own.answer(message)
            middle = time.process_time()
            group.receive(index, answer)
            server_seconds += time.process_time() - middle
            spent[index] += middle - begin
            up[index] += answer.ByteSize()
            down[index] += 0 if message is None else message.ByteSize()
        begin = time.process_time()
        waiting = group.advance()
        server_seconds += time.process_time() - begin
    stayed, plain = range(num_devices - num_dropped), vectors.packed_bytes(layout)
    return (
        1e3 * statistics.median(spent[index] for index in stayed),
        1e3 * server_seconds,
        statistics.median(up[index] for index in stayed) / plain,
        statistics.median(down[index] for index in stayed) / plain,
    )


def main() -> None:
    """Prints a row for each case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", nargs="+", type=int, default=[50, 100])
    parser.add_argument("--size", type=int, default=100_000)
    parser.add_argument("--drop-outs", nargs="+", type=float, default=[0, 10], metavar="PERCENT")
    parser.add_argument("--repetitions", type=int, default=3)
    given = parser.parse_args()
    print("| devices | gone | server | device, ms | server, ms | bytes up | bytes down |")
    print("|---|---|---|---|---|---|---|")
    for num_devices in given.devices:
        for percentage in given.drop_outs:
            for threat_model in parameters.ThreatModel:
                rows = [
                    run(
                        threat_model, num_devices, round(num_devices * percentage / 100), given.size
                    )
                    for _ in range(given.repetitions)
                ]
                device, server, up, down = map(statistics.median, zip(*rows, strict=True))
                print(
                    f"| {num_devices} | {percentage:g} % | {threat_model.value} | {device:.1f} | "
                    f"{server:.0f} | {up:.3f} | {down:.3f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
