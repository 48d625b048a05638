"""The server of a secure sum with noise parties, played by an audit against their code.

The audit plays a server that colludes with all devices of the group but one. It removes every mask
that it can compute. First the vector of that device is left under the masks of the noise parties,
then the vector with their noise. The guarantee is about these two views: the first must be uniform
whatever the vector is, and the second must have the claimed noise, anew in each attempt.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from scipy import special, stats

from tff_dpftrl import validation
from tff_dpftrl.auditing import audit_report
from tff_dpftrl.auditing.evidence import correlations
from tff_dpftrl.auditing.recount import findings
from tff_dpftrl.secure_sums import (
    device,
    keys,
    masks,
    parameters,
    refusals,
    secret_sharing,
    secure_sum_pb2,
    vectors,
)

_LEAST_DEVICES = 4  # So that the others hold enough shares of one device's secrets.
_BINS = 16
_LEAST_MODULUS = 2**12  # Of a segment whose entries fall evenly enough into the bins.


class Member(Protocol):
    """Device or noise party in one session, as `device.Participant` or `noise_party.NoiseParty`."""

    def advertise(self) -> secure_sum_pb2.ToServer:
        """Makes the first message."""

    def answer(self, message: secure_sum_pb2.ToDevice) -> secure_sum_pb2.ToServer:
        """Answers the server's next message."""


MakeDevice = Callable[[parameters.Parameters, bytes, bytes, vectors.Vector], Member]
"""Function of parameters, session, context and vector that makes a device."""
MakeParty = Callable[[parameters.Parameters, bytes, bytes, int, int], Member]
"""Function of parameters, session, context, number of the party and of the attempt that makes a
noise party. It is called for attempts in increasing order."""


def honest_device(
    demanded: parameters.Parameters, session: bytes, context: bytes, vector: vectors.Vector
) -> Member:
    """Makes a device of this package."""
    return device.Participant(demanded, session, vector, context=context)


@dataclasses.dataclass(frozen=True, eq=False)
class Attempt:
    """View that the server has of one device's vector in one attempt.

    Attributes:
      before: Vector of the device under the masks of the noise parties.
      after: Vector of the device with the noise of all parties.
    """

    vector: vectors.Vector
    before: vectors.Vector
    after: vectors.Vector


class _League:
    """A server and all devices but the first, which is the audited one, in one session."""

    def __init__(self, demanded: parameters.Parameters, context: bytes, *, session: bytes = b""):
        self.demanded, self.context = demanded, context
        self.session = session or parameters.new_session()
        self.bound = parameters.bound_session(self.session, context)
        self.noise_session = demanded.noise_session(self.bound)
        neighbours = demanded.least_neighbours or 0
        self.num_devices = max(_LEAST_DEVICES, demanded.least_devices, neighbours + 1)
        number = self.num_devices - 1
        self._channels = [keys.KeyPair() for _ in range(number)]
        self._masks = [keys.KeyPair() for _ in range(number)]
        self._threshold = demanded.threat_model.least_threshold(self.num_devices)

    def directory(
        self,
        own: secure_sum_pb2.KeyAdvertisement,
        noise_parties: Sequence[secure_sum_pb2.NoisePartyKeys],
    ) -> secure_sum_pb2.ToDevice:
        """Makes the directory that the audited device gets."""
        message = secure_sum_pb2.ToDevice()
        directory = message.directory
        directory.num_devices, directory.threshold = self.num_devices, self._threshold
        directory.members.add(index=0, keys=own)
        for i, (channel, mask) in enumerate(zip(self._channels, self._masks, strict=True), 1):
            public = {"encryption_key": channel.public, "mask_key": mask.public}
            directory.members.add(index=i, keys=public)
        directory.noise_parties.extend(noise_parties)
        return message

    def request(self, own: secure_sum_pb2.KeyAdvertisement) -> secure_sum_pb2.ToDevice:
        """Makes the request that a noise party gets, for the sum of all devices."""
        message = secure_sum_pb2.ToDevice()
        public = [own.encryption_key, *(channel.public for channel in self._channels)]
        for i, key in enumerate(public):
            message.noise_request.devices.add(index=i, encryption_key=key)
        return message

    def unmask(
        self,
        masked: masks.MaskedSum,
        own: secure_sum_pb2.KeyAdvertisement,
        shares: secure_sum_pb2.Shares,
    ) -> None:
        """Removes all masks of the audited device that its neighbours can compute together."""
        opened = {}
        for ciphertext in list(shares.ciphertexts)[: self._threshold]:
            i = ciphertext.index
            channel = self._channels[i - 1].channel(self.bound, i, 0, own.encryption_key)
            content = channel.open(ciphertext.content) or b""
            opened[i + 1] = int.from_bytes(content[: secret_sharing.SHARE_BYTES], "big")
        seed = secret_sharing.Recovery(tuple(opened)).recover(list(opened.values()))
        known = [keys.self_mask(seed, self.bound, 0)[0]]
        known += [
            pair.mask_key(self.bound, i, 0, own.mask_key) for i, pair in enumerate(self._masks, 1)
        ]
        masked.subtract_masks(known)

    def own_noise_masks(self, party: secure_sum_pb2.NoisePartyKeys) -> list[bytes]:
        """Returns the keys of the masks that a noise party has in common with the league."""
        return [
            channel.noise_mask_key(self.noise_session, i, party.mask_key)
            for i, channel in enumerate(self._channels, 1)
        ]

    def received_shares(self) -> secure_sum_pb2.ToDevice:
        """Makes the shares of the league's devices, which the audited one need not open."""
        message = secure_sum_pb2.ToDevice()
        content = bytes(keys.SEALED_SHARES_BYTES)
        for i in range(1, self.num_devices):
            message.received_shares.ciphertexts.add(index=i, content=content)
        return message


def play(
    demanded: parameters.Parameters,
    make_party: MakeParty,
    contexts: Sequence[bytes],
    *,
    make_device: MakeDevice = honest_device,
    seed: int = 0,
) -> list[Attempt]:
    """Plays the server in some attempts, each with a random vector of the audited device.

    The parameters are those of an honest-but-curious server: identity keys are no matter for the
    noise. A side that refuses an attempt raises ProtocolRefusedError: nothing is wrong in it.
    """
    if not demanded.noise_parties:
        raise validation.UsageError("demanded.noise_parties is empty: there is nothing to audit.")
    if demanded.threat_model is not parameters.ThreatModel.HONEST_BUT_CURIOUS:
        raise validation.UsageError(
            f"demanded.threat_model is {demanded.threat_model.value}: replace it by "
            "HONEST_BUT_CURIOUS, under which the server sees no less."
        )
    rng = np.random.default_rng(seed)
    attempts = []
    for number, context in enumerate(contexts):
        league = _League(demanded, context)
        vector = [
            rng.integers(0, segment.modulus, segment.size, np.uint64).astype(segment.dtype)
            for segment in demanded.layout
        ]
        audited = make_device(demanded, league.session, context, vector)
        parties = [
            make_party(demanded, league.session, context, i, number)
            for i in range(len(demanded.noise_parties))
        ]
        own = audited.advertise().key_advertisement
        noise_keys = [party.advertise().noise_party_keys for party in parties]
        shares = audited.answer(league.directory(own, noise_keys)).shares
        masked = masks.MaskedSum(demanded.layout)
        sent = audited.answer(league.received_shares()).masked_vector
        masked.add(vectors.unpack(sent.content, demanded.layout))
        league.unmask(masked, own, shares)
        before = masked.value()
        for party, keys_ in zip(parties, noise_keys, strict=True):
            sent = party.answer(league.request(own)).masked_vector
            masked.add(vectors.unpack(sent.content, demanded.layout))
            masked.add_masks(league.own_noise_masks(keys_))
        attempts.append(Attempt(vector, before, masked.value()))
    return attempts


def _differences(
    layout: vectors.Layout, seen: vectors.Vector, vector: vectors.Vector
) -> vectors.Vector:
    """Returns what was seen less the vector, modulo each modulus."""
    return [
        (a.astype(np.uint64) - b.astype(np.uint64)) % np.uint64(segment.modulus)
        if segment.is_power_of_two
        else ((a.astype(np.int64) - b.astype(np.int64)) % segment.modulus).astype(np.uint64)
        for segment, a, b in zip(layout, seen, vector, strict=True)
    ]


def hidden(
    demanded: parameters.Parameters, attempts: Sequence[Attempt], error_rate: float
) -> audit_report.Finding:
    """Tests that before the noise comes, nothing is seen of a vector.

    What is left of a vector is uniform, as is its difference from that of the attempt before.
    """
    left = [_differences(demanded.layout, a.before, a.vector) for a in attempts]
    samples: list[tuple[str, list[np.ndarray]]] = [("masks", []), ("masks of two attempts", [])]
    for i, segment in enumerate(demanded.layout):
        if segment.modulus < _LEAST_MODULUS:
            continue
        columns = [every[i] for every in left]
        between = [
            _differences((segment,), [a], [b])[0]
            for a, b in zip(columns, columns[1:], strict=False)
        ]
        for (_, entries), new in zip(samples, (columns, between), strict=True):
            entries += [np.floor(every / segment.modulus * _BINS) for every in new]
    wrong, sizes = [], []
    for name, entries in samples:
        if not entries:
            continue
        values = np.minimum(np.concatenate(entries), _BINS - 1).astype(np.int64)
        sizes.append(len(values))
        chance = float(stats.chisquare(np.bincount(values, minlength=_BINS)).pvalue)
        if chance <= error_rate / len(samples):
            wrong.append(f"the {name} of the noise parties are not uniform (p-value {chance:.2g})")
    finding = findings.judged(
        "secure sum: before the noise, all others in league with the server",
        wrong,
        f"Of {sum(sizes)} entries that are left of vectors nothing can be told from uniform ones",
    )
    power = ""
    if sizes and not wrong:
        critical = stats.chi2.isf(error_rate / len(samples), _BINS - 1)
        distance = special.chndtrinc(critical, _BINS - 1, 1.0 - correlations.POWER)
        # Entries without a mask are all in the first bin.
        share = math.sqrt(distance / (_BINS - 1) / min(sizes))
        power = f"{share:.2%} of the entries without a mask"
    return dataclasses.replace(finding, error_rate=error_rate, trials=sum(sizes), power=power)


def noise(
    demanded: parameters.Parameters,
    attempts: Sequence[Attempt],
    segment: int,
    covariance: np.ndarray,
    error_rate: float,
) -> audit_report.Finding:
    """Tests that what comes with a vector is the claimed noise, anew in each attempt.

    `attempts` include abandoned ones. The covariance, shape [attempts, attempts], is the claimed
    one of all parties together on one entry, in steps of the grid. Larger noise is no violation.
    """
    modulus = demanded.layout[segment].modulus
    rows = []
    for attempt in attempts:
        [left] = _differences(
            (demanded.layout[segment],), [attempt.after[segment]], [attempt.vector[segment]]
        )
        left = left.astype(np.int64)
        rows.append(np.where(left > modulus // 2, left - modulus, left).astype(np.float64))
    drawn = np.stack(rows)
    white = np.linalg.solve(np.linalg.cholesky(covariance), drawn)
    chance = float(stats.chi2.cdf(np.sum(white**2), white.size))
    wrong = []
    if chance <= error_rate / 2:
        wrong.append(
            f"its variance is {np.mean(white**2):.3g} times the claimed one (p-value {chance:.2g})"
        )
    wrong += [
        f"attempts {j + 1} and {i + 1} have the same noise"
        for i in range(len(drawn))
        for j in range(i)
        if np.array_equal(drawn[i], drawn[j])
    ]
    scan = correlations.Scan()
    pairs = np.tri(len(white), k=-1, dtype=bool)
    scan.add(white, white, "that of attempts {} and {}", pairs)
    found = scan.finding("attempts", error_rate / 2)
    largest = found.says.removesuffix(".")
    if found.outcome == "violated":
        wrong.append(largest)
    finding = findings.judged(
        "secure sum: noise of each attempt",
        wrong,
        f"In {len(drawn)} attempts it is as claimed, and of no two the same. {largest}",
    )
    return dataclasses.replace(
        finding, error_rate=error_rate, trials=drawn.size, power="" if wrong else found.power
    )


def refused(
    demanded: parameters.Parameters,
    make_party: MakeParty,
    *,
    make_device: MakeDevice = honest_device,
    attempt: int = 0,
) -> audit_report.Finding:
    """Tests that device and noise party refuse what an active server may try."""
    context, other = b"audit", b"another round or model"
    vector, wrong, tried = vectors.zeros(demanded.layout), [], 0

    def keys_for(league: _League) -> list[secure_sum_pb2.NoisePartyKeys]:
        nonlocal attempt
        attempt += 1
        return [
            make_party(league.demanded, league.session, league.context, i, attempt)
            .advertise()
            .noise_party_keys
            for i in range(len(demanded.noise_parties))
        ]

    def forged(league: _League) -> list[secure_sum_pb2.NoisePartyKeys]:
        made = keys_for(league)
        made[0].mask_key = keys.KeyPair().public
        return made

    def twice(league: _League) -> list[secure_sum_pb2.NoisePartyKeys]:
        made = keys_for(league)
        return [*made, made[0]]

    directories: dict[str, Callable[[_League], list[secure_sum_pb2.NoisePartyKeys]]] = {
        "a group without a noise party": lambda league: keys_for(league)[1:],
        "a noise party twice": twice,
        "a key that the server made": forged,
        "keys of another session": lambda league: keys_for(_League(demanded, context)),
        "keys of another round": lambda league: keys_for(
            _League(demanded, other, session=league.session)
        ),
        "keys for smaller groups": lambda league: keys_for(
            _League(
                dataclasses.replace(demanded, least_devices=demanded.least_devices + 1),
                context,
                session=league.session,
            )
        ),
    }
    for name, make in directories.items():
        league = _League(demanded, context)
        audited = make_device(demanded, league.session, context, vector)
        own = audited.advertise().key_advertisement
        message = league.directory(own, make(league))
        tried += 1
        if not _refuses(audited, message):
            wrong.append(f"a device accepts {name}")
    for name in ("a sum of too few devices", "one device twice", "a second request"):
        league = _League(demanded, context)
        attempt += 1
        party = make_party(demanded, league.session, context, 0, attempt)
        party.advertise()
        message = league.request(
            secure_sum_pb2.KeyAdvertisement(encryption_key=keys.KeyPair().public)
        )
        listed = message.noise_request.devices
        if name == "a sum of too few devices":
            del listed[demanded.least_devices - 1 :]
        elif name == "one device twice":
            listed[1].encryption_key = listed[0].encryption_key
        else:
            party.answer(message)
        tried += 1
        if not _refuses(party, message):
            wrong.append(f"a noise party answers {name}")
    return findings.judged(
        "secure sum: attempts of an active server",
        wrong,
        f"Each of {tried} was refused by name",
    )


def _refuses(member: Member, message: secure_sum_pb2.ToDevice) -> bool:
    try:
        member.answer(message)
    except refusals.ProtocolRefusedError:
        return True
    return False
